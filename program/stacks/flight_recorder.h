/*
 * flight_recorder: the dump of PyTorch's flight recorder, as lines of a report.
 *
 *   PyTorch's flight recorder: 2 process groups, 37 collectives, the last ones first
 *   torch: group 0 (default_pg): entered 4711, waits in all_reduce 4711
 *   torch: group 3 (tp): entered 12, waits in none
 *     0 4711 all_reduce [[1024, 16]] Float: started, 14.9 s ago
 *
 * The lines "torch:" are read again by coordinator/stacks/collectives.h, which compares ranks. A
 * collective has the number of its process group, which is the same on all ranks of the group. A
 * rank waits in the first collective that it has entered, and that has not completed. The default
 * group is there in any case.
 *
 * Bytes: the dump is a rank's, and input. What is no such dump is said to be none.
 * Threads: one. Blocks: nothing. Ownership: lent for the call.
 * If the process dies: private memory.
 */
#ifndef COX_PROGRAM_FLIGHT_RECORDER_H
#define COX_PROGRAM_FLIGHT_RECORDER_H

#include <stdint.h>
#include <stdio.h>

/* Collectives that have a line. */
#define COX_FLIGHT_RECORDER_LINE_MAX 50

/* dump: lines of JSON with a zero at the end. real_ns: CLOCK_REALTIME. */
void cox_flight_recorder_print(const char *dump, uint64_t real_ns, FILE *to);

#endif
