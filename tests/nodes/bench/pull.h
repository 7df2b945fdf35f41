/*
 * pull: what nodes-bench-coxswain measures in mode `pull`: KV blocks of a rank on one node are
 * copied into the blocks of a rank on another, whose group is linked with the first one's. The
 * ranks are the reference engine's links, pulls and cache without a model.
 *
 * Main thread. The executors are the caller's. new blocks until the groups are linked and a first
 * pull was checked block by block; run, until its pull has ended. If the process dies: nothing is
 * left but what executors leave.
 */
#ifndef NODES_BENCH_PULL_H
#define NODES_BENCH_PULL_H

#include <stddef.h>
#include <stdint.h>

#include <coxswain/base.h>

#define PULL_BLOCK_SIZE ((size_t)1 << 20)

struct cox_executor;
struct pull;

/* A rank with so many blocks. argc and argv: of the program, behind its role. Returns the exit
 * status. */
int pull_rank_main(int argc, char **argv);

/* Initialises both groups, and links `to` with `from`. size: of one pull, full blocks. */
int pull_new(struct cox_executor *to, struct cox_executor *from, size_t size,
             struct pull **ret_pull, struct cox_error *err);
struct pull *pull_free(struct pull *pull); /* NULL-safe, returns NULL */
/* Pulls all blocks once. */
int pull_run(struct pull *pull, struct cox_error *err);

#endif
