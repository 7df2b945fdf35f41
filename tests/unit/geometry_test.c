#include "channel/recorder/recorder_layout.h"
#include "channel/shm/geometry.h"

#include "channel_fixture.h"

#define MIB (UINT64_C(1) << 20)

static struct cox_geometry resolved(uint32_t rank_count, const struct cox_geometry_choice *choice)
{
    static const struct cox_geometry_choice defaults;
    struct cox_geometry geometry = {0};
    assert_ok(cox_geometry_resolve(rank_count, choice ? choice : &defaults, &geometry, test_err()));
    return geometry;
}

/* Refused with a text that holds `a` and `b`, and nothing was given out. */
static void refused(uint32_t rank_count, const struct cox_geometry_choice *choice, const char *a,
                    const char *b)
{
    struct cox_geometry geometry, before;
    memset(&geometry, 0x5a, sizeof geometry);
    before = geometry;
    assert_refused(cox_geometry_resolve(rank_count, choice, &geometry, test_err()), COX_INVALID, a);
    assert_contains(test_error.text, b);
    assert_memory_equal(&geometry, &before, sizeof geometry);
    assert_int_equal(cox_geometry_resolve(rank_count, choice, &geometry, NULL), COX_INVALID);
}

/* All bytes that a frame or slot may touch lie inside its region and in no other part. */
static void check_frames_and_slots(const struct cox_geometry *g)
{
    for (int c = 0; c < COX_CHANNEL_COUNT; c++) {
        enum cox_channel_id channel = (enum cox_channel_id)c;
        const struct cox_layout_channel *sizes = &g->channels[c];
        if (channel == COX_CHANNEL_ERROR) {
            assert_true(sizes->request_size == 0 && sizes->frame_size == 0);
            assert_true(sizes->slot_stride == sizes->response_size);
            assert_true(cox_geometry_slot_capacity(g, channel, true) == sizes->response_size - 4);
            continue;
        }
        assert_true(sizes->frame_size % 64 == 0 && sizes->slot_stride % 64 == 0);
        assert_true(sizes->frame_size >= 256 &&
                    sizes->frame_size * g->depth <= sizes->request_size);
        assert_true(cox_geometry_slot_capacity(g, channel, false) == sizes->slot_stride - 4);
        uint64_t end = 0; /* slots come in the order part, rank */
        for (uint64_t sequence = 0; sequence < g->depth; sequence++)
            for (uint32_t rank = 0; rank < g->rank_count; rank++) {
                uint64_t offset = cox_geometry_slot_offset(g, channel, rank, sequence);
                assert_true(offset >= end && offset % 64 == 0);
                end = offset + 4 + cox_geometry_slot_capacity(g, channel, false);
                assert_true(offset ==
                            cox_geometry_slot_offset(g, channel, rank, sequence + g->depth));
            }
        assert_true(end <= sizes->response_size);
    }
}

LEAK_TEST(defaults_fit_for_any_number_of_ranks_and_any_depth)
{
    for (uint32_t ranks = 1; ranks <= COX_RANK_COUNT_MAX; ranks++)
        for (uint32_t depth = 0; depth <= COX_DEPTH_MAX; depth++) {
            const struct cox_geometry_choice choice = {.depth = depth};
            struct cox_geometry g = resolved(ranks, &choice);
            assert_int_equal(g.rank_count, ranks);
            assert_int_equal(g.depth, depth ? depth : 4);
            assert_false(g.mode == &cox_attach_legacy);
            check_frames_and_slots(&g);
            assert_int_equal(cox_geometry_verify(&g, NULL), 0);
        }
}

LEAK_TEST(chosen_sizes_fit_whatever_they_are)
{
    uint64_t random = 42;
    unsigned accepted = 0;
    for (int i = 0; i < 20000; i++) {
        struct cox_geometry_choice choice = {.depth = (uint32_t)(random_next(&random) % 9)};
        uint32_t ranks = (uint32_t)(random_next(&random) % COX_RANK_COUNT_MAX) + 1;
        for (int c = 0; c < COX_CHANNEL_COUNT; c++) {
            if (c != COX_CHANNEL_ERROR)
                choice.request_size[c] = random_next(&random) >> (random_next(&random) % 48 + 16);
            choice.response_size[c] = random_next(&random) >> (random_next(&random) % 48 + 16);
        }
        struct cox_geometry g;
        if (cox_geometry_resolve(ranks, &choice, &g, NULL) == 0) {
            accepted++;
            check_frames_and_slots(&g);
            assert_int_equal(cox_geometry_verify(&g, NULL), 0);
        }
    }
    assert_true(accepted > 20);
}

LEAK_TEST(p6_the_default_for_8_ranks_is_within_16_mib)
{
    struct cox_geometry g = resolved(8, NULL);
    uint64_t regions = 0;
    for (int c = 0; c < COX_CHANNEL_COUNT; c++)
        regions += g.channels[c].request_size + g.channels[c].response_size;
    assert_true(cox_geometry_account(&g).region_bytes ==
                regions + cox_geometry_control_object_size(&g) + cox_geometry_group_size(&g));
    /* a recorder per rank, and the one of the coordinator beside them */
    assert_true(cox_geometry_control_object_size(&g) >=
                cox_layout_control_size(8) + 8 * cox_recorder_area_size(false));
    assert_true(cox_geometry_semaphore_bytes(&g) == (4 * 4 * 8 + 2) * sizeof(sem_t));
    /* A semaphore file takes a page. */
    assert_true(cox_geometry_account(&g).region_bytes + (4 * 4 * 8 + 2) * 4096 +
                    cox_recorder_area_size(true) <=
                16 * MIB);
}

LEAK_TEST(legacy_sizes_are_the_contract_s)
{
    static const struct cox_layout_channel expected[COX_CHANNEL_COUNT] = {
        {256 * MIB, 32 * MIB, 256 * MIB, 512 << 10}, /* execute */
        {32 * MIB, 32 * MIB, 32 * MIB, 512 << 10},   /* shared_sync_link */
        {256 * MIB, 32 * MIB, 256 * MIB, 512 << 10}, /* transfer */
        {8 * MIB, 8 * MIB, 8 * MIB, 512 << 10},      /* recover_command */
        {0, 1024, 0, 1024},                          /* execute_error */
    };
    const struct cox_geometry_choice choice = {.mode = &cox_attach_legacy};
    for (uint32_t ranks = 1; ranks <= 16; ranks++) {
        struct cox_geometry g = resolved(ranks, &choice);
        assert_memory_equal(g.channels, expected, sizeof expected);
        assert_int_equal(g.depth, 1);
        assert_ptr_equal(g.mode, &cox_attach_legacy);
        for (uint32_t rank = 0; rank < ranks; rank++)
            for (uint64_t sequence = 0; sequence < 3; sequence++)
                assert_true(cox_geometry_slot_offset(&g, COX_CHANNEL_RECOVER, rank, sequence) ==
                            rank * 524288);
        assert_true(cox_geometry_slot_capacity(&g, COX_CHANNEL_EXECUTE, true) == 32 * MIB - 4);
        assert_true(cox_geometry_slot_capacity(&g, COX_CHANNEL_EXECUTE, false) == 524288 - 4);
        assert_int_equal(cox_geometry_verify(&g, NULL), 0);
    }
}

LEAK_TEST(m4_17_legacy_ranks_are_refused_with_the_numbers)
{
    struct cox_geometry_choice choice = {.mode = &cox_attach_legacy};
    refused(17, &choice, "recover_command: a response region of 8388608 bytes",
            "holds 16 slots of 524288 bytes, 17 ranks");
    choice.response_size[COX_CHANNEL_RECOVER] = 17 * 524288;
    resolved(17, &choice);
    choice.response_size[COX_CHANNEL_RECOVER]--;
    refused(17, &choice, "holds 16 slots", "17 ranks");
}

LEAK_TEST(legacy_means_depth_1)
{
    struct cox_geometry_choice choice = {.mode = &cox_attach_legacy, .depth = 1};
    resolved(2, &choice);
    choice.depth = 2;
    refused(2, &choice, "depth 2", "legacy");
}

LEAK_TEST(ranks_and_depth_have_bounds)
{
    const struct cox_geometry_choice none = {0}, over = {.depth = 33},
                                     absurd = {.depth = UINT32_MAX};
    refused(0, &none, "0 ranks", "1 to 128");
    refused(129, &none, "129 ranks", "1 to 128");
    refused(UINT32_MAX, &none, "4294967295 ranks", "1 to 128");
    refused(8, &over, "depth 33", "1 to 32");
    refused(8, &absurd, "depth 4294967295", "1 to 32");
}

LEAK_TEST(tiny_and_absurd_sizes_are_refused_with_the_numbers)
{
    static const uint64_t tiny[] = {1, 3, 4, 5, 63, 64, 255};
    static const uint64_t absurd[] = {(UINT64_C(1) << 40) + 1, INT64_MAX, UINT64_MAX - 63,
                                      UINT64_MAX};
    for (int legacy = 0; legacy < 2; legacy++)
        for (int c = 0; c < COX_CHANNEL_COUNT; c++) {
            const char *name = cox_channel_name((enum cox_channel_id)c);
            for (size_t i = 0; i < sizeof tiny / sizeof tiny[0]; i++) {
                struct cox_geometry_choice request = {.mode = legacy ? &cox_attach_legacy : NULL,
                                                      .depth = 1},
                                           response = request;
                char number[32];
                snprintf(number, sizeof number, " %" PRIu64 " bytes", tiny[i]);
                request.request_size[c] = response.response_size[c] = tiny[i];
                refused(1, &request, name, number);
                refused(1, &response, name, number);
            }
            for (size_t i = 0; i < sizeof absurd / sizeof absurd[0]; i++) {
                struct cox_geometry_choice request = {.mode = legacy ? &cox_attach_legacy : NULL},
                                           response = request;
                request.request_size[c] = response.response_size[c] = absurd[i];
                refused(1, &request, name, "region of");
                refused(1, &response, name, "region of");
            }
        }
}

LEAK_TEST(the_smallest_sizes_that_work_are_256_bytes_each)
{
    for (uint32_t depth = 1; depth <= 8; depth++) {
        struct cox_geometry_choice choice = {.depth = depth};
        for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
            choice.request_size[c] = 256 * depth;
            choice.response_size[c] = 256 * depth * 3;
        }
        struct cox_geometry g = resolved(3, &choice);
        check_frames_and_slots(&g);
        choice.request_size[COX_CHANNEL_LINK]--;
        refused(3, &choice, "shared_sync_link", "request region");
        choice.request_size[COX_CHANNEL_LINK]++;
        choice.response_size[COX_CHANNEL_TRANSFER]--;
        refused(3, &choice, "transfer", "response region");
    }
}

LEAK_TEST(the_error_channel_has_no_requests)
{
    const struct cox_geometry_choice choice = {.request_size[COX_CHANNEL_ERROR] = 4096};
    refused(1, &choice, "execute_error", "4096");
}

/* What came from another process and could not have been resolved is corrupt. */
LEAK_TEST(verify_takes_nothing_that_resolve_does_not_give)
{
    struct cox_geometry good = resolved(3, NULL), g;
    struct cox_error err = {0};
    for (int c = 0; c < COX_CHANNEL_COUNT; c++) {
        for (int64_t by = -64; by <= 64; by += 32) {
            if (by == 0)
                continue;
            g = good;
            g.channels[c].slot_stride += (uint64_t)by;
            assert_int_equal(cox_geometry_verify(&g, NULL), COX_CORRUPT);
            g = good;
            g.channels[c].frame_size += (uint64_t)by;
            assert_int_equal(cox_geometry_verify(&g, NULL), COX_CORRUPT);
        }
        g = good;
        memset(&g.channels[c], 0, sizeof g.channels[c]);
        assert_int_equal(cox_geometry_verify(&g, NULL), COX_CORRUPT);
        g = good;
        memset(&g.channels[c], 0xff, sizeof g.channels[c]);
        assert_int_equal(cox_geometry_verify(&g, &err), COX_CORRUPT);
    }
    assert_int_equal(err.code, COX_CORRUPT);
    static const uint32_t wrong[] = {0, 129, UINT32_MAX};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        g = good;
        g.rank_count = wrong[i];
        assert_int_equal(cox_geometry_verify(&g, NULL), COX_CORRUPT);
        g = good;
        g.depth = wrong[i];
        assert_int_equal(cox_geometry_verify(&g, NULL), COX_CORRUPT);
    }
    g = good;
    g.mode = &cox_attach_legacy;
    assert_int_equal(cox_geometry_verify(&g, NULL), COX_CORRUPT);
    assert_int_equal(cox_geometry_verify(&good, NULL), 0);
}

/* ---- names ---- */

LEAK_TEST(names_are_the_contract_s)
{
    static const char *const regions[COX_CHANNEL_COUNT][2] = {
        {"/4242_7_execute_request", "/4242_7_execute_response"},
        {"/4242_7_shared_sync_link_request", "/4242_7_shared_sync_link_response"},
        {"/4242_7_transfer_request", "/4242_7_transfer_response"},
        {"/4242_7_recover_command_request", "/4242_7_recover_command_response"},
        {NULL, "/4242_7_execute_error_response"},
    };
    static const char *const wakeups[COX_TWO_WAY_COUNT][COX_WAKEUP_COUNT] = {
        {"/4242_7_execute_request_produce_0", "/4242_7_execute_request_consume_0",
         "/4242_7_execute_response_produce_0", "/4242_7_execute_response_consume_0"},
        {"/4242_7_shared_sync_link_request_produce_0", "/4242_7_shared_sync_link_request_consume_0",
         "/4242_7_shared_sync_link_response_produce_0",
         "/4242_7_shared_sync_link_response_consume_0"},
        {"/4242_7_transfer_request_produce_0", "/4242_7_transfer_request_consume_0",
         "/4242_7_transfer_response_produce_0", "/4242_7_transfer_response_consume_0"},
        {"/4242_7_recover_command_request_produce_0", "/4242_7_recover_command_request_consume_0",
         "/4242_7_recover_command_response_produce_0",
         "/4242_7_recover_command_response_consume_0"},
    };
    char buffer[COX_OBJECT_NAME_SIZE];
    assert_string_equal(cox_name_control(buffer, "4242_7"), "/4242_7_control");
    for (int c = 0; c < COX_CHANNEL_COUNT; c++) {
        enum cox_channel_id channel = (enum cox_channel_id)c;
        if (regions[c][0])
            assert_string_equal(cox_name_request(buffer, "4242_7", channel), regions[c][0]);
        assert_ptr_equal(cox_name_response(buffer, "4242_7", channel), buffer);
        assert_string_equal(buffer, regions[c][1]);
        for (int b = 0; c < COX_TWO_WAY_COUNT && b < COX_WAKEUP_COUNT; b++)
            assert_string_equal(cox_name_wakeup(buffer, "4242_7", channel, (enum cox_wakeup)b, 0),
                                wakeups[c][b]);
    }
    assert_string_equal(
        cox_name_wakeup(buffer, "4242_7", COX_CHANNEL_EXECUTE, COX_WAKEUP_REQUEST_CONSUME, 127),
        "/4242_7_execute_request_consume_127");
    assert_string_equal(
        cox_name_wakeup(buffer, "4242_7", COX_CHANNEL_ERROR, COX_WAKEUP_RESPONSE_PRODUCE, 0),
        "/4242_7_execute_error_response_produce_0");
    assert_string_equal(
        cox_name_wakeup(buffer, "4242_7", COX_CHANNEL_ERROR, COX_WAKEUP_RESPONSE_CONSUME, 0),
        "/4242_7_execute_error_response_consume_0");
}

LEAK_TEST(m7_names_with_a_serial_report_group_and_serial)
{
    struct cox_geometry geometry = {.serial = 0};
    char objects[COX_NAME_SIZE_MAX + 1], name[COX_NAME_SIZE_MAX + 1];
    uint32_t serial = 7;
    assert_string_equal(cox_name_objects(objects, "mine", &geometry), "mine");
    assert_null(cox_name_of_objects(name, objects, &serial));
    geometry.serial = 0xc0ffee;
    assert_string_equal(cox_name_objects(objects, "mine_4", &geometry), "mine_4_00c0ffee");
    assert_string_equal(cox_name_of_objects(name, objects, &serial), "mine_4");
    assert_int_equal(serial, 0xc0ffee);
    static const char *const none[] = {"",
                                       "4242_7",
                                       "_00c0ffee",
                                       "mine_00c0ffe",
                                       "mine_00C0ffee",
                                       "mine-00c0ffee",
                                       "mine_00c0ffee_"};
    for (size_t i = 0; i < sizeof none / sizeof none[0]; i++)
        assert_null(cox_name_of_objects(name, none[i], &serial));
    char longest[COX_NAME_SIZE_MAX - COX_NAME_SERIAL_SIZE + 1];
    memset(longest, 'n', sizeof longest - 1);
    longest[sizeof longest - 1] = '\0';
    assert_int_equal(cox_name_check(cox_name_objects(objects, longest, &geometry), NULL), 0);
    assert_string_equal(cox_name_of_objects(name, objects, &serial), longest);
}

LEAK_TEST(the_longest_name_fits_everywhere)
{
    char name[COX_NAME_SIZE_MAX + 1], buffer[COX_OBJECT_NAME_SIZE];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    assert_int_equal(cox_name_check(name, NULL), 0);
    for (int c = 0; c < COX_CHANNEL_COUNT; c++)
        for (int b = 0; b < COX_WAKEUP_COUNT; b++) {
            cox_name_wakeup(buffer, name, (enum cox_channel_id)c, (enum cox_wakeup)b, 127);
            assert_true(strlen(buffer) + 3 <= NAME_MAX); /* "sem." for the slash */
            assert_string_equal(buffer + strlen(buffer) - 4, "_127");
        }
}

LEAK_TEST(m16_names_are_checked)
{
    static const struct {
        const char *name;
        const char *text;
    } bad[] = {
        {"", "empty"},
        {"a/b", "'/' at position 2"},
        {"/a", "'/' at position 1"},
        {".a", "starts with a dot"},
        {"..", "starts with a dot"},
        {"a b", "' ' at position 2"},
        {"a\nb", "position 2"},
        {"a%sb", "'%' at position 2"},
        {"abc\xc3\xa4", "position 4"},
    };
    static const char *const good[] = {"a", "A.b_c-9", "4242_7", "-", "_", "a.", "0"};
    char name[COX_NAME_SIZE_MAX + 2];
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        assert_refused(cox_name_check(bad[i].name, test_err()), COX_INVALID, bad[i].text);
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++)
        assert_int_equal(cox_name_check(good[i], NULL), 0);
    for (int c = 1; c < 256; c++) {
        const char one[] = {'a', (char)c, '\0'};
        bool allowed = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                       c == '.' || c == '_' || c == '-';
        assert_int_equal(cox_name_check(one, NULL), allowed ? 0 : COX_INVALID);
    }
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    assert_refused(cox_name_check(name, test_err()), COX_INVALID, "129 characters: at most 128");
}
