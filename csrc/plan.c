/* Plan: the executor of compiled graphs.
 *
 * A plan is a list of instructions over registers that hold Python objects. Registers are numbered: inputs first, then what
 * instructions define. The program is data made by `magneto/inductor/codegen/plan.py`:
 *
 *   ("CONST",  dst, object)                          once, when the plan is built
 *   ("ALLOC",  dst, callable, args, kwargs, keep)    callable(*args, **kwargs) with constant arguments; a tensor of the CPU that is large lies in memory of
 *                                                    earlier ones from the second call on, unless it is kept (blocks.c)
 *   ("VIEW",   dst, src, callable, args, keep)       callable(src, *args)
 *   ("KERNEL", address, registers, release_gil)      int f(void *const *data): pointers of the registers' tensors; the result
 *                                                    is 0, or has bits 1 (index out of range), 2 (integer division by zero), 4 (invalid.py)
 *   ("TABLE",  address, registers, work, release_gil) int f(void *const *data, const int64_t *work): as KERNEL; `work` is constant
 *   ("CALL",   dst, callable, registers, kwnames)    the last len(kwnames) registers are keyword arguments; dst -1 drops the result
 *   ("LIST",   dst, registers)
 *   ("UNPACK", src, dsts)                            dst -1 skips an element
 *   ("LAYOUT", register, callable, sizes, strides)   callable(tensor, sizes, strides) in place of a tensor that is laid out otherwise
 *   ("FREE",   registers)
 *   ("KEEP",   count, registers, sizes, results)     skips the next `count` instructions when the memory of the registers (sizes in bytes) is what it
 *                                                    was when they last ran in this workspace to their end, a KEPT; `results` survive the call
 *   ("KEPT",)
 *
 * `keep` marks what survives the call. A kept ALLOC belongs to a *workspace*: a set of registers that one call at a time
 * owns and that the next call finds filled. Concurrent calls each have a workspace of their own; one idle workspace is
 * remembered. A kept VIEW of an input is remembered together with the input object and its data pointer once two calls in
 * a row have shown the same ones (parameters do, activations do not, and must not be kept alive), and made again when either
 * differs (parameters may be given new storage behind the same object). A kept VIEW of a kept register is made once.
 *
 * Ownership: registers of inputs and constants are borrowed, all others owned. `consume(list)` is a call that takes its inputs out of the list:
 * each is dropped, with the views remembered of it, after the last instruction that reads it. Everything runs under the GIL, except kernels
 * that ask for its release, whose data stay alive because the registers own them.
 */
#include "plan.h"
#include <string.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

static const mg_dlpack_api *dlpack;
static PyObject *is_grad_enabled, *set_grad_enabled, *str_data_ptr;

/* Finds the torch functions that every plan needs. 0, or -1 with an exception. */
int
mg_plan_bind(void)
{
    if (set_grad_enabled != NULL) return 0;
    PyObject *c = PyImport_ImportModule("torch._C"), *torch = PyImport_ImportModule("torch");
    int result = -1;
    if (c == NULL || torch == NULL) goto done;
    PyObject *tensor = PyObject_GetAttrString(torch, "Tensor");
    if (tensor == NULL) goto done;
    PyObject *capsule = PyObject_GetAttrString(tensor, "__dlpack_c_exchange_api__");
    Py_DECREF(tensor);
    if (capsule == NULL) PyErr_Clear(); /* torch before 2.10: data_ptr() is called instead */
    else {
        const mg_dlpack_header *header = PyCapsule_GetPointer(capsule, MG_DLPACK_CAPSULE); /* the table is static: it outlives the capsule */
        Py_DECREF(capsule);
        if (header == NULL) goto done;
        while (header != NULL && header->version.major != MG_DLPACK_MAJOR) header = header->prev_api;
        dlpack = (const mg_dlpack_api *)header;
        if (dlpack != NULL && dlpack->view_of == NULL) dlpack = NULL;
    }
    if (str_data_ptr == NULL && (str_data_ptr = PyUnicode_InternFromString("data_ptr")) == NULL) goto done;
    if (is_grad_enabled == NULL && (is_grad_enabled = PyObject_GetAttrString(c, "is_grad_enabled")) == NULL) {
        PyErr_Clear();
        if ((is_grad_enabled = PyObject_GetAttrString(torch, "is_grad_enabled")) == NULL) goto done;
    }
    if ((set_grad_enabled = PyObject_GetAttrString(c, "_set_grad_enabled")) == NULL) goto done;
    result = 0;
done:
    Py_XDECREF(c);
    Py_XDECREF(torch);
    return result;
}

/* The address of the first element of `tensor`. 0, or -1 with an exception. Empty tensors give NULL. */
static int
plan_data(PyObject *tensor, void **out)
{
    if (dlpack != NULL) {
        mg_dltensor view;
        if (dlpack->view_of(tensor, &view) == 0) {
            *out = (char *)view.data + view.byte_offset;
            return 0;
        }
        PyErr_Clear(); /* what the protocol refuses has an address all the same */
    }
    PyObject *address = PyObject_CallMethodNoArgs(tensor, str_data_ptr);
    if (address == NULL) return -1;
    *out = PyLong_AsVoidPtr(address);
    Py_DECREF(address);
    return *out == NULL && PyErr_Occurred() ? -1 : 0;
}

int
mg_plan_data(PyObject *tensor, void **out)
{
    return mg_plan_bind() < 0 ? -1 : plan_data(tensor, out);
}

const mg_dlpack_api *
mg_plan_dlpack(void)
{
    if (mg_plan_bind() < 0) PyErr_Clear();
    return dlpack;
}

/* ---- workspaces ---- */

void
mg_plan_forget(PlanObject *plan, Workspace *ws)
{
    if (ws == NULL) return;
    for (int r = 0; r < plan->n_registers; r++)
        if (plan->kind[r] == REG_KEPT || plan->kind[r] == REG_TEMP) Py_XDECREF(ws->regs[r]);
    for (int v = 0; v < plan->n_views; v++) Py_XDECREF(ws->view_of[v]);
    for (int i = 0; i < ws->n_watched; i++)
        if (ws->watched[i].pages != NULL) mg_pages_release(ws->watched[i].pages);
    PyMem_Free(ws->watched);
    PyMem_Free(ws);
}

static Workspace *
workspace_acquire(PlanObject *plan)
{
    Workspace *ws = plan->idle;
    if (ws != NULL) {
        plan->idle = NULL;
        return ws;
    }
    size_t n = (size_t)plan->n_registers, v = (size_t)plan->n_views;
    ws = PyMem_Calloc(1, sizeof(Workspace) + (2 * n + 3 * v) * sizeof(void *));
    if (ws == NULL) return (Workspace *)PyErr_NoMemory();
    ws->regs = (PyObject **)(ws + 1);
    ws->data = (void **)(ws->regs + n);
    ws->view_of = (PyObject **)(ws->data + n);
    ws->view_seen = (void **)(ws->view_of + v);
    ws->view_data = ws->view_seen + v;
    for (size_t r = 0; r < n; r++) ws->regs[r] = plan->constant_objs[r];
    return ws;
}

/* Drops what this call put into the registers and remembers the workspace for the next call. */
static void
workspace_release(PlanObject *plan, Workspace *ws)
{
    for (int r = 0; r < plan->n_registers; r++) {
        if (plan->kind[r] == REG_TEMP && ws->regs[r] != NULL) {
            PyObject *obj = ws->regs[r];
            ws->regs[r] = NULL;
            ws->data[r] = NULL;
            Py_DECREF(obj);
        }
        else if (plan->kind[r] == REG_INPUT) {
            if (ws->owned) Py_XDECREF(ws->regs[r]);
            ws->regs[r] = NULL;
            ws->data[r] = NULL;
        }
    }
    ws->owned = 0;
    for (int v = 0; v < plan->n_views; v++) /* views that are not remembered must not keep their sources' memory alive */
        if (ws->view_of[v] == NULL) {
            Py_CLEAR(ws->regs[plan->view_regs[v]]);
            ws->data[plan->view_regs[v]] = NULL;
        }
    if (plan->idle == NULL) plan->idle = ws;
    else mg_plan_forget(plan, ws); /* a concurrent call was faster */
}

/* ---- instructions: each returns 0, or -1 with an exception ---- */

static void
plan_set(Workspace *ws, int dst, PyObject *value)
{
    if (dst < 0) {
        Py_DECREF(value);
        return;
    }
    PyObject *old = ws->regs[dst];
    ws->regs[dst] = value;
    ws->data[dst] = NULL;
    Py_XDECREF(old);
}

static int
plan_pointer(Workspace *ws, int reg, void **out)
{
    void *p = ws->data[reg];
    if (p == NULL) {
        if (plan_data(ws->regs[reg], &p) < 0) return -1;
        ws->data[reg] = p;
    }
    *out = p;
    return 0;
}

/* What the tensor of an ALLOC is like, to make further ones on blocks. */
static void
learn_block(PlanInstr *in, PyObject *tensor)
{
    mg_dltensor view;
    in->slot = BLOCK_NEVER;
    if (dlpack == NULL || dlpack->to_py_object == NULL) return;
    if (dlpack->view_of(tensor, &view) < 0) {
        PyErr_Clear();
        return;
    }
    int64_t bytes = view.device.device_type == MG_DL_CPU && view.ndim > 0 && view.strides != NULL ? mg_block_extent(&view) : 0;
    if (bytes < MG_BLOCK_WORTH || (in->layout = PyMem_Malloc((2 * (size_t)view.ndim + 1) * sizeof(int64_t))) == NULL) return;
    in->n = view.ndim;
    in->src = (int)MG_DTYPE_KEY(view.dtype);
    memcpy(in->layout, view.shape, (size_t)in->n * sizeof(int64_t));
    memcpy(in->layout + in->n, view.strides, (size_t)in->n * sizeof(int64_t));
    in->layout[2 * in->n] = bytes;
    in->slot = BLOCK_TAKE;
}

static int
run_alloc(PlanInstr *in, Workspace *ws)
{
    if (in->flag && ws->regs[in->dst] != NULL) return 0;
    PyObject *value = NULL;
    if (in->slot == BLOCK_TAKE) {
        mg_dldtype type = {(uint8_t)in->src, (uint8_t)(in->src >> 8), (uint16_t)(in->src >> 16)};
        mg_dltensor like = {.device = {MG_DL_CPU, 0}, .ndim = in->n, .dtype = type, .shape = in->layout, .strides = in->layout + in->n};
        value = mg_block_tensor(dlpack, &like, in->layout[2 * in->n]);
    }
    if (value == NULL && (value = PyObject_Call(in->callable, in->args, in->kwargs)) == NULL) return -1;
    if (in->slot == BLOCK_ASK) learn_block(in, value);
    plan_set(ws, in->dst, value);
    return 0;
}

static int
run_view(const PlanInstr *in, Workspace *ws)
{
    PyObject *src = ws->regs[in->src];
    void *data = NULL;
    int same = 0;
    if (in->flag == VIEW_ONCE && ws->regs[in->dst] != NULL) return 0;
    if (in->flag == VIEW_KEPT) {
        if (plan_pointer(ws, in->src, &data) < 0) return -1;
        same = ws->view_seen[in->slot] == src && ws->view_data[in->slot] == data;
        if (same && ws->view_of[in->slot] != NULL) return 0;
    }
    Py_ssize_t n = PyTuple_GET_SIZE(in->args);
    PyObject *stack[12];
    if (n > 10) {
        PyErr_SetString(PyExc_ValueError, "VIEW takes at most ten constant arguments");
        return -1;
    }
    PyObject *apart = NULL; /* torch holds a reference to what a remembered view is a view of, and would refuse to swap a parameter: a view of its memory, then */
    if (same && (apart = PyObject_GetAttrString(src, "data")) == NULL) return -1;
    stack[1] = apart != NULL ? apart : src;
    for (Py_ssize_t i = 0; i < n; i++) stack[2 + i] = PyTuple_GET_ITEM(in->args, i);
    PyObject *value = PyObject_Vectorcall(in->callable, stack + 1, (size_t)(n + 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    Py_XDECREF(apart);
    if (value == NULL) return -1;
    plan_set(ws, in->dst, value);
    if (in->flag == VIEW_KEPT) {
        ws->view_seen[in->slot] = src;
        ws->view_data[in->slot] = data;
        Py_XSETREF(ws->view_of[in->slot], same ? Py_NewRef(src) : NULL);
    }
    return 0;
}

static int
run_kernel(const PlanInstr *in, Workspace *ws, void **pointers)
{
    for (int i = 0; i < in->n; i++)
        if (plan_pointer(ws, in->regs[i], &pointers[i]) < 0) return -1;
    int status;
    PyThreadState *ts = in->flag ? PyEval_SaveThread() : NULL;
    if (in->op == OP_TABLE) status = ((PlanTable)in->kernel)((void *const *)pointers, in->layout);
    else status = in->kernel((void *const *)pointers);
    if (ts != NULL) PyEval_RestoreThread(ts);
    if (status == 0) return 0;
    if (status & 8) PyErr_NoMemory();
    else if (status & 1) PyErr_SetString(PyExc_IndexError, "index out of range in self");
    else PyErr_SetString(status & 4 ? PyExc_FloatingPointError : PyExc_RuntimeError, status & 4 ? "a result may be NaN" : "ZeroDivisionError");
    return -1;
}

static int
run_call(const PlanInstr *in, Workspace *ws, void **stack)
{
    PyObject **args = (PyObject **)stack + 1;
    Py_ssize_t n_kw = in->kwargs == NULL ? 0 : PyTuple_GET_SIZE(in->kwargs);
    for (int i = 0; i < in->n; i++) args[i] = ws->regs[in->regs[i]];
    size_t nargsf = (size_t)(in->n - n_kw) | PY_VECTORCALL_ARGUMENTS_OFFSET;
    PyObject *value = PyObject_Vectorcall(in->callable, args, nargsf, in->kwargs);
    if (value == NULL) return -1;
    plan_set(ws, in->dst, value);
    return 0;
}

static int
run_list(const PlanInstr *in, Workspace *ws)
{
    PyObject *list = PyList_New(in->n);
    if (list == NULL) return -1;
    for (int i = 0; i < in->n; i++) {
        PyObject *item = ws->regs[in->regs[i]];
        Py_INCREF(item);
        PyList_SET_ITEM(list, i, item);
    }
    plan_set(ws, in->dst, list);
    return 0;
}

static int
run_unpack(const PlanInstr *in, Workspace *ws)
{
    PyObject *items = PySequence_Fast(ws->regs[in->src], "a library call returned no sequence");
    if (items == NULL) return -1;
    if (PySequence_Fast_GET_SIZE(items) < in->n) {
        PyErr_Format(PyExc_RuntimeError, "a library call returned %zd values, expected %d", PySequence_Fast_GET_SIZE(items), in->n);
        Py_DECREF(items);
        return -1;
    }
    for (int i = 0; i < in->n; i++) {
        if (in->regs[i] < 0) continue;
        PyObject *item = PySequence_Fast_GET_ITEM(items, i);
        Py_INCREF(item);
        plan_set(ws, in->regs[i], item);
    }
    Py_DECREF(items);
    return 0;
}

/* Does the tensor have these sizes and strides (where more than one element makes a stride matter)? 1, 0, or -1 with an exception. */
static int
plan_laid_out(const PlanInstr *in, PyObject *tensor)
{
    mg_dltensor view;
    if (dlpack == NULL) return 0; /* the callable looks for itself */
    if (dlpack->view_of(tensor, &view) < 0) {
        PyErr_Clear();
        return 0;
    }
    if (view.ndim != in->n) return 0;
    int empty = 0;
    for (int d = 0; d < in->n; d++) {
        if (view.shape[d] != in->layout[d]) return 0;
        if (view.shape[d] == 0) empty = 1;
    }
    for (int d = 0; d < in->n && !empty; d++)
        if (view.shape[d] != 1 && view.strides[d] != in->layout[in->n + d]) return 0;
    return 1;
}

static int
run_layout(const PlanInstr *in, Workspace *ws)
{
    PyObject *tensor = ws->regs[in->dst];
    if (plan_laid_out(in, tensor)) return 0;
    PyObject *value = PyObject_CallFunctionObjArgs(in->callable, tensor, in->args, in->kwargs, NULL);
    if (value == NULL) return -1;
    plan_set(ws, in->dst, value);
    return 0;
}

static void
run_free(const PlanInstr *in, Workspace *ws)
{
    for (int i = 0; i < in->n; i++) {
        PyObject *obj = ws->regs[in->regs[i]];
        ws->regs[in->regs[i]] = NULL;
        ws->data[in->regs[i]] = NULL;
        Py_XDECREF(obj);
    }
}

/* Drops the inputs that nobody reads after instruction `at`. Views of what others hold too (parameters) stay: torch holds one reference to an object
 * on behalf of all views of it, which those that are remembered are not. */
static void
drop_inputs(PlanObject *plan, Workspace *ws, Py_ssize_t at)
{
    for (int i = plan->dying[at]; i >= 0; i = plan->dying_next[i]) {
        PyObject *obj = ws->regs[i];
        Py_ssize_t ours = 1, direct = 0;
        for (int v = plan->first_view[i]; v >= 0; v = plan->next_view[v]) {
            if (ws->view_of[v] == obj) ours++;
            else if (ws->regs[plan->view_regs[v]] != NULL) direct = 1;
        }
        for (int v = plan->first_view[i]; v >= 0 && Py_REFCNT(obj) <= ours + direct; v = plan->next_view[v]) {
            ours -= ws->view_of[v] == obj;
            Py_CLEAR(ws->view_of[v]);
            ws->view_seen[v] = NULL;
            Py_CLEAR(ws->regs[plan->view_regs[v]]);
            ws->data[plan->view_regs[v]] = NULL;
        }
        ws->regs[i] = NULL;
        ws->data[i] = NULL;
        Py_DECREF(obj);
    }
}

/* Looks at the pages of one memory. Its numbers are read where they have changed, or are not watched; they become watched once they have stayed the
 * same for some calls: for longer the more often that was in vain. */
static void
look_at_pages(Watched *w, void *pointer, size_t bytes)
{
    int moved = w->pointer != pointer;
    w->pointer = pointer;
    w->ask = 1;
    if (w->pages != NULL) {
        if (!moved && mg_pages_clean(w->pages, w->generation)) {
            w->ask = 0;
            return;
        }
        mg_pages_release(w->pages);
        w->pages = NULL;
        w->wait = w->wait < 1 << 20 ? 2 * w->wait : w->wait;
        w->same = 0;
    }
    if (moved || bytes < MG_PAGES_WORTH) w->same = 0;
    else if (w->same >= w->wait) {
        w->pages = mg_pages_watch(pointer, bytes, &w->generation); /* before the numbers are read */
        if (w->pages == NULL) w->same = 0, w->wait = w->wait < 1 << 20 ? 8 * w->wait : w->wait;
    }
}

/* Are the numbers what they were? */
static int
same_numbers(Watched *w, size_t bytes)
{
    mg_digest_t digest = {{0}}, edges = {{0}};
    const char *from = w->pointer, *to = from + bytes;
    if (w->pages != NULL) {
        mg_digest(&edges, from, (size_t)((const char *)w->pages->start - from));
        mg_digest(&edges, (const char *)w->pages->end, (size_t)(to - (const char *)w->pages->end));
    }
    if (!w->ask && memcmp(&edges, &w->edges, sizeof edges) == 0) return 1;
    mg_digest(&digest, from, bytes);
    int same = memcmp(&digest, &w->digest, sizeof digest) == 0;
    w->digest = digest;
    w->edges = edges;
    w->same = same ? w->same + 1 : 0;
    return same;
}

/* Are the kept results out of date? 1 (the instructions that compute them run now), 0, or -1 with an exception. */
static int
run_keep(const PlanInstr *in, Workspace *ws, void **pointers)
{
    int same = 1;
    if (ws->watched == NULL) {
        if ((ws->watched = PyMem_Calloc((size_t)in->n + 1, sizeof(Watched))) == NULL) return (PyErr_NoMemory(), -1);
        ws->n_watched = in->n;
        for (int i = 0; i < in->n; i++) ws->watched[i].wait = 2;
    }
    for (int i = 0; i < in->n; i++)
        if (plan_pointer(ws, in->regs[i], &pointers[i]) < 0) return -1;
    for (int i = 0; i < in->n; i++) look_at_pages(&ws->watched[i], pointers[i], (size_t)in->layout[i]);
    Py_BEGIN_ALLOW_THREADS
    for (int i = 0; i < in->n; i++) same &= same_numbers(&ws->watched[i], (size_t)in->layout[i]);
    Py_END_ALLOW_THREADS
    if (ws->kept && same) return 0;
    ws->kept = 0;
    return 1;
}

static int
plan_execute(PlanObject *plan, Workspace *ws, void **scratch)
{
    for (PlanInstr *in = plan->code, *end = in + plan->n_code; in < end; in++) {
        int failed = 0;
        switch (in->op) {
        case OP_TABLE:
        case OP_KERNEL: failed = run_kernel(in, ws, scratch); break;
        case OP_CALL: failed = run_call(in, ws, scratch); break;
        case OP_ALLOC: failed = run_alloc(in, ws); break;
        case OP_VIEW: failed = run_view(in, ws); break;
        case OP_FREE: run_free(in, ws); break;
        case OP_UNPACK: failed = run_unpack(in, ws); break;
        case OP_LAYOUT: failed = run_layout(in, ws); break;
        case OP_LIST: failed = run_list(in, ws); break;
        case OP_KEPT: ws->kept = 2; break;
        case OP_KEEP:
            failed = run_keep(in, ws, scratch);
            if (failed == 0) in += in->dst;
            failed = failed < 0;
            break;
        }
        if (failed) return -1;
        if (ws->owned) drop_inputs(plan, ws, in - plan->code);
    }
    return 0;
}

static int
plan_set_grad(int enabled)
{
    PyObject *r = PyObject_CallOneArg(set_grad_enabled, enabled ? Py_True : Py_False);
    if (r == NULL) return -1;
    Py_DECREF(r);
    return 0;
}

static PyObject *
plan_outputs(PlanObject *plan, Workspace *ws)
{
    PyObject *result = PyTuple_New(plan->n_outputs);
    if (result == NULL) return NULL;
    for (int i = 0; i < plan->n_outputs; i++) {
        PyObject *obj = ws->regs[plan->outputs[i]];
        Py_INCREF(obj);
        PyTuple_SET_ITEM(result, i, obj);
    }
    return result;
}

/* `given`: NULL, or the list to take the inputs from, whose items `args` are. */
static PyObject *
plan_run(PlanObject *plan, PyObject *const *args, Py_ssize_t nargs, PyObject *given)
{
    void *small[64], **scratch = small;
    PyObject *result = NULL;
    int restore = 0;
    Workspace *ws = workspace_acquire(plan);
    if (ws == NULL) return NULL;
    Py_INCREF(plan); /* a callee may drop the last reference to the plan */
    plan->calls++;
    if (plan->max_regs + 1 > 64 && (scratch = PyMem_Malloc((size_t)(plan->max_regs + 1) * sizeof(void *))) == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < nargs; i++) ws->regs[i] = given == NULL ? args[i] : Py_NewRef(args[i]);
    ws->owned = given != NULL;
    if (given != NULL && PyList_SetSlice(given, 0, nargs, NULL) < 0) goto done;
    if (plan->no_grad) {
        PyObject *grad = PyObject_CallNoArgs(is_grad_enabled);
        if (grad == NULL) goto done;
        restore = grad == Py_True;
        Py_DECREF(grad);
        if (restore && plan_set_grad(0) < 0) goto done;
    }
    if (plan_execute(plan, ws, scratch) == 0) result = plan_outputs(plan, ws);
    if (restore) {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        if (plan_set_grad(1) < 0) Py_CLEAR(result);
        else PyErr_Restore(type, value, trace);
    }
done:
    if (scratch != small) PyMem_Free(scratch);
#ifdef __GLIBC__
    if (ws->kept == 2) malloc_trim(0); /* what was there for a moment lies between what stays: the next call would take other pages */
#endif
    ws->kept = ws->kept != 0;
    workspace_release(plan, ws);
    Py_DECREF(plan);
    return result;
}

static int
plan_takes(PlanObject *plan, Py_ssize_t nargs)
{
    if (nargs == plan->n_inputs) return 1;
    PyErr_Format(PyExc_TypeError, "this plan takes %d positional inputs, got %zd", plan->n_inputs, nargs);
    return 0;
}

PyObject *
mg_plan_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    Py_ssize_t nargs = PyVectorcall_NARGS(nargsf);
    if (kwnames != NULL && PyTuple_GET_SIZE(kwnames) != 0) nargs = -1;
    return plan_takes((PlanObject *)self, nargs) ? plan_run((PlanObject *)self, args, nargs, NULL) : NULL;
}

PyObject *
mg_plan_consume(PyObject *self, PyObject *list)
{
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "consume takes a list of inputs");
        return NULL;
    }
    Py_ssize_t nargs = PyList_GET_SIZE(list);
    if (!plan_takes((PlanObject *)self, nargs)) return NULL;
    return plan_run((PlanObject *)self, ((PyListObject *)list)->ob_item, nargs, list);
}
