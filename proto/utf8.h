/*
 * utf8: strings of messages are UTF-8, which protobuf-c does not check; a reader in another
 * language refuses the whole message, or dies of it.
 *
 * Threads: any; stateless.
 * Ownership: texts are the caller's.
 * Blocks: nothing.
 * If the process dies: nothing is left.
 */
#ifndef COX_PROTO_UTF8_H
#define COX_PROTO_UTF8_H

#include <coxswain/base.h>

struct Coxswain__ExecuteRequest;

/* The first byte that is no part of a character (overlong forms, surrogates and codes above
 * U+10FFFF are none); NULL: text is UTF-8. */
const char *cox_utf8_find_bad(const char *text);
/* Puts '?' in place of each byte that is no part of a character. */
void cox_utf8_mend(char *text);
/* Every string field of the request, whatever it is nested in. Returns 0, or COX_INVALID: err
 * names the field by its path, and the byte with its offset. */
int cox_utf8_check_request(const struct Coxswain__ExecuteRequest *request, struct cox_error *err);

#endif
