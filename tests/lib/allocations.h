/*
 * allocations: counts what this program allocates, on the thread that looks, also inside other
 * libraries; included by one file of a program, which gets its malloc from here. Under a sanitizer
 * the calls are counted by its hooks, and none can be refused.
 */
#ifndef COX_TESTS_LIB_ALLOCATIONS_H
#define COX_TESTS_LIB_ALLOCATIONS_H

#include "tests/lib/posix.h"

static _Thread_local size_t allocation_count;

#if TEST_SANITIZED
#define SANITIZED 1
/* gcc 12 ships the function without the declaration. */
int __sanitizer_install_malloc_and_free_hooks(void (*on_malloc)(const volatile void *, size_t),
                                              void (*on_free)(const volatile void *));

static void on_malloc(const volatile void *memory, size_t size)
{
    (void)memory;
    (void)size;
    allocation_count++;
}

static void on_free(const volatile void *memory)
{
    (void)memory;
}

__attribute__((constructor)) static void allocations_hook(void)
{
    __sanitizer_install_malloc_and_free_hooks(on_malloc, on_free);
}
#else
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *memory, size_t size);

/* Allocations that still succeed; SIZE_MAX: all. */
static size_t allocations_left = SIZE_MAX;

static bool allocation_refused(void)
{
    allocation_count++;
    if (allocations_left == SIZE_MAX)
        return false;
    if (allocations_left == 0)
        return true;
    allocations_left--;
    return false;
}

void *malloc(size_t size)
{
    return allocation_refused() ? NULL : __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    return allocation_refused() ? NULL : __libc_calloc(count, size);
}

void *realloc(void *memory, size_t size)
{
    return allocation_refused() ? NULL : __libc_realloc(memory, size);
}
#endif

#endif
