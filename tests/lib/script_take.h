/*
 * script_take: the script of script.h by a worker that takes its requests (coxswain/worker.h).
 *
 * In mode "takes", or in none and with COX_TEST_TAKES in the environment, opaque requests, steps and inits are
 * taken, and obeyed by the same functions that are callbacks otherwise. Commands of its own:
 *   keep TEXT           no reply yet; it will be TEXT
 *   release ORDER       replies to what is kept, and then to itself with the number of these:
 *                       forward, reverse; first: to itself first, then reverse; later: by a thread
 *                       of its own, after the request behind this one was taken and replied to
 *   twice TEXT          replies TEXT, and again; `told` tells what came of that
 *   check               what next and the replies refuse, and what ends a next; "ok"
 *   cancelled           prints "alive", replies once nobody waits for it, prints "cancelled"
 *   leave               stops the worker, without a reply
 * At the end it prints `next: CODE TEXT`.
 *
 * Threads: run on the thread of the rank.
 * Blocks: until the worker has ended.
 */
#ifndef COX_TESTS_LIB_SCRIPT_TAKE_H
#define COX_TESTS_LIB_SCRIPT_TAKE_H

#include "script.h"

/* Whether requests are taken in this mode. */
bool script_takes(const char *mode);
/* Serves until the worker ends, by cox_worker_run where nothing is taken. Returns as that. */
int script_run(struct script *script, const char *mode, struct cox_worker *worker, int out_fd,
               struct cox_error *err);

#endif
