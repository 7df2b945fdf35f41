/*
 * fault: named points of the protocol at which a test can stop or kill this very process.
 *
 * Only the testing build (COX_TESTING) has them; elsewhere a point compiles to nothing.
 * COXSWAIN_FAULT is `NAME:ACTION[:RANK[:COUNT]]`, ACTION kill (SIGKILL) or stop (SIGSTOP), RANK the
 * rank it is for (or 'coordinator'), COUNT the passage at which it strikes (1 is the first).
 *
 * Threads: any.
 * Blocks: nothing, unless stopped.
 */
#ifndef COX_CHANNEL_FAULT_H
#define COX_CHANNEL_FAULT_H

#if COX_TESTING
void cox_fault_point(const char *name);
/* Which process this is, for the RANK of COXSWAIN_FAULT; -1 (the start value): the coordinator. */
void cox_fault_rank(int rank);
#else
static inline void cox_fault_point(const char *name)
{
    (void)name;
}
static inline void cox_fault_rank(int rank)
{
    (void)rank;
}
#endif

#endif
