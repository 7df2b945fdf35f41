#include "lazy_copy.h"

#include "channel/base/idioms.h"

#include <coxswain/base.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ /* Linux 5.14 */
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif
/* Of an entry of pagemap. A page of our own is neither a file's nor absent. */
#define PAGEMAP_PRESENT (UINT64_C(3) << 62)
#define PAGEMAP_FILE (UINT64_C(1) << 61)

struct copy {
    struct copy *next;
    uint8_t *bytes;
    size_t size;
    /* NULL: forgotten */
    const void *owner;
    /* bytes that the caller uses; 0: it was freed */
    size_t used;
    bool complete;
};

/* Of the process, since a fork concerns all. */
static struct {
    pthread_mutex_t lock;
    struct copy *first;
} copies = {.lock = PTHREAD_MUTEX_INITIALIZER};

static size_t page_size(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

static int copy_complete(struct copy *copy)
{
    if (copy->complete)
        return 0;
    if (madvise(copy->bytes, copy->used, MADV_POPULATE_WRITE) < 0) {
        if (errno == ENOMEM || errno == EFAULT)
            return COX_NO_SPACE;
        /* Linux before 5.14, or a filter: a write that changes nothing, also beside others. */
        for (size_t at = 0; at < copy->used; at += page_size())
            (void)__atomic_fetch_or(copy->bytes + at, 0, __ATOMIC_RELAXED);
    }
    copy->complete = true;
    return 0;
}

/* Returns true if a page may have been written: also if the kernel does not tell. */
static bool copy_written(const struct copy *copy)
{
    uint64_t entries[512];
    const size_t page = page_size();
    uint64_t at = (uintptr_t)copy->bytes / page;
    const uint64_t end = at + (copy->used + page - 1) / page;
    _cox_cleanup_(cox_close_fd) int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    while (fd >= 0 && at < end) {
        const size_t asked = end - at < 512 ? (size_t)(end - at) : 512;
        if (pread(fd, entries, asked * sizeof *entries, (off_t)(at * sizeof *entries)) !=
            (ssize_t)(asked * sizeof *entries))
            return true;
        for (size_t i = 0; i < asked; i++)
            if ((entries[i] & PAGEMAP_PRESENT) && !(entries[i] & PAGEMAP_FILE))
                return true;
        at += asked;
    }
    return fd < 0;
}

static void copy_unmap(struct copy *copy)
{
    munmap(copy->bytes, copy->size);
    free(copy);
}

/* The place where it is linked. NULL: it is not. */
static struct copy **find(const void *bytes)
{
    struct copy **link = &copies.first;
    while (*link && (*link)->bytes != bytes)
        link = &(*link)->next;
    return *link ? link : NULL;
}

/* ---- forks ---- */

static void fork_prepare(void)
{
    pthread_mutex_lock(&copies.lock);
    for (struct copy *copy = copies.first; copy; copy = copy->next)
        if (copy->used)
            (void)copy_complete(copy); /* without memory the fork fails, too */
}

static void fork_end(void)
{
    pthread_mutex_unlock(&copies.lock);
}

static void forks_register(void)
{
    (void)pthread_atfork(fork_prepare, fork_end, fork_end);
}

/* ---- copies ---- */

int cox_lazy_copy_new(int fd, size_t size, size_t used, const void *owner, void **ret_bytes)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, forks_register);
    struct copy *copy = malloc(sizeof *copy);
    if (!copy)
        return COX_NO_SPACE;
    void *bytes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    if (bytes == MAP_FAILED) {
        const int r = errno == ENOMEM ? COX_NO_SPACE : -errno;
        free(copy);
        return r;
    }
    /* One call in place of a fault for every 16 pages. Not MAP_POPULATE, which copies them. */
    (void)madvise(bytes, size, MADV_POPULATE_READ);
    *copy = (struct copy){.bytes = bytes, .size = size, .owner = owner, .used = used};
    pthread_mutex_lock(&copies.lock);
    copy->next = copies.first;
    copies.first = copy;
    pthread_mutex_unlock(&copies.lock);
    *ret_bytes = bytes;
    return 0;
}

void *cox_lazy_copy_again(size_t used, const void *owner)
{
    void *bytes = NULL;
    pthread_mutex_lock(&copies.lock);
    for (struct copy *copy = copies.first; copy && !bytes; copy = copy->next)
        if (copy->owner == owner && !copy->used) {
            copy->used = used;
            bytes = copy->bytes;
        }
    pthread_mutex_unlock(&copies.lock);
    return bytes;
}

int cox_lazy_copy_complete(void *bytes)
{
    pthread_mutex_lock(&copies.lock);
    struct copy **link = find(bytes);
    const int r = link ? copy_complete(*link) : 0;
    pthread_mutex_unlock(&copies.lock);
    return r;
}

void cox_lazy_copy_free(void *bytes)
{
    struct copy *unused = NULL;
    pthread_mutex_lock(&copies.lock);
    struct copy **link = find(bytes);
    if (link) {
        struct copy *copy = *link;
        /* Pages that were written have to be the file's again. */
        if (copy->complete || !copy->owner ||
            (copy_written(copy) && madvise(copy->bytes, copy->size, MADV_DONTNEED) < 0)) {
            *link = copy->next;
            unused = copy;
        }
        copy->used = 0;
    }
    pthread_mutex_unlock(&copies.lock);
    if (unused)
        copy_unmap(unused);
}

void cox_lazy_copy_forget(const void *owner)
{
    pthread_mutex_lock(&copies.lock);
    for (struct copy **link = &copies.first; *link;) {
        struct copy *copy = *link;
        if (copy->owner == owner)
            copy->owner = NULL;
        if (!copy->owner && !copy->used) {
            *link = copy->next;
            copy_unmap(copy);
        } else {
            link = &copy->next;
        }
    }
    pthread_mutex_unlock(&copies.lock);
}
