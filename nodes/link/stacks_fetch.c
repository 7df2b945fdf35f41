#include "stacks_fetch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SUMMARY "summary: "

void cox_stacks_fetch_begin(struct cox_stacks_fetch *fetch)
{
    *fetch = (struct cox_stacks_fetch){.number = fetch->number + 1};
}

bool cox_stacks_fetch_take(struct cox_stacks_fetch *fetch, const struct cox_frame *frame,
                           uint32_t rank_first, uint32_t rank_count)
{
    if (frame->sequence != fetch->number)
        return false;
    for (uint32_t rank = rank_first; rank < rank_first + rank_count; rank++) {
        if (!cox_rank_set_has(&frame->asked, rank) || !cox_rank_set_has(&fetch->awaited, rank))
            continue;
        char *text = malloc(frame->size + 1);
        if (!text)
            return false;
        memcpy(text, frame->payload, frame->size);
        text[frame->size] = '\0';
        fetch->texts[rank] = text;
        cox_stacks_fetch_forget(fetch, rank);
        return true;
    }
    return false;
}

uint8_t *cox_stacks_fetch_reply(const struct cox_frame *ask, uint32_t rank, const char *summary,
                                const char *text, uint64_t now_ns, size_t *ret_size)
{
    const size_t whole = strlen(SUMMARY) + strlen(summary) + 1 + strlen(text);
    struct cox_frame head = {
        .kind = COX_FRAME_STACKS,
        .epoch = ask->epoch,
        .incarnation = ask->incarnation,
        .sequence = ask->sequence,
        .sent_ns = now_ns,
        .size = whole < COX_FRAME_STACKS_MAX ? whole : COX_FRAME_STACKS_MAX,
    };
    uint8_t *bytes = malloc(COX_FRAME_HEAD_SIZE + head.size + 1);
    if (!bytes)
        return NULL;
    cox_rank_set_add(&head.asked, rank);
    cox_frame_pack_head(&head, bytes);
    snprintf((char *)bytes + COX_FRAME_HEAD_SIZE, head.size + 1, SUMMARY "%s\n%s", summary, text);
    *ret_size = COX_FRAME_HEAD_SIZE + head.size;
    return bytes;
}
