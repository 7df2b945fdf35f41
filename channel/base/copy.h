/*
 * copy: a copy of a large payload between two processes. Header only.
 *
 * memcpy of a few megabytes is a loop of vector moves. On AMD's processors from family 1Ah on, `rep
 * movsb` is faster, since it writes whole lines without first reading what another processor has of
 * them. Measured on one of them, 5 MB from one process to two and back, all copies: 450 us in place
 * of 600; while others use the same cache, 1 MB: 190 in place of 360; 64 MB to one: 6.0 ms in place
 * of 9.5. glibc 2.36 uses it up to the size of L2, glibc from 2.40 on not at all on AMD's, because
 * of Zen 3 and 4: there it is no faster, and slow where the destination is not aligned. On Intel's
 * glibc decides.
 *
 * Threads: any. Blocks: nothing. If the process dies: nothing is left.
 */
#ifndef COX_CHANNEL_COPY_H
#define COX_CHANNEL_COPY_H

#include "tsan.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Smaller ones are left to memmove. */
#define COX_COPY_SIZE_MIN ((size_t)64 << 10)

/* Sanitizers do not see what instructions of ours write. */
#if defined(COX_TSAN) || defined(__SANITIZE_ADDRESS__)
#define COX_COPY_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(memory_sanitizer)
#define COX_COPY_SANITIZED 1
#endif
#endif

#if defined(__x86_64__) && !defined(COX_COPY_SANITIZED)
#define COX_COPY_STRINGS 1

#include <cpuid.h>
#include <stdatomic.h>

#define COX_COPY_LINE ((size_t)64)
#define COX_COPY_FAMILY_MIN 0x1au

/* AMD's from this family on, with fast strings. */
static inline bool cox_copy_cpu_has_strings(void)
{
    unsigned a, b, c, d, family;
    if (!__get_cpuid(0, &a, &b, &c, &d) || b != signature_AMD_ebx || c != signature_AMD_ecx ||
        d != signature_AMD_edx)
        return false;
    __get_cpuid(1, &a, &b, &c, &d);
    family = (a >> 8 & 0xf) + (a >> 20 & 0xff);
    return family >= COX_COPY_FAMILY_MIN && __get_cpuid_count(7, 0, &a, &b, &c, &d) && b & 1u << 9;
}

/* Asked once: on a virtual machine the host is asked. */
static inline bool cox_copy_has_strings(void)
{
    static atomic_int known; /* 0: no, 1: it has none, 2: it has */
    /* relaxed, both: any thread finds the same. */
    int has = atomic_load_explicit(&known, memory_order_relaxed);
    if (has == 0) {
        has = cox_copy_cpu_has_strings() ? 2 : 1;
        atomic_store_explicit(&known, has, memory_order_relaxed);
    }
    return has == 2;
}

/* size: at least COX_COPY_LINE. They do not overlap. */
static inline void cox_copy_by_strings(uint8_t *to, const uint8_t *from, size_t size)
{
    const size_t head = -(uintptr_t)to % COX_COPY_LINE;
    memcpy(to, from, head);
    to += head;
    from += head;
    size -= head;
    __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(size)::"memory");
}
#endif

/* As memmove. */
static inline void cox_copy(void *to, const void *from, size_t size)
{
#ifdef COX_COPY_STRINGS
    const uintptr_t a = (uintptr_t)to, b = (uintptr_t)from;
    if (size >= COX_COPY_SIZE_MIN && (a > b ? a - b : b - a) >= size && cox_copy_has_strings()) {
        cox_copy_by_strings(to, from, size);
        return;
    }
#endif
    memmove(to, from, size);
}

#endif
