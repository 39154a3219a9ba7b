/* The part of the version knowledge that is more than a field access: instruction layout, raising and returning. */
#if !defined(NEED_OPCODE_TABLES)
#define NEED_OPCODE_TABLES   /* 3.11, 3.12: makes pycore_opcode.h define _PyOpcode_Caches */
#define NEED_OPCODE_METADATA /* 3.13: pycore_opcode_metadata.h likewise */
#endif
#include "compat.h"

#if MG_SUPPORTED
#if MG_BEFORE_3_13
#include "internal/pycore_opcode.h"
#else
#include "internal/pycore_opcode_metadata.h"
#endif

/* Whether an operand of the instruction `opcode` is kept in a C variable of the interpreter for the instruction that follows:
 * execution cannot start in between. */
static int
holds_operand(int opcode)
{
#ifdef KW_NAMES
    if (opcode == KW_NAMES) {
        return 1;
    }
#endif
    return opcode == EXTENDED_ARG;
}

/* One number of the exception table: big-endian groups of six bits, 0x40 = more follow (0x80 marks an entry's first byte). */
static const unsigned char *
read_varint(const unsigned char *p, int *value)
{
    int v = *p & 63;
    while (*p & 64) {
        p++;
        v = v << 6 | (*p & 63);
    }
    *value = v;
    return p + 1;
}

typedef struct {
    int start, length, target, depth; /* code units; how many stack values the handler keeps */
    int lasti;                        /* whether the handler wants the instruction's own unit below the exception */
} handler;

/* Reads one entry of the exception table; the one behind it. */
static const unsigned char *
read_handler(const unsigned char *p, handler *entry)
{
    int depth_lasti;
    p = read_varint(p, &entry->start);
    p = read_varint(p, &entry->length);
    p = read_varint(p, &entry->target);
    p = read_varint(p, &depth_lasti);
    entry->depth = depth_lasti >> 1;
    entry->lasti = depth_lasti & 1;
    return p;
}

static void
note_handlers(PyCodeObject *code, mg_layout *layout)
{
    const unsigned char *p = (const unsigned char *)PyBytes_AS_STRING(code->co_exceptiontable);
    const unsigned char *end = p + PyBytes_GET_SIZE(code->co_exceptiontable);
    while (p < end) {
        handler entry;
        p = read_handler(p, &entry);
        for (int unit = entry.start; unit < entry.start + entry.length && unit < layout->n_units; unit++) {
            layout->units[unit] |= (unsigned short)(entry.depth << MG_UNIT_DEPTH_SHIFT);
        }
    }
}

mg_layout *
mg_layout_of(PyCodeObject *code)
{
    mg_layout *layout = NULL;
    PyObject *bytes = PyCode_GetCode(code); /* without specialised or instrumented instructions */
    if (bytes == NULL) {
        return NULL;
    }
    const unsigned char *raw = (const unsigned char *)PyBytes_AS_STRING(bytes);
    int n = (int)(PyBytes_GET_SIZE(bytes) / 2);
    size_t cells_at = (sizeof(mg_layout) + n * sizeof(layout->units[0]) + sizeof(int) - 1) / sizeof(int) * sizeof(int);
    layout = PyMem_Calloc(1, cells_at + sizeof(int) * (code->co_nlocalsplus + 1));
    if (layout == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    layout->n_units = n;
    layout->first_traceable = code->_co_firsttraceable;
    layout->cells = (int *)((char *)layout + cells_at);
    int held = 0, oparg = 0;
    for (int unit = 0; unit < n;) {
        int opcode = raw[2 * unit];
        layout->units[unit] = MG_UNIT_STARTS | (held ? 0 : MG_UNIT_CONTINUES);
        oparg = oparg << 8 | raw[2 * unit + 1];
        if (opcode == MAKE_CELL && unit < layout->first_traceable && layout->n_cells < code->co_nlocalsplus) {
            layout->cells[layout->n_cells++] = oparg;
        }
#ifdef PRECALL
        held = holds_operand(opcode) || (held && opcode == PRECALL); /* 3.11: KW_NAMES, PRECALL, CALL */
#else
        held = holds_operand(opcode);
#endif
        if (opcode != EXTENDED_ARG) {
            oparg = 0;
        }
        unit += 1 + _PyOpcode_Caches[opcode];
    }
    note_handlers(code, layout);
done:
    Py_DECREF(bytes);
    return layout;
}

/* The entry of the exception table that covers the unit. 0: there is none. */
static int
find_handler(PyCodeObject *code, int unit, handler *entry)
{
    const unsigned char *p = (const unsigned char *)PyBytes_AS_STRING(code->co_exceptiontable);
    const unsigned char *end = p + PyBytes_GET_SIZE(code->co_exceptiontable);
    while (p < end) {
        p = read_handler(p, entry);
        if (entry->start <= unit && unit < entry->start + entry->length) {
            return 1;
        }
    }
    return 0;
}

#if !MG_BEFORE_3_13
/* Where the exception table's entry that covers the unit starts, or -1. */
static int
covering_entry(PyCodeObject *code, int unit)
{
    handler entry;
    return find_handler(code, unit, &entry) ? entry.start : -1;
}
#endif

/* Whether a debugger, profiler or monitor wants to see exceptions. */
static int
is_watched(PyThreadState *ts)
{
#if MG_BEFORE_3_12
    return ts->cframe->use_tracing;
#else
    const uint8_t *tools = ts->interp->monitors.tools;
    return tools[PY_MONITORING_EVENT_RAISE] | tools[PY_MONITORING_EVENT_RERAISE] | tools[PY_MONITORING_EVENT_EXCEPTION_HANDLED];
#endif
}

#if !MG_BEFORE_3_12
/* Of the tools, 6 and 7 are sys.setprofile and sys.settrace, which eval_frame.c asks for by themselves. A profiler written in C (cProfile) only counts. */
int
mg_asks_for_events(PyInterpreterState *interp, PyCodeObject *code)
{
    const uint8_t *own = code->_co_monitoring != NULL ? code->_co_monitoring->local_monitors.tools : NULL;
    for (int event = 0; event < _PY_MONITORING_UNGROUPED_EVENTS; event++) {
        int tools = interp->monitors.tools[event] | (own != NULL && event < _PY_MONITORING_LOCAL_EVENTS ? own[event] : 0);
        for (int tool = 0; tool < 6; tool++) {
            PyObject *callback = interp->monitoring_callables[tool][event];
            const int counts = tool == 2 && callback != NULL && PyCFunction_Check(callback); /* sys.monitoring.PROFILER_ID */
            if ((tools & (1 << tool)) && callback != NULL && !counts) {
                return 1;
            }
        }
    }
    return 0;
}
#endif

static int
opcode_at(PyCodeObject *code, int unit, int *oparg)
{
    _Py_CODEUNIT word = _PyCode_CODE(code)[unit];
#if MG_BEFORE_3_12
    *oparg = _Py_OPARG(word);
    return _Py_OPCODE(word);
#else
    *oparg = word.op.arg;
    return word.op.code;
#endif
}

/* Whether the instruction is a `raise` without an exception: the traceback has the frame's line already. */
static int
is_reraise(PyCodeObject *code, int unit)
{
    int oparg;
    return opcode_at(code, unit, &oparg) == RAISE_VARARGS && oparg == 0;
}

int
mg_frame_enter_handler(PyThreadState *ts, mg_frame *f, int unit)
{
    int oparg;
    if (opcode_at(mg_frame_code(f), unit, &oparg) != PUSH_EXC_INFO) {
        return 0;
    }
    PyObject **top = &f->localsplus[f->stacktop - 1], **handled = &ts->exc_info->exc_value, *exc = *top;
    *top = *handled != NULL ? *handled : Py_NewRef(Py_None);
    *handled = exc;
    f->localsplus[f->stacktop++] = Py_NewRef(exc);
    return 1;
}

/* Adds the line of `f` to the traceback of `exc`. */
static int
add_traceback(PyThreadState *ts, mg_frame *f, PyObject *exc)
{
#if MG_BEFORE_3_13
    mg_frame **current = &ts->cframe->current_frame;
#else
    mg_frame **current = &ts->current_frame;
#endif
    mg_frame *above = *current;
    f->previous = above; /* as the interpreter links it when the frame goes on */
    *current = f;
    PyFrameObject *frame = PyThreadState_GetFrame(ts);
    *current = above;
    if (frame == NULL) {
        PyErr_Clear();
        return -1;
    }
    PyErr_Restore(Py_NewRef(Py_TYPE(exc)), Py_NewRef(exc), PyException_GetTraceback(exc));
    int status = PyTraceBack_Here(frame);
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (status == 0 && traceback != NULL) {
        PyException_SetTraceback(exc, traceback);
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    Py_DECREF(frame);
    return status;
}

int
mg_frame_catch(PyThreadState *ts, mg_frame *f, PyObject *exc, int unit)
{
    PyCodeObject *code = mg_frame_code(f);
    handler entry;
    if (!find_handler(code, unit, &entry) || is_watched(ts)) {
        return -1;
    }
    int top = code->co_nlocalsplus + entry.depth;
    PyObject *lasti = entry.lasti ? PyLong_FromLong(unit) : NULL;
    if (top > f->stacktop || (entry.lasti && lasti == NULL)) {
        PyErr_Clear();
        return -1;
    }
    mg_frame_continue_at(f, unit);
#if MG_BEFORE_3_13
    f->prev_instr++; /* the traceback's line is that of the instruction last begun */
#endif
    if (!is_reraise(code, unit) && add_traceback(ts, f, exc) < 0) {
        Py_XDECREF(lasti);
        return -1;
    }
    while (f->stacktop > top) {
        PyObject *dropped = f->localsplus[--f->stacktop];
        Py_XDECREF(dropped);
    }
    if (lasti != NULL) {
        f->localsplus[f->stacktop++] = lasti;
    }
    f->localsplus[f->stacktop++] = Py_NewRef(exc);
    mg_frame_continue_at(f, entry.target);
    return entry.target;
}

void
mg_frame_raise_at(mg_frame *f, int unit)
{
    PyCodeObject *code = mg_frame_code(f);
#if MG_BEFORE_3_13
    f->prev_instr = _PyCode_CODE(code) + unit;
#else
    /* 3.13 takes the traceback's line from instr_ptr but looks the handler up at instr_ptr - 1. Where both units have the
     * same handler the instruction itself is exact. Otherwise the handler decides, and one unit further is nearly always still
     * the instruction (its inline cache) or an instruction of the same line. */
    int shift = unit > 0 && covering_entry(code, unit - 1) != covering_entry(code, unit);
    f->instr_ptr = _PyCode_CODE(code) + unit + shift;
#endif
}

/* What is left on the stack dies with the frame, behind its variables: mostly it is what the region was about to give to one. (Not where somebody may
 * keep the frame, nor in debug builds, which assert that nothing is left.) */
void
mg_frame_return_next(mg_frame *f)
{
#ifndef Py_DEBUG
    const int base = f->frame_obj == NULL ? f->stacktop : mg_frame_code(f)->co_nlocalsplus;
#else
    const int base = mg_frame_code(f)->co_nlocalsplus;
#endif
    while (f->stacktop > base) {
        PyObject *dropped = f->localsplus[--f->stacktop];
        Py_XDECREF(dropped);
    }
#if MG_BEFORE_3_12
    static _Py_CODEUNIT stub[2];
    memset(stub, 0, sizeof(stub));
    ((unsigned char *)stub)[0] = ((unsigned char *)stub)[2] = RETURN_VALUE;
#else
    static _Py_CODEUNIT stub[2] = {{.op.code = RETURN_VALUE}, {.op.code = RETURN_VALUE}};
#endif
#if MG_BEFORE_3_13
    f->prev_instr = stub; /* executes stub[1] */
#else
    f->instr_ptr = stub;
#endif
}

PyObject *
mg_frame_return(PyThreadState *ts, mg_frame *f, PyObject *value)
{
    mg_frame_return_next(f);
#if MG_BEFORE_3_12
    return value;
#else
    f->localsplus[f->stacktop++] = value;
    return mg_interpret(ts, f, 0);
#endif
}

#else /* !MG_SUPPORTED */

mg_layout *
mg_layout_of(PyCodeObject *Py_UNUSED(code))
{
    PyErr_SetString(PyExc_NotImplementedError, "this version of Python is not known to magneto");
    return NULL;
}

#endif
