/* What guards need to know of CPython versions: whether a dictionary, a class or an instance's __dict__ has been changed.
 *
 * Dictionaries: 3.11 gives each state of each dictionary a number of its own (ma_version_tag). Later versions have watchers.
 * Classes: tp_version_tag is unique per state of a class as long as it is not 0; setting an attribute of the class or of a base
 * resets it. Numbers are given out by _PyType_Lookup. */
#ifndef MAGNETO_COMPAT_GUARDS_H
#define MAGNETO_COMPAT_GUARDS_H

#include "magneto.h"

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
    if (slot == NULL || *slot == NULL) {
        return NULL;
    }
    return PyDict_CheckExact(*slot) ? slot : NULL;
}

/* The number of the present state of `type`, 0 when it has none. */
static inline unsigned int
mg_type_version(PyTypeObject *type)
{
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

/* The object of a weak reference (borrowed), None when it is gone. */
static inline PyObject *
mg_weak_target(PyObject *ref)
{
    return ((PyWeakReference *)ref)->wr_object;
}

#endif
