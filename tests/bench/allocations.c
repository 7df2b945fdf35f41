#include "allocations.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>

#include <coxswain/base.h>

#if defined(__SANITIZE_ADDRESS__)
#define HAS_ALLOCATOR_OF_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define HAS_ALLOCATOR_OF_ASAN 1
#endif
#endif

/* relaxed: only a count; the reader sees its own thread's allocations, and through the round those
 * of all threads. */
static _Atomic uint64_t allocations;

static void count_one(void)
{
    atomic_fetch_add_explicit(&allocations, 1, memory_order_relaxed);
}

uint64_t allocations_now(void)
{
    return atomic_load_explicit(&allocations, memory_order_relaxed);
}

#ifdef HAS_ALLOCATOR_OF_ASAN

/* AddressSanitizer's allocator cannot be replaced. It calls this after each allocation. */
COX_PUBLIC void __sanitizer_malloc_hook(const volatile void *memory, size_t size);
COX_PUBLIC void __sanitizer_malloc_hook(const volatile void *memory, size_t size)
{
    (void)memory;
    (void)size;
    count_one();
}

#else

/* The C library's own allocator, under the names that it keeps for replacements. */
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *old, size_t size);
void *__libc_memalign(size_t alignment, size_t size);

COX_PUBLIC void *malloc(size_t size)
{
    count_one();
    return __libc_malloc(size);
}

COX_PUBLIC void *calloc(size_t count, size_t size)
{
    count_one();
    return __libc_calloc(count, size);
}

COX_PUBLIC void *realloc(void *old, size_t size)
{
    count_one();
    return __libc_realloc(old, size);
}

COX_PUBLIC void *aligned_alloc(size_t alignment, size_t size)
{
    count_one();
    return __libc_memalign(alignment, size);
}

COX_PUBLIC int posix_memalign(void **memory, size_t alignment, size_t size)
{
    count_one();
    *memory = __libc_memalign(alignment, size);
    return *memory ? 0 : ENOMEM;
}

#endif
