/*
 * coxswain: our channel under measurement: a group of this program's own copies in worker mode,
 * opaque requests on the execute channel.
 *
 * One thread of the coordinator; rounds of `group_slice` run on the response thread while the
 * caller waits. Ownership: struct group owns the executor until free. Blocks: start and free as the
 * executor does; slices until their last round ended. If the process dies: as with any group: the
 * kernel kills the workers.
 */
#ifndef BENCH_COXSWAIN_H
#define BENCH_COXSWAIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct cox_error;
struct group;

/* Returns 0, or what cox_executor_start returns; err says what happened. */
int group_start(uint32_t rank_count, size_t request_size, size_t reply_size, bool sealed,
                struct group **ret_group, struct cox_error *err);
struct group *group_free(struct group *group); /* NULL-safe, returns NULL */
/* rank_count of them. */
const pid_t *group_pids(const struct group *group);

/* `count` rounds, each from submit to handler entry, the next submit from the handler. Returns 0;
 * -EBADMSG: an answer to something else; or the first failure of a request. */
int group_slice(struct group *group, uint8_t *request, uint64_t *samples_ns, size_t count,
                struct cox_error *err);
/* The same with synchronous calls on the calling thread. */
int group_slice_calls(struct group *group, uint8_t *request, uint64_t *samples_ns, size_t count,
                      struct cox_error *err);

/* The command line of a worker is this program with WORKER_FLAG first. Returns the exit status. */
#define WORKER_FLAG "--worker"
int group_worker_main(int argc, char **argv);

#endif
