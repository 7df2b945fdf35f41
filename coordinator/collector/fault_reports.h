/*
 * fault_reports: the slot of the error channel that all ranks share, and what was reported there.
 *
 * A step that failed on a rank of MindIE-LLM looks like one that succeeded: the reply has a token
 * for each sequence, and the failure is a report on the error channel, made before the token of the
 * rank. So collectors of such ranks (cox_collector.reports) ask whether there was a report during a
 * step, and put it into the reply. The error channel takes the reports. Groups whose ranks report
 * in memory of their own have none of this.
 *
 * Threads: any; one lock.
 * Ownership: the channel is borrowed; the object is the caller's.
 * Blocks: nothing.
 * If the rank dies while it writes: the report is counted once it is whole, or never.
 */
#ifndef COX_COORDINATOR_FAULT_REPORTS_H
#define COX_COORDINATOR_FAULT_REPORTS_H

#include "channel/shm/channel.h"

#include <pthread.h>

#define COX_REPORT_TEXT_SIZE 512

struct Coxswain__ExecuteResponse;

/* Zeroed: no channel, no reports. */
struct cox_fault_reports {
    /* borrowed */
    struct cox_channel *channel;
    pthread_mutex_t lock;
    /* under lock: reports that belong to no request, the one in the slot with them if it was
     * counted, and the text of the last one */
    uint64_t count;
    bool slot_counted;
    char text[COX_REPORT_TEXT_SIZE];
};

void cox_fault_reports_init(struct cox_fault_reports *reports, struct cox_channel *channel);
/* Any thread. Returns the number of reports so far that belong to no request, with the one that is
 * in the slot and was not taken yet. text: of the last one, "" for none; NULL: not wanted. */
uint64_t cox_fault_reports_count(struct cox_fault_reports *reports, char *text, size_t text_size);
/* For the error channel, which has the token of the slot: copies the report to bytes, and empties
 * the slot. Returns its length; 0: none, or *ret_over is its length, which is over capacity. */
size_t cox_fault_reports_take(struct cox_fault_reports *reports, uint8_t *bytes, size_t capacity,
                              size_t *ret_over);
/* What it says. */
const char *cox_fault_report_text(const struct Coxswain__ExecuteResponse *report);
/* It is about a request, whose reply has the failure; MindIE-LLM's are not. */
bool cox_fault_report_is_of_request(const struct Coxswain__ExecuteResponse *report);

/* All ranks have replied to a step. If there was a report since there were `before` (count),
 * err_msg of the reply becomes the last one, which is stored in text. response: of rank 0, unpacked
 * by the collector; NULL: none. */
void cox_fault_reports_read(struct cox_fault_reports *reports, uint64_t before,
                            const struct Coxswain__ExecuteResponse *response, char *text,
                            size_t text_size);

#endif
