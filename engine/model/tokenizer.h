/*
 * tokenizer: text to token ids and back, one character a token.
 *
 * Reads the tokenizer.json of a Hugging Face model folder whose model is a WordLevel vocabulary of
 * single characters and special tokens. Any other kind is refused: ids are then made elsewhere.
 *
 * Threads: any, a tokenizer does not change once it is made.
 * Blocks: only on the files.
 * Ownership: what encode and decode give is the caller's, to be freed with free().
 * Codes: COX_NOT_FOUND no such file; COX_CORRUPT not the JSON it should be; COX_UNSUPPORTED another
 *   kind of tokenizer; COX_INVALID text it cannot encode; COX_TOO_LARGE; negative errno.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_COORDINATOR_TOKENIZER_H
#define COX_COORDINATOR_TOKENIZER_H

#include "channel/base/base.h"

/* End-of-text tokens of one model, at most. */
#define COX_EOS_COUNT_MAX 8

struct cox_tokenizer;

/* Reads folder/tokenizer.json. */
int cox_tokenizer_load(const char *folder, struct cox_tokenizer **ret_tokenizer,
                       struct cox_error *err);
struct cox_tokenizer *cox_tokenizer_free(struct cox_tokenizer *tokenizer); /* NULL-safe */
void cox_tokenizer_freep(struct cox_tokenizer **tokenizer);                /* for _cox_cleanup_ */

/* Gives the ids of text (UTF-8), with <bos> in front when the vocabulary has one. COX_INVALID: err
 * names the character, its position, counted from 1, and what the model knows; or nothing would be
 * left to compute (no text and no <bos>). */
int cox_tokenizer_encode(const struct cox_tokenizer *tokenizer, const char *text,
                         int32_t **ret_tokens, uint32_t *ret_count, struct cox_error *err);
/* Gives the text of ids. Special tokens are dropped; an id outside the vocabulary becomes U+FFFD.
 * Returns 0 or -ENOMEM. */
int cox_tokenizer_decode(const struct cox_tokenizer *tokenizer, const int32_t *tokens,
                         uint32_t count, char **ret_text);

/* Reads vocab_size of folder/config.json; *ret_size is 0 when it is absent. Returns 0; what
 * eos_load returns. */
int cox_vocab_size_load(const char *folder, uint32_t *ret_size, struct cox_error *err);
/* Reads eos_token_id of folder/config.json: a number, a list of at most COX_EOS_COUNT_MAX, or
 * absent
 * (*ret_count is 0). ret_tokens has room for COX_EOS_COUNT_MAX. */
int cox_eos_load(const char *folder, int32_t *ret_tokens, uint32_t *ret_count,
                 struct cox_error *err);

#endif
