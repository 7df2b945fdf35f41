/*
 * hash: FNV-1a with 64 bits, http://www.isthe.com/chongo/tech/comp/fnv/ (public domain). Not for
 * input that an attacker chooses to collide.
 *
 * Processes and threads: any; nothing is owned, nothing blocks.
 */
#ifndef COX_CHANNEL_HASH_H
#define COX_CHANNEL_HASH_H

#include <stddef.h>
#include <stdint.h>

#define COX_HASH_START UINT64_C(0xcbf29ce484222325)

/* Continues a hash; the first one is COX_HASH_START. */
static inline uint64_t cox_hash_bytes(uint64_t hash, const void *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++)
        hash = (hash ^ ((const uint8_t *)bytes)[i]) * UINT64_C(0x100000001b3);
    return hash;
}

#endif
