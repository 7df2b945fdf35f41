/* report: faults that are no reply, at the error channel. */
#include "channel/attach/sealed/sealed.h"
#include "channel/base/base_internal.h"
#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/base/tsan.h"
#include "channel/shm/reply.h"
#include "channel/shm/state.h"
#include "proto/executor.pb-c.h"
#include "proto/utf8.h"
#include "proto/wire.h"
#include "worker_internal.h"

#include <coxswain/worker.h>

#include <stdio.h>
#include <string.h>

static int worker_write_fault(struct cox_worker *worker, int channel, uint64_t sequence,
                              const char *text)
{
    size_t capacity, length;
    uint8_t *base = cox_reply_report(&worker->error_channel, worker->options.rank, &capacity);
    char cut[768];
    snprintf(cut, sizeof cut, "%s", text);
    cox_text_trim(cut);
    cox_utf8_mend(cut);
    /* The text is where legacy coordinators read it. */
    Coxswain__ExecuteModelResponse body = COXSWAIN__EXECUTE_MODEL_RESPONSE__INIT;
    body.err_msg = cut;
    Coxswain__ExecuteResponse report = COXSWAIN__EXECUTE_RESPONSE__INIT;
    COX_SET(&report, msg_type, COXSWAIN__EXECUTE_TYPE__EXECUTE_ERROR);
    COX_SET(&report, rank, (int32_t)worker->options.rank);
    report.has_status = 1;
    report.status = cox_worker_limits(worker)->coordinator_words
                        ? 1
                        : 0; /* a legacy coordinator drops other types */
    report.result_case = COXSWAIN__EXECUTE_RESPONSE__RESULT_EXECUTE_MODEL_RESPONSE;
    report.execute_model_response = &body;
    if (channel >= 0) {
        COX_SET(&report, error_channel, (uint32_t)channel);
        COX_SET(&report, error_sequence, sequence);
    }
    int r;
    /* Halve the text until it fits: a region may be as small as 256 bytes. */
    while ((r = cox_wire_response_pack(&report, base + COX_PREFIX_SIZE, capacity, &length)) ==
               COX_TOO_LARGE &&
           cut[0]) {
        cut[strlen(cut) / 2] = '\0';
        cox_text_trim(cut);
    }
    if (r)
        return r;
    cox_le32_put(base, (uint32_t)length);
    return 0;
}

/* One report at a time from this process, each until its own deadline. */
static int worker_enter_fault(struct cox_worker *worker, uint64_t deadline_ns)
{
    const struct timespec until = cox_deadline_timespec(deadline_ns);
    pthread_mutex_lock(&worker->error_lock);
    while (worker->reporting && !cox_worker_stopping(worker) && cox_now_ns() < deadline_ns)
        pthread_cond_timedwait(&worker->error_cond, &worker->error_lock, &until);
    int r = cox_worker_stopping(worker) ? COX_CLOSED : worker->reporting ? COX_TIMEOUT : 0;
    if (r == 0)
        worker->reporting = true;
    pthread_mutex_unlock(&worker->error_lock);
    return r;
}

static void worker_leave_fault(struct cox_worker *worker)
{
    pthread_mutex_lock(&worker->error_lock);
    worker->reporting = false;
    pthread_cond_broadcast(
        &worker->error_cond); /* a thread that finds the worker leaving does not report */
    pthread_mutex_unlock(&worker->error_lock);
}

/* Named groups have one slot for all ranks, and one token, which is the right to use it. In a
 * sealed group every rank has its own slot, and waits until its last report was copied. */
static int worker_await_report(struct cox_worker *worker, uint64_t deadline_ns)
{
    if (cox_worker_limits(worker)->memory_per_rank)
        return cox_sealed_await_heard(&worker->control, worker->options.rank,
                                      worker->report_count + 1, deadline_ns);
    int r =
        cox_gate_wait(&worker->error_channel.gate, 0, COX_WAKEUP_RESPONSE_PRODUCE, 0, deadline_ns);
    return r == COX_EMPTY ? COX_TIMEOUT : r; /* another rank has the token */
}

/* written: there is a report in the slot. */
static void worker_post_report(struct cox_worker *worker, bool written)
{
    struct cox_gate *gate = &worker->error_channel.gate;
    if (!cox_worker_limits(worker)->memory_per_rank) {
        cox_gate_post(gate, 0, written ? COX_WAKEUP_RESPONSE_CONSUME : COX_WAKEUP_RESPONSE_PRODUCE);
    } else if (written) {
        cox_state_set_done(
            cox_state_line(&worker->control, worker->options.rank, COX_CHANNEL_ERROR),
            ++worker->report_count);
        cox_gate_post(gate, worker->options.rank, COX_WAKEUP_RESPONSE_CONSUME);
    }
}

static int worker_tell(struct cox_worker *worker, int channel, uint64_t sequence, const char *text,
                       uint64_t deadline_ns)
{
    struct cox_layout_rank_line *line =
        cox_state_line(&worker->control, worker->options.rank, COX_CHANNEL_ERROR);
    int r = worker_enter_fault(worker, deadline_ns);
    if (r)
        return r; /* another report of this process waits for the slot */
    /* TAKEN: waits for the slot, REPLYING: has it. Stored before the wait, so that the coordinator
     * searches for the token if this process dies with it; see error_channel.h of the coordinator.
     */
    cox_state_set_rank(line, COX_RANK_TAKEN, sequence, cox_now_ns());
    do { /* at least once, also after the deadline */
        r = cox_worker_stopping(worker)
                ? COX_CLOSED
                : worker_await_report(worker,
                                      cox_deadline_min(deadline_ns, cox_deadline_after_ms(50)));
        /* Another rank may have made the coordinator miss the last wakeup. */
        if (r == COX_TIMEOUT && cox_worker_limits(worker)->memory_per_rank)
            cox_gate_post(&worker->error_channel.gate, worker->options.rank,
                          COX_WAKEUP_RESPONSE_CONSUME);
    } while (r == COX_TIMEOUT && cox_now_ns() < deadline_ns);
    if (r == 0) {
        cox_state_set_rank(line, COX_RANK_REPLYING, sequence, cox_now_ns());
        cox_fault_point(COX_FAULT_REPORT_CLAIMED);
        cox_tsan_acquire(worker->error_channel.response.base); /* see faults_fetch */
        r = worker_write_fault(worker, channel, sequence, text);
        cox_tsan_release(worker->error_channel.response.base);
        cox_fault_point(COX_FAULT_REPORT_WRITTEN);
        worker_post_report(worker, r == 0);
    }
    cox_state_set_rank(line, COX_RANK_IDLE, sequence, cox_now_ns());
    worker_leave_fault(worker);
    return r;
}

int cox_worker_tell(struct cox_worker *worker, int channel, uint64_t sequence, const char *text,
                    uint64_t deadline_ns)
{
    cox_worker_allow_leave(false); /* if the callback were left here, the locks would stay locked */
    /* acq_rel: partner is the acquire in free; a reporter that has left uses nothing any more. */
    atomic_fetch_add_explicit(&worker->reporters, 1, memory_order_acq_rel);
    int r = worker_tell(worker, channel, sequence, text, deadline_ns);
    atomic_fetch_sub_explicit(&worker->reporters, 1, memory_order_acq_rel);
    cox_worker_allow_leave(true);
    return r;
}

int cox_worker_report_fault(struct cox_worker *worker, const char *text, uint64_t deadline_ns)
{
    return cox_worker_tell(worker, -1, 0, text, deadline_ns);
}
