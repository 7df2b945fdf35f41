#include "watchdog.h"

#include "channel/base/idioms.h"
#include "channel/base/thread.h"
#include "program/client/client.h"
#include "proto/control.pb-c.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TEXT_SIZE 256

struct cox_watchdog {
    const struct cox_notify *notify;
    const struct cox_log *log;
    char *control_socket;
    uint64_t period_ns;
    pthread_t thread;
    pthread_mutex_t lock;
    /* on CLOCK_MONOTONIC */
    pthread_cond_t ended;
    /* under the lock */
    bool end;
    /* the thread's own */
    bool was_fed;
};

typedef CoxswainControl__StatusReply status_reply;

/* True: the group answers, and text says what it does. Otherwise text says why not. */
static bool status_judge(const status_reply *status, char text[TEXT_SIZE])
{
    for (size_t i = 0; i < status->n_ranks; i++)
        if (status->ranks[i]->stopped) {
            snprintf(text, TEXT_SIZE, "rank %" PRIu32 " (pid %" PRId64 ") is stopped by a signal",
                     status->ranks[i]->rank, status->ranks[i]->pid);
            return false;
        }
    for (size_t i = 0; i < status->n_channels; i++)
        if (status->channels[i]->n_late_ranks) {
            snprintf(text, TEXT_SIZE, "rank %" PRIu32 " is late on channel %.32s",
                     status->channels[i]->late_ranks[0],
                     status->channels[i]->name ? status->channels[i]->name : "?");
            return false;
        }
    int size =
        snprintf(text, TEXT_SIZE, "%" PRIu32 " ranks, %" PRIu64 " deaths, %" PRIu64 " restarts",
                 status->rank_count, status->deaths, status->restarts);
    if (status->serving)
        snprintf(text + size, TEXT_SIZE - (size_t)size,
                 "; %" PRIu64 " prompts running, %" PRIu64 " completed", status->serving->running,
                 status->serving->completed);
    return true;
}

static bool answers(const struct cox_watchdog *watchdog, char text[TEXT_SIZE])
{
    _cox_cleanup_(cox_client_close) struct cox_client client = COX_CLIENT_NONE;
    uint64_t deadline_ns = cox_now_ns() + watchdog->period_ns;
    struct cox_error error = {0};
    status_reply *status;
    int r = cox_client_open_path(&client, watchdog->control_socket, deadline_ns, &error);
    if (!r)
        r = cox_client_status(&client, deadline_ns, &status, &error);
    if (!r)
        return status_judge(status, text);
    cox_client_clean_text(error.text);
    snprintf(text, TEXT_SIZE, "%.200s", error.text);
    cox_text_trim(text);
    return false;
}

static void feed(struct cox_watchdog *watchdog)
{
    char text[TEXT_SIZE];
    bool fed = answers(watchdog, text);
    cox_notify_send(watchdog->notify, "%sSTATUS=%s", fed ? "WATCHDOG=1\n" : "", text);
    if (fed != watchdog->was_fed)
        cox_log_write(watchdog->log, fed ? 5 : 4, "the watchdog is %s: %s",
                      fed ? "fed again" : "not fed", text);
    watchdog->was_fed = fed;
}

static void *watchdog_main(void *argument)
{
    struct cox_watchdog *watchdog = argument;
    pthread_mutex_lock(&watchdog->lock);
    while (!watchdog->end) {
        pthread_mutex_unlock(&watchdog->lock);
        feed(watchdog);
        const struct timespec next = cox_deadline_timespec(cox_now_ns() + watchdog->period_ns);
        pthread_mutex_lock(&watchdog->lock);
        while (!watchdog->end &&
               pthread_cond_timedwait(&watchdog->ended, &watchdog->lock, &next) != ETIMEDOUT)
            continue;
    }
    pthread_mutex_unlock(&watchdog->lock);
    return NULL;
}

int cox_watchdog_start(const struct cox_notify *notify, const char *control_socket,
                       const struct cox_log *log, struct cox_watchdog **ret_watchdog,
                       struct cox_error *err)
{
    *ret_watchdog = NULL;
    if (!notify->watchdog_ns || !control_socket)
        return 0;
    struct cox_watchdog *watchdog = calloc(1, sizeof *watchdog);
    char *path = strdup(control_socket);
    if (!watchdog || !path) {
        free(watchdog);
        free(path);
        return cox_fail(err, -ENOMEM, "no memory");
    }
    *watchdog = (struct cox_watchdog){.notify = notify,
                                      .log = log,
                                      .control_socket = path,
                                      .period_ns = notify->watchdog_ns / 3,
                                      .was_fed = true};
    pthread_mutex_init(&watchdog->lock, NULL);
    cox_condition_init(&watchdog->ended);
    int r = cox_thread_start(&watchdog->thread, watchdog_main, watchdog);
    if (r) {
        pthread_cond_destroy(&watchdog->ended);
        pthread_mutex_destroy(&watchdog->lock);
        free(watchdog);
        free(path);
        return cox_fail(err, r, "no thread for the watchdog: %s", cox_status_text(r));
    }
    *ret_watchdog = watchdog;
    return 0;
}

struct cox_watchdog *cox_watchdog_free(struct cox_watchdog *watchdog)
{
    if (watchdog) {
        pthread_mutex_lock(&watchdog->lock);
        watchdog->end = true;
        pthread_cond_signal(&watchdog->ended);
        pthread_mutex_unlock(&watchdog->lock);
        pthread_join(watchdog->thread, NULL);
        pthread_cond_destroy(&watchdog->ended);
        pthread_mutex_destroy(&watchdog->lock);
        free(watchdog->control_socket);
        free(watchdog);
    }
    return NULL;
}
