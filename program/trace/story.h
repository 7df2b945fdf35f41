/*
 * story: the records of a recording, in order, and what they say about each request.
 *
 * Threads: one.
 * Ownership: a story refers to its recording, which must live as long.
 * Blocks: nothing.
 * Bytes: a recorder is its process's writing, so all numbers are untrusted: times may go backwards,
 *   sequences be anything. Nothing here trusts them; a recorder that is none is left out, and
 *   `problems` says so.
 * If the process dies: private memory.
 */
#ifndef COX_PROGRAM_STORY_H
#define COX_PROGRAM_STORY_H

#include "channel/base/idioms.h"
#include "channel/recorder/recorder.h"

#include <jansson.h>
#include <stdio.h>

struct CoxswainRecording__Recording;

#define COX_STORY_RANK_SIZE 80

struct cox_story_ring {
    /* by sequence, ascending */
    struct cox_record *records;
    uint32_t count;
};

struct cox_story_process {
    /* it has a recorder that can be read */
    bool is_known;
    struct cox_record_head head;
    struct cox_story_ring rings[COX_TWO_WAY_COUNT];
    /* by number, ascending */
    struct cox_record_operation *operations;
    uint32_t operation_count;
};

struct cox_story {
    const struct CoxswainRecording__Recording *recording;
    uint32_t rank_count;
    struct cox_story_process coordinator;
    struct cox_story_process *ranks;
    /* one sentence per recorder that could not be read; "": none */
    char problems[1024];
};

/* What of a story is meant: 0: all. */
struct cox_story_range {
    /* up to so long before the recording was made */
    uint64_t seconds_ns;
    /* the last so many requests of the execute channel, and what happened meanwhile */
    uint64_t last;
};

/* Returns 0; COX_CORRUPT: more ranks than there can be; -ENOMEM. */
int cox_story_new(const struct CoxswainRecording__Recording *recording,
                  const struct cox_story_range *range, struct cox_story **ret_story,
                  struct cox_error *err);
struct cox_story *cox_story_free(struct cox_story *story); /* NULL-safe, returns NULL */
COX_DEFINE_FREEP(struct cox_story, cox_story_free);

/* "rank 5", or "rank 5 on node b"; printable. */
void cox_story_rank(const struct cox_story *story, uint32_t rank, char text[COX_STORY_RANK_SIZE]);

/* NULL: there is no such record. */
const struct cox_record *cox_story_find(const struct cox_story_ring *ring, uint64_t sequence);

/* The phases of a request in a rank, in their order. */
enum cox_story_phase {
    COX_STORY_WAKE,    /* from published to taken */
    COX_STORY_UNPACK,  /* to the begin of its callback */
    COX_STORY_EXECUTE, /* the callback, without waits for other ranks */
    COX_STORY_GROUP,   /* the callback's waits for other ranks */
    COX_STORY_REPLY,   /* to the reply */
    COX_STORY_PHASE_COUNT,
};
const char *cox_story_phase_name(enum cox_story_phase phase);

/* Who a request waited for. */
struct cox_story_path {
    /* the last rank to reply; -1: none has */
    int last;
    /* of the ranks that were asked, those without a reply */
    struct cox_rank_set pending;
    uint32_t pending_count;
    /* The rank on the critical path, -1: unknown. One without a reply: first one that is stopped or
     * dead, then one that does not wait for others itself, then the one that is behind in the rank
     * group; and the phase that it is in, since when. Else, where ranks waited for each other, the
     * one that waited least; else the last one; and the phase that took it longer than the others.
     */
    int critical;
    enum cox_story_phase phase;
    uint64_t phase_ns;
};
/* own: the coordinator's record of the request. */
void cox_story_path(const struct cox_story *story, enum cox_channel_id channel,
                    const struct cox_record *own, struct cox_story_path *ret_path);

/* "MODEL_INFER", "OPAQUE"; "type 99" in buffer. */
const char *cox_story_type(uint32_t type, char buffer[24]);

/* ---- what is written ---- */

/* A trace in Perfetto's format (proto/perfetto.proto). Returns 0; -errno of the stream. */
int cox_story_write_trace(const struct cox_story *story, FILE *file);
/* The summary of `coxswain trace --json`. NULL: no memory. */
json_t *cox_story_json(const struct cox_story *story);
/* In words, with a timeline of the last `last` requests. */
void cox_story_print(const struct cox_story *story, uint64_t last, FILE *file);

#endif
