/* GuardProgram as a Python object: built from tuples, checked against values, visited by the garbage collector. */
#include "guards.h"
#include <structmember.h>
#include <time.h>

static PyTypeObject *program_type;
static const char *op_names[] = {
#define MG_GUARD_NAME(name) #name,
    MG_GUARD_OPS(MG_GUARD_NAME)
#undef MG_GUARD_NAME
};

/* ---- instructions from tuples (op, dst, src, row, maybe, payload) ---- */

static int
check_type(PyObject *payload, PyTypeObject *type, const char *op)
{
    if (!PyObject_TypeCheck(payload, type)) {
        PyErr_Format(PyExc_TypeError, "GuardProgram: %s wants a %s, not %R", op, type->tp_name, payload);
        return -1;
    }
    return 0;
}

static int
set_number(mg_instruction *in, PyObject *payload)
{
    in->n = PyLong_AsLongLong(payload);
    return in->n == -1 && PyErr_Occurred() ? -1 : 0;
}

static int
set_bound(int64_t *out, PyObject *bound, int64_t open)
{
    *out = bound == Py_None ? open : PyLong_AsLongLong(bound);
    return *out == -1 && PyErr_Occurred() ? -1 : 0;
}

/* `in->obj`: by weak reference (`in->m` is then 1) where that is wanted and the object allows it, else strongly. */
static int
set_object(mg_instruction *in, PyObject *obj, int weakly)
{
    if (weakly) {
        in->obj = PyWeakref_NewRef(obj, NULL);
        in->m = in->obj != NULL;
        PyErr_Clear();
    }
    if (in->obj == NULL) {
        in->obj = Py_NewRef(obj);
    }
    return 0;
}

/* A class held weakly has no snapshot, which would keep it alive: any modification is a miss. */
static int
set_class(mg_instruction *in, PyObject *type)
{
    mg_class_state *state = PyMem_Calloc(1, sizeof(mg_class_state));
    if (state == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    in->data = state;
    state->version = mg_assign_type_version((PyTypeObject *)type);
    set_object(in, type, in->maybe && state->version != 0);
    state->snapshot = in->m ? NULL : mg_class_snapshot((PyTypeObject *)type);
    return !in->m && state->snapshot == NULL ? -1 : 0;
}

/* The object whose identity is checked: weakly. Static classes and modules are cheap and shared: strongly. */
static int
set_identity(mg_instruction *in, PyObject *obj)
{
    int shared = PyType_Check(obj) && !PyType_HasFeature((PyTypeObject *)obj, Py_TPFLAGS_HEAPTYPE);
    return set_object(in, obj, !shared && !PyModule_Check(obj) && !PyCFunction_Check(obj));
}

static int
set_registers(mg_instruction *in, PyObject *tuple, int n_registers)
{
    in->n = PyTuple_GET_SIZE(tuple);
    int *registers = PyMem_Malloc((in->n + 1) * sizeof(int));
    in->data = registers;
    if (registers == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int i = 0; i < in->n; i++) {
        registers[i] = (int)PyLong_AsLong(PyTuple_GET_ITEM(tuple, i));
        if (registers[i] < 0 || registers[i] >= n_registers) {
            PyErr_SetString(PyExc_ValueError, "GuardProgram: no such register");
            return -1;
        }
    }
    return 0;
}

static int
set_probe(mg_instruction *in, PyObject *payload)
{
    long long signature, address, argument, expected;
    int64_t *more = PyMem_Malloc(2 * sizeof(int64_t));
    in->data = more;
    if (more == NULL || !PyArg_ParseTuple(payload, "LLLL", &signature, &address, &argument, &expected)) {
        return -1;
    }
    in->n = address;
    in->m = argument;
    more[0] = signature;
    more[1] = expected;
    return 0;
}

static int
set_payload(mg_instruction *in, PyObject *payload, int n_registers)
{
    const char *op = op_names[in->op];
    switch (in->op) {
    case MG_G_LOCAL:
    case MG_G_STACK:
    case MG_G_KEY_AT:
    case MG_G_PART:
    case MG_G_LENGTH:
        return set_number(in, payload);
    case MG_G_PEEK:
        return PyArg_ParseTuple(payload, "LL", &in->n, &in->m) ? 0 : -1;
    case MG_G_SAME:
    case MG_G_MEMBER:
    case MG_G_NOT_MEMBER:
        if (set_number(in, payload) < 0 || in->n < 0 || in->n >= n_registers) {
            PyErr_SetString(PyExc_ValueError, "GuardProgram: no such register");
            return -1;
        }
        return 0;
    case MG_G_GLOBAL:
    case MG_G_ATTR:
    case MG_G_ATTR_ABSENT:
        in->obj = Py_NewRef(payload);
        return check_type(payload, &PyUnicode_Type, op);
    case MG_G_KEYS:
        in->obj = Py_NewRef(payload);
        return check_type(payload, &PyTuple_Type, op);
    case MG_G_ID_IS:
        return set_identity(in, payload);
    case MG_G_TENSOR:
        if (check_type(payload, &PyTuple_Type, op) < 0) {
            return -1;
        }
        in->obj = Py_NewRef(payload);
        in->data = mg_tensor_row_new(payload);
        return in->data == NULL ? -1 : 0;
    case MG_G_DISTINCT:
        return check_type(payload, &PyTuple_Type, op) < 0 ? -1 : set_registers(in, payload, n_registers);
    case MG_G_SIZES: {
        PyObject *fits, *registers;
        Py_ssize_t count;
        if (check_type(payload, &PyTuple_Type, op) < 0 || !PyArg_ParseTuple(payload, "OO!n;SIZES", &fits, &PyTuple_Type, &registers, &count)) {
            return -1;
        }
        if (PyTuple_GET_SIZE(registers) > MG_MOST_SIZED || count < 0) {
            PyErr_SetString(PyExc_ValueError, "SIZES: too many tensors");
            return -1;
        }
        in->obj = Py_NewRef(fits);
        in->data = mg_sizes_row_new(registers, count, n_registers);
        return in->data == NULL ? -1 : 0;
    }
    case MG_G_TYPE_VERSION:
        return check_type(payload, &PyType_Type, op) < 0 ? -1 : set_class(in, payload);
    case MG_G_STATE:
        in->obj = Py_NewRef(payload);
        if (check_type(payload, &PyTuple_Type, op) < 0 || PyTuple_GET_SIZE(payload) != 3) {
            return -1;
        }
        return check_type(PyTuple_GET_ITEM(payload, 1), &PyTuple_Type, op);
    case MG_G_PROBE:
        return check_type(payload, &PyTuple_Type, op) < 0 ? -1 : set_probe(in, payload);
    case MG_G_INT_RANGE:
        if (check_type(payload, &PyTuple_Type, op) < 0 || PyTuple_GET_SIZE(payload) != 2) {
            return -1;
        }
        return set_bound(&in->n, PyTuple_GET_ITEM(payload, 0), INT64_MIN) < 0 ? -1 : set_bound(&in->m, PyTuple_GET_ITEM(payload, 1), INT64_MAX);
    case MG_G_HELD:
    case MG_G_TYPE_IS:
        return set_object(in, payload, in->maybe);
    default: /* CELL, DICT, ITEM, EQUALS, KEY_ABSENT, IS_ABSENT, PYTHON */
        in->obj = Py_NewRef(payload);
        return 0;
    }
}

static int
set_instruction(mg_program *p, int index, PyObject *item)
{
    mg_instruction *in = &p->instructions[index];
    int op, maybe;
    PyObject *payload;
    if (!PyTuple_Check(item) || !PyArg_ParseTuple(item, "iiiipO;GuardProgram instruction", &op, &in->dst, &in->src, &in->row, &maybe, &payload)) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "GuardProgram: an instruction is a tuple");
        }
        return -1;
    }
    int is_load = op >= 0 && op < MG_G_LAST_LOAD, is_check = op > MG_G_LAST_LOAD && op < MG_G_LAST_CHECK, roots = op <= MG_G_HELD;
    int no_source = op == MG_G_STATE || op == MG_G_PROBE;
    if (!(is_load || is_check) || in->src >= p->n_registers || (is_load && (in->dst < 0 || in->dst >= p->n_registers)) ||
        (is_load ? roots != (in->src < 0) : no_source != (in->src < 0))) {
        PyErr_Format(PyExc_ValueError, "GuardProgram: bad instruction %R", item);
        return -1;
    }
    in->op = (unsigned char)op;
    in->maybe = (unsigned char)maybe;
    return set_payload(in, payload, p->n_registers);
}

static int
allocate(mg_program *p, Py_ssize_t n)
{
    size_t r = (size_t)p->n_registers + 1;
    p->instructions = PyMem_Calloc(n + 1, sizeof(mg_instruction));
    p->fast = PyMem_Calloc(3 * n + 2, sizeof(mg_fast_op));
    p->entries = PyMem_Calloc(r + n, sizeof(mg_guard_entry)); /* a dictionary per register, a class per check */
    p->watched = PyMem_Calloc(r, sizeof(PyObject *));
    p->pinned = PyMem_Calloc(r, sizeof(PyObject *));
    p->stable = PyMem_Calloc(r, 1);
    p->entry_of = PyMem_Calloc(r, sizeof(int));
    if (!p->instructions || !p->fast || !p->entries || !p->watched || !p->pinned || !p->stable || !p->entry_of) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static int
all_written(const mg_program *p, const char *written, const int *registers, int n)
{
    for (int i = 0; i < n; i++) {
        if (registers[i] < 0 || registers[i] >= p->n_registers || !written[registers[i]]) {
            return 0;
        }
    }
    return 1;
}

/* Registers are written before they are read, once. */
static int
verify(mg_program *p)
{
    char *written = PyMem_Calloc(p->n_registers + 1, 1);
    int good = written != NULL;
    for (int i = 0; good && i < p->n_instructions; i++) {
        const mg_instruction *in = &p->instructions[i];
        good = in->src < 0 || written[in->src];
        if (in->op < MG_G_LAST_LOAD) {
            good = good && !written[in->dst];
            written[in->dst] = 1;
        }
        good = good && (!(in->op == MG_G_SAME || in->op == MG_G_MEMBER || in->op == MG_G_NOT_MEMBER) || written[in->n]);
        for (int j = 0; good && in->op == MG_G_DISTINCT && j < in->n; j++) {
            good = written[((int *)in->data)[j]];
        }
        for (int j = 0; good && in->op == MG_G_SIZES && j < ((mg_sizes_row *)in->data)->n; j++) {
            good = written[((mg_sizes_row *)in->data)->registers[j]];
        }
    }
    good = good && all_written(p, written, p->exports, p->n_exports) && all_written(p, written, p->packed, p->n_packed);
    PyMem_Free(written);
    if (!good) {
        PyErr_SetString(PyExc_ValueError, "GuardProgram: a register is read before it is written, or written twice");
        return -1;
    }
    return 0;
}

static int
numbers_of(PyObject *tuple, int **out, int *n)
{
    *n = (int)PyTuple_GET_SIZE(tuple);
    *out = PyMem_Calloc(*n + 1, sizeof(int));
    for (int i = 0; *out != NULL && i < *n; i++) {
        (*out)[i] = (int)PyLong_AsLong(PyTuple_GET_ITEM(tuple, i));
    }
    return *out == NULL || PyErr_Occurred() ? -1 : 0;
}

static PyObject *
program_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"instructions", "n_registers", "exports", "steady", "globals", "packed", NULL};
    PyObject *items, *exports = NULL, *globals = Py_None, *packed = NULL;
    int n_registers, steady = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!i|O!pOO!:GuardProgram", names, &PyTuple_Type, &items, &n_registers, &PyTuple_Type, &exports,
                                     &steady, &globals, &PyTuple_Type, &packed)) {
        return NULL;
    }
    if (n_registers < 0) {
        PyErr_SetString(PyExc_ValueError, "GuardProgram: n_registers");
        return NULL;
    }
    mg_program *p = (mg_program *)type->tp_alloc(type, 0);
    if (p == NULL) {
        return NULL;
    }
    Py_ssize_t n = PyTuple_GET_SIZE(items);
    p->n_registers = n_registers;
    p->failed_row = -1;
    p->globals = globals == Py_None ? NULL : Py_NewRef(globals);
#if MG_DICT_VERSIONS
    p->steady = (unsigned char)steady;
#else
    p->steady = steady && mg_watch_available();
#endif
    int status = allocate(p, n);
    for (Py_ssize_t i = 0; status == 0 && i < n; i++) {
        p->n_instructions = (int)i + 1; /* what has been set is freed */
        status = set_instruction(p, (int)i, PyTuple_GET_ITEM(items, i));
    }
    if (status == 0 && exports != NULL) {
        status = numbers_of(exports, &p->exports, &p->n_exports);
    }
    if (status == 0 && packed != NULL && PyTuple_GET_SIZE(packed)) {
        status = numbers_of(packed, &p->packed, &p->n_packed);
    }
    if (status < 0 || verify(p) < 0) {
        Py_DECREF(p);
        return NULL;
    }
    return (PyObject *)p;
}

/* ---- garbage ---- */

static int
program_traverse(PyObject *self, visitproc visit, void *arg)
{
    mg_program *p = (mg_program *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(p->globals);
    for (int i = 0; i < p->n_instructions; i++) {
        Py_VISIT(p->instructions[i].obj);
        if (p->instructions[i].op == MG_G_TYPE_VERSION && p->instructions[i].data != NULL) {
            Py_VISIT(((mg_class_state *)p->instructions[i].data)->snapshot);
        }
    }
    for (int i = 0; i < p->n_fast; i++) {
        if (p->fast[i].op == MG_G_PIN) {
            Py_VISIT(p->fast[i].obj);
        }
    }
    return 0;
}

static int
program_clear(PyObject *self)
{
    mg_program *p = (mg_program *)self;
    mg_forget_recording(p);
    int n = p->n_instructions;
    p->n_instructions = 0;
    p->steady = 0;
    Py_CLEAR(p->globals);
    p->cleared = 1; /* an emptied program must not hit */
    for (int i = 0; i < n; i++) {
        mg_instruction *in = &p->instructions[i];
        if (in->op == MG_G_TYPE_VERSION && in->data != NULL) {
            Py_CLEAR(((mg_class_state *)in->data)->snapshot);
        }
        Py_CLEAR(in->obj);
        PyMem_Free(in->data);
        in->data = NULL;
    }
    return 0;
}

static void
program_dealloc(PyObject *self)
{
    mg_program *p = (mg_program *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    program_clear(self);
    PyMem_Free(p->instructions);
    PyMem_Free(p->fast);
    PyMem_Free(p->entries);
    PyMem_Free(p->watched);
    PyMem_Free(p->pinned);
    PyMem_Free(p->stable);
    PyMem_Free(p->entry_of);
    PyMem_Free(p->exports);
    PyMem_Free(p->packed);
    type->tp_free(self);
    Py_DECREF(type);
}

/* ---- for tests and tools ---- */

/* Borrowed pointers of a tuple; `unbound` stands for an empty slot. PyMem block or NULL. */
static PyObject **
slots_of(PyObject *tuple, PyObject *unbound)
{
    PyObject **slots = PyMem_Calloc(PyTuple_GET_SIZE(tuple) + 1, sizeof(PyObject *));
    for (Py_ssize_t i = 0; slots != NULL && i < PyTuple_GET_SIZE(tuple); i++) {
        PyObject *value = PyTuple_GET_ITEM(tuple, i);
        slots[i] = value == unbound ? NULL : value;
    }
    return slots;
}

/* check(locals, stack, globals, builtins, closure, unbound) -> bool, or its exports as a tuple when `values` is true. */
static PyObject *
program_check(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"locals", "stack", "globals", "builtins", "closure", "unbound", "values", NULL};
    PyObject *locals, *stack, *globals = NULL, *builtins = NULL, *closure = NULL, *unbound = NULL;
    int values = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!|OOOOp:check", names, &PyTuple_Type, &locals, &PyTuple_Type, &stack, &globals, &builtins,
                                     &closure, &unbound, &values)) {
        return NULL;
    }
    mg_frame_view view = {.nlocalsplus = (int)PyTuple_GET_SIZE(locals), .nstack = (int)PyTuple_GET_SIZE(stack)};
    view.globals = globals == Py_None ? NULL : globals;
    view.builtins = builtins == Py_None ? NULL : builtins;
    view.closure = closure == Py_None ? NULL : closure;
    view.localsplus = slots_of(locals, unbound);
    view.stack = slots_of(stack, unbound);
    PyObject *result = NULL;
    if (view.localsplus == NULL || view.stack == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    result = PyTuple_New(mg_guard_n_exports(self));
    if (result != NULL) {
        int hit = mg_guard_check(self, &view, values ? ((PyTupleObject *)result)->ob_item : NULL);
        if (!hit || !values) {
            Py_SETREF(result, PyBool_FromLong(hit));
        }
    }
done:
    PyMem_Free(view.localsplus);
    PyMem_Free(view.stack);
    return result;
}

/* time(n, locals, stack, globals) -> nanoseconds of one check, for benchmarks: no Python between the checks. */
static PyObject *
program_time(PyObject *self, PyObject *args)
{
    int n, hits = 0;
    PyObject *locals, *stack, *globals;
    if (!PyArg_ParseTuple(args, "iO!O!O:time", &n, &PyTuple_Type, &locals, &PyTuple_Type, &stack, &globals)) {
        return NULL;
    }
    mg_frame_view view = {.localsplus = ((PyTupleObject *)locals)->ob_item,
                          .nlocalsplus = (int)PyTuple_GET_SIZE(locals),
                          .stack = ((PyTupleObject *)stack)->ob_item,
                          .nstack = (int)PyTuple_GET_SIZE(stack),
                          .globals = globals};
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int i = 0; i < n; i++) {
        hits += mg_guard_check(self, &view, NULL);
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    if (hits != n) {
        PyErr_SetString(PyExc_ValueError, "GuardProgram.time: the guards do not hold");
        return NULL;
    }
    double ns = (end.tv_sec - start.tv_sec) * 1e9 + (end.tv_nsec - start.tv_nsec);
    return PyFloat_FromDouble(ns / (n ? n : 1));
}

static PyObject *
program_fast(PyObject *self, void *closure)
{
    mg_program *p = (mg_program *)self;
    PyObject *list = PyList_New(0);
    for (int i = 0; list != NULL && p->recorded && i < p->n_fast; i++) {
        const mg_fast_op *f = &p->fast[i];
        PyObject *item = Py_BuildValue("(siiO)", op_names[f->op], f->in ? f->in->row : -1, f->op == MG_G_ENTRIES ? f->to - f->from : 1,
                                       f->value ? Py_True : Py_False);
        if (item == NULL || PyList_Append(list, item) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(item);
    }
    return list;
}

static PyMethodDef program_methods[] = {
    {"check", (PyCFunction)(void (*)(void))program_check, METH_VARARGS | METH_KEYWORDS,
     "check(locals, stack, globals=None, builtins=None, closure=None, unbound=<none>, values=False) -> bool | tuple of exports"},
    {"time", program_time, METH_VARARGS, "time(n, locals, stack, globals) -> mean nanoseconds of a check that hits"},
    {NULL},
};

static PyMemberDef program_members[] = {
    {"failed_row", T_INT, offsetof(mg_program, failed_row), READONLY, "row that failed in the last check; -1: none"},
    {"n_exports", T_INT, offsetof(mg_program, n_exports), READONLY, NULL},
    {"n_precise", T_ULONGLONG, offsetof(mg_program, n_precise), READONLY, "checks that evaluated every instruction"},
    {"n_recorded", T_ULONGLONG, offsetof(mg_program, n_recorded), READONLY, "how often the fast list was made"},
    {NULL},
};

static PyGetSetDef program_getset[] = {
    {"fast", program_fast, NULL, "the fast list: (operation, row, dictionaries, source is pinned); empty when not recorded", NULL},
    {NULL},
};

static PyType_Slot program_slots[] = {
    {Py_tp_doc, "GuardProgram(instructions, n_registers, exports=(), steady=True, globals=None)\n\nSee magneto/dynamo/guards/native.py."},
    {Py_tp_new, program_new},
    {Py_tp_dealloc, program_dealloc},
    {Py_tp_traverse, program_traverse},
    {Py_tp_clear, program_clear},
    {Py_tp_methods, program_methods},
    {Py_tp_members, program_members},
    {Py_tp_getset, program_getset},
    {0, NULL},
};

static PyType_Spec program_spec = {
    .name = "magneto._C.GuardProgram",
    .basicsize = sizeof(mg_program),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = program_slots,
};

int
mg_guards_init(PyObject *module)
{
    PyObject *ops = PyDict_New();
    for (int i = 0; ops != NULL && i < MG_G_LAST_CHECK; i++) {
        PyObject *number = PyLong_FromLong(i);
        if (number == NULL || PyDict_SetItemString(ops, op_names[i], number) < 0) {
            Py_CLEAR(ops);
        }
        Py_XDECREF(number);
    }
    if (ops == NULL || PyModule_AddObject(module, "GUARD_OPS", ops) < 0) {
        Py_XDECREF(ops);
        return -1;
    }
    program_type = (PyTypeObject *)PyType_FromSpec(&program_spec);
    if (program_type == NULL || PyModule_AddObjectRef(module, "GuardProgram", (PyObject *)program_type) < 0) {
        return -1;
    }
    return mg_guard_values_init(module) < 0 || mg_guard_iterators_init(module) < 0 ? -1 : mg_guard_tensor_init(module);
}
