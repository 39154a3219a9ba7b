/* Resume records and the sentinels that stand in them. */
#include "frame.h"

#include <structmember.h>

PyObject *mg_unbound, *mg_null, *mg_keep;
PyTypeObject *mg_resume_type;

/* ---- sentinels ---- */

typedef struct {
    PyObject_HEAD
    const char *name;
} Sentinel;

static PyObject *
sentinel_repr(PyObject *self)
{
    return PyUnicode_FromString(((Sentinel *)self)->name);
}

static PyObject *
sentinel_reduce(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    return sentinel_repr(self); /* a string: pickled (and copied) as the module's global of that name */
}

static PyTypeObject *sentinel_type;

static PyMethodDef sentinel_methods[] = {
    {"__reduce__", sentinel_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot sentinel_slots[] = {
    {Py_tp_repr, sentinel_repr},
    {Py_tp_methods, sentinel_methods},
    {0, NULL},
};

static PyType_Spec sentinel_spec = {
    .name = "magneto._C.Sentinel",
    .basicsize = sizeof(Sentinel),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = sentinel_slots,
};

/* ---- the Resume type ---- */

static int
resume_traverse(PyObject *op, visitproc visit, void *arg)
{
    Resume *self = (Resume *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->locals);
    Py_VISIT(self->stack);
    Py_VISIT(self->exc);
    Py_VISIT(self->handling);
    return 0;
}

static int
resume_clear(PyObject *op)
{
    Resume *self = (Resume *)op;
    Py_CLEAR(self->locals);
    Py_CLEAR(self->stack);
    Py_CLEAR(self->exc);
    Py_CLEAR(self->handling);
    return 0;
}

void
mg_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    type->tp_clear(op);
    type->tp_free(op);
    Py_DECREF(type);
}

/* New Resume out of borrowed values; `stack` and `exc` may be NULL. */
static PyObject *
resume_make(PyTypeObject *type, PyObject *offset, PyObject *locals, PyObject *stack, PyObject *exc, int interpret)
{
    long at = PyLong_AsLong(offset);
    if (at == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (at < 0 || at > INT_MAX || at % 2) {
        PyErr_Format(PyExc_ValueError, "Resume: %ld is not the offset of an instruction", at);
        return NULL;
    }
    if (!PyTuple_Check(locals) || (stack != NULL && !PyTuple_Check(stack))) {
        PyErr_SetString(PyExc_TypeError, "Resume: locals and stack are tuples");
        return NULL;
    }
    if (exc == Py_None) {
        exc = NULL;
    }
    if (exc != NULL && !PyExceptionInstance_Check(exc)) {
        PyErr_SetString(PyExc_TypeError, "Resume: exc is an exception instance or None");
        return NULL;
    }
    PyObject *empty = stack == NULL ? PyTuple_New(0) : NULL;
    if (stack == NULL && empty == NULL) {
        return NULL;
    }
    Resume *self = (Resume *)type->tp_alloc(type, 0);
    if (self == NULL) {
        Py_XDECREF(empty);
        return NULL;
    }
    self->offset = (int)at;
    self->interpret = (char)interpret;
    self->locals = Py_NewRef(locals);
    self->stack = stack == NULL ? empty : Py_NewRef(stack);
    self->exc = Py_XNewRef(exc);
    return (PyObject *)self;
}

static PyObject *
resume_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"offset", "locals", "stack", "exc", "interpret", "handling", NULL};
    PyObject *offset, *locals, *stack = NULL, *exc = NULL, *handling = mg_keep;
    int interpret = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|OOpO:Resume", names, &offset, &locals, &stack, &exc, &interpret, &handling)) {
        return NULL;
    }
    if (handling != mg_keep && handling != Py_None && !PyExceptionInstance_Check(handling)) {
        PyErr_SetString(PyExc_TypeError, "Resume: handling is an exception instance, None or KEEP");
        return NULL;
    }
    PyObject *self = resume_make(type, offset, locals, stack, exc, interpret);
    if (self != NULL && handling != mg_keep) {
        ((Resume *)self)->handling = Py_NewRef(handling);
    }
    return self;
}

/* What generated code calls at each break: positional arguments only go straight to resume_make. */
static PyObject *
resume_vectorcall(PyObject *type, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    if (kwnames == NULL && n >= 2 && n <= 4) {
        return resume_make((PyTypeObject *)type, args[0], args[1], n > 2 ? args[2] : NULL, n > 3 ? args[3] : NULL, 0);
    }
    PyObject *result = NULL;
    PyObject *kwargs = NULL, *tuple = PyTuple_New(n);
    if (tuple == NULL) {
        return NULL;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyTuple_SET_ITEM(tuple, i, Py_NewRef(args[i]));
    }
    if (kwnames != NULL) {
        kwargs = PyDict_New();
        if (kwargs == NULL) {
            goto done;
        }
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kwnames); i++) {
            if (PyDict_SetItem(kwargs, PyTuple_GET_ITEM(kwnames, i), args[n + i]) < 0) {
                goto done;
            }
        }
    }
    result = resume_new((PyTypeObject *)type, tuple, kwargs);
done:
    Py_DECREF(tuple);
    Py_XDECREF(kwargs);
    return result;
}

static PyObject *
resume_repr(PyObject *op)
{
    Resume *self = (Resume *)op;
    PyObject *exc = self->exc ? PyUnicode_FromFormat(", exc=%R", self->exc) : PyUnicode_FromString("");
    PyObject *handling = self->handling ? PyUnicode_FromFormat(", handling=%R", self->handling) : PyUnicode_FromString("");
    PyObject *text = NULL;
    if (exc != NULL && handling != NULL) {
        text = PyUnicode_FromFormat("Resume(%d, locals=%R, stack=%R%U%s%U)", self->offset, self->locals, self->stack, exc,
                                    self->interpret ? ", interpret=True" : "", handling);
    }
    Py_XDECREF(exc);
    Py_XDECREF(handling);
    return text;
}

static PyMemberDef resume_members[] = {
    {"offset", T_INT, offsetof(Resume, offset), READONLY, "byte offset of the instruction at which the frame goes on"},
    {"locals", T_OBJECT, offsetof(Resume, locals), READONLY, "one value per localsplus slot, or UNBOUND, or KEEP"},
    {"stack", T_OBJECT, offsetof(Resume, stack), READONLY, "the whole value stack, bottom first; NULL_ for a C NULL"},
    {"exc", T_OBJECT, offsetof(Resume, exc), READONLY, "exception raised by the instruction at offset, or None"},
    {"handling", T_OBJECT, offsetof(Resume, handling), READONLY, "exception that the frame handles (None also for: as before)"},
    {"interpret", T_BOOL, offsetof(Resume, interpret), READONLY, "CPython runs the rest of the frame"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot resume_slots[] = {
    {Py_tp_new, resume_new},
    {Py_tp_dealloc, mg_dealloc},
    {Py_tp_traverse, resume_traverse},
    {Py_tp_clear, resume_clear},
    {Py_tp_repr, resume_repr},
    {Py_tp_members, resume_members},
    {Py_tp_doc, "Resume(offset, locals, stack=(), exc=None, interpret=False, handling=KEEP)\n\nWhere and with which state the frame goes on."},
    {0, NULL},
};

static PyType_Spec resume_spec = {
    .name = "magneto._C.Resume",
    .basicsize = sizeof(Resume),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = resume_slots,
};

/* ---- module ---- */

int
mg_add_sentinel(PyObject *module, const char *name, PyObject **where)
{
    Sentinel *sentinel = (Sentinel *)sentinel_type->tp_alloc(sentinel_type, 0);
    if (sentinel == NULL) {
        return -1;
    }
    sentinel->name = name;
    *where = (PyObject *)sentinel;
    return PyModule_AddObjectRef(module, name, *where);
}

int
mg_resume_init(PyObject *module)
{
    sentinel_type = (PyTypeObject *)PyType_FromSpec(&sentinel_spec);
    mg_resume_type = (PyTypeObject *)PyType_FromSpec(&resume_spec);
    if (sentinel_type == NULL || mg_resume_type == NULL) {
        return -1;
    }
    mg_resume_type->tp_vectorcall = resume_vectorcall;
    if (mg_add_sentinel(module, "UNBOUND", &mg_unbound) < 0 || mg_add_sentinel(module, "NULL_", &mg_null) < 0
        || mg_add_sentinel(module, "KEEP", &mg_keep) < 0) {
        return -1;
    }
    return PyModule_AddObjectRef(module, "Resume", (PyObject *)mg_resume_type);
}
