/*
 * memory: blocks of memory that processes share without copying.
 *
 *   domain      kinds of memory: host, bounce, CUDA, or a kind that the caller defines
 *   pool        blocks of one domain with reference counts per owner
 *   kv_blocks   blocks with one writer, for KV caches; other processes copy from them
 *   queue       messages that are references to blocks, published once, taken by every subscriber
 */
#ifndef COX_MEMORY_H
#define COX_MEMORY_H

#include "channel/base/version.h"
#include "channel/memory/domain/domain.h"
#include "channel/memory/domain/domain_cuda.h"
#include "channel/memory/pool/kv_blocks.h"
#include "channel/memory/pool/pool.h"
#include "channel/memory/queue/queue.h"

#endif
