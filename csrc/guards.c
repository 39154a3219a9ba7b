/* GuardProgram: a guard set as a flat program over registers.
 *
 * A check runs in one of two ways.
 * - Precise: every instruction in order. Loads walk from the frame to a value, checks compare it. This is the meaning of a program.
 * - Fast: after a precise check has held, the program is *recorded*. A value reached only through dictionaries, tuples and held objects is
 *   stable: as long as those dictionaries are unchanged it is the same object, so that its register is pinned and neither its loads nor the
 *   checks that depend on nothing else are executed again. What stays is a list of fast operations in the original order: the loads and
 *   checks of what may change (locals, cells, slots, lists, classes of objects, tensors), and ENTRIES, which compare the versions of the
 *   dictionaries (3.11) or only where the instances keep them, their contents being watched (3.12 and later). An object found in a local
 *   and used as the base of an instance dictionary is assumed to be the one of the recording (PIN, by weak reference).
 * A failed check in the fast list is a miss; a failed ENTRIES, GLOBALS or PIN only means: run precisely, and record again.
 *
 * Ownership: a register holds a new reference, except for frame slots and held objects. Pinned values are borrowed from the dictionaries
 * that are known to be unchanged: by induction over the fast list each is alive when it is used. Objects whose identity is checked are
 * held by weak reference where they allow it, so that a program keeps no model alive.
 *
 * The fast list is only used when nothing in the program can run Python code after a pinned value has been taken (`steady`).
 */
#include "guards.h"

#define SMALL 96
#define TOO_OFTEN 3 /* stale recordings with few hits between them before recording pauses ... */
#define PAUSE 64    /* ... for so many checks */

/* ---- one instruction ---- */

static PyObject *
call_tuple(PyObject *callable, PyObject *args)
{
    PyObject *result = PyObject_Call(callable, args, NULL);
    if (result == NULL) {
        PyErr_Clear();
    }
    return result;
}

/* The value of a load, NULL when there is none; *owned: it is a new reference. *failed: it cannot be read at all (absent is something else). */
static PyObject *
load(const mg_instruction *in, PyObject *src, const mg_frame_view *view, int *owned, int *failed)
{
    PyObject *value = NULL;
    *owned = 0;
    *failed = 0;
    if (in->src >= 0 && src == NULL) {
        *failed = 1;
        return NULL;
    }
    switch (in->op) {
    case MG_G_LOCAL:
        *failed = in->n >= view->nlocalsplus;
        return *failed ? NULL : view->localsplus[in->n];
    case MG_G_STACK:
        *failed = in->n >= view->nstack;
        return *failed ? NULL : view->stack[in->n];
    case MG_G_HELD:
        return in->obj;
    }
    *owned = 1;
    switch (in->op) {
    case MG_G_GLOBAL:
        *failed = view->globals == NULL || !PyDict_CheckExact(view->globals);
        return *failed ? NULL : mg_raw_item(view->globals, in->obj);
    case MG_G_CELL:
        *failed = !PyCell_Check(src);
        return *failed ? NULL : Py_XNewRef(PyCell_GET(src));
    case MG_G_DICT: {
        PyObject **slot = mg_dict_slot(src);
        return slot ? Py_NewRef(*slot) : NULL;
    }
    case MG_G_ATTR:
        *failed = mg_raw_attr(src, in->obj, &value) < 0;
        return value;
    case MG_G_ITEM:
        return mg_raw_item(src, in->obj);
    case MG_G_PART:
        *failed = mg_iterator_part(src, (int)in->n, &value) < 0;
        return value;
    case MG_G_PEEK:
        *failed = mg_iterator_peek(src, (Py_ssize_t)in->n, (int)in->m, &value) < 0;
        return value;
    default: /* KEY_AT */
        return mg_raw_key(src, (Py_ssize_t)in->n);
    }
}

static int
class_holds(const mg_instruction *in)
{
    mg_class_state *state = in->data;
    PyTypeObject *type = (PyTypeObject *)in->obj;
    if (MG_LIKELY(state->version != 0 && mg_type_version(type) == state->version)) {
        return 1;
    }
    if (!mg_class_unchanged(type, state->snapshot)) {
        return 0;
    }
    state->version = mg_assign_type_version(type);
    return 1;
}

static int
int_holds(const mg_instruction *in, PyObject *value)
{
    int overflow;
    if (!PyLong_CheckExact(value)) {
        return 0;
    }
    int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow) {
        return overflow < 0 ? in->n == INT64_MIN : in->m == INT64_MAX;
    }
    return in->n <= number && number <= in->m;
}

static int
python_holds(PyObject *callable, PyObject *args, PyObject *expected)
{
    PyObject *result = call_tuple(callable, args);
    int holds = result != NULL && (expected != NULL ? mg_constant_equal(result, expected) : result == Py_True);
    Py_XDECREF(result);
    return holds;
}

/* A stable register's value is known without loading it, or loaded and then compared with what it was (which may have died). */
enum { KNOWN = 1, COMPARED = 2 };

typedef PyObject *(*register_reader)(const mg_program *, PyObject *const *, int);

static PyObject *
read_precise(const mg_program *p, PyObject *const *registers, int r)
{
    return registers[r];
}

static PyObject *
read_fast(const mg_program *p, PyObject *const *registers, int r)
{
    return p->stable[r] == KNOWN ? p->pinned[r] : registers[r];
}

static int
distinct_holds(const mg_program *p, const mg_instruction *in, PyObject *const *registers, register_reader read)
{
    const int *others = in->data;
    int n = (int)in->n, holds = 1;
    PyObject *small[64], **values = n <= 64 ? small : PyMem_Malloc(n * sizeof(PyObject *));
    if (values == NULL) {
        return 0;
    }
    for (int i = 0; i < n; i++) {
        values[i] = read(p, registers, others[i]);
        holds = holds && values[i] != NULL;
    }
    holds = holds && mg_all_distinct(values, n);
    if (values != small) {
        PyMem_Free(values);
    }
    return holds;
}

static inline int
id_holds(const mg_instruction *in, PyObject *src)
{
    return src == (in->m ? mg_weak_target(in->obj) : in->obj);
}

/* Whether a check holds for `src`. */
static int
check(const mg_program *p, const mg_instruction *in, PyObject *src, PyObject *const *registers, register_reader read)
{
    if (in->op == MG_G_IS_ABSENT) {
        return src == NULL;
    }
    if (in->src >= 0 && src == NULL) {
        return 0;
    }
    switch (in->op) {
    case MG_G_TYPE_IS:
        return (PyObject *)Py_TYPE(src) == in->obj;
    case MG_G_ID_IS:
        return id_holds(in, src);
    case MG_G_EQUALS:
        return mg_constant_equal(src, in->obj);
    case MG_G_TENSOR:
        return mg_tensor_holds(in->data, src);
    case MG_G_LENGTH:
        return mg_raw_length(src) == in->n;
    case MG_G_KEYS:
        return mg_keys_equal(src, in->obj);
    case MG_G_KEY_ABSENT:
        return mg_key_absent(src, in->obj);
    case MG_G_ATTR_ABSENT: {
        PyObject *value;
        int status = mg_raw_attr(src, in->obj, &value);
        Py_XDECREF(value);
        return status == 0;
    }
    case MG_G_SAME: {
        PyObject *other = read(p, registers, (int)in->n);
        return src == other;
    }
    case MG_G_DISTINCT:
        return distinct_holds(p, in, registers, read);
    case MG_G_TYPE_VERSION:
        return class_holds(in);
    case MG_G_STATE:
        return python_holds(PyTuple_GET_ITEM(in->obj, 0), PyTuple_GET_ITEM(in->obj, 1), PyTuple_GET_ITEM(in->obj, 2));
    case MG_G_PROBE:
        return mg_probe_holds(in);
    case MG_G_INT_RANGE:
        return int_holds(in, src);
    default: { /* PYTHON */
        PyObject *args = PyTuple_Pack(1, src);
        int holds = args != NULL && python_holds(in->obj, args, NULL);
        Py_XDECREF(args);
        PyErr_Clear();
        return holds;
    }
    }
}

/* ---- precise ---- */

typedef struct {
    PyObject **registers, **owned;
    int n_owned;
} work;

static int
run_precise(mg_program *p, const mg_frame_view *view, work *w)
{
    p->n_precise++;
    for (int i = 0; i < p->n_instructions; i++) {
        const mg_instruction *in = &p->instructions[i];
        PyObject *src = in->src >= 0 ? w->registers[in->src] : NULL;
        if (in->op < MG_G_LAST_LOAD) {
            int owned, failed;
            PyObject *value = load(in, src, view, &owned, &failed);
            if (failed || (value == NULL && !in->maybe)) {
                p->failed_row = in->row;
                return 0;
            }
            if (owned && value != NULL) {
                w->owned[w->n_owned++] = value;
            }
            w->registers[in->dst] = value;
        }
        else if (!check(p, in, src, w->registers, read_precise)) {
            p->failed_row = in->row;
            return 0;
        }
    }
    return 1;
}

/* ---- recording ---- */

static void
drop_watches(mg_program *p)
{
    for (int i = 0; i < p->n_watched; i++) {
        mg_unwatch(p->watched[i], &p->dirty);
    }
    p->n_watched = 0;
}

void
mg_forget_recording(mg_program *p)
{
    drop_watches(p);
    p->recorded = 0;
    for (int i = 0; i < p->n_fast; i++) {
        if (p->fast[i].op == MG_G_PIN) {
            Py_CLEAR(p->fast[i].obj);
        }
    }
    p->n_fast = 0;
    p->n_entries = 0;
}

static mg_fast_op *
emit(mg_program *p, unsigned char op)
{
    mg_fast_op *f = &p->fast[p->n_fast++];
    *f = (mg_fast_op){.op = op};
    return f;
}

static void
emit_instruction(mg_program *p, const mg_instruction *in)
{
    mg_fast_op *f = emit(p, in->op);
    f->in = in;
    f->tensor = in->op == MG_G_TENSOR ? in->data : NULL;
    f->value = in->src >= 0 && p->stable[in->src] ? p->pinned[in->src] : NULL;
}

static void
pin(mg_program *p, int r, PyObject *const *registers, unsigned char how)
{
    p->stable[r] = how;
    p->pinned[r] = registers[r];
}

/* From now on the check depends on `dict` being unchanged. 0, or -1: cannot be told. */
static int
track(mg_program *p, int r, PyObject *dict, PyObject **slot)
{
    if (p->entry_of[r] >= 0) {
        return 0;
    }
    mg_guard_entry *e = &p->entries[p->n_entries];
    *e = (mg_guard_entry){.slot = slot, .dict = dict};
#if MG_DICT_VERSIONS
    e->version = mg_dict_version(dict);
#else
    if (mg_make_watchable(dict) < 0 || mg_watch(dict, &p->dirty) < 0) {
        return -1;
    }
    p->watched[p->n_watched++] = dict;
    if (slot == NULL) { /* nothing to compare: the flag tells */
        p->entry_of[r] = 0;
        return 0;
    }
#endif
    p->entry_of[r] = p->n_entries++;
    mg_fast_op *last = p->n_fast ? &p->fast[p->n_fast - 1] : NULL;
    if (last != NULL && last->op == MG_G_ENTRIES && last->to == p->n_entries - 1) {
        last->to = p->n_entries;
    }
    else {
        mg_fast_op *f = emit(p, MG_G_ENTRIES);
        f->from = p->n_entries - 1;
        f->to = p->n_entries;
    }
    return 0;
}

/* The base of an instance dictionary that comes from the frame: assume that it stays the same object. 1 when that can be checked. */
static int
soft_pin(mg_program *p, int r, PyObject *const *registers)
{
    PyObject *ref = PyWeakref_NewRef(registers[r], NULL);
    if (ref == NULL) {
        PyErr_Clear();
        return 0;
    }
    mg_fast_op *f = emit(p, MG_G_PIN);
    f->obj = ref;
    f->from = r;
    pin(p, r, registers, COMPARED);
    return 1;
}

/* Records a load: 0, or -1 when the program cannot be recorded. */
static int
record_load(mg_program *p, const mg_instruction *in, const mg_frame_view *view, PyObject *const *registers)
{
    PyObject *src = in->src >= 0 ? registers[in->src] : NULL;
    int src_stable = in->src >= 0 && p->stable[in->src], keeps_order = src != NULL && !PyODict_Check(src);
    switch (in->op) {
    case MG_G_HELD:
        pin(p, in->dst, registers, KNOWN);
        return 0;
    case MG_G_GLOBAL: {
        int r = p->n_registers; /* one register more stands for the globals */
        if (p->entry_of[r] < 0) {
            emit(p, MG_G_GLOBALS)->obj = view->globals;
        }
        pin(p, in->dst, registers, KNOWN);
        return track(p, r, view->globals, NULL);
    }
    case MG_G_DICT:
        if (!src_stable && !soft_pin(p, in->src, registers)) {
            break;
        }
        if (registers[in->dst] == NULL) { /* no dictionary yet: looked at each time */
            break;
        }
        pin(p, in->dst, registers, KNOWN);
        return track(p, in->dst, registers[in->dst], mg_dict_slot(src));
    case MG_G_ITEM:
    case MG_G_KEY_AT:
        if (src_stable && PyDict_Check(src) && (in->op == MG_G_ITEM || keeps_order)) {
            pin(p, in->dst, registers, KNOWN);
            return track(p, in->src, src, NULL);
        }
        if (src_stable && PyTuple_Check(src)) {
            pin(p, in->dst, registers, KNOWN);
            return 0;
        }
        break;
    }
    emit_instruction(p, in);
    return 0;
}

/* Whether a constant stays equal to itself: all but lists, sets and what holds them. */
static int
is_immutable(PyObject *obj)
{
    if (PyTuple_Check(obj)) {
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(obj); i++) {
            if (!is_immutable(PyTuple_GET_ITEM(obj, i))) {
                return 0;
            }
        }
        return 1;
    }
    return !(PyList_Check(obj) || PyAnySet_Check(obj) || PySlice_Check(obj));
}

/* Records a check: 0, or -1. Nothing is emitted for what cannot change while the recording is valid. */
static int
record_check(mg_program *p, const mg_instruction *in, PyObject *const *registers)
{
    PyObject *src = in->src >= 0 ? registers[in->src] : NULL;
    int src_stable = in->src >= 0 && p->stable[in->src];
    int is_dict = src != NULL && PyDict_Check(src), keeps_order = is_dict && !PyODict_Check(src);
    switch (in->op) {
    case MG_G_ID_IS:
        if (!src_stable) {
            emit_instruction(p, in);
            pin(p, in->src, registers, COMPARED); /* the instruction just emitted makes sure of it */
        }
        return 0;
    case MG_G_TYPE_IS: /* an instance of a class made by a class statement may get another class */
        if (src_stable && !PyType_HasFeature(Py_TYPE(src), Py_TPFLAGS_HEAPTYPE) && !PyModule_Check(src)) {
            return 0;
        }
        break;
    case MG_G_EQUALS:
        if (src_stable && is_immutable(src)) {
            return 0;
        }
        break;
    case MG_G_INT_RANGE:
    case MG_G_IS_ABSENT:
        if (src_stable) {
            return 0;
        }
        break;
    case MG_G_LENGTH:
        if (src_stable && PyTuple_Check(src)) {
            return 0;
        }
        if (src_stable && is_dict) {
            return track(p, in->src, src, NULL);
        }
        break;
    case MG_G_KEYS:
    case MG_G_KEY_ABSENT:
        if (src_stable && (in->op == MG_G_KEYS ? keeps_order : is_dict)) {
            return track(p, in->src, src, NULL);
        }
        break;
    case MG_G_SAME:
        if (src_stable && p->stable[in->n]) {
            return 0;
        }
        break;
    }
    emit_instruction(p, in);
    return 0;
}

/* After a precise check has held with these registers. */
static void
record(mg_program *p, const mg_frame_view *view, PyObject *const *registers)
{
    mg_forget_recording(p);
    p->dirty = 0;
    p->n_recorded++;
    for (int r = 0; r <= p->n_registers; r++) {
        p->stable[r] = 0;
        p->pinned[r] = NULL;
        p->entry_of[r] = -1;
    }
    for (int i = 0; i < p->n_instructions; i++) {
        const mg_instruction *in = &p->instructions[i];
        if ((in->op < MG_G_LAST_LOAD ? record_load(p, in, view, registers) : record_check(p, in, registers)) < 0) {
            mg_forget_recording(p);
            p->pause = PAUSE;
            return;
        }
    }
    p->recorded = 1;
}

/* ---- fast ---- */

enum { MISS = 0, HIT = 1, STALE = 2 };

static inline int
entries_hold(const mg_guard_entry *e, const mg_guard_entry *end)
{
    for (; e < end; e++) {
        if (e->slot != NULL && *e->slot != e->dict) {
            return 0;
        }
#if MG_DICT_VERSIONS
        if (mg_dict_version(e->dict) != e->version) {
            return 0;
        }
#endif
    }
    return 1;
}

static MG_HOT int
run_fast(mg_program *p, const mg_frame_view *view, work *w)
{
    PyObject **registers = w->registers;
    for (const mg_fast_op *f = p->fast, *end = f + p->n_fast; f < end; f++) {
        const mg_instruction *in = f->in;
        int holds = 1;
        switch (f->op) {
        case MG_G_ENTRIES:
            if (!entries_hold(&p->entries[f->from], &p->entries[f->to])) {
                return STALE;
            }
            continue;
        case MG_G_GLOBALS:
            if (view->globals != f->obj) {
                return STALE;
            }
            continue;
        case MG_G_PIN:
            if (registers[f->from] != mg_weak_target(f->obj)) {
                return STALE;
            }
            continue;
        case MG_G_LOCAL:
            registers[in->dst] = in->n < view->nlocalsplus ? view->localsplus[in->n] : NULL;
            holds = registers[in->dst] != NULL || (in->maybe && in->n < view->nlocalsplus);
            break;
        case MG_G_PROBE:
            holds = mg_probe_holds(in);
            break;
        case MG_G_TENSOR: {
            PyObject *src = f->value != NULL ? f->value : registers[in->src];
            holds = src != NULL && mg_tensor_holds(f->tensor, src);
            break;
        }
        default: {
            PyObject *src = f->value != NULL ? f->value : in->src >= 0 ? registers[in->src] : NULL;
            if (f->op == MG_G_TYPE_IS) {
                holds = src != NULL && (PyObject *)Py_TYPE(src) == in->obj;
            }
            else if (f->op > MG_G_LAST_LOAD) {
                holds = check(p, in, src, registers, read_fast);
            }
            else {
                int owned, failed;
                PyObject *value = load(in, src, view, &owned, &failed);
                holds = !failed && (value != NULL || in->maybe);
                if (owned && value != NULL) {
                    w->owned[w->n_owned++] = value;
                }
                registers[in->dst] = value;
            }
        }
        }
        if (!holds) {
            p->failed_row = in->row;
            return MISS;
        }
    }
    return HIT;
}

/* ---- a check ---- */

static void
keep_exports(mg_program *p, PyObject *const *registers, register_reader read)
{
    for (int i = 0; i < p->n_exports; i++) {
        Py_XSETREF(p->export_values[i], Py_XNewRef(read(p, registers, p->exports[i])));
    }
}

static int
check_precisely(mg_program *p, const mg_frame_view *view, work *w, int may_record)
{
    w->n_owned = 0;
    if (!run_precise(p, view, w)) {
        return 0;
    }
    if (p->n_exports) {
        keep_exports(p, w->registers, read_precise);
    }
    if (p->pause > 0) {
        p->pause--;
    }
    else if (may_record && p->steady) {
        record(p, view, w->registers);
    }
    return 1;
}

static void
note_stale(mg_program *p)
{
    p->good = 0;
    if (++p->stale > TOO_OFTEN) {
        p->stale = 0;
        p->pause = PAUSE;
    }
}

static void
release(work *w)
{
    while (w->n_owned > 0) {
        Py_DECREF(w->owned[--w->n_owned]);
    }
}

static int
check_with(mg_program *p, const mg_frame_view *view, work *w)
{
    p->failed_row = -1;
    if (MG_UNLIKELY(p->cleared || (p->globals != NULL && p->globals != view->globals))) {
        return 0;
    }
    if (MG_UNLIKELY(p->busy)) { /* user code inside a check came back here: leave the recording alone */
        return check_precisely(p, view, w, 0);
    }
    p->busy = 1;
    int status = STALE;
    if (p->recorded && !p->dirty && p->pause == 0) {
        status = run_fast(p, view, w);
        if (MG_LIKELY(status == HIT)) {
            if (p->n_exports) {
                keep_exports(p, w->registers, read_fast);
            }
            if (p->stale && ++p->good >= 4 * TOO_OFTEN) {
                p->stale = p->good = 0;
            }
        }
    }
    if (status == STALE) {
        int was_recorded = p->recorded && p->pause == 0;
        release(w);
        status = check_precisely(p, view, w, 1);
        if (status == HIT && was_recorded) {
            note_stale(p);
        }
    }
    p->busy = 0;
    return status;
}

MG_HOT int
mg_guard_check(PyObject *program, const mg_frame_view *view)
{
    mg_program *p = (mg_program *)program;
    PyObject *small[2 * SMALL], **memory = p->n_registers <= SMALL ? small : PyMem_Malloc(2 * p->n_registers * sizeof(PyObject *));
    if (memory == NULL) {
        return 0;
    }
    work w = {memory, memory + p->n_registers, 0};
    Py_INCREF(program);
    int hit = check_with(p, view, &w);
    release(&w);
    if (memory != small) {
        PyMem_Free(memory);
    }
    Py_DECREF(program);
    return hit;
}

int
mg_guard_n_exports(PyObject *program)
{
    return ((mg_program *)program)->n_exports;
}

/* Moves the values that the last hit has left out of the program. */
int
mg_guard_exports(PyObject *program, const mg_frame_view *view, PyObject **out)
{
    mg_program *p = (mg_program *)program;
    for (int i = 0; i < p->n_exports; i++) {
        if (p->export_values[i] == NULL) {
            return -1;
        }
    }
    for (int i = 0; i < p->n_exports; i++) {
        out[i] = p->export_values[i];
        p->export_values[i] = NULL;
    }
    return 0;
}
