/* Checked copies of entries and rows, under the lock: each word is loaded once, as it is input. */
#include "queue_internal.h"

#include <string.h>

bool cox_queue_entry_read(struct cox_queue *queue, uint32_t index,
                          struct cox_queue_entry *ret_entry)
{
    if (index >= queue->geometry.pool_count_max)
        return false;
    struct cox_queue_layout_pool *pool = &queue->layout->pools[index];
    *ret_entry = (struct cox_queue_entry){
        .id = COX_QUEUE_LOAD(pool->pool_id),
        .stamp = COX_QUEUE_LOAD(pool->pool_stamp),
        .domain = COX_QUEUE_LOAD(pool->pool_domain),
        .flags = COX_QUEUE_LOAD(pool->pool_flags),
    };
    uint64_t words[sizeof ret_entry->handle / 8];
    for (size_t i = 0; i < sizeof words / 8; i++)
        words[i] = COX_QUEUE_LOAD(pool->pool_handle[i]);
    memcpy(&ret_entry->handle, words, sizeof words);
    return ret_entry->id != 0 && ret_entry->domain < queue->geometry.domain_count_max;
}

void cox_queue_copy_read(struct cox_queue_layout_copy *copy, struct cox_queue_copy *ret_copy)
{
    *ret_copy = (struct cox_queue_copy){
        .copier = COX_QUEUE_LOAD(copy->copy_copier),
        .epoch = COX_QUEUE_LOAD(copy->copy_epoch),
        .size = COX_QUEUE_LOAD(copy->copy_size),
        .pool = COX_QUEUE_LOAD(copy->copy_pool),
        .block = COX_QUEUE_LOAD(copy->copy_block),
    };
}

void cox_queue_row_read(struct cox_queue *queue, uint64_t number,
                        struct cox_queue_message *ret_message)
{
    struct cox_queue_layout_row *row = cox_queue_row_at(queue, number);
    ret_message->number = COX_QUEUE_LOAD(row->row_number);
    ret_message->user_data = COX_QUEUE_LOAD(row->row_user_data);
    ret_message->length = COX_QUEUE_LOAD(row->row_length);
    ret_message->mask = COX_QUEUE_LOAD(row->row_mask) & cox_queue_domain_mask(queue);
    ret_message->interest = COX_QUEUE_LOAD(row->row_interest);
    for (uint32_t d = 0; d < queue->geometry.domain_count_max; d++)
        cox_queue_copy_read(&row->copies[d], &ret_message->copies[d]);
}
