/* What the ranks of async_test.c compute: what follows the tokens of a sequence is a digest of them
 * all, read through the KV cache. */
#ifndef COX_TESTS_MULTI_ASYNC_MODEL_H
#define COX_TESTS_MULTI_ASYNC_MODEL_H

#include "proto/wire.h"
#include "tests/lib/token_hash.h"

#define ASYNC_BLOCK_SIZE 4
#define ASYNC_BLOCK_COUNT 256
#define ASYNC_STOP 0
/* Where the cache does not hold what it should: no token of any text. */
#define ASYNC_WRONG 999

static inline int32_t async_model(const int32_t *tokens, uint32_t count)
{
    return (int32_t)(test_token_hash(tokens, count) % 30); /* 0 is ASYNC_STOP */
}

#endif
