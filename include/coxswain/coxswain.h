/*
 * coxswain: the interface for both sides of a group: its workers and its coordinator.
 *
 *   worker       coxswain/worker.h: attach to a group, serve its requests with callbacks, stop;
 *                worker/loop/take.h: take requests and reply to them, without callbacks;
 *                worker/sequences/batch.h: one step of inference, as the execute callback gets it;
 *                coxswain/group.h: the rank group: barrier, all-gather of values, exchange of
 *                fds;
 *                coxswain/kv.h: the KV cache of a rank, from which others copy
 *   coordinator  coxswain/executor.h: start a group of workers, submit, call, gather,
 *                stop; coxswain/requests.h: init, link, pull, recover, as plain
 *                structs; coxswain/server.h: a group that `coxswain status`, `stop`,
 *                `recover` and the other commands can reach
 *   messages     proto/wire.h and the generated proto/executor.pb-c.h, whose functions are in
 *                libcoxswain-proto.so: a program that packs messages links libcoxswain.so and this
 *
 * Each header describes its threads, ownership, blocking and errors. The paths of these headers are
 * not part of the interface; include only this file, memory.h and ipc.h.
 */
#ifndef COX_COXSWAIN_H
#define COX_COXSWAIN_H

#include "channel/base/version.h"
#include <coxswain/kv.h>
#include <coxswain/executor.h>
#include <coxswain/requests.h>
#include <coxswain/server.h>
#include "coordinator/transport/nodes.h"
#include "proto/executor.pb-c.h"
#include "proto/wire.h"
#include "worker/sequences/batch.h"
#include <coxswain/group.h>
#include "worker/loop/take.h"
#include <coxswain/worker.h>

#endif
