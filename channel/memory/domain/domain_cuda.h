/*
 * domain_cuda: device memory, exported and imported as an fd, by the CUDA driver that is there.
 *
 * The driver is opened at run time and never linked. Copies are done when they return: a peer that
 * is told of one sees its bytes. Work that the engine has queued on streams of its own is not
 * waited for: that is the engine's to do before it publishes.
 *
 * Threads: add as cox_domains_add; the functions of a memory from any thread. Each call makes the
 *   device's primary context the thread's current one, and puts back what was there before.
 * Ownership: each memory retains the primary context of its device, until destroy.
 * Blocks: copies, for as long as the device takes; the first memory of a device, while the driver
 * makes its context. If the process dies: the driver frees the memory with the last process that
 * has its fd or a mapping.
 *   A child of fork can use none of it (COX_STATE), and destroy there touches only its own fds: the
 *   driver does not survive a fork. Start it before, or exec.
 */
#ifndef COX_CHANNEL_MEMORY_DOMAIN_CUDA_H
#define COX_CHANNEL_MEMORY_DOMAIN_CUDA_H

#include "domain.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Initializes the driver (libcuda.so.1) in this process, and adds its devices as COX_DOMAIN_CUDA 0,
 * 1 and so on, in the driver's order. Nothing is changed unless 0.
 * Returns
 *   0
 *   COX_UNSUPPORTED: err says what is missing (driver, device, what a device cannot do)
 *   COX_NO_SPACE: the driver does not start
 *   COX_DENIED: the driver does not start
 *   COX_BUSY: added already
 *   COX_FULL
 *   -ENOMEM
 */
COX_PUBLIC int cox_domains_add_cuda(struct cox_domains *domains, struct cox_error *err);
#ifdef COX_INTERNAL
/* The same with the driver at that path, or of that name. */
int cox_domains_add_cuda_library(struct cox_domains *domains, const char *library,
                                 struct cox_error *err);
#endif

#ifdef __cplusplus
}
#endif

#endif
