/*
 * fuzz: what the targets of this folder share. A target is one file with one
 * LLVMFuzzerTestOneInput; it is linked to libFuzzer (preset fuzz) or to replay.c (everywhere else).
 *
 * Processes and threads: one of each.
 * Ownership: input is lent for the call; a target keeps nothing between calls but caches.
 * Codes: a broken promise of the code under test aborts (FUZZ_CHECK), so that both drivers and the
 *   sanitizers see it.
 * If the process dies: a file in /dev/shm or a memfd at most; the first is named after the process.
 */
#ifndef COX_TESTS_FUZZ_FUZZ_H
#define COX_TESTS_FUZZ_FUZZ_H

#include <coxswain/base.h>
#include "channel/base/hash.h"
#include "tests/lib/posix.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define FUZZ_CHECK(condition)                                                                      \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

/* The input, eaten from the front. */
struct fuzz_input {
    const uint8_t *bytes;
    size_t size;
};

/* Copies up to size bytes and clears the rest. Returns how many there were. */
static inline size_t fuzz_eat(struct fuzz_input *input, void *to, size_t size)
{
    size_t count = input->size < size ? input->size : size;
    memset(to, 0, size);
    if (count)
        memcpy(to, input->bytes, count);
    input->bytes += count;
    input->size -= count;
    return count;
}

static inline uint8_t fuzz_eat_byte(struct fuzz_input *input)
{
    uint8_t byte;
    fuzz_eat(input, &byte, sizeof byte);
    return byte;
}

/* True when the bytes may hold a field of number 0 whose tag is longer than need be: protobuf-c
 * reads that one, and refuses it once it is packed short. */
static inline bool fuzz_has_long_tag_0(const uint8_t *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        size_t end = i + 1;
        while (bytes[i] >> 3 == 16 && end < size && bytes[end] == 0x80)
            end++;
        if (bytes[i] >> 3 == 16 && end < size && bytes[end] == 0)
            return true;
    }
    return false;
}

/* Reads every byte, so that a sanitizer sees memory that is not there. The check keeps the loop: no
 * compiler knows that the hash is not zero. */
static inline void fuzz_touch(const void *bytes, size_t size)
{
    FUZZ_CHECK(cox_hash_bytes(COX_HASH_START, bytes, size) != 0);
}

/* An error text comes with every failure and ends inside its buffer. */
static inline void fuzz_check_error(int r, const struct cox_error *err)
{
    FUZZ_CHECK(r != 0);
    FUZZ_CHECK(err->code == r);
    FUZZ_CHECK(err->text[0] != '\0');
    FUZZ_CHECK(memchr(err->text, '\0', sizeof err->text));
}

#endif
