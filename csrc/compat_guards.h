/* What guards need to know of CPython versions: whether a dictionary, a class or an instance's __dict__ has been changed.
 *
 * Dictionaries: 3.11 gives each state of each dictionary a number of its own (ma_version_tag). Later versions have watchers.
 * Classes: tp_version_tag is unique per state of a class as long as it is not 0; setting an attribute of the class or of a base
 * resets it. Numbers are given out by _PyType_Lookup. */
#ifndef MAGNETO_COMPAT_GUARDS_H
#define MAGNETO_COMPAT_GUARDS_H

#include <patchlevel.h>
#if PY_VERSION_HEX >= 0x030D0000 && !defined(Py_BUILD_CORE)
#define Py_BUILD_CORE 1
#endif
#include "magneto.h"
#if PY_VERSION_HEX >= 0x030D0000
#include "internal/pycore_dict.h"
#include "internal/pycore_setobject.h"
#endif

#define MG_DICT_VERSIONS (PY_VERSION_HEX < 0x030C0000)

#if MG_DICT_VERSIONS
static inline uint64_t
mg_dict_version(PyObject *dict)
{
    return ((PyDictObject *)dict)->ma_version_tag;
}
#endif

/* Where `obj` keeps its instance dictionary; NULL without one. The dictionary is made when the values live inline. The address
 * stays the same as long as the object lives. */
static inline PyObject **
mg_dict_slot(PyObject *obj)
{
    PyObject **slot = _PyObject_GetDictPtr(obj);
    if (slot == NULL) {
        return NULL;
    }
    if (*slot == NULL) { /* an instance of a subclass of list, dict ... that has no attribute yet */
        PyObject *made = PyObject_GenericGetDict(obj, NULL);
        if (made == NULL) {
            PyErr_Clear();
            return NULL;
        }
        Py_DECREF(made);
        slot = _PyObject_GetDictPtr(obj);
        if (slot == NULL || *slot == NULL) {
            return NULL;
        }
    }
    return PyDict_CheckExact(*slot) ? slot : NULL;
}

/* From 3.13 on the dictionary of an instance may share the values that lie inline in the instance, and a store to an attribute then goes
 * past the dictionary's watchers (3.13.0). Gives such a dictionary values of its own, as CPython does when an item is popped: the last item
 * is taken out and put back. 0, or -1 when it cannot be watched. */
static inline int
mg_make_watchable(PyObject *dict)
{
#if PY_VERSION_HEX >= 0x030D0000
    PyDictValues *values = ((PyDictObject *)dict)->ma_values;
    if (values == NULL || !values->embedded) {
        return 0;
    }
    PyObject *item = PyDict_GET_SIZE(dict) ? PyObject_CallMethod(dict, "popitem", NULL) : NULL;
    int status = item != NULL ? PyDict_SetItem(dict, PyTuple_GET_ITEM(item, 0), PyTuple_GET_ITEM(item, 1)) : -1;
    Py_XDECREF(item);
    PyErr_Clear();
    values = ((PyDictObject *)dict)->ma_values;
    return status < 0 || (values != NULL && values->embedded) ? -1 : 0;
#else
    return 0;
#endif
}

/* The number of the present state of `type`, 0 when it has none. From 3.13 on the flag is no longer set: a number that is there is valid. */
static inline unsigned int
mg_type_version(PyTypeObject *type)
{
#if PY_VERSION_HEX >= 0x030D0000
    return type->tp_version_tag;
#endif
    return PyType_HasFeature(type, Py_TPFLAGS_VALID_VERSION_TAG) ? type->tp_version_tag : 0;
}

static inline unsigned int
mg_assign_type_version(PyTypeObject *type)
{
    PyObject *any = PyUnicode_InternFromString("__class__");
    if (any == NULL) {
        PyErr_Clear();
        return 0;
    }
    (void)_PyType_Lookup(type, any);
    Py_DECREF(any);
    return mg_type_version(type);
}

/* The object of a weak reference (borrowed), NULL when it is gone. */
static inline PyObject *
mg_weak_target(PyObject *ref)
{
    PyObject *obj = ((PyWeakReference *)ref)->wr_object;
    return obj == Py_None ? NULL : obj;
}

#endif
