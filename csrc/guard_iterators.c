/* Built-in iterators seen from outside: what one would give next, what it iterates over, and stepping it. Looking changes nothing and runs no user code.
 *
 * CPython keeps the layouts private. They are stated here, and compared at import with what `__reduce__` says of an iterator made for the purpose: a kind
 * whose layout is another one is not readable, and its iterators stay opaque. */
#include "guards.h"

typedef struct {
    PyObject_HEAD
    Py_ssize_t index;
    PyObject *seq; /* NULL: exhausted */
} sequence_iterator;

typedef struct {
    PyObject_HEAD
#if PY_VERSION_HEX < 0x030C0000
    long index;
#endif
    long start, step, len;
} range_iterator;

typedef struct {
    PyObject_HEAD
    PyObject *table; /* dict or set; NULL: exhausted */
    Py_ssize_t used, position;
} table_iterator;

typedef struct {
    PyObject_HEAD
    Py_ssize_t index;
    PyObject *inner, *result, *large_index;
} enumerate_iterator;

typedef struct {
    PyObject_HEAD
    Py_ssize_t size;
    PyObject *inner, *result;
    int strict;
} zip_iterator;

typedef struct {
    PyObject_HEAD
    PyObject *first, *second; /* map: iterators, function; filter: function, iterator */
} pair_iterator;

enum { UNKNOWN, FORWARD, BACKWARD, RANGE, KEYS, VALUES, ITEMS, SET, ENUMERATE, ZIP, PAIR, N_KINDS };

#define MAX_TYPES 24
static struct {
    PyTypeObject *type;
    int kind;
} known[MAX_TYPES];
static int n_known;

static int
kind_of(PyObject *it)
{
    for (int i = 0; i < n_known; i++) {
        if (known[i].type == Py_TYPE(it)) {
            return known[i].kind;
        }
    }
    return UNKNOWN;
}

/* ---- looking ---- */

static int
peek_sequence(sequence_iterator *it, int kind, Py_ssize_t ahead, PyObject **out)
{
    if (it->seq == NULL) {
        return 0;
    }
    Py_ssize_t n = -1, i = kind == FORWARD ? it->index + ahead : it->index - ahead;
    PyObject *seq = it->seq;
    if (PyUnicode_CheckExact(seq)) {
        n = PyUnicode_GET_LENGTH(seq);
    }
    else if (PyBytes_CheckExact(seq)) {
        n = PyBytes_GET_SIZE(seq);
    }
    else if (PyList_Check(seq) || PyTuple_Check(seq)) {
        n = Py_SIZE(seq);
        if (Py_TYPE(it) == &PyReversed_Type && !PyTuple_CheckExact(seq)) {
            return -1; /* asks the sequence's own __getitem__ */
        }
    }
    if (n < 0 || it->index < -1) {
        return -1;
    }
    if (i < 0 || i >= n) {
        return 0;
    }
    *out = PyUnicode_CheckExact(seq) ? PyUnicode_Substring(seq, i, i + 1)
           : PyBytes_CheckExact(seq) ? PyLong_FromLong((unsigned char)PyBytes_AS_STRING(seq)[i])
                                     : Py_NewRef(PyTuple_Check(seq) ? PyTuple_GET_ITEM(seq, i) : PyList_GET_ITEM(seq, i));
    return *out != NULL ? 1 : -1;
}

static int
peek_range(range_iterator *it, Py_ssize_t ahead, PyObject **out)
{
#if PY_VERSION_HEX < 0x030C0000
    long done = it->index;
#else
    long done = 0;
#endif
    if (ahead >= it->len - done) {
        return 0;
    }
    *out = PyLong_FromLong((long)(it->start + (unsigned long)(done + ahead) * it->step));
    return *out != NULL ? 1 : -1;
}

static int
peek_dict(table_iterator *it, int kind, Py_ssize_t ahead, int part, PyObject **out)
{
    PyObject *key = NULL, *value = NULL;
    Py_ssize_t position = it->position;
    if (it->table == NULL) {
        return 0;
    }
    if (!PyDict_Check(it->table) || PyODict_Check(it->table) || PyDict_GET_SIZE(it->table) != it->used) {
        return -1;
    }
    for (Py_ssize_t i = 0; i <= ahead; i++) {
        if (!PyDict_Next(it->table, &position, &key, &value)) {
            return 0;
        }
    }
    int what = part != 0 ? part : kind == KEYS ? 1 : kind == VALUES ? 2 : 3;
    *out = what == 1 ? Py_NewRef(key) : what == 2 ? Py_NewRef(value) : PyTuple_Pack(2, key, value);
    return *out != NULL ? 1 : -1;
}

static int
peek_set(table_iterator *it, Py_ssize_t ahead, PyObject **out)
{
    PyObject *item = NULL;
    Py_ssize_t position = it->position;
    Py_hash_t hash;
    if (it->table == NULL) {
        return 0;
    }
    if (PySet_GET_SIZE(it->table) != it->used) {
        return -1;
    }
    for (Py_ssize_t i = 0; i <= ahead; i++) {
        if (!_PySet_NextEntry(it->table, &position, &item, &hash)) {
            return 0;
        }
    }
    *out = Py_NewRef(item);
    return 1;
}

int
mg_iterator_peek(PyObject *it, Py_ssize_t ahead, int part, PyObject **out)
{
    int kind = kind_of(it);
    *out = NULL;
    int status = -1;
    switch (kind) {
    case FORWARD:
    case BACKWARD:
        status = peek_sequence((sequence_iterator *)it, kind, ahead, out);
        break;
    case RANGE:
        status = peek_range((range_iterator *)it, ahead, out);
        break;
    case KEYS:
    case VALUES:
    case ITEMS:
        status = peek_dict((table_iterator *)it, kind, ahead, part, out);
        break;
    case SET:
        status = peek_set((table_iterator *)it, ahead, out);
        break;
    case ENUMERATE: { /* its number */
        enumerate_iterator *e = (enumerate_iterator *)it;
        if (e->large_index == NULL && e->index <= PY_SSIZE_T_MAX / 2) {
            *out = PyLong_FromSsize_t(e->index + ahead);
            status = *out != NULL ? 1 : -1;
        }
        break;
    }
    }
    PyErr_Clear();
    return status;
}

/* types.MappingProxyType (mappingproxyobject in Objects/descrobject.c, the same in 3.11 to 3.13). */
typedef struct {
    PyObject_HEAD PyObject *mapping;
} read_only_view;

/* What the iterator is made of (mg_iterator_part in guards.h); of a mappingproxy, the mapping. */
int
mg_iterator_part(PyObject *it, int part, PyObject **out)
{
    PyObject *found = NULL;
    if (PyGen_CheckExact(it)) {
        return mg_generator_part(it, part, out);
    }
    if (Py_IS_TYPE(it, &PyDictProxy_Type)) {
        *out = Py_NewRef(((read_only_view *)it)->mapping);
        return 1;
    }
    switch (kind_of(it)) {
    case FORWARD:
    case BACKWARD:
        found = part == 0 ? ((sequence_iterator *)it)->seq : NULL;
        break;
    case KEYS:
    case VALUES:
    case ITEMS:
    case SET:
        found = part == 0 ? ((table_iterator *)it)->table : NULL;
        break;
    case ENUMERATE:
        found = part == 0 ? ((enumerate_iterator *)it)->inner : NULL;
        break;
    case ZIP:
        found = part == 0 ? ((zip_iterator *)it)->inner : ((zip_iterator *)it)->strict ? Py_True : Py_False;
        break;
    case PAIR:
        found = part == 0 ? ((pair_iterator *)it)->first : ((pair_iterator *)it)->second;
        break;
    default:
        *out = NULL;
        return -1;
    }
    *out = Py_XNewRef(found);
    return found != NULL;
}

/* ---- for Python ---- */

static PyObject *
answer(int status, PyObject *value)
{
    if (status <= 0) {
        PyErr_SetNone(status == 0 ? PyExc_LookupError : PyExc_TypeError);
    }
    return value;
}

static PyObject *
iterator_peek(PyObject *module, PyObject *args)
{
    PyObject *it, *value;
    Py_ssize_t ahead;
    int part = 0;
    if (!PyArg_ParseTuple(args, "On|i:iterator_peek", &it, &ahead, &part)) {
        return NULL;
    }
    int status = mg_iterator_peek(it, ahead, part, &value);
    return answer(status, value);
}

static PyObject *
iterator_part(PyObject *module, PyObject *args)
{
    PyObject *it, *value;
    int part;
    if (!PyArg_ParseTuple(args, "Oi:iterator_part", &it, &part)) {
        return NULL;
    }
    int status = mg_iterator_part(it, part, &value);
    return answer(status, value);
}

/* iterator_advance(it, n): n steps of an iterator without parts that iterate (a step beyond its end exhausts it); of enumerate: of its number only. */
static PyObject *
iterator_advance(PyObject *module, PyObject *args)
{
    PyObject *it;
    Py_ssize_t n;
    if (!PyArg_ParseTuple(args, "On:iterator_advance", &it, &n)) {
        return NULL;
    }
    int kind = kind_of(it);
    if (kind == ENUMERATE) {
        ((enumerate_iterator *)it)->index += n;
        Py_RETURN_NONE;
    }
    if (kind == UNKNOWN || kind >= ENUMERATE) {
        PyErr_SetString(PyExc_TypeError, "iterator_advance");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = Py_TYPE(it)->tp_iternext(it);
        if (item == NULL) {
            if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_StopIteration)) {
                return NULL;
            }
            PyErr_Clear();
            break;
        }
        Py_DECREF(item);
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"iterator_peek", iterator_peek, METH_VARARGS,
     "iterator_peek(it, ahead, part=0): the item that `ahead + 1` steps would give (LookupError: none; TypeError: cannot be known)."},
    {"iterator_part", iterator_part, METH_VARARGS, "iterator_part(it, part): what a built-in iterator, or a mappingproxy, is made of."},
    {"iterator_advance", iterator_advance, METH_VARARGS, "iterator_advance(it, n): step a built-in iterator."},
    {NULL, NULL, 0, NULL},
};

/* ---- which kinds have the layout stated above ---- */

static const struct {
    const char *sample; /* stands after a step: [10, 20, 30] in their order */
    int kind;
    const char *layout; /* expression of `it` that must hold when the layout is right; peek, part are the functions above */
} samples[] = {
    {"iter([10, 20, 30])", FORWARD, ""},
    {"iter((10, 20, 30))", FORWARD, ""},
    {"iter('\\x0a\\x14\\x1e')", FORWARD, ""},
    {"iter('\\x0a\\x14\\u0130')", FORWARD, ""},
    {"iter(b'\\x0a\\x14\\x1e')", FORWARD, ""},
    {"reversed([30, 20, 10])", BACKWARD, ""},
    {"reversed((30, 20, 10))", BACKWARD, ""},
    {"iter(range(10, 40, 10))", RANGE, ""},
    {"iter({10: 1, 20: 2, 30: 3})", KEYS, ""},
    {"iter({1: 10, 2: 20, 3: 30}.values())", VALUES, ""},
    {"iter({10: 1, 20: 2, 30: 3}.items())", ITEMS, ""},
    {"iter({10, 20, 30})", SET, ""},
    {"enumerate([10, 20, 30], 5)", ENUMERATE, "peek(it, 2) == it.__reduce__()[1][1] + 2 and part(it, 0) is it.__reduce__()[1][0]"},
    {"zip([10, 20], [1, 2])", ZIP, "part(it, 0) == it.__reduce__()[1] and part(it, 1) is False"},
    {"map(int, [10, 20])", PAIR, "part(it, 0) == it.__reduce__()[1][1:] and part(it, 1) is int"},
    {"filter(int, [10, 20])", PAIR, "part(it, 0) is int and part(it, 1) is it.__reduce__()[1][1]"},
};

static const char any_layout[] = "[peek(it, 0), peek(it, 1)] == list(__import__('copy').copy(it))";

static PyObject *
evaluate(const char *text, PyObject *names)
{
    return PyRun_String(text, Py_eval_input, names, names);
}

static int
calibrate(PyObject *module)
{
#if PY_VERSION_HEX >= 0x030E0000
    return 0; /* layouts not known */
#endif
    PyObject *names = PyDict_New(), *builtins = PyImport_ImportModule("builtins");
    int status = names == NULL || builtins == NULL || PyDict_SetItemString(names, "__builtins__", builtins) < 0 ? -1 : 0;
    Py_XDECREF(builtins);
    const char *functions[][2] = {{"peek", "iterator_peek"}, {"part", "iterator_part"}};
    for (int i = 0; status == 0 && i < 2; i++) {
        PyObject *function = PyObject_GetAttrString(module, functions[i][1]);
        status = function == NULL ? -1 : PyDict_SetItemString(names, functions[i][0], function);
        Py_XDECREF(function);
    }
    for (size_t i = 0; status == 0 && i < sizeof(samples) / sizeof(samples[0]) && n_known < MAX_TYPES; i++) {
        PyObject *it = evaluate(samples[i].sample, names), *first = it ? PyIter_Next(it) : NULL;
        status = it == NULL || first == NULL || PyDict_SetItemString(names, "it", it) < 0 ? -1 : 0;
        if (status == 0 && kind_of(it) == UNKNOWN) {
            known[n_known].type = Py_TYPE(it);
            known[n_known++].kind = samples[i].kind;
            PyObject *held = evaluate(samples[i].layout[0] ? samples[i].layout : any_layout, names);
            if (held != Py_True) {
                n_known--;
            }
            Py_XDECREF(held);
            PyErr_Clear();
        }
        Py_XDECREF(first);
        Py_XDECREF(it);
    }
    Py_XDECREF(names);
    return status;
}

int
mg_guard_iterators_init(PyObject *module)
{
    return PyModule_AddFunctions(module, methods) < 0 ? -1 : calibrate(module);
}
