/* Dictionary watchers (3.12 and later): a mutation sets the flag of everybody who watches the dictionary. */
#include "guards.h"

#if MG_DICT_VERSIONS

int
mg_watch_available(void)
{
    return 0;
}

int
mg_watch(PyObject *dict, unsigned char *flag)
{
    return -1;
}

void
mg_unwatch(PyObject *dict, unsigned char *flag)
{
}

#else

/* A table from dictionaries to the flags of those who watch it: open hashing, doubled when full. Entries are not references: the
 * event of a dictionary's deallocation removes them. */
typedef struct node {
    PyObject *dict;
    unsigned char *flag;
    struct node *next;
} node;

static node **buckets;
static size_t n_buckets, n_nodes;
static int watcher = -2; /* -2: not asked yet, -1: none left */

static size_t
bucket_of(PyObject *dict, size_t n)
{
    size_t key = (size_t)dict >> 4;
    return (key ^ (key >> 9) ^ (key >> 18)) & (n - 1);
}

static int
on_event(PyDict_WatchEvent event, PyObject *dict, PyObject *key, PyObject *new_value)
{
    node **link = n_buckets ? &buckets[bucket_of(dict, n_buckets)] : NULL;
    while (link != NULL && *link != NULL) {
        node *at = *link;
        if (at->dict == dict) {
            *at->flag = 1;
            if (event == PyDict_EVENT_DEALLOCATED) {
                *link = at->next;
                PyMem_RawFree(at);
                n_nodes--;
                continue;
            }
        }
        link = &at->next;
    }
    return 0;
}

static int
grow(void)
{
    size_t n = n_buckets ? n_buckets * 2 : 256;
    node **bigger = PyMem_RawCalloc(n, sizeof(node *));
    if (bigger == NULL) {
        return -1;
    }
    for (size_t i = 0; i < n_buckets; i++) {
        for (node *at = buckets[i], *next; at != NULL; at = next) {
            next = at->next;
            node **head = &bigger[bucket_of(at->dict, n)];
            at->next = *head;
            *head = at;
        }
    }
    PyMem_RawFree(buckets);
    buckets = bigger;
    n_buckets = n;
    return 0;
}

int
mg_watch_available(void)
{
    if (watcher == -2) {
        watcher = PyDict_AddWatcher(on_event);
        if (watcher < 0) { /* all ids are taken: guards are then evaluated on each call */
            PyErr_Clear();
            watcher = -1;
        }
    }
    return watcher >= 0;
}

int
mg_watch(PyObject *dict, unsigned char *flag)
{
    if (!mg_watch_available() || (n_nodes >= n_buckets && grow() < 0)) {
        return -1;
    }
    node **head = &buckets[bucket_of(dict, n_buckets)];
    for (node *at = *head; at != NULL; at = at->next) {
        if (at->dict == dict && at->flag == flag) {
            return 0;
        }
    }
    node *at = PyMem_RawMalloc(sizeof(node));
    if (at == NULL) {
        return -1;
    }
    *at = (node){dict, flag, *head};
    *head = at;
    n_nodes++;
    if (PyDict_Watch(watcher, dict) < 0) {
        PyErr_Clear();
        mg_unwatch(dict, flag);
        return -1;
    }
    return 0;
}

/* `dict` may be gone (then its entries are gone too, or belong to another dictionary at the same address: only ours is removed). */
void
mg_unwatch(PyObject *dict, unsigned char *flag)
{
    int removed = 0, others = 0;
    node **link = n_buckets ? &buckets[bucket_of(dict, n_buckets)] : NULL;
    while (link != NULL && *link != NULL) {
        node *at = *link;
        if (at->dict == dict && at->flag == flag) {
            *link = at->next;
            PyMem_RawFree(at);
            n_nodes--;
            removed = 1;
            continue;
        }
        others += at->dict == dict;
        link = &at->next;
    }
    if (removed && !others && PyDict_Unwatch(watcher, dict) < 0) {
        PyErr_Clear();
    }
}

#endif
