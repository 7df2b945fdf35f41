/*
 * group: the Coxswain groups that are measured: this program as coordinator, and itself again as
 * every worker.
 *
 * One thread starts and frees. The executor is the caller's. A worker is started as WORKER_FLAG
 * WORD...; what words say is of the two subjects (coxswain.h, steps.h).
 */
#ifndef BENCH_GROUP_H
#define BENCH_GROUP_H

#include <semaphore.h>

#include <coxswain/executor.h>
#include <coxswain/worker.h>

#define WORKER_FLAG "--worker"
#define GROUP_DEPTH_DEFAULT 4

enum group_by {
    GROUP_BY_SUBMIT,
    GROUP_BY_CALL,
    /* call, in a group whose completions the caller collects: no response thread */
    GROUP_BY_COLLECT,
    /* submit, and collected by a thread that sleeps in poll (cox_executor_fd) */
    GROUP_BY_POLL,
    /* submit; its handler wakes the thread that submits: what one hand-off more costs in a round */
    GROUP_BY_HAND_OFF,
    GROUP_BY_PING, /* nothing is asked: two threads wake each other; a sample is one way */
    GROUP_BY_COUNT
};

/* How a subject of ours uses a group; parsed from its command line. */
struct group_flavour {
    bool sealed;
    enum group_by by;
    enum cox_spin spin;
    /* of the group; 0: default */
    uint32_t depth;
    /* requests at a time; more than 1: samples are times between completions */
    uint32_t in_flight;
    /* threads that call; not 0: as in_flight */
    uint32_t callers;
    /* of a step */
    uint32_t sequences;
    /* of the workers, with the same words; NULL: this one */
    const char *worker_program;
};

/* Takes --attach, --by, --spin, --depth, --callers, --sequences and --worker-program with their
 * values out of argv, which it lends. Returns 0 or COX_INVALID. */
int group_flavour_parse(int *argc, char **argv, struct group_flavour *ret_flavour);

/* Starts a group whose frames hold request_size and whose slots hold reply_size bytes; where the
 * defaults do, they are left. words: NULL-terminated. */
int group_start(const struct group_flavour *flavour, uint32_t rank_count, size_t request_size,
                size_t reply_size, const char *const *words, struct cox_executor **ret_executor,
                struct cox_error *err);

/* Runs a worker, after WORKER_FLAG was seen; `callbacks` get context. argv after WORKER_FLAG has
 * the caller's arguments: `parse` is called with those, and the rank. worker: where the worker is
 * while it runs; NULL: nowhere. Returns the exit status. */
int group_worker_main(int argc, char **argv, const struct cox_worker_callbacks *callbacks,
                      int (*parse)(void *context, uint32_t rank, int argc, char **argv),
                      void *context, struct cox_worker **worker);

/* A line hook: what workers print goes to stderr. */
void group_show_line(void *context, uint32_t rank, bool is_stderr, const char *text);
/* Blocks through signals. */
void group_sem_wait(sem_t *semaphore);

/* Memory of a coordinator and its workers, which are given its path, of at least PATH_SIZE. The
 * caller owns the fd, for which the path stands, and the mapping. Returns 0 or an error. */
#define GROUP_PATH_SIZE 64
int group_memory_new(size_t size, int *ret_fd, char *path, void **ret_memory,
                     struct cox_error *err);
/* Of a path that a worker was given; NULL: errno says why. */
void *group_memory_map(const char *path, size_t size);

#endif
