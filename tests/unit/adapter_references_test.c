/*
 * adapter_references: names are counted by the sequences that have them, from their announcement
 * until nothing can bring them back; alone, and in the table.
 */
#include "table_fixture.h"

#include "worker/sequences/adapter_references.h"

#define PATIENCE_MS 30000

static uint64_t patience(void)
{
    return cox_deadline_after_ms(PATIENCE_MS);
}

static bool at_once(void *context)
{
    (void)context;
    return true;
}

/* ---- alone ---- */

TEST_OWNED(cox_adapter_references_free)

static struct cox_adapter_references *references_new(void)
{
    struct cox_adapter_references *made;
    assert_int_equal(cox_adapter_references_new(&made), 0);
    return test_own(made, cox_adapter_references_free_owned);
}

PLAIN_TEST(m13_a_name_is_one_as_long_as_it_is_used)
{
    struct cox_adapter_references *references = references_new();
    struct cox_adapter_reference *first, *second, *other;
    char name[COX_LORA_NAME_LENGTH_MAX + 2];
    assert_int_equal(cox_adapter_references_take(references, "a", &first), 0);
    assert_int_equal(cox_adapter_references_take(references, "a", &second), 0);
    assert_int_equal(cox_adapter_references_take(references, "b", &other), 0);
    assert_ptr_equal(first, second);
    assert_ptr_not_equal(first, other);
    assert_string_equal(other->name, "b");
    assert_ptr_equal(cox_adapter_references_again(references, first), first);
    assert_null(cox_adapter_references_again(references, NULL));
    assert_int_equal(cox_adapter_references_count(references, "a"), 3);
    assert_int_equal(cox_adapter_references_count(references, "c"), 0);
    for (int i = 0; i < 3; i++)
        cox_adapter_references_give(references, first);
    cox_adapter_references_give(references, NULL);
    assert_int_equal(cox_adapter_references_count(references, "a"), 0);
    assert_int_equal(cox_adapter_references_count(references, "b"), 1);
    memset(name, 'x', sizeof name);
    name[sizeof name - 1] = '\0';
    assert_int_equal(cox_adapter_references_take(references, name, &first), COX_TOO_LARGE);
    name[sizeof name - 2] = '\0';
    assert_int_equal(cox_adapter_references_take(references, name, &first), 0);
}

PLAIN_TEST(m13_a_closed_name_is_not_taken_until_it_is_open)
{
    struct cox_adapter_references *references = references_new();
    struct cox_adapter_reference *reference;
    uint32_t count = 0;
    for (int i = 0; i < 2; i++) {
        assert_int_equal(cox_adapter_references_close(references, "a", 0, NULL, NULL, &count), 0);
        assert_int_equal(cox_adapter_references_take(references, "a", &reference), COX_BUSY);
        assert_int_equal(cox_adapter_references_take(references, "b", &reference), 0);
        cox_adapter_references_give(references, reference);
        cox_adapter_references_open(references);
        cox_adapter_references_open(references); /* nothing is closed */
        assert_int_equal(cox_adapter_references_take(references, "a", &reference), 0);
        cox_adapter_references_give(references, reference);
    }
}

PLAIN_TEST(m13_a_close_that_is_given_up_opens_the_name_again)
{
    struct cox_adapter_references *references = references_new();
    struct cox_adapter_reference *reference;
    uint32_t count = 0;
    assert_int_equal(cox_adapter_references_take(references, "a", &reference), 0);
    assert_ptr_equal(cox_adapter_references_again(references, reference), reference);
    assert_int_equal(
        cox_adapter_references_close(references, "a", cox_now_ns(), NULL, NULL, &count), COX_BUSY);
    assert_int_equal(count, 2);
    count = 0;
    assert_int_equal(
        cox_adapter_references_close(references, "a", patience(), at_once, NULL, &count), COX_BUSY);
    assert_int_equal(count, 2);
    assert_ptr_equal(cox_adapter_references_again(references, reference), reference);
    assert_int_equal(cox_adapter_references_take(references, "a", &reference), 0);
}

struct closing {
    struct cox_adapter_references *references;
    int result;
    _Atomic bool over;
};

static void *close_main(void *context)
{
    struct closing *closing = context;
    uint32_t count;
    closing->result =
        cox_adapter_references_close(closing->references, "a", patience(), NULL, NULL, &count);
    atomic_store(&closing->over, true);
    return NULL;
}

PLAIN_TEST(m13_a_close_waits_for_the_last_one)
{
    struct closing closing = {.references = references_new(), .result = -1};
    struct cox_adapter_reference *reference, *more;
    assert_int_equal(cox_adapter_references_take(closing.references, "a", &reference), 0);
    pthread_t thread = test_thread(close_main, &closing);
    while (cox_adapter_references_take(closing.references, "a", &more) == 0)
        cox_adapter_references_give(closing.references, more);
    /* Closed, and a copy of one that there is is not refused. */
    assert_ptr_equal(cox_adapter_references_again(closing.references, reference), reference);
    cox_adapter_references_give(closing.references, reference);
    assert_false(atomic_load(&closing.over));
    cox_adapter_references_give(closing.references, reference);
    pthread_join(thread, NULL);
    assert_int_equal(closing.result, 0);
    assert_int_equal(cox_adapter_references_take(closing.references, "a", &reference), COX_BUSY);
}

/* ---- in the table ---- */

static struct cox_adapter_references *table_references(void)
{
    return cox_table_adapter_references(f.table);
}

/* Applies the step, which is computed. */
static void compute(const Request *request)
{
    assert_int_equal(apply(request), 0);
    for (uint32_t i = 0; i < f.batch->row_count; i++)
        f.outputs[i].token = 1;
}

static void announce(Request *request, uint32_t slot, int64_t id, const char *lora)
{
    StepSequence *announced = packed_announce(request, slot, id, numbers, 3);
    packed_table(announced, numbers, 2);
    announced->lora_id = (char *)(uintptr_t)lora;
    packed_row(request, slot, 0, 3);
}

static uint32_t count_of(const char *name)
{
    return cox_adapter_references_count(table_references(), name);
}

TEST(m13_rows_name_the_adapter_they_were_announced_with)
{
    Request *request = packed_new(COX_FORWARD_PREFILL, 0);
    announce(request, 0, 10, "a");
    announce(request, 1, 11, NULL);
    announce(request, 2, 12, "b");
    announce(request, 3, 13, "a");
    announce(request, 4, 14, "");
    compute(request);
    assert_string_equal(f.batch->rows[0].lora_id, "a");
    assert_null(f.batch->rows[1].lora_id);
    assert_string_equal(f.batch->rows[2].lora_id, "b");
    assert_ptr_equal(f.batch->rows[3].lora_id, f.batch->rows[0].lora_id);
    assert_null(f.batch->rows[4].lora_id);
    assert_int_equal(count_of("a"), 2);
    cox_table_commit(f.table);
    request = packed_new(COX_FORWARD_DECODE, f.sequence);
    packed_finish(request, 0);
    packed_row(request, 3, 3, 1);
    compute(request);
    assert_string_equal(f.batch->rows[0].lora_id, "a");
    /* It can come back until the step has succeeded. */
    assert_int_equal(count_of("a"), 2);
    cox_table_commit(f.table);
    assert_int_equal(count_of("a"), 1);
    cox_table_clear(f.table);
    assert_int_equal(count_of("a") + count_of("b"), 0);
}

TEST(m13_a_step_that_is_reverted_changes_no_count)
{
    Request *request = packed_new(COX_FORWARD_PREFILL, 0);
    announce(request, 0, 10, "a");
    advance(request, 1);
    request = packed_new(COX_FORWARD_PREFILL, f.sequence);
    packed_finish(request, 0);
    announce(request, 1, 11, "a");
    announce(request, 2, 12, "b");
    compute(request);
    assert_int_equal(count_of("a"), 2);
    cox_table_revert(f.table);
    assert_int_equal(count_of("a"), 1);
    assert_int_equal(count_of("b"), 0);
    const uint32_t *slots;
    const int64_t ids[] = {10};
    uint32_t count;
    cox_table_cleanup(f.table, ids, 1, &slots, &count);
    assert_int_equal(count_of("a"), 0);
}

TEST(m13_sequences_of_a_closed_name_are_refused_but_those_there_are)
{
    uint32_t count;
    Request *request = packed_new(COX_FORWARD_PREFILL, 0);
    announce(request, 0, 10, "a");
    advance(request, 1);
    /* Only an adapter without users is closed for good; so that it stays closed, an unused one is
     * closed. */
    assert_int_equal(cox_adapter_references_close(table_references(), "b", 0, NULL, NULL, &count),
                     0);
    request = packed_new(COX_FORWARD_PREFILL, f.sequence);
    announce(request, 1, 11, "b");
    refuse(request, COX_BUSY);
    assert_contains(f.err.text, "announced 0: the LoRA adapter 'b' is being unloaded");
    assert_int_equal(count_of("b"), 0);
    cox_adapter_references_open(table_references());
    request = packed(COX_FORWARD_PREFILL);
    announce(request, 1, 11, "b");
    advance(request, 1);
    char name[COX_LORA_NAME_LENGTH_MAX + 2];
    memset(name, 'x', sizeof name);
    name[sizeof name - 1] = '\0';
    request = packed(COX_FORWARD_PREFILL);
    announce(request, 2, 12, name);
    refuse(request, COX_TOO_LARGE);
    assert_contains(f.err.text, "lora_id of 129 bytes");
}

/* All is announced anew while the adapter is waited for: live sequences continue, with the same
 * adapter or as a new use. */
TEST(m13_live_sequences_are_announced_again_under_a_closed_name)
{
    struct closing closing = {.references = table_references(), .result = -1};
    struct cox_adapter_reference *reference;
    Request *request = packed_new(COX_FORWARD_PREFILL, 0);
    announce(request, 0, 10, "a");
    announce(request, 1, 11, "b");
    advance(request, 1);
    pthread_t thread = test_thread(close_main, &closing);
    while (cox_adapter_references_take(table_references(), "a", &reference) == 0)
        cox_adapter_references_give(table_references(), reference);
    request = packed_new(COX_FORWARD_PREFILL, 0);
    announce(request, 0, 10, "a");
    announce(request, 1, 11, "a");
    refuse(request, COX_BUSY);
    request = packed_new(COX_FORWARD_PREFILL, 0);
    announce(request, 0, 10, "a");
    announce(request, 1, 11, "b");
    compute(request);
    assert_string_equal(f.batch->rows[0].lora_id, "a");
    cox_table_commit(f.table);
    assert_int_equal(count_of("a"), 1);
    assert_false(atomic_load(&closing.over));
    cox_table_clear(f.table);
    pthread_join(thread, NULL);
    assert_int_equal(closing.result, 0);
}

/* The nested form, and a sequence that is copied because its tables change. */
TEST(m13_nested_prompts_name_adapters)
{
    Request *request = request_new(COX_FORWARD_PREFILL);
    Metadata *metadata = nested_prompt(request, "r1", 10, 3, 2);
    metadata->lora_id = (char *)(uintptr_t) "a";
    compute(request);
    assert_string_equal(f.batch->rows[0].lora_id, "a");
    cox_table_commit(f.table);
    request = request_new(COX_FORWARD_DECODE);
    metadata = nested_add(request, "r1", 10, false);
    nested_table(metadata, numbers + 2, 2);
    compute(request);
    assert_string_equal(f.batch->rows[0].lora_id, "a");
    assert_int_equal(count_of("a"), 2); /* the one before is kept */
    cox_table_commit(f.table);
    assert_int_equal(count_of("a"), 1);
    request = request_new(COX_FORWARD_DECODE);
    nested_finish(request, "r1");
    advance(request, 1);
    assert_int_equal(count_of("a"), 0);
}
