#include "sequence_store.h"

#include "channel/base/hash.h"
#include "channel/base/idioms.h"

#include <stdlib.h>
#include <string.h>

/* Items of the first allocation of an array: one cache line. */
#define NUMBERS_CAPACITY_MIN 16

int cox_numbers_reserve(struct cox_numbers *numbers, size_t count, uint32_t limit)
{
    if (count <= numbers->capacity)
        return count <= limit ? 0 : COX_TOO_LARGE;
    if (count > limit)
        return COX_TOO_LARGE;

    /* Doubles, but never beyond the limit. */
    size_t capacity = numbers->capacity ? 2 * (size_t)numbers->capacity : NUMBERS_CAPACITY_MIN;
    if (capacity > limit)
        capacity = limit;
    if (capacity < count)
        capacity = count;
    int32_t *items = realloc(numbers->items, capacity * sizeof *items);
    if (!items)
        return -ENOMEM;
    numbers->items = items;
    numbers->capacity = (uint32_t)capacity;
    return 0;
}

/* Copies into an empty array. */
static int numbers_copy(struct cox_numbers *to, const struct cox_numbers *from)
{
    int r = cox_numbers_reserve(to, from->count, UINT32_MAX);
    if (r)
        return r;
    if (from->count)
        memcpy(to->items, from->items, from->count * sizeof *to->items);
    to->count = from->count;
    return 0;
}

static struct cox_stored_sequence *sequence_free(struct cox_stored_sequence *sequence)
{
    if (sequence) {
        free(sequence->tokens.items);
        for (uint32_t i = 0; i < COX_BLOCK_TABLE_COUNT_MAX; i++)
            free(sequence->tables[i].items);
        free(sequence);
    }
    return NULL;
}

/* The finalizer of splitmix64. */
static uint32_t hash_id(int64_t id)
{
    uint64_t x = (uint64_t)id;
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return (uint32_t)(x ^ (x >> 31));
}

static uint32_t hash_text(const char *text)
{
    uint64_t hash = cox_hash_bytes(COX_HASH_START, text, strlen(text));
    return (uint32_t)(hash ^ hash >> 32);
}

static void index_insert(struct cox_sequence_store *store, uint32_t hash, uint32_t slot)
{
    uint32_t i = hash & store->cell_mask;
    while (store->cells[i].slot_plus_one)
        i = (i + 1) & store->cell_mask;
    store->cells[i] = (struct cox_sequence_store_cell){.hash = hash, .slot_plus_one = slot + 1};
}

static void index_remove(struct cox_sequence_store *store, uint32_t hash, uint32_t slot)
{
    uint32_t mask = store->cell_mask;
    uint32_t hole = hash & mask;
    while (store->cells[hole].hash != hash || store->cells[hole].slot_plus_one != slot + 1) {
        COX_ASSERT(store->cells[hole].slot_plus_one);
        hole = (hole + 1) & mask;
    }
    /* Later cells of the run move up when the hole lies between their home and their place. */
    for (uint32_t i = (hole + 1) & mask; store->cells[i].slot_plus_one; i = (i + 1) & mask) {
        uint32_t home = store->cells[i].hash & mask;
        if (((i - home) & mask) >= ((i - hole) & mask)) {
            store->cells[hole] = store->cells[i];
            hole = i;
        }
    }
    store->cells[hole] = (struct cox_sequence_store_cell){0};
}

/* The only place where a slot's sequence changes: bit, number and index follow. */
static void slot_set(struct cox_sequence_store *store, uint32_t slot,
                     struct cox_stored_sequence *sequence)
{
    struct cox_stored_sequence *old = store->slots[slot].now;
    if (old) {
        index_remove(store, hash_id(old->id), slot);
        if (old->request_id[0])
            index_remove(store, hash_text(old->request_id), slot);
        store->live_words[slot / 64] &= ~(UINT64_C(1) << (slot % 64));
        store->live_count--;
    }
    store->slots[slot].now = sequence;
    if (sequence) {
        index_insert(store, hash_id(sequence->id), slot);
        if (sequence->request_id[0])
            index_insert(store, hash_text(sequence->request_id), slot);
        store->live_words[slot / 64] |= UINT64_C(1) << (slot % 64);
        store->live_count++;
    }
}

static void spare_put(struct cox_sequence_store *store, struct cox_stored_sequence *sequence)
{
    cox_adapter_references_give(store->adapter_references, sequence->lora);
    sequence->lora = NULL;
    sequence->next_spare = store->spares;
    store->spares = sequence;
}

/* An empty sequence; arrays of an earlier use stay with it. */
static struct cox_stored_sequence *spare_take(struct cox_sequence_store *store)
{
    struct cox_stored_sequence *sequence = store->spares;
    if (!sequence)
        return calloc(1, sizeof *sequence);
    store->spares = sequence->next_spare;
    sequence->next_spare = NULL;
    sequence->tokens.count = 0;
    for (uint32_t i = 0; i < COX_BLOCK_TABLE_COUNT_MAX; i++)
        sequence->tables[i].count = 0;
    sequence->table_count = 0;
    sequence->announced_count = 0;
    sequence->sampling = (struct cox_sampling){0};
    return sequence;
}

/* The slot's content from before the step is kept for a revert; a sequence of this step is dropped.
 */
static void slot_replace(struct cox_sequence_store *store, uint32_t slot,
                         struct cox_stored_sequence *sequence)
{
    cox_sequence_store_touch(store, slot);
    struct cox_stored_sequence *old = store->slots[slot].now;
    slot_set(store, slot, sequence);
    if (old && old != store->slots[slot].before)
        spare_put(store, old);
}

int cox_sequence_store_init(struct cox_sequence_store *store, uint32_t sequence_count_max,
                            uint32_t token_count_max)
{
    /* Two entries per slot, half full at most: a search always meets an empty cell. */
    size_t cell_count = 4;
    while (cell_count < 4 * (size_t)sequence_count_max)
        cell_count *= 2;

    *store = (struct cox_sequence_store){
        .sequence_count_max = sequence_count_max,
        .token_count_max = token_count_max,
        .slots = calloc(sequence_count_max, sizeof *store->slots),
        .live_words = calloc((size_t)sequence_count_max / 64 + 1, sizeof *store->live_words),
        .touched = calloc(sequence_count_max, sizeof *store->touched),
        .cells = calloc(cell_count, sizeof *store->cells),
        .cell_mask = (uint32_t)(cell_count - 1),
    };
    int r = cox_adapter_references_new(&store->adapter_references);
    if (r || !store->slots || !store->live_words || !store->touched || !store->cells) {
        cox_sequence_store_deinit(store);
        return -ENOMEM;
    }
    return 0;
}

void cox_sequence_store_deinit(struct cox_sequence_store *store)
{
    if (store->slots) {
        cox_sequence_store_revert(store);
        for (uint32_t slot = 0; slot < store->sequence_count_max; slot++)
            sequence_free(store->slots[slot].now);
    }
    cox_adapter_references_free(store->adapter_references);
    while (store->spares) {
        struct cox_stored_sequence *next = store->spares->next_spare;
        sequence_free(store->spares);
        store->spares = next;
    }
    free(store->slots);
    free(store->live_words);
    free(store->touched);
    free(store->cells);
    *store = (struct cox_sequence_store){0};
}

/* A cell's hash is a hint, the sequence decides; so either of a slot's two cells may be found. */
bool cox_sequence_store_find_id(const struct cox_sequence_store *store, int64_t id,
                                uint32_t *ret_slot)
{
    uint32_t hash = hash_id(id);
    for (uint32_t i = hash & store->cell_mask; store->cells[i].slot_plus_one;
         i = (i + 1) & store->cell_mask) {
        uint32_t slot = store->cells[i].slot_plus_one - 1;
        if (store->cells[i].hash == hash && store->slots[slot].now->id == id) {
            *ret_slot = slot;
            return true;
        }
    }
    return false;
}

bool cox_sequence_store_find_request(const struct cox_sequence_store *store, const char *request_id,
                                     uint32_t *ret_slot)
{
    if (!request_id[0])
        return false;
    uint32_t hash = hash_text(request_id);
    for (uint32_t i = hash & store->cell_mask; store->cells[i].slot_plus_one;
         i = (i + 1) & store->cell_mask) {
        uint32_t slot = store->cells[i].slot_plus_one - 1;
        if (store->cells[i].hash == hash &&
            strcmp(store->slots[slot].now->request_id, request_id) == 0) {
            *ret_slot = slot;
            return true;
        }
    }
    return false;
}

bool cox_sequence_store_lowest_live(const struct cox_sequence_store *store, uint32_t *ret_slot)
{
    if (store->live_count == 0)
        return false;
    uint32_t i = 0;
    while (store->live_words[i] == 0)
        i++;
    *ret_slot = i * 64 + (uint32_t)__builtin_ctzll(store->live_words[i]);
    return true;
}

bool cox_sequence_store_lowest_free(const struct cox_sequence_store *store, uint32_t *ret_slot)
{
    if (store->live_count == store->sequence_count_max)
        return false;
    uint32_t i = 0;
    while (store->live_words[i] == UINT64_MAX)
        i++;
    *ret_slot = i * 64 + (uint32_t)__builtin_ctzll(~store->live_words[i]);
    return true;
}

void cox_sequence_store_begin(struct cox_sequence_store *store)
{
    COX_ASSERT(store->touched_count == 0);
    store->step++;
}

void cox_sequence_store_touch(struct cox_sequence_store *store, uint32_t slot)
{
    struct cox_slot *s = &store->slots[slot];
    if (s->touched_step == store->step)
        return;
    s->touched_step = store->step;
    s->before = s->now;
    if (s->now) {
        s->token_count_before = s->now->tokens.count;
        for (uint32_t i = 0; i < COX_BLOCK_TABLE_COUNT_MAX; i++)
            s->block_counts_before[i] = s->now->tables[i].count;
    }
    store->touched[store->touched_count++] = slot;
}

int cox_sequence_store_announce(struct cox_sequence_store *store, uint32_t slot, int64_t id,
                                const char *request_id, struct cox_stored_sequence **ret_sequence)
{
    struct cox_stored_sequence *sequence = spare_take(store);
    if (!sequence)
        return -ENOMEM;
    sequence->id = id;
    size_t length = request_id ? strlen(request_id) : 0;
    COX_ASSERT(length <= COX_REQUEST_ID_LENGTH_MAX);
    if (length)
        memcpy(sequence->request_id, request_id, length);
    sequence->request_id[length] = '\0';
    slot_replace(store, slot, sequence);
    *ret_sequence = sequence;
    return 0;
}

int cox_sequence_store_set_lora(struct cox_sequence_store *store, uint32_t slot, const char *name)
{
    struct cox_stored_sequence *sequence = store->slots[slot].now;
    const struct cox_stored_sequence *before = store->slots[slot].before;
    COX_ASSERT(!sequence->lora);
    if (before && before != sequence && before->id == sequence->id && before->lora &&
        strcmp(before->lora->name, name) == 0) {
        sequence->lora = cox_adapter_references_again(store->adapter_references, before->lora);
        return 0;
    }
    return cox_adapter_references_take(store->adapter_references, name, &sequence->lora);
}

int cox_sequence_store_own(struct cox_sequence_store *store, uint32_t slot,
                           struct cox_stored_sequence **ret_sequence)
{
    cox_sequence_store_touch(store, slot);
    struct cox_stored_sequence *old = store->slots[slot].now;
    struct cox_stored_sequence *copy = old;
    if (old == store->slots[slot].before) {
        int r = cox_sequence_store_announce(store, slot, old->id, old->request_id, &copy);
        if (!r)
            r = numbers_copy(&copy->tokens, &old->tokens);
        for (uint32_t i = 0; i < COX_BLOCK_TABLE_COUNT_MAX && !r; i++)
            r = numbers_copy(&copy->tables[i], &old->tables[i]);
        if (r)
            return r;
        copy->table_count = old->table_count;
        copy->announced_count = old->announced_count;
        copy->sampling = old->sampling;
        copy->lora = cox_adapter_references_again(store->adapter_references, old->lora);
    }
    *ret_sequence = copy;
    return 0;
}

void cox_sequence_store_drop(struct cox_sequence_store *store, uint32_t slot)
{
    slot_replace(store, slot, NULL);
}

void cox_sequence_store_commit(struct cox_sequence_store *store)
{
    while (store->touched_count) {
        struct cox_slot *s = &store->slots[store->touched[--store->touched_count]];
        if (s->before && s->before != s->now)
            spare_put(store, s->before);
        s->before = NULL;
    }
}

void cox_sequence_store_revert(struct cox_sequence_store *store)
{
    /* Two sequences may share an id half way through; the index holds both, each with its slot. */
    while (store->touched_count) {
        uint32_t slot = store->touched[--store->touched_count];
        struct cox_slot *s = &store->slots[slot];
        struct cox_stored_sequence *tentative = s->now;
        if (tentative != s->before) {
            slot_set(store, slot, s->before);
            if (tentative)
                spare_put(store, tentative);
        }
        if (s->before) {
            s->before->tokens.count = s->token_count_before;
            for (uint32_t i = 0; i < COX_BLOCK_TABLE_COUNT_MAX; i++)
                s->before->tables[i].count = s->block_counts_before[i];
        }
        s->before = NULL;
    }
}
