/*
 * script: the callbacks of a worker that does what the requests themselves tell it to.
 *
 * An opaque request is a command in words:
 *   echo BYTES          the bytes, again
 *   sum BYTES           a digest of the whole request
 *   size N              N bytes, the i-th is 7 i + rank; in a block where they do not fit the slot
 *   fail CODE TEXT      an error
 *   lie N               says that it wrote N bytes
 *   raw LENGTH failed|ok|other
 *                       replies behind the library's back with a length prefix of its own (needs
 *                       the names)
 *   busy US             spins for that long, and replies
 *   read                reads a pipe that stays empty; fails when a signal interrupts that
 *   exit N, kill SIGNAL, stop, spin, deaf (ignores SIGTERM), pid
 *   block PATH          reads a byte from a named pipe; prints "blocked"
 *   hold PATH BYTES     the same, then tells whether the request in place is what it was
 *   fault TEXT          reports a fault, and replies
 *   faults N TEXT       N of them
 *   only R COMMAND      rank R obeys, the others echo
 *   each A|B|C...       rank 0 obeys A, rank 1 B, and so on; ranks beyond the last obey the last
 *   step fail|diverge|block|abort|yield|spin|read K [PATH]
 *                       what to do in the K-th step from now on; yield: stays until the batch is
 *                       aborted
 *   pull block PATH, pull spin
 *                       what to do in the next pull
 *   grace MS            of pauses from now on
 *   recover NAME RESULT TEXT, recover NAME block PATH
 *                       what to do at a recovery command
 *   tell batch|log|links|pulls
 *                       what was seen so far
 *   tell at             two addresses in the rank's memory: the first row of the last step, and
 *                       that row's first block table
 *   step digest K [W V] in the K-th step from now on: sets digest W to V
 *   lose PATH TEXT      reads a named pipe to its end, and fails
 *   drop PATH           opens that pipe for writing, and is killed
 *                       (at init the key `block` names a pipe to read a byte from, `yield` the rank
 *                       that stays until the init is aborted, `spin` the one that stays for ever;
 *                       with `tell` the rank prints what it is told of its group; `odd_again` is
 *                       the rank that replies otherwise when it is asked again)
 *   served              how many commands were asked of this rank, this one included
 *
 * A rank is a process of its own (scripted_worker.c), or threads of the test and a process that
 * stands for them, its relay (ranks.h).
 *
 * Threads: callbacks as worker.h says; new and free from one thread.
 * Ownership: the caller owns what new returns, and lends host.
 * Blocks: what the commands say.
 */
#ifndef COX_TESTS_LIB_SCRIPT_H
#define COX_TESTS_LIB_SCRIPT_H

#include <coxswain/worker.h>

#include <sys/types.h>

/* What a process can only do itself. */
enum script_verb { SCRIPT_EXIT, SCRIPT_KILL, SCRIPT_STOP, SCRIPT_DEAF };

struct script_order {
    enum script_verb what;
    /* exit status or signal */
    int value;
};

struct script_host {
    /* the rank's process for all others */
    pid_t pid;
    /* its standard output */
    int out_fd;
    /* takes orders, replies to each with a byte, hangs up with its death; -1: the rank is this very
     * process */
    int relay_fd;
    /* The relay is dead, so the rank must count as dead: returns when no test uses it any more. */
    void (*park)(void *context);
    void *context;
};

/* Why the workers' program was started, in its first argument; "" for no reason. */
#define SCRIPT_MODE_SIZE 16

struct script;
struct script *script_new(const struct cox_worker_options *options, const struct script_host *host);
struct script *script_free(struct script *script); /* returns NULL */
/* Before run: for commands that need the worker. */
void script_set_worker(struct script *script, struct cox_worker *worker);
/* For a context that is the script; mode "mute": none at all; "pauses", "leaves": pause, pause_net
 * and start do so; "takes": what is taken has none (script_take.h); "obey": of what is taken. */
const struct cox_worker_callbacks *script_callbacks(const char *mode);

/* Does it in this process. */
void script_perform(const struct script_order *order);

#endif
