/* Memory of large results. The C library gives memory of this size back to the system as soon as it is free, and the system hands it out again page by page, zeroed, at each page's first write: several
 * times what computing the numbers costs. Blocks that are free stay mapped here instead and serve later results of about their size. A block belongs to a tensor through DLPack's deleter, which any
 * thread may call, without the GIL; such a tensor's storage cannot be resized.
 */
#include "blocks.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MOST_IDLE 64                  /* blocks */
#define KEPT_IDLE ((size_t)256 << 20) /* bytes that stay idle although other memory is needed */
#define OLD 4096                      /* takes of other blocks after which an idle one is given back */
#define GRAIN ((size_t)1 << 16)

typedef struct {
    void *memory;
    size_t bytes;
    uint64_t since;
} Block;

typedef struct {
    mg_dlmanaged managed; /* first: the deleter gets its address */
    Block block;
    int64_t layout[]; /* sizes, then strides */
} Owner;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Block idle[MOST_IDLE]; /* oldest first */
static int n_idle;
static size_t idle_bytes, most_bytes; /* most: an eighth of the machine's memory */
static uint64_t takes, reused;

/* In a forked child: another thread of the parent may have held the lock. */
static void
after_fork(void)
{
    pthread_mutex_init(&lock, NULL);
    n_idle = 0;
    idle_bytes = 0;
}

static Block
leave(int i)
{
    Block block = idle[i];
    memmove(idle + i, idle + i + 1, (size_t)(--n_idle - i) * sizeof(Block));
    idle_bytes -= block.bytes;
    return block;
}

static void
release(int i)
{
    Block block = leave(i);
    munmap(block.memory, block.bytes);
}

static int
take(size_t bytes, Block *out)
{
    bytes = (bytes + GRAIN - 1) & ~(GRAIN - 1);
    int best = -1;
    pthread_mutex_lock(&lock);
    takes++;
    while (n_idle > 0 && takes - idle[0].since > OLD) release(0);
    for (int i = n_idle; i-- > 0;) /* of equals the youngest, which caches may hold */
        if (idle[i].bytes >= bytes && idle[i].bytes <= bytes + bytes / 2 && (best < 0 || idle[i].bytes < idle[best].bytes)) best = i;
    if (best >= 0) {
        *out = leave(best);
        reused++;
    }
    else
        while (n_idle > 0 && idle_bytes > KEPT_IDLE) release(0);
    pthread_mutex_unlock(&lock);
    if (best >= 0) return 1;
    *out = (Block){mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), bytes, 0};
    return out->memory != MAP_FAILED;
}

static void
give(Block block)
{
    pthread_mutex_lock(&lock);
    if (n_idle == MOST_IDLE) release(0);
    block.since = takes;
    idle[n_idle++] = block;
    idle_bytes += block.bytes;
    while (idle_bytes > most_bytes) release(0);
    pthread_mutex_unlock(&lock);
}

static void
owner_delete(mg_dlmanaged *self)
{
    give(((Owner *)self)->block);
    free(self);
}

int64_t
mg_block_extent(const mg_dltensor *like)
{
    int64_t last = 0;
    for (int d = 0; d < like->ndim; d++) {
        if (like->shape[d] == 0) return 0;
        last += (like->shape[d] - 1) * like->strides[d];
    }
    return (last + 1) * like->dtype.bits * like->dtype.lanes / 8;
}

PyObject *
mg_block_tensor(const mg_dlpack_api *api, const mg_dltensor *like, int64_t bytes)
{
    size_t n = (size_t)like->ndim;
    Owner *owner = calloc(1, sizeof(Owner) + 2 * n * sizeof(int64_t));
    PyObject *tensor = NULL;
    if (owner == NULL) return NULL;
    if (!take((size_t)bytes, &owner->block)) {
        free(owner);
        return NULL;
    }
    memcpy(owner->layout, like->shape, n * sizeof(int64_t));
    memcpy(owner->layout + n, like->strides, n * sizeof(int64_t));
    owner->managed = (mg_dlmanaged){.version = {MG_DLPACK_MAJOR, 0}, .deleter = owner_delete, .tensor = *like};
    owner->managed.tensor.data = owner->block.memory;
    owner->managed.tensor.byte_offset = 0;
    owner->managed.tensor.shape = owner->layout;
    owner->managed.tensor.strides = owner->layout + n;
    if (api->to_py_object(&owner->managed, (void **)&tensor) < 0) {
        PyErr_Clear();
        owner_delete(&owner->managed);
        return NULL;
    }
    return tensor;
}

/* ---- for Python ---- */

static PyObject *
blocks(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    return Py_BuildValue("inKK", n_idle, (Py_ssize_t)idle_bytes, (unsigned long long)takes, (unsigned long long)reused);
}

static PyObject *
release_blocks(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    pthread_mutex_lock(&lock);
    while (n_idle > 0) release(0);
    pthread_mutex_unlock(&lock);
    Py_RETURN_NONE;
}

static PyObject *
keep_blocks(PyObject *Py_UNUSED(module), PyObject *arg)
{
    size_t before = most_bytes, bytes = PyLong_AsSize_t(arg);
    if (bytes == (size_t)-1 && PyErr_Occurred()) return NULL;
    most_bytes = bytes;
    return PyLong_FromSize_t(before);
}

static PyMethodDef methods[] = {
    {"blocks", blocks, METH_NOARGS, "Memory of large results that waits for the next ones: (blocks, bytes, how often such memory was asked for, how often it was there)."},
    {"release_blocks", release_blocks, METH_NOARGS, "Give that memory back to the system."},
    {"keep_blocks", keep_blocks, METH_O, "How many bytes of it may wait; what it was before."},
    {NULL, NULL, 0, NULL},
};

int
mg_blocks_init(PyObject *module)
{
    most_bytes = (size_t)sysconf(_SC_PHYS_PAGES) / 8 * (size_t)sysconf(_SC_PAGESIZE);
    return pthread_atfork(NULL, NULL, after_fork) != 0 ? (PyErr_NoMemory(), -1) : PyModule_AddFunctions(module, methods);
}
