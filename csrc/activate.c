/* Who is active in which thread, and when the evaluation function is installed: only while somebody is. */
#include "frame.h"

_Thread_local mg_thread mg_this_thread = {.stack_low = (char *)UINTPTR_MAX};

#if MG_SUPPORTED

static PyInterpreterState *interpreter;
static long n_active;                    /* activations on the stacks of all threads */
_PyFrameEvalFunction mg_previous;
static PyObject *foreign_switch;

/* A compiler of the same kind would otherwise compile our compiler: its switch (called with what to switch to, answers what was
 * there) is turned off while one of our callables runs. What fails here leaves it as it is. */
static MG_COLD PyObject *
switch_foreign(PyObject *to)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *before = PyObject_CallOneArg(foreign_switch, to);
    PyErr_Clear();
    PyErr_Restore(type, value, traceback);
    return before;
}

void
mg_activate(mg_activation *activation, Policy *policy, Policy *enclosing)
{
    mg_thread *t = &mg_this_thread;
    activation->policy = t->policy;
    activation->enclosing = t->enclosing;
    activation->replaced = NULL;
    activation->foreign = NULL;
    _PyFrameEvalFunction current = _PyInterpreterState_GetEvalFrameFunc(interpreter);
    if (MG_UNLIKELY(current != mg_eval_frame && current != _PyEval_EvalFrameDefault) && foreign_switch != NULL && policy != NULL) {
        activation->foreign = switch_foreign(Py_None);
        current = _PyInterpreterState_GetEvalFrameFunc(interpreter);
    }
    t->policy = (Policy *)Py_XNewRef(policy);
    t->enclosing = enclosing;
    if (n_active++ == 0) {
        /* Ours may stand there: put back by somebody who had found it. What was below is not known any more. */
        mg_previous = current != mg_eval_frame ? current : _PyEval_EvalFrameDefault;
    }
    else if (current != mg_eval_frame) {
        activation->replaced = (void *)current; /* somebody went on top of us */
    }
    if (current != mg_eval_frame) {
        _PyInterpreterState_SetEvalFrameFunc(interpreter, mg_eval_frame);
    }
}

void
mg_deactivate(mg_activation *activation)
{
    mg_thread *t = &mg_this_thread;
    mg_switch_back(t, activation->policy);
    t->enclosing = activation->enclosing;
    n_active--;
    if ((n_active == 0 || activation->replaced != NULL) && _PyInterpreterState_GetEvalFrameFunc(interpreter) == mg_eval_frame) {
        _PyInterpreterState_SetEvalFrameFunc(interpreter, n_active == 0 ? mg_previous : (_PyFrameEvalFunction)activation->replaced);
    }
    if (MG_UNLIKELY(activation->foreign != NULL)) {
        Py_XDECREF(switch_foreign(activation->foreign));
        Py_CLEAR(activation->foreign);
    }
}

#ifdef __linux__
#include <pthread.h>

/* Without the hook, Python-to-Python calls use no C stack; with it they do. So deep recursion must not run into its end. */
static MG_COLD void
measure_stack(mg_thread *t)
{
    pthread_attr_t attributes;
    void *base = NULL;
    size_t size = 0;
    t->stack_low = t->stack_base = NULL;
    if (pthread_getattr_np(pthread_self(), &attributes) == 0) {
        if (pthread_attr_getstack(&attributes, &base, &size) == 0 && size < ((size_t)1 << 40)) {
            size_t reserve = size >= ((size_t)4 << 20) ? (size_t)1 << 20 : size / 4;
            t->stack_base = base;
            t->stack_low = (char *)base + reserve;
        }
        pthread_attr_destroy(&attributes);
    }
}
#else
static MG_COLD void
measure_stack(mg_thread *t)
{
    t->stack_low = t->stack_base = NULL;
}
#endif

MG_COLD int
mg_stack_is_low(mg_thread *t, char *here)
{
    if (t->stack_low == (char *)UINTPTR_MAX) {
        measure_stack(t);
    }
    return here < t->stack_low && here >= t->stack_base; /* (a coroutine library may run us on another stack) */
}

MG_COLD PyObject *
mg_interpret_unhooked(PyThreadState *ts, mg_frame *f, int throwflag)
{
    _PyFrameEvalFunction current = _PyInterpreterState_GetEvalFrameFunc(interpreter);
    _PyInterpreterState_SetEvalFrameFunc(interpreter, _PyEval_EvalFrameDefault);
    PyObject *result = _PyEval_EvalFrameDefault(ts, f, throwflag);
    if (n_active > 0 && _PyInterpreterState_GetEvalFrameFunc(interpreter) == _PyEval_EvalFrameDefault) {
        _PyInterpreterState_SetEvalFrameFunc(interpreter, current);
    }
    return result;
}

/* A foreign evaluation function may hand the frame on to the one that it found installed, which may be ours: remember it. */
MG_COLD PyObject *
mg_delegate(PyThreadState *ts, mg_thread *t, mg_frame *f, int throwflag)
{
    void *outer = t->delegated;
    t->delegated = f;
    t->unusual++;
    PyObject *result = mg_previous(ts, f, throwflag);
    t->unusual--;
    t->delegated = outer;
    return result;
}

#else /* !MG_SUPPORTED */

void
mg_activate(mg_activation *activation, Policy *policy, Policy *enclosing)
{
    mg_thread *t = &mg_this_thread;
    activation->policy = t->policy;
    activation->enclosing = t->enclosing;
    t->policy = (Policy *)Py_XNewRef(policy);
    t->enclosing = enclosing;
}

void
mg_deactivate(mg_activation *activation)
{
    mg_switch_back(&mg_this_thread, activation->policy);
    mg_this_thread.enclosing = activation->enclosing;
}

#endif

/* ---- module ---- */

static PyObject *
call_switched(PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames, int active)
{
    if (nargs < 1) {
        PyErr_SetString(PyExc_TypeError, "a callable is missing");
        return NULL;
    }
    mg_thread *t = &mg_this_thread;
    mg_activation activation;
    mg_activate(&activation, !active ? NULL : t->policy ? t->policy : t->enclosing, NULL);
    PyObject *result = PyObject_Vectorcall(args[0], args + 1, (size_t)(nargs - 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, kwnames);
    mg_deactivate(&activation);
    return result;
}

static PyObject *
call_active(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    return call_switched(args, nargs, kwnames, 1);
}

static PyObject *
call_inactive(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    return call_switched(args, nargs, kwnames, 0);
}

static PyObject *
active_policy(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    return Py_NewRef(mg_this_thread.policy ? (PyObject *)mg_this_thread.policy : Py_None);
}

/* For a scope inside an optimised call (`with disable():`); the call itself restores what was active round it. */
static PyObject *
set_active_policy(PyObject *Py_UNUSED(module), PyObject *policy)
{
    mg_thread *t = &mg_this_thread;
    if (policy != Py_None && !PyObject_TypeCheck(policy, mg_policy_type)) {
        PyErr_SetString(PyExc_TypeError, "a Policy or None");
        return NULL;
    }
    PyObject *before = (PyObject *)t->policy;
    t->policy = policy == Py_None ? NULL : (Policy *)Py_NewRef(policy);
    return before != NULL ? before : Py_NewRef(Py_None);
}

static PyObject *
eval_frame_installed(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
#if MG_SUPPORTED
    return PyBool_FromLong(_PyInterpreterState_GetEvalFrameFunc(interpreter) == mg_eval_frame);
#else
    Py_RETURN_FALSE;
#endif
}

static PyObject *
set_foreign_switch(PyObject *Py_UNUSED(module), PyObject *callable)
{
#if MG_SUPPORTED
    Py_XSETREF(foreign_switch, callable == Py_None ? NULL : Py_NewRef(callable));
#endif
    Py_RETURN_NONE;
}

#define FAST(f) ((PyCFunction)(void (*)(void))(f))

static PyMethodDef activation_functions[] = {
    {"call_active", FAST(call_active), METH_FASTCALL | METH_KEYWORDS,
     "call_active(fn, /, *args, **kwargs)\n\nCalls fn with the policy of the enclosing region active."},
    {"call_inactive", FAST(call_inactive), METH_FASTCALL | METH_KEYWORDS, "call_inactive(fn, /, *args, **kwargs)\n\nCalls fn with the hook inactive."},
    {"active_policy", active_policy, METH_NOARGS, "Policy that is active in this thread, or None."},
    {"set_active_policy", set_active_policy, METH_O, "set_active_policy(policy or None) -> what was active in this thread before"},
    {"eval_frame_installed", eval_frame_installed, METH_NOARGS, "Whether our evaluation function is in place."},
    {"set_foreign_switch", set_foreign_switch, METH_O,
     "set_foreign_switch(callable or None)\n\nWhat turns another compiler's hook off (called with None) and on again (with what it answered)."},
    {NULL, NULL, 0, NULL},
};

int
mg_activate_init(PyObject *module)
{
#if MG_SUPPORTED
    interpreter = PyInterpreterState_Get();
    mg_previous = _PyEval_EvalFrameDefault;
#endif
    return PyModule_AddFunctions(module, activation_functions);
}
