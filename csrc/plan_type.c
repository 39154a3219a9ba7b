/* The type of plans: made of Python's tuples, freed, looked at. What a call does is in plan.c. */
#include "plan.h"
#include <stddef.h>
#include <string.h>

static PyObject *
plan_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"instructions", "n_registers", "n_inputs", "output_registers", "no_grad", "recycle", NULL};
    PyObject *instructions, *outputs;
    int n_registers, n_inputs, no_grad = 1, recycle = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!iiO!|pp", names, &PyTuple_Type, &instructions, &n_registers, &n_inputs,
                                     &PyTuple_Type, &outputs, &no_grad, &recycle)) return NULL;
    if (n_inputs < 0 || n_registers < n_inputs) {
        PyErr_SetString(PyExc_ValueError, "a plan has at least as many registers as inputs");
        return NULL;
    }
    if (mg_plan_bind() < 0) return NULL;
    PlanObject *plan = (PlanObject *)type->tp_alloc(type, 0);
    if (plan == NULL) return NULL;
    plan->vectorcall = mg_plan_call;
    plan->n_registers = n_registers;
    plan->n_inputs = n_inputs;
    plan->no_grad = no_grad;
    plan->recycle = recycle;
    plan->source = Py_NewRef(instructions);
    plan->constants = PyList_New(0);
    plan->code = PyMem_Calloc((size_t)PyTuple_GET_SIZE(instructions) + 1, sizeof(PlanInstr));
    plan->view_regs = PyMem_Calloc((size_t)PyTuple_GET_SIZE(instructions) + 1, sizeof(int));
    plan->next_view = PyMem_Calloc((size_t)PyTuple_GET_SIZE(instructions) + 1, sizeof(int));
    plan->first_view = PyMem_Malloc(((size_t)n_inputs + 1) * sizeof(int));
    plan->dying = PyMem_Malloc(((size_t)PyTuple_GET_SIZE(instructions) + 1) * sizeof(int));
    plan->dying_next = PyMem_Malloc(((size_t)n_inputs + 1) * sizeof(int));
    plan->kind = PyMem_Calloc((size_t)n_registers + 1, 1);
    plan->constant_objs = PyMem_Calloc((size_t)n_registers + 1, sizeof(PyObject *));
    if (plan->constants == NULL || plan->code == NULL || plan->view_regs == NULL || plan->next_view == NULL || plan->first_view == NULL || plan->dying == NULL ||
        plan->dying_next == NULL || plan->kind == NULL || plan->constant_objs == NULL) {
        if (!PyErr_Occurred()) PyErr_NoMemory();
        goto fail;
    }
    memset(plan->kind, REG_INPUT, (size_t)n_inputs);
    for (int i = 0; i < n_inputs; i++) plan->first_view[i] = -1;
    if (mg_plan_parse(plan, instructions, outputs) < 0) goto fail;
    return (PyObject *)plan;
fail:
    Py_DECREF(plan);
    return NULL;
}

static int
plan_traverse(PyObject *self, visitproc visit, void *arg)
{
    PlanObject *plan = (PlanObject *)self;
    Py_VISIT(plan->source);
    Py_VISIT(plan->constants);
    for (Py_ssize_t i = 0; i < plan->n_code; i++) {
        Py_VISIT(plan->code[i].callable);
        Py_VISIT(plan->code[i].args);
        Py_VISIT(plan->code[i].kwargs);
    }
    return 0;
}

static int
plan_clear(PyObject *self)
{
    PlanObject *plan = (PlanObject *)self;
    Workspace *ws = plan->idle;
    plan->idle = NULL;
    mg_plan_forget(plan, ws);
    return 0;
}

static void
plan_dealloc(PyObject *self)
{
    PlanObject *plan = (PlanObject *)self;
    PyObject_GC_UnTrack(self);
    if (plan->weakrefs != NULL) PyObject_ClearWeakRefs(self);
    plan_clear(self);
    for (Py_ssize_t i = 0; i < plan->n_code; i++) {
        PlanInstr *in = &plan->code[i];
        PyMem_Free(in->regs);
        PyMem_Free(in->layout);
        Py_XDECREF(in->callable);
        Py_XDECREF(in->args);
        Py_XDECREF(in->kwargs);
    }
    PyMem_Free(plan->code);
    PyMem_Free(plan->kind);
    PyMem_Free(plan->constant_objs);
    PyMem_Free(plan->outputs);
    PyMem_Free(plan->view_regs);
    PyMem_Free(plan->next_view);
    PyMem_Free(plan->first_view);
    PyMem_Free(plan->dying);
    PyMem_Free(plan->dying_next);
    Py_XDECREF(plan->constants);
    Py_XDECREF(plan->source);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *
plan_release_workspace(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    plan_clear(self);
    Py_RETURN_NONE;
}

static PyObject *
plan_get_instructions(PyObject *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(((PlanObject *)self)->source);
}

static PyObject *
plan_get_calls(PyObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLongLong(((PlanObject *)self)->calls);
}

static PyMethodDef plan_methods[] = {
    {"consume", mg_plan_consume, METH_O, "A call that takes its inputs out of the list given, and drops each after its last use."},
    {"release_workspace", plan_release_workspace, METH_NOARGS, "Free the idle workspace; the next call allocates a fresh one."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef plan_getset[] = {
    {"instructions", plan_get_instructions, NULL, "The instruction tuples this plan was built from.", NULL},
    {"calls", plan_get_calls, NULL, "How often the plan was called.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject Plan_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "magneto._C.Plan",
    .tp_doc = "Plan(instructions, n_registers, n_inputs, output_registers, no_grad=True, recycle=True): plan(*inputs) -> tuple",
    .tp_basicsize = sizeof(PlanObject),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(PlanObject, vectorcall),
    .tp_weaklistoffset = offsetof(PlanObject, weakrefs),
    .tp_call = PyVectorcall_Call,
    .tp_new = plan_new,
    .tp_traverse = plan_traverse,
    .tp_clear = plan_clear,
    .tp_dealloc = plan_dealloc,
    .tp_methods = plan_methods,
    .tp_getset = plan_getset,
};

int
mg_plan_init(PyObject *module)
{
    if (PyType_Ready(&Plan_Type) < 0) return -1;
    return PyModule_AddObjectRef(module, "Plan", (PyObject *)&Plan_Type);
}
