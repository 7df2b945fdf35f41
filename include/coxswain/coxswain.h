/*
 * coxswain: what an engine needs on both sides of the channel.
 *
 *   worker       worker/loop/worker.h: attach to a group, serve its requests through callbacks,
 *                stop; worker/loop/take.h: the same by requests that are taken and replied to;
 *                worker/sequences/batch.h: one step of inference, as the execute callback gets it;
 *                worker/group/group.h: the rank group: barrier, all-gather of values, exchange of
 *                fds
 *   coordinator  coordinator/executor/executor.h: start a group of workers, submit, call, gather,
 *                stop; coordinator/executor/operations.h: init, link, pull, recover, as plain
 *                structs; coordinator/server/server.h: a group that `coxswain status`, stop,
 *                recover and the other commands can be used on
 *   messages     proto/wire.h and the generated proto/executor.pb-c.h, whose functions are in
 *                libcoxswain-proto.so: a program that packs messages links both
 *
 * Threads, ownership, blocking and errors: in the header of each function. The paths of those
 * headers are not part of the interface; this file and its two companions are (memory.h, ipc.h).
 */
#ifndef COX_COXSWAIN_H
#define COX_COXSWAIN_H

#include "channel/base/version.h"
#include "coordinator/executor/executor.h"
#include "coordinator/executor/operations.h"
#include "coordinator/server/server.h"
#include "proto/executor.pb-c.h"
#include "proto/wire.h"
#include "worker/sequences/batch.h"
#include "worker/group/group.h"
#include "worker/loop/take.h"
#include "worker/loop/worker.h"

#endif
