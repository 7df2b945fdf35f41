/*
 * recorder_fetch: the flight recorder of a rank on a node, which the lead asks for and waits for.
 *
 * RECORDER_ASK has a number in `sequence` and the rank in `asked`. The node replies with RECORDER,
 * with the same number and rank; its payload is a copy of the rank's area (recorder_layout.h), with
 * its times on the lead's clock, or is empty: nothing is recorded. It goes by the direct connection.
 * Neither is sent again: what is lost is missed by the deadline of the lead.
 *
 * Bytes: a frame of a node is input. A recorder is copied only if its size, and its head, are those
 *   of this rank's; its records are as untrusted as those of a rank of this machine (story.h).
 * Threads: one at a time, under the caller's lock.
 * Ownership: a fetch, and its copy, are the caller's, who ends it.
 */
#ifndef COX_NODES_RECORDER_FETCH_H
#define COX_NODES_RECORDER_FETCH_H

#include "frame.h"

struct cox_recorder_fetch {
    struct cox_recorder_fetch *next;
    uint64_t number;
    uint32_t rank;
    /* cox_recorder_area_size bytes */
    void *copy;
    /* a reply has come, with this result: 0; COX_NOT_FOUND; COX_CORRUPT */
    bool done;
    int status;
    struct cox_error err;
};

struct cox_recorder_fetches {
    struct cox_recorder_fetch *first;
    uint64_t last;
};

/* The caller has set rank and copy. */
void cox_recorder_fetch_begin(struct cox_recorder_fetches *fetches,
                              struct cox_recorder_fetch *fetch);
void cox_recorder_fetch_end(struct cox_recorder_fetches *fetches, struct cox_recorder_fetch *fetch);
/* A RECORDER of the node, whose ranks these are. Returns true: a fetch is done. One that nobody
 * waits for is dropped. */
bool cox_recorder_fetch_take(struct cox_recorder_fetches *fetches, const struct cox_frame *frame,
                             const char *node, uint32_t rank_first, uint32_t rank_count);

/* Makes the reply to a RECORDER_ASK; NULL: no memory. The caller frees it. copy NULL: nothing is
 * recorded. */
uint8_t *cox_recorder_fetch_reply(const struct cox_frame *ask, uint32_t rank, const void *copy,
                                  uint64_t now_ns, size_t *ret_size);

#endif
