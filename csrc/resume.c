/* Resume records, and writing them into frames. */
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

static void
resume_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    resume_clear(op);
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
    {Py_tp_dealloc, resume_dealloc},
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

/* ---- writing into frames ---- */

#if MG_SUPPORTED

void
mg_frame_bind_free(mg_frame *f)
{
    PyCodeObject *code = mg_frame_code(f);
    PyObject *closure = mg_frame_function(f)->func_closure;
    if (closure != NULL) {
        int first = code->co_nlocalsplus - code->co_nfreevars;
        for (int i = 0; i < code->co_nfreevars; i++) {
            f->localsplus[first + i] = Py_NewRef(PyTuple_GET_ITEM(closure, i));
        }
    }
}

void
mg_frame_unbind_free(mg_frame *f)
{
    PyCodeObject *code = mg_frame_code(f);
    for (int i = code->co_nlocalsplus - code->co_nfreevars; i < code->co_nlocalsplus; i++) {
        Py_CLEAR(f->localsplus[i]); /* the closure holds the cells: nothing is destroyed */
    }
}

int
mg_frame_run_prologue(mg_frame *f)
{
    mg_layout *layout = mg_code_layout(mg_frame_code(f));
    if (layout == NULL) {
        return -1;
    }
    for (int i = 0; i < layout->n_cells; i++) {
        PyObject **slot = &f->localsplus[layout->cells[i]];
        PyObject *cell = PyCell_New(*slot);
        if (cell == NULL) {
            return -1;
        }
        Py_XSETREF(*slot, cell); /* the cell holds the old value: nothing is destroyed */
    }
    return 0;
}

static int
refuse(PyCodeObject *code, const Resume *resume, const char *why)
{
    PyErr_Format(PyExc_SystemError, "cannot resume %U at offset %d: %s", code->co_qualname, resume->offset, why);
    return -1;
}

/* 0 when `resume` describes a state that the frame may be in. Reading a wrong state would crash the interpreter. */
static int
check_resume(PyCodeObject *code, const mg_layout *layout, const Resume *resume)
{
    int unit = resume->offset / 2;
    if (unit < layout->first_traceable || unit >= layout->n_units) {
        return refuse(code, resume, "outside the body of the code");
    }
    if (!(layout->flags[unit] & (resume->exc != NULL ? MG_UNIT_STARTS : MG_UNIT_CONTINUES))) {
        return refuse(code, resume, "no instruction can be entered there");
    }
    if (PyTuple_GET_SIZE(resume->locals) != code->co_nlocalsplus) {
        return refuse(code, resume, "locals do not match the slots of the code");
    }
    int kept;
    mg_handler_at(code, unit, &kept);
    if (PyTuple_GET_SIZE(resume->stack) > code->co_stacksize || PyTuple_GET_SIZE(resume->stack) < kept) {
        return refuse(code, resume, "the stack does not fit the code");
    }
    for (int i = 0; i < code->co_nlocalsplus; i++) {
        PyObject *value = PyTuple_GET_ITEM(resume->locals, i);
        if (value == mg_null) {
            return refuse(code, resume, "NULL_ in locals");
        }
        if (i >= code->co_nlocalsplus - code->co_nfreevars && value != mg_keep && !PyCell_Check(value)) {
            return refuse(code, resume, "a free variable needs its cell");
        }
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(resume->stack); i++) {
        PyObject *value = PyTuple_GET_ITEM(resume->stack, i);
        if (value == mg_unbound || value == mg_keep) {
            return refuse(code, resume, "UNBOUND or KEEP in the stack");
        }
    }
    return 0;
}

/* Slots that the prologue turns into cells have to hold cells: the interpreter does not check. (From 3.12 on a variable of an
 * inlined comprehension may be a cell at times only; the prologue does not make those.) */
static int
check_cells(PyCodeObject *code, const mg_layout *layout, const Resume *resume)
{
    for (int i = 0; i < layout->n_cells; i++) {
        PyObject *value = PyTuple_GET_ITEM(resume->locals, layout->cells[i]);
        if (value != mg_keep && !PyCell_Check(value)) {
            return refuse(code, resume, "a cell variable needs a cell");
        }
    }
    return 0;
}

int
mg_frame_commit(mg_frame *f, Resume *resume, int started)
{
    enum { SMALL = 48 };
    PyObject *small[SMALL];
    PyObject **old = small;
    PyCodeObject *code = mg_frame_code(f);
    mg_layout *layout = mg_code_layout(code);
    if (layout == NULL || check_resume(code, layout, resume) < 0 || check_cells(code, layout, resume) < 0) {
        return -1;
    }
    int n_locals = code->co_nlocalsplus, n_stack = (int)PyTuple_GET_SIZE(resume->stack), n_old = f->stacktop;
    if (n_old > SMALL) {
        old = PyMem_New(PyObject *, n_old);
        if (old == NULL) {
            PyErr_NoMemory();
            return -1;
        }
    }
    if (!started) {
        for (int i = 0; i < layout->n_cells; i++) {
            PyObject **slot = &f->localsplus[layout->cells[i]];
            if (PyTuple_GET_ITEM(resume->locals, layout->cells[i]) == mg_keep) {
                PyObject *cell = PyCell_New(*slot);
                if (cell == NULL) {
                    goto error;
                }
                Py_XSETREF(*slot, cell);
            }
        }
    }
    /* From here on nothing fails. Old values go last: their destructors may run any code. */
    for (int i = 0; i < n_old; i++) {
        old[i] = f->localsplus[i];
    }
    for (int i = 0; i < n_locals; i++) {
        PyObject *value = PyTuple_GET_ITEM(resume->locals, i);
        if (value == mg_keep) {
            old[i] = NULL;
        }
        else {
            f->localsplus[i] = value == mg_unbound ? NULL : Py_NewRef(value);
        }
    }
    for (int i = 0; i < n_stack; i++) {
        PyObject *value = PyTuple_GET_ITEM(resume->stack, i);
        f->localsplus[n_locals + i] = value == mg_null ? NULL : Py_NewRef(value);
    }
    f->stacktop = n_locals + n_stack;
    for (int i = 0; i < n_old; i++) {
        Py_XDECREF(old[i]);
    }
    if (old != small) {
        PyMem_Free(old);
    }
    return 0;
error:
    if (old != small) {
        PyMem_Free(old);
    }
    return -1;
}

/* ---- clones ---- */

static PyObject *
make_clone(PyCodeObject *code)
{
    PyObject *clone = NULL, *kwargs = NULL, *replace = NULL, *empty = NULL;
    const int skipped = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR;
    if ((code->co_flags & skipped) || !(code->co_flags & CO_OPTIMIZED)) {
        PyErr_Format(PyExc_ValueError, "%U is not a plain function's code: it cannot be materialised", code->co_qualname);
        return NULL;
    }
    if (code->co_argcount == 0 && code->co_kwonlyargcount == 0 && !(code->co_flags & (CO_VARARGS | CO_VARKEYWORDS))) {
        return Py_NewRef(code);
    }
    kwargs = Py_BuildValue("{s:i,s:i,s:i,s:i}", "co_argcount", 0, "co_posonlyargcount", 0, "co_kwonlyargcount", 0, "co_flags",
                           code->co_flags & ~(CO_VARARGS | CO_VARKEYWORDS));
    replace = PyObject_GetAttrString((PyObject *)code, "replace");
    empty = PyTuple_New(0);
    if (kwargs != NULL && replace != NULL && empty != NULL) {
        clone = PyObject_Call(replace, empty, kwargs);
    }
    Py_XDECREF(kwargs);
    Py_XDECREF(replace);
    Py_XDECREF(empty);
    return clone;
}

static PyObject *
clone_code(PyObject *Py_UNUSED(module), PyObject *arg)
{
    if (!PyCode_Check(arg)) {
        return PyErr_Format(PyExc_TypeError, "clone_code: %s is not a code object", Py_TYPE(arg)->tp_name);
    }
    mg_code *own = mg_code_of((PyCodeObject *)arg);
    if (own == NULL) {
        return NULL;
    }
    if (own->clone == NULL) {
        PyObject *clone = make_clone((PyCodeObject *)arg);
        if (clone == NULL || clone == arg) { /* not cached: the code would own itself */
            return clone;
        }
        Py_XSETREF(own->clone, clone);
    }
    return Py_NewRef(own->clone);
}

#else

static PyObject *
clone_code(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(arg))
{
    PyErr_SetString(PyExc_NotImplementedError, "this version of Python is not known to magneto");
    return NULL;
}

#endif

/* ---- module ---- */

static PyMethodDef resume_functions[] = {
    {"clone_code", clone_code, METH_O, "clone_code(code)\n\nThe code without arguments (cached): materialise() runs functions over it."},
    {NULL, NULL, 0, NULL},
};

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
    if (PyModule_AddObjectRef(module, "Resume", (PyObject *)mg_resume_type) < 0 || PyModule_AddFunctions(module, resume_functions) < 0) {
        return -1;
    }
    return 0;
}
