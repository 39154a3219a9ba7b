/* Entry points: where regions are looked up. Each code object has a table of its own, by (policy, offset), as code extra. */
#include "frame.h"

static mg_code *all_codes;

static void
entry_drop_regions(mg_entry *entry)
{
    while (entry->n > 0) {
        Region *region = entry->regions[--entry->n];
        region->entry = NULL;
        Py_DECREF(region);
    }
}

void
mg_entry_remove(mg_entry *entry, Region *region)
{
    for (int i = 0; i < entry->n; i++) {
        if (entry->regions[i] == region) {
            entry->n--;
            memmove(&entry->regions[i], &entry->regions[i + 1], sizeof(Region *) * (entry->n - i));
            region->entry = NULL;
            Py_DECREF(region);
            return;
        }
    }
}

int
mg_entry_push(mg_entry *entry, Region *region)
{
    if (region->entry != NULL) {
        PyErr_SetString(PyExc_ValueError, "the region already stands at an entry point");
        return -1;
    }
    if (entry->n == entry->capacity) {
        int capacity = entry->capacity ? 2 * entry->capacity : 2;
        Region **grown = PyMem_Realloc(entry->regions, sizeof(Region *) * capacity);
        if (grown == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        entry->regions = grown;
        entry->capacity = capacity;
    }
    memmove(&entry->regions[1], &entry->regions[0], sizeof(Region *) * entry->n);
    entry->regions[0] = (Region *)Py_NewRef(region);
    entry->n++;
    region->entry = entry;
    return 0;
}

MG_HOT Region *
mg_entry_match(mg_entry *entry, const mg_frame_view *view, mg_call *call)
{
    /* A guard may run any code: the list may change during a check. It is read anew each time, so that at worst a region is
     * passed over or tried twice. */
    for (int i = 0; i < entry->n; i++) {
        Region *region = (Region *)Py_NewRef(entry->regions[i]);
        if (mg_region_match(region, view, call)) {
            if (i > 0 && i < entry->n && entry->regions[i] == region) {
                memmove(&entry->regions[1], &entry->regions[0], sizeof(Region *) * i);
                entry->regions[0] = region;
            }
            return region;
        }
        Py_DECREF(region);
    }
    return NULL;
}

#if MG_SUPPORTED

Py_ssize_t mg_extra_index;

static void
entry_unlink(mg_entry *entry)
{
    if (entry->prev != NULL) {
        entry->prev->next = entry->next;
    }
    else {
        entry->policy->entries = entry->next;
    }
    if (entry->next != NULL) {
        entry->next->prev = entry->prev;
    }
}

static void
entry_free(mg_entry *entry)
{
    entry_drop_regions(entry);
    PyMem_Free(entry->regions);
    PyMem_Free(entry);
}

static void
code_table_insert(mg_code *owner, mg_entry *entry)
{
    size_t i = mg_entry_hash(entry->policy, entry->offset);
    while (owner->table[i & owner->mask] != NULL) {
        i++;
    }
    owner->table[i & owner->mask] = entry;
}

static int
code_table_resize(mg_code *owner, int size)
{
    mg_entry **old = owner->table;
    mg_entry **table = PyMem_Calloc(size, sizeof(mg_entry *));
    int old_size = old ? owner->mask + 1 : 0;
    if (table == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    owner->table = table;
    owner->mask = size - 1;
    for (int i = 0; i < old_size; i++) {
        if (old[i] != NULL) {
            code_table_insert(owner, old[i]);
        }
    }
    PyMem_Free(old);
    return 0;
}

/* Takes the entry out of its code's table (the chain behind it is inserted anew, which keeps it gapless). */
static void
code_table_remove(mg_code *owner, mg_entry *entry)
{
    size_t i = mg_entry_hash(entry->policy, entry->offset);
    while (owner->table[i & owner->mask] != entry) {
        i++;
    }
    owner->table[i & owner->mask] = NULL;
    owner->n--;
    for (i++; owner->table[i & owner->mask] != NULL; i++) {
        mg_entry *moved = owner->table[i & owner->mask];
        owner->table[i & owner->mask] = NULL;
        code_table_insert(owner, moved);
    }
}

/* The code object goes away. */
static void
code_extra_free(void *extra)
{
    mg_code *own = extra;
    if (own == NULL) {
        return;
    }
    if (own->prev != NULL) {
        own->prev->next = own->next;
    }
    else {
        all_codes = own->next;
    }
    if (own->next != NULL) {
        own->next->prev = own->prev;
    }
    own->code = NULL;
    mg_entry **table = own->table;
    int size = table ? own->mask + 1 : 0;
    own->table = NULL;
    for (int i = 0; i < size; i++) {
        if (table[i] != NULL) {
            entry_unlink(table[i]);
        }
    }
    for (int i = 0; i < size; i++) { /* dropping regions may run any code: nothing points to the entries any more */
        if (table[i] != NULL) {
            entry_free(table[i]);
        }
    }
    PyMem_Free(table);
    PyMem_Free(own->layout);
    Py_XDECREF(own->clone);
    PyMem_Free(own);
}

mg_code *
mg_code_of(PyCodeObject *code)
{
    mg_code *own = mg_code_get(code);
    if (own != NULL) {
        return own;
    }
    own = PyMem_Calloc(1, sizeof(mg_code));
    if (own == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    if (MG_SET_EXTRA((PyObject *)code, mg_extra_index, own) < 0) {
        PyMem_Free(own);
        return NULL;
    }
    own->code = code;
    own->next = all_codes;
    if (all_codes != NULL) {
        all_codes->prev = own;
    }
    all_codes = own;
    return own;
}

mg_layout *
mg_code_layout(PyCodeObject *code)
{
    mg_code *own = mg_code_of(code);
    if (own == NULL) {
        return NULL;
    }
    if (own->layout == NULL) {
        own->layout = mg_layout_of(code);
    }
    return own->layout;
}

mg_entry *
mg_entry_at(PyCodeObject *code, Policy *policy, int offset)
{
    mg_code *own = mg_code_of(code);
    if (own == NULL) {
        return NULL;
    }
    mg_entry *entry = mg_entry_find(own, policy, offset);
    if (entry != NULL) {
        return entry;
    }
    if (3 * (own->n + 1) > 2 * (own->table ? own->mask + 1 : 0)) {
        if (code_table_resize(own, own->table ? 2 * (own->mask + 1) : 4) < 0) {
            return NULL;
        }
    }
    entry = PyMem_Calloc(1, sizeof(mg_entry));
    if (entry == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    entry->owner = own;
    entry->policy = policy;
    entry->offset = offset;
    entry->next = policy->entries;
    if (policy->entries != NULL) {
        policy->entries->prev = entry;
    }
    policy->entries = entry;
    code_table_insert(own, entry);
    own->n++;
    return entry;
}

void
mg_policy_drop_entries(Policy *policy)
{
    while (policy->entries != NULL) {
        mg_entry *entry = policy->entries;
        entry_unlink(entry);
        code_table_remove(entry->owner, entry);
        entry_free(entry);
    }
}

int
mg_skip_code(mg_entry *entry)
{
    mg_entry *start = mg_entry_at(entry->owner->code, entry->policy, 0); /* what a frame's start looks at */
    if (start == NULL) {
        return -1;
    }
    start->state = ENTRY_SKIP_CODE;
    if (entry->state == ENTRY_OPEN) {
        entry->state = ENTRY_SKIP;
    }
    return 0;
}

#else /* !MG_SUPPORTED: there are no entry points */

void
mg_policy_drop_entries(Policy *Py_UNUSED(policy))
{
}

#endif

/* ---- listing and clearing ---- */

static int
append_regions(PyObject *list, mg_code *own, PyObject *policy)
{
    for (int i = 0; own->table != NULL && i <= own->mask; i++) {
        mg_entry *entry = own->table[i];
        if (entry == NULL || (policy != Py_None && (PyObject *)entry->policy != policy)) {
            continue;
        }
        for (int k = 0; k < entry->n; k++) {
            if (PyList_Append(list, (PyObject *)entry->regions[k]) < 0) {
                return -1;
            }
        }
    }
    return 0;
}

static PyObject *
collect_regions(PyObject *code, PyObject *policy)
{
    PyObject *list = PyList_New(0);
    for (mg_code *own = all_codes; list != NULL && own != NULL; own = own->next) {
        if ((code == Py_None || (PyObject *)own->code == code) && append_regions(list, own, policy) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

static PyObject *
list_regions(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"code", "policy", NULL};
    PyObject *code = Py_None, *policy = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|OO:regions", names, &code, &policy)) {
        return NULL;
    }
    return collect_regions(code, policy);
}

/* Forgets regions and skip marks. The entry points themselves stay: frames that run may point to them. */
static PyObject *
clear(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"policy", NULL};
    PyObject *policy = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O:clear", names, &policy)) {
        return NULL;
    }
    PyObject *held = collect_regions(Py_None, policy); /* so that dropping them runs no code while we walk */
    if (held == NULL) {
        return NULL;
    }
    for (mg_code *own = all_codes; own != NULL; own = own->next) {
        for (int i = 0; own->table != NULL && i <= own->mask; i++) {
            mg_entry *entry = own->table[i];
            if (entry != NULL && (policy == Py_None || (PyObject *)entry->policy == policy)) {
                entry_drop_regions(entry);
                entry->state = ENTRY_OPEN;
            }
        }
    }
    Py_DECREF(held);
    Py_RETURN_NONE;
}

static PyMethodDef entry_functions[] = {
    {"regions", (PyCFunction)(void (*)(void))list_regions, METH_VARARGS | METH_KEYWORDS,
     "regions(code=None, policy=None) -> list of the regions that stand at entry points of that code and policy"},
    {"clear", (PyCFunction)(void (*)(void))clear, METH_VARARGS | METH_KEYWORDS,
     "clear(policy=None)\n\nForgets what was compiled, and which entry points are skipped."},
    {NULL, NULL, 0, NULL},
};

int
mg_entry_init(PyObject *module)
{
#if MG_SUPPORTED
    mg_extra_index = MG_REQUEST_EXTRA(code_extra_free);
    if (mg_extra_index < 0) {
        PyErr_SetString(PyExc_RuntimeError, "no room left for data on code objects");
        return -1;
    }
#endif
    return PyModule_AddFunctions(module, entry_functions);
}
