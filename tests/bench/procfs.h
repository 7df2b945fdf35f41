/*
 * procfs: what a process and its descendants have used, as the kernel tells it in /proc.
 *
 * One thread. Nothing blocks. A process or thread that ends meanwhile is left out. If the process
 * dies: nothing is left.
 */
#ifndef BENCH_PROCFS_H
#define BENCH_PROCFS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define PROCFS_TREE_MAX 1024
/* cpu_set_t's for more processors than any machine has: the kernel refuses a mask smaller than its
 * own, and fills as much as that. */
#define PROCFS_PROCESSOR_SETS 64

struct procfs_tree {
    /* the root first, every parent before its children */
    pid_t pids[PROCFS_TREE_MAX];
    size_t count;
};

/* Since each thread started. */
struct procfs_usage {
    uint64_t cpu_ns;
    /* voluntary context switches */
    uint64_t sleeps;
    /* involuntary ones */
    uint64_t preempted;
    /* times that a thread was put on a processor: after a wake-up, or after others */
    uint64_t runs;
};

struct procfs_memory {
    /* shared pages in equal parts among those that have them */
    uint64_t pss_kib;
    /* pages of one process alone */
    uint64_t private_kib;
    /* of the shared memory objects that the root maps: their mappings, each object once */
    uint64_t shared_kib;
};

void procfs_tree(pid_t root, struct procfs_tree *ret_tree);
/* Adds those descendants of the root that run or wait for a processor at this moment. */
void procfs_add_running(const struct procfs_tree *tree, struct procfs_tree *running);
/* A signal to all, the first one last. */
void procfs_signal(const struct procfs_tree *tree, int signal);
/* SIGKILL to all; returns when the root, a child of this process, is reaped. Then no group of any
 * of them has a name in /dev/shm: "PID_..." is that of a group that was being started. */
void procfs_end(const struct procfs_tree *tree);
/* SIGKILL to all that this process has started or inherited, after a second in which they may end
 * by themselves; returns when they are reaped. Then removes from /dev/shm and /tmp what peers of
 * such processes, and of earlier runs of this user that were killed, have left:
 * "coxswain-bench-PID-...", where no process has that id. */
void procfs_sweep(void);
/* Calls with every thread of the tree, or of all of it but its root. */
void procfs_threads(const struct procfs_tree *tree, bool but_root, void (*each)(pid_t thread));
/* How many processors there are on which any thread of them may run. */
int procfs_processors(const struct procfs_tree *tree);
void procfs_usage(const struct procfs_tree *tree, struct procfs_usage *ret_usage);
void procfs_memory(const struct procfs_tree *tree, struct procfs_memory *ret_memory);
/* Bytes that can be had without swapping. */
uint64_t procfs_available(void);

#endif
