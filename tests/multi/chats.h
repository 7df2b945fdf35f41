/*
 * chats: a small coordinator of steps for tests: sequences whose tokens the ranks sample, announced
 * once, and then continued by deltas.
 *
 * Threads: one. Ownership: the caller's memory. Blocks: step_call and what uses it, until the step
 * is over.
 */
#ifndef COX_TESTS_MULTI_CHATS_H
#define COX_TESTS_MULTI_CHATS_H

#include "steps.h"

#include <coxswain/worker.h>

#define CHAT_COUNT 3
#define CHAT_TOKEN_MAX 64
#define PAIR_MAX 4

struct chat {
    int64_t id;
    uint32_t slot;
    int32_t tokens[CHAT_TOKEN_MAX];
    uint32_t count;
};

struct step {
    struct test_step own;
    int32_t blocks[CHAT_COUNT][4];
    Coxswain__IntPair pairs[3][PAIR_MAX], *pair_pointers[3][PAIR_MAX];
};

void chats_init(struct chat *chats);
void step_init(struct step *s, uint64_t base, int forward_type);
/* The row of a chat: all of it where it is announced, its last token otherwise. */
void step_row(struct step *s, const struct chat *chat, bool announce);
/* Runs the step; *c is the caller's to deinit. */
int step_call(struct test_group *g, const struct step *s, uint64_t timeout_ms,
              struct test_completion *c);
int step_submit(struct test_group *g, const struct step *s);
/* One step of all chats. Returns its status; on success the tokens are appended and *base moves,
 * otherwise *base is 0, so that the next one announces everything. */
int chats_step(struct test_group *g, struct chat *chats, uint64_t *base, uint64_t timeout_ms);
/* The same with the first chat alone. */
int chats_step_one(struct test_group *g, struct chat *chats, uint64_t *base);

#endif
