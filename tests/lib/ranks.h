/*
 * ranks: ranks as threads of the test, on the mappings that its coordinator has, so that
 * ThreadSanitizer sees both sides of every word and byte. With COX_TEST_RANKS=threads in the
 * environment, the program that a group starts as its worker (scripted_worker) does not serve. It
 * is a relay: it passes its arguments and its standard output to the test over a socket, and
 * threads of the test are the rank from then on, under the relay's pid. The supervisor watches the
 * relay: its life, death, output and exit. A rank that ends ends its relay; a rank whose relay was
 * killed parks its threads where they are (script.h) until the group is gone. Semaphores are not
 * shared, each side has its own mapping: ThreadSanitizer takes a token for order, and would not see
 * a state word that fails to give it. The one slot whose tokens are its order, the error channel's,
 * annotates that itself (channel/base/tsan.h). Processes and threads: connect in the relay; the
 * rest on the test's thread. Ownership: everything belongs to the library until join and stop.
 * Blocks: join until the threads have ended; the group must be gone. If the test dies: relays are
 * killed by the kernel.
 */
#ifndef COX_TESTS_LIB_RANKS_H
#define COX_TESTS_LIB_RANKS_H

#include "script.h"

struct ranks_hello {
    pid_t pid;
    struct cox_worker_options options;
    char mode[SCRIPT_MODE_SIZE];
};

/* COX_TEST_RANKS=threads. */
bool ranks_are_threads(void);

/* Relay: hands over to the test that is parent_pid. Returns a socket for script_order or -errno. */
int ranks_connect(pid_t parent_pid, const struct ranks_hello *hello);

/* Before the first group: threads serve the relays of this process from now on. Idempotent. */
void ranks_start(void);
/* The group "/NAME" is gone: parked threads go on, and all of its ranks end. */
void ranks_join(const char *prefix);
/* The end of all that is left. Idempotent. */
void ranks_stop(void);

#endif
