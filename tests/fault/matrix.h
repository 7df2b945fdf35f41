/*
 * matrix: what the two halves of the death matrix agree on: the driver (matrix_driver.c), a process that
 * is the coordinator of a group, and the judge (matrix_test.c), which reads its journal.
 *
 * The journal is the driver's standard output, a line per operation:
 *
 *     NAME STATUS R0 R1 R2 | TEXT     Rn: '-' not asked or no completion, ok, error, late, deadN (signal N)
 *     # anything                      for the reader
 */
#ifndef COX_TESTS_FAULT_MATRIX_H
#define COX_TESTS_FAULT_MATRIX_H

#define MATRIX_RANK_COUNT 3
#define MATRIX_FLIGHT_COUNT 4

/* driver NAME MODE RANK BRIEF_MS */
enum matrix_mode {
    MATRIX_LEARN = 'l', /* nothing happens, and no second group */
    MATRIX_PLAIN = 'p', /* every operation waits as long as it takes, for every rank */
    MATRIX_KILL = 'k',  /* the same; when RANK is dead, the others are asked */
    MATRIX_STOP =
        's', /* an operation waits BRIEF_MS; RANK is then continued, and all are asked again */
    MATRIX_AFTER = 'a', /* the second group only */
};

int matrix_driver(int argc, char **argv);

#endif
