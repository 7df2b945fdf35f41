/*
 * idioms: assertions, and cleanup of owned locals. It has no .c file: the library and the reference
 * engine both use it, and so neither has to export functions to the other for it.
 *
 * Any process, any thread may use everything here; nothing blocks.
 */
#ifndef COX_CHANNEL_IDIOMS_H
#define COX_CHANNEL_IDIOMS_H

#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Marks functions that every request passes through. The linker places them together, on a few
 * pages, so that a process that was just scheduled in misses fewer address translations. */
#define COX_HOT __attribute__((hot))

/* Checks for programming errors, in release builds as well: prints the place to standard error,
 * unless nobody reads that, and aborts. */
#define COX_ASSERT(condition)                                                                      \
    ((condition) ? (void)0 : cox_assert_failed(#condition, __FILE__, __LINE__))
__attribute__((noreturn, cold, unused)) static void cox_assert_failed(const char *condition,
                                                                      const char *file, int line)
{
    struct pollfd room = {.fd = STDERR_FILENO, .events = POLLOUT};
    if (poll(&room, 1, 1000) > 0) /* not by stdio, whose lock a thread may hold in such a write */
        dprintf(STDERR_FILENO, "coxswain: assertion failed: %s (%s:%d)\n", condition, file, line);
    abort();
}

/* For owned locals: fn releases them at the end of their scope. On success, a function steals the
 * local that it returns. */
#define _cox_cleanup_(fn) __attribute__((cleanup(fn)))

/* Defines fn_free##p for _cox_cleanup_, of a pointer that fn_free frees. */
#define COX_DEFINE_FREEP(type, fn_free)                                                            \
    static inline void fn_free##p(type **object)                                                   \
    {                                                                                              \
        fn_free(*object);                                                                          \
    }                                                                                              \
    _Static_assert(sizeof(type *) > 0, "so that a semicolon may follow")

/* Sets an optional field of a protobuf message, and the has_ beside it. */
#define COX_SET(message, field, value) ((message)->has_##field = true, (message)->field = (value))

/* Makes room for count items in the growable array *items, at least doubling *capacity (in items).
 * Returns
 *   0
 *   -ENOMEM: also for more than UINT32_MAX items; nothing has changed
 */
static inline int cox_reserve(void **items, size_t *capacity, size_t count, size_t item_size)
{
    if (count <= *capacity)
        return 0;
    if (count > UINT32_MAX)
        return -ENOMEM;
    const size_t larger = 2 * *capacity > count ? 2 * *capacity : count;
    void *grown = reallocarray(*items, larger, item_size);
    if (!grown)
        return -ENOMEM;
    *items = grown;
    *capacity = larger;
    return 0;
}

/* malloc, or realloc of what bytes has. Many megabytes are filled on huge pages where the kernel
 * has some: thousands of page faults cost more than the copy that causes them. */
static inline void *cox_allocate_large(void *bytes, size_t size)
{
    const size_t huge = (size_t)2 << 20;
    uint8_t *grown = realloc(bytes, size);
    if (!grown || size < 4 * huge)
        return grown;
    const size_t before = (size_t)(-(uintptr_t)grown) % huge;
    madvise(grown + before, (size - before) / huge * huge, MADV_HUGEPAGE);
    return grown;
}

/* Removes the incomplete UTF-8 character at the end of a text that was cut off. */
static inline void cox_text_trim(char *text)
{
    size_t length = strlen(text), first = length;
    while (first > 0 && length - first < 3 && ((unsigned char)text[first - 1] & 0xc0) == 0x80)
        first--;
    if (first == 0)
        return;
    unsigned char lead = (unsigned char)text[--first];
    size_t needed = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : lead >= 0xc0 ? 2 : 1;
    if (length - first < needed)
        text[first] = '\0';
}

/* Closes *fd if it is open, and keeps errno. */
static inline void cox_close_fd(int *fd)
{
    if (*fd < 0)
        return;
    int saved = errno;
    close(*fd);
    errno = saved;
    *fd = -1;
}

/* Makes an eventfd readable. */
static inline void cox_eventfd_signal(int fd)
{
    const uint64_t one = 1;
    const ssize_t written = write(fd, &one, sizeof one);
    (void)written; /* a full counter is as readable as one */
}

/* Frees *(void **)ptr, and keeps errno. */
static inline void cox_free_ptr(void *ptr)
{
    int saved = errno;
    free(*(void **)ptr);
    errno = saved;
}

static inline int cox_steal_fd(int *fd)
{
    int stolen = *fd;
    *fd = -1;
    return stolen;
}

static inline void *cox_steal_ptr(void *ptr)
{
    void **p = (void **)ptr;
    void *stolen = *p;
    *p = NULL;
    return stolen;
}

#endif
