/*
 * coxswain: the interface for both sides of a group: its workers and its coordinator.
 *
 * A first program needs 20 functions:
 *
 *   worker       cox_worker_options_parse, cox_worker_new, cox_worker_run, cox_worker_cancelled,
 *                cox_worker_stop, cox_worker_free
 *   rank group   cox_group_join, cox_group_barrier, cox_group_gather, cox_group_leave
 *   coordinator  cox_executor_start, cox_executor_set_handler, cox_executor_submit,
 *                cox_executor_submit_opaque, cox_executor_call_opaque, cox_executor_read_status,
 *                cox_executor_stop, cox_executor_free
 *   both         cox_fail, cox_status_text
 *
 * The headers:
 *
 *   base.h       status codes, errors with text, deadlines, memory of messages
 *   worker.h     attach to a group, serve its requests with callbacks, or take them and reply to
 *                them on threads of the caller; one step of inference, as a worker gets it
 *   group.h      the rank group: barrier, all-gather of values, exchange of fds
 *   kv.h         the KV cache of a rank, from which others copy
 *   handle.h     fds as bytes; shared memory without a name; the identity of a process
 *   executor.h   start a group of workers, submit, call, gather, stop; groups over several machines
 *   requests.h   init, link, pull, recover, as plain structs
 *   server.h     a group that `coxswain status`, `stop`, `recover` and the other commands can reach
 *
 * handle.h and base.h are usable without a group. memory.h, which is not included here, belongs to
 * libcoxswain-memory.so. The functions of the generated proto/executor.pb-c.h are in
 * libcoxswain-proto.so: a program that packs messages links libcoxswain.so and this.
 *
 * Each header describes its threads, ownership, blocking and errors.
 */
#ifndef COX_COXSWAIN_H
#define COX_COXSWAIN_H

#include <coxswain/base.h>
#include <coxswain/executor.h>
#include <coxswain/group.h>
#include <coxswain/handle.h>
#include <coxswain/kv.h>
#include <coxswain/requests.h>
#include <coxswain/server.h>
#include <coxswain/version.h>
#include <coxswain/worker.h>

#include "proto/executor.pb-c.h"

#endif
