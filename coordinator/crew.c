#include "crew.h"

#include "../channel/thread.h"
#include "console.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#define INIT_MS_DEFAULT 60000

struct cox_crew {
    struct cox_executor *executor;
    struct cox_init_summary summary;
    bool quiet;

    sigset_t old_mask;
    int signal_fd;
    int end_fd; /* an eventfd: the signal thread leaves */
    pthread_t thread;
    bool thread_started;

    pthread_mutex_t lock; /* everything below */
    pthread_cond_t wake;
    void (*on_stop)(void *context);
    void *on_stop_context;
    int signal_number;
    bool initialized; /* or it failed: nothing waits for the workers any more */
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

static void on_fault(void *context, uint32_t rank, const char *text)
{
    (void)context;
    cox_console_say("rank %u reports: %s", rank, text);
}

static void on_death(void *context, uint32_t rank, const char *text)
{
    (void)rank;
    struct cox_crew *crew = context;
    pthread_mutex_lock(&crew->lock);
    cox_fail(&crew->death, COX_PEER_DEAD, "%s", text);
    crew->dead = true;
    pthread_cond_broadcast(&crew->wake);
    pthread_mutex_unlock(&crew->lock);
}

static void on_log(void *context, int level, const char *text)
{
    (void)context;
    if (level <= 4)
        cox_console_say("%s", text);
}

static bool on_cancelled(void *context)
{
    return cox_crew_signal(context) != 0;
}

struct cox_log cox_crew_log(void)
{
    return (struct cox_log){.fn = on_log};
}

/* ---- signals ---- */

/* The second signal: as if nobody had ever blocked it. */
static void die_of(int number)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, number);
    signal(number, SIG_DFL);
    raise(number); /* pending, for this thread */
    pthread_sigmask(SIG_UNBLOCK, &set, NULL);
    _exit(128 + number);
}

static void signal_take(struct cox_crew *crew, int number)
{
    pthread_mutex_lock(&crew->lock);
    if (crew->signal_number)
        die_of(number);
    crew->signal_number = number;
    if (crew->on_stop)
        crew->on_stop(crew->on_stop_context);
    pthread_cond_broadcast(&crew->wake);
    pthread_mutex_unlock(&crew->lock);
}

static void *signal_main(void *context)
{
    struct cox_crew *crew = context;
    struct pollfd fds[2] = {
        {.fd = crew->signal_fd, .events = POLLIN},
        {.fd = crew->end_fd, .events = POLLIN},
    };
    for (;;) {
        if (poll(fds, 2, -1) < 0 && errno != EINTR)
            return NULL;
        if (fds[1].revents)
            return NULL;
        struct signalfd_siginfo info;
        if (fds[0].revents && read(crew->signal_fd, &info, sizeof info) == sizeof info)
            signal_take(crew, (int)info.ssi_signo);
    }
}

static int signals_start(struct cox_crew *crew, struct cox_error *err)
{
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP};
    sigset_t set;
    sigemptyset(&set);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        struct sigaction action;
        /* What was ignored at the start (nohup; a shell's background job) stays so; a signalfd would
         * get it all the same. */
        if (sigaction(numbers[i], NULL, &action) == 0 && action.sa_handler != SIG_IGN)
            sigaddset(&set, numbers[i]);
    }
    /* Before any thread is made: all of them inherit it. */
    int r = -pthread_sigmask(SIG_BLOCK, &set, &crew->old_mask);
    if (!r && (crew->signal_fd = signalfd(-1, &set, SFD_CLOEXEC)) < 0)
        r = -errno;
    if (!r && (crew->end_fd = eventfd(0, EFD_CLOEXEC)) < 0)
        r = -errno;
    if (!r)
        r = -pthread_create(&crew->thread, NULL, signal_main, crew);
    if (r)
        return cox_fail(err, r, "cannot take signals: %s", cox_status_text(r));
    crew->thread_started = true;
    return 0;
}

static void signals_end(struct cox_crew *crew)
{
    if (crew->thread_started) {
        const uint64_t one = 1;
        while (write(crew->end_fd, &one, sizeof one) < 0 && errno == EINTR)
            ;
        pthread_join(crew->thread, NULL);
    }
    cox_close_fd(&crew->signal_fd);
    cox_close_fd(&crew->end_fd);
}

/* ---- constructor and destructor ---- */

/* Loading a model takes minutes, and whoever waits for the answers hears of a signal only by the group's
 * end. Not on the thread that takes signals: a second one must find it. */
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
    const struct cox_config_entry config[] = {{"model", options->model}};
    uint64_t init_ms =
        options->group->start_timeout_ms ? options->group->start_timeout_ms : INIT_MS_DEFAULT;
    pthread_t interrupt;
    int r = cox_thread_start(&interrupt, interrupt_main, crew);
    if (r)
        return cox_fail(err, r, "starting a thread: %s", cox_status_text(r));
    r = cox_executor_init(crew->executor, config, options->model ? 1 : 0,
                          cox_deadline_after_ms(init_ms), &crew->summary, err);
    pthread_mutex_lock(&crew->lock);
    crew->initialized = true;
    pthread_cond_broadcast(&crew->wake);
    pthread_mutex_unlock(&crew->lock);
    pthread_join(interrupt, NULL); /* the executor is this thread's alone again */
    return r;
}

static int group_start(struct cox_crew *crew, const struct cox_crew_options *options,
                       struct cox_error *err)
{
    const struct cox_group_options *group = options->group;
    struct cox_executor_options executor_options = {
        .name = group->name,
        .rank_count = group->rank_count,
        .command = options->command,
        .no_flags = options->no_flags,
        .depth = group->depth,
        .legacy_workers = group->legacy_workers,
        .keep_names = group->keep_names,
        .attach = group->attach,
        .huge_pages = group->huge_pages,
        .external_workers = options->external,
        .need_door = options->need_door,
        .start_timeout_ms = group->start_timeout_ms,
        .log = cox_crew_log(),
        .hook_context = crew,
        .line = on_line,
        .fault = on_fault,
        .death = on_death,
        .cancelled = on_cancelled,
    };
    memcpy(executor_options.request_size, group->request_size, sizeof group->request_size);
    memcpy(executor_options.response_size, group->response_size, sizeof group->response_size);
    int r = cox_executor_start(&executor_options, &crew->executor, err);
    return r || !options->init ? r : group_init(crew, options, err);
}

int cox_crew_start(const struct cox_crew_options *options, struct cox_crew **ret_crew,
                   int *ret_signal, struct cox_error *err)
{
    _cox_cleanup_(cox_crew_freep) struct cox_crew *crew = calloc(1, sizeof *crew);
    if (!crew)
        return cox_fail(err, -ENOMEM, "no memory");
    crew->quiet = options->quiet;
    crew->signal_fd = crew->end_fd = -1;
    pthread_mutex_init(&crew->lock, NULL);
    pthread_cond_init(&crew->wake, NULL);
    int r = signals_start(crew, err);
    cox_console_start(); /* before the group's hooks, which must not wait for whoever reads it */
    if (!r)
        r = group_start(crew, options, err);
    if (!r && cox_crew_signal(crew))
        r = cox_fail(err, COX_CLOSED, "interrupted");
    if (r) {
        *ret_signal = cox_crew_signal(crew);
        return *ret_signal ? COX_CLOSED : r;
    }
    *ret_crew = cox_steal_ptr(&crew);
    return 0;
}

struct cox_crew *cox_crew_free(struct cox_crew *crew)
{
    if (crew) {
        crew->executor = cox_executor_free(crew->executor);
        signals_end(crew);
        pthread_sigmask(SIG_SETMASK, &crew->old_mask, NULL);
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

struct cox_executor *cox_crew_executor(struct cox_crew *crew)
{
    return crew->executor;
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
