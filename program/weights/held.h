/*
 * held: the weights that a holder has: keys, the memory of each, who uses it, and until when it
 * stays.
 *
 *   absent --get--> loading --put--> held --drop, or keep_ms without a user--> absent
 *                      +--- the loader ends, and nobody waits ---> absent
 *
 * Threads: one.
 * Ownership: the table owns its weights and their fds. Users are the caller's; each is in the table
 *   until leave.
 * Blocks: nothing.
 * If the process dies: the memory stays for those who have mapped it.
 */
#ifndef COX_PROGRAM_WEIGHTS_HELD_H
#define COX_PROGRAM_WEIGHTS_HELD_H

#include "protocol.h"

#include <coxswain/base.h>

#include <jansson.h>

struct cox_weights;

/* What a process maps. */
struct cox_weights_image {
    enum cox_weights_memory memory;
    /* lent; -1: none */
    int fd;
    uint64_t bytes;
};

/* All zero before its first get or put. */
struct cox_weights_user {
    /* what it loads, waits for or uses; NULL: nothing, or it was dropped */
    struct cox_weights *weights;
    /* a get that has no answer */
    bool waits;
    /* it has asked for a key; a user has one key for its life */
    bool asked;
    /* the others of the same weights */
    struct cox_weights_user *next;
};

struct cox_held {
    struct cox_weights *first;
    uint32_t count;
    /* called when a user's get has its answer after all: status as get */
    void (*answer)(void *context, struct cox_weights_user *user, int status,
                   const struct cox_weights_image *image);
    /* closes an fd, which may be any (closer.h), and sets it to -1 */
    void (*close)(void *context, int *fd);
    void *context;
};

/* Forgets all weights, and closes their fds. No user may be used afterwards. */
void cox_held_deinit(struct cox_held *held);

/* Returns
 *   0
 *   COX_EMPTY: the user loads them
 *   COX_BUSY: another user loads them; answer will be called
 *   COX_INVALID: the user has asked before
 *   COX_FULL
 *   -ENOMEM
 */
int cox_held_get(struct cox_held *held, struct cox_weights_user *user, const char *key,
                 uint64_t keep_ms, struct cox_weights_image *ret_image);
/* Takes image->fd, and sets it to -1, on success alone; sets image->bytes of host memory. Answers
 * those that wait. Returns
 *   0
 *   COX_INVALID: the user has asked for another key, or for this one and does not load it
 *   COX_DENIED: not memory with the seals; device memory of no bytes
 *   COX_TAKEN
 *   COX_FULL
 *   -errno
 */
int cox_held_put(struct cox_held *held, struct cox_weights_user *user, const char *key,
                 uint64_t keep_ms, struct cox_weights_image *image);
/* key "": all. Returns how many. */
uint32_t cox_held_drop(struct cox_held *held, const char *key);
/* The user has ended. Idempotent. */
void cox_held_leave(struct cox_held *held, struct cox_weights_user *user);

/* Drops what has been without a user for its time. Returns when the next is to be dropped. */
uint64_t cox_held_turn(struct cox_held *held);
/* The array of protocol.h. NULL: no memory. */
json_t *cox_held_list(const struct cox_held *held);

#endif
