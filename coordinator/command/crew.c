#include "crew.h"

#include "channel/shm/geometry.h"
#include "channel/base/thread.h"
#include "console.h"
#include "coordinator/server/group_links.h"
#include "engine/batching/lora.h"
#include "coordinator/server/recovery.h"
#include "coordinator/collector/report.h"
#include "engine/batching/scheduler.h"
#include "coordinator/server/service.h"
#include "engine/batching/shared_weights.h"
#include "signals.h"

#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#define INIT_MS_DEFAULT 60000

struct cox_crew {
    struct cox_executor *executor;
    struct cox_init_summary summary;
    struct cox_group_links *links;
    /* NULL: ranks load their own */
    struct cox_shared_weights *weights;
    uint32_t rank_count;
    bool quiet;
    /* whose workers somebody starts by hand; empty: it starts them itself */
    char group[COX_NAME_SIZE_MAX + 1];

    struct cox_signals signals;
    /* before there is a recovery, until after */
    struct cox_lora *lora;

    /* everything below */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    /* NULL: there is none, or start or free is at work on it */
    struct cox_executor *abandonable;
    /* start or free is, which does not take long; what has names is theirs */
    bool making;
    /* NULL: the group has ended */
    struct cox_service *service;
    /* NULL: the group is being started */
    struct cox_recovery *recovery;
    /* deaths before that */
    struct cox_rank_set early;
    void (*on_stop)(void *context);
    void *on_stop_context;
    int signal_number;
    /* or it failed: nothing waits for the workers any more */
    bool initialized;
    bool dead;
    struct cox_error death;
};

/* ---- hooks of the executor ---- */

static void on_line(void *context, uint32_t rank, bool is_stderr, const char *text)
{
    (void)is_stderr;
    const struct cox_crew *crew = context;
    if (!crew->quiet)
        cox_console_line("[rank %u] %s", rank, text);
}

static void on_fault(void *context, int32_t rank, const char *text)
{
    (void)context;
    if (rank < 0)
        cox_console_say("rank unknown reports: %s", text);
    else
        cox_console_say("rank %" PRId32 " reports: %s", rank, text);
}

static void on_death(void *context, uint32_t rank, const char *text)
{
    struct cox_crew *crew = context;
    pthread_mutex_lock(&crew->lock);
    if (crew->recovery) {
        cox_recovery_death(crew->recovery, rank, text);
    } else {
        /* Others may die of the first one's death, before anybody has read of it. */
        if (!crew->death.code)
            cox_fail(&crew->death, COX_PEER_DEAD, "%s", text);
        cox_rank_set_add(&crew->early, rank);
    }
    pthread_mutex_unlock(&crew->lock);
}

static void on_failed(void *context, const struct cox_error *error)
{
    struct cox_crew *crew = context;
    pthread_mutex_lock(&crew->lock);
    crew->death = *error;
    crew->dead = true;
    pthread_cond_broadcast(&crew->wake);
    pthread_mutex_unlock(&crew->lock);
}

/* What was made good is no warning. */
static void on_recovery_log(void *context, int level, const char *text)
{
    const struct cox_crew *crew = context;
    if (level <= 4 || !crew->quiet)
        cox_console_say("%s", text);
}

/* Links that are not told in time are asked for again by who needs them. */
#define RESEND_MS 5000

/* The ranks have their model again; what else they had. */
static int on_replayed(void *context, uint64_t deadline_ns, struct cox_error *err)
{
    struct cox_crew *crew = context;
    int r = cox_lora_replay(crew->lora, deadline_ns, err);
    if (r == 0)
        cox_group_links_resend(crew->links,
                               cox_deadline_min(deadline_ns, cox_deadline_after_ms(RESEND_MS)));
    return r;
}

static void on_log(void *context, int level, const char *text)
{
    (void)context;
    if (level <= 4)
        cox_console_say("%s", text);
}

/* What whoever asks meanwhile wants to know. */
static void on_attaching(void *context, const struct cox_rank_set *missing)
{
    struct cox_crew *crew = context;
    char text[COX_REFUSAL_SIZE], ranks[COX_REFUSAL_SIZE / 2] = "";
    cox_report_append_ranks(ranks, sizeof ranks, missing);
    if (crew->group[0])
        snprintf(
            text, sizeof text,
            "the group waits for its workers, which are started by hand (coxswain-worker --door %s); not here yet: ranks %s (of %" PRIu32
            ")",
            crew->group, ranks, crew->rank_count);
    else
        snprintf(text, sizeof text,
                 "the group is still being started; not attached yet: ranks %s (of %" PRIu32 ")",
                 ranks, crew->rank_count);
    cox_service_refuse(crew->service, text);
}

/* What somebody has to type is said when the door stands, so that it works at once. */
static void on_waiting(void *context, const char *name, const char *door)
{
    struct cox_crew *crew = context;
    (void)door;
    const struct cox_rank_set all = cox_rank_set_first(crew->rank_count);
    snprintf(crew->group, sizeof crew->group, "%s", name);
    on_attaching(crew, &all);
    cox_console_say("waiting for %" PRIu32 " worker%s: coxswain-worker --door %s", crew->rank_count,
                    crew->rank_count == 1 ? "" : "s", name);
}

static bool on_cancelled(void *context)
{
    return cox_crew_signal(context) != 0;
}

struct cox_log cox_crew_log(void)
{
    return (struct cox_log){.fn = on_log};
}

static int on_control(void *context, int fd, struct cox_error *err)
{
    struct cox_crew *crew = context;
    pthread_mutex_lock(&crew->lock);
    int r = crew->service ? cox_service_take(crew->service, fd, err)
                          : cox_fail(err, COX_CLOSED, "the group has ended");
    pthread_mutex_unlock(&crew->lock);
    return r;
}

/* ---- the end is asked for ---- */

/* False: it was asked for before. */
static bool stop_take(struct cox_crew *crew, int number)
{
    pthread_mutex_lock(&crew->lock);
    bool first = !crew->signal_number;
    if (first) {
        crew->signal_number = number;
        if (crew->on_stop)
            crew->on_stop(crew->on_stop_context);
        pthread_cond_broadcast(&crew->wake);
    }
    pthread_mutex_unlock(&crew->lock);
    return first;
}

/* A second one ends this process without waiting for anything, but not without the clean-up: where
 * the main thread is in a start or a free, that is its own, and the end is near. */
static bool on_signal(void *context, int number)
{
    struct cox_crew *crew = context;
    if (stop_take(crew, number))
        return true;
    pthread_mutex_lock(&crew->lock);
    bool making = crew->making;
    if (crew->abandonable)
        cox_executor_abandon(crew->abandonable);
    pthread_mutex_unlock(&crew->lock);
    return making;
}

static void set_making(struct cox_crew *crew, struct cox_executor *abandonable, bool making)
{
    pthread_mutex_lock(&crew->lock);
    crew->abandonable = abandonable;
    crew->making = making;
    pthread_mutex_unlock(&crew->lock);
}

static void on_stop_request(void *context)
{
    stop_take(context, SIGTERM);
}

/* ---- constructor and destructor ---- */

static int service_start(struct cox_crew *crew, const struct cox_crew_options *options,
                         struct cox_error *err)
{
    _cox_cleanup_(cox_free_ptr) char *model =
        options->model ? realpath(options->model, NULL) : NULL;
    const struct cox_service_options service_options = {
        .model = model,
        .stop = on_stop_request,
        .context = crew,
    };
    return cox_service_new(&service_options, &crew->service, err);
}

/* Loading a model takes minutes, and whoever waits for the answers hears of a signal only by the
 * group's end. Not on the thread that takes signals: a second one must find it. */
static void *interrupt_main(void *context)
{
    struct cox_crew *crew = context;
    pthread_mutex_lock(&crew->lock);
    while (!crew->signal_number && !crew->initialized)
        pthread_cond_wait(&crew->wake, &crew->lock);
    bool interrupted = !crew->initialized;
    pthread_mutex_unlock(&crew->lock);
    if (interrupted)
        cox_executor_stop(crew->executor);
    return NULL;
}

static int group_init(struct cox_crew *crew, const struct cox_crew_options *options,
                      struct cox_error *err)
{
    _cox_cleanup_(cox_free_ptr) struct cox_config_entry *config =
        calloc(options->config_count + 1, sizeof *config);
    size_t count = 0;
    uint64_t init_ms =
        options->group->start_timeout_ms ? options->group->start_timeout_ms : INIT_MS_DEFAULT;
    pthread_t interrupt;
    if (!config)
        return cox_fail(err, -ENOMEM, "no memory for the init configuration");
    if (options->model)
        config[count++] = (struct cox_config_entry){"model", options->model};
    for (size_t i = 0; i < options->config_count; i++)
        config[count++] = options->config[i];
    int r = cox_thread_start(&interrupt, interrupt_main, crew);
    if (r)
        return cox_fail(err, r, "starting a thread: %s", cox_status_text(r));
    r = cox_executor_init(crew->executor, config, count, cox_deadline_after_ms(init_ms),
                          &crew->summary, err);
    pthread_mutex_lock(&crew->lock);
    crew->initialized = true;
    pthread_cond_broadcast(&crew->wake);
    pthread_mutex_unlock(&crew->lock);
    pthread_join(interrupt, NULL); /* the executor is this thread's alone again */
    return r;
}

static int recovery_start(struct cox_crew *crew, const struct cox_crew_options *options,
                          struct cox_error *err)
{
    struct cox_recovery_options recovery = options->group->recovery;
    recovery.external = options->external;
    recovery.restart_ms = options->group->start_timeout_ms;
    recovery.log = (struct cox_log){.fn = on_recovery_log, .context = crew};
    recovery.failed = on_failed;
    recovery.replayed = on_replayed;
    recovery.context = crew;
    struct cox_recovery *started;
    int r = cox_lora_new(crew->executor, &recovery.log, &crew->lora);
    if (r)
        return cox_fail(err, r, "no memory for the LoRA adapters");
    r = cox_group_links_new(crew->executor, &recovery.log, &crew->links, err);
    if (!r)
        r = cox_recovery_start(crew->executor, &recovery, &started, err);
    if (r)
        return r;
    pthread_mutex_lock(&crew->lock);
    crew->recovery = started;
    for (uint32_t rank = 0; rank < crew->rank_count; rank++)
        if (cox_rank_set_has(&crew->early, rank))
            cox_recovery_death(started, rank, crew->death.text);
    pthread_mutex_unlock(&crew->lock);
    cox_service_recover_with(crew->service, started);
    cox_service_lora_with(crew->service, crew->lora);
    return 0;
}

/* Where there is no memory that all may use, every rank loads its own, and that is said. What is
 * wrong with the model is wrong for them, too. */
static int weights_or_not(struct cox_crew *crew, int r, const struct cox_error *error,
                          struct cox_error *err)
{
    if (r != COX_DENIED && r != COX_UNSUPPORTED && r != COX_NO_SPACE)
        return r ? cox_fail(err, r, "%s", error->text) : 0;
    cox_console_say("every rank loads its own part of the model: %s", error->text);
    crew->weights = cox_shared_weights_free(crew->weights);
    return 0;
}

/* Legacy workers know nothing of it. */
static int weights_load(struct cox_crew *crew, const struct cox_crew_options *options,
                        struct cox_error *err)
{
    if (!options->share_weights || !options->init || !options->model ||
        options->group->own_weights || options->group->legacy_workers)
        return 0;
    struct cox_error error = {0};
    int r = cox_shared_weights_load(options->model, on_cancelled, crew, &crew->weights, &error);
    return weights_or_not(crew, r, &error, err);
}

static int weights_publish(struct cox_crew *crew, struct cox_error *err)
{
    struct cox_error error = {0};
    int r = crew->weights ? cox_shared_weights_publish(crew->weights, crew->executor, &error) : 0;
    return weights_or_not(crew, r, &error, err);
}

static int group_start(struct cox_crew *crew, const struct cox_crew_options *options,
                       struct cox_error *err)
{
    const struct cox_group_choice *group = options->group;
    struct cox_executor_options executor_options = {
        .size = sizeof(struct cox_executor_options),
        .name = group->name,
        .rank_count = group->rank_count,
        .command = options->command,
        .no_flags = options->no_flags,
        .depth = group->depth,
        .spin = group->spin,
        .legacy_workers = group->legacy_workers,
        .keep_names = group->keep_names,
        .attach = group->attach,
        .huge_pages = group->huge_pages,
        .no_large_payloads = group->no_large_payloads,
        .large_payload_size_max = group->large_payload_size,
        .reply_size_max = group->large_payload_size,
        .external_workers = options->external,
        .need_door = options->need_door,
        .start_timeout_ms = group->start_timeout_ms,
        .log = cox_crew_log(),
        .hook_context = crew,
        .line = on_line,
        .fault = on_fault,
        .death = on_death,
        .waiting = on_waiting,
        .attaching = on_attaching,
        .cancelled = on_cancelled,
        .control = on_control,
    };
    memcpy(executor_options.request_size, group->request_size, sizeof group->request_size);
    memcpy(executor_options.response_size, group->response_size, sizeof group->response_size);
    /* First, since a model that cannot be loaded needs no processes. */
    int r = weights_load(crew, options, err);
    if (!r) {
        set_making(crew, NULL, true);
        r = cox_executor_start(&executor_options, &crew->executor, err);
        set_making(crew, crew->executor, false);
    }
    if (!r)
        r = weights_publish(crew, err);
    if (r)
        return r;
    /* From here on it can be asked how it is, whatever init comes to. */
    cox_service_refuse(crew->service, options->refusal);
    cox_service_attach(crew->service, crew->executor);
    cox_service_weights_with(crew->service, crew->weights);
    r = options->init ? group_init(crew, options, err) : 0;
    return r ? r : recovery_start(crew, options, err);
}

#define FDS_OF_GROUP 29
#define FDS_OF_RANK 3
#define FDS_OF_SEALED_GROUP 21
#define FDS_OF_SEALED_RANK 9

uint64_t cox_crew_fd_count(uint32_t rank_count, bool sealed, bool weights)
{
    return (sealed ? FDS_OF_SEALED_GROUP : FDS_OF_GROUP) +
           (sealed ? FDS_OF_SEALED_RANK : FDS_OF_RANK) * (uint64_t)rank_count +
           (weights ? COX_CREW_FDS_OF_WEIGHTS : 0);
}

/* Where fds are wanting, that is what is told: whatever went wrong first is rarely put in these
 * words, as when a door that cannot accept closes the connection of a rank. */
static int explain_failure(const struct cox_crew_options *options, int r, struct cox_error *err)
{
    const struct cox_group_choice *group = options->group;
    struct rlimit limit;
    uint64_t needed =
        cox_crew_fd_count(group->rank_count, group->attach == COX_ATTACH_SEALED,
                          options->share_weights && !group->own_weights && options->model);
    struct cox_error first = *err;
    if (getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur >= needed) {
        /* Closed is for signals. */
        return r == COX_CLOSED ? err->code = COX_STATE : r;
    }
    *err = (struct cox_error){0};
    return cox_fail(err, r == COX_CLOSED ? -EMFILE : r,
                    "%.700s (this process may have %ju files open, a coordinator of %" PRIu32
                    " ranks needs %" PRIu64 ": ulimit -n %" PRIu64 ")",
                    first.text, (uintmax_t)limit.rlim_cur, group->rank_count, needed, needed);
}

int cox_crew_start(const struct cox_crew_options *options, struct cox_crew **ret_crew,
                   int *ret_signal, struct cox_error *err)
{
    _cox_cleanup_(cox_crew_freep) struct cox_crew *crew = calloc(1, sizeof *crew);
    if (!crew)
        return cox_fail(err, -ENOMEM, "no memory");
    crew->rank_count = options->group->rank_count;
    crew->quiet = options->quiet;
    crew->signals = (struct cox_signals)COX_SIGNALS_NONE;
    pthread_mutex_init(&crew->lock, NULL);
    pthread_cond_init(&crew->wake, NULL);
    int r = cox_signals_start(&crew->signals, on_signal, crew, err);
    cox_console_start(); /* before the group's hooks, which must not wait for whoever reads it */
    if (!r)
        r = service_start(crew, options, err);
    if (!r)
        r = group_start(crew, options, err);
    if (!r && cox_crew_signal(crew))
        r = cox_fail(err, COX_CLOSED, "interrupted");
    if (r) {
        *ret_signal = cox_crew_signal(crew);
        return *ret_signal ? COX_CLOSED : explain_failure(options, r, err);
    }
    *ret_crew = cox_steal_ptr(&crew);
    return 0;
}

/* The door still stands: who comes now is refused. */
static void service_end(struct cox_crew *crew)
{
    pthread_mutex_lock(&crew->lock);
    struct cox_service *service = cox_steal_ptr(&crew->service);
    pthread_mutex_unlock(&crew->lock);
    cox_service_free(service);
}

/* Hooks may still come. */
static void recovery_end(struct cox_crew *crew)
{
    pthread_mutex_lock(&crew->lock);
    struct cox_recovery *recovery = cox_steal_ptr(&crew->recovery);
    pthread_mutex_unlock(&crew->lock);
    cox_recovery_free(recovery);
}

struct cox_crew *cox_crew_free(struct cox_crew *crew)
{
    if (crew) {
        /* Also while it ends, which takes its time when workers are stuck, it is told how they are.
         */
        if (crew->executor)
            cox_executor_stop(crew->executor);
        if (crew->recovery) /* after which no connection waits for it any more */
            cox_recovery_stop(crew->recovery);
        if (crew->lora) /* the same */
            cox_lora_stop(crew->lora);
        if (crew->weights) /* the same */
            cox_shared_weights_stop(crew->weights);
        service_end(crew);
        recovery_end(crew);
        cox_group_links_free(crew->links);
        crew->lora = cox_lora_free(crew->lora);
        set_making(crew, NULL, true);
        crew->executor = cox_executor_free(crew->executor);
        set_making(crew, NULL, false);
        cox_shared_weights_free(crew->weights);
        cox_signals_end(&crew->signals);
        pthread_cond_destroy(&crew->wake);
        pthread_mutex_destroy(&crew->lock);
        free(crew);
    }
    return NULL;
}

void cox_crew_freep(struct cox_crew **crew)
{
    cox_crew_free(*crew);
}

struct cox_service *cox_crew_service(struct cox_crew *crew)
{
    return crew->service;
}

struct cox_executor *cox_crew_executor(struct cox_crew *crew)
{
    return crew->executor;
}

struct cox_recovery *cox_crew_recovery(struct cox_crew *crew)
{
    return crew->recovery;
}

struct cox_lora *cox_crew_lora(struct cox_crew *crew)
{
    return crew->lora;
}

struct cox_group_links *cox_crew_links(struct cox_crew *crew)
{
    return crew->links;
}

static int scheduler_recover(void *context, struct cox_error *err)
{
    return cox_recovery_await(context, err);
}

static void scheduler_recover_cancel(void *context)
{
    cox_recovery_cancel(context);
}

void cox_crew_recovers(struct cox_crew *crew, struct cox_scheduler_options *options)
{
    options->recover = scheduler_recover;
    options->recover_context = crew->recovery;
    options->recover_cancel = scheduler_recover_cancel;
    options->weights = crew->weights;
}

const struct cox_init_summary *cox_crew_summary(const struct cox_crew *crew)
{
    return &crew->summary;
}

/* ---- the end ---- */

void cox_crew_on_stop(struct cox_crew *crew, void (*fn)(void *context), void *context)
{
    pthread_mutex_lock(&crew->lock);
    crew->on_stop = fn;
    crew->on_stop_context = context;
    if (fn && crew->signal_number)
        fn(context);
    pthread_mutex_unlock(&crew->lock);
}

int cox_crew_signal(struct cox_crew *crew)
{
    pthread_mutex_lock(&crew->lock);
    int number = crew->signal_number;
    pthread_mutex_unlock(&crew->lock);
    return number;
}

int cox_crew_wait(struct cox_crew *crew, struct cox_error *err)
{
    pthread_mutex_lock(&crew->lock);
    while (!crew->signal_number && !crew->dead)
        pthread_cond_wait(&crew->wake, &crew->lock);
    int r = crew->signal_number;
    if (!r)
        r = -cox_fail(err, COX_PEER_DEAD, "%s", crew->death.text);
    pthread_mutex_unlock(&crew->lock);
    return r;
}
