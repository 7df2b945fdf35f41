#include "incidents.h"

#include "channel/base/idioms.h"
#include "channel/base/thread.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

int cox_incidents_open(struct cox_incidents *incidents, struct cox_error *err)
{
    incidents->cancel_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (incidents->cancel_fd < 0)
        return cox_fail(err, -errno, "eventfd: %s", cox_status_text(-errno));
    pthread_mutex_init(&incidents->lock, NULL);
    cox_condition_init(&incidents->changed);
    return 0;
}

void cox_incidents_close(struct cox_incidents *incidents)
{
    if (!incidents->targets || incidents->cancel_fd < 0)
        return;
    cox_eventfd_signal(incidents->cancel_fd);
    pthread_mutex_lock(&incidents->lock);
    incidents->stopping = true;
    pthread_cond_broadcast(&incidents->changed);
    pthread_mutex_unlock(&incidents->lock);
    if (incidents->started)
        pthread_join(incidents->thread, NULL);
    incidents->last = cox_stacks_free(incidents->last);
    cox_close_fd(&incidents->cancel_fd);
    pthread_cond_destroy(&incidents->changed);
    pthread_mutex_destroy(&incidents->lock);
}

/* ---- gather ---- */

/* Waits until no other thread gathers. */
static bool gather_enter(struct cox_incidents *incidents, uint64_t deadline_ns)
{
    const struct timespec until = cox_deadline_timespec(deadline_ns);
    pthread_mutex_lock(&incidents->lock);
    while (incidents->gathers &&
           pthread_cond_timedwait(&incidents->changed, &incidents->lock, &until) != ETIMEDOUT)
        continue;
    const bool entered = !incidents->gathers;
    incidents->gathers = true;
    pthread_mutex_unlock(&incidents->lock);
    return entered;
}

static void gather_leave(struct cox_incidents *incidents)
{
    pthread_mutex_lock(&incidents->lock);
    incidents->gathers = false;
    pthread_cond_broadcast(&incidents->changed);
    pthread_mutex_unlock(&incidents->lock);
}

int cox_incidents_gather(struct cox_incidents *incidents, const struct cox_rank_set *asked,
                         uint64_t deadline_ns, struct cox_stacks **ret_stacks)
{
    _cox_cleanup_(cox_free_ptr) struct cox_stacks_target *targets =
        calloc(incidents->rank_count, sizeof *targets);
    if (!targets)
        return -ENOMEM;
    if (!gather_enter(incidents, deadline_ns))
        return COX_TIMEOUT;
    const uint32_t count = incidents->targets(incidents->context, asked, deadline_ns, targets);
    const int r = cox_stacks_gather(targets, count, incidents->cancel_fd, deadline_ns, ret_stacks);
    gather_leave(incidents);
    return r;
}

static void log_lines(const struct cox_log *log, uint32_t rank, const char *text)
{
    while (*text) {
        const size_t length = strcspn(text, "\n");
        cox_log_write(log, 6, "stacks of rank %" PRIu32 ": %.*s", rank, (int)length, text);
        text += length + (text[length] == '\n');
    }
}

/* Where there is no crash directory, the log has all of it, as information. Without the lock, since
 * the host's hook may ask for the status: only the calling thread replaces the stacks. */
static void incident_log(const struct cox_incidents *incidents)
{
    const struct cox_stacks *stacks = incidents->last;
    cox_log_write(incidents->log, 4, "where the ranks stand: %s", stacks->paragraph);
    for (uint32_t i = 0; !incidents->filed && i < stacks->count; i++)
        log_lines(incidents->log, stacks->ranks[i].rank, stacks->ranks[i].text);
}

static void *incidents_main(void *argument)
{
    struct cox_incidents *incidents = argument;
    pthread_setname_np(pthread_self(), "cox-incidents");
    pthread_mutex_lock(&incidents->lock);
    while (!incidents->stopping) {
        if (incidents->untold && incidents->stage == COX_INCIDENT_IDLE && incidents->last) {
            incidents->untold = false;
            pthread_mutex_unlock(&incidents->lock);
            incident_log(incidents);
            pthread_mutex_lock(&incidents->lock);
            continue;
        }
        if (incidents->stage != COX_INCIDENT_ASKED) {
            pthread_cond_wait(&incidents->changed, &incidents->lock);
            continue;
        }
        incidents->stage = COX_INCIDENT_GATHERING;
        pthread_mutex_unlock(&incidents->lock);
        struct cox_stacks *stacks = NULL;
        cox_incidents_gather(incidents, NULL, cox_deadline_after_ms(COX_STACKS_MS), &stacks);
        pthread_mutex_lock(&incidents->lock);
        if (stacks) {
            cox_stacks_free(incidents->last);
            incidents->last = stacks;
            incidents->last_channel = incidents->channel;
            incidents->last_sequence = incidents->sequence;
        }
        incidents->untold &= stacks != NULL;
        incidents->stage = COX_INCIDENT_IDLE;
        pthread_cond_broadcast(&incidents->changed);
    }
    pthread_mutex_unlock(&incidents->lock);
    return NULL;
}

/* ---- incidents ---- */

/* The lock is held. Returns false: too soon after another one. */
static bool incident_begin(struct cox_incidents *incidents, int channel, uint64_t sequence)
{
    const uint64_t now = cox_now_ns();
    if (incidents->off || incidents->stopping || incidents->stage != COX_INCIDENT_IDLE ||
        (incidents->begun_ns &&
         now - incidents->begun_ns < COX_INCIDENT_PAUSE_MS * COX_NSEC_PER_MSEC))
        return false;
    if (!incidents->started)
        incidents->started = cox_thread_start(&incidents->thread, incidents_main, incidents) == 0;
    if (!incidents->started)
        return false;
    incidents->stage = COX_INCIDENT_ASKED;
    incidents->channel = channel;
    incidents->sequence = sequence;
    incidents->begun_ns = now;
    incidents->untold = false;
    pthread_cond_broadcast(&incidents->changed);
    return true;
}

void cox_incidents_suspect(struct cox_incidents *incidents, int channel, uint64_t sequence)
{
    pthread_mutex_lock(&incidents->lock);
    incident_begin(incidents, channel, sequence);
    pthread_mutex_unlock(&incidents->lock);
}

static bool is_last(const struct cox_incidents *incidents, int channel, uint64_t sequence)
{
    return incidents->last && incidents->stage == COX_INCIDENT_IDLE &&
           incidents->last_channel == channel && incidents->last_sequence == sequence;
}

void cox_incidents_failed(struct cox_incidents *incidents, int channel, uint64_t sequence)
{
    pthread_mutex_lock(&incidents->lock);
    if (is_last(incidents, channel, sequence) ||
        (incidents->stage != COX_INCIDENT_IDLE && incidents->channel == channel &&
         incidents->sequence == sequence) ||
        incident_begin(incidents, channel, sequence)) {
        incidents->untold = true;
        pthread_cond_broadcast(&incidents->changed);
    }
    pthread_mutex_unlock(&incidents->lock);
}

void cox_incidents_append(struct cox_incidents *incidents, int channel, uint64_t sequence,
                          char *text, size_t size)
{
    const size_t used = strlen(text);
    pthread_mutex_lock(&incidents->lock);
    if (is_last(incidents, channel, sequence) && used < size) {
        const int length =
            snprintf(text + used, size - used, "; stacks: %s", incidents->last->paragraph);
        if (length >= (int)(size - used))
            cox_text_trim(text);
    }
    pthread_mutex_unlock(&incidents->lock);
}

void cox_incidents_await(struct cox_incidents *incidents, uint64_t deadline_ns)
{
    const struct timespec until = cox_deadline_timespec(deadline_ns);
    pthread_mutex_lock(&incidents->lock);
    while (incidents->stage != COX_INCIDENT_IDLE && !incidents->stopping &&
           pthread_cond_timedwait(&incidents->changed, &incidents->lock, &until) != ETIMEDOUT)
        continue;
    pthread_mutex_unlock(&incidents->lock);
}

void cox_incidents_keep(struct cox_incidents *incidents, struct cox_stacks *stacks)
{
    pthread_mutex_lock(&incidents->lock);
    cox_stacks_free(incidents->last);
    incidents->last = stacks;
    incidents->last_channel = -1;
    pthread_mutex_unlock(&incidents->lock);
}

void cox_incidents_last(struct cox_incidents *incidents,
                        void (*take)(void *context, const struct cox_stacks *stacks), void *context)
{
    pthread_mutex_lock(&incidents->lock);
    take(context, incidents->last);
    pthread_mutex_unlock(&incidents->lock);
}
