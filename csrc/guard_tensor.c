/* Facts about tensors and torch's modes, without torch's headers.
 *
 * Shape, strides, dtype, device and address come through the DLPack exchange API. It does not tell apart conj and neg views, inference
 * tensors, zero tensors, subclasses with dispatch and the like: one 64-bit word of the tensor does, its dispatch key set. Where that word
 * lies is found out by dynamo/guards/calibrate.py, which compares memory with what torch itself reports; if that fails, such facts are
 * checked through Python. When the words of its sizes, strides, dtype and device are known as well, a row remembers those of the last tensor
 * that fitted, and compares words. Probes are functions exported by torch's libraries that answer one mode in a few nanoseconds. */
#include "guards.h"

static const mg_dlpack_api *dlpack;
static PyTypeObject *tensor_type;
static PyObject *plain_types;              /* tuple of classes whose getters run no __torch_function__ of their own */
static int (*function_mode_enabled)(void); /* at::impl::torch_function_mode_enabled, NULL when it is not exported */
static int impl_word = -1, keys_word = -1;
static int first_word = -1, storage_word, data_word; /* of the metadata; of the storage; in the storage: its memory */
static int (*requires_grad_of)(const void *impl); /* c10::TensorImpl::requires_grad: a bool comes back in the low byte */
static PyObject *text_dtype, *text_requires_grad;

static inline const uint64_t *
impl_of(PyObject *tensor)
{
    return impl_word < 0 ? NULL : ((const uint64_t **)tensor)[impl_word];
}

int
mg_is_tensor(PyObject *value)
{
    return tensor_type != NULL && PyObject_TypeCheck(value, tensor_type);
}

int
mg_is_tensor_type(PyTypeObject *type)
{
    return tensor_type != NULL && (PyType_IsSubtype(type, tensor_type) || PyType_IsSubtype(tensor_type, type)) && type != &PyBaseObject_Type;
}

/* Whether a C attribute of this tensor can be read without user code: neither its class nor a mode intercepts. */
int
mg_tensor_getter_is_plain(PyObject *tensor)
{
    if (plain_types == NULL || function_mode_enabled == NULL || (function_mode_enabled() & 0xff)) {
        return 0;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(plain_types); i++) {
        if ((PyObject *)Py_TYPE(tensor) == PyTuple_GET_ITEM(plain_types, i)) {
            return 1;
        }
    }
    return 0;
}

static int
sizes_hold(const int64_t *expected, const int64_t *actual, int n)
{
    for (int i = 0; i < n; i++) {
        if (expected[i] != actual[i] && expected[i] != MG_DYNAMIC) {
            return 0;
        }
    }
    return 1;
}

static int
attribute_is(PyObject *obj, PyObject *name, PyObject *expected)
{
    PyObject *value = PyObject_GetAttr(obj, name);
    if (value == NULL) {
        PyErr_Clear();
    }
    Py_XDECREF(value);
    return value == expected;
}

/* The data pointer is NULL though there are elements: the tensor has no memory of its own (zero tensors, wrappers). */
static int
has_no_memory(const mg_dltensor *t)
{
    if (t->data != NULL) {
        return 0;
    }
    for (int i = 0; i < t->ndim; i++) {
        if (t->shape[i] == 0) {
            return 0;
        }
    }
    return 1;
}

static int
grad_holds(const mg_tensor_row *row, const uint64_t *impl, PyObject *value)
{
    if (row->requires_grad < 0) {
        return 1;
    }
    if (impl != NULL && requires_grad_of != NULL) {
        return (requires_grad_of(impl) & 0xff) == row->requires_grad;
    }
    return attribute_is(value, text_requires_grad, row->requires_grad ? Py_True : Py_False);
}

typedef uint64_t two_words __attribute__((vector_size(16), aligned(8), may_alias));

/* Whether the metadata are, word for word, those of the last tensor that fitted, and there is memory. */
static inline int
is_remembered(const mg_tensor_row *row, const uint64_t *impl)
{
    const two_words *now = (const two_words *)(impl + first_word), *then = (const two_words *)row->words;
    two_words pairs = now[0] ^ then[0];
#pragma GCC unroll 8
    for (int i = 1; i < MG_META_WORDS / 2; i++) {
        pairs |= now[i] ^ then[i];
    }
    uint64_t difference = pairs[0] | pairs[1] | (impl[first_word + MG_META_WORDS - 1] ^ row->words[MG_META_WORDS - 1]);
    return difference == 0 && ((const uint64_t *)impl[storage_word])[data_word] != 0;
}

static int holds_by_dlpack(const mg_tensor_row *row, const uint64_t *impl, PyObject *value);

static __attribute__((noinline)) int
holds_anew(mg_tensor_row *row, const uint64_t *impl, PyObject *value)
{
    if (dlpack == NULL || !holds_by_dlpack(row, impl, value)) {
        return 0;
    }
    if (row->may_remember) {
        memcpy(row->words, impl + first_word, sizeof(row->words));
        row->remembered = 1;
    }
    return grad_holds(row, impl, value);
}

MG_HOT int
mg_tensor_holds(mg_tensor_row *row, PyObject *value)
{
    if (Py_TYPE(value) != row->cls) {
        return 0;
    }
    const uint64_t *impl = impl_of(value);
    if (MG_LIKELY(row->remembered && is_remembered(row, impl))) {
        return grad_holds(row, impl, value);
    }
    return holds_anew(row, impl, value);
}

/* All facts but requires_grad. */
static int
holds_by_dlpack(const mg_tensor_row *row, const uint64_t *impl, PyObject *value)
{
    mg_dltensor t;
    if (row->has_keys && (impl == NULL || keys_word < 0 || impl[keys_word] != row->keys)) {
        return 0; /* before the call below, which throws (slowly) for layouts that it does not know */
    }
    if (dlpack->view_of(value, &t) != 0) {
        PyErr_Clear();
        return 0;
    }
    if (t.ndim != row->ndim || MG_DTYPE_KEY(t.dtype) != row->dtype_key || t.device.device_type != row->device.device_type ||
        t.device.device_id != row->device.device_id || !sizes_hold(row->sizes, t.shape, t.ndim) ||
        (row->has_strides && !sizes_hold(row->sizes + row->ndim, t.strides, t.ndim)) || has_no_memory(&t)) {
        return 0;
    }
    return row->dtype == NULL || attribute_is(value, text_dtype, row->dtype);
}

static int
parse_sizes(PyObject *tuple, int64_t *out)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
        PyObject *item = PyTuple_GET_ITEM(tuple, i);
        out[i] = item == Py_None ? MG_DYNAMIC : PyLong_AsLongLong(item);
        if (out[i] == -1 && PyErr_Occurred()) {
            return -1;
        }
    }
    return 0;
}

/* (cls, dtype key, dtype or None, keys or None, device type, device index, shape, strides or None, requires_grad -1/0/1, may remember words).
 * PyMem block; its references (cls, dtype) are borrowed from the payload, which the instruction keeps. */
mg_tensor_row *
mg_tensor_row_new(PyObject *payload)
{
    PyObject *cls, *dtype, *keys, *shape, *strides;
    unsigned int dtype_key;
    int device_type, device_id, requires_grad, may_remember;
    if (!PyArg_ParseTuple(payload, "O!IOOiiO!Oip;TENSOR", &PyType_Type, &cls, &dtype_key, &dtype, &keys, &device_type, &device_id, &PyTuple_Type,
                          &shape, &strides, &requires_grad, &may_remember)) {
        return NULL;
    }
    Py_ssize_t n = PyTuple_GET_SIZE(shape);
    if (strides != Py_None && (!PyTuple_Check(strides) || PyTuple_GET_SIZE(strides) != n)) {
        PyErr_SetString(PyExc_ValueError, "TENSOR: as many strides as sizes");
        return NULL;
    }
    mg_tensor_row *row = PyMem_Calloc(1, sizeof(mg_tensor_row) + 2 * n * sizeof(int64_t));
    if (row == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    row->cls = (PyTypeObject *)cls;
    row->dtype = dtype == Py_None ? NULL : dtype;
    row->dtype_key = dtype_key;
    row->has_keys = keys != Py_None;
    row->keys = row->has_keys ? PyLong_AsUnsignedLongLong(keys) : 0;
    row->device = (mg_dldevice){device_type, device_id};
    row->requires_grad = requires_grad;
    row->ndim = (int)n;
    row->may_remember = may_remember && first_word >= 0 && impl_word >= 0 && row->has_keys && n <= MG_INLINE_SIZES;
    row->has_strides = strides != Py_None;
    if (PyErr_Occurred() || parse_sizes(shape, row->sizes) < 0 || (row->has_strides && parse_sizes(strides, row->sizes + n) < 0)) {
        PyMem_Free(row);
        return NULL;
    }
    return row;
}

/* ---- memory of several tensors ---- */

typedef struct {
    PyObject *value;
    uint64_t device, low, high; /* high exclusive; low == high: no memory */
} memory_range;

static int
range_of(PyObject *tensor, memory_range *out)
{
    mg_dltensor t;
    if (dlpack == NULL || dlpack->view_of(tensor, &t) != 0) {
        PyErr_Clear();
        return -1;
    }
    int64_t low = 0, high = 1;
    for (int i = 0; i < t.ndim; i++) {
        int64_t span = (t.shape[i] - 1) * t.strides[i];
        if (t.shape[i] == 0) {
            low = high = 0;
            break;
        }
        *(span < 0 ? &low : &high) += span;
    }
    if (low != high && t.data == NULL) {
        return -1;
    }
    int64_t size = ((int64_t)t.dtype.bits * t.dtype.lanes + 7) / 8;
    uint64_t start = (uint64_t)t.data + t.byte_offset;
    out->device = (uint64_t)(uint32_t)t.device.device_type << 32 | (uint32_t)t.device.device_id;
    out->low = start + (uint64_t)(low * size);
    out->high = start + (uint64_t)(high * size);
    return 0;
}

static int
by_address(const void *a, const void *b)
{
    const memory_range *x = a, *y = b;
    if (x->device != y->device) {
        return x->device < y->device ? -1 : 1;
    }
    return x->low < y->low ? -1 : x->low > y->low;
}

static int
by_identity(const void *a, const void *b)
{
    PyObject *x = *(PyObject *const *)a, *y = *(PyObject *const *)b;
    return x < y ? -1 : x > y;
}

int
mg_all_distinct(PyObject **values, int n)
{
    memory_range small[64], *ranges = n <= 64 ? small : PyMem_Malloc(n * sizeof(memory_range));
    int n_ranges = 0, distinct = ranges != NULL;
    qsort(values, n, sizeof(PyObject *), by_identity);
    for (int i = 0; distinct && i < n; i++) {
        distinct = i == 0 || values[i] != values[i - 1];
        if (distinct && mg_is_tensor(values[i])) {
            distinct = range_of(values[i], &ranges[n_ranges]) == 0;
            n_ranges += distinct && ranges[n_ranges].low != ranges[n_ranges].high;
        }
    }
    if (distinct) {
        qsort(ranges, n_ranges, sizeof(memory_range), by_address);
        for (int i = 1; distinct && i < n_ranges; i++) {
            distinct = ranges[i].device != ranges[i - 1].device || ranges[i].low >= ranges[i - 1].high;
        }
    }
    if (ranges != small) {
        PyMem_Free(ranges);
    }
    return distinct;
}

static PyObject *
sizes_tuple(const int64_t *sizes, int n)
{
    PyObject *tuple = PyTuple_New(n);
    for (int i = 0; tuple != NULL && i < n; i++) {
        PyObject *item = PyLong_FromLongLong(sizes[i]);
        if (item == NULL) {
            Py_CLEAR(tuple);
            break;
        }
        PyTuple_SET_ITEM(tuple, i, item);
    }
    return tuple;
}

/* One PyMem block; NULL: an exception is set. */
mg_sizes_row *
mg_sizes_row_new(PyObject *registers, Py_ssize_t count, int n_registers)
{
    Py_ssize_t n = PyTuple_GET_SIZE(registers);
    mg_sizes_row *row = PyMem_Calloc(1, sizeof(mg_sizes_row) + 2 * count * sizeof(int64_t) + n * sizeof(int));
    if (row == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    row->n = (int)n;
    row->count = count;
    row->last = (int64_t *)(row + 1);
    row->now = row->last + count;
    row->registers = (int *)(row->now + count);
    for (Py_ssize_t i = 0; i < n; i++) {
        long r = PyLong_AsLong(PyTuple_GET_ITEM(registers, i));
        if (r < 0 || r >= n_registers) {
            PyErr_SetString(PyExc_ValueError, "GuardProgram: no such register");
            PyMem_Free(row);
            return NULL;
        }
        row->registers[i] = (int)r;
    }
    return row;
}

/* `fits(numbers)` is asked when they are not those of the last time; with a count of 0 the values themselves, each time. It is the compiler's, and changes nothing that guards look at. */
int
mg_sizes_hold(mg_sizes_row *row, PyObject *fits, PyObject *const *values)
{
    int64_t at = 0;
    for (int i = 0; row->count > 0 && i < row->n; i++) {
        int64_t number[2] = {PyLong_CheckExact(values[i]) ? PyLong_AsLongLong(values[i]) : -1, 0};
        mg_dltensor t = {.ndim = 1, .shape = number, .strides = number + 1}; /* a whole number: so many elements, all at one place */
        if (number[0] < 0 && (dlpack == NULL || !mg_is_tensor(values[i]) || dlpack->view_of(values[i], &t) != 0)) {
            PyErr_Clear();
            return 0;
        }
        if (at + 2 * t.ndim > row->count) {
            return 0;
        }
        memcpy(row->now + at, t.shape, t.ndim * sizeof(int64_t));
        memcpy(row->now + at + t.ndim, t.strides, t.ndim * sizeof(int64_t));
        at += 2 * t.ndim;
    }
    if (at != row->count) {
        return 0;
    }
    if (row->known && memcmp(row->now, row->last, at * sizeof(int64_t)) == 0) {
        return 1;
    }
    PyObject *numbers = sizes_tuple(row->now, (int)at), *found = NULL;
    if (numbers != NULL) {
        found = at > 0 ? PyObject_CallOneArg(fits, numbers) : PyObject_Vectorcall(fits, values, row->n, NULL);
    }
    int holds = found == Py_True;
    if (holds) { /* `now` is read from the tuple: the call may have come back here */
        for (int64_t i = 0; i < at; i++) {
            row->last[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(numbers, i));
        }
        row->known = at > 0;
    }
    PyErr_Clear();
    Py_XDECREF(numbers);
    Py_XDECREF(found);
    return holds;
}

/* ---- probes: `n` is the address, `m` the argument ---- */

enum { BOOL_VOID, INT8_VOID, INT64_VOID, BOOL_INT8, BOOL_UINT64, BYTE_MASK };

static int64_t
probe(int signature, int64_t address, int64_t argument)
{
    void *fn = (void *)(intptr_t)address;
    switch (signature) {
    case BOOL_VOID:
        return ((int (*)(void))fn)() & 0xff;
    case INT8_VOID:
        return (int8_t)((int (*)(void))fn)();
    case INT64_VOID:
        return ((int64_t (*)(void))fn)();
    case BOOL_INT8:
        return ((int (*)(int))fn)((int)argument) & 0xff;
    case BOOL_UINT64:
        return ((int (*)(uint64_t))fn)((uint64_t)argument) & 0xff;
    default: /* BYTE_MASK: a function that returns the address of flags; argument = offset << 8 | mask */
        return ((const unsigned char *(*)(void))fn)()[argument >> 8] & argument & 0xff;
    }
}

/* `data` of a PROBE instruction points to {signature, expected}. */
int
mg_probe_holds(const mg_instruction *in)
{
    const int64_t *more = in->data;
    return probe((int)more[0], in->n, in->m) == more[1];
}

/* ---- Python ---- */

static PyObject *
run_probe(PyObject *module, PyObject *args)
{
    int signature;
    long long address, argument;
    if (!PyArg_ParseTuple(args, "iLL", &signature, &address, &argument)) {
        return NULL;
    }
    return PyLong_FromLongLong(probe(signature, address, argument));
}

static PyObject *
set_tensor_api(PyObject *module, PyObject *args)
{
    PyObject *capsule, *type, *types;
    int impl, keys;
    long long requires_grad, mode_enabled;
    if (!PyArg_ParseTuple(args, "OO!O!iiLL", &capsule, &PyType_Type, &type, &PyTuple_Type, &types, &impl, &keys, &requires_grad, &mode_enabled)) {
        return NULL;
    }
    const mg_dlpack_header *header = NULL;
    if (capsule != Py_None) {
        header = PyCapsule_GetPointer(capsule, MG_DLPACK_CAPSULE);
        if (header == NULL) {
            return NULL;
        }
    }
    while (header != NULL && header->version.major != MG_DLPACK_MAJOR) {
        header = header->prev_api;
    }
    dlpack = (const mg_dlpack_api *)header; /* the table is static in torch: it outlives the capsule */
    dlpack = dlpack != NULL && dlpack->view_of != NULL ? dlpack : NULL;
    Py_XSETREF(tensor_type, (PyTypeObject *)Py_NewRef(type));
    Py_XSETREF(plain_types, Py_NewRef(types));
    function_mode_enabled = (int (*)(void))(intptr_t)mode_enabled;
    impl_word = impl;
    keys_word = impl < 0 ? -1 : keys;
    requires_grad_of = impl < 0 ? NULL : (int (*)(const void *))(intptr_t)requires_grad;
    return PyBool_FromLong(dlpack != NULL);
}

static PyObject *
tensor_meta(PyObject *module, PyObject *tensor)
{
    mg_dltensor t;
    if (dlpack == NULL || !mg_is_tensor(tensor)) {
        PyErr_SetString(PyExc_TypeError, dlpack == NULL ? "tensor_meta: no DLPack exchange API" : "tensor_meta: not a tensor");
        return NULL;
    }
    if (dlpack->view_of(tensor, &t) != 0) {
        return NULL;
    }
    PyObject *shape = sizes_tuple(t.shape, t.ndim), *strides = sizes_tuple(t.strides, t.ndim), *result = NULL;
    if (shape != NULL && strides != NULL) {
        result = Py_BuildValue("OOI(ii)K", shape, strides, (unsigned int)MG_DTYPE_KEY(t.dtype), (int)t.device.device_type, (int)t.device.device_id,
                               (unsigned long long)(uintptr_t)t.data);
    }
    Py_XDECREF(shape);
    Py_XDECREF(strides);
    return result;
}

/* set_tensor_words(first, storage, data): where the metadata begin (MG_META_WORDS of them), the storage's address, and in it that of its memory. */
static PyObject *
set_tensor_words(PyObject *module, PyObject *args)
{
    return PyArg_ParseTuple(args, "iii", &first_word, &storage_word, &data_word) ? Py_NewRef(Py_None) : NULL;
}

int
mg_tensor_place(PyObject *tensor, uint64_t place[2])
{
    const uint64_t *impl = first_word < 0 || !mg_is_tensor(tensor) ? NULL : impl_of(tensor);
    if (impl == NULL || impl[storage_word] == 0) return 0;
    place[0] = ((const uint64_t *)impl[storage_word])[data_word];
    place[1] = impl[first_word + 11];
    return place[0] != 0;
}

/* users(storages, tensors): how many users each of the storages has (their addresses, int64), then references to each tensor's object and users of each tensor; all as uint32.
 * Torch's objects begin with a pointer and their number of users: whoever calls this has compared it with what torch tells. */
static PyObject *
users(PyObject *module, PyObject *args)
{
    const char *storages;
    Py_ssize_t bytes;
    PyObject *tensors;
    if (!PyArg_ParseTuple(args, "y#O!", &storages, &bytes, &PyList_Type, &tensors)) return NULL;
    Py_ssize_t n = bytes / 8, m = PyList_GET_SIZE(tensors);
    PyObject *found = PyBytes_FromStringAndSize(NULL, 4 * (n + 2 * m));
    char *out = found == NULL ? NULL : PyBytes_AS_STRING(found);
    for (Py_ssize_t k = 0; out != NULL && k < n; k++) {
        const char *at;
        memcpy(&at, storages + 8 * k, 8);
        memcpy(out + 4 * k, at + 8, 4);
    }
    for (Py_ssize_t k = 0; out != NULL && k < m; k++) {
        PyObject *tensor = PyList_GET_ITEM(tensors, k);
        if (impl_word < 0 || !mg_is_tensor(tensor)) {
            Py_DECREF(found);
            return PyErr_Format(PyExc_TypeError, "tensors are not known");
        }
        memcpy(out + 4 * (n + k), &(uint32_t){(uint32_t)Py_REFCNT(tensor)}, 4);
        memcpy(out + 4 * (n + m + k), (const char *)impl_of(tensor) + 8, 4);
    }
    return found;
}

/* has_hooks(values, positions, word): may any of the tensors at `positions` (int32) have hooks? Its object has them in two words from `word` on, which are empty otherwise. */
static PyObject *
has_hooks(PyObject *module, PyObject *args)
{
    PyObject *values;
    const char *positions;
    Py_ssize_t bytes;
    int word;
    if (!PyArg_ParseTuple(args, "O!y#i", &PyTuple_Type, &values, &positions, &bytes, &word)) return NULL;
    for (Py_ssize_t k = 0; k < bytes / 4; k++) {
        int32_t at;
        memcpy(&at, positions + 4 * k, 4);
        if (word < 0 || at < 0 || at >= PyTuple_GET_SIZE(values) || !mg_is_tensor(PyTuple_GET_ITEM(values, at))) Py_RETURN_TRUE;
        PyObject *const *hooks = (PyObject *const *)PyTuple_GET_ITEM(values, at) + word;
        if ((hooks[0] != NULL && hooks[0] != Py_None) || (hooks[1] != NULL && hooks[1] != Py_None)) Py_RETURN_TRUE;
    }
    Py_RETURN_FALSE;
}

/* Words of memory at an address: for calibration only. */
static PyObject *
read_words(PyObject *module, PyObject *args)
{
    long long address;
    int n;
    if (!PyArg_ParseTuple(args, "Li", &address, &n)) {
        return NULL;
    }
    PyObject *result = PyTuple_New(n);
    for (int i = 0; result != NULL && i < n; i++) {
        PyObject *word = PyLong_FromUnsignedLongLong(((const uint64_t *)(intptr_t)address)[i]);
        if (word == NULL) {
            Py_CLEAR(result);
            break;
        }
        PyTuple_SET_ITEM(result, i, word);
    }
    return result;
}

static PyMethodDef methods[] = {
    {"set_tensor_api", set_tensor_api, METH_VARARGS,
     "set_tensor_api(capsule, tensor_type, plain_types, impl_word, keys_word, requires_grad_address, mode_enabled_address)\n\n"
     "-> whether the DLPack exchange API is usable"},
    {"tensor_meta", tensor_meta, METH_O, "tensor_meta(t) -> (shape, strides, dtype key, (device type, index), data_ptr)"},
    {"probe", run_probe, METH_VARARGS, "probe(signature, address, argument) -> int"},
    {"set_tensor_words", set_tensor_words, METH_VARARGS, "set_tensor_words(first word of the metadata or -1, storage word, data word)"},
    {"users", users, METH_VARARGS, "users(storages, tensors): how many each has, as uint32."},
    {"has_hooks", has_hooks, METH_VARARGS, "has_hooks(values, positions, word): may any of the tensors have hooks?"},
    {"read_words", read_words, METH_VARARGS, "read_words(address, n) -> tuple of 64-bit words"},
    {NULL},
};

int
mg_guard_tensor_init(PyObject *module)
{
    text_dtype = PyUnicode_InternFromString("dtype");
    text_requires_grad = PyUnicode_InternFromString("requires_grad");
    if (text_dtype == NULL || text_requires_grad == NULL) {
        return -1;
    }
    return PyModule_AddFunctions(module, methods);
}
