/* What plan.c, which runs plans, plan_parse.c, which makes them of Python's tuples, and plan_type.c share. */
#ifndef MAGNETO_PLAN_H
#define MAGNETO_PLAN_H

#include "magneto.h"
#include "blocks.h"
#include "digest.h"
#include "dlpack.h"
#include "pages.h"

typedef enum { OP_ALLOC, OP_VIEW, OP_KERNEL, OP_TABLE, OP_CALL, OP_LIST, OP_UNPACK, OP_LAYOUT, OP_FREE, OP_KEEP, OP_KEPT } PlanOp;
typedef int (*PlanKernel)(void *const *data);
typedef int (*PlanTable)(void *const *data, const int64_t *work);

typedef struct {
    PlanOp op;
    int dst, src;      /* ALLOC: `src` is the tensor's type, as MG_DTYPE_KEY */
    int n;             /* number of registers; ALLOC: of dimensions */
    int flag;          /* keep, or release_gil */
    int slot;          /* kept VIEW: index into the workspace's remembered sources; ALLOC: see BLOCK_* */
    int *regs;         /* owned */
    int64_t *layout;   /* owned; LAYOUT: n sizes, then n strides; TABLE: work; KEEP: bytes; ALLOC on a block: n sizes, n strides, bytes */
    PlanKernel kernel;
    PyObject *callable, *args, *kwargs; /* owned; kwargs is a dict (ALLOC) or a tuple of names (CALL) */
} PlanInstr;

/* One of the memories that kept results were computed from. */
typedef struct {
    void *pointer;
    mg_digest_t digest, edges; /* of all of it; of what lies outside whole pages, while `pages` are watched */
    mg_pages *pages;           /* owned, or NULL */
    uint64_t generation;
    int same, wait;            /* calls in a row in which it has not changed; how many there must be before its pages are watched */
    int ask;                   /* in this call: are its numbers read? */
} Watched;

typedef struct {
    PyObject **regs;      /* n_registers */
    void **data;          /* data pointer of the tensor in the register once asked for, else NULL */
    PyObject **view_of;   /* n_views sources of the kept views at hand, owned; NULL: there is none */
    void **view_seen;     /* source of the last call, compared only */
    void **view_data;     /* its data pointer */
    Watched *watched;     /* n_watched, owned: what the kept results were computed from */
    int n_watched;
    int kept;             /* are they there? 2: since this call */
    int owned;            /* this call's inputs belong to it */
} Workspace;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PlanInstr *code;
    Py_ssize_t n_code;
    int n_registers, n_inputs, n_outputs, n_views, max_regs, no_grad, recycle;
    int *outputs;
    int *view_regs;       /* per kept view of an input or temporary: its register */
    int *first_view;      /* per input: its first kept view, or -1 */
    int *next_view;       /* per kept view: the next one of the same input, or -1 */
    int *dying;           /* per instruction: the first input that nobody reads after it, or -1 */
    int *dying_next;      /* per input: the next one of the same instruction, or -1 */
    char *kind;           /* per register: see REG_* */
    PyObject *constants;  /* list of (register, object) kept alive */
    PyObject **constant_objs; /* n_registers, borrowed from `constants`, NULL elsewhere */
    Workspace *idle;
    PyObject *source;     /* the instruction tuples, for people */
    uint64_t calls;
    PyObject *weakrefs;
} PlanObject;

enum { REG_TEMP = 0, REG_INPUT = 1, REG_CONST = 2, REG_KEPT = 3 };
enum { VIEW_NEW = 0, VIEW_KEPT = 1, VIEW_ONCE = 2 }; /* PlanInstr.flag of a VIEW */
enum { BLOCK_NEVER = 0, BLOCK_ASK = 1, BLOCK_TAKE = 2 }; /* PlanInstr.slot of an ALLOC: is its memory a recycled block? */

/* plan.c. The address of the first element of a tensor: 0, or -1 with an exception. torch's table of DLPack functions, or NULL (no exception is left). */
int mg_plan_data(PyObject *tensor, void **out);
const mg_dlpack_api *mg_plan_dlpack(void);
/* Finds the torch functions that every plan needs: 0, or -1 with an exception. */
int mg_plan_bind(void);
void mg_plan_forget(PlanObject *plan, Workspace *ws);
PyObject *mg_plan_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames);
PyObject *mg_plan_consume(PyObject *self, PyObject *list);

/* plan_parse.c: 0, or -1 with an exception */
int mg_plan_parse(PlanObject *plan, PyObject *instructions, PyObject *outputs);

#endif
