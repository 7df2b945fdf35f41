/*
 * tsan: annotations for ThreadSanitizer, which does not know sem_clockwait, two mappings of one
 * semaphore, or that a dead process does nothing more. Empty in other builds.
 *
 * Threads: any.
 * Blocks: nothing.
 */
#ifndef COX_CHANNEL_TSAN_H
#define COX_CHANNEL_TSAN_H

#if defined(__SANITIZE_THREAD__)
#define COX_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define COX_TSAN 1
#endif
#endif

#ifdef COX_TSAN
void __tsan_acquire(void *address);
void __tsan_release(void *address);
__attribute__((weak)) char cox_tsan_deaths; /* one in the program, from whatever file */
#endif

/* Everything before a release of this address happens before everything after its acquire. */
static inline void cox_tsan_acquire(void *address)
{
#ifdef COX_TSAN
    __tsan_acquire(address);
#else
    (void)address;
#endif
}

static inline void cox_tsan_release(void *address)
{
#ifdef COX_TSAN
    __tsan_release(address);
#else
    (void)address;
#endif
}

/* The kernel reports a death after everything the process did. Where test threads act as ranks
 * (tests/lib/ranks.h), each calls this before it may die. */
static inline void cox_tsan_may_die(void)
{
#ifdef COX_TSAN
    __tsan_release(&cox_tsan_deaths);
#endif
}

static inline void cox_tsan_has_died(void)
{
#ifdef COX_TSAN
    __tsan_acquire(&cox_tsan_deaths);
#endif
}

#endif
