/* Writing states into frames, and the clones whose frames take them. */
#include "frame.h"
#include "guards.h"

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
    if (!(layout->units[unit] & (resume->exc != NULL ? MG_UNIT_STARTS : MG_UNIT_CONTINUES))) {
        return refuse(code, resume, "no instruction can be entered there");
    }
    if (PyTuple_GET_SIZE(resume->locals) != code->co_nlocalsplus) {
        return refuse(code, resume, "locals do not match the slots of the code");
    }
    int kept = layout->units[unit] >> MG_UNIT_DEPTH_SHIFT; /* by the handler */
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

/* ---- generators ---- */

int
mg_generator_part(PyObject *op, int part, PyObject **out)
{
    PyGenObject *generator = (PyGenObject *)op;
    mg_frame *f = (mg_frame *)generator->gi_iframe;
    PyObject *handled = generator->gi_exc_state.exc_value, *found = NULL;
    *out = NULL;
    if (generator->gi_frame_state == FRAME_EXECUTING || (handled != NULL && handled != Py_None)) {
        return -1;
    }
    if (generator->gi_frame_state > FRAME_EXECUTING) {
        return 0;
    }
    switch (part) {
    case MG_GEN_OFFSET:
    case MG_GEN_DEPTH:
        *out = PyLong_FromLong(part == MG_GEN_OFFSET ? mg_frame_suspended_at(f) : f->stacktop - mg_frame_code(f)->co_nlocalsplus);
        PyErr_Clear();
        return *out != NULL ? 1 : -1;
    case MG_GEN_FUNCTION:
        found = (PyObject *)mg_frame_function(f);
        break;
    case MG_GEN_CODE:
        found = (PyObject *)mg_frame_code(f);
        break;
    default:
        found = part >= 0 && part < f->stacktop ? f->localsplus[part] : NULL;
    }
    *out = Py_XNewRef(found);
    return found != NULL;
}

/* finish(generator): it then stands as if it had returned, without running on. */
static PyObject *
finish(PyObject *Py_UNUSED(module), PyObject *op)
{
    PyGenObject *generator = (PyGenObject *)op;
    if (!PyGen_CheckExact(op) || generator->gi_frame_state == FRAME_EXECUTING) {
        PyErr_SetString(PyExc_SystemError, "finish: not a generator that stands");
        return NULL;
    }
    if (generator->gi_frame_state < FRAME_EXECUTING) {
        mg_frame *f = (mg_frame *)generator->gi_iframe;
        mg_frame_return_next(f);
        generator->gi_frame_state = FRAME_SUSPENDED;
        PyObject *result = Py_TYPE(op)->tp_iternext(op); /* executes the one RETURN_VALUE */
        Py_XDECREF(result);
        if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_StopIteration)) {
            return NULL;
        }
        PyErr_Clear();
    }
    Py_RETURN_NONE;
}

/* suspend(generator, resume, delegates): a generator that does not run then stands at the yield (`delegates`: of a `yield from`) before `resume`, as if it
 * had run so far. */
static PyObject *
suspend(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyGenObject *generator;
    Resume *resume;
    int delegates = 0;
    if (!PyArg_ParseTuple(args, "O!O!|p:suspend", &PyGen_Type, &generator, mg_resume_type, &resume, &delegates)) {
        return NULL;
    }
    mg_frame *f = (mg_frame *)generator->gi_iframe;
    PyCodeObject *code = generator->gi_frame_state < FRAME_EXECUTING ? mg_frame_code(f) : NULL;
    int unit = resume->offset / 2;
    if (code == NULL || unit < 1 || unit >= (int)Py_SIZE(code)) {
        PyErr_SetString(PyExc_SystemError, "suspend: the generator runs, or has no such place");
        return NULL;
    }
    if (mg_frame_commit(f, resume, 1) < 0) {
        return NULL;
    }
    mg_frame_continue_at(f, unit);
#if MG_BEFORE_3_13
    generator->gi_frame_state = FRAME_SUSPENDED;
#else
    generator->gi_frame_state = delegates ? FRAME_SUSPENDED_YIELD_FROM : FRAME_SUSPENDED;
#endif
    Py_RETURN_NONE;
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
    PyObject *frees = PyCode_GetFreevars(code), *name = PyUnicode_FromString("__class__");
    int methods = frees != NULL && name != NULL ? PySequence_Contains(frees, name) : -1;
    Py_XDECREF(frees);
    Py_XDECREF(name);
    if (methods < 0) {
        return NULL;
    }
    int kept = methods && code->co_argcount > 0; /* super() asks whether there is a first argument */
    kwargs = Py_BuildValue("{s:i,s:i,s:i,s:i}", "co_argcount", kept, "co_posonlyargcount", 0, "co_kwonlyargcount", 0, "co_flags",
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

int
mg_generator_part(PyObject *Py_UNUSED(op), int Py_UNUSED(part), PyObject **out)
{
    *out = NULL;
    return -1;
}

static PyObject *
clone_code(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(arg))
{
    PyErr_SetString(PyExc_NotImplementedError, "this version of Python is not known to magneto");
    return NULL;
}

#endif

static PyObject *
type_name(PyObject *Py_UNUSED(module), PyObject *type)
{
    if (!PyType_Check(type)) {
        return PyErr_Format(PyExc_TypeError, "type_name() takes a class, not %s", Py_TYPE(type)->tp_name);
    }
    return PyUnicode_FromString(((PyTypeObject *)type)->tp_name);
}

static PyMethodDef frame_functions[] = {
#if MG_SUPPORTED
    {"suspend", suspend, METH_VARARGS, "suspend(generator, resume, delegates=False)\n\nA generator that does not run then stands where `resume` says."},
    {"finish", finish, METH_O, "finish(generator)\n\nA generator that does not run then stands as if it had returned."},
#endif
    {"type_name", type_name, METH_O, "type_name(cls): the name by which CPython's own messages call a class (`collections.deque`, but `Point` for a program's)."},
    {"clone_code", clone_code, METH_O, "clone_code(code)\n\nThe code without arguments (cached): materialise() runs functions over it."},
    {NULL, NULL, 0, NULL},
};

int
mg_frame_init(PyObject *module)
{
    return PyModule_AddFunctions(module, frame_functions);
}
