/*
 * tsan: what ThreadSanitizer has to be told, since it knows neither sem_clockwait, nor two mappings
 * of one semaphore, nor that the dead do nothing more. Nothing in other builds.
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
__attribute__((weak)) char cox_tsan_deaths; /* one for the program, whoever includes this */
#endif

/* What was done before a release of this address is done before what follows this. */
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

/* The kernel tells of a process's death after all that it did. Where threads of a test are a rank
 * (tests/lib/ranks.h), they say where they may die that this was all. */
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
