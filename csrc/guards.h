/* Guard programs, shared by guards.c (the program), guard_values.c (reading values without user code), guard_tensor.c (facts about
 * tensors and torch's modes) and guard_watch.c (has a dictionary changed?). */
#ifndef MAGNETO_GUARDS_H
#define MAGNETO_GUARDS_H

#include "compat_guards.h"
#include "dlpack.h"

/* Loads write a register; everything after LAST_LOAD checks one. The names are the contract with dynamo/guards/native.py. */
#define MG_GUARD_OPS(X)                                                                                                           \
    X(LOCAL) X(STACK) X(GLOBAL) X(HELD) X(CELL) X(DICT) X(ATTR) X(ITEM) X(KEY_AT) X(PART) X(PEEK) X(LAST_LOAD)                     \
    X(TYPE_IS) X(ID_IS) X(EQUALS) X(TENSOR) X(LENGTH) X(KEYS) X(KEY_ABSENT) X(IS_ABSENT) X(ATTR_ABSENT) X(SAME) X(DISTINCT)         \
    X(MEMBER) X(NOT_MEMBER) X(TYPE_VERSION) X(STATE) X(PROBE) X(INT_RANGE) X(SIZES) X(PYTHON) X(LAST_CHECK)                                               \
    X(ENTRIES) X(GLOBALS) X(PIN)

enum mg_guard_op {
#define MG_GUARD_ENUM(name) MG_G_##name,
    MG_GUARD_OPS(MG_GUARD_ENUM)
#undef MG_GUARD_ENUM
};

typedef struct {
    unsigned char op;
    unsigned char maybe; /* a load: the value may be absent (the register is then NULL); HELD, TYPE_IS, TYPE_VERSION: to be held weakly (`m`: it is) */
    int dst, src;        /* registers, -1 = none */
    int row;             /* row of the GuardSet, reported after a miss */
    int64_t n, m;        /* small numbers of the payload */
    PyObject *obj;       /* object of the payload (owned) or NULL */
    void *data;          /* PyMem block of the payload (owned) or NULL */
} mg_instruction;

#define MG_DYNAMIC INT64_MIN /* a size or stride that is not compared */

/* The words of a tensor that hold its sizes, strides, offset, dtype, device and dispatch keys, when calibration has found them. */
#define MG_META_WORDS 15
#define MG_INLINE_SIZES 5

/* Expected facts about a tensor. */
typedef struct {
    PyTypeObject *cls;
    int requires_grad; /* -1: not looked at */
    int may_remember;  /* equal words mean equal facts for this device */
    int remembered;
    uint64_t words[MG_META_WORDS]; /* of the last tensor that was like this: equal words need no closer look */
    PyObject *dtype; /* compared when the DLPack code does not tell it apart, else NULL */
    uint64_t keys;   /* dispatch key set; compared when has_keys */
    uint32_t dtype_key;
    int has_keys;
    mg_dldevice device;
    int ndim, has_strides;
    int64_t sizes[]; /* shape, then strides */
} mg_tensor_row;

/* Sizes and strides of several tensors; Python says whether they go together, and those for which it last said so are remembered. */
typedef struct {
    int n, known;
    int *registers;
    int64_t count, *last, *now; /* numbers: of each tensor its sizes, then its strides */
} mg_sizes_row;
#define MG_MOST_SIZED 256 /* tensors of one row */

/* guard_values.c. None of them leaves an exception set. */
int mg_constant_equal(PyObject *a, PyObject *b);
int mg_raw_attr(PyObject *obj, PyObject *name, PyObject **out); /* 1: *out new; 0: absent; -1: not readable without user code */
PyObject *mg_raw_item(PyObject *obj, PyObject *key);            /* new or NULL */
PyObject *mg_raw_key(PyObject *obj, Py_ssize_t index);          /* new or NULL */
Py_ssize_t mg_raw_length(PyObject *obj);                        /* -1: none */
int mg_keys_equal(PyObject *obj, PyObject *keys);
int mg_is_element(PyObject *set, PyObject *obj); /* by identity; -1: not a set */
int mg_key_absent(PyObject *obj, PyObject *key); /* 1 only when obj is a dict and does not hold the key */
PyObject *mg_class_snapshot(PyTypeObject *type);
int mg_class_unchanged(PyTypeObject *type, PyObject *snapshot);
int mg_guard_values_init(PyObject *module);

/* guard_iterators.c. Both: 1: *out new; 0: there is none; -1: it cannot be known. No exception is left set.
 * Parts: 0 what is iterated over (zip, map: a tuple of iterators; filter: the function), 1: zip: whether strict; map: the function; filter: the iterator.
 * Peek: the item `ahead` steps after the next one (enumerate: its number); `part` 1, 2: only the key or value, of an iterator over a dictionary. */
int mg_iterator_part(PyObject *it, int part, PyObject **out);
int mg_iterator_peek(PyObject *it, Py_ssize_t ahead, int part, PyObject **out);
int mg_guard_iterators_init(PyObject *module);
/* frame.c, of generators that are not running: slots and stack by number (locals first), below 0: */
enum { MG_GEN_OFFSET = -1, MG_GEN_FUNCTION = -2, MG_GEN_CODE = -3, MG_GEN_DEPTH = -4 }; /* where it goes on (0: finished) ... size of its stack */
int mg_generator_part(PyObject *generator, int part, PyObject **out);

/* guard_tensor.c */
mg_tensor_row *mg_tensor_row_new(PyObject *payload);
int mg_tensor_holds(mg_tensor_row *row, PyObject *value);
int mg_is_tensor(PyObject *value);
int mg_is_tensor_type(PyTypeObject *type); /* a getter of this class may run __torch_function__ */
int mg_tensor_getter_is_plain(PyObject *tensor);
int mg_all_distinct(PyObject **values, int n);
mg_sizes_row *mg_sizes_row_new(PyObject *registers, Py_ssize_t count, int n_registers);
int mg_sizes_hold(mg_sizes_row *row, PyObject *fits, PyObject *const *values);
int mg_probe_holds(const mg_instruction *in);
int mg_guard_tensor_init(PyObject *module);

/* guard_watch.c: from 3.12 on. `*flag` becomes 1 when one of the dictionaries is changed, cleared or freed. */
int mg_watch_available(void);
int mg_watch(PyObject *dict, unsigned char *flag); /* 0 = watched */
void mg_unwatch(PyObject *dict, unsigned char *flag);

/* ---- the program ---- */

typedef struct {
    PyObject **slot;  /* where an instance keeps the dictionary, or its class; NULL when another entry leads to it */
    PyObject *value;  /* borrowed */
    uint64_t version; /* of a dictionary, 0: not compared */
} mg_guard_entry;

typedef struct {
    const mg_instruction *in; /* NULL for the operations that only the fast list has */
    PyObject *value;          /* the source register when it is pinned (borrowed), NULL: read the register */
    unsigned char op;
    int from, to;  /* ENTRIES: a range; PIN: from = register */
    PyObject *obj; /* PIN: weak reference (owned); GLOBALS: the dictionary (borrowed, only compared) */
    mg_tensor_row *tensor; /* TENSOR: data of the instruction */
} mg_fast_op;

typedef struct {
    PyObject_HEAD
    int n_instructions, n_registers, n_exports, n_packed, failed_row;
    mg_instruction *instructions;
    int *exports; /* registers handed out one by one ... */
    int *packed;  /* ... and as one tuple behind them; NULL: no such tuple */
    PyObject *globals; /* the only globals for which the program may hold (owned), or NULL */
    /* the recording */
    unsigned char steady, recorded, dirty, busy, cleared;
    int n_fast, n_entries, n_watched;
    mg_fast_op *fast;
    mg_guard_entry *entries;
    PyObject **watched; /* dictionaries with a watch on `dirty` (not references) */
    PyObject **pinned;  /* value of each stable register (borrowed) */
    unsigned char *stable;
    int *entry_of; /* per register, while recording */
    int stale, good, pause;
    unsigned long long n_precise, n_recorded;
} mg_program;

/* Data of a TYPE_VERSION instruction. */
typedef struct {
    unsigned int version;
    PyObject *snapshot; /* owned; NULL for a class held weakly */
} mg_class_state;

/* A stable register's value is known without loading it, or loaded and then compared with what it was (which may have died). */
enum { MG_KNOWN = 1, MG_COMPARED = 2 };
enum { MG_NO_ROW = -2 }; /* the failed row when a value to be handed out is missing */
#define MG_PAUSE 64      /* checks for which nothing is recorded, when recordings do not last */

typedef PyObject *(*mg_register_reader)(const mg_program *, PyObject *const *, int);

/* guard_step.c. The value of a load, NULL when there is none; *owned: it is a new reference. *failed: it cannot be read at all (absent is something else). */
PyObject *mg_guard_load(const mg_instruction *in, PyObject *src, const mg_frame_view *view, int *owned, int *failed);
int mg_guard_holds(const mg_program *p, const mg_instruction *in, PyObject *src, PyObject *const *registers, mg_register_reader read);

/* guard_record.c */
void mg_guard_record(mg_program *p, const mg_frame_view *view, PyObject *const *registers); /* after a precise check has held with these registers */
void mg_forget_recording(mg_program *p); /* also drops its watches */

#endif
