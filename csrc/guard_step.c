/* One instruction of a guard program: what a load reads and whether a check holds. */
#include "guards.h"

static PyObject *
call_tuple(PyObject *callable, PyObject *args)
{
    PyObject *result = PyObject_Call(callable, args, NULL);
    if (result == NULL) {
        PyErr_Clear();
    }
    return result;
}

/* The object that an instruction knows (borrowed), NULL when it is gone. */
static inline PyObject *
held(const mg_instruction *in)
{
    return in->m ? mg_weak_target(in->obj) : in->obj;
}

PyObject *
mg_guard_load(const mg_instruction *in, PyObject *src, const mg_frame_view *view, int *owned, int *failed)
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
        *failed = held(in) == NULL;
        return held(in);
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
    PyTypeObject *type = (PyTypeObject *)held(in);
    if (MG_LIKELY(type != NULL && state->version != 0 && mg_type_version(type) == state->version)) {
        return 1;
    }
    if (state->snapshot == NULL || !mg_class_unchanged(type, state->snapshot)) {
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

static int
distinct_holds(const mg_program *p, const mg_instruction *in, PyObject *const *registers, mg_register_reader read)
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

static int
sizes_hold(const mg_program *p, const mg_instruction *in, PyObject *const *registers, mg_register_reader read)
{
    mg_sizes_row *row = in->data;
    PyObject *values[MG_MOST_SIZED];
    for (int i = 0; i < row->n; i++) {
        values[i] = read(p, registers, row->registers[i]);
        if (values[i] == NULL) {
            return 0;
        }
    }
    return mg_sizes_hold(row, in->obj, values);
}

/* Whether a check holds for `src`. */
int
mg_guard_holds(const mg_program *p, const mg_instruction *in, PyObject *src, PyObject *const *registers, mg_register_reader read)
{
    if (in->op == MG_G_IS_ABSENT) {
        return src == NULL;
    }
    if (in->src >= 0 && src == NULL) {
        return 0;
    }
    switch (in->op) {
    case MG_G_TYPE_IS:
        return (PyObject *)Py_TYPE(src) == held(in);
    case MG_G_ID_IS:
        return src == held(in);
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
    case MG_G_MEMBER:
    case MG_G_NOT_MEMBER: {
        PyObject *element = read(p, registers, (int)in->n);
        return element != NULL && mg_is_element(src, element) == (in->op == MG_G_MEMBER);
    }
    case MG_G_DISTINCT:
        return distinct_holds(p, in, registers, read);
    case MG_G_SIZES:
        return sizes_hold(p, in, registers, read);
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
