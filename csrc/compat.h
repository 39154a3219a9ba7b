/* All knowledge of CPython versions on the C side. Include it first (it defines Py_BUILD_CORE before Python.h).
 *
 * MG_SUPPORTED is 0 where we do not know the interpreter's frames: then nothing private is included, and the extension still
 * builds and runs programs without capture.
 */
#ifndef MAGNETO_COMPAT_H
#define MAGNETO_COMPAT_H

#include <patchlevel.h>

#if !defined(MG_FORCE_UNSUPPORTED) && PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030E0000 && !defined(Py_GIL_DISABLED)
#define MG_SUPPORTED 1
#else
#define MG_SUPPORTED 0
#endif

#if MG_SUPPORTED
#define Py_BUILD_CORE 1
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include "magneto.h"

#define MG_BEFORE_3_12 (PY_VERSION_HEX < 0x030C0000)
#define MG_BEFORE_3_13 (PY_VERSION_HEX < 0x030D0000)

/* Facts about the instructions of one code object, worked out once (compat.c). */
typedef struct {
    int n_units;           /* length of the code in code units (2 bytes) */
    int first_traceable;   /* unit of the first RESUME: what stands before is the prologue */
    int n_cells;           /* cells made by the prologue ... */
    int *cells;            /* ... their localsplus slots */
    unsigned short units[]; /* per unit: MG_UNIT_* flags, and above them how many stack values its handler keeps */
} mg_layout;

enum {
    MG_UNIT_STARTS = 1,    /* an instruction starts here: an exception may be attributed to it */
    MG_UNIT_CONTINUES = 2, /* execution may continue here: no EXTENDED_ARG or KW_NAMES before it belongs to it */
    MG_UNIT_DEPTH_SHIFT = 2,
};

/* New layout (PyMem_Free it), or NULL with an exception set. */
mg_layout *mg_layout_of(PyCodeObject *code);

#if MG_SUPPORTED
#include "internal/pycore_frame.h"
#include "internal/pycore_code.h"
#include "internal/pycore_interp.h"
#include "opcode.h"
#if MG_BEFORE_3_13
#include "internal/pycore_runtime.h"
#endif

typedef struct _PyInterpreterFrame mg_frame;

#if MG_BEFORE_3_12
#define MG_REQUEST_EXTRA _PyEval_RequestCodeExtraIndex
#define MG_GET_EXTRA _PyCode_GetExtra
#define MG_SET_EXTRA _PyCode_SetExtra
#else
#define MG_REQUEST_EXTRA PyUnstable_Eval_RequestCodeExtraIndex
#define MG_GET_EXTRA PyUnstable_Code_GetExtra
#define MG_SET_EXTRA PyUnstable_Code_SetExtra
#endif

/* Whether a signal has come whose Python handler has not run yet. */
static inline int
mg_signal_waits(PyThreadState *ts)
{
#if MG_BEFORE_3_13
    (void)ts;
    return _Py_atomic_load_relaxed(&_PyRuntime.ceval.signals_pending) != 0;
#else
    return (ts->eval_breaker & (1U << 1)) != 0; /* _PY_SIGNALS_PENDING_BIT */
#endif
}

static inline PyCodeObject *
mg_frame_code(mg_frame *f)
{
#if MG_BEFORE_3_13
    return f->f_code;
#else
    return (PyCodeObject *)f->f_executable;
#endif
}

static inline PyFunctionObject *
mg_frame_function(mg_frame *f)
{
#if MG_BEFORE_3_12
    return f->f_func;
#else
    return (PyFunctionObject *)f->f_funcobj;
#endif
}

#if !MG_BEFORE_3_12
int mg_asks_for_events(PyInterpreterState *interp, PyCodeObject *code); /* compat.c */
#endif

/* Whether a function of the program is told of what this code does (sys.monitoring, from 3.12 on: coverage, debuggers). */
static inline int
mg_is_monitored(PyThreadState *ts, PyCodeObject *code)
{
#if MG_BEFORE_3_12
    (void)ts;
    (void)code;
    return 0;
#else
    uint64_t first, last;
    _Static_assert(sizeof(ts->interp->monitors.tools) == 15, "events");
    memcpy(&first, ts->interp->monitors.tools, 8);
    memcpy(&last, ts->interp->monitors.tools + 7, 8);
    return (MG_UNLIKELY((first | last) != 0) || MG_UNLIKELY(code->_co_monitoring != NULL)) && mg_asks_for_events(ts->interp, code);
#endif
}

/* Whether sys.monitoring has tools at all: only they may set events for one code object, which no other field of the interpreter tells. */
static inline int
mg_has_tools(PyThreadState *ts)
{
#if MG_BEFORE_3_12
    (void)ts;
    return 0;
#else
    PyObject **names = ts->interp->monitoring_tool_names;
    return ((uintptr_t)names[0] | (uintptr_t)names[1] | (uintptr_t)names[2] | (uintptr_t)names[3] | (uintptr_t)names[4] | (uintptr_t)names[5]) != 0;
#endif
}

/* The next instruction that `f` executes is the one at unit `unit`. */
static inline void
mg_frame_continue_at(mg_frame *f, int unit)
{
#if MG_BEFORE_3_13
    f->prev_instr = _PyCode_CODE(mg_frame_code(f)) + unit - 1;
#else
    f->instr_ptr = _PyCode_CODE(mg_frame_code(f)) + unit;
#endif
}

/* Offset of the instruction at which a suspended generator goes on. */
static inline int
mg_frame_suspended_at(mg_frame *f)
{
#if MG_BEFORE_3_13
    return 2 * (int)(f->prev_instr + 1 - _PyCode_CODE(mg_frame_code(f)));
#else
    return 2 * (int)(f->instr_ptr - _PyCode_CODE(mg_frame_code(f)));
#endif
}

/* The exception being raised belongs to the instruction at unit `unit` (compat.c). */
void mg_frame_raise_at(mg_frame *f, int unit);

/* A frame that is to raise at the first instruction of a handler (PUSH_EXC_INFO, at which CPython never raises): executes that
 * instruction. How many code units it takes, 0 for another instruction. */
int mg_frame_enter_handler(PyThreadState *ts, mg_frame *f, int unit);
/* Unwinds `f` to its own handler for `exc`, raised by the instruction at unit `unit`, as the interpreter would: a line in the
 * traceback, the stack the handler expects. The unit at which the handler starts; -1 (nothing done) when `f` has none, or when
 * somebody traces the thread (who wants to see the interpreter do it). */
int mg_frame_catch(PyThreadState *ts, mg_frame *f, PyObject *exc, int unit);

/* Ends `f` with `value` (stolen): what the evaluation function has to return. Everything above the locals of `f` is dropped.
 * 3.11 clears and pops the frame in our caller. Later versions do it inside the evaluation function: let CPython execute a
 * RETURN_VALUE that stands in an instruction stub of our own. */
PyObject *mg_frame_return(PyThreadState *ts, mg_frame *f, PyObject *value);

/* Drops the stack of a frame; the next instruction is a RETURN_VALUE of our own. */
void mg_frame_return_next(mg_frame *f);

/* From 3.12 on each run of the interpreter function also counts against a C recursion limit, which is meant for recursion that
 * is not bounded otherwise. A frame that comes through our hook would have been inlined into its caller's run without us, so
 * its units are handed back: programs reach the same depth as without us. (The C stack is watched by eval_frame.c.) */
static inline PyObject *
mg_interpret(PyThreadState *ts, mg_frame *f, int throwflag)
{
#if MG_BEFORE_3_12
    return _PyEval_EvalFrameDefault(ts, f, throwflag);
#else
    const int units = 2; /* PY_EVAL_C_STACK_UNITS */
    ts->c_recursion_remaining += units;
    PyObject *result = _PyEval_EvalFrameDefault(ts, f, throwflag);
    ts->c_recursion_remaining -= units;
    return result;
#endif
}

#endif /* MG_SUPPORTED */
#endif
