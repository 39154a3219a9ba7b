/* Counts the live bytes of the C heap and their maximum: preloaded (benchmarks/heap.py), so that every tensor, scratch space of a library and buffer of
 * compiled code is seen. Blocks below SMALLEST are Python's and the libraries' bookkeeping and are left out. */
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

#define SMALLEST 4096

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t), *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static atomic_llong live, peak;

static void *
gained(void *block)
{
    long long size = block == NULL ? 0 : (long long)malloc_usable_size(block);
    if (size < SMALLEST) return block;
    long long now = atomic_fetch_add(&live, size) + size, most = atomic_load(&peak);
    while (now > most && !atomic_compare_exchange_weak(&peak, &most, now)) {}
    return block;
}

static void
lost(void *block)
{
    long long size = block == NULL ? 0 : (long long)malloc_usable_size(block);
    if (size >= SMALLEST) atomic_fetch_sub(&live, size);
}

void *malloc(size_t n) { return gained(__libc_malloc(n)); }
void *calloc(size_t n, size_t size) { return gained(__libc_calloc(n, size)); }
void *memalign(size_t alignment, size_t n) { return gained(__libc_memalign(alignment, n)); }
void *aligned_alloc(size_t alignment, size_t n) { return gained(__libc_memalign(alignment, n)); }

int
posix_memalign(void **out, size_t alignment, size_t n)
{
    void *block = __libc_memalign(alignment, n);
    if (block == NULL) return ENOMEM;
    *out = gained(block);
    return 0;
}

void *
realloc(void *block, size_t n)
{
    lost(block);
    void *moved = __libc_realloc(block, n);
    if (moved == NULL && n != 0) gained(block);
    return gained(moved);
}

void
free(void *block)
{
    lost(block);
    __libc_free(block);
}

long long heap_live(void) { return atomic_load(&live); }
long long heap_peak(void) { return atomic_load(&peak); }
void heap_mark(void) { atomic_store(&peak, atomic_load(&live)); }
