/*
 * torch_recorder: the dump of PyTorch's flight recorder: the collectives that this process entered.
 *
 * c10d::dump_fr_trace_json of libtorch_cpu.so, and dump_nccl_trace_json of libtorch_cuda.so, take
 * no GIL, but a lock of the recorder, which a thread that hangs may hold. So a thread of its own
 * calls them, and is left alone if it does not return. It sleeps until somebody asks. There is one
 * only where TORCH_FR_BUFFER_SIZE or TORCH_NCCL_TRACE_BUFFER_SIZE is set, and not to 0, when the
 * rank attaches. Nothing is loaded: libraries that the process does not have are passed over.
 *
 * Threads: new and free on one thread; dump on one, another one too.
 * Ownership: new and free; the dump is lent until the next one.
 * Blocks: dump, until its deadline; free, 100 ms at most; a thread that does not return keeps its
 *   memory until the process ends.
 * If the process dies: the kernel frees the memory.
 */
#ifndef COX_WORKER_TORCH_RECORDER_H
#define COX_WORKER_TORCH_RECORDER_H

#include "channel/stacks/stack_protocol.h"

#include <coxswain/base.h>

struct cox_torch_recorder;

/* NULL: the process has none, or no memory or thread for it, which harms nothing. */
struct cox_torch_recorder *cox_torch_recorder_new(void);
/* NULL-safe, returns NULL. */
struct cox_torch_recorder *cox_torch_recorder_free(struct cox_torch_recorder *recorder);
/* Takes no lock and no memory on the calling thread. *ret_text: JSON, a line per library, *ret_size
 * bytes; untouched unless COX_STACK_TORCH_THERE is returned. NULL: COX_STACK_TORCH_NONE. */
enum cox_stack_torch cox_torch_recorder_dump(struct cox_torch_recorder *recorder,
                                             uint64_t deadline_ns, const char **ret_text,
                                             uint32_t *ret_size);

#endif
