/*
 * paragraph: where the ranks stand, in one sentence for an error: those that are alone first.
 *
 *   rank 1: MainThread in wait (data.py:12) called from forward (model.py:97), 14.9 s; ranks 0,2-3:
 *   MainThread in all_reduce (distributed_c10d.py:2811) called from forward (model.py:99), 14.9 s,
 *   and may wait for it
 *
 * What PyTorch's flight recorder says of ranks (collectives.h) is in front.
 *
 * Threads: any. Blocks: nothing. Ownership: the stacks'.
 * If the process dies: private memory.
 */
#ifndef COX_COORDINATOR_PARAGRAPH_H
#define COX_COORDINATOR_PARAGRAPH_H

#include <coxswain/executor.h>

#define COX_STACKS_SUMMARY_SIZE 480
#define COX_STACKS_PARAGRAPH_SIZE 1400
/* Places that are told apart. */
#define COX_STACKS_PLACE_MAX 4

/* Fills stacks->paragraph. Returns 0; -ENOMEM. */
int cox_stacks_paragraph(struct cox_stacks *stacks);

#endif
