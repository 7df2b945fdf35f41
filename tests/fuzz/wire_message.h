/* A message of any bytes: refused, or one that packs and unpacks to the same bytes again. MESSAGE
 * is its type; UNPACK, PACK and SIZE are its functions of proto/wire.h. */
#include "fuzz.h"

#include "proto/executor.pb-c.h"
#include "proto/wire.h"

#define ARENA_SIZE_MAX (64u << 10)

/* The first byte chooses the cap of the arena. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input input = {data, size};
    size_t size_max = ARENA_SIZE_MAX >> fuzz_eat_byte(&input) % 12;
    struct cox_arena arena, again;
    FUZZ_CHECK(cox_arena_init(&arena, 0, size_max) == 0);
    FUZZ_CHECK(cox_arena_init(&again, 0, 4 * ARENA_SIZE_MAX) == 0);
    MESSAGE *message = NULL, *copy = NULL;
    int r = UNPACK(&arena, input.bytes, input.size, &message);
    FUZZ_CHECK(arena.used <= size_max);
    if (r) {
        FUZZ_CHECK((r == COX_CORRUPT || r == COX_TOO_LARGE) && !message);
        cox_arena_deinit(&arena);
        cox_arena_deinit(&again);
        return 0;
    }
    size_t packed_size = SIZE(message), length = SIZE_MAX, repacked = SIZE_MAX;
    uint8_t *packed = malloc(packed_size + 1), *second = malloc(packed_size + 1);
    FUZZ_CHECK(packed && second);
    if (packed_size)
        FUZZ_CHECK(PACK(message, packed, packed_size - 1, &length) == COX_TOO_LARGE &&
                   length == SIZE_MAX);
    FUZZ_CHECK(PACK(message, packed, packed_size, &length) == 0);
    FUZZ_CHECK(length == packed_size);
    r = UNPACK(&again, packed, length, &copy);
    FUZZ_CHECK(r == 0 || (r == COX_CORRUPT && fuzz_has_long_tag_0(input.bytes, input.size)));
    if (r == 0) {
        FUZZ_CHECK(PACK(copy, second, packed_size, &repacked) == 0);
        FUZZ_CHECK(repacked == length && memcmp(packed, second, length) == 0);
    }
    free(packed);
    free(second);
    cox_arena_deinit(&arena);
    cox_arena_deinit(&again);
    return 0;
}
