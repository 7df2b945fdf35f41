/* A group as Python drives it: a server whose threads leave their news in a list. */
#include "native.h"

#include "channel/base/thread.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* Events that wait for the host, at most. Output beyond it is counted, not kept. */
#define EVENT_COUNT_MAX 65536

struct coxpy_group {
    struct cox_server *server;
    atomic_bool cancelled;
    /* held by the thread that awaits a recovery */
    pthread_mutex_t recovery_lock;
    /* protects what follows */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    struct coxpy_event *first, **last;
    uint32_t event_count;
    int dropped;
    /* threads inside next_event */
    uint32_t fetcher_count;
    bool ended;
    /* start runs on a thread of its own: whatever Python's signal handlers raise, stop and free know
     * of it */
    pthread_t starter;
    bool starting, start_is_over;
    int start_result;
    struct cox_error start_error;
};

static struct coxpy_event *event_new(int kind, int32_t rank, int level, const char *text)
{
    const size_t length = strlen(text) + 1;
    struct coxpy_event *event = malloc(sizeof *event + length);
    if (event) {
        *event = (struct coxpy_event){.kind = kind, .rank = rank, .level = level};
        memcpy(event->text, text, length);
    }
    return event;
}

void coxpy_event_free(struct coxpy_event *event)
{
    free(event);
}

/* On threads of the library. */
static void tell(struct coxpy_group *group, int kind, int32_t rank, int level, const char *text)
{
    pthread_mutex_lock(&group->lock);
    struct coxpy_event *event =
        group->event_count < EVENT_COUNT_MAX ? event_new(kind, rank, level, text) : NULL;
    if (event) {
        *group->last = event;
        group->last = &event->next;
        group->event_count++;
        pthread_cond_broadcast(&group->wake);
    } else {
        group->dropped++;
    }
    pthread_mutex_unlock(&group->lock);
}

struct coxpy_event *coxpy_group_next_event(struct coxpy_group *group)
{
    struct coxpy_event *event = NULL;
    pthread_mutex_lock(&group->lock);
    group->fetcher_count++;
    while (!group->first && !group->ended)
        pthread_cond_wait(&group->wake, &group->lock);
    group->fetcher_count--;
    if (group->ended)
        pthread_cond_broadcast(&group->wake);
    if (group->dropped) {
        event = event_new(COXPY_EVENT_DROPPED, -1, group->dropped, "");
        if (event)
            group->dropped = 0;
    }
    if (!event && group->first) {
        event = group->first;
        group->first = event->next;
        group->event_count--;
        if (!group->first)
            group->last = &group->first;
    }
    pthread_mutex_unlock(&group->lock);
    return event;
}

/* ---- hooks ---- */

static void on_line(void *context, uint32_t rank, bool is_stderr, const char *text)
{
    tell(context, is_stderr ? COXPY_EVENT_ERROR_LINE : COXPY_EVENT_LINE, (int32_t)rank, 0, text);
}

static void on_fault(void *context, int32_t rank, const char *text)
{
    tell(context, COXPY_EVENT_FAULT, rank, 0, text);
}

static void on_death(void *context, uint32_t rank, const char *text)
{
    tell(context, COXPY_EVENT_DEATH, (int32_t)rank, 0, text);
}

static void on_waiting(void *context, const char *name, const char *control_socket)
{
    (void)name;
    tell(context, COXPY_EVENT_WAITING, -1, 0, control_socket);
}

static bool on_cancelled(void *context)
{
    struct coxpy_group *group = context;
    return atomic_load(&group->cancelled);
}

static void on_log(void *context, int level, const char *text)
{
    tell(context, COXPY_EVENT_LOG, -1, level, text);
}

static void on_stop(void *context, const char *text)
{
    tell(context, COXPY_EVENT_STOP, -1, 0, text);
}

/* ---- constructor and destructor ---- */

int coxpy_group_new(const struct cox_executor_options *executor,
                    const struct cox_server_options *server, struct coxpy_group **ret_group,
                    struct cox_error *err)
{
    struct coxpy_group *group = calloc(1, sizeof *group);
    if (!group)
        return cox_fail(err, -ENOMEM, "no memory for the group");
    pthread_mutex_init(&group->recovery_lock, NULL);
    pthread_mutex_init(&group->lock, NULL);
    cox_condition_init(&group->wake);
    group->last = &group->first;
    struct cox_executor_options hooked = *executor;
    struct cox_server_options options = *server;
    hooked.collect = true;
    hooked.hooks.context = group;
    hooked.hooks.line = on_line;
    hooked.hooks.fault = on_fault;
    hooked.hooks.death = on_death;
    hooked.hooks.waiting = on_waiting;
    hooked.hooks.cancelled = on_cancelled;
    hooked.hooks.log = (struct cox_log){on_log, group};
    options.executor = &hooked;
    options.stop_requested = on_stop;
    options.context = group;
    int r = cox_server_new(&options, &group->server, err);
    if (r) {
        coxpy_group_free(group);
        return r;
    }
    *ret_group = group;
    return 0;
}

static void *start_main(void *context)
{
    struct coxpy_group *group = context;
    struct cox_error err = {0};
    int r = cox_server_start(group->server, &err);
    pthread_mutex_lock(&group->lock);
    group->start_result = r;
    group->start_error = err;
    group->start_is_over = true;
    pthread_cond_broadcast(&group->wake);
    pthread_mutex_unlock(&group->lock);
    return NULL;
}

int coxpy_group_start(struct coxpy_group *group, struct cox_error *err)
{
    int r = pthread_create(&group->starter, NULL, start_main, group);
    if (r)
        return cox_fail(err, -r, "starting a thread: %s", cox_status_text(-r));
    group->starting = true;
    return 0;
}

bool coxpy_group_await_start(struct coxpy_group *group, uint64_t deadline_ns, int *ret_result,
                             struct cox_error *err)
{
    const struct timespec until = cox_deadline_timespec(deadline_ns);
    int e = 0;
    pthread_mutex_lock(&group->lock);
    while (!group->start_is_over && e != ETIMEDOUT)
        e = pthread_cond_timedwait(&group->wake, &group->lock, &until);
    const bool is_over = group->start_is_over;
    if (is_over) {
        *ret_result = group->start_result;
        *err = group->start_error;
    }
    pthread_mutex_unlock(&group->lock);
    return is_over;
}

void coxpy_group_stop(struct coxpy_group *group)
{
    if (group->starting) {
        atomic_store(&group->cancelled, true);
        cox_server_request_stop(group->server);
        pthread_join(group->starter, NULL);
        group->starting = false;
    }
    if (group->server)
        cox_server_stop(group->server);
    pthread_mutex_lock(&group->lock);
    group->ended = true;
    pthread_cond_broadcast(&group->wake);
    pthread_mutex_unlock(&group->lock);
}

struct coxpy_group *coxpy_group_free(struct coxpy_group *group)
{
    if (!group)
        return NULL;
    coxpy_group_stop(group);
    pthread_mutex_lock(&group->lock);
    while (group->fetcher_count)
        pthread_cond_wait(&group->wake, &group->lock);
    pthread_mutex_unlock(&group->lock);
    group->server = cox_server_free(group->server);
    while (group->first) {
        struct coxpy_event *event = group->first;
        group->first = event->next;
        free(event);
    }
    pthread_cond_destroy(&group->wake);
    pthread_mutex_destroy(&group->lock);
    pthread_mutex_destroy(&group->recovery_lock);
    free(group);
    return NULL;
}

/* ---- requests ---- */

struct cox_server *coxpy_group_server(struct coxpy_group *group)
{
    return group->server;
}

int coxpy_group_await_recovery(struct coxpy_group *group, uint64_t deadline_ns,
                               struct cox_error *err)
{
    const struct timespec until = cox_deadline_timespec(deadline_ns);
    if (pthread_mutex_clocklock(&group->recovery_lock, CLOCK_MONOTONIC, &until))
        return cox_fail(err, COX_TIMEOUT, "another thread waits for the recovery");
    int r = cox_server_await_recovery(group->server, deadline_ns, err);
    pthread_mutex_unlock(&group->recovery_lock);
    return r;
}

static struct cox_submit_options submit_options(int gather, const struct cox_rank_set *asked,
                                                uint64_t deadline_ns, uintptr_t key)
{
    struct cox_submit_options options = COX_SUBMIT_OPTIONS_INIT;
    options.gather = (enum cox_gather)gather;
    options.asked = asked;
    options.deadline_ns = deadline_ns;
    options.report_late = true;
    options.request_context = (void *)key;
    return options;
}

int coxpy_submit_parts(struct cox_executor *executor, const struct iovec *parts, size_t part_count,
                       int gather, const struct cox_rank_set *asked, uint64_t deadline_ns,
                       uintptr_t key, uint64_t *ret_sequence, struct cox_error *err)
{
    const struct cox_submit_options options = submit_options(gather, asked, deadline_ns, key);
    return cox_executor_submit_parts(executor, parts, part_count, &options, ret_sequence, err);
}

int coxpy_submit(struct cox_executor *executor, const void *bytes, size_t size, int gather,
                 const struct cox_rank_set *asked, uint64_t deadline_ns, uintptr_t key,
                 uint64_t *ret_sequence, struct cox_error *err)
{
    const struct cox_submit_options options = submit_options(gather, asked, deadline_ns, key);
    return cox_executor_submit_opaque(executor, bytes, size, &options, ret_sequence, err);
}
