/* wire_memory: what packing and unpacking allocate, and the arena under all of it. */
#include "wire_fixture.h"
#include "tests/lib/allocations.h"

/* ---- sizes ---- */

ARENA_TEST(pack_that_does_not_fit_writes_nothing)
{
    struct cox_arena *arena = *state;
    Request *request = full_request(arena, 3);
    Response *response = full_response(arena, 4);
    size_t request_size = cox_wire_request_size(request);
    size_t response_size = cox_wire_response_size(response);
    size_t size = 12345;
    memset(frame, 0x5a, sizeof frame);
    assert_int_equal(cox_wire_request_pack(request, frame, request_size - 1, &size), COX_TOO_LARGE);
    assert_int_equal(cox_wire_response_pack(response, frame, response_size - 1, &size),
                     COX_TOO_LARGE);
    assert_int_equal(cox_wire_request_pack(request, frame, 0, &size), COX_TOO_LARGE);
    assert_int_equal(size, 12345);
    for (size_t i = 0; i < sizeof frame; i++)
        assert_int_equal(frame[i], 0x5a);

    assert_int_equal(cox_wire_request_pack(request, frame, request_size, &size), 0);
    assert_int_equal(size, request_size);
    assert_int_equal(frame[request_size], 0x5a);
}

/* ---- arena ---- */

PLAIN_TEST(arena_gives_aligned_memory_up_to_its_cap)
{
    struct cox_arena arena;
    assert_int_equal(cox_arena_init(&arena, 100, 10000), 0);
    size_t expected = 0;
    for (size_t size = 0; size < 100; size++) {
        uint8_t *memory = cox_arena_alloc(&arena, size);
        assert_non_null(memory);
        assert_int_equal((uintptr_t)memory % 16, 0);
        memset(memory, 0xff, size);
        expected += size == 0 ? 16 : (size + 15) / 16 * 16;
        assert_int_equal(arena.used, expected);
    }
    assert_false(arena.exhausted);
    assert_null(cox_arena_alloc(&arena, 10000 - arena.used + 1));
    assert_true(arena.exhausted);
    assert_null(cox_arena_alloc(&arena, SIZE_MAX));
    assert_null(cox_arena_alloc(&arena, SIZE_MAX - 14));
    assert_int_equal(arena.used, expected);
    /* What is left can be had to the last byte. */
    assert_non_null(cox_arena_alloc(&arena, 10000 - expected));
    assert_int_equal(arena.used, 10000);
    assert_null(cox_arena_alloc(&arena, 0));
    assert_null(cox_arena_strdup(&arena, ""));

    cox_arena_reset(&arena);
    assert_int_equal(arena.used, 0);
    assert_false(arena.exhausted);
    char *text = cox_arena_strdup(&arena, "text");
    assert_string_equal(text, "text");

    cox_arena_deinit(&arena);
    cox_arena_deinit(&arena);
    assert_null(cox_arena_alloc(&arena, 1));
    cox_arena_reset(&arena);
    cox_arena_deinit(&(struct cox_arena){0});
}

PLAIN_TEST(arena_settles_at_one_block)
{
    struct cox_arena arena;
    assert_int_equal(cox_arena_init(&arena, 64, (size_t)1 << 20), 0);
    for (int round = 0; round < 4; round++) {
        size_t before = allocation_count;
        for (size_t i = 0; i < 1000; i++)
            assert_non_null(cox_arena_alloc(&arena, 1 + i % 300));
        size_t in_use = allocation_count;
        cox_arena_reset(&arena);
        /* Round 0 grows, its reset merges; from then on nothing is asked for. */
        if (round == 0) {
            assert_true(in_use > before);
            assert_int_equal(allocation_count, in_use + 1);
        } else {
            assert_int_equal(allocation_count, before);
        }
    }
    cox_arena_deinit(&arena);
}

ARENA_TEST(steady_state_allocates_nothing)
{
    struct cox_arena *source = *state;
    struct cox_arena arena;
    assert_int_equal(cox_arena_init(&arena, 0, CAP), 0);
    for (unsigned kind = 0; kind < KIND_COUNT; kind++) {
        bool is_request;
        size_t size = pack_kind(source, kind, &is_request);
        cox_arena_reset(source);
        size_t settled = 0;
        for (int round = 0; round < 20; round++) {
            if (round == 2)
                settled = allocation_count;
            ProtobufCMessage *message = NULL;
            size_t packed = 0;
            int r = unpack_any(&arena, is_request, frame, size, &message);
            if (r == 0)
                r = pack_any(message, frame_again, sizeof frame_again, &packed);
            cox_arena_reset(&arena);
            if (r || packed != size)
                fail_msg("kind %u: %s, %zu bytes", kind, cox_status_text(r), packed);
        }
        assert_int_equal(allocation_count, settled);
    }
    cox_arena_deinit(&arena);
}
