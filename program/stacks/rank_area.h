/*
 * rank_area: the reader's part of stack_area.h.
 *
 * Threads: one.
 * Ownership: the struct has the fd, the lock and the mapping.
 * Blocks: ask, until its deadline.
 * If the process dies: the lock ends with it; the rank is not affected.
 */
#ifndef COX_PROGRAM_RANK_AREA_H
#define COX_PROGRAM_RANK_AREA_H

#include "channel/stacks/stack_area.h"

#include <sys/types.h>

struct cox_rank_area {
    int fd;
    /* NULL: none */
    struct cox_stack_area *area;
};

/* Returns 0; COX_NOT_FOUND: the process has none; COX_BUSY: another reader has it; COX_CORRUPT;
 * -errno. */
int cox_rank_area_open(struct cox_rank_area *area, pid_t pid);
void cox_rank_area_close(struct cox_rank_area *area); /* idempotent */
/* The thread that a tracer must let run. */
pid_t cox_rank_area_tid(const struct cox_rank_area *area);
/* Asks for what the flags (enum cox_stack_wanted) say, and waits. Only system calls. Returns 0;
 * COX_TIMEOUT. */
int cox_rank_area_ask(struct cox_rank_area *area, uint32_t flags, pid_t tracer,
                      uint64_t deadline_ns);
/* Copies the text into COX_STACK_TEXT_MAX + 1 bytes, with a zero. Returns its length. */
uint32_t cox_rank_area_text(const struct cox_rank_area *area, char *text);

#endif
