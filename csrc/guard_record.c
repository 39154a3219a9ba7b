/* The recording of a guard program: which of its loads and checks the fast list keeps (guards.c says what the list means). */
#include "guards.h"

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

/* From now on the check depends on `*slot` (NULL: no such place) being `value`, and `value` on its version unless that is 0. */
static void
add_entry(mg_program *p, PyObject **slot, PyObject *value, uint64_t version)
{
    mg_fast_op *last = p->n_fast ? &p->fast[p->n_fast - 1] : NULL;
    p->entries[p->n_entries++] = (mg_guard_entry){.slot = slot, .value = value, .version = version};
    if (last == NULL || last->op != MG_G_ENTRIES || last->to != p->n_entries - 1) {
        last = emit(p, MG_G_ENTRIES);
        last->from = p->n_entries - 1;
    }
    last->to = p->n_entries;
}

/* From now on the check depends on `dict` being unchanged. 0, or -1: cannot be told. */
static int
track(mg_program *p, int r, PyObject *dict, PyObject **slot)
{
    if (p->entry_of[r] >= 0) {
        return 0;
    }
#if MG_DICT_VERSIONS
    p->entry_of[r] = p->n_entries;
    add_entry(p, slot, dict, mg_dict_version(dict));
#else
    if (mg_make_watchable(dict) < 0 || mg_watch(dict, &p->dirty) < 0) {
        return -1;
    }
    p->watched[p->n_watched++] = dict;
    p->entry_of[r] = 0;
    if (slot != NULL) { /* otherwise the flag tells */
        add_entry(p, slot, dict, 0);
    }
#endif
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
    pin(p, r, registers, MG_COMPARED);
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
        if (in->m) { /* it may be gone */
            emit_instruction(p, in);
            pin(p, in->dst, registers, MG_COMPARED);
            return 0;
        }
        pin(p, in->dst, registers, MG_KNOWN);
        return 0;
    case MG_G_GLOBAL: {
        int r = p->n_registers; /* one register more stands for the globals */
        if (p->entry_of[r] < 0) {
            emit(p, MG_G_GLOBALS)->obj = view->globals;
        }
        pin(p, in->dst, registers, MG_KNOWN);
        return track(p, r, view->globals, NULL);
    }
    case MG_G_DICT:
        if (!src_stable && !soft_pin(p, in->src, registers)) {
            break;
        }
        if (registers[in->dst] == NULL) { /* no dictionary yet: looked at each time */
            break;
        }
        pin(p, in->dst, registers, MG_KNOWN);
        return track(p, in->dst, registers[in->dst], mg_dict_slot(src));
    case MG_G_ITEM:
    case MG_G_KEY_AT:
        if (src_stable && PyDict_Check(src) && (in->op == MG_G_ITEM || keeps_order)) {
            pin(p, in->dst, registers, MG_KNOWN);
            return track(p, in->src, src, NULL);
        }
        if (src_stable && PyTuple_Check(src)) {
            pin(p, in->dst, registers, MG_KNOWN);
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
            pin(p, in->src, registers, MG_COMPARED); /* the instruction just emitted makes sure of it */
        }
        return 0;
    case MG_G_TYPE_IS: /* an instance of a class made by a class statement may get another class */
        if (src_stable && !PyType_HasFeature(Py_TYPE(src), Py_TPFLAGS_HEAPTYPE) && !PyModule_Check(src)) {
            return 0;
        }
        if (src_stable && !in->m) {
            add_entry(p, (PyObject **)&src->ob_type, (PyObject *)Py_TYPE(src), 0);
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

void
mg_guard_record(mg_program *p, const mg_frame_view *view, PyObject *const *registers)
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
            p->pause = MG_PAUSE;
            return;
        }
    }
    p->recorded = 1;
}
