#include "fault_reports.h"

#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/base/tsan.h"
#include "proto/executor.pb-c.h"
#include "proto/wire.h"

#include <endian.h>
#include <stdio.h>
#include <string.h>

/* A longer report is no report of a legacy rank, whose slot is smaller. */
#define REPORT_SIZE_MAX 4096
#define REPORT_ARENA_SIZE_MAX (1u << 16)

void cox_fault_reports_init(struct cox_fault_reports *reports, struct cox_channel *channel)
{
    *reports = (struct cox_fault_reports){.channel = channel};
    pthread_mutex_init(&reports->lock, NULL);
}

const char *cox_fault_report_text(const Coxswain__ExecuteResponse *report)
{
    if (report->error_text)
        return report->error_text;
    if (report->result_case == COXSWAIN__EXECUTE_RESPONSE__RESULT_EXECUTE_MODEL_RESPONSE &&
        report->execute_model_response && report->execute_model_response->err_msg)
        return report->execute_model_response->err_msg;
    return "a fault without words";
}

bool cox_fault_report_is_of_request(const Coxswain__ExecuteResponse *report)
{
    return report->has_error_sequence && report->has_error_channel &&
           report->error_channel < COX_TWO_WAY_COUNT;
}

static size_t slot_copy(const struct cox_fault_reports *reports, uint8_t *bytes, size_t capacity,
                        size_t *ret_over)
{
    const uint8_t *base = reports->channel->response.base;
    uint32_t prefix;
    memcpy(&prefix, base, sizeof prefix);
    const size_t length = le32toh(prefix);
    *ret_over = length > capacity ? length : 0;
    if (*ret_over)
        return 0;
    memcpy(bytes, base + COX_PREFIX_SIZE, length);
    return length;
}

/* Under the lock: counts the report in the slot, once. One that its rank still writes is counted
 * later. */
static void slot_count(struct cox_fault_reports *reports)
{
    const size_t room = reports->channel->response.size - COX_PREFIX_SIZE;
    uint8_t bytes[REPORT_SIZE_MAX];
    size_t over;
    struct cox_arena arena;
    Coxswain__ExecuteResponse *report;
    const size_t length =
        reports->slot_counted
            ? 0
            : slot_copy(reports, bytes, room < sizeof bytes ? room : sizeof bytes, &over);
    if (length == 0 || cox_arena_init(&arena, 0, REPORT_ARENA_SIZE_MAX))
        return;
    if (cox_wire_response_unpack(&arena, bytes, length, &report) == 0 &&
        !cox_fault_report_is_of_request(report)) {
        reports->slot_counted = true;
        reports->count++;
        snprintf(reports->text, sizeof reports->text, "%.*s", (int)sizeof reports->text - 1,
                 cox_fault_report_text(report));
        cox_text_trim(reports->text);
    }
    cox_arena_deinit(&arena);
}

uint64_t cox_fault_reports_count(struct cox_fault_reports *reports, char *text, size_t text_size)
{
    pthread_mutex_lock(&reports->lock);
    slot_count(reports);
    const uint64_t count = reports->count;
    if (text)
        snprintf(text, text_size, "%s", reports->text);
    pthread_mutex_unlock(&reports->lock);
    return count;
}

size_t cox_fault_reports_take(struct cox_fault_reports *reports, uint8_t *bytes, size_t capacity,
                              size_t *ret_over)
{
    uint8_t *base = reports->channel->response.base;
    /* No state word orders this slot: the token does, here and in the worker. */
    cox_tsan_acquire(base);
    pthread_mutex_lock(&reports->lock);
    slot_count(reports);
    reports->slot_counted = false;
    const size_t length = slot_copy(reports, bytes, capacity, ret_over);
    cox_fault_point(COX_FAULT_REPORT_FETCHED);
    memset(base, 0, COX_PREFIX_SIZE); /* so that the same report is not read twice */
    pthread_mutex_unlock(&reports->lock);
    cox_tsan_release(base);
    return length;
}

void cox_fault_reports_read(struct cox_fault_reports *reports, uint64_t before,
                            const Coxswain__ExecuteResponse *response, char *text, size_t text_size)
{
    if (!response ||
        response->result_case != COXSWAIN__EXECUTE_RESPONSE__RESULT_EXECUTE_MODEL_RESPONSE ||
        cox_fault_reports_count(reports, text, text_size) == before)
        return;
    response->execute_model_response->err_msg = text;
}
