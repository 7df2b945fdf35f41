/*
 * process_one: what process 1 of a container owes to the processes that lose their parent. They
 * become its children, and stay zombies until it takes their exit status.
 *
 * Process 1 does nothing else: the command runs in a child of it. So no orphan is mistaken for a
 * rank, whose exit status the coordinator takes.
 *
 * Threads: from main, before any other thread exists.
 * Ownership: nothing to free.
 * Blocks: in process 1, until the child has ended.
 * If the process dies: the kernel ends all processes of the container.
 */
#ifndef COX_PROGRAM_PROCESS_ONE_H
#define COX_PROGRAM_PROCESS_ONE_H

/* Returns 0: this process is to run the command; -errno: of the fork. In process 1 it does not
 * return: it passes the signals that it gets on to the child, but for those that the terminal sends
 * to both, and exits as the child does, with 128 and the signal's number if a signal has killed it.
 */
int cox_process_one(void);

#endif
