/*
 * legacy_reply: replies of workers of MindIE-LLM.
 *
 * Threads: any; nothing here has state.
 * Ownership: the caller's.
 * Blocks: nothing.
 * If the process dies: private memory.
 */
#ifndef COX_PROTO_LEGACY_REPLY_H
#define COX_PROTO_LEGACY_REPLY_H

#include <coxswain/base.h>

struct Coxswain__ExecuteResponse;

/* Brings the unpacked reply of a legacy rank into our form: with its rank, without a reference to a
 * large payload, and with COX_REJECTED as the status of a failed step, for which a legacy rank
 * sends status 0 and a text in place of outputs. */
void cox_legacy_reply_read(struct Coxswain__ExecuteResponse *response, uint32_t rank);

#endif
