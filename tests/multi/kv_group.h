/*
 * kv_group: groups of the reference model for tests of KV transfer: steps made by hand, links and
 * pulls, and what every rank said of them.
 *
 * The workers are the program itself, started with "worker": kv_worker_main. Everything fails the
 * test where a call that is expected to work does not.
 */
#ifndef COX_TESTS_MULTI_KV_GROUP_H
#define COX_TESTS_MULTI_KV_GROUP_H

#include "testing.h"

#include <coxswain/kv.h>
#include <coxswain/worker.h>

#define KV_RANK_COUNT_MAX 4
#define KV_BLOCK_SIZE 4u
#define KV_BLOCK_COUNT 16u
#define KV_PROMPT_LENGTH 6u
#define KV_TOKEN_COUNT_MAX 32u
#define KV_BLOCKS_MAX 8u

extern const int32_t kv_prompt[KV_PROMPT_LENGTH];

/* main of a worker; the test's main calls it when argv[1] is "worker". */
int kv_worker_main(int argc, char **argv);

struct kv_group {
    struct test_group *group;
    uint32_t rank_count;
    /* as the last init told */
    struct cox_kv_pool pools[KV_RANK_COUNT_MAX];
    uint64_t base;
};

struct kv_options {
    uint32_t rank_count;
    /* 0: KV_BLOCK_SIZE */
    uint32_t block_size;
    /* a fault from the start of its processes on; NULL: none */
    const char *plan;
    /* they may take no fd out of another process */
    bool denied;
};
/* Started, and its model loaded. */
void kv_start(struct kv_group *g, const struct kv_options *options);
/* Started; returns what init does. */
int kv_try(struct kv_group *g, const struct kv_options *options, struct cox_error *err);
void kv_stop(struct kv_group *g); /* idempotent */
void kv_init(struct kv_group *g, bool replayed);
/* From now on in this rank: a plan of fault.h; "": none. */
void kv_arm(struct kv_group *g, uint32_t rank, const char *plan);
uint64_t kv_patience(void);

/* ---- steps, of one row ---- */

struct kv_sequence {
    int64_t id;
    uint32_t slot;
    int32_t tokens[KV_TOKEN_COUNT_MAX];
    uint32_t token_count;
    int32_t blocks[KV_BLOCKS_MAX];
    uint32_t block_count;
    /* of the tokens that were sampled */
    float logprobs[KV_TOKEN_COUNT_MAX];
};
/* The prompt, in these blocks, 0 to the first negative one. */
void kv_sequence(struct kv_sequence *s, int64_t id, const int32_t *blocks);
/* Computes from position on, and appends the token. announce: the ranks do not know it. finished: a
 * slot, or -1. Returns what the call does. */
int kv_try_step(struct kv_group *g, struct kv_sequence *s, uint32_t position, bool announce,
                int finished, struct cox_error *err);
void kv_step(struct kv_group *g, struct kv_sequence *s, uint32_t position, bool announce,
             int finished);
void kv_decode(struct kv_group *g, struct kv_sequence *s, uint32_t count); /* token by token */

/* ---- links ---- */

struct kv_link {
    const char *cluster;
    uint64_t epoch;
    bool unlink;
    /* enum PDRole; -1: not told */
    int role;
    bool change_role;
    /* a request id; NULL: none */
    const char *cancelled;
    /* 0: as many as the other has ranks */
    uint32_t pool_count;
    /* in place of the other's */
    const struct cox_kv_pool *pools;
};
/* other may be NULL: only role, unlink and cancel. */
void kv_link(struct kv_group *g, const struct kv_group *other, const struct kv_link *how);
/* "success", "failed TEXT" and so on, of a rank, once it neither waits nor runs; "" where no list
 * has it. */
const char *kv_link_state(struct kv_group *g, uint32_t rank, const char *cluster);
/* Link, and success on every rank. */
void kv_link_all(struct kv_group *g, const struct kv_group *other, const char *cluster,
                 uint64_t epoch);

/* ---- pulls ---- */

#define KV_PULLS_MAX 8

struct kv_pull {
    const char *id;
    const char *cluster;
    int64_t from[KV_BLOCKS_MAX], to[KV_BLOCKS_MAX];
    uint32_t from_count, to_count;
    /* tables that the blocks are dealt out to; 0: 1 */
    uint32_t table_count;
    /* 0: absent */
    int64_t from_sequence, to_sequence;
    uint64_t deadline_ns, lease_ns, epoch;
};

struct kv_reply {
    /* PDErrorCode */
    int32_t code;
    int32_t status;
    char text[512];
    uint64_t bytes;
};

struct kv_replies {
    /* of the call */
    int status;
    struct cox_error err;
    struct kv_reply ranks[KV_RANK_COUNT_MAX][KV_PULLS_MAX];
};
void kv_pull(struct kv_group *g, const struct kv_pull *pulls, uint32_t count, uint64_t timeout_ms,
             struct kv_replies *ret_replies);
/* One, with a result that all ranks agree on. Returns its status; text of rank 0 lent until the
 * next call. */
int kv_pull_one(struct kv_group *g, const struct kv_pull *pull, int32_t *ret_code,
                const char **ret_text);
void kv_expect_pull(struct kv_group *g, const struct kv_pull *pull, int status, int32_t code,
                    const char *text);

/* ---- the blocks, from outside ---- */

/* As a reader of the rank's blocks, in this process. */
struct cox_kv_view *kv_attach(const struct kv_group *g, uint32_t rank);
/* Every rank of g tries all there is to write, change or cut short the blocks of that rank of
 * other. Returns what it could do, a word each, lent until the next call; "": nothing. */
const char *kv_attack(struct kv_group *g, const struct kv_group *other, uint32_t rank);

#endif
