/*
 * load: what every worker does with a request, the same for all that is compared: reads every byte
 * into memory of its own, answers with the request's first eight bytes, its rank, and filler.
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

struct load {
    size_t request_size;
    size_t reply_size;
    uint8_t *copy; /* owned: what a worker read */
};

/* Returns 0 or -ENOMEM. */
int load_init(struct load *load, size_t request_size, size_t reply_size);
void load_deinit(struct load *load);

/* A worker's side: `reply` has room for reply_size bytes. */
void load_answer(struct load *load, const uint8_t *request, uint32_t rank, uint8_t *reply);
/* The coordinator's side: numbers the request, so that an answer to another one is told apart. */
void load_number(uint8_t *request, uint64_t round);
/* Is this the answer of `rank` to round `round`? */
bool load_matches(const uint8_t *reply, uint32_t rank, uint64_t round);

#endif
