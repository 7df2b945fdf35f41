/*
 * named: regions and semaphores with names in /dev/shm, as the design card has them.
 *
 * Every rank writes the same regions: this way is for ranks that trust each other. `legacy` stands
 * on it.
 *
 * Threads, ownership, blocking, and what is left if the process dies: as in attach.h.
 */
#ifndef COX_CHANNEL_ATTACH_NAMED_H
#define COX_CHANNEL_ATTACH_NAMED_H

#include "channel/attach/attach.h"

/* account of struct cox_attach_mode. */
void cox_named_account(const struct cox_geometry *geometry, struct cox_attach_account *ret_account);

#endif
