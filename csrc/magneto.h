/* Declarations shared by the C files of magneto._C.
 *
 * Every csrc/<file>.c offers `int mg_<file>_init(PyObject *module)`: 0, or -1 with an exception set. module.c calls them in
 * order. Only public CPython API is used here; what differs between versions (and what is private) lives in compat.h.
 */
#ifndef MAGNETO_H
#define MAGNETO_H

#ifndef PY_SSIZE_T_CLEAN
#define PY_SSIZE_T_CLEAN
#endif
#include <Python.h>

#define MG_HOT __attribute__((hot))
#define MG_COLD __attribute__((cold, noinline))
#define MG_LIKELY(x) __builtin_expect(!!(x), 1)
#define MG_UNLIKELY(x) __builtin_expect(!!(x), 0)

/* What a guard may look at: the state of one frame at an entry point. Everything is borrowed and stays alive during the check.
 * An unbound slot is NULL. At offset 0 (before the prologue) free-variable slots show the closure's cells already, a cell
 * variable that is an argument still the plain argument. `closure`: tuple of cells or NULL. */
typedef struct {
    PyObject **localsplus;
    int nlocalsplus;
    PyObject **stack;
    int nstack;
    PyObject *globals, *builtins, *closure;
    PyCodeObject *code;
} mg_frame_view;

/* guards.c. 1 = hit, 0 = miss; never raises. After a hit `out`, unless it is NULL, has new references to values that the program has
 * evaluated anyway and that the region function gets after its slot arguments: so many. (Weak, so that the extension links without guards.) */
__attribute__((weak)) int mg_guard_check(PyObject *program, const mg_frame_view *view, PyObject **out);
__attribute__((weak)) int mg_guard_n_exports(PyObject *program);

/* guard_tensor.c. Where a tensor lies: its memory, and from where on there, in elements. 0: it cannot be read. */
__attribute__((weak)) int mg_tensor_place(PyObject *tensor, uint64_t place[2]);

/* The init functions; guards and plan are weak for the same reason. */
int mg_resume_init(PyObject *module);
int mg_state_init(PyObject *module);
int mg_frame_init(PyObject *module);
int mg_entry_init(PyObject *module);
int mg_region_init(PyObject *module);
int mg_activate_init(PyObject *module);
int mg_eval_frame_init(PyObject *module);
int mg_callable_init(PyObject *module);
__attribute__((weak)) int mg_guards_init(PyObject *module);
__attribute__((weak)) int mg_plan_init(PyObject *module);
int mg_pages_init(PyObject *module);
__attribute__((weak)) int mg_blocks_init(PyObject *module);
__attribute__((weak)) int mg_launch_init(PyObject *module);

#endif
