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
#include "memory/domain/domain.h"
#include "memory/domain/domain_cuda.h"
#include "channel/kv/kv_blocks.h"
#include "memory/pool/pool.h"
#include "memory/queue/queue.h"

#endif
