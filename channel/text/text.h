/*
 * text: texts of other processes, which go to logs and terminals: UTF-8, and what of it a terminal
 * obeys or a reader cannot see.
 *
 * Threads: any; stateless.
 * Ownership: texts are the caller's.
 * Blocks: nothing.
 * If the process dies: nothing is left.
 */
#ifndef COX_CHANNEL_TEXT_H
#define COX_CHANNEL_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes of the character at text, whose code it gives; 0: the byte is no part of one (overlong
 * forms, surrogates and codes above U+10FFFF are none). The terminating 0 is a character. */
size_t cox_text_character(const char *text, uint32_t *ret_code);
/* Whether it moves a cursor, begins a line, or turns the direction of what follows: not only C0 and
 * C1, but also U+2028, U+2029 and the bidirectional controls. Tab is one. */
bool cox_text_is_control(uint32_t code);
/* The first byte that is no part of a character, or that begins a control character; NULL: none. */
const char *cox_text_find_control(const char *text);
/* Escapes control characters as JSON does, in every log: no text begins a line of its own, or moves
 * a terminal's cursor. Bytes that are no UTF-8 become U+FFFD. tabs: they stay. quotes: also " and
 * \. The caller frees it; NULL: no memory. */
char *cox_text_escape(const char *text, bool tabs, bool quotes);

#endif
