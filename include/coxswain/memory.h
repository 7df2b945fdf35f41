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

#include <coxswain/version.h>
#include <coxswain/memory/domain.h>
#include <coxswain/memory/domain_cuda.h>
#include <coxswain/memory/pool.h>
#include <coxswain/memory/queue.h>

#endif
