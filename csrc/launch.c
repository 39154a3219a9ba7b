/* What calls on a GPU need of many tensors at once: the launch of a kernel without Python round it, addresses compared, small numbers packed.
 *
 * `Launch` is a callable of tensors. The driver's functions are given by `bind_driver` (runtime/driver.py finds them in libcuda): neither headers nor linking
 * are needed. A kernel that waits by itself for what was launched before (`waits`: triton_launch.py) may begin while that ends, where the driver knows of it
 * (programmatic dependent launch). Whatever is not the usual case (a pointer that is no multiple of 16, a tensor without an address, an error) goes to the callable `other`.
 *
 * A *table* is a kernel of two parameters in device memory, the addresses of all tensors and a constant. Its memory is filled by `other`, which tells by
 * `remember` for which addresses on which stream that holds; `other` is called again as soon as they differ, and while the stream is captured.
 */
#include "plan.h"
#include <stddef.h>
#include <string.h>

#define MOST 480 /* parameters of a kernel that is no table: with two more they are below the 4,096 bytes that every driver takes (a sum of what all layers have made reads 235) */

typedef int (*LaunchKernel)(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream,
                            void **params, void **extra);
typedef struct { /* CUlaunchConfig */
    unsigned grid[3], block[3], shared;
    void *stream, *attributes;
    unsigned count;
} LaunchConfig;
typedef int (*LaunchKernelEx)(const LaunchConfig *config, void *function, void **params, void **extra);
typedef int (*IsCapturing)(void *stream, int *status);

static LaunchKernel launch_kernel;
static LaunchKernelEx launch_kernel_ex; /* NULL: the driver does not serve, or has refused once */
static IsCapturing is_capturing;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    void *function;
    unsigned grid[3], threads, shared;
    int device, n, table, waits;
    void **pointers; /* owned; table: n of this call, then n of the call remembered */
    void *memory[2]; /* table: its parameters */
    void *stream;    /* table: on which they hold */
    PyObject *other; /* owned */
} LaunchObject;

/* The driver's status. */
static int
launched(LaunchObject *l, void *stream, void **params)
{
    if (l->waits && launch_kernel_ex != NULL) {
        uint64_t attribute[9] = {6, 1}; /* CUlaunchAttribute: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, allowed */
        LaunchConfig config = {{l->grid[0], l->grid[1], l->grid[2]}, {l->threads, 1, 1}, l->shared, stream, attribute, 1};
        int status = launch_kernel_ex(&config, l->function, params, NULL);
        if (status != 1 && status != 801) return status; /* CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED */
        launch_kernel_ex = NULL;
    }
    return launch_kernel(l->function, l->grid[0], l->grid[1], l->grid[2], l->threads, 1, 1, l->shared, stream, params, NULL);
}

static PyObject *
launch_vectorcall(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    LaunchObject *l = (LaunchObject *)self;
    const mg_dlpack_api *dlpack = mg_plan_dlpack();
    void *some[MOST], **pointers = l->table ? l->pointers : some, *params[MOST + 2], *nothing = NULL, *stream;
    uintptr_t bits = 0;
    int n = l->n, capturing = 0;
    if (dlpack == NULL || dlpack->current_work_stream == NULL || l->function == NULL || launch_kernel == NULL || kwnames != NULL) goto other;
    if (PyVectorcall_NARGS(nargsf) != n) goto other;
    for (int i = 0; i < n; i++) {
        mg_dltensor view;
        if (dlpack->view_of(args[i], &view) < 0) goto cleared;
        pointers[i] = (char *)view.data + view.byte_offset;
        bits |= (uintptr_t)pointers[i];
    }
    if (dlpack->current_work_stream(MG_DL_CUDA, l->device, &stream) < 0) goto cleared;
    if (l->table) {
        if (stream != l->stream || memcmp(pointers, pointers + n, sizeof(void *) * (size_t)n) != 0) goto other;
        if (is_capturing(stream, &capturing) != 0 || capturing) goto other;
        pointers = l->memory;
        n = 2;
    }
    else if (bits & 15) goto other;
    for (int i = 0; i < n; i++) params[i] = &pointers[i];
    params[n] = params[n + 1] = &nothing; /* two scratch memories, which some versions of Triton pass */
    if (launched(l, stream, params) == 0) Py_RETURN_NONE;
    goto other;
cleared:
    PyErr_Clear();
other:
    return PyObject_Vectorcall(l->other, args, nargsf, kwnames);
}

static PyObject *
launch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"function", "grid", "threads", "shared", "device", "count", "other", "table", "waits", NULL};
    PyObject *function, *other;
    unsigned grid[3], threads, shared;
    int device, n, table = 0, waits = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O(III)IIiiO|pp", names, &function, &grid[0], &grid[1], &grid[2], &threads, &shared, &device, &n, &other,
                                     &table, &waits)) return NULL;
    if (n < 0 || (n > MOST && !table)) {
        PyErr_Format(PyExc_ValueError, "a kernel of %d parameters", n);
        return NULL;
    }
    void *address = PyLong_AsVoidPtr(function);
    if (address == NULL && PyErr_Occurred()) return NULL;
    LaunchObject *l = (LaunchObject *)type->tp_alloc(type, 0);
    if (l == NULL) return NULL;
    l->vectorcall = launch_vectorcall;
    l->function = address;
    memcpy(l->grid, grid, sizeof grid);
    l->threads = threads;
    l->shared = shared;
    l->device = device;
    l->n = n;
    l->table = table;
    l->waits = waits;
    l->other = Py_NewRef(other);
    if (table) {
        l->function = NULL; /* until something is remembered */
        if ((l->pointers = PyMem_Calloc(2 * (size_t)n + 1, sizeof(void *))) == NULL) {
            Py_DECREF(l);
            return PyErr_NoMemory();
        }
    }
    return (PyObject *)l;
}

static PyObject *
launch_remember(PyObject *self, PyObject *args)
{
    LaunchObject *l = (LaunchObject *)self;
    const char *addresses;
    Py_ssize_t bytes;
    unsigned long long function, stream, first, second;
    if (!PyArg_ParseTuple(args, "y#KKKK", &addresses, &bytes, &function, &stream, &first, &second)) return NULL;
    if (!l->table || bytes != (Py_ssize_t)sizeof(void *) * l->n) {
        PyErr_SetString(PyExc_ValueError, "as many addresses as the table has tensors");
        return NULL;
    }
    memcpy(l->pointers + l->n, addresses, (size_t)bytes);
    l->memory[0] = (void *)(uintptr_t)first;
    l->memory[1] = (void *)(uintptr_t)second;
    l->stream = (void *)(uintptr_t)stream;
    l->function = (void *)(uintptr_t)function;
    Py_RETURN_NONE;
}

static int
launch_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(((LaunchObject *)self)->other);
    return 0;
}

static void
launch_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    PyMem_Free(((LaunchObject *)self)->pointers);
    Py_XDECREF(((LaunchObject *)self)->other);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef launch_methods[] = {
    {"remember", launch_remember, METH_VARARGS, "remember(addresses, function, stream, first, second): of a table, for which addresses its memory holds."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject Launch_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "magneto._C.Launch",
    .tp_doc = "Launch(function, grid, threads, shared, device, count, other, table=False, waits=False): launch(*tensors)",
    .tp_basicsize = sizeof(LaunchObject),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(LaunchObject, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = launch_new,
    .tp_traverse = launch_traverse,
    .tp_dealloc = launch_dealloc,
    .tp_methods = launch_methods,
};

/* ---- functions ---- */

static PyObject *
bind_driver(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned long long launch, capturing, launch_ex = 0;
    if (!PyArg_ParseTuple(args, "KK|K", &launch, &capturing, &launch_ex)) return NULL;
    memcpy(&launch_kernel, &(uintptr_t){(uintptr_t)launch}, sizeof launch_kernel);
    memcpy(&launch_kernel_ex, &(uintptr_t){(uintptr_t)launch_ex}, sizeof launch_kernel_ex);
    memcpy(&is_capturing, &(uintptr_t){(uintptr_t)capturing}, sizeof is_capturing);
    Py_RETURN_NONE;
}

/* moved(inputs, positions, addresses, known): the first of the inputs at `positions` (int32) that does not lie at its address (int64), or -1. In `known` (16 bytes each, zeros at first) is noted where those lay
 * that did: who lies there again, and is of the same type, needs no closer look. */
static PyObject *
moved(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *inputs;
    const char *positions, *addresses;
    Py_ssize_t many, bytes;
    PyObject *known = NULL;
    if (!PyArg_ParseTuple(args, "Oy#y#|Y", &inputs, &positions, &many, &addresses, &bytes, &known)) return NULL;
    char *seen = mg_tensor_place != NULL && known != NULL && PyByteArray_GET_SIZE(known) >= 16 * (many / 4) ? PyByteArray_AS_STRING(known) : NULL;
    if (!PyTuple_Check(inputs) && !PyList_Check(inputs)) return PyErr_Format(PyExc_TypeError, "inputs are a tuple or a list");
    for (Py_ssize_t k = 0; k < many / 4 && k < bytes / 8; k++) {
        int32_t at;
        int64_t address;
        uint64_t place[2];
        void *data;
        memcpy(&at, positions + 4 * k, 4);
        if (at < 0 || at >= PySequence_Fast_GET_SIZE(inputs)) return PyErr_Format(PyExc_IndexError, "there is no input %d", (int)at);
        PyObject *input = PySequence_Fast_GET_ITEM(inputs, at);
        int placed = seen != NULL && mg_tensor_place(input, place);
        if (placed && memcmp(seen + 16 * k, place, 16) == 0) continue;
        memcpy(&address, addresses + 8 * k, 8);
        if (mg_plan_data(input, &data) < 0) return NULL;
        if ((int64_t)(intptr_t)data != address) return PyLong_FromLong(at);
        if (placed) memcpy(seen + 16 * k, place, 16);
    }
    return PyLong_FromLong(-1);
}

/* The memory of dense tensors of the CPU from or to places behind `address`; `places` are int64 triples: position of the tensor, offset, bytes. */
static PyObject *
pack(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *tensors;
    int out = 0;
    unsigned long long address;
    const char *places;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(args, "O!Ky#|p", &PyTuple_Type, &tensors, &address, &places, &bytes, &out)) return NULL;
    for (Py_ssize_t k = 0; k < bytes / 24; k++) {
        int64_t place[3];
        void *data;
        memcpy(place, places + 24 * k, sizeof place);
        if (place[0] < 0 || place[0] >= PyTuple_GET_SIZE(tensors)) return PyErr_Format(PyExc_IndexError, "there is no tensor %lld", (long long)place[0]);
        if (mg_plan_data(PyTuple_GET_ITEM(tensors, place[0]), &data) < 0) return NULL;
        void *there = (char *)(uintptr_t)address + place[1];
        memcpy(out ? data : there, out ? there : data, (size_t)place[2]);
    }
    Py_RETURN_NONE;
}

/* addresses(tensors): of their first elements, as int64. */
static PyObject *
addresses(PyObject *Py_UNUSED(module), PyObject *tensors)
{
    if (!PyTuple_Check(tensors)) return PyErr_Format(PyExc_TypeError, "addresses takes a tuple");
    Py_ssize_t n = PyTuple_GET_SIZE(tensors);
    PyObject *found = PyBytes_FromStringAndSize(NULL, 8 * n);
    for (Py_ssize_t k = 0; found != NULL && k < n; k++) {
        void *data;
        if (mg_plan_data(PyTuple_GET_ITEM(tensors, k), &data) < 0) Py_CLEAR(found);
        else memcpy(PyBytes_AS_STRING(found) + 8 * k, &(int64_t){(int64_t)(intptr_t)data}, 8);
    }
    return found;
}

static PyMethodDef functions[] = {
    {"bind_driver", bind_driver, METH_VARARGS, "bind_driver(cuLaunchKernel, cuStreamIsCapturing, cuLaunchKernelEx=0): their addresses."},
    {"moved", moved, METH_VARARGS, "moved(inputs, positions, addresses, known=None): the first input that lies elsewhere, or -1."},
    {"pack", pack, METH_VARARGS, "pack(tensors, address, places, out=False): copy dense tensors of the CPU to an address; out: from there."},
    {"addresses", addresses, METH_O, "addresses(tensors): where they begin, as int64."},
    {NULL, NULL, 0, NULL},
};

int
mg_launch_init(PyObject *module)
{
    if (PyType_Ready(&Launch_Type) < 0 || PyModule_AddFunctions(module, functions) < 0) return -1;
    return PyModule_AddObjectRef(module, "Launch", (PyObject *)&Launch_Type);
}
