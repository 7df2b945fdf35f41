/*
 * recording_command: how `coxswain trace` and `coxswain postmortem` get a recording.
 *
 * Threads: one.
 * Blocks: from a group: until it has replied, or the deadline.
 * Ownership: the caller frees the recording.
 * If the process dies: private memory.
 */
#ifndef COX_PROGRAM_RECORDING_COMMAND_H
#define COX_PROGRAM_RECORDING_COMMAND_H

#include "program/cli/client_command.h"

struct CoxswainRecording__Recording;

/* Asks a running group for its recorders; no rank takes part. Those of a node that does not answer
 * are missing in the recording, which says why. Returns as cox_client_ask, and COX_UNSUPPORTED: it
 * records nothing. */
int cox_recording_ask(const struct cox_connection *connection, uint64_t deadline_ns,
                      struct CoxswainRecording__Recording **ret_recording, struct cox_error *err);

#endif
