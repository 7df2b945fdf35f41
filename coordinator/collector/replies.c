#include "replies.h"

#include "channel/base/copy.h"
#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/memory/host_memory.h"
#include "channel/memory/reply_memory.h"
#include "channel/shm/reply.h"
#include "coordinator/transport/transport.h"
#include "proto/legacy/legacy_reply.h"
#include "proto/executor.pb-c.h"
#include "proto/large_payload_ref.h"
#include "proto/wire.h"
#include "report.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ARENA_FIRST_SIZE (16u << 10)
#define ARENA_SIZE_MAX (UINT64_C(512) << 20)
/* An arena up to this size is kept for the next replies. */
#define ARENA_KEEP_SIZE (UINT64_C(64) << 20)

/* The distance between two copies: aligned, because handlers may read them as numbers. */
COX_HOT static size_t copy_stride(size_t length)
{
    return (length + 15) & ~(size_t)15;
}

int cox_replies_init(struct cox_replies *replies, const struct cox_geometry *geometry,
                     enum cox_channel_id channel)
{
    memset(replies, 0, sizeof *replies);
    replies->rank_count = geometry->rank_count;
    replies->results = calloc(geometry->rank_count, sizeof *replies->results);
    replies->ranks = calloc(geometry->rank_count, sizeof *replies->ranks);
    replies->texts = calloc(geometry->rank_count, COX_RANK_TEXT_SIZE);
    int r = replies->results && replies->ranks && replies->texts ? 0 : -ENOMEM;
    size_t room = 0;
    for (uint32_t rank = 0; r == 0 && rank < geometry->rank_count; rank++) {
        struct cox_replies_rank *own = &replies->ranks[rank];
        own->text = &replies->texts[(size_t)rank * COX_RANK_TEXT_SIZE];
        own->slot_capacity = cox_geometry_slot_capacity(
            geometry, channel, geometry->mode->limits.whole_replies && rank == 0);
        room += copy_stride(own->slot_capacity);
    }
    if (r == 0) {
        replies->copies = malloc(room);
        r = replies->copies ? 0 : -ENOMEM;
    }
    if (r == 0)
        r = cox_arena_init(&replies->arena, ARENA_FIRST_SIZE, ARENA_SIZE_MAX);
    if (r)
        cox_replies_deinit(replies);
    return r;
}

void cox_replies_deinit(struct cox_replies *replies)
{
    for (uint32_t rank = 0; replies->ranks && rank < replies->rank_count; rank++)
        cox_reply_memory_free(replies->ranks[rank].large);
    free(replies->copies);
    free(replies->texts);
    free(replies->ranks);
    free(replies->results);
    cox_arena_deinit(&replies->arena);
    memset(replies, 0, sizeof *replies);
}

COX_HOT void cox_replies_begin(struct cox_replies *replies, const struct cox_rank_set *asked,
                               const struct cox_rank *ranks)
{
    cox_arena_reset(&replies->arena);
    replies->text[0] = '\0';
    replies->taken = (struct cox_stats_taken){0};
    replies->copied = 0;
    replies->left = replies->rank_count;
    replies->failed = false;
    replies->out_of_line = false;
    for (uint32_t rank = 0; rank < replies->rank_count; rank++)
        replies->results[rank] = (struct cox_rank_result){
            .outcome = cox_rank_set_has(asked, rank) ? COX_OUTCOME_LATE : COX_OUTCOME_NOT_ASKED,
            .pid = cox_rank_serving_pid(&ranks[rank]),
            .exit_status = -1,
        };
}

static void replies_error(struct cox_replies *replies, uint32_t rank, int32_t code,
                          const char *text)
{
    struct cox_rank_result *result = &replies->results[rank];
    char *own = replies->ranks[rank].text;
    snprintf(own, COX_RANK_TEXT_SIZE, "%.*s", COX_RANK_TEXT_SIZE - 1, text);
    cox_text_trim(own);
    result->outcome = COX_OUTCOME_ERROR;
    result->code = code;
    result->text = own;
}

/* The error text of a rank that failed. Numbers of MindIE-LLM's workers are not ours; the text of
 * one is in own. */
static const char *response_text(const Coxswain__ExecuteResponse *response,
                                 char own[COX_RANK_TEXT_SIZE])
{
    if (response->error_text && response->error_text[0])
        return response->error_text;
    if (response->result_case == COXSWAIN__EXECUTE_RESPONSE__RESULT_EXECUTE_MODEL_RESPONSE &&
        response->execute_model_response && response->execute_model_response->err_msg &&
        response->execute_model_response->err_msg[0])
        return response->execute_model_response->err_msg;
    if (response->status < COX_STATUS_COUNT)
        return cox_status_text(response->status > 0 ? response->status : COX_REJECTED);
    snprintf(own, COX_RANK_TEXT_SIZE, "its reply has the status %" PRId32 " and no text",
             response->status);
    return own;
}

/* Each rank has its share of the arena, so that none can use up the next one's. A reply out of line
 * may use twice its size in addition. */
COX_HOT static int replies_unpack(struct cox_replies *replies, const uint8_t *bytes, size_t length,
                                  size_t beside, Coxswain__ExecuteResponse **ret_response)
{
    struct cox_arena *arena = &replies->arena;
    size_t size_max = arena->size_max;
    arena->size_max = arena->used + ARENA_SIZE_MAX / replies->rank_count + beside;
    int r = cox_wire_response_unpack(arena, bytes, length, ret_response);
    arena->size_max = size_max;
    return r;
}

/* Sets the result from an unpacked reply. */
COX_HOT static void replies_accept(struct cox_replies *replies, uint32_t rank,
                                   const Coxswain__ExecuteResponse *response, const uint8_t *bytes,
                                   size_t length)
{
    struct cox_rank_result *result = &replies->results[rank];
    char text[128];
    if (response->status != 0) {
        replies_error(replies, rank, response->status,
                      response_text(response, (char[COX_RANK_TEXT_SIZE]){0}));
        if (response->has_error_detail) {
            result->bytes = response->error_detail.data;
            result->size = response->error_detail.len;
        }
    } else if ((uint32_t)response->rank != rank) {
        snprintf(text, sizeof text, "the slot of rank %" PRIu32 " holds a reply of rank %" PRId32,
                 rank, response->rank);
        replies_error(replies, rank, COX_CORRUPT, text);
    } else {
        result->outcome = COX_OUTCOME_OK;
        result->response = response;
        result->bytes = bytes;
        result->size = length;
    }
}

static void replies_error_unpack(struct cox_replies *replies, uint32_t rank, int r, uint64_t length)
{
    char text[128];
    snprintf(text, sizeof text,
             r == COX_TOO_LARGE ? "rank %" PRIu32 " replied with %" PRIu64
                                  " bytes that take too much memory unpacked"
                                : "rank %" PRIu32 " replied with %" PRIu64
                                  " bytes that are no ExecuteResponse",
             rank, length);
    replies_error(replies, rank, r, text);
}

/* Takes an ExecuteResponse from the copy. Returns true if the reply is out of line. */
COX_HOT static bool replies_take_message(struct cox_replies *replies, uint32_t rank,
                                         bool extensions, bool failed, const uint8_t *copy,
                                         size_t length)
{
    struct cox_replies_rank *own = &replies->ranks[rank];
    Coxswain__ExecuteResponse *response = NULL;
    int r = replies_unpack(replies, copy, length, 0, &response);
    if (r == 0 && !extensions)
        cox_legacy_reply_read(response, rank);
    if (r == 0 && response->status == 0 && response->large_payload) {
        struct cox_error why;
        cox_error_clear(&why);
        r = cox_large_payload_ref_read(response->large_payload, &own->ref, &why);
        if (r)
            replies_error(replies, rank, r, why.text);
        replies->out_of_line |= r == 0;
        return own->out_of_line = r == 0; /* may be called again: the copy is not kept */
    }
    replies->copied += copy_stride(length);
    replies->taken.bytes += length;
    if (r)
        replies_error_unpack(replies, rank, r, length);
    else if (failed && response->status == 0)
        replies_error(replies, rank, COX_REJECTED,
                      response_text(response, (char[COX_RANK_TEXT_SIZE]){0}));
    else
        replies_accept(replies, rank, response, copy, length);
    return false;
}

COX_HOT bool cox_replies_take(struct cox_replies *replies, const struct cox_channel *channel,
                              uint32_t rank, uint64_t sequence, uint32_t type, uint32_t incarnation)
{
    struct cox_rank_result *result = &replies->results[rank];
    const struct cox_attach_limits *limits = &channel->control->geometry.mode->limits;
    bool whole = limits->whole_replies && !cox_operation_find(type)->legacy_slotted;
    uint8_t *copy = replies->copies + replies->copied;
    size_t length;
    bool failed;
    struct cox_error why;
    cox_error_clear(&why);
    result->taken = true;
    if (whole && rank > 0) { /* a legacy rank: it signals, and writes nothing */
        result->outcome = COX_OUTCOME_OK;
        return false;
    }
    int r = cox_reply_fetch(channel, rank, sequence, whole, incarnation, copy,
                            replies->ranks[rank].slot_capacity, &length, &failed, &why);
    replies->ranks[rank].raw = r ? NULL : copy;
    replies->ranks[rank].raw_size = length;
    replies->ranks[rank].raw_failed = failed;
    if (r) {
        replies_error(replies, rank, r, why.text);
        return false;
    }
    if (type != COX_TYPE_OPAQUE || failed)
        return replies_take_message(replies, rank, limits->extensions, failed, copy, length);
    replies->copied += copy_stride(length);
    replies->taken.bytes += length;
    result->outcome = COX_OUTCOME_OK;
    result->bytes = copy;
    result->size = length;
    return false;
}

/* Copies a reply that is out of line to private memory. */
static int large_fetch(struct cox_replies_rank *own, const struct cox_reply_limits *reply_limits,
                       struct cox_large_payload_view *view, uint32_t rank, uint32_t type, pid_t pid,
                       struct cox_error *err)
{
    const uint64_t size = own->ref.size;
    const struct cox_large_payload_origin peer = {.pid = reply_limits->origin ? reply_limits->origin
                                                                              : pid,
                                                  .socket_path = reply_limits->socket_path};
    if (size > reply_limits->size_max)
        return cox_fail(err, COX_TOO_LARGE,
                        reply_limits->size_max
                            ? "rank %" PRIu32 " replied with %" PRIu64
                              " bytes, a slot holds %zu and a large payload %" PRIu64 " at most"
                            : "rank %" PRIu32 " replied with %" PRIu64
                              " bytes, a slot holds %zu, and there are no large payloads",
                        rank, size, own->slot_capacity, reply_limits->size_max);
    /* The limit is per reply, and all ranks may have one. Linux overcommits: an allocation beyond
     * free memory succeeds, and the kernel kills later. A message is there twice, packed and
     * unpacked. */
    struct cox_error room = {0};
    int r = cox_host_memory_check_free(type == COX_TYPE_OPAQUE ? size : 2 * size, &room);
    if (r)
        return cox_fail(err, r, "rank %" PRIu32 " replied with %" PRIu64 " bytes: %s", rank, size,
                        room.text);
    own->large = cox_reply_memory_alloc(size);
    if (!own->large)
        return cox_fail(err, COX_NO_SPACE, "no memory for %" PRIu64 " bytes of rank %" PRIu32, size,
                        rank);
    struct cox_error why = {0};
    const uint8_t *bytes;
    r = cox_large_payload_view_map(view, &own->ref, &peer, &bytes, &why);
    if (r == 0) {
        cox_copy(own->large, bytes, size);
        cox_large_payload_view_release(view);
    }
    /* The rank's own memory cannot be anywhere else. */
    if (r == COX_NOT_FOUND || r == COX_INVALID)
        r = COX_CORRUPT;
    return r ? cox_fail(err, r, "rank %" PRIu32 " replied out of line: %s", rank, why.text) : 0;
}

int cox_replies_take_large(struct cox_replies *replies, const struct cox_reply_limits *reply_limits,
                           struct cox_large_payload_view *view, uint32_t rank, uint32_t type)
{
    struct cox_rank_result *result = &replies->results[rank];
    struct cox_replies_rank *own = &replies->ranks[rank];
    const uint64_t size = own->ref.size;
    struct cox_error why = {0};
    int r = large_fetch(own, reply_limits, view, rank, type, result->pid, &why);
    own->raw = r ? NULL : own->large;
    own->raw_size = size;
    own->raw_failed = false;
    if (r) {
        cox_reply_memory_free(own->large);
        own->large = NULL;
        if (r != COX_PEER_DEAD)
            replies_error(replies, rank, r, why.text);
        return r == COX_PEER_DEAD ? r : 0;
    }
    cox_fault_point(COX_FAULT_LARGE_PAYLOAD_COPIED);
    replies->taken.bytes += size;
    replies->taken.large_bytes += size;
    replies->taken.large_count++;
    if (type == COX_TYPE_OPAQUE) {
        result->outcome = COX_OUTCOME_OK;
        result->bytes = own->large;
        result->size = size;
        return 0;
    }
    Coxswain__ExecuteResponse *response = NULL;
    r = replies_unpack(replies, own->large, size, 2 * size, &response);
    if (r)
        replies_error_unpack(replies, rank, r, size);
    else
        replies_accept(replies, rank, response, own->large, size);
    return 0;
}

COX_HOT bool cox_replies_holds(const struct cox_replies *replies)
{
    return replies->out_of_line || replies->arena.used > ARENA_KEEP_SIZE;
}

COX_HOT void cox_replies_let_go(struct cox_replies *replies)
{
    for (uint32_t rank = 0; rank < replies->rank_count; rank++) {
        cox_reply_memory_free(replies->ranks[rank].large);
        replies->ranks[rank].large = NULL;
        replies->ranks[rank].out_of_line = false;
    }
    if (replies->arena.used <= ARENA_KEEP_SIZE)
        return;
    cox_arena_deinit(&replies->arena);
    cox_arena_init(&replies->arena, 0, ARENA_SIZE_MAX); /* without memory: cannot fail */
}

void cox_replies_free_reply(uint8_t *bytes)
{
    cox_reply_memory_free(bytes);
}

void cox_replies_set_dead(struct cox_replies *replies, uint32_t rank,
                          struct cox_supervisor *supervisor)
{
    struct cox_rank_result *result = &replies->results[rank];
    struct cox_exit how = {0};
    cox_supervisor_dead(supervisor, rank, &how);
    result->outcome = COX_OUTCOME_DEAD;
    result->signal = how.signal;
    result->exit_status = how.known && !how.signal ? how.exit_status : -1;
    cox_report_death(supervisor, rank, replies->ranks[rank].text, COX_RANK_TEXT_SIZE);
    result->text = replies->ranks[rank].text;
}

COX_HOT int cox_replies_status(const struct cox_replies *replies, int ended_by)
{
    int status = 0;
    for (uint32_t rank = 0; rank < replies->rank_count; rank++) {
        const struct cox_rank_result *result = &replies->results[rank];
        if (result->outcome == COX_OUTCOME_DEAD)
            return COX_PEER_DEAD;
        if (result->outcome != COX_OUTCOME_ERROR)
            continue;
        bool telling =
            result->code == COX_CORRUPT || result->code == COX_STALE || result->code == COX_ABORTED;
        if (status == 0 || status == COX_STALE || status == COX_ABORTED)
            status = telling ? result->code : COX_REJECTED;
    }
    return status ? status : ended_by;
}

COX_HOT const struct cox_rank_result *cox_replies_choose(struct cox_replies *replies,
                                                         enum cox_gather policy)
{
    const struct cox_rank_result *payload = NULL;
    bool lowest = true;
    for (uint32_t rank = 0; rank < replies->rank_count; rank++) {
        struct cox_rank_result *result = &replies->results[rank];
        bool wanted = policy == COX_GATHER_ALL || (policy == COX_GATHER_RANK0 && lowest);
        lowest = lowest && result->outcome == COX_OUTCOME_NOT_ASKED;
        if (result->outcome == COX_OUTCOME_OK && wanted) {
            if (policy == COX_GATHER_RANK0)
                payload = result;
            continue;
        }
        result->response = NULL;
        if (result->outcome == COX_OUTCOME_ERROR)
            continue;
        result->bytes = NULL;
        result->size = 0;
    }
    return payload;
}

const uint8_t *cox_completion_raw(const struct cox_completion *completion, uint32_t rank,
                                  size_t *ret_size, bool *ret_failed)
{
    const struct cox_replies *replies =
        (const void *)((const char *)completion - offsetof(struct cox_replies, completion));
    const struct cox_replies_rank *own = &replies->ranks[rank];
    const enum cox_outcome outcome = completion->ranks[rank].outcome;
    const bool replied = outcome == COX_OUTCOME_OK || outcome == COX_OUTCOME_ERROR;
    const uint8_t *raw = replied && completion->status != COX_LATE ? own->raw : NULL;
    *ret_size = raw ? own->raw_size : 0;
    *ret_failed = replied && own->raw_failed;
    return raw;
}
