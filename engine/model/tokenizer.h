/*
 * tokenizer: converts text to token ids and back, one token per character.
 *
 * It reads the tokenizer.json of a Hugging Face model folder with a WordLevel vocabulary of single
 * characters and special tokens. Any other kind is refused; prompts are then given as token ids.
 *
 * Threads: any; a tokenizer is immutable.
 * Ownership: the caller frees the results of encode and decode with free.
 * Blocks: only on the files.
 * Codes:
 *   COX_NOT_FOUND: no such file
 *   COX_CORRUPT: not the expected JSON
 *   COX_UNSUPPORTED: another kind of tokenizer
 *   COX_INVALID: text that it cannot encode
 *   COX_TOO_LARGE
 *   -errno
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_ENGINE_TOKENIZER_H
#define COX_ENGINE_TOKENIZER_H

#include "channel/base/idioms.h"

#include <coxswain/base.h>

/* Limit of the end-of-text tokens of one model. */
#define COX_EOS_COUNT_MAX 8

struct cox_tokenizer;

/* Reads folder/tokenizer.json. */
int cox_tokenizer_load(const char *folder, struct cox_tokenizer **ret_tokenizer,
                       struct cox_error *err);
struct cox_tokenizer *cox_tokenizer_free(struct cox_tokenizer *tokenizer); /* NULL-safe */
COX_DEFINE_FREEP(struct cox_tokenizer, cox_tokenizer_free);

/* Encodes text (UTF-8), with <bos> in front if the vocabulary has one. COX_INVALID: err has the
 * character, its position, counted from 1, and the known characters; or there is neither text nor
 * <bos>, so nothing could be computed. */
int cox_tokenizer_encode(const struct cox_tokenizer *tokenizer, const char *text,
                         int32_t **ret_tokens, uint32_t *ret_count, struct cox_error *err);
/* Decodes ids. Special tokens are dropped; an id outside the vocabulary becomes U+FFFD. Returns 0
 * or -ENOMEM. */
int cox_tokenizer_decode(const struct cox_tokenizer *tokenizer, const int32_t *tokens,
                         uint32_t count, char **ret_text);

/* Reads vocab_size of folder/config.json; *ret_size is 0 when it is absent. Returns as
 * cox_eos_load. */
int cox_vocab_size_load(const char *folder, uint32_t *ret_size, struct cox_error *err);
/* The digest of the files of the folder that make tokens of texts, tokenizer.json and config.json;
 * not 0. A file that is not there counts as such. Returns 0 or -errno. */
int cox_text_digest_load(const char *folder, uint64_t *ret_digest, struct cox_error *err);
/* Reads max_position_embeddings of folder/config.json; without it *ret_count stays. Returns as
 * cox_eos_load. */
int cox_positions_load(const char *folder, uint32_t *ret_count, struct cox_error *err);
/* Reads eos_token_id of folder/config.json: a number, a list of at most COX_EOS_COUNT_MAX, or
 * absent (*ret_count is 0). ret_tokens has room for COX_EOS_COUNT_MAX. */
int cox_eos_load(const char *folder, int32_t *ret_tokens, uint32_t *ret_count,
                 struct cox_error *err);

#endif
