/* The frame-evaluation function (PEP 523).
 *
 * A frame of ours goes round the loop in run_frame: find a region for (policy, code, offset), call it; it returns the frame's
 * value, or a Resume that is written into the frame and gives the next offset. The loop ends in CPython's own interpreter,
 * which also ends every frame (it returns, unwinds and pops it): see compat.h.
 *
 * While a region runs, its frame is not linked into the thread's stack of frames: nobody sees it, nothing else writes to it.
 */
#include "frame.h"

static PyObject *compiler, *on_rerun; /* NULL: none */
static PyObject *skip_entry, *skip_code, *disable_code;

static struct {
    unsigned long long hooked, hits, misses, compiles, reruns, interpreted;
} counts;

#if MG_SUPPORTED

/* ---- frames that are not ours ---- */

/* Runs a frame that we have not touched. */
static inline PyObject *
pass_on(PyThreadState *ts, mg_thread *t, mg_frame *f, int throwflag)
{
    char *here = __builtin_frame_address(0);
    if (MG_UNLIKELY(here < t->stack_low) && mg_stack_is_low(t, here)) {
        return mg_interpret_unhooked(ts, f, throwflag);
    }
    if (MG_UNLIKELY(mg_previous != _PyEval_EvalFrameDefault)) {
        return mg_delegate(ts, t, f, throwflag);
    }
    return mg_interpret(ts, f, throwflag);
}

/* ---- frames of ours ---- */

static void
view_of(mg_frame *f, mg_frame_view *view)
{
    PyCodeObject *code = mg_frame_code(f);
    view->localsplus = f->localsplus;
    view->nlocalsplus = code->co_nlocalsplus;
    view->stack = f->localsplus + code->co_nlocalsplus;
    view->nstack = f->stacktop - code->co_nlocalsplus;
    view->globals = f->f_globals;
    view->builtins = f->f_builtins;
    view->closure = mg_frame_function(f)->func_closure;
    view->code = code;
}

/* Ends the frame with the exception that is set: its handlers see it at `offset`, or at its first line when it has not begun. */
static MG_COLD PyObject *
raise_in_frame(PyThreadState *ts, mg_frame *f, int offset, int started)
{
    int unit = offset / 2;
    if (!started) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        if (mg_frame_run_prologue(f) == 0) {
            unit = mg_frame_code(f)->_co_firsttraceable;
        }
        PyErr_Restore(type, value, traceback);
    }
    else {
        unit += mg_frame_enter_handler(ts, f, unit);
    }
    mg_frame_raise_at(f, unit);
    return mg_interpret(ts, f, 1);
}

/* Drops the traceback entries of the region's own function from the front: they are no lines of the user's. */
static void
strip_traceback(PyObject *exc, PyObject *fn)
{
    PyObject *traceback = PyException_GetTraceback(exc);
    PyObject *first = traceback;
    while (first != NULL && PyTraceBack_Check(first) && PyFunction_Check(fn)) {
        PyCodeObject *code = PyFrame_GetCode(((PyTracebackObject *)first)->tb_frame);
        int own = (PyObject *)code == PyFunction_GET_CODE(fn);
        Py_DECREF(code);
        if (!own) {
            break;
        }
        first = (PyObject *)((PyTracebackObject *)first)->tb_next;
    }
    if (first != traceback) {
        PyException_SetTraceback(exc, first ? first : Py_None);
    }
    Py_XDECREF(traceback);
}

/* Goes on in the frame, into which the Resume has been written, with the exception that it carries. */
static MG_COLD PyObject *
throw_in_frame(PyThreadState *ts, mg_frame *f, Resume *resume)
{
    PyObject *exc = resume->exc, *traceback = PyException_GetTraceback(exc);
    resume->exc = NULL; /* its traceback may lead to the function that has made the Resume, and holds it */
    PyErr_Restore(Py_NewRef(Py_TYPE(exc)), exc, traceback);
    mg_frame_raise_at(f, resume->offset / 2);
    Py_DECREF(resume);
    return mg_interpret(ts, f, 1);
}

static PyObject *
continue_in_frame(PyThreadState *ts, mg_frame *f, int offset)
{
    counts.interpreted++;
    mg_frame_continue_at(f, offset / 2);
    return mg_interpret(ts, f, 0);
}

/* Runs a frame, and what it calls, with the hook inactive. */
static MG_COLD PyObject *
run_disabled(PyThreadState *ts, mg_thread *t, mg_frame *f)
{
    Policy *policy = mg_switch_off(t), *enclosing = t->enclosing;
    t->enclosing = NULL;
    PyObject *result = pass_on(ts, t, f, 0);
    mg_switch_back(t, policy);
    t->enclosing = enclosing;
    return result;
}

/* Runs a frame from its start whose free variables we had bound. */
static PyObject *
start_frame(PyThreadState *ts, mg_thread *t, mg_frame *f, mg_entry *entry)
{
    counts.interpreted++;
    mg_frame_unbind_free(f);
    return entry != NULL && entry->state == ENTRY_DISABLED ? run_disabled(ts, t, f) : pass_on(ts, t, f, 0);
}

/* Calls Python code of ours from the frame of `policy`, with the hook inactive. */
static inline PyObject *
call_inactive_within(mg_thread *t, Policy *policy, PyObject *fn, PyObject *const *args, size_t nargsf)
{
    Policy *active = mg_switch_off(t), *enclosing = t->enclosing;
    t->enclosing = policy;
    PyObject *result = PyObject_Vectorcall(fn, args, nargsf, NULL);
    t->enclosing = enclosing;
    mg_switch_back(t, active);
    return result;
}

static PyObject *
list_of_regions(mg_entry *entry)
{
    PyObject *list = PyList_New(entry->n);
    for (int i = 0; list != NULL && i < entry->n; i++) {
        PyList_SET_ITEM(list, i, Py_NewRef(entry->regions[i]));
    }
    return list;
}

/* Asks the compiler for a region. 1: `*region` (new reference) and its call are ready; 0: interpret; -1: exception set. */
static MG_COLD int
compile_region(mg_thread *t, mg_frame *f, Policy *policy, mg_entry *entry, mg_frame_view *view, Region **region, mg_call *call)
{
    int status = -1;
    if (compiler == NULL || !policy->compile || entry->state != ENTRY_OPEN) {
        return 0;
    }
    counts.compiles++;
    PyObject *callback = Py_NewRef(compiler), *result = NULL;
    PyObject *state = mg_frame_state(view, entry->offset, (PyObject *)mg_frame_function(f));
    PyObject *missed = list_of_regions(entry);
    if (state != NULL && missed != NULL) {
        PyObject *args[] = {NULL, (PyObject *)policy, state, missed};
        result = call_inactive_within(t, policy, callback, args + 1, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET);
    }
    Py_DECREF(callback);
    Py_XDECREF(state);
    Py_XDECREF(missed);
    if (result == NULL) {
        return -1;
    }
    if (Py_IS_TYPE(result, mg_region_type)) {
        if (mg_entry_push(entry, (Region *)result) < 0) {
            goto done;
        }
        if (mg_region_match((Region *)result, view, call)) {
            *region = (Region *)result;
            return 1;
        }
        status = 0; /* its guards do not hold for the state that it was made for: let the next call find out */
    }
    else if (result == skip_entry) {
        entry->state = ENTRY_SKIP;
        status = 0;
    }
    else if (result == skip_code) {
        status = mg_skip_code(entry);
    }
    else if (result == disable_code && entry->offset == 0) {
        entry->state = ENTRY_DISABLED;
        status = 0;
    }
    else if (result == Py_None) {
        status = 0;
    }
    else {
        PyErr_Format(PyExc_TypeError, "the compiler returned %s, not Region, None, SKIP_ENTRY, SKIP_CODE or DISABLE_CODE", Py_TYPE(result)->tp_name);
    }
done:
    Py_DECREF(result);
    return status;
}

/* A region raised an Exception: forget it and tell who wants to know. -1 with an exception set if that raised, or if the listener
 * answered True: the exception is then the program's (control flow through a graph), and the frame raises it. */
static MG_COLD int
note_rerun(mg_thread *t, Policy *policy, Region *region)
{
    PyObject *type, *value, *traceback, *result;
    counts.reruns++;
    PyErr_Fetch(&type, &value, &traceback);
    if (on_rerun == NULL) {
        goto dropped;
    }
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL) {
        PyException_SetTraceback(value, traceback);
    }
    PyObject *callback = Py_NewRef(on_rerun);
    PyObject *args[] = {NULL, (PyObject *)region, value};
    result = call_inactive_within(t, policy, callback, args + 1, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET);
    Py_DECREF(callback);
    if (result == Py_True) {
        Py_DECREF(result);
        PyErr_Restore(type, value, traceback);
        return -1;
    }
    Py_XDECREF(result);
dropped:
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return PyErr_Occurred() ? -1 : 0;
}

/* The entry point at which a frame that goes on at `offset` looks for regions; NULL with no exception when there is none. */
static inline mg_entry *
entry_for(PyCodeObject *code, Policy *policy, int offset)
{
    mg_entry *entry = mg_entry_find(mg_code_get(code), policy->of != NULL ? policy->of : policy, offset);
    if (entry == NULL && compiler != NULL && policy->compile) {
        entry = mg_entry_at(code, policy, offset);
        if (entry == NULL) {
            PyErr_Clear(); /* out of memory: interpret */
        }
    }
    return entry;
}

/* Calls the region that matched (steals it). The result is a value, a Resume, or NULL with an exception set or, when `*rerun`,
 * without: then the frame is to be interpreted from where it stands. */
static inline PyObject *
call_region(mg_thread *t, Policy *policy, Region *region, mg_call *call, int *rerun)
{
    PyObject *fn = Py_NewRef(region->fn);
    size_t n = (size_t)region->n_args + region->n_exports;
    counts.hits++;
    PyObject *result = call_inactive_within(t, policy, fn, call->values + 1, n | PY_VECTORCALL_ARGUMENTS_OFFSET);
    mg_call_release(region, call);
    if (MG_UNLIKELY(result == NULL)) {
        *rerun = PyErr_ExceptionMatches(PyExc_Exception) && note_rerun(t, policy, region) == 0;
    }
    else if (MG_IS_RESUME(result) && ((Resume *)result)->exc != NULL) {
        strip_traceback(((Resume *)result)->exc, fn);
    }
    Py_DECREF(fn);
    Py_DECREF(region);
    return result;
}

/* Writes a Resume into the frame. Where it says what the frame handles (as `except` does on entry and at its end: what
 * sys.exception() and a bare `raise` see), `*outer` notes what was handled outside. -1: SystemError, state unchanged. */
static int
apply_resume(PyThreadState *ts, mg_frame *f, Resume *resume, int started, PyObject **outer)
{
    if (mg_frame_commit(f, resume, started) < 0) {
        return -1;
    }
    if (MG_UNLIKELY(resume->handling != NULL)) {
        PyObject **handled = &ts->exc_info->exc_value;
        if (*outer == NULL) {
            *outer = Py_NewRef(*handled ? *handled : Py_None);
        }
        Py_XSETREF(*handled, resume->handling == Py_None ? NULL : Py_NewRef(resume->handling));
    }
    return 0;
}

/* The frame has ended with `result`. What it handled when it began (`outer`, stolen, as in apply_resume) is handled again: CPython's
 * handlers put it back, but a frame that it refuses at the recursion limit ends without them. */
static inline PyObject *
ended(PyThreadState *ts, int generator, PyObject *outer, PyObject *result)
{
    if (MG_UNLIKELY(outer != NULL)) {
        if (!generator && result == NULL) {
            Py_XSETREF(ts->exc_info->exc_value, outer == Py_None ? NULL : Py_NewRef(outer));
        }
        Py_DECREF(outer);
    }
    return result;
}

/* Whether a function of the program is told of each line or call (sys.settrace, sys.setprofile, sys.monitoring): its frames then run as they are. Profilers
 * written in C only count. */
static inline int
is_followed(PyThreadState *ts, PyCodeObject *code)
{
    return ts->c_tracefunc != NULL
        || (MG_UNLIKELY(ts->c_profilefunc != NULL) && PyCallable_Check(ts->c_profileobj))
        || mg_is_monitored(ts, code);
}

/* Whether a tool is told of what a function does that the region has taken in: its calls must then happen. */
static MG_COLD int
takes_in_monitored(PyThreadState *ts, Region *region)
{
    for (Py_ssize_t i = 0; region->inlined != NULL && i < PyTuple_GET_SIZE(region->inlined); i++) {
        PyObject *code = PyTuple_GET_ITEM(region->inlined, i);
        if (PyCode_Check(code) && mg_is_monitored(ts, (PyCodeObject *)code)) {
            return 1;
        }
    }
    return 0;
}

/* Runs a frame that stands at `offset` (not `started`: before its prologue, with its free variables bound).
 * `entry`: the entry point there, or NULL. `outer` (stolen): NULL, or what was handled when the frame began, once a Resume has
 * changed that. */
static MG_HOT PyObject *
run_frame(PyThreadState *ts, mg_thread *t, mg_frame *f, Policy *policy, mg_entry *entry, int offset, int started, PyObject *outer)
{
    PyObject *result = NULL;
    const int generator = f->owner != FRAME_OWNED_BY_THREAD;
    for (;;) {
        mg_call call;
        mg_frame_view view;
        Region *region = NULL;
        view_of(f, &view);
        int rerun = 0, found = entry != NULL && (region = mg_entry_match(entry, &view, &call)) != NULL;
        if (MG_UNLIKELY(!found) && entry != NULL) {
            counts.misses++;
            found = compile_region(t, f, policy, entry, &view, &region, &call);
            if (found < 0) {
                goto raise;
            }
        }
        if (!found) {
            goto interpret;
        }
        if (MG_UNLIKELY(mg_has_tools(ts)) && takes_in_monitored(ts, region)) {
            mg_call_release(region, &call);
            Py_DECREF(region);
            goto interpret;
        }
        result = call_region(t, policy, region, &call, &rerun);
        if (result == NULL && rerun) {
            goto interpret;
        }
        if (result == NULL) {
            goto raise;
        }
        if (!MG_IS_RESUME(result)) {
            goto value;
        }
        Resume *resume = (Resume *)result;
        if (apply_resume(ts, f, resume, started, &outer) < 0) {
            Py_DECREF(result);
            goto raise;
        }
        offset = resume->offset;
        started = 1;
        int interpret = resume->interpret;
        if (resume->exc != NULL) {
            int target = interpret ? -1 : mg_frame_catch(ts, f, resume->exc, offset / 2);
            if (target < 0) {
                return ended(ts, generator, outer, throw_in_frame(ts, f, resume));
            }
            offset = 2 * target; /* its handler is an entry point, too */
            Py_CLEAR(resume->exc);
        }
        Py_DECREF(result);
        if (interpret || is_followed(ts, mg_frame_code(f))) {
            goto interpret;
        }
        entry = entry_for(mg_frame_code(f), policy, offset);
    }
interpret:
    return ended(ts, generator, outer, started ? continue_in_frame(ts, f, offset) : start_frame(ts, t, f, entry));
raise:
    if (outer == NULL) {
        outer = Py_NewRef(ts->exc_info->exc_value ? ts->exc_info->exc_value : Py_None);
    }
    return ended(ts, generator, outer, raise_in_frame(ts, f, offset, started));
value:
    if (MG_UNLIKELY(generator)) {
        Py_DECREF(result);
        PyErr_SetString(PyExc_SystemError, "the region of a generator returned");
        goto raise;
    }
    if (MG_UNLIKELY(outer != NULL)) {
        Py_XSETREF(ts->exc_info->exc_value, outer == Py_None ? NULL : Py_NewRef(outer));
        Py_DECREF(outer);
    }
    return mg_frame_return(ts, f, result);
}

/* The frame that materialise() called: takes the state that was left for it. */
static MG_COLD PyObject *
run_pending(PyThreadState *ts, mg_thread *t, mg_frame *f)
{
    PyObject *outer = NULL;
    Resume *resume = (Resume *)Py_NewRef(t->pending);
    t->pending = NULL;
    t->pending_fn = NULL;
    t->unusual--;
    mg_frame_bind_free(f);
    if (apply_resume(ts, f, resume, 0, &outer) < 0) {
        Py_DECREF(resume);
        return raise_in_frame(ts, f, 0, 0);
    }
    Py_SETREF(resume->locals, PyTuple_New(0)); /* they are the frame's now, which may let go of them */
    Py_SETREF(resume->stack, PyTuple_New(0));
    int offset = resume->offset, interpret = resume->interpret;
    if (resume->exc != NULL) {
        int target = interpret || t->policy == NULL ? -1 : mg_frame_catch(ts, f, resume->exc, offset / 2);
        if (target < 0) {
            Py_XDECREF(outer);
            return throw_in_frame(ts, f, resume);
        }
        offset = 2 * target;
        Py_CLEAR(resume->exc);
    }
    Py_DECREF(resume);
    if (interpret || t->policy == NULL || is_followed(ts, mg_frame_code(f))) {
        Py_XDECREF(outer);
        return continue_in_frame(ts, f, offset);
    }
    counts.hooked++;
    return run_frame(ts, t, f, t->policy, entry_for(mg_frame_code(f), t->policy, offset), offset, 1, outer);
}

/* One step of `yield from`: (whether the receiver returned, its value). Written in C, so that no frame of ours is seen. */
static PyObject *
send_on(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *value;
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "send_on(receiver, value)");
        return NULL;
    }
    PySendResult status = PyIter_Send(args[0], args[1], &value);
    return status == PYGEN_ERROR ? NULL : Py_BuildValue("(ON)", status == PYGEN_RETURN ? Py_True : Py_False, value);
}

/* A generator goes on: what it does up to its next yield may be a region, which leaves the yield itself to the interpreter. */
static PyObject *
resume_generator(PyThreadState *ts, mg_thread *t, mg_frame *f, Policy *policy)
{
    PyCodeObject *code = mg_frame_code(f);
    char *here = __builtin_frame_address(0);
    mg_entry *start = mg_entry_find(mg_code_get(code), policy, 0);
    if ((start != NULL && start->state == ENTRY_SKIP_CODE) || here < t->stack_low || mg_signal_waits(ts)) {
        return pass_on(ts, t, f, 0); /* (a signal is meant for the innermost generator of a `yield from`) */
    }
    int offset = mg_frame_suspended_at(f);
    mg_entry *entry = entry_for(code, policy, offset);
    if (entry == NULL || (entry->state == ENTRY_SKIP && entry->n == 0)) {
        return pass_on(ts, t, f, 0);
    }
    counts.hooked++;
#if MG_BEFORE_3_13
    f->prev_instr++; /* its RESUME has begun: in front of it gi_yieldfrom would take the top of the stack for a receiver */
#endif
    return run_frame(ts, t, f, policy, entry, offset, 1, NULL);
}

/* What this frame itself handles (a generator: without its caller's), or None. */
static PyObject *
handled_here(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    PyObject *exc = PyThreadState_Get()->exc_info->exc_value;
    return Py_NewRef(exc ? exc : Py_None);
}

MG_HOT PyObject *
mg_eval_frame(PyThreadState *ts, mg_frame *f, int throwflag)
{
    mg_thread *t = &mg_this_thread;
    if (MG_UNLIKELY(t->unusual != 0)) {
        if (t->delegated == f) {
            return mg_interpret(ts, f, throwflag);
        }
        if (t->pending != NULL && (PyObject *)mg_frame_function(f) == t->pending_fn && !throwflag) {
            return run_pending(ts, t, f);
        }
    }
    Policy *policy = t->policy;
    PyCodeObject *code = mg_frame_code(f);
    const int kinds = CO_OPTIMIZED | CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR;
    if (policy == NULL || throwflag || is_followed(ts, code) || (code->co_flags & kinds) != CO_OPTIMIZED || f->owner != FRAME_OWNED_BY_THREAD) {
        const int generator = f->owner == FRAME_OWNED_BY_GENERATOR && (code->co_flags & kinds) == (CO_OPTIMIZED | CO_GENERATOR);
        return policy != NULL && !throwflag && !is_followed(ts, code) && generator ? resume_generator(ts, t, f, policy) : pass_on(ts, t, f, throwflag);
    }
    mg_entry *entry = entry_for(code, policy, 0);
    if (entry == NULL || entry->state == ENTRY_SKIP_CODE || (entry->state == ENTRY_SKIP && entry->n == 0)) {
        return pass_on(ts, t, f, 0);
    }
    if (MG_UNLIKELY(entry->state == ENTRY_DISABLED)) {
        return run_disabled(ts, t, f);
    }
    char *here = __builtin_frame_address(0);
    if (MG_UNLIKELY(here < t->stack_low) && mg_stack_is_low(t, here)) {
        return mg_interpret_unhooked(ts, f, 0);
    }
    counts.hooked++;
    mg_frame_bind_free(f);
    return run_frame(ts, t, f, policy, entry, 0, 0, NULL);
}

static PyObject *
materialise(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    mg_thread *t = &mg_this_thread;
    if (nargs != 2 || !PyFunction_Check(args[0]) || !MG_IS_RESUME(args[1])) {
        PyErr_SetString(PyExc_TypeError, "materialise(function over a no-argument clone, Resume)");
        return NULL;
    }
    PyCodeObject *code = (PyCodeObject *)PyFunction_GET_CODE(args[0]);
    const int refused = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR | CO_VARARGS | CO_VARKEYWORDS;
    if (code->co_argcount > (code->co_nfreevars > 0) || code->co_kwonlyargcount || (code->co_flags & refused) || !(code->co_flags & CO_OPTIMIZED)) {
        PyErr_Format(PyExc_ValueError, "materialise: the code of %U is no clone without arguments", code->co_qualname);
        return NULL;
    }
    mg_activation activation;
    mg_activate(&activation, t->policy ? t->policy : t->enclosing, NULL);
    t->pending_fn = args[0];
    t->pending = (Resume *)args[1];
    t->unusual++;
    _PyErr_StackItem *handled = PyThreadState_Get()->exc_info;
    PyObject *outer = Py_XNewRef(handled->exc_value); /* `resume` may say that the frame handles another exception */
    PyObject *first[] = {Py_None}; /* of a clone that keeps its first argument: `resume` says what the slot holds */
    PyObject *result = PyObject_Vectorcall(args[0], first, (size_t)code->co_argcount, NULL);
    Py_XSETREF(handled->exc_value, outer);
    if (t->pending == (Resume *)args[1]) { /* the call failed before there was a frame */
        t->pending_fn = NULL;
        t->pending = NULL;
        t->unusual--;
        if (result != NULL) {
            Py_CLEAR(result);
            PyErr_SetString(PyExc_SystemError, "materialise: the function did not run as a frame");
        }
    }
    mg_deactivate(&activation);
    return result;
}

#if !MG_BEFORE_3_12
static PyObject *
left_of_group(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *whole, *parts;
    if (!PyArg_ParseTuple(args, "OO!:left_of_group", &whole, &PyList_Type, &parts)) {
        return NULL;
    }
    return PyUnstable_Exc_PrepReraiseStar(whole, parts);
}
#endif

#else /* !MG_SUPPORTED */

static PyObject *
materialise(PyObject *Py_UNUSED(module), PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(nargs))
{
    PyErr_SetString(PyExc_NotImplementedError, "this version of Python is not known to magneto");
    return NULL;
}

#endif

/* ---- module ---- */

/* Sets a callback and returns the one before, None standing for none. */
static PyObject *
swap_callback(PyObject **where, PyObject *callback)
{
    if (callback != Py_None && !PyCallable_Check(callback)) {
        PyErr_SetString(PyExc_TypeError, "a callable or None");
        return NULL;
    }
    PyObject *old = *where;
    *where = callback == Py_None ? NULL : Py_NewRef(callback);
    return old != NULL ? old : Py_NewRef(Py_None);
}

static PyObject *
set_compiler(PyObject *Py_UNUSED(module), PyObject *callback)
{
    return swap_callback(&compiler, callback);
}

static PyObject *
set_on_rerun(PyObject *Py_UNUSED(module), PyObject *callback)
{
    return swap_callback(&on_rerun, callback);
}

static PyObject *
counters(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    return Py_BuildValue("{s:K,s:K,s:K,s:K,s:K,s:K}", "hooked", counts.hooked, "hits", counts.hits, "misses", counts.misses, "compiles",
                         counts.compiles, "reruns", counts.reruns, "interpreted", counts.interpreted);
}

#define FAST(f) ((PyCFunction)(void (*)(void))(f))

static PyMethodDef functions[] = {
    {"materialise", FAST(materialise), METH_FASTCALL,
     "materialise(fn, resume)\n\nRuns fn (over clone_code(code)) as a frame that starts in the state `resume` (and takes it); its result, or its exception."},
#if MG_SUPPORTED
    {"send_on", FAST(send_on), METH_FASTCALL, "One step of `yield from`: (whether the receiver returned, its value)."},
    {"handled_here", handled_here, METH_NOARGS, "The exception that the frame itself handles (a generator: without its caller's), or None."},
#endif
#if MG_SUPPORTED && !MG_BEFORE_3_12
    {"left_of_group", left_of_group, METH_VARARGS, "left_of_group(group, parts)\n\nWhat `except*` raises at its end, or None."},
#endif
    {"set_compiler", set_compiler, METH_O, "set_compiler(callback(policy, state, missed)) -> the callback before"},
    {"set_on_rerun", set_on_rerun, METH_O, "set_on_rerun(callback(region, exc)) -> the callback before"},
    {"counters", counters, METH_NOARGS, "What happened so far in this process."},
    {NULL, NULL, 0, NULL},
};

int
mg_eval_frame_init(PyObject *module)
{
    if (mg_add_sentinel(module, "SKIP_ENTRY", &skip_entry) < 0 || mg_add_sentinel(module, "SKIP_CODE", &skip_code) < 0 ||
        mg_add_sentinel(module, "DISABLE_CODE", &disable_code) < 0) {
        return -1;
    }
    if (PyModule_AddObjectRef(module, "SUPPORTED", MG_SUPPORTED ? Py_True : Py_False) < 0) {
        return -1;
    }
    return PyModule_AddFunctions(module, functions);
}
