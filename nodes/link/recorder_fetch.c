#include "recorder_fetch.h"

#include "channel/recorder/recorder.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

void cox_recorder_fetch_begin(struct cox_recorder_fetches *fetches,
                              struct cox_recorder_fetch *fetch)
{
    fetch->number = ++fetches->last;
    fetch->done = false;
    fetch->next = fetches->first;
    fetches->first = fetch;
}

void cox_recorder_fetch_end(struct cox_recorder_fetches *fetches, struct cox_recorder_fetch *fetch)
{
    struct cox_recorder_fetch **at = &fetches->first;
    while (*at && *at != fetch)
        at = &(*at)->next;
    if (*at)
        *at = fetch->next;
}

/* Copies the payload if it is a recorder of the rank. */
static int payload_copy(const struct cox_frame *frame, const char *node, uint32_t rank, void *copy,
                        struct cox_error *err)
{
    const uint64_t size = cox_recorder_area_size(false);
    struct cox_record_head head;
    struct cox_error why = {0};
    bool coordinator;
    if (frame->size == 0)
        return COX_NOT_FOUND;
    if (frame->size != size)
        return cox_fail(err, COX_CORRUPT,
                        "node %s sent %zu bytes as the recorder of rank %" PRIu32
                        ": expected %" PRIu64,
                        node, frame->size, rank, size);
    if (cox_recorder_check(frame->payload, frame->size, &coordinator, &head, &why))
        return cox_fail(err, COX_CORRUPT, "node %s sent no recorder of rank %" PRIu32 ": %s", node,
                        rank, why.text);
    if (coordinator || head.rank != rank)
        return cox_fail(err, COX_CORRUPT,
                        "node %s sent the recorder of another process than rank %" PRIu32, node,
                        rank);
    memcpy(copy, frame->payload, size);
    return 0;
}

bool cox_recorder_fetch_take(struct cox_recorder_fetches *fetches, const struct cox_frame *frame,
                             const char *node, uint32_t rank_first, uint32_t rank_count)
{
    struct cox_recorder_fetch *fetch = fetches->first;
    while (fetch && fetch->number != frame->sequence)
        fetch = fetch->next;
    if (!fetch || fetch->done || fetch->rank < rank_first ||
        fetch->rank - rank_first >= rank_count || !cox_rank_set_has(&frame->asked, fetch->rank))
        return false;
    fetch->err = (struct cox_error){0};
    fetch->status = payload_copy(frame, node, fetch->rank, fetch->copy, &fetch->err);
    fetch->done = true;
    return true;
}

uint8_t *cox_recorder_fetch_reply(const struct cox_frame *ask, uint32_t rank, const void *copy,
                                  uint64_t now_ns, size_t *ret_size)
{
    struct cox_frame head = {
        .kind = COX_FRAME_RECORDER,
        .epoch = ask->epoch,
        .incarnation = ask->incarnation,
        .sequence = ask->sequence,
        .sent_ns = now_ns,
        .size = copy ? cox_recorder_area_size(false) : 0,
    };
    uint8_t *bytes = malloc(COX_FRAME_HEAD_SIZE + head.size);
    if (!bytes)
        return NULL;
    cox_rank_set_add(&head.asked, rank);
    cox_frame_pack_head(&head, bytes);
    if (copy)
        memcpy(bytes + COX_FRAME_HEAD_SIZE, copy, head.size);
    *ret_size = COX_FRAME_HEAD_SIZE + head.size;
    return bytes;
}
