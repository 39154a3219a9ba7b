/* Policies and regions. */
#include "frame.h"

#include <structmember.h>

PyTypeObject *mg_policy_type, *mg_region_type;
static PyObject *guard_program_type; /* of guards.c; NULL when it is not built in */

/* ---- Policy ---- */

static PyObject *
policy_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"payload", "compile", "of", NULL};
    PyObject *payload = Py_None, *of = Py_None;
    int compile = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|OpO:Policy", names, &payload, &compile, &of)) {
        return NULL;
    }
    if (of != Py_None && (!PyObject_TypeCheck(of, mg_policy_type) || compile)) {
        PyErr_SetString(PyExc_TypeError, "of: a Policy, for one that compiles nothing");
        return NULL;
    }
    Policy *self = (Policy *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->payload = Py_NewRef(payload);
        self->compile = (char)compile;
        self->of = of == Py_None ? NULL : (Policy *)Py_NewRef(of);
    }
    return (PyObject *)self;
}

/* The policy owns its regions, whichever code object they are looked up from: so the collector sees cycles through them. */
static int
policy_traverse(PyObject *op, visitproc visit, void *arg)
{
    Policy *self = (Policy *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->payload);
    Py_VISIT(self->of);
    for (mg_entry *entry = self->entries; entry != NULL; entry = entry->next) {
        for (int i = 0; i < entry->n; i++) {
            Py_VISIT(entry->regions[i]);
        }
    }
    return 0;
}

static int
policy_clear(PyObject *op)
{
    Py_CLEAR(((Policy *)op)->payload);
    Py_CLEAR(((Policy *)op)->of);
    mg_policy_drop_entries((Policy *)op); /* only when unreachable: no frame runs under this policy */
    return 0;
}

static void
policy_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    if (((Policy *)op)->weakrefs != NULL) {
        PyObject_ClearWeakRefs(op);
    }
    policy_clear(op);
    type->tp_free(op);
    Py_DECREF(type);
}

static PyObject *
policy_repr(PyObject *op)
{
    return PyUnicode_FromFormat("<Policy %R at %p>", ((Policy *)op)->payload ? ((Policy *)op)->payload : Py_None, op);
}

static PyMemberDef policy_members[] = {
    {"payload", T_OBJECT, offsetof(Policy, payload), 0, "any object"},
    {"compile", T_BOOL, offsetof(Policy, compile), 0, "False: run only what is compiled already"},
    {"of", T_OBJECT, offsetof(Policy, of), READONLY, "the policy whose regions are run, or None: its own"},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Policy, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot policy_slots[] = {
    {Py_tp_new, policy_new},
    {Py_tp_dealloc, policy_dealloc},
    {Py_tp_traverse, policy_traverse},
    {Py_tp_clear, policy_clear},
    {Py_tp_repr, policy_repr},
    {Py_tp_members, policy_members},
    {Py_tp_doc, "Policy(payload=None, compile=True, of=None)\n\nIdentity of one optimised context; owns what was compiled under it."},
    {0, NULL},
};

static PyType_Spec policy_spec = {
    .name = "magneto._C.Policy",
    .basicsize = sizeof(Policy),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .slots = policy_slots,
};

/* ---- Region ---- */

static int
check_native(Region *region, const mg_frame_view *view, PyObject **exports)
{
    PyObject *program = Py_NewRef(region->guards); /* a property that it reads might invalidate the region */
    int hit = mg_guard_check(program, view, exports);
    Py_DECREF(program);
    return hit;
}

/* Guards that no program expresses: a Python predicate over the region's own arguments. An error in it is a miss. */
static int
check_python(Region *region, PyObject **args)
{
    PyObject *guards = Py_NewRef(region->guards);
    Policy *active = mg_switch_off(&mg_this_thread);
    PyObject *result = PyObject_Vectorcall(guards, args, region->n_args | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    mg_switch_back(&mg_this_thread, active);
    int hit = result != NULL && PyObject_IsTrue(result) > 0;
    Py_XDECREF(result);
    Py_DECREF(guards);
    PyErr_Clear();
    return hit;
}

MG_HOT int
mg_region_match(Region *region, const mg_frame_view *view, mg_call *call)
{
    int n = 1 + region->n_args + region->n_exports;
    call->values = n <= MG_SMALL_CALL ? call->small : PyMem_New(PyObject *, n);
    if (call->values == NULL) {
        return 0;
    }
    for (int i = 0; i < region->n_args; i++) {
        int slot = region->args[i], above = slot - view->nlocalsplus;
        if (above < 0) {
            call->values[1 + i] = view->localsplus[slot] ? view->localsplus[slot] : mg_unbound;
        }
        else if (above < view->nstack) {
            call->values[1 + i] = view->stack[above] ? view->stack[above] : mg_null;
        }
        else {
            goto miss;
        }
    }
    if (region->guards != NULL) {
        PyObject **exports = &call->values[1 + region->n_args];
        if (!(region->native ? check_native(region, view, exports) : check_python(region, &call->values[1]))) {
            goto miss;
        }
    }
    region->hits++;
    return 1;
miss:
    if (call->values != call->small) {
        PyMem_Free(call->values);
    }
    return 0;
}

void
mg_call_release(Region *region, mg_call *call)
{
    for (int i = 0; i < region->n_exports; i++) {
        Py_DECREF(call->values[1 + region->n_args + i]);
    }
    if (call->values != call->small) {
        PyMem_Free(call->values);
    }
}

static int
region_set_guards(Region *self, PyObject *guards)
{
    if (guards == Py_None) {
        return 0;
    }
    int native = guard_program_type != NULL && PyObject_TypeCheck(guards, (PyTypeObject *)guard_program_type);
    if (!native && !PyCallable_Check(guards)) {
        PyErr_SetString(PyExc_TypeError, "Region: guards is a GuardProgram, a predicate over the arguments, or None");
        return -1;
    }
    self->guards = Py_NewRef(guards);
    self->native = (char)native;
    self->n_exports = native && mg_guard_n_exports != NULL ? mg_guard_n_exports(guards) : 0;
    return 0;
}

static int
region_set_args(Region *self, PyObject *args)
{
    PyObject *tuple = PySequence_Tuple(args);
    if (tuple == NULL) {
        return -1;
    }
    Py_ssize_t n = PyTuple_GET_SIZE(tuple);
    self->args = PyMem_New(int, n + 1);
    if (self->args == NULL) {
        Py_DECREF(tuple);
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        long slot = PyLong_AsLong(PyTuple_GET_ITEM(tuple, i));
        if (slot < 0 || slot > INT_MAX) {
            if (!PyErr_Occurred()) {
                PyErr_Format(PyExc_ValueError, "Region: %ld is not a slot", slot);
            }
            Py_DECREF(tuple);
            return -1;
        }
        self->args[i] = (int)slot;
    }
    self->n_args = (int)n;
    Py_DECREF(tuple);
    return 0;
}

static PyObject *
region_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"fn", "args", "guards", "info", "inlined", NULL};
    PyObject *fn, *slots, *guards = Py_None, *info = Py_None, *inlined = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|OOO!:Region", names, &fn, &slots, &guards, &info, &PyTuple_Type, &inlined)) {
        return NULL;
    }
    if (!PyCallable_Check(fn)) {
        PyErr_SetString(PyExc_TypeError, "Region: fn is not callable");
        return NULL;
    }
    Region *self = (Region *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->fn = Py_NewRef(fn);
    self->info = Py_NewRef(info);
    self->inlined = Py_XNewRef(inlined);
    if (region_set_guards(self, guards) < 0 || region_set_args(self, slots) < 0) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static int
region_traverse(PyObject *op, visitproc visit, void *arg)
{
    Region *self = (Region *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->fn);
    Py_VISIT(self->guards);
    Py_VISIT(self->info);
    Py_VISIT(self->inlined);
    return 0;
}

static int
region_clear(PyObject *op)
{
    Region *self = (Region *)op;
    if (self->entry != NULL) {
        Py_INCREF(op);
        mg_entry_remove(self->entry, self);
        Py_DECREF(op);
    }
    Py_CLEAR(self->fn);
    Py_CLEAR(self->guards);
    Py_CLEAR(self->info);
    Py_CLEAR(self->inlined);
    return 0;
}

static void
region_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    Region *self = (Region *)op;
    PyObject_GC_UnTrack(op);
    Py_XDECREF(self->fn);
    Py_XDECREF(self->guards);
    Py_XDECREF(self->info);
    Py_XDECREF(self->inlined);
    PyMem_Free(self->args);
    type->tp_free(op);
    Py_DECREF(type);
}

static PyObject *
region_get_valid(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(((Region *)op)->entry != NULL);
}

static int
region_set_valid(PyObject *op, PyObject *value, void *Py_UNUSED(closure))
{
    Region *self = (Region *)op;
    int valid = value == NULL ? 0 : PyObject_IsTrue(value);
    if (valid < 0) {
        return -1;
    }
    if (valid && self->entry == NULL) {
        PyErr_SetString(PyExc_ValueError, "a removed region cannot be made valid again");
        return -1;
    }
    if (!valid && self->entry != NULL) {
        mg_entry_remove(self->entry, self);
    }
    return 0;
}

static PyObject *
region_get_code(PyObject *op, void *Py_UNUSED(closure))
{
    mg_entry *entry = ((Region *)op)->entry;
    return Py_NewRef(entry != NULL && entry->owner->code != NULL ? (PyObject *)entry->owner->code : Py_None);
}

static PyObject *
region_get_offset(PyObject *op, void *Py_UNUSED(closure))
{
    mg_entry *entry = ((Region *)op)->entry;
    return PyLong_FromLong(entry != NULL ? entry->offset : -1);
}

static PyObject *
region_get_policy(PyObject *op, void *Py_UNUSED(closure))
{
    mg_entry *entry = ((Region *)op)->entry;
    return Py_NewRef(entry != NULL ? (PyObject *)entry->policy : Py_None);
}

static PyObject *
region_get_args(PyObject *op, void *Py_UNUSED(closure))
{
    Region *self = (Region *)op;
    PyObject *tuple = PyTuple_New(self->n_args);
    for (int i = 0; tuple != NULL && i < self->n_args; i++) {
        PyObject *slot = PyLong_FromLong(self->args[i]);
        if (slot == NULL) {
            Py_CLEAR(tuple);
            break;
        }
        PyTuple_SET_ITEM(tuple, i, slot);
    }
    return tuple;
}

/* Removes the region and lets go of what it holds. A run in progress keeps its function by itself. */
static PyObject *
region_invalidate(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    Region *self = (Region *)op;
    if (self->entry != NULL) {
        mg_entry_remove(self->entry, self);
    }
    PyObject *fn = self->fn, *guards = self->guards;
    self->fn = Py_NewRef(Py_None);
    self->guards = NULL;
    Py_XDECREF(fn);
    Py_XDECREF(guards);
    Py_RETURN_NONE;
}

static PyMethodDef region_methods[] = {
    {"invalidate", region_invalidate, METH_NOARGS, "Removes the region and drops its function and guards."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef region_members[] = {
    {"fn", T_OBJECT, offsetof(Region, fn), READONLY, "the generated function"},
    {"guards", T_OBJECT, offsetof(Region, guards), READONLY, "GuardProgram, predicate over the arguments, or None"},
    {"info", T_OBJECT, offsetof(Region, info), 0, "any object"},
    {"hits", T_ULONGLONG, offsetof(Region, hits), READONLY, "how often the guards held"},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef region_getset[] = {
    {"valid", region_get_valid, region_set_valid, "whether it stands at an entry point; set False to remove it", NULL},
    {"code", region_get_code, NULL, "code object of its entry point, or None", NULL},
    {"offset", region_get_offset, NULL, "byte offset of its entry point, or -1", NULL},
    {"policy", region_get_policy, NULL, "policy of its entry point, or None", NULL},
    {"args", region_get_args, NULL, "slots passed to fn", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot region_slots[] = {
    {Py_tp_new, region_new},
    {Py_tp_dealloc, region_dealloc},
    {Py_tp_traverse, region_traverse},
    {Py_tp_clear, region_clear},
    {Py_tp_methods, region_methods},
    {Py_tp_members, region_members},
    {Py_tp_getset, region_getset},
    {Py_tp_doc, "Region(fn, args, guards=None, info=None, inlined=())\n\nOne compiled way to go on from an entry point. `inlined`: the code objects whose calls it has taken in."},
    {0, NULL},
};

static PyType_Spec region_spec = {
    .name = "magneto._C.Region",
    .basicsize = sizeof(Region),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = region_slots,
};

int
mg_region_init(PyObject *module)
{
    mg_policy_type = (PyTypeObject *)PyType_FromSpec(&policy_spec);
    mg_region_type = (PyTypeObject *)PyType_FromSpec(&region_spec);
    if (mg_policy_type == NULL || mg_region_type == NULL) {
        return -1;
    }
    guard_program_type = mg_guard_check != NULL ? PyObject_GetAttrString(module, "GuardProgram") : NULL; /* guards.c comes first */
    if (PyErr_Occurred()) {
        PyErr_Clear();
    }
    if (PyModule_AddObjectRef(module, "Policy", (PyObject *)mg_policy_type) < 0) {
        return -1;
    }
    return PyModule_AddObjectRef(module, "Region", (PyObject *)mg_region_type);
}
