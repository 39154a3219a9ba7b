/* Reading values for guards: instance dictionaries, slots, items, keys, constants, classes. No user code runs: attributes come from C
 * descriptors and instance dictionaries, items from the storage of builtin containers (also inside their subclasses). */
#include "guards.h"

static PyTypeObject *deque_type;

int
mg_raw_attr(PyObject *obj, PyObject *name, PyObject **out)
{
    *out = NULL;
    PyObject *descr = _PyType_Lookup(Py_TYPE(obj), name);
    Py_XINCREF(descr);
    descrgetfunc get = descr ? Py_TYPE(descr)->tp_descr_get : NULL;
    int status = -1;
    if (descr != NULL && (Py_IS_TYPE(descr, &PyMemberDescr_Type) || Py_IS_TYPE(descr, &PyGetSetDescr_Type))) {
        PyTypeObject *owner = ((PyDescrObject *)descr)->d_type;
        int plain = Py_IS_TYPE(descr, &PyMemberDescr_Type) || !PyType_HasFeature(owner, Py_TPFLAGS_HEAPTYPE) ||
                    PyType_HasFeature(owner, Py_TPFLAGS_IMMUTABLETYPE) || owner == deque_type;
        if (plain && (!mg_is_tensor_type(owner) || mg_tensor_getter_is_plain(obj))) {
            *out = get(descr, obj, (PyObject *)Py_TYPE(obj));
            status = *out != NULL ? 1 : PyErr_ExceptionMatches(PyExc_AttributeError) ? 0 : -1;
            PyErr_Clear();
        }
        goto done;
    }
    if (descr != NULL && Py_TYPE(descr)->tp_descr_set != NULL) {
        goto done;
    }
    if (PyType_Check(obj)) { /* a class: what its own bases hold, unless it binds */
        PyObject *found = _PyType_Lookup((PyTypeObject *)obj, name);
        if (found != NULL) {
            status = Py_TYPE(found)->tp_descr_get == NULL || PyFunction_Check(found) ? 1 : -1;
            *out = status == 1 ? Py_NewRef(found) : NULL;
            goto done;
        }
    }
    else {
        PyObject **slot = mg_dict_slot(obj);
        PyObject *found = slot ? PyDict_GetItemWithError(*slot, name) : NULL;
        PyErr_Clear();
        if (found != NULL) {
            *out = Py_NewRef(found);
            status = 1;
            goto done;
        }
    }
    if (descr == NULL) {
        status = 0;
    }
    else if (get == NULL) {
        *out = Py_NewRef(descr);
        status = 1;
    }
done:
    Py_XDECREF(descr);
    return status;
}

PyObject *
mg_raw_item(PyObject *obj, PyObject *key)
{
    if (PyDict_Check(obj)) {
        PyObject *value = PyDict_GetItemWithError(obj, key);
        if (value == NULL) {
            PyErr_Clear();
        }
        return Py_XNewRef(value);
    }
    if (!PyLong_CheckExact(key)) {
        return NULL;
    }
    int overflow;
    Py_ssize_t i = (Py_ssize_t)PyLong_AsLongLongAndOverflow(key, &overflow), n;
    int is_tuple = PyTuple_Check(obj), is_deque = Py_IS_TYPE(obj, deque_type);
    if (overflow || !(is_tuple || is_deque || PyList_Check(obj))) {
        return NULL;
    }
    n = Py_SIZE(obj);
    i += i < 0 ? n : 0;
    if (i < 0 || i >= n) {
        return NULL;
    }
    if (is_deque) {
        PyObject *value = PySequence_GetItem(obj, i);
        PyErr_Clear();
        return value;
    }
    return Py_XNewRef(is_tuple ? PyTuple_GET_ITEM(obj, i) : PyList_GET_ITEM(obj, i));
}

/* Keys of a dict in its own order (an OrderedDict keeps another order than the dict inside it). `visit` gets borrowed keys and returns 1
 * to go on. Returns 1 when all were visited. */
typedef struct {
    PyObject *keys;   /* tuple to compare with, or NULL */
    Py_ssize_t index; /* key to find */
    PyObject *found;  /* owned */
    Py_ssize_t position;
} key_walk;

static int
visit_key(key_walk *walk, PyObject *key)
{
    Py_ssize_t i = walk->position++;
    if (walk->keys != NULL) {
        return mg_constant_equal(key, PyTuple_GET_ITEM(walk->keys, i));
    }
    if (i == walk->index) {
        walk->found = Py_NewRef(key);
        return 0;
    }
    return 1;
}

static int
walk_keys(PyObject *dict, key_walk *walk)
{
    int go_on = 1;
    if (!PyODict_Check(dict)) {
        PyObject *key, *value;
        Py_ssize_t pos = 0;
        while (go_on && PyDict_Next(dict, &pos, &key, &value)) {
            go_on = visit_key(walk, key);
        }
        return go_on;
    }
    PyObject *iterator = PyODict_Type.tp_iter(dict), *key;
    while (go_on && iterator != NULL && (key = PyIter_Next(iterator)) != NULL) {
        go_on = visit_key(walk, key);
        Py_DECREF(key);
    }
    go_on = go_on && iterator != NULL && !PyErr_Occurred();
    Py_XDECREF(iterator);
    PyErr_Clear();
    return go_on;
}

PyObject *
mg_raw_key(PyObject *obj, Py_ssize_t index)
{
    key_walk walk = {.index = index};
    if (PyDict_Check(obj)) {
        walk_keys(obj, &walk);
    }
    return walk.found;
}

/* Elements of a set in its order of iteration. */
static int
elements_equal(PyObject *set, PyObject *keys)
{
    PyObject *iterator = PySet_GET_SIZE(set) == PyTuple_GET_SIZE(keys) ? PySet_Type.tp_iter(set) : NULL, *item;
    key_walk walk = {.keys = keys};
    int equal = iterator != NULL;
    while (equal && (item = PyIter_Next(iterator)) != NULL) {
        equal = visit_key(&walk, item);
        Py_DECREF(item);
    }
    equal = equal && !PyErr_Occurred();
    Py_XDECREF(iterator);
    PyErr_Clear();
    return equal;
}

int
mg_is_element(PyObject *set, PyObject *obj)
{
    PyObject *item;
    Py_ssize_t position = 0;
    Py_hash_t hash;
    if (!PyAnySet_Check(set)) {
        return -1;
    }
    while (_PySet_NextEntry(set, &position, &item, &hash)) {
        if (item == obj) {
            return 1;
        }
    }
    return 0;
}

int
mg_keys_equal(PyObject *obj, PyObject *keys)
{
    key_walk walk = {.keys = keys};
    if (PyAnySet_Check(obj)) {
        return elements_equal(obj, keys);
    }
    return PyDict_Check(obj) && PyDict_GET_SIZE(obj) == PyTuple_GET_SIZE(keys) && walk_keys(obj, &walk);
}

int
mg_key_absent(PyObject *obj, PyObject *key)
{
    if (!PyDict_Check(obj)) {
        return 0;
    }
    PyObject *found = PyDict_GetItemWithError(obj, key);
    if (found == NULL && PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    return found == NULL;
}

Py_ssize_t
mg_raw_length(PyObject *obj)
{
    if (PyDict_Check(obj)) {
        return PyDict_GET_SIZE(obj);
    }
    if (PyList_Check(obj) || PyTuple_Check(obj) || Py_IS_TYPE(obj, deque_type)) {
        return Py_SIZE(obj);
    }
    return PyAnySet_Check(obj) ? PySet_GET_SIZE(obj) : -1;
}

static int
items_equal(PyObject *a, PyObject *b)
{
    Py_ssize_t n = Py_SIZE(a);
    if (n != Py_SIZE(b)) {
        return 0;
    }
    for (Py_ssize_t i = 0; i < n && i < Py_SIZE(a) && i < Py_SIZE(b); i++) {
        PyObject *x = PyTuple_Check(a) ? PyTuple_GET_ITEM(a, i) : PyList_GET_ITEM(a, i);
        PyObject *y = PyTuple_Check(b) ? PyTuple_GET_ITEM(b, i) : PyList_GET_ITEM(b, i);
        if (!mg_constant_equal(x, y)) {
            return 0;
        }
    }
    return 1;
}

/* Sets: each element of `a` has an equal one in `b`. Elements of one set differ, so that equal sizes make it an equality. */
static int
sets_equal(PyObject *a, PyObject *b)
{
    if (PySet_GET_SIZE(a) != PySet_GET_SIZE(b)) {
        return 0;
    }
    PyObject *left = PySequence_List(a), *right = PySequence_List(b);
    int equal = left != NULL && right != NULL;
    for (Py_ssize_t i = 0; equal && i < PyList_GET_SIZE(left); i++) {
        int found = 0;
        for (Py_ssize_t j = 0; !found && j < PyList_GET_SIZE(right); j++) {
            found = mg_constant_equal(PyList_GET_ITEM(left, i), PyList_GET_ITEM(right, j));
        }
        equal = found;
    }
    Py_XDECREF(left);
    Py_XDECREF(right);
    PyErr_Clear();
    return equal;
}

int
mg_constant_equal(PyObject *a, PyObject *b)
{
    if (a == b) {
        return 1;
    }
    PyTypeObject *type = Py_TYPE(a);
    if (type != Py_TYPE(b)) {
        return 0;
    }
    if (PyFloat_CheckExact(a)) {
        return memcmp(&((PyFloatObject *)a)->ob_fval, &((PyFloatObject *)b)->ob_fval, sizeof(double)) == 0;
    }
    if (PyComplex_CheckExact(a)) {
        return memcmp(&((PyComplexObject *)a)->cval, &((PyComplexObject *)b)->cval, sizeof(Py_complex)) == 0;
    }
    if (PyTuple_Check(a) || PyList_CheckExact(a)) {
        return items_equal(a, b);
    }
    if (PyFrozenSet_CheckExact(a) || PySet_CheckExact(a)) {
        return sets_equal(a, b);
    }
    if (PySlice_Check(a)) {
        PySliceObject *x = (PySliceObject *)a, *y = (PySliceObject *)b;
        return mg_constant_equal(x->start, y->start) && mg_constant_equal(x->stop, y->stop) && mg_constant_equal(x->step, y->step);
    }
    if (PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE) || PyType_Check(a) || PyDict_Check(a)) {
        return 0; /* its == could be user code: only identity counts */
    }
    int equal = PyObject_RichCompareBool(a, b, Py_EQ);
    if (equal < 0) {
        PyErr_Clear();
    }
    return equal > 0;
}

/* Contents of a class and its bases: tuple of (class, copy of its dict). Types of C cannot be modified and are left out. New or NULL. */
PyObject *
mg_class_snapshot(PyTypeObject *type)
{
    PyObject *mro = type->tp_mro, *result = mro ? PyTuple_New(PyTuple_GET_SIZE(mro)) : NULL;
    if (mro == NULL) {
        PyErr_Format(PyExc_TypeError, "class %s is not complete", type->tp_name);
    }
    for (Py_ssize_t i = 0; result != NULL && i < PyTuple_GET_SIZE(mro); i++) {
        PyObject *cls = PyTuple_GET_ITEM(mro, i);
        int heap = PyType_HasFeature((PyTypeObject *)cls, Py_TPFLAGS_HEAPTYPE);
        PyObject *copy = heap ? PyDict_Copy(((PyTypeObject *)cls)->tp_dict) : Py_NewRef(Py_None);
        PyObject *pair = copy ? PyTuple_Pack(2, cls, copy) : NULL;
        Py_XDECREF(copy);
        if (pair == NULL) {
            Py_CLEAR(result);
            break;
        }
        PyTuple_SET_ITEM(result, i, pair);
    }
    return result;
}

int
mg_class_unchanged(PyTypeObject *type, PyObject *snapshot)
{
    PyObject *mro = type->tp_mro;
    if (mro == NULL || PyTuple_GET_SIZE(mro) != PyTuple_GET_SIZE(snapshot)) {
        return 0;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(mro); i++) {
        PyObject *pair = PyTuple_GET_ITEM(snapshot, i), *cls = PyTuple_GET_ITEM(mro, i), *copy = PyTuple_GET_ITEM(pair, 1);
        if (cls != PyTuple_GET_ITEM(pair, 0)) {
            return 0;
        }
        if (copy == Py_None) {
            continue;
        }
        PyObject *dict = ((PyTypeObject *)cls)->tp_dict, *key, *value;
        Py_ssize_t pos = 0;
        if (PyDict_GET_SIZE(dict) != PyDict_GET_SIZE(copy)) {
            return 0;
        }
        while (PyDict_Next(copy, &pos, &key, &value)) {
            if (PyDict_GetItemWithError(dict, key) != value) {
                PyErr_Clear();
                return 0;
            }
        }
    }
    return 1;
}

int
mg_guard_values_init(PyObject *module)
{
    PyObject *collections = PyImport_ImportModule("collections");
    deque_type = collections ? (PyTypeObject *)PyObject_GetAttrString(collections, "deque") : NULL; /* kept */
    Py_XDECREF(collections);
    return deque_type == NULL ? -1 : 0;
}
