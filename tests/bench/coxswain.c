#include "coxswain.h"

#include <errno.h>
#include <poll.h>
#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "allocations.h"
#include "group.h"
#include "load.h"
#include "subject.h"

#define ROUND_DEADLINE_MS 60000
#define IN_FLIGHT_MAX 8
#define CALLERS_MAX 64

/* A reply with room behind what is checked says how much its worker has allocated. */
#define COUNTED_REPLY_SIZE (LOAD_SIZE_MIN + sizeof(uint64_t))

static struct group_flavour flavour;

struct coxswain {
    struct cox_executor *executor;
    struct subject_options options;
    /* numbers requests through all slices */
    uint64_t rounds;

    /* The slice that runs. Written by the thread that submits: first the caller's, then the
     * response thread. */
    uint8_t *request;
    uint64_t *samples_ns;
    size_t sample_count;
    size_t submitted;
    size_t sampled;
    /* when the last sample was taken */
    uint64_t sampled_ns;
    int failure;
    struct cox_error *err;
    sem_t ended;

    /* What was allocated when the slice began, by us, and when it had its first and last answers,
     * by all workers. */
    uint64_t own_allocations, first_allocations, last_allocations;
};

/* ---- workers ---- */

struct worker_context {
    struct load load;
    uint32_t rank;
};

static int worker_opaque(void *context, const uint8_t *request, size_t request_size, uint8_t *reply,
                         size_t reply_capacity, size_t *ret_reply_size, struct cox_error *err)
{
    struct worker_context *own = context;
    if (request_size != own->load.request_size || reply_capacity < own->load.reply_size)
        return cox_fail(err, COX_INVALID, "a request of %zu bytes, expected %zu", request_size,
                        own->load.request_size);
    load_answer(&own->load, request, own->rank, reply);
    if (own->load.reply_size >= COUNTED_REPLY_SIZE) {
        const uint64_t count = allocations_now();
        memcpy(reply + LOAD_SIZE_MIN, &count, sizeof count);
    }
    *ret_reply_size = own->load.reply_size;
    return 0;
}

static int worker_parse(void *context, uint32_t rank, int argc, char **argv)
{
    struct worker_context *own = context;
    own->rank = rank;
    return argc == 3 ? load_init(&own->load, strtoul(argv[1], NULL, 10), strtoul(argv[2], NULL, 10))
                     : COX_INVALID;
}

int coxswain_worker_main(int argc, char **argv)
{
    static const struct cox_worker_callbacks callbacks = {
        .size = sizeof(struct cox_worker_callbacks), .opaque = worker_opaque};
    struct worker_context own = {0};
    return group_worker_main(argc, argv, &callbacks, worker_parse, &own, NULL);
}

/* ---- rounds ---- */

static int check_completion(const struct cox_completion *completion, uint64_t round,
                            struct cox_error *err)
{
    if (completion->status)
        return cox_fail(err, completion->status, "%s", completion->text);
    for (uint32_t rank = 0; rank < completion->rank_count; rank++)
        if (completion->ranks[rank].size < LOAD_SIZE_MIN ||
            !load_matches(completion->ranks[rank].bytes, rank, round))
            return cox_fail(err, -EBADMSG, "rank %" PRIu32 " answered something else", rank);
    return 0;
}

static void count_allocations(struct coxswain *c, const struct cox_completion *completion)
{
    uint64_t total = 0;
    for (uint32_t rank = 0; rank < completion->rank_count; rank++) {
        uint64_t count = 0;
        if (completion->ranks[rank].size >= COUNTED_REPLY_SIZE)
            memcpy(&count, (const uint8_t *)completion->ranks[rank].bytes + LOAD_SIZE_MIN,
                   sizeof count);
        total += count;
    }
    if (c->sampled == 0)
        c->first_allocations = total;
    c->last_allocations = total;
}

static struct cox_submit_options options_now(uint64_t now_ns, uint64_t round)
{
    return (struct cox_submit_options){
        .size = sizeof(struct cox_submit_options),
        .gather = COX_GATHER_ALL,
        .deadline_ns = now_ns + ROUND_DEADLINE_MS * COX_NSEC_PER_MSEC,
        .request_context = (void *)(uintptr_t)round,
    };
}

static int submit_next(struct coxswain *c)
{
    load_number(c->request, ++c->rounds);
    const uint64_t now_ns = cox_now_ns();
    if (flavour.in_flight == 1)
        c->sampled_ns = now_ns;
    const struct cox_submit_options options = options_now(now_ns, c->rounds);
    c->submitted++;
    return cox_executor_submit_opaque(c->executor, c->request, c->options.request_size, &options,
                                      NULL, c->err);
}

static void on_completion(void *context, const struct cox_completion *completion)
{
    const uint64_t now_ns = cox_now_ns();
    struct coxswain *c = context;
    if (c->failure)
        return;
    count_allocations(c, completion);
    c->samples_ns[c->sampled++] = now_ns - c->sampled_ns;
    c->sampled_ns = now_ns;
    c->failure =
        check_completion(completion, (uint64_t)(uintptr_t)completion->request_context, c->err);
    const bool by_hand_off = flavour.by == GROUP_BY_HAND_OFF;
    if (c->failure == 0 && c->submitted < c->sample_count && !by_hand_off)
        c->failure = submit_next(c);
    if (c->failure || c->sampled == c->sample_count || by_hand_off)
        sem_post(&c->ended);
}

/* The handler may run before the last of the first submits has returned, and submit as well: so the
 * first ones are counted before any is made. */
static int run_submit(struct coxswain *c, size_t count)
{
    size_t first = flavour.in_flight < count ? flavour.in_flight : count;
    struct cox_error err = {0};
    int r = 0;
    c->sampled_ns = cox_now_ns();
    if (first == 1) {
        r = submit_next(c);
    } else {
        const uint64_t base = c->rounds;
        c->submitted = first;
        c->rounds += first;
        uint8_t *request = malloc(c->options.request_size); /* the handler numbers the other one */
        if (!request)
            return cox_fail(c->err, -ENOMEM, "no memory for a request");
        memcpy(request, c->request, c->options.request_size);
        for (size_t i = 1; r == 0 && i <= first; i++) {
            load_number(request, base + i);
            const struct cox_submit_options options = options_now(cox_now_ns(), base + i);
            do
                r = cox_executor_submit_opaque(c->executor, request, c->options.request_size,
                                               &options, NULL, &err);
            while (r == COX_FULL); /* the handler was faster and took the place */
        }
        free(request);
    }
    if (r)
        return cox_fail(c->err, r, "%s", err.text);
    group_sem_wait(&c->ended);
    return c->failure;
}

/* A sample ends in our thread, where a caller's ends. */
static int run_hand_offs(struct coxswain *c, size_t count)
{
    int r = 0;
    for (size_t i = 0; r == 0 && i < count; i++) {
        const uint64_t begin_ns = cox_now_ns();
        r = submit_next(c);
        if (r)
            break;
        group_sem_wait(&c->ended);
        c->samples_ns[i] = cox_now_ns() - begin_ns;
        r = c->failure;
    }
    return r;
}

/* ---- two threads ---- */

struct ping {
    sem_t there, back;
    /* of the replying worker; -1: any */
    int cpu;
    size_t count;
};

static void run_on(int cpu)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    if (cpu >= 0) {
        CPU_SET((size_t)cpu, &set);
        sched_setaffinity(0, sizeof set, &set);
    }
}

/* The first and the last processor that this thread may use; false: there is one alone. */
static bool two_processors(const cpu_set_t *set, int *ret_first, int *ret_last)
{
    *ret_first = *ret_last = -1;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET((size_t)cpu, set)) {
            *ret_first = *ret_first < 0 ? cpu : *ret_first;
            *ret_last = cpu;
        }
    return *ret_first != *ret_last;
}

static void *pong_main(void *context)
{
    struct ping *ping = context;
    run_on(ping->cpu);
    for (size_t i = 0; i < ping->count; i++) {
        group_sem_wait(&ping->there);
        sem_post(&ping->back);
    }
    return NULL;
}

/* From one processor to another: on the same one, a wake-up is a switch and no interrupt. */
static int run_pings(struct coxswain *c, size_t count)
{
    pthread_t thread;
    cpu_set_t allowed;
    int own_cpu = -1;
    struct ping ping = {.count = count, .cpu = -1};
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0 &&
        two_processors(&allowed, &own_cpu, &ping.cpu))
        run_on(own_cpu);
    sem_init(&ping.there, 0, 0);
    sem_init(&ping.back, 0, 0);
    int r = -pthread_create(&thread, NULL, pong_main, &ping);
    for (size_t i = 0; r == 0 && i < count; i++) {
        const uint64_t begin_ns = cox_now_ns();
        sem_post(&ping.there);
        group_sem_wait(&ping.back);
        c->samples_ns[i] = (cox_now_ns() - begin_ns) / 2;
    }
    if (r == 0)
        pthread_join(thread, NULL);
    if (own_cpu >= 0)
        sched_setaffinity(0, sizeof allowed, &allowed);
    sem_destroy(&ping.there);
    sem_destroy(&ping.back);
    return r ? cox_fail(c->err, r, "starting a thread: %s", cox_status_text(r)) : 0;
}

/* ---- calls ---- */

struct call {
    struct coxswain *c;
    uint64_t round;
    int failure;
    struct cox_error *err;
};

static void on_call(void *context, const struct cox_completion *completion)
{
    struct call *call = context;
    if (flavour.callers == 0)
        count_allocations(call->c, completion);
    call->failure = check_completion(completion, call->round, call->err);
}

static int call_once(struct coxswain *c, uint8_t *request, uint64_t round, struct cox_error *err)
{
    struct call call = {.c = c, .round = round, .err = err};
    const struct cox_submit_options options = options_now(cox_now_ns(), round);
    load_number(request, round);
    int r = cox_executor_call_opaque(c->executor, request, c->options.request_size, &options,
                                     on_call, &call, err);
    return r ? r : call.failure;
}

static int run_calls(struct coxswain *c, size_t count)
{
    int r = 0;
    for (size_t i = 0; r == 0 && i < count; i++) {
        const uint64_t begin_ns = cox_now_ns();
        r = call_once(c, c->request, ++c->rounds, c->err);
        c->samples_ns[i] = cox_now_ns() - begin_ns;
        c->sampled++;
    }
    return r;
}

/* ---- an event loop ---- */

/* As an event loop does: sleeps in poll, and takes what is there. */
static int run_polls(struct coxswain *c, size_t count)
{
    struct pollfd polled = {.events = POLLIN};
    struct cox_completion completion;
    uint32_t collected;
    int r = cox_executor_fd(c->executor, COX_CHANNEL_EXECUTE, &polled.fd, c->err);
    for (size_t i = 0; r == 0 && i < count; i++) {
        const uint64_t begin_ns = cox_now_ns();
        r = submit_next(c);
        while (r == 0) {
            poll(&polled, 1, -1);
            r = cox_executor_completions(c->executor, COX_CHANNEL_EXECUTE, &completion, 1, 0,
                                         &collected, c->err);
            if (r != COX_TIMEOUT)
                break;
            r = 0;
        }
        if (r == 0)
            r = check_completion(&completion, c->rounds, c->err);
        c->samples_ns[i] = cox_now_ns() - begin_ns;
    }
    return r;
}

/* ---- several callers ---- */

struct caller {
    struct coxswain *c;
    pthread_t thread;
    size_t count;
    uint64_t first_round;
    int failure;
    struct cox_error err;
};

static void *caller_main(void *context)
{
    struct caller *caller = context;
    uint8_t *request = malloc(caller->c->options.request_size);
    if (!request) {
        caller->failure = cox_fail(&caller->err, -ENOMEM, "no memory for a request");
        return NULL;
    }
    memcpy(request, caller->c->request, caller->c->options.request_size);
    for (size_t i = 0; caller->failure == 0 && i < caller->count; i++)
        caller->failure = call_once(caller->c, request, caller->first_round + i, &caller->err);
    free(request);
    return NULL;
}

static int run_callers(struct coxswain *c, size_t count)
{
    struct caller callers[CALLERS_MAX] = {0};
    uint32_t started = 0;
    int r = 0;
    const uint64_t begin_ns = cox_now_ns();
    for (; r == 0 && started < flavour.callers; started += r == 0) {
        struct caller *caller = &callers[started];
        *caller = (struct caller){.c = c, .first_round = c->rounds + 1};
        caller->count = count / flavour.callers + (started < count % flavour.callers);
        c->rounds += caller->count;
        r = -pthread_create(&caller->thread, NULL, caller_main, caller);
    }
    if (r)
        cox_fail(c->err, r, "starting a caller: %s", cox_status_text(r));
    for (uint32_t i = 0; i < started; i++) {
        pthread_join(callers[i].thread, NULL);
        if (r == 0 && callers[i].failure)
            r = cox_fail(c->err, callers[i].failure, "%s", callers[i].err.text);
    }
    const uint64_t each_ns = (cox_now_ns() - begin_ns) / count;
    for (size_t i = 0; i < count; i++)
        c->samples_ns[i] = each_ns;
    return r;
}

/* ---- the subject ---- */

static int coxswain_run(void *subject, uint8_t *request, uint64_t *samples_ns, size_t count,
                        struct cox_error *err)
{
    struct coxswain *c = subject;
    c->request = request;
    c->samples_ns = samples_ns;
    c->sample_count = count;
    c->submitted = c->sampled = 0;
    c->err = err;
    c->own_allocations = allocations_now();
    if (flavour.callers)
        return run_callers(c, count);
    switch (flavour.by) {
    case GROUP_BY_CALL:
    case GROUP_BY_COLLECT:
        return run_calls(c, count);
    case GROUP_BY_POLL:
        return run_polls(c, count);
    case GROUP_BY_HAND_OFF:
        return run_hand_offs(c, count);
    case GROUP_BY_PING:
        return run_pings(c, count);
    default:
        return run_submit(c, count);
    }
}

static uint64_t coxswain_allocations(void *subject)
{
    const struct coxswain *c = subject;
    return allocations_now() - c->own_allocations + c->last_allocations - c->first_allocations;
}

static void coxswain_stop(void *subject)
{
    struct coxswain *c = subject;
    cox_executor_free(c->executor);
    sem_destroy(&c->ended);
    free(c);
}

static int coxswain_start(const struct subject_options *options, void **ret_subject,
                          struct cox_error *err)
{
    char request_text[24], reply_text[24];
    const char *const words[] = {COXSWAIN_WORDS, request_text, reply_text, NULL};
    struct coxswain *c = calloc(1, sizeof *c);
    if (!c)
        return cox_fail(err, -ENOMEM, "no memory for the group");
    snprintf(request_text, sizeof request_text, "%zu", options->request_size);
    snprintf(reply_text, sizeof reply_text, "%zu", options->reply_size);
    c->options = *options;
    sem_init(&c->ended, 0, 0);
    int r = group_start(&flavour, options->rank_count, options->request_size, options->reply_size,
                        words, &c->executor, err);
    if (r == 0 && flavour.by != GROUP_BY_CALL && flavour.by != GROUP_BY_COLLECT &&
        flavour.by != GROUP_BY_POLL && !flavour.callers)
        r = cox_executor_set_handler(c->executor, COX_CHANNEL_EXECUTE, on_completion, c);
    if (r) {
        coxswain_stop(c);
        return cox_fail(err, r, "%s", cox_status_text(r));
    }
    *ret_subject = c;
    return 0;
}

int coxswain_subject_main(int argc, char **argv)
{
    static const struct subject_ops ops = {
        .start = coxswain_start,
        .run = coxswain_run,
        .allocations = coxswain_allocations,
        .stop = coxswain_stop,
    };
    if (group_flavour_parse(&argc, argv, &flavour) || flavour.in_flight > IN_FLIGHT_MAX ||
        flavour.callers > CALLERS_MAX) {
        fputs("coxswain-bench: an option of a subject is wrong\n", stderr);
        return 2;
    }
    return subject_main(argc, argv, &ops);
}
