/* GuardProgram: a guard set as a flat program over registers.
 *
 * A check runs in one of two ways.
 * - Precise: every instruction in order. Loads walk from the frame to a value, checks compare it. This is the meaning of a program.
 * - Fast: after a precise check has held, the program is *recorded*. A value reached only through dictionaries, tuples and held objects is
 *   stable: as long as those dictionaries are unchanged it is the same object, so that its register is pinned and neither its loads nor the
 *   checks that depend on nothing else are executed again. What stays is a list of fast operations in the original order: the loads and
 *   checks of what may change (locals, cells, slots, lists, tensors), and ENTRIES, which compare the classes of objects and the versions of
 *   dictionaries (3.11) or only where the instances keep them, their contents being watched (3.12 and later). An object found in a local
 *   and used as the base of an instance dictionary is assumed to be the one of the recording (PIN, by weak reference).
 * A failed check in the fast list is a miss; a failed ENTRIES, GLOBALS or PIN only means: run precisely, and record again.
 *
 * Ownership: a register holds a new reference, except for frame slots and held objects. Pinned values are borrowed from the dictionaries
 * that are known to be unchanged: by induction over the fast list each is alive when it is used. Objects whose identity is checked, and
 * classes and functions that may die, are held by weak reference where they allow it: a program keeps no model alive.
 *
 * The fast list is only used when nothing in the program can run Python code after a pinned value has been taken (`steady`).
 */
#include "guards.h"

#define SMALL 96
#define TOO_OFTEN 3 /* stale recordings with few hits between them before recording pauses (MG_PAUSE) */

static PyObject *
read_precise(const mg_program *p, PyObject *const *registers, int r)
{
    return registers[r];
}

static PyObject *
read_fast(const mg_program *p, PyObject *const *registers, int r)
{
    return p->stable[r] == MG_KNOWN ? p->pinned[r] : registers[r];
}

/* ---- precise ---- */

typedef struct {
    PyObject **registers, **owned;
    int n_owned;
    PyObject **out; /* room for the exports, or NULL */
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
            PyObject *value = mg_guard_load(in, src, view, &owned, &failed);
            if (failed || (value == NULL && !in->maybe)) {
                p->failed_row = in->row;
                return 0;
            }
            if (owned && value != NULL) {
                w->owned[w->n_owned++] = value;
            }
            w->registers[in->dst] = value;
        }
        else if (!mg_guard_holds(p, in, src, w->registers, read_precise)) {
            p->failed_row = in->row;
            return 0;
        }
    }
    return 1;
}

/* ---- fast ---- */

enum { MISS = 0, HIT = 1, STALE = 2 };

static inline int
entries_hold(const mg_guard_entry *e, const mg_guard_entry *end)
{
    for (; e < end; e++) {
        if (e->slot != NULL && *e->slot != e->value) {
            return 0;
        }
#if MG_DICT_VERSIONS
        if (e->version != 0 && mg_dict_version(e->value) != e->version) {
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
                holds = src != NULL && (PyObject *)Py_TYPE(src) == (MG_UNLIKELY(in->m) ? mg_weak_target(in->obj) : in->obj);
            }
            else if (f->op > MG_G_LAST_LOAD) {
                holds = mg_guard_holds(p, in, src, registers, read_fast);
            }
            else {
                int owned, failed;
                PyObject *value = mg_guard_load(in, src, view, &owned, &failed);
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

/* New references to the values of `n` registers. 0, or -1 (nothing written): one of them holds none. */
static inline int
hand_out(const mg_program *p, PyObject *const *registers, mg_register_reader read, const int *which, int n, PyObject **out)
{
    for (int i = 0; i < n; i++) {
        PyObject *value = read(p, registers, which[i]);
        if (MG_UNLIKELY(value == NULL)) {
            while (i > 0) {
                i--;
                Py_CLEAR(out[i]);
            }
            return -1;
        }
        out[i] = Py_NewRef(value);
    }
    return 0;
}

/* After the guards have held: what they have fetched and the region takes. 0 is a miss, in which nothing has been handed out. */
static inline int
hand_over(mg_program *p, const work *w, mg_register_reader read)
{
    PyObject **out = w->out, *packed = NULL;
    if (out == NULL) {
        return 1;
    }
    if (p->packed != NULL) {
        packed = PyTuple_New(p->n_packed);
        if (packed == NULL) {
            PyErr_Clear();
            goto miss;
        }
        if (hand_out(p, w->registers, read, p->packed, p->n_packed, ((PyTupleObject *)packed)->ob_item) < 0) {
            goto miss;
        }
        out[p->n_exports] = packed;
    }
    if (hand_out(p, w->registers, read, p->exports, p->n_exports, out) == 0) {
        return 1;
    }
miss:
    Py_XDECREF(packed);
    p->failed_row = MG_NO_ROW;
    return 0;
}

static int
check_precisely(mg_program *p, const mg_frame_view *view, work *w, int may_record)
{
    w->n_owned = 0;
    if (!run_precise(p, view, w)) {
        return 0;
    }
    if (!hand_over(p, w, read_precise)) {
        return 0;
    }
    if (p->pause > 0) {
        p->pause--;
    }
    else if (may_record && p->steady) {
        mg_guard_record(p, view, w->registers);
    }
    return 1;
}

static void
note_stale(mg_program *p)
{
    p->good = 0;
    if (++p->stale > TOO_OFTEN) {
        p->stale = 0;
        p->pause = MG_PAUSE;
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
            status = hand_over(p, w, read_fast);
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
mg_guard_check(PyObject *program, const mg_frame_view *view, PyObject **out)
{
    mg_program *p = (mg_program *)program;
    PyObject *small[2 * SMALL], **memory = p->n_registers <= SMALL ? small : PyMem_Malloc(2 * p->n_registers * sizeof(PyObject *));
    if (memory == NULL) {
        return 0;
    }
    work w = {memory, memory + p->n_registers, 0, out};
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
    const mg_program *p = (const mg_program *)program;
    return p->n_exports + (p->packed != NULL);
}
