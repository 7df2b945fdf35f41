/*
 * report: describes a finished request: which ranks replied, are silent since when, are dead, or
 * disagree.
 *
 * Threads: the gathering thread of the collector.
 * Blocks: nothing; reads files of /proc.
 * If the process dies: nothing is left.
 */
#ifndef COX_COORDINATOR_REPORT_H
#define COX_COORDINATOR_REPORT_H

#include "collector.h"

/* How a dead rank ended, and the last lines it wrote. */
void cox_report_death(struct cox_supervisor *supervisor, uint32_t rank, char *buffer,
                      size_t buffer_size);
/* Shortly before late, of a rank that has not replied: reads what holds it, into its text, so that
 * the error need not wait for that. It takes about so long, and more if the rank has many threads.
 */
#define COX_REPORT_LOOK_NS UINT64_C(125000)
void cox_report_look(const struct cox_collector *collector, struct cox_replies *replies,
                     uint32_t rank);
/* Fills taken, silent_ns and text of every rank that has not replied. Reads what holds it, unless a
 * look was just before. */
void cox_report_late(const struct cox_collector *collector, const struct cox_entry *entry,
                     int status, struct cox_replies *replies);
/* Compares the digests of a step's replies. Replies without any are not compared, nor are digests
 * of 0. Returns 0, or COX_DIVERGED: the text of the replies names what differs, the ranks of each
 * side, and the first step that differs; *ret_odd are the ranks that are not on the largest side.
 */
int cox_report_divergence(struct cox_collector *collector, const struct cox_entry *entry,
                          struct cox_replies *replies, struct cox_rank_set *ret_odd);
/* One sentence about the whole request, into the text of the replies. */
void cox_report_failure(const struct cox_collector *collector, const struct cox_entry *entry,
                        int status, struct cox_replies *replies);

#endif
