/*
 * adapter_commands: executes a LoRA request on the adapters of the rank and fills in its status.
 *
 * Threads: the link thread.
 * Ownership: all arguments are lent for the call; the response's text is allocated in the arena.
 * Blocks: a load reads files; an unload waits until the adapter is unused (cox_worker_lora_retire).
 * Codes:
 *   0: the response has the status
 *   COX_BUSY: still in use
 *   COX_STATE: no model
 *   COX_NO_SPACE
 *   -ENOMEM
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_ENGINE_ADAPTER_COMMANDS_H
#define COX_ENGINE_ADAPTER_COMMANDS_H

#include "adapter_cache.h"
#include <coxswain/worker.h>

int cox_engine_adapter_command(struct cox_adapter_cache *adapters, struct cox_worker *worker,
                               const struct Coxswain__LoraOperationRequest *request,
                               struct cox_arena *arena,
                               struct Coxswain__LoraOperationResponse *response,
                               struct cox_error *err);

#endif
