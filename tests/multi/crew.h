/*
 * crew: processes that are the ranks of one group, forked by a test, without a coordinator.
 *
 * Each rank runs a function of the test and says in shared memory how it ended. Failures of the
 * harness itself end the test through cmocka; in ranks they end the process with status 99.
 */
#ifndef COX_TESTS_MULTI_CREW_H
#define COX_TESTS_MULTI_CREW_H

#include <coxswain/group.h>

#include <stdatomic.h>
#include <sys/types.h>

#define CREW_RANK_COUNT_MAX 8u
#define CREW_NUMBER_COUNT 65536u

/* Shared with the ranks. */
struct crew_rank {
    /* of what ended it */
    struct cox_error err;
    int result;
    size_t number_count;
    /* whatever it computed */
    float numbers[CREW_NUMBER_COUNT];
};

struct crew {
    uint32_t rank_count;
    int group_fd;
    /* below 2^32; stands for the coordinator's word for cancelled steps */
    _Atomic uint64_t *void_through;
    /* how often waiting ranks have asked for that word in a step */
    _Atomic uint32_t *asked;
    _Atomic uint32_t *met;
    /* of this process; 0: none */
    uint64_t step;
    struct crew_rank *ranks;
    pid_t pids[CREW_RANK_COUNT_MAX];
    /* as of waitpid, after crew_wait */
    int statuses[CREW_RANK_COUNT_MAX];
};

/* Memory for a group of that many ranks, all zero. */
void crew_open(struct crew *crew, uint32_t rank_count);
/* Starts one rank: runs fn there, which returns the result of the rank. */
void crew_start(struct crew *crew, uint32_t rank,
                int (*fn)(struct crew *crew, uint32_t rank, struct crew_rank *self, void *context),
                void *context);
/* Waits until all that were started have ended. */
void crew_wait(struct crew *crew);
void crew_close(struct crew *crew);

/* In a rank: joins, or ends the process. */
struct cox_group *crew_join(struct crew *crew, uint32_t rank);
/* In a rank: keeps numbers, or ends the process. */
void crew_keep(struct crew_rank *self, const float *numbers, size_t count);
/* In a rank: continues once steps up to this one are cancelled. */
void crew_await_void(struct crew *crew, uint64_t step);
/* Gives them up. */
void crew_set_void(struct crew *crew, uint64_t step);
/* In a rank: continues once ranks have been here so many times in all. Not through the group. */
void crew_meet(struct crew *crew, uint32_t count);
/* In a rank: it waits, and asks. */
void crew_ask(struct crew *crew);
/* In a rank: continues once another rank waits in a step, for long enough to check. */
void crew_await_asked(struct crew *crew);

#endif
