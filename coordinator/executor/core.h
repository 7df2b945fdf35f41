/* core: what the library has of an executor beyond executor.h. Its contract is the same. */
#ifndef COX_COORDINATOR_CORE_H
#define COX_COORDINATOR_CORE_H

#include "channel/attach/attach.h"

#include <coxswain/executor.h>

/* For a process that is about to exit, for example at a second SIGTERM: kills the workers, removes
 * the names and the socket, and does not block. Any thread, also while another one is in stop; not
 * while start or free runs. Afterwards only stop and free may be called. */
void cox_executor_abandon(struct cox_executor *executor);

/* As in struct cox_executor_status, of which each is a part. */
const char *cox_executor_name(const struct cox_executor *executor);
const char *cox_executor_socket(const struct cox_executor *executor);
uint32_t cox_executor_rank_count(const struct cox_executor *executor);
/* What the group can do. */
const struct cox_attach_limits *cox_executor_limits(const struct cox_executor *executor);
pid_t cox_executor_pid(const struct cox_executor *executor, uint32_t rank);

/* Counts what clients hold at the control socket (control_socket.h). Any thread. False: there is no
 * control socket, or it is closed. */
struct cox_control_socket_counts;
/* Copies the flight recorder of a rank, or COX_RECORDER_COORDINATOR, into cox_recorder_area_size
 * bytes (recorder.h). That of a rank elsewhere is sent by its node, until deadline_ns. Any thread.
 * Returns
 *   0
 *   COX_NOT_FOUND: nothing is recorded there
 *   of a rank elsewhere, as recorder in transport.h
 */
int cox_executor_recorder(struct cox_executor *executor, uint32_t rank, void *copy,
                          uint64_t deadline_ns, struct cox_error *err);
/* Calls take with the stacks that were gathered last by themselves, NULL: none were; they are lent
 * until it returns. Any thread. */
void cox_executor_last_stacks(struct cox_executor *executor,
                              void (*take)(void *context, const struct cox_stacks *stacks),
                              void *context);
/* Takes stacks, which are the last ones from now on: of an executor of the far side (transport.h),
 * whose coordinator has asked for them. Any thread. */
void cox_executor_keep_stacks(struct cox_executor *executor, struct cox_stacks *stacks);
bool cox_executor_socket_counts(struct cox_executor *executor,
                                struct cox_control_socket_counts *ret_counts);
/* Connections of other machines that ended before they had shown a certificate of the cluster, so
 * far. Any thread. */
uint64_t cox_executor_refused_connections(struct cox_executor *executor);
/* As cox_server_take_name. */
int cox_executor_take_name(struct cox_executor *executor, const char *name, struct cox_error *err);
/* The process that serves the rank. */
pid_t cox_executor_serving_pid(const struct cox_executor *executor, uint32_t rank);
/* The node where a rank is, or was last. Returns false, and "": it is on this machine, or has not
 * been started. */
bool cox_executor_node(struct cox_executor *executor, uint32_t rank, char *buffer,
                       size_t buffer_size);
/* taken_over of its transport. */
int cox_executor_taken_over(struct cox_executor *executor, struct cox_error *err);

/* "idle", "taken", ...; "alive", "dead", ...; "unknown" outside. Static storage. */
const char *cox_rank_state_name(uint32_t state);
const char *cox_rank_liveness_name(uint32_t liveness);

#endif
