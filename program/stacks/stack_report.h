/*
 * stack_report: where all threads of a process are, as text on standard output. The program of
 * `coxswain __stacks PID BUDGET_MS [LIMIT_MS]`, which coordinator/stacks starts.
 *
 *   summary: MainThread in all_reduce (distributed_c10d.py:28) called from forward (model.py:97)
 *   process 4711: 12 threads, of 1 Python frames; stopped for 2.1 ms
 *   thread 4711 "python3" (MainThread): asleep in futex (futex_do_wait)
 *     Python, most recent call first:
 *       File "/srv/model.py", line 97 in forward
 *     native:
 *       pthread_cond_wait + 0x1f (libc.so.6 + 0x89123)
 *   not there: ...
 *
 * The summary is written twice: what /proc says, at once, and then with frames. The last one
 * counts. What a killed process has written is read all the same. No variable is ever read.
 *
 * Threads: one. Blocks: until done, or the budget: then what is left is named.
 * If the process dies: see tracer.h.
 */
#ifndef COX_PROGRAM_STACK_REPORT_H
#define COX_PROGRAM_STACK_REPORT_H

/* words: the arguments behind __stacks. Returns an exit status. */
int cox_stack_report_main(int count, char *const *words);

#endif
