/* FrameState: what the compiler gets to see of a frame at an entry point. Plain data; the frame itself stays ours. */
#include "frame.h"

#include <structmember.h>

typedef struct {
    PyObject_HEAD
    int offset;
    PyObject *code, *locals, *stack, *globals, *builtins, *closure, *func;
} FrameState;

static PyTypeObject *state_type;

static int
state_traverse(PyObject *op, visitproc visit, void *arg)
{
    FrameState *self = (FrameState *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->code);
    Py_VISIT(self->locals);
    Py_VISIT(self->stack);
    Py_VISIT(self->globals);
    Py_VISIT(self->builtins);
    Py_VISIT(self->closure);
    Py_VISIT(self->func);
    return 0;
}

static int
state_clear(PyObject *op)
{
    FrameState *self = (FrameState *)op;
    Py_CLEAR(self->code);
    Py_CLEAR(self->locals);
    Py_CLEAR(self->stack);
    Py_CLEAR(self->globals);
    Py_CLEAR(self->builtins);
    Py_CLEAR(self->closure);
    Py_CLEAR(self->func);
    return 0;
}

static PyObject *
state_repr(PyObject *op)
{
    FrameState *self = (FrameState *)op;
    return PyUnicode_FromFormat("<FrameState %U at %d>", ((PyCodeObject *)self->code)->co_qualname, self->offset);
}

static PyObject *
tuple_of(PyObject **values, int n, PyObject *for_null)
{
    PyObject *tuple = PyTuple_New(n);
    for (int i = 0; tuple != NULL && i < n; i++) {
        PyTuple_SET_ITEM(tuple, i, Py_NewRef(values[i] ? values[i] : for_null));
    }
    return tuple;
}

PyObject *
mg_frame_state(const mg_frame_view *view, int offset, PyObject *function)
{
    FrameState *self = (FrameState *)state_type->tp_alloc(state_type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->offset = offset;
    self->code = Py_NewRef(view->code);
    self->globals = Py_XNewRef(view->globals);
    self->builtins = Py_XNewRef(view->builtins);
    self->closure = Py_NewRef(view->closure ? view->closure : Py_None);
    self->func = Py_NewRef(function);
    self->locals = tuple_of(view->localsplus, view->nlocalsplus, mg_unbound);
    self->stack = tuple_of(view->stack, view->nstack, mg_null);
    if (self->locals == NULL || self->stack == NULL) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static PyMemberDef state_members[] = {
    {"code", T_OBJECT, offsetof(FrameState, code), READONLY, "code object of the frame"},
    {"offset", T_INT, offsetof(FrameState, offset), READONLY, "byte offset of the entry point"},
    {"locals", T_OBJECT, offsetof(FrameState, locals), READONLY, "tuple of the localsplus slots; UNBOUND for an empty one"},
    {"stack", T_OBJECT, offsetof(FrameState, stack), READONLY, "tuple of the value stack, bottom first; NULL_ for a C NULL"},
    {"globals", T_OBJECT, offsetof(FrameState, globals), READONLY, NULL},
    {"builtins", T_OBJECT, offsetof(FrameState, builtins), READONLY, NULL},
    {"closure", T_OBJECT, offsetof(FrameState, closure), READONLY, "tuple of cells, or None"},
    {"func", T_OBJECT, offsetof(FrameState, func), READONLY, "function object of the frame"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot state_slots[] = {
    {Py_tp_dealloc, mg_dealloc},
    {Py_tp_traverse, state_traverse},
    {Py_tp_clear, state_clear},
    {Py_tp_repr, state_repr},
    {Py_tp_members, state_members},
    {Py_tp_doc, "State of a frame at an entry point."},
    {0, NULL},
};

static PyType_Spec state_spec = {
    .name = "magneto._C.FrameState",
    .basicsize = sizeof(FrameState),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = state_slots,
};

int
mg_state_init(PyObject *module)
{
    state_type = (PyTypeObject *)PyType_FromSpec(&state_spec);
    return state_type == NULL ? -1 : PyModule_AddObjectRef(module, "FrameState", (PyObject *)state_type);
}
