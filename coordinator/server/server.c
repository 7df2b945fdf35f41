#include <coxswain/server.h>

#include "channel/base/idioms.h"
#include "channel/base/options.h"
#include "channel/base/thread.h"
#include "channel/shm/geometry.h"
#include "coordinator/executor/core.h"
#include "coordinator/recovery/recovery.h"
#include "coordinator/stacks/sentence.h"
#include "control_server.h"
#include "group_links.h"
#include "server_internal.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define INIT_MS_DEFAULT 60000
/* How long replaced ranks may take to link again; a pull that needs a link waits longer. */
#define RESEND_MS 5000
/* How long sending the role to the ranks may take. */
#define ROLE_MS 10000

#define NO_PROMPTS "this group has no prompt queue: the program that serves it takes none"
#define NO_LINKS "the program that serves this group makes no links"
#define LEGACY "legacy workers hold and pull nothing"

struct cox_server {
    struct cox_server_options options;
    /* the caller's, whose hooks are called; options point to it */
    struct cox_executor_options given;
    /* with hooks of the server */
    struct cox_executor_options executor_options;
    /* the caller's; their pointers refer to the three below */
    struct cox_server_hooks hooks;
    struct cox_prompt_hooks prompt_hooks;
    struct cox_lora_hooks lora_hooks;
    struct cox_weights_hooks weights_hooks;
    struct cox_executor *executor;
    struct cox_group_links *links;
    struct cox_init_summary summary;
    /* of start's thread */
    struct cox_control_phase phase;
    /* the group whose workers are started by hand; empty: the server starts them */
    char group[COX_NAME_SIZE_MAX + 1];

    /* everything below */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    /* NULL: there is none, or start or free uses it */
    struct cox_executor *abandonable;
    /* start or free creates or removes names */
    bool making;
    /* NULL: the group has ended */
    struct cox_control_server *control;
    /* NULL: the group is being started */
    struct cox_recovery *recovery;
    /* deaths before that */
    struct cox_rank_set early;
    bool stop_requested;
    /* by which process, as a text; "": by this one */
    char stop_text[96];
    /* or it failed: no thread waits for the workers' reply any more */
    bool initialized;
    bool failed;
    /* the first death; once failed, why */
    struct cox_error failure;
};

/* ---- hooks of the executor, whose own go on to the caller ---- */

static void on_line(void *context, uint32_t rank, bool is_stderr, const char *text)
{
    const struct cox_server *server = context;
    server->given.hooks.line(server->given.hooks.context, rank, is_stderr, text);
}

static void on_fault(void *context, int32_t rank, const char *text)
{
    const struct cox_server *server = context;
    server->given.hooks.fault(server->given.hooks.context, rank, text);
}

/* Deaths that do not end the group; its end has its own words. With external workers, recovery
 * logs which one it waits for. No lock is held. */
static void death_log(const struct cox_server *server, uint32_t rank, const char *text)
{
    const enum cox_on_death on_death = server->options.restart.on_death;
    if (cox_executor_taken_over(server->executor, NULL))
        return;
    if (on_death == COX_ON_DEATH_WAIT)
        cox_log_write(&server->options.log, 5,
                      "%s: the group waits for coxswain recover restart --rank %" PRIu32, text,
                      rank);
    else if (on_death != COX_ON_DEATH_FAIL && !server->executor_options.workers.external)
        cox_log_write(&server->options.log, 5, "%s: it is replaced", text);
}

static void on_death(void *context, uint32_t rank, const char *text)
{
    struct cox_server *server = context;
    pthread_mutex_lock(&server->lock);
    const bool serves = server->recovery != NULL;
    if (serves) {
        cox_recovery_death(server->recovery, rank, text);
    } else {
        /* Others may die because of the first death, before the error is read. */
        if (!server->failure.code)
            cox_fail(&server->failure, COX_PEER_DEAD, "%s", text);
        cox_rank_set_add(&server->early, rank);
    }
    pthread_mutex_unlock(&server->lock);
    if (serves)
        death_log(server, rank, text);
    if (server->given.hooks.death)
        server->given.hooks.death(server->given.hooks.context, rank, text);
}

/* Requests are refused with this text until recovery has started. */
static void attaching_tell(struct cox_server *server, const struct cox_rank_set *missing)
{
    const uint32_t rank_count = server->executor_options.rank_count;
    char ranks[COX_REFUSAL_SIZE / 2] = "", of[32] = "";
    cox_sentence_append_set(ranks, sizeof ranks, missing);
    if (rank_count) /* 0: as many as the nodes have */
        snprintf(of, sizeof of, " (of %" PRIu32 ")", rank_count);
    if (server->group[0])
        snprintf(server->phase.refusal, sizeof server->phase.refusal,
                 "the group waits for its workers, which are started by hand (coxswain-worker "
                 "--socket %s); not here yet: ranks %s%s",
                 server->group, ranks, of);
    else
        snprintf(server->phase.refusal, sizeof server->phase.refusal,
                 "the group is still being started; not attached yet: ranks %s%s", ranks, of);
    cox_control_server_update(server->control, &server->phase);
}

static void on_attaching(void *context, const struct cox_rank_set *missing)
{
    struct cox_server *server = context;
    attaching_tell(server, missing);
    if (server->given.hooks.attaching)
        server->given.hooks.attaching(server->given.hooks.context, missing);
}

static void on_waiting(void *context, const char *name, const char *control_socket)
{
    struct cox_server *server = context;
    const struct cox_rank_set all = cox_rank_set_first(server->executor_options.rank_count);
    snprintf(server->group, sizeof server->group, "%s", name);
    attaching_tell(server, &all);
    if (server->given.hooks.waiting)
        server->given.hooks.waiting(server->given.hooks.context, name, control_socket);
}

static bool on_cancelled(void *context)
{
    struct cox_server *server = context;
    pthread_mutex_lock(&server->lock);
    bool cancelled = server->stop_requested;
    pthread_mutex_unlock(&server->lock);
    return cancelled || (server->given.hooks.cancelled &&
                         server->given.hooks.cancelled(server->given.hooks.context));
}

static int on_control(void *context, int fd, struct cox_error *err)
{
    struct cox_server *server = context;
    pthread_mutex_lock(&server->lock);
    int r = server->control ? cox_control_server_take(server->control, fd, err)
                            : cox_fail(err, COX_CLOSED, "the group has ended");
    pthread_mutex_unlock(&server->lock);
    return r;
}

static void on_stop(void *context, pid_t pid)
{
    struct cox_server *server = context;
    char text[sizeof server->stop_text];
    if (pid)
        snprintf(text, sizeof text, "the group was stopped by process %jd (coxswain stop)",
                 (intmax_t)pid);
    else
        snprintf(text, sizeof text, "the group was stopped by coxswain stop");
    pthread_mutex_lock(&server->lock);
    if (!server->stop_requested)
        memcpy(server->stop_text, text, sizeof text);
    pthread_mutex_unlock(&server->lock);
    if (server->options.stop_requested) /* first, so that wait does not return before it */
        server->options.stop_requested(server->options.context, text);
    cox_server_request_stop(server);
}

/* ---- hooks of recovery ---- */

static void on_failed(void *context, const struct cox_error *error)
{
    struct cox_server *server = context;
    pthread_mutex_lock(&server->lock);
    server->failure = *error;
    server->failed = true;
    pthread_cond_broadcast(&server->wake);
    pthread_mutex_unlock(&server->lock);
}

/* The ranks have loaded their model again: the engine restores their other state. */
static int on_replayed(void *context, uint64_t deadline_ns, struct cox_error *err)
{
    struct cox_server *server = context;
    int r = server->hooks.replayed ? server->hooks.replayed(server->hooks.context, deadline_ns, err)
                                   : 0;
    if (r == 0)
        cox_group_links_resend(server->links,
                               cox_deadline_min(deadline_ns, cox_deadline_after_ms(RESEND_MS)));
    return r;
}

/* ---- constructor and destructor ---- */

/* Copies the hooks; an engine built with an older header may have fewer of them. */
static int hooks_copy(struct cox_server *server, const struct cox_server_hooks *hooks,
                      struct cox_error *err)
{
    struct cox_server_hooks *own = &server->hooks;
    int r = cox_options_copy(own, sizeof *own, hooks, "cox_server_hooks", err);
    if (!r && own->prompts)
        r = cox_options_copy(&server->prompt_hooks, sizeof server->prompt_hooks, own->prompts,
                             "cox_prompt_hooks", err);
    if (!r && own->lora)
        r = cox_options_copy(&server->lora_hooks, sizeof server->lora_hooks, own->lora,
                             "cox_lora_hooks", err);
    if (!r && own->weights)
        r = cox_options_copy(&server->weights_hooks, sizeof server->weights_hooks, own->weights,
                             "cox_weights_hooks", err);
    own->prompts = own->prompts ? &server->prompt_hooks : NULL;
    own->lora = own->lora ? &server->lora_hooks : NULL;
    own->weights = own->weights ? &server->weights_hooks : NULL;
    return r;
}

static int complete_check(const struct cox_server_options *options, struct cox_error *err)
{
    if (!options->executor)
        return cox_fail(err, COX_INVALID, "a server needs the options of its executor");
    if (options->executor->hooks.control)
        return cox_fail(err, COX_INVALID, "the control hook of the executor is the server's: NULL");
    if (options->config_count && !options->init)
        return cox_fail(err, COX_INVALID, "an init configuration without init reaches no rank");
    if (options->role && !options->links)
        return cox_fail(err, COX_INVALID, "a role needs links");
    return 0;
}

static struct cox_executor_options executor_options_make(struct cox_server *server)
{
    struct cox_executor_options made = server->given;
    made.hooks.context = server;
    made.hooks.line = made.hooks.line ? on_line : NULL;
    made.hooks.fault = made.hooks.fault ? on_fault : NULL;
    made.hooks.death = on_death;
    made.hooks.waiting = on_waiting;
    made.hooks.attaching = on_attaching;
    made.hooks.cancelled = on_cancelled;
    made.hooks.control = on_control;
    return made;
}

int cox_server_new(const struct cox_server_options *options, struct cox_server **ret_server,
                   struct cox_error *err)
{
    struct cox_server_options known;
    int r = cox_options_copy(&known, sizeof known, options, "cox_server_options", err);
    if (r)
        return r;
    r = complete_check(&known, err);
    if (r)
        return r;
    struct cox_server *server = calloc(1, sizeof *server);
    if (!server)
        return cox_fail(err, -ENOMEM, "no memory for the server");
    pthread_mutex_init(&server->lock, NULL);
    cox_condition_init(&server->wake);
    server->options = known;
    r = cox_options_copy(&server->given, sizeof server->given, known.executor,
                         "cox_executor_options", err);
    if (!r && known.hooks)
        r = hooks_copy(server, known.hooks, err);
    if (!r) {
        server->options.executor = &server->given;
        server->executor_options = executor_options_make(server);
        if (!server->options.log.fn)
            server->options.log = server->given.hooks.log;
        const struct cox_control_options control = {
            .model = server->options.model,
            .hooks = server->hooks,
            .stop = on_stop,
            .context = server,
            .log = server->options.log,
            .process_ends = server->options.process_ends,
        };
        r = cox_control_server_new(&control, &server->control, err);
    }
    if (r) {
        cox_server_free(server);
        return r;
    }
    *ret_server = server;
    return 0;
}

static void set_making(struct cox_server *server, struct cox_executor *abandonable, bool making)
{
    pthread_mutex_lock(&server->lock);
    server->abandonable = abandonable;
    server->making = making;
    pthread_mutex_unlock(&server->lock);
}

/* The socket is still there: a client that connects now is refused. */
static void control_end(struct cox_server *server)
{
    pthread_mutex_lock(&server->lock);
    struct cox_control_server *control = cox_steal_ptr(&server->control);
    pthread_mutex_unlock(&server->lock);
    cox_control_server_free(control);
}

/* The death hook may still be called. */
static void recovery_end(struct cox_server *server)
{
    pthread_mutex_lock(&server->lock);
    struct cox_recovery *recovery = cox_steal_ptr(&server->recovery);
    pthread_mutex_unlock(&server->lock);
    cox_recovery_free(recovery);
}

void cox_server_stop(struct cox_server *server)
{
    /* Status is served while the group ends, which takes time if workers are stuck. */
    if (server->executor)
        cox_executor_stop(server->executor);
    if (server->recovery) /* afterwards no connection waits for it */
        cox_recovery_stop(server->recovery);
    if (server->hooks.ending && server->control) /* the same */
        server->hooks.ending(server->hooks.context);
    control_end(server);
    recovery_end(server);
    server->links = cox_group_links_free(server->links);
    set_making(server, NULL, true);
    server->executor = cox_executor_free(server->executor);
    set_making(server, NULL, false);
}

struct cox_server *cox_server_free(struct cox_server *server)
{
    if (server) {
        cox_server_stop(server);
        pthread_cond_destroy(&server->wake);
        pthread_mutex_destroy(&server->lock);
        free(server);
    }
    return NULL;
}

/* ---- the start ---- */

/* Loading a model takes minutes, and a thread that waits for the replies notices a stop only when
 * the group ends. Not on the thread of request_stop, which never blocks. */
static void *interrupt_main(void *context)
{
    struct cox_server *server = context;
    pthread_mutex_lock(&server->lock);
    while (!server->stop_requested && !server->initialized)
        pthread_cond_wait(&server->wake, &server->lock);
    bool interrupted = !server->initialized;
    pthread_mutex_unlock(&server->lock);
    if (interrupted)
        cox_executor_stop(server->executor);
    return NULL;
}

static int group_init(struct cox_server *server, struct cox_error *err)
{
    const struct cox_server_options *options = &server->options;
    uint64_t init_ms =
        options->init_ms ? options->init_ms : options->executor->times.start_timeout_ms;
    pthread_t interrupt;
    int r = cox_thread_start(&interrupt, interrupt_main, server);
    if (r)
        return cox_fail(err, r, "starting a thread: %s", cox_status_text(r));
    r = cox_executor_init(server->executor, options->config, options->config_count,
                          cox_deadline_after_ms(init_ms ? init_ms : INIT_MS_DEFAULT),
                          &server->summary, err);
    pthread_mutex_lock(&server->lock);
    server->initialized = true;
    pthread_cond_broadcast(&server->wake);
    pthread_mutex_unlock(&server->lock);
    pthread_join(interrupt, NULL); /* only this thread uses the executor again */
    return r;
}

static int recovery_start(struct cox_server *server, struct cox_error *err)
{
    const struct cox_recovery_options options = {
        .policy = server->options.restart,
        .restart_ms = server->executor_options.times.start_timeout_ms,
        .external = server->executor_options.workers.external,
        .log = server->options.log,
        .failed = on_failed,
        .replayed = on_replayed,
        .context = server,
    };
    struct cox_recovery *started;
    int r = cox_group_links_new(server->executor, &server->options.log, &server->links, err);
    if (!r)
        r = cox_recovery_start(server->executor, &options, &started, err);
    if (r)
        return r;
    pthread_mutex_lock(&server->lock);
    server->recovery = started;
    for (uint32_t rank = 0; rank < server->executor_options.rank_count; rank++)
        if (cox_rank_set_has(&server->early, rank))
            cox_recovery_death(started, rank, server->failure.text);
    pthread_mutex_unlock(&server->lock);
    server->phase.recovery = started;
    cox_control_server_update(server->control, &server->phase);
    return 0;
}

/* The engine is ready: prompts and links. */
static int prompts_open(struct cox_server *server, struct cox_error *err)
{
    const bool possible = cox_executor_limits(server->executor)->extensions;
    const bool links = server->options.links && possible;
    int r = 0;
    if (server->options.role && links)
        r = cox_group_links_set_role(server->links, server->options.role,
                                     cox_deadline_after_ms(ROLE_MS), err);
    if (r)
        return r;
    server->phase.links = links ? server->links : NULL;
    server->phase.prompts = server->hooks.prompts != NULL;
    if (server->phase.prompts && !links)
        snprintf(server->phase.refusal, sizeof server->phase.refusal, "%s",
                 possible ? NO_LINKS : LEGACY);
    cox_control_server_update(server->control, &server->phase);
    return 0;
}

/* From here on clients can query the status, whatever the init's result. */
static void status_open(struct cox_server *server)
{
    const char *refusal =
        server->options.prompts_refusal ? server->options.prompts_refusal : NO_PROMPTS;
    server->phase.executor = server->executor;
    snprintf(server->phase.refusal, sizeof server->phase.refusal, "%s",
             server->hooks.prompts ? "" : refusal);
    cox_control_server_update(server->control, &server->phase);
}

int cox_server_start(struct cox_server *server, struct cox_error *err)
{
    const struct cox_server_hooks *hooks = &server->hooks;
    struct cox_executor *executor = NULL;
    set_making(server, NULL, true);
    int r = cox_executor_start(&server->executor_options, &executor, err);
    server->executor = executor;
    set_making(server, executor, false);
    if (!r && hooks->attached)
        r = hooks->attached(hooks->context, executor, err);
    if (r)
        return r;
    status_open(server);
    if (server->options.init)
        r = group_init(server, err);
    if (!r)
        r = recovery_start(server, err);
    if (!r && hooks->ready)
        r = hooks->ready(hooks->context, server, err);
    if (!r)
        r = prompts_open(server, err);
    if (!r && on_cancelled(server))
        r = cox_fail(err, COX_CLOSED, "the group is ending");
    return r;
}

/* ---- the end ---- */

int cox_server_wait(struct cox_server *server, uint64_t deadline_ns, struct cox_error *err)
{
    const struct timespec until = cox_deadline_timespec(deadline_ns);
    int e = 0;
    pthread_mutex_lock(&server->lock);
    while (!server->stop_requested && !server->failed && e != ETIMEDOUT)
        e = deadline_ns == COX_DEADLINE_NEVER
                ? pthread_cond_wait(&server->wake, &server->lock)
                : pthread_cond_timedwait(&server->wake, &server->lock, &until);
    int r = server->stop_requested ? COX_CLOSED : server->failed ? COX_PEER_DEAD : COX_TIMEOUT;
    if (r == COX_PEER_DEAD)
        cox_fail(err, r, "%s", server->failure.text);
    else if (r == COX_CLOSED && server->stop_text[0])
        cox_fail(err, r, "%s", server->stop_text);
    pthread_mutex_unlock(&server->lock);
    return r;
}

void cox_server_request_stop(struct cox_server *server)
{
    pthread_mutex_lock(&server->lock);
    server->stop_requested = true;
    pthread_cond_broadcast(&server->wake);
    pthread_mutex_unlock(&server->lock);
}

int cox_server_abandon(struct cox_server *server)
{
    pthread_mutex_lock(&server->lock);
    bool making = server->making;
    if (server->abandonable)
        cox_executor_abandon(server->abandonable);
    pthread_mutex_unlock(&server->lock);
    return making ? COX_BUSY : 0;
}

struct cox_executor *cox_server_executor(struct cox_server *server)
{
    return server->executor;
}

const struct cox_init_summary *cox_server_init_summary(const struct cox_server *server)
{
    return &server->summary;
}

int cox_server_take_name(struct cox_server *server, const char *name, struct cox_error *err)
{
    return cox_executor_take_name(server->executor, name, err);
}

int cox_server_set_note(struct cox_server *server, const char *note, struct cox_error *err)
{
    pthread_mutex_lock(&server->lock);
    int r = server->control ? cox_control_server_set_note(server->control, note, err)
                            : cox_fail(err, COX_CLOSED, "the group has ended");
    pthread_mutex_unlock(&server->lock);
    return r;
}

int cox_server_await_recovery(struct cox_server *server, uint64_t deadline_ns,
                              struct cox_error *err)
{
    return cox_recovery_await(server->recovery, deadline_ns, err);
}

void cox_server_cancel_recovery(struct cox_server *server)
{
    cox_recovery_cancel(server->recovery);
}

int cox_server_restart(struct cox_server *server, uint32_t rank, bool kill, uint64_t deadline_ns,
                       struct cox_error *err)
{
    bool replaced;
    return cox_recovery_restart(server->recovery, rank, kill, deadline_ns, &replaced, err);
}
