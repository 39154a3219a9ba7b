/* Has anybody written into these pages? Asked of the kernel instead of reading the memory (pages.c). All functions need the GIL. */
#ifndef MAGNETO_PAGES_H
#define MAGNETO_PAGES_H

#include <stddef.h>
#include <stdint.h>

#define MG_PAGES_WORTH ((size_t)1 << 17) /* bytes: below, reading the memory costs no more than asking */

typedef struct mg_pages {
    uintptr_t start, end;  /* whole pages; equal once the entry is void */
    uint64_t generation;   /* counts writes that have been noticed, and protections */
    int refs;
    struct mg_pages *next;
} mg_pages;

/* Writes into the whole pages inside [p, p + bytes) are noticed from now on. A new reference, or NULL where that cannot be had. */
mg_pages *mg_pages_watch(const void *p, size_t bytes, uint64_t *generation);
/* 1: nothing has been written since `generation` was given. */
int mg_pages_clean(mg_pages *pages, uint64_t generation);
void mg_pages_release(mg_pages *pages);
/* Does this system have it? */
int mg_pages_available(void);

#endif
