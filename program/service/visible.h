/*
 * visible: texts for a person, in which each character can be seen.
 *
 * Threads: any; stateless.
 * Ownership: see the function.
 * Blocks: nothing.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_PROGRAM_VISIBLE_H
#define COX_PROGRAM_VISIBLE_H

/* A copy, for free, with U+FEFF in place of a control character or an invisible one, and \xc3 in
 * place of a byte that is no UTF-8. Newlines and tabs stay. NULL: no memory. */
char *cox_visible_text(const char *text);

#endif
