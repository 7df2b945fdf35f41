/*
 * load: what every worker does with a request, the same for all that is compared: reads every byte,
 * where the transport left it, and answers with what it read, its rank, and filler. What a
 * transport copies to leave it there is its own cost.
 *
 * Reading is a 64-bit sum, which runs at the speed of memory. Filler makes the words of a request
 * that has no number yet sum up to LOAD_SUM; so the sum of one that has is LOAD_SUM and its number,
 * and an answer that has that sum has seen every byte of that request. The raw floors copy the
 * request out instead of summing it: the card defines them as a memcpy in and a memcpy out.
 *
 * Coordinator and workers; one struct load per thread. Nothing blocks. If the process dies: private
 * memory.
 */
#ifndef BENCH_LOAD_H
#define BENCH_LOAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The smallest request and the smallest reply. */
#define LOAD_SIZE_MIN 16
#define LOAD_SUM UINT64_C(0x636f787377616e21)

struct load {
    size_t request_size;
    size_t reply_size;
    /* owned: what a worker of a floor copied out; NULL before it did */
    uint8_t *copy;
};

/* Returns 0 or -ENOMEM. */
int load_init(struct load *load, size_t request_size, size_t reply_size);
void load_deinit(struct load *load);

/* A worker's side: `reply` has room for reply_size bytes. Reads the request in place. */
void load_answer(struct load *load, const uint8_t *request, uint32_t rank, uint8_t *reply);
/* The floors' way: copies it out instead, to where load_copy_init made room. */
int load_copy_init(struct load *load); /* Returns 0 or -ENOMEM. */
void load_answer_copy(struct load *load, const uint8_t *request, uint32_t rank, uint8_t *reply);
/* A request that came in pieces: the sum of `size` bytes, all pieces but the last a multiple of
 * eight; the sum of the request is the sum of all. load_reply answers with it. */
uint64_t load_sum(const uint8_t *bytes, size_t size);
void load_reply(const struct load *load, uint64_t sum, uint32_t rank, uint8_t *reply);

/* The coordinator's side: fills a request once, and numbers it, so that a reply to another request
 * is noticed. */
void load_fill(uint8_t *request, size_t request_size);
void load_number(uint8_t *request, uint64_t round);
/* Is this the answer of `rank` to round `round`? */
bool load_matches(const uint8_t *reply, uint32_t rank, uint64_t round);

#endif
