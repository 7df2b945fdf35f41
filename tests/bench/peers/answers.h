/*
 * answers: which ranks have answered a round, where replies come in any order.
 *
 * The coordinator's main thread; one struct per round, of the caller. Nothing blocks. If the
 * process dies: private memory.
 */
#ifndef BENCH_PEERS_ANSWERS_H
#define BENCH_PEERS_ANSWERS_H

#include "tests/bench/subject.h"

struct answers {
    size_t reply_size;
    uint64_t round;
    uint32_t left;
    uint64_t missing[(COX_RANK_COUNT_MAX + 63) / 64];
};

/* At most COX_RANK_COUNT_MAX ranks, which workers_start sees to. */
void answers_init(struct answers *answers, const struct subject_options *options, uint64_t round);
/* Takes one reply off what is missing: the right sum, of a rank that had not answered. Returns 0 or
 * an error. */
int answers_take(struct answers *answers, const uint8_t *reply, size_t size, struct cox_error *err);

#endif
