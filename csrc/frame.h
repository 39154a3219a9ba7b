/* Frame evaluation: the objects and the functions shared by its files.
 *
 *   Policy --owns--> entry points (policy, code, offset) --own--> Regions
 *   code object --code extra--> mg_code: a hash table of (borrowed) entry points
 *
 * An entry point dies with its policy or with its code object, whichever goes first. Nothing here holds a code object alive.
 */
#ifndef MAGNETO_FRAME_H
#define MAGNETO_FRAME_H

#include "compat.h"

typedef struct mg_code mg_code;
typedef struct mg_entry mg_entry;
typedef struct Region Region;
typedef struct Policy Policy;

/* ---- resume.c ---- */

extern PyObject *mg_unbound, *mg_null, *mg_keep; /* sentinels, immortal for us */
int mg_add_sentinel(PyObject *module, const char *name, PyObject **where); /* compared by identity, printed by name */

typedef struct {
    PyObject_HEAD
    int offset;       /* bytes */
    char interpret;   /* CPython runs the rest of the frame */
    PyObject *locals; /* tuple */
    PyObject *stack;  /* tuple, bottom first */
    PyObject *exc;    /* exception instance, or NULL */
    PyObject *handling; /* exception that the frame handles from now on, None for none; NULL = as before */
} Resume;

extern PyTypeObject *mg_resume_type;
void mg_dealloc(PyObject *op); /* of objects that own nothing but what tp_clear drops */
#define MG_IS_RESUME(op) (Py_TYPE(op) == mg_resume_type)

/* ---- region.c, entry.c ---- */

struct Region {
    PyObject_HEAD
    PyObject *fn;
    PyObject *guards; /* NULL: always hits */
    PyObject *info;
    char native;      /* guards is a GuardProgram (otherwise a Python predicate) */
    int n_exports;
    mg_entry *entry; /* NULL once removed; borrowed */
    unsigned long long hits;
    PyObject *inlined; /* tuple of code objects whose calls the region has taken in, or NULL */
    int n_args;
    int *args;      /* slot numbers */
};

enum { ENTRY_OPEN, ENTRY_SKIP, ENTRY_SKIP_CODE, ENTRY_DISABLED };

struct mg_entry {
    mg_code *owner;
    Policy *policy;
    mg_entry *prev, *next; /* the policy's list */
    int offset;
    int state; /* ENTRY_SKIP: do not call the compiler; ENTRY_SKIP_CODE: do not hook the code at all; ENTRY_DISABLED: nor what it calls */
    int n, capacity;
    Region **regions; /* owned; most recently used first */
};

struct Policy {
    PyObject_HEAD
    PyObject *payload;
    struct Policy *of; /* the policy whose regions are run; NULL: its own */
    PyObject *weakrefs;
    char compile;
    mg_entry *entries;
};

struct mg_code {
    PyCodeObject *code; /* borrowed: this struct is its code extra */
    mg_code *prev, *next;
    mg_layout *layout;  /* NULL until needed */
    PyObject *clone;    /* no-argument clone, or NULL */
    int n, mask;        /* entry points; table size - 1 */
    mg_entry **table;   /* open addressing by (policy, offset); NULL = free */
};

extern PyTypeObject *mg_policy_type, *mg_region_type;

mg_code *mg_code_of(PyCodeObject *code);      /* existing or new; NULL with an exception set */
mg_layout *mg_code_layout(PyCodeObject *code); /* borrowed; NULL with an exception set */
mg_entry *mg_entry_at(PyCodeObject *code, Policy *policy, int offset); /* existing or new; NULL with an exception set */
int mg_entry_push(mg_entry *entry, Region *region);                 /* at the front; takes a new reference; -1 with an exception set */
int mg_skip_code(mg_entry *entry);                                  /* -1 with an exception set */
void mg_entry_remove(mg_entry *entry, Region *region);              /* drops the entry's reference */
void mg_policy_drop_entries(Policy *policy);

/* Arguments of one region call: values[0] is room for vectorcall, then come the slots (borrowed), then the guard program's
 * exports (owned). Large ones live on the heap. */
enum { MG_SMALL_CALL = 24 };
typedef struct {
    PyObject **values;
    PyObject *small[MG_SMALL_CALL];
} mg_call;

/* Whether the guards of `region` hold; if so its exports stand in `call` and the caller has to end it with mg_call_release. */
int mg_region_match(Region *region, const mg_frame_view *view, mg_call *call);
void mg_call_release(Region *region, mg_call *call);

/* The first region that matches, moved to the front: new reference. NULL on a miss, without an exception. */
Region *mg_entry_match(mg_entry *entry, const mg_frame_view *view, mg_call *call);

/* ---- state.c ---- */

/* What the compiler gets to see of a frame. New reference, or NULL with an exception set. */
PyObject *mg_frame_state(const mg_frame_view *view, int offset, PyObject *function);

#if MG_SUPPORTED
extern Py_ssize_t mg_extra_index;

static inline mg_code *
mg_code_get(PyCodeObject *code)
{
    void *extra = NULL;
    if (MG_GET_EXTRA((PyObject *)code, mg_extra_index, &extra) < 0) {
        PyErr_Clear();
        return NULL;
    }
    return extra;
}

static inline size_t
mg_entry_hash(const Policy *policy, int offset)
{
    return ((size_t)policy >> 4) + (size_t)offset * 0x9E3779B1u;
}

static inline mg_entry *
mg_entry_find(const mg_code *owner, const Policy *policy, int offset)
{
    if (owner == NULL || owner->table == NULL) {
        return NULL;
    }
    for (size_t i = mg_entry_hash(policy, offset);; i++) {
        mg_entry *entry = owner->table[i & owner->mask];
        if (entry == NULL || (entry->policy == policy && entry->offset == offset)) {
            return entry;
        }
    }
}

/* ---- frame.c ---- */

/* Copies the cells of the closure into the free-variable slots of a frame that has not started (CPython would do it first), and
 * takes them out again. In between the slots own references. */
void mg_frame_bind_free(mg_frame *f);
void mg_frame_unbind_free(mg_frame *f);

/* Does what the instructions before RESUME do to the slots, except for free variables (see above). -1: exception set. */
int mg_frame_run_prologue(mg_frame *f);

/* Writes the state of `resume` into `f` (its slots and stack). `started`: the prologue has been done. 0, or -1 with SystemError
 * (state unchanged). */
int mg_frame_commit(mg_frame *f, Resume *resume, int started);
#endif

/* ---- activate.c ---- */

typedef struct {
    Policy *policy;          /* active now; owned; NULL = the hook is inactive */
    Policy *enclosing;       /* policy of the region or compiler call that runs, for call_active and materialise; borrowed */
    int unusual;             /* how many of the two next are set: one test on the fast path */
    PyObject *pending_fn;    /* materialise: the function whose frame takes `pending`; borrowed */
    Resume *pending;
    void *delegated;         /* frame that we handed to a foreign evaluation function */
    char *stack_low;         /* C stack addresses below this are nearly the end ... */
    char *stack_base;        /* ... of the thread's own stack, which ends here */
} mg_thread;

extern _Thread_local mg_thread mg_this_thread;

/* Round a call with the hook inactive: the policy stays owned by the caller of mg_switch_off. */
static inline Policy *
mg_switch_off(mg_thread *t)
{
    Policy *policy = t->policy;
    t->policy = NULL;
    return policy;
}

static inline void
mg_switch_back(mg_thread *t, Policy *policy)
{
    Py_XSETREF(t->policy, policy); /* (the call may have set one) */
}

/* Round a call during which the hook has to be in place. */
typedef struct {
    void *replaced; /* foreign evaluation function that stood in place of ours */
    PyObject *foreign; /* what the switch of a foreign compiler answered when it was turned off; NULL: it was not */
    Policy *policy, *enclosing; /* what was there before */
} mg_activation;

void mg_activate(mg_activation *activation, Policy *policy, Policy *enclosing);
void mg_deactivate(mg_activation *activation);

#if MG_SUPPORTED
extern _PyFrameEvalFunction mg_previous; /* what stood in our place; never ours */

int mg_stack_is_low(mg_thread *t, char *here); /* to be asked when here < t->stack_low */

/* Runs the frame with the hook taken out, so that what it calls uses no more C stack. Other threads merely run in eager. */
PyObject *mg_interpret_unhooked(PyThreadState *ts, mg_frame *f, int throwflag);

/* Hands the frame to the foreign function that was there before us. */
PyObject *mg_delegate(PyThreadState *ts, mg_thread *t, mg_frame *f, int throwflag);

/* ---- eval_frame.c ---- */

PyObject *mg_eval_frame(PyThreadState *ts, mg_frame *f, int throwflag);
#endif

#endif
