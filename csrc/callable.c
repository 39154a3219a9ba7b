/* Optimized and Disabled: callables that run another callable with a policy active, or with the hook inactive. */
#include "frame.h"

#include <structmember.h>

typedef struct {
    PyObject_HEAD
    PyObject *fn;
    Policy *policy; /* NULL for Disabled */
    PyObject *dict, *weakrefs;
    vectorcallfunc vectorcall;
} Switched;

static PyTypeObject *optimized_type, *disabled_type;

static MG_HOT PyObject *
switched_vectorcall(PyObject *op, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    Switched *self = (Switched *)op;
    mg_thread *t = &mg_this_thread;
    PyObject *result;
    if (self->policy == NULL) {
        Policy *policy = mg_switch_off(t), *enclosing = t->enclosing;
        t->enclosing = NULL;
        result = PyObject_Vectorcall(self->fn, args, nargsf, kwnames);
        mg_switch_back(t, policy);
        t->enclosing = enclosing;
        return result;
    }
    mg_activation activation;
    mg_activate(&activation, self->policy, NULL);
    result = PyObject_Vectorcall(self->fn, args, nargsf, kwnames);
    mg_deactivate(&activation);
    return result;
}

/* Names of the attributes that are copied, interned once; the first is set to the callable itself. */
static const char *const copied_names[] = {"__wrapped__", "__name__", "__qualname__", "__doc__", "__module__"};
enum { N_COPIED = sizeof(copied_names) / sizeof(copied_names[0]) };
static PyObject *copied[N_COPIED];

static int
copy_attributes(Switched *self)
{
    if (PyDict_SetItem(self->dict, copied[0], self->fn) < 0) {
        return -1;
    }
    for (int i = 1; i < N_COPIED; i++) {
        PyObject *value = PyObject_GetAttr(self->fn, copied[i]);
        if (value == NULL) {
            if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
                return -1;
            }
            PyErr_Clear();
            continue;
        }
        int status = PyDict_SetItem(self->dict, copied[i], value);
        Py_DECREF(value);
        if (status < 0) {
            return -1;
        }
    }
    return 0;
}

static PyObject *
switched_make(PyTypeObject *type, PyObject *fn, PyObject *policy)
{
    if (!PyCallable_Check(fn)) {
        PyErr_Format(PyExc_TypeError, "%s is not callable", Py_TYPE(fn)->tp_name);
        return NULL;
    }
    Switched *self = (Switched *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->fn = Py_NewRef(fn);
    self->policy = (Policy *)Py_XNewRef(policy);
    self->vectorcall = switched_vectorcall;
    self->dict = PyDict_New();
    if (self->dict == NULL || copy_attributes(self) < 0) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static PyObject *
optimized_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"fn", "policy", NULL};
    PyObject *fn, *policy;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!:Optimized", names, &fn, mg_policy_type, &policy)) {
        return NULL;
    }
    return switched_make(type, fn, policy);
}

static PyObject *
disabled_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"fn", NULL};
    PyObject *fn;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:Disabled", names, &fn)) {
        return NULL;
    }
    return switched_make(type, fn, NULL);
}

static int
switched_traverse(PyObject *op, visitproc visit, void *arg)
{
    Switched *self = (Switched *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->fn);
    Py_VISIT(self->policy);
    Py_VISIT(self->dict);
    return 0;
}

/* The callable itself stays set: a finaliser of the same cycle may still call us. */
static int
switched_clear(PyObject *op)
{
    Py_CLEAR(((Switched *)op)->dict);
    return 0;
}

static void
switched_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    Switched *self = (Switched *)op;
    PyObject_GC_UnTrack(op);
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(op);
    }
    Py_CLEAR(self->dict);
    Py_CLEAR(self->fn);
    Py_CLEAR(self->policy);
    type->tp_free(op);
    Py_DECREF(type);
}

static PyObject *
switched_repr(PyObject *op)
{
    return PyUnicode_FromFormat("<%s %R>", PyType_IsSubtype(Py_TYPE(op), optimized_type) ? "Optimized" : "Disabled", ((Switched *)op)->fn);
}

/* Binds as the wrapped callable would: a plain function becomes a method of ours; anything else binds first and is wrapped. */
static PyObject *
switched_get(PyObject *op, PyObject *obj, PyObject *owner)
{
    Switched *self = (Switched *)op;
    descrgetfunc get = Py_TYPE(self->fn)->tp_descr_get;
    if (get == NULL) {
        return Py_NewRef(op);
    }
    if (PyFunction_Check(self->fn)) {
        return obj == NULL || obj == Py_None ? Py_NewRef(op) : PyMethod_New(op, obj);
    }
    PyObject *bound = get(self->fn, obj, owner);
    if (bound == NULL || bound == self->fn) {
        Py_XDECREF(bound);
        return bound == NULL ? NULL : Py_NewRef(op);
    }
    PyObject *result = switched_make(self->policy ? optimized_type : disabled_type, bound, (PyObject *)self->policy);
    Py_DECREF(bound);
    return result;
}

/* Copies share the policy: what was compiled for one serves the other. */
static PyObject *
switched_reduce(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    Switched *self = (Switched *)op;
    return self->policy ? Py_BuildValue("O(OO)", Py_TYPE(op), self->fn, self->policy) : Py_BuildValue("O(O)", Py_TYPE(op), self->fn);
}

static PyObject *
switched_deepcopy(PyObject *op, PyObject *memo)
{
    Switched *self = (Switched *)op;
    PyObject *result = NULL, *copy = PyImport_ImportModule("copy");
    if (copy == NULL) {
        return NULL;
    }
    PyObject *fn = PyObject_CallMethod(copy, "deepcopy", "OO", self->fn, memo);
    Py_DECREF(copy);
    if (fn != NULL) {
        result = fn == self->fn ? Py_NewRef(op) : switched_make(Py_TYPE(op), fn, (PyObject *)self->policy);
        Py_DECREF(fn);
    }
    return result;
}

static PyMethodDef switched_methods[] = {
    {"__reduce__", switched_reduce, METH_NOARGS, NULL},
    {"__deepcopy__", switched_deepcopy, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef switched_getset[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef optimized_members[] = {
    {"fn", T_OBJECT, offsetof(Switched, fn), READONLY, "the callable that runs"},
    {"policy", T_OBJECT, offsetof(Switched, policy), READONLY, "the policy that is active round it"},
    {"__dictoffset__", T_PYSSIZET, offsetof(Switched, dict), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Switched, weakrefs), READONLY, NULL},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Switched, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMemberDef disabled_members[] = {
    {"fn", T_OBJECT, offsetof(Switched, fn), READONLY, "the callable that runs"},
    {"__dictoffset__", T_PYSSIZET, offsetof(Switched, dict), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Switched, weakrefs), READONLY, NULL},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Switched, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

#define SWITCHED_SLOTS(new_function, members, doc)                                                                              \
    {Py_tp_new, new_function}, {Py_tp_dealloc, switched_dealloc}, {Py_tp_traverse, switched_traverse},                          \
        {Py_tp_clear, switched_clear}, {Py_tp_call, PyVectorcall_Call}, {Py_tp_repr, switched_repr},                            \
        {Py_tp_descr_get, switched_get}, {Py_tp_methods, switched_methods}, {Py_tp_getset, switched_getset},                    \
        {Py_tp_members, members}, {Py_tp_doc, doc},                                                                             \
    {                                                                                                                           \
        0, NULL                                                                                                                 \
    }

static PyType_Slot optimized_slots[] = {
    SWITCHED_SLOTS(optimized_new, optimized_members, "Optimized(fn, policy)\n\nCalls fn with the policy active."),
};

static PyType_Slot disabled_slots[] = {
    SWITCHED_SLOTS(disabled_new, disabled_members, "Disabled(fn)\n\nCalls fn with the hook inactive."),
};

#define SWITCHED_FLAGS (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_BASETYPE)

static PyType_Spec optimized_spec = {
    .name = "magneto._C.Optimized", .basicsize = sizeof(Switched), .flags = SWITCHED_FLAGS, .slots = optimized_slots};

static PyType_Spec disabled_spec = {
    .name = "magneto._C.Disabled", .basicsize = sizeof(Switched), .flags = SWITCHED_FLAGS, .slots = disabled_slots};

int
mg_callable_init(PyObject *module)
{
    for (int i = 0; i < N_COPIED; i++) {
        copied[i] = PyUnicode_InternFromString(copied_names[i]);
        if (copied[i] == NULL) {
            return -1;
        }
    }
    optimized_type = (PyTypeObject *)PyType_FromSpec(&optimized_spec);
    disabled_type = (PyTypeObject *)PyType_FromSpec(&disabled_spec);
    if (optimized_type == NULL || disabled_type == NULL) {
        return -1;
    }
    if (PyModule_AddObjectRef(module, "Optimized", (PyObject *)optimized_type) < 0) {
        return -1;
    }
    return PyModule_AddObjectRef(module, "Disabled", (PyObject *)disabled_type);
}
