/* Pages that are watched for writes, with Linux's asynchronous write protection (userfaultfd, 6.7 and later): the first write into a protected page costs a
 * fault that the kernel resolves by itself, and PAGEMAP_SCAN tells which pages are still protected. Every write through this process's page tables is seen,
 * system calls' included. Private anonymous memory only: files and shared memory can be written by others. Elsewhere (older kernels, sandboxes,
 * memory of another kind) the answer is "cannot be had", and the numbers are digested.
 *
 * A range is one entry, whoever watches it. Protecting it again raises its generation, so that no watcher takes another's new protection for its own.
 */
#include "magneto.h"
#include "pages.h"

#if defined(__linux__) && __has_include(<linux/userfaultfd.h>)
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

/* <linux/fs.h> has these from 6.7 on; they are the kernel's interface, and do not change. */
#define SCAN_ALLOWED 1u
#define SCAN_WRITTEN 2u
#define SCAN_FILE 4u
#define SCAN_PRESENT 8u
#define SCAN_SWAPPED 16u
typedef struct {
    uint64_t start, end, categories;
} scan_region;
typedef struct {
    uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages, inverted, mask, anyof, returned;
} scan_arg;
#define SCAN _IOWR('f', 16, scan_arg)
#define FEATURES ((1ull << 13) | (1ull << 15)) /* WP_UNPOPULATED, WP_ASYNC */

static int state, faults = -1, pagemap = -1; /* state: 0 not asked yet, 1 there is, -1 there is not */
static mg_pages *entries;

/* In a forked child: the descriptors speak of the parent's memory, and the child's is not protected. */
static void
after_fork(void)
{
    if (faults >= 0) close(faults);
    if (pagemap >= 0) close(pagemap);
    faults = pagemap = -1;
    if (state > 0) state = 0;
    for (mg_pages *e = entries; e != NULL; e = e->next) e->end = e->start;
}

int
mg_pages_available(void)
{
    static int registered;
    if (state != 0) return state > 0;
    struct uffdio_api api = {.api = UFFD_API, .features = FEATURES};
    faults = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | 1 /* UFFD_USER_MODE_ONLY: all that others than root may have */);
    pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    scan_arg scan = {.size = sizeof scan, .mask = SCAN_WRITTEN, .returned = SCAN_WRITTEN}; /* of nothing: is it known? */
    state = faults >= 0 && pagemap >= 0 && ioctl(faults, UFFDIO_API, &api) == 0 && (api.features & FEATURES) == FEATURES && ioctl(pagemap, SCAN, &scan) == 0;
    if (state && !registered) state = registered = pthread_atfork(NULL, NULL, after_fork) == 0;
    if (!state) {
        after_fork();
        state = -1;
    }
    return state > 0;
}

/* Is every page there, private, and protected still? */
static int
protected(const mg_pages *e)
{
    scan_region region = {0};
    scan_arg scan = {
        .size = sizeof scan, .start = e->start, .end = e->end, .vec = (uint64_t)(uintptr_t)&region, .vec_len = 1, .inverted = SCAN_WRITTEN | SCAN_FILE,
        .mask = SCAN_ALLOWED | SCAN_WRITTEN | SCAN_FILE, .anyof = SCAN_PRESENT | SCAN_SWAPPED, .returned = SCAN_ALLOWED,
    };
    return ioctl(pagemap, SCAN, &scan) == 1 && region.start == e->start && region.end == e->end;
}

static int
protect(mg_pages *e)
{
    struct uffdio_register reg = {.range = {e->start, e->end - e->start}, .mode = UFFDIO_REGISTER_MODE_WP};
    struct uffdio_writeprotect wp = {.range = reg.range, .mode = UFFDIO_WRITEPROTECT_MODE_WP};
    e->generation++;
    return ioctl(faults, UFFDIO_REGISTER, &reg) == 0 && ioctl(faults, UFFDIO_WRITEPROTECT, &wp) == 0 && protected(e);
}

static void
give_up(mg_pages *e)
{
    struct uffdio_range range = {e->start, e->end - e->start};
    if (e->end > e->start) ioctl(faults, UFFDIO_UNREGISTER, &range); /* fails where the memory is gone */
    e->end = e->start;
}

mg_pages *
mg_pages_watch(const void *p, size_t bytes, uint64_t *generation)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t start = ((uintptr_t)p + page - 1) / page * page, end = ((uintptr_t)p + bytes) / page * page;
    if (!mg_pages_available() || end <= start || end - start < MG_PAGES_WORTH / 2) return NULL;
    mg_pages *e = entries, *next;
    for (; e != NULL; e = next) {
        next = e->next;
        if (e->start == start && e->end == end) break;
        if (e->start < end && start < e->end) give_up(e); /* a part of it, or of memory that is gone: its watchers will notice */
    }
    if (e == NULL) {
        if ((e = PyMem_Calloc(1, sizeof *e)) == NULL) return NULL;
        *e = (mg_pages){.start = start, .end = end, .next = entries};
        entries = e;
    }
    e->refs++;
    if (!protected(e) && !protect(e)) {
        give_up(e);
        mg_pages_release(e);
        return NULL;
    }
    *generation = e->generation;
    return e;
}

int
mg_pages_clean(mg_pages *e, uint64_t generation)
{
    return e->generation == generation && e->end > e->start && protected(e);
}

void
mg_pages_release(mg_pages *e)
{
    if (--e->refs > 0) return;
    give_up(e);
    mg_pages **at = &entries;
    while (*at != e) at = &(*at)->next;
    *at = e->next;
    PyMem_Free(e);
}

static long
watched(void)
{
    long n = 0;
    for (mg_pages *e = entries; e != NULL; e = e->next) n += e->end > e->start;
    return mg_pages_available() ? n : -1;
}

#else

static long watched(void) { return -1; }
int mg_pages_available(void) { return 0; }
mg_pages *mg_pages_watch(const void *p, size_t bytes, uint64_t *generation) { return NULL; }
int mg_pages_clean(mg_pages *pages, uint64_t generation) { return 0; }
void mg_pages_release(mg_pages *pages) {}

#endif

static PyObject *
pages_watched(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    return PyLong_FromLong(watched());
}

static PyMethodDef methods[] = {
    {"pages_watched", pages_watched, METH_NOARGS, "How many weights are watched by their pages; -1 where the system does not offer that."},
    {NULL, NULL, 0, NULL},
};

int
mg_pages_init(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
