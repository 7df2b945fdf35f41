/* token_hash: the "next token" of scripted workers and of the tests that predict it. */
#ifndef COX_TESTS_TOKEN_HASH_H
#define COX_TESTS_TOKEN_HASH_H

#include "channel/base/hash.h"

static inline uint64_t test_token_hash(const int32_t *tokens, size_t count)
{
    return cox_hash_bytes(COX_HASH_START, tokens, count * sizeof *tokens);
}

#endif
