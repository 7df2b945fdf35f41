/*
 * weights_candidate: reads from a request where a version of the shared weights is (worker.h).
 *
 * Threads: any; values. Ownership: the caller's memory. Blocks: nothing. Bytes: the request comes
 * from the coordinator and is checked all the same. If the process dies: nothing is left.
 */
#ifndef COX_WORKER_WEIGHTS_CANDIDATE_H
#define COX_WORKER_WEIGHTS_CANDIDATE_H

#include <coxswain/worker.h>

struct Coxswain__ExecuteRequest;

/* Returns
 *   0
 *   COX_EMPTY: the request names none
 *   COX_CORRUPT: no version, no size, or a handle of another length
 */
int cox_weights_candidate_read(const struct Coxswain__ExecuteRequest *request,
                               struct cox_weights_candidate *ret_candidate, struct cox_error *err);

#endif
