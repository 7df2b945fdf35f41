/*
 * tokens: what the tokens of ranks mean that store no state words.
 *
 * Such a rank does not know the shared state: its tokens are the events. Its mode takes them, and
 * stores what they mean in the rank's lines, so that the coordinator reads state words whatever the
 * rank is. A channel whose ranks store words themselves has none (NULL), and every function here
 * returns at once.
 *
 * A rank whose coordinator stores no state words has the counterpart, for the coordinator's lines.
 *
 * Threads: under one lock of the coordinator's, except cox_tokens_expect_wake: any.
 * Ownership: the channel owns it.
 * Blocks: nothing.
 * If a rank dies: its tokens stay, and are taken as usual; reset drops them.
 */
#ifndef COX_CHANNEL_TOKENS_H
#define COX_CHANNEL_TOKENS_H

#include "layout.h"

struct cox_tokens;

struct cox_tokens_ops {
    void (*update)(struct cox_tokens *tokens, uint32_t rank);
    void (*publish)(struct cox_tokens *tokens, const struct cox_rank_set *asked, uint64_t sequence,
                    bool slotted);
    void (*waited)(struct cox_tokens *tokens, uint32_t rank);
    void (*expect_wake)(struct cox_tokens *tokens, uint32_t rank);
    void (*reset)(struct cox_tokens *tokens, uint32_t rank, uint64_t published,
                  uint32_t incarnation);
    void (*taken)(struct cox_tokens *tokens, uint64_t sequence);
    struct cox_tokens *(*free)(struct cox_tokens *tokens);
};

/* Each mode has more behind it. */
struct cox_tokens {
    const struct cox_tokens_ops *ops;
};

/* To be called before the lines of a rank are read: takes its tokens and brings its lines up to
 * date, also where another process has overwritten them. */
static inline void cox_tokens_update(struct cox_tokens *tokens, uint32_t rank)
{
    if (tokens)
        tokens->ops->update(tokens, rank);
}
/* To be called before request `sequence` is published to these ranks: the tokens and replies that
 * exist now belong to earlier requests. slotted: every rank writes its reply; else rank 0 alone
 * does. */
static inline void cox_tokens_publish(struct cox_tokens *tokens, const struct cox_rank_set *asked,
                                      uint64_t sequence, bool slotted)
{
    if (tokens)
        tokens->ops->publish(tokens, asked, sequence, slotted);
}
/* To be called after a wait on the rank's response_consume has taken a token. */
static inline void cox_tokens_waited(struct cox_tokens *tokens, uint32_t rank)
{
    if (tokens)
        tokens->ops->waited(tokens, rank);
}
/* To be called before this process posts the rank's response_consume, to end its own wait: that
 * token is not a reply. */
static inline void cox_tokens_expect_wake(struct cox_tokens *tokens, uint32_t rank)
{
    if (tokens)
        tokens->ops->expect_wake(tokens, rank);
}
/* The process of the rank is dead, and requests up to `published` are over: drops its tokens. The
 * next process is that incarnation. The caller then resets the gate and the lines. */
static inline void cox_tokens_reset(struct cox_tokens *tokens, uint32_t rank, uint64_t published,
                                    uint32_t incarnation)
{
    if (tokens)
        tokens->ops->reset(tokens, rank, published, incarnation);
}
/* Rank, whose coordinator stores no words: a token was taken, so the frame of this one-frame
 * channel holds request `sequence`. Its type is unknown until the message is parsed. */
static inline void cox_tokens_taken(struct cox_tokens *tokens, uint64_t sequence)
{
    if (tokens)
        tokens->ops->taken(tokens, sequence);
}

#endif
