/*
 * domain_cuda: device memory, exported and imported as an fd by the CUDA driver.
 *
 * The driver is opened at run time and never linked. A copy is complete when its function returns:
 * a process that is notified afterwards reads its bytes. The functions do not wait for work on the
 * engine's own streams: the engine synchronizes them before it publishes.
 *
 * Threads: add as cox_domains_add; the functions of a memory from any thread. Each call makes the
 *   device's primary context current for the thread, and restores the previous one.
 * Ownership: each memory retains its device's primary context until destroy.
 * Blocks: copies, as long as the device takes; the first memory of a device, while the driver
 *   creates its context.
 * Forks: a child cannot use the memory (COX_STATE), since the driver does not survive a fork;
 *   destroy there closes its fds only. Start the driver after the fork, or exec.
 * If the process dies: the driver frees the memory with the last process that has its fd or a
 *   mapping.
 */
#ifndef COX_MEMORY_DOMAIN_CUDA_H
#define COX_MEMORY_DOMAIN_CUDA_H

#include <coxswain/memory/domain.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Initializes the driver (libcuda.so.1) in this process, and adds its devices as COX_DOMAIN_CUDA 0,
 * 1 and so on, in the driver's order. On failure the table is unchanged.
 * Returns
 *   0
 *   COX_UNSUPPORTED: err says what is missing (driver, device, or a feature of a device)
 *   COX_NO_SPACE: the driver cannot be initialized
 *   COX_DENIED: the driver cannot be initialized
 *   COX_BUSY: added already
 *   COX_FULL
 *   -ENOMEM
 */
COX_PUBLIC int cox_domains_add_cuda(struct cox_domains *domains, struct cox_error *err);

#ifdef __cplusplus
}
#endif

#endif
