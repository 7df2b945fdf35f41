/*
 * memory: blocks of memory that processes share without copying, in libcoxswain-memory.so.
 *
 *   domain   kinds of memory: host, bounce, CUDA, or a kind that the caller defines
 *   pool     blocks of one domain with reference counts per owner
 *   queue    messages that are references to blocks, published once, taken by every subscriber
 *
 * No group uses these. KV blocks, which groups use, are in coxswain.h.
 */
#ifndef COX_MEMORY_H
#define COX_MEMORY_H

#include "channel/base/version.h"
#include "memory/domain/domain.h"
#include "memory/domain/domain_cuda.h"
#include "memory/pool/pool.h"
#include "memory/queue/queue.h"

#endif
