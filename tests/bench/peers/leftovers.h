/*
 * leftovers: a process that removes the files of a peer whose library would leave them when its
 * processes are killed.
 *
 * Started first by the main process, before anything is there to remove. The guard waits until
 * every process that has the returned fd is gone (they inherit it, through exec too), removes, and
 * ends; it stays some microseconds longer than they do. If the guard itself is killed: the files
 * stay.
 */
#ifndef BENCH_PEERS_LEFTOVERS_H
#define BENCH_PEERS_LEFTOVERS_H

#include <sys/types.h>

#include <coxswain/base.h>

/* Removes a file, or a folder with all it has; called by the guard, with the context as it was. */
typedef void (*leftovers_fn)(const void *context);

/* Returns 0 or an error. Gives the caller the fd, which closes on no exec, and the guard's process
 * id. */
int leftovers_guard(leftovers_fn remove_fn, const void *context, int *ret_fd, pid_t *ret_pid,
                    struct cox_error *err);
/* A leftovers_fn's work: nothing there is fine. */
void leftovers_remove_tree(const char *path);

#endif
