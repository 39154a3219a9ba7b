/* The instructions of a plan (plan.c describes them), out of Python's tuples, and the proof that each reads what is there. */
#include "plan.h"
#include <string.h>

static int
parse_regs(PlanObject *plan, PyObject *tuple, int **out, int *n, int lowest)
{
    if (!PyTuple_Check(tuple)) {
        PyErr_SetString(PyExc_TypeError, "registers must be a tuple");
        return -1;
    }
    *n = (int)PyTuple_GET_SIZE(tuple);
    *out = PyMem_Malloc(sizeof(int) * (size_t)(*n + 1));
    if (*out == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (*n > plan->max_regs) plan->max_regs = *n;
    for (int i = 0; i < *n; i++) {
        long r = PyLong_AsLong(PyTuple_GET_ITEM(tuple, i));
        if (r == -1 && PyErr_Occurred()) return -1;
        if (r < lowest || r >= plan->n_registers) {
            PyErr_Format(PyExc_ValueError, "register %ld out of range", r);
            return -1;
        }
        (*out)[i] = (int)r;
    }
    return 0;
}

static int
check_reg(PlanObject *plan, int reg, int lowest)
{
    if (reg >= lowest && reg < plan->n_registers) return 0;
    PyErr_Format(PyExc_ValueError, "register %d out of range", reg);
    return -1;
}

static int
check_dst(PlanObject *plan, int reg, int lowest)
{
    if (check_reg(plan, reg, lowest) < 0) return -1;
    if (reg < 0 || (plan->kind[reg] != REG_INPUT && plan->kind[reg] != REG_CONST)) return 0;
    PyErr_Format(PyExc_ValueError, "register %d is an input or a constant: not a destination", reg);
    return -1;
}

static int
parse_const(PlanObject *plan, PyObject *t)
{
    const char *op;
    int dst;
    PyObject *obj;
    if (!PyArg_ParseTuple(t, "siO", &op, &dst, &obj) || check_dst(plan, dst, 0) < 0) return -1;
    if (PyList_Append(plan->constants, obj) < 0) return -1;
    plan->kind[dst] = REG_CONST;
    plan->constant_objs[dst] = obj;
    return 0;
}

/* The numbers of one or two tuples. */
static int
parse_sizes(PlanInstr *in, PyObject *a, PyObject *b)
{
    Py_ssize_t n = PyTuple_GET_SIZE(a), m = b == NULL ? 0 : PyTuple_GET_SIZE(b);
    if ((in->layout = PyMem_Malloc(sizeof(int64_t) * (size_t)(n + m + 1))) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < n + m; i++) {
        in->layout[i] = PyLong_AsLongLong(i < n ? PyTuple_GET_ITEM(a, i) : PyTuple_GET_ITEM(b, i - n));
        if (in->layout[i] == -1 && PyErr_Occurred()) return -1;
    }
    return 0;
}

/* KERNEL, and TABLE, which has `work` before its last field. */
static int
parse_kernel(PlanObject *plan, PyObject *t, PlanInstr *in, int table)
{
    const char *op;
    PyObject *address, *regs, *work = NULL;
    if (table && !PyArg_ParseTuple(t, "sOOO!p", &op, &address, &regs, &PyTuple_Type, &work, &in->flag)) return -1;
    if (!table && !PyArg_ParseTuple(t, "sOOp", &op, &address, &regs, &in->flag)) return -1;
    in->op = table ? OP_TABLE : OP_KERNEL;
    *(void **)&in->kernel = PyLong_AsVoidPtr(address);
    if (in->kernel == NULL) {
        if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "%s needs an address", op);
        return -1;
    }
    if (table && parse_sizes(in, work, NULL) < 0) return -1;
    return parse_regs(plan, regs, &in->regs, &in->n, 0);
}

static int
parse_alloc(PlanObject *plan, PyObject *t, PlanInstr *in)
{
    const char *op;
    PyObject *callable, *args, *kwargs;
    if (!PyArg_ParseTuple(t, "siOO!O!p", &op, &in->dst, &callable, &PyTuple_Type, &args, &PyDict_Type, &kwargs, &in->flag)) return -1;
    in->op = OP_ALLOC;
    in->slot = plan->recycle && !in->flag ? BLOCK_ASK : BLOCK_NEVER;
    in->callable = Py_NewRef(callable);
    in->args = Py_NewRef(args);
    in->kwargs = Py_NewRef(kwargs);
    if (check_dst(plan, in->dst, 0) < 0) return -1;
    if (in->flag) plan->kind[in->dst] = REG_KEPT;
    return 0;
}

static int
parse_view(PlanObject *plan, PyObject *t, PlanInstr *in)
{
    const char *op;
    PyObject *callable, *args;
    if (!PyArg_ParseTuple(t, "siiOO!p", &op, &in->dst, &in->src, &callable, &PyTuple_Type, &args, &in->flag)) return -1;
    in->op = OP_VIEW;
    in->callable = Py_NewRef(callable);
    in->args = Py_NewRef(args);
    if (check_dst(plan, in->dst, 0) < 0 || check_reg(plan, in->src, 0) < 0) return -1;
    if (in->flag) {
        plan->kind[in->dst] = REG_KEPT;
        if (plan->kind[in->src] == REG_KEPT || plan->kind[in->src] == REG_CONST) in->flag = VIEW_ONCE;
        else {
            in->slot = plan->n_views++;
            plan->view_regs[in->slot] = in->dst;
            if (in->src < plan->n_inputs) {
                plan->next_view[in->slot] = plan->first_view[in->src];
                plan->first_view[in->src] = in->slot;
            }
        }
    }
    return 0;
}

static int
parse_call(PlanObject *plan, PyObject *t, PlanInstr *in)
{
    const char *op;
    PyObject *callable, *regs, *kwnames;
    if (!PyArg_ParseTuple(t, "siOOO!", &op, &in->dst, &callable, &regs, &PyTuple_Type, &kwnames)) return -1;
    in->op = OP_CALL;
    in->callable = Py_NewRef(callable);
    if (PyTuple_GET_SIZE(kwnames) > 0) in->kwargs = Py_NewRef(kwnames);
    if (check_dst(plan, in->dst, -1) < 0 || parse_regs(plan, regs, &in->regs, &in->n, 0) < 0) return -1;
    if (PyTuple_GET_SIZE(kwnames) > in->n) {
        PyErr_SetString(PyExc_ValueError, "CALL has more keyword names than registers");
        return -1;
    }
    return 0;
}

static int
parse_keep(PlanObject *plan, PyObject *t, PlanInstr *in)
{
    const char *op;
    PyObject *regs, *sizes, *results;
    if (!PyArg_ParseTuple(t, "siOO!O!", &op, &in->dst, &regs, &PyTuple_Type, &sizes, &PyTuple_Type, &results)) return -1;
    in->op = OP_KEEP;
    if (parse_regs(plan, regs, &in->regs, &in->n, 0) < 0) return -1;
    if (PyTuple_GET_SIZE(sizes) != in->n || in->dst < 0) {
        PyErr_SetString(PyExc_ValueError, "KEEP needs a size for each register");
        return -1;
    }
    if (parse_sizes(in, sizes, NULL) < 0) return -1;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(results); i++) {
        int r = (int)PyLong_AsLong(PyTuple_GET_ITEM(results, i));
        if (PyErr_Occurred() || check_dst(plan, r, 0) < 0) return -1;
        plan->kind[r] = REG_KEPT;
    }
    return 0;
}

static int
parse_rest(PlanObject *plan, const char *op, PyObject *t, PlanInstr *in)
{
    PyObject *regs;
    const char *ignored;
    if (strcmp(op, "LIST") == 0) {
        in->op = OP_LIST;
        if (!PyArg_ParseTuple(t, "siO", &ignored, &in->dst, &regs) || check_dst(plan, in->dst, 0) < 0) return -1;
        return parse_regs(plan, regs, &in->regs, &in->n, 0);
    }
    if (strcmp(op, "UNPACK") == 0) {
        in->op = OP_UNPACK;
        if (!PyArg_ParseTuple(t, "siO", &ignored, &in->src, &regs) || check_reg(plan, in->src, 0) < 0) return -1;
        if (parse_regs(plan, regs, &in->regs, &in->n, -1) < 0) return -1;
        for (int i = 0; i < in->n; i++)
            if (check_dst(plan, in->regs[i], -1) < 0) return -1;
        return 0;
    }
    if (strcmp(op, "KEEP") == 0) return parse_keep(plan, t, in);
    if (strcmp(op, "KEPT") == 0) return (in->op = OP_KEPT, 0);
    if (strcmp(op, "FREE") == 0) {
        in->op = OP_FREE;
        if (!PyArg_ParseTuple(t, "sO", &ignored, &regs) || parse_regs(plan, regs, &in->regs, &in->n, 0) < 0) return -1;
        for (int i = 0; i < in->n; i++)
            if (check_dst(plan, in->regs[i], 0) < 0) return -1;
        return 0;
    }
    if (strcmp(op, "LAYOUT") == 0) {
        PyObject *callable, *sizes, *strides;
        in->op = OP_LAYOUT;
        if (!PyArg_ParseTuple(t, "siOO!O!", &ignored, &in->dst, &callable, &PyTuple_Type, &sizes, &PyTuple_Type, &strides)) return -1;
        if (check_dst(plan, in->dst, 0) < 0) return -1;
        in->callable = Py_NewRef(callable);
        in->args = Py_NewRef(sizes);
        in->kwargs = Py_NewRef(strides);
        in->n = (int)PyTuple_GET_SIZE(sizes);
        if (PyTuple_GET_SIZE(strides) != in->n) {
            PyErr_SetString(PyExc_ValueError, "LAYOUT needs as many strides as sizes");
            return -1;
        }
        return parse_sizes(in, sizes, strides);
    }
    PyErr_Format(PyExc_ValueError, "unknown plan instruction %s", op);
    return -1;
}

static int
parse_instruction(PlanObject *plan, PyObject *t)
{
    if (!PyTuple_Check(t) || PyTuple_GET_SIZE(t) < 1 || !PyUnicode_Check(PyTuple_GET_ITEM(t, 0))) {
        PyErr_SetString(PyExc_TypeError, "an instruction is a tuple that starts with its name");
        return -1;
    }
    const char *op = PyUnicode_AsUTF8(PyTuple_GET_ITEM(t, 0));
    if (op == NULL) return -1;
    if (strcmp(op, "CONST") == 0) return parse_const(plan, t);
    PlanInstr *in = &plan->code[plan->n_code++];
    if (strcmp(op, "KERNEL") == 0) return parse_kernel(plan, t, in, 0);
    if (strcmp(op, "TABLE") == 0) return parse_kernel(plan, t, in, 1);
    if (strcmp(op, "ALLOC") == 0) return parse_alloc(plan, t, in);
    if (strcmp(op, "VIEW") == 0) return parse_view(plan, t, in);
    if (strcmp(op, "CALL") == 0) return parse_call(plan, t, in);
    return parse_rest(plan, op, t, in);
}

/* Every register is defined before it is used, and kept registers are never freed. 0, or -1 with ValueError. */
static int
plan_verify(PlanObject *plan)
{
    char *defined = PyMem_Calloc((size_t)plan->n_registers + 1, 1);
    int result = -1;
    if (defined == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int r = 0; r < plan->n_registers; r++) defined[r] = plan->kind[r] == REG_INPUT || plan->kind[r] == REG_CONST;
    for (Py_ssize_t i = 0; i < plan->n_code; i++) {
        PlanInstr *in = &plan->code[i];
        int bad = -1, reads = in->op == OP_KERNEL || in->op == OP_TABLE || in->op == OP_CALL || in->op == OP_LIST || in->op == OP_FREE ||
            in->op == OP_KEEP;
        if (in->op == OP_KEEP && in->dst > plan->n_code - i - 1) {
            PyErr_SetString(PyExc_ValueError, "KEEP skips more instructions than there are");
            goto done;
        }
        if ((in->op == OP_VIEW || in->op == OP_UNPACK) && !defined[in->src]) bad = in->src;
        if (in->op == OP_LAYOUT && !defined[in->dst]) bad = in->dst;
        for (int k = 0; reads && k < in->n; k++) {
            if (!defined[in->regs[k]] || (in->op == OP_FREE && plan->kind[in->regs[k]] == REG_KEPT)) bad = in->regs[k];
            if (in->op == OP_FREE) defined[in->regs[k]] = 0;
        }
        if (bad >= 0) {
            PyErr_Format(PyExc_ValueError, "instruction %zd uses register %d, which holds nothing there", i, bad);
            goto done;
        }
        if (in->op == OP_UNPACK) {
            for (int k = 0; k < in->n; k++)
                if (in->regs[k] >= 0) defined[in->regs[k]] = 1;
        }
        else if (in->op != OP_KERNEL && in->op != OP_TABLE && in->op != OP_FREE && in->op < OP_KEEP && in->dst >= 0) defined[in->dst] = 1;
    }
    for (int i = 0; i < plan->n_outputs; i++)
        if (!defined[plan->outputs[i]]) {
            PyErr_Format(PyExc_ValueError, "output register %d holds nothing", plan->outputs[i]);
            goto done;
        }
    result = 0;
done:
    PyMem_Free(defined);
    return result;
}

/* After which instruction nobody reads an input or a view of it any more. What leaves the plan lives to its end. */
static int
plan_deaths(PlanObject *plan)
{
    int *root = PyMem_Malloc(sizeof(int) * (size_t)(plan->n_registers + 1)); /* the input that a register holds or views, or -1 */
    Py_ssize_t *last = PyMem_Malloc(sizeof(Py_ssize_t) * (size_t)(plan->n_inputs + 1));
    if (root == NULL || last == NULL) {
        PyMem_Free(root);
        PyMem_Free(last);
        PyErr_NoMemory();
        return -1;
    }
    for (int r = 0; r < plan->n_registers; r++) root[r] = r < plan->n_inputs ? r : -1;
    for (int i = 0; i < plan->n_inputs; i++) last[i] = plan->n_code; /* nobody reads it: as long as the call */
    for (Py_ssize_t at = 0; at < plan->n_code; at++) {
        const PlanInstr *in = &plan->code[at];
        if (in->op == OP_VIEW) root[in->dst] = root[in->src];
        if ((in->op == OP_VIEW || in->op == OP_UNPACK) && root[in->src] >= 0) last[root[in->src]] = at;
        for (int k = 0; in->regs != NULL && k < in->n; k++)
            if (in->regs[k] >= 0 && root[in->regs[k]] >= 0) last[root[in->regs[k]]] = at;
    }
    for (int k = 0; k < plan->n_outputs; k++)
        if (root[plan->outputs[k]] >= 0) last[root[plan->outputs[k]]] = plan->n_code;
    for (Py_ssize_t at = 0; at < plan->n_code; at++) plan->dying[at] = -1;
    for (int i = 0; i < plan->n_inputs; i++) {
        plan->dying_next[i] = -1;
        if (last[i] == plan->n_code) continue;
        plan->dying_next[i] = plan->dying[last[i]];
        plan->dying[last[i]] = i;
    }
    PyMem_Free(root);
    PyMem_Free(last);
    return 0;
}

int
mg_plan_parse(PlanObject *plan, PyObject *instructions, PyObject *outputs)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(instructions); i++)
        if (parse_instruction(plan, PyTuple_GET_ITEM(instructions, i)) < 0) return -1;
    if (parse_regs(plan, outputs, &plan->outputs, &plan->n_outputs, 0) < 0 || plan_verify(plan) < 0) return -1;
    return plan_deaths(plan);
}
