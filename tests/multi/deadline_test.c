/* Every sleep between a request and its COX_TIMEOUT ends at the very deadline that the caller
 * gave. No time is judged: the linker sends the timed system calls through here, which write
 * down until when each thread means to sleep. */
#include "channel/base/futex.h"
#include "coordinator/collector/collector.h"
#include "steps.h"

#define SLEEPS_MAX 65536

/* ---- what sleeps: the linker sends these here ---- */

struct sleep {
    /* last: the others are there */
    _Atomic pid_t thread;
    uint64_t begun_ns, until_ns;
    _Atomic bool timed_out;
};

static struct sleep sleeps[SLEEPS_MAX];
static _Atomic size_t sleep_count;

static struct sleep *sleep_begin(uint64_t until_ns)
{
    const size_t i = atomic_fetch_add(&sleep_count, 1);
    if (i >= SLEEPS_MAX)
        abort();
    struct sleep *sleep = &sleeps[i];
    sleep->begun_ns = cox_now_ns();
    sleep->until_ns = until_ns;
    atomic_store(&sleep->thread, gettid());
    return sleep;
}

static uint64_t timespec_ns(const struct timespec *time)
{
    return (uint64_t)time->tv_sec * COX_NSEC_PER_SEC + (uint64_t)time->tv_nsec;
}

long __real_syscall(long number, long a, long b, long c, long d, long e, long f);
long __wrap_syscall(long number, long a, long b, long c, long d, long e, long f);
long __wrap_syscall(long number, long a, long b, long c, long d, long e, long f)
{
    if (number != SYS_futex || b != FUTEX_WAIT_BITSET)
        return __real_syscall(number, a, b, c, d, e, f);
    struct sleep *sleep =
        sleep_begin(d ? timespec_ns((const struct timespec *)d) : COX_DEADLINE_NEVER);
    const long r = __real_syscall(number, a, b, c, d, e, f);
    sleep->timed_out = r < 0 && errno == ETIMEDOUT;
    return r;
}

int __real_sem_clockwait(sem_t *sem, clockid_t clock, const struct timespec *until);
int __wrap_sem_clockwait(sem_t *sem, clockid_t clock, const struct timespec *until);
int __wrap_sem_clockwait(sem_t *sem, clockid_t clock, const struct timespec *until)
{
    struct sleep *sleep = sleep_begin(timespec_ns(until));
    const int r = __real_sem_clockwait(sem, clock, until);
    sleep->timed_out = r < 0 && errno == ETIMEDOUT;
    return r;
}

int __real_pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *lock,
                                  const struct timespec *until);
int __wrap_pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *lock,
                                  const struct timespec *until);
int __wrap_pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *lock,
                                  const struct timespec *until)
{
    struct sleep *sleep = sleep_begin(timespec_ns(until));
    const int r = __real_pthread_cond_timedwait(cond, lock, until);
    sleep->timed_out = r == ETIMEDOUT;
    return r;
}

/* ---- what is asked ---- */

enum way { SUBMIT, CALL, INIT, PULL, LINK_STATUS, LORA, RECOVER, WAY_COUNT };

static const struct {
    const char *name;
    enum cox_channel_id channel;
} ways[] = {
    [SUBMIT] = {"submit", COX_CHANNEL_EXECUTE},
    [CALL] = {"call", COX_CHANNEL_EXECUTE},
    [INIT] = {"init", COX_CHANNEL_EXECUTE},
    [PULL] = {"pull", COX_CHANNEL_TRANSFER},
    [LINK_STATUS] = {"link status", COX_CHANNEL_LINK},
    [LORA] = {"lora", COX_CHANNEL_LINK},
    [RECOVER] = {"recover", COX_CHANNEL_RECOVER},
};

/* The response thread of the channel gathers, and the caller waits for it; or the caller gathers,
 * where there is none, or where that thread runs a handler. */
static bool way_has_thread(enum way way)
{
    return ways[way].channel == COX_CHANNEL_EXECUTE || ways[way].channel == COX_CHANNEL_TRANSFER;
}

/* One request to two ranks of which the second is stopped. */
struct asked {
    struct test_group *group;
    enum way way;
    uint64_t deadline_ns;
    int status;
    _Atomic pid_t caller;
    /* of the sleeps that were begun meanwhile */
    size_t begin, end;
    sem_t ended;
};

static void on_completion(void *context, const struct cox_completion *completion)
{
    struct asked *asked = context;
    asked->status = completion->status;
    asked->end = atomic_load(&sleep_count);
    sem_post(&asked->ended);
}

static void on_visit(void *context, const struct cox_completion *completion)
{
    (void)completion;
    atomic_store((_Atomic pid_t *)context, gettid());
}

/* Of the response thread of execute or transfer. */
static pid_t thread_of(struct test_group *group, enum cox_channel_id channel)
{
    struct cox_executor *executor = test_group_executor(group);
    const struct cox_submit_options *options = SUBMIT_WITH(.deadline_ns = test_patience());
    Coxswain__PullKVRequest pull = COXSWAIN__PULL_KVREQUEST__INIT;
    Coxswain__ExecuteRequest request = REQUEST_OF(KV_TRANSFER, PULL_KV_REQUEST, &pull);
    _Atomic pid_t thread = 0;
    assert_int_equal(cox_executor_set_handler(executor, channel, on_visit, (void *)&thread), 0);
    int r = channel == COX_CHANNEL_TRANSFER
                ? cox_executor_submit(executor, &request, options, NULL, test_err())
                : cox_executor_submit_opaque(executor, "echo x", 6, options, NULL, test_err());
    assert_ok(r);
    AWAIT(atomic_load(&thread) != 0);
    return atomic_load(&thread);
}

static int ask_response_thread(struct asked *asked, struct cox_error *err)
{
    struct cox_executor *executor = test_group_executor(asked->group);
    const struct cox_submit_options *options =
        SUBMIT_WITH(.gather = COX_GATHER_ALL, .deadline_ns = asked->deadline_ns);
    if (asked->way == CALL)
        return cox_executor_call_opaque(executor, "echo x", 6, options, on_completion, asked, err);
    int r = cox_executor_set_handler(executor, COX_CHANNEL_EXECUTE, on_completion, asked);
    if (r == 0)
        r = cox_executor_submit_opaque(executor, "echo x", 6, options, NULL, err);
    if (r)
        return r;
    while (sem_wait(&asked->ended) < 0 && errno == EINTR)
        continue;
    return asked->status;
}

static int ask(struct asked *asked)
{
    struct cox_executor *executor = test_group_executor(asked->group);
    int r = 0;
    sem_init(&asked->ended, 0, 0);
    asked->begin = atomic_load(&sleep_count);
    atomic_store(&asked->caller, gettid());
    switch (asked->way) {
    case SUBMIT:
    case CALL:
        r = ask_response_thread(asked, test_err());
        break;
    case LINK_STATUS: {
        struct cox_link_status status = {0};
        r = cox_executor_link_status(executor, asked->deadline_ns, &status, test_err());
        cox_link_status_deinit(&status);
        break;
    }
    case PULL: {
        Coxswain__PullKVRequest pull = COXSWAIN__PULL_KVREQUEST__INIT;
        struct cox_pull_result *results = NULL;
        size_t count = 0;
        r = cox_executor_pull_kv(executor, &pull, asked->deadline_ns, &results, &count, test_err());
        free(results);
        break;
    }
    case LORA: {
        Coxswain__LoraOperationRequest lora = COXSWAIN__LORA_OPERATION_REQUEST__INIT;
        int32_t statuses[2];
        r = test_lora(executor, &lora, asked->deadline_ns, statuses, test_err());
        break;
    }
    case RECOVER: {
        struct cox_recover_result results[2];
        r = cox_executor_recover(executor, COX_RECOVER_CLEAR, asked->deadline_ns, results,
                                 test_err());
        break;
    }
    default: {
        struct cox_init_summary summary;
        r = cox_executor_init(executor, NULL, 0, asked->deadline_ns, &summary, test_err());
    }
    }
    if (asked->way > CALL) /* else its handler has stored it, or the hook */
        asked->end = atomic_load(&sleep_count);
    sem_destroy(&asked->ended);
    return asked->status = r;
}

/* ---- what is looked at ---- */

/* Checks that the thread sleeps until the deadline and no longer, and then sleeps no more. While
 * another thread gathers, it sleeps until that one wakes it. Returns whether it slept until the
 * deadline: on a busy machine that may pass before any thread sleeps. */
static bool slept_until(const struct asked *asked, pid_t thread)
{
    bool slept = false, over = false;
    for (size_t i = asked->begin; i < asked->end; i++) {
        const struct sleep *sleep = &sleeps[i];
        if (atomic_load(&sleep->thread) != thread || sleep->until_ns == COX_DEADLINE_NEVER)
            continue;
        if (sleep->until_ns > asked->deadline_ns)
            fail_msg("%s: a sleep ends %.6f s after the deadline", ways[asked->way].name,
                     (double)(sleep->until_ns - asked->deadline_ns) / 1e9);
        if (over)
            fail_msg("%s: the deadline has passed in a sleep, and another one follows",
                     ways[asked->way].name);
        slept |= sleep->until_ns == asked->deadline_ns;
        over = sleep->until_ns == asked->deadline_ns && sleep->timed_out;
    }
    return slept;
}

/* The thread sleeps for others too: also until then. */
static bool gatherer_slept_until(const struct asked *asked, pid_t thread)
{
    bool slept = false;
    for (size_t i = asked->begin; i < asked->end && !slept; i++)
        slept =
            atomic_load(&sleeps[i].thread) == thread && sleeps[i].until_ns == asked->deadline_ns;
    return slept;
}

static struct asked asked_of(struct test_group *group, enum way way, uint64_t away_ms)
{
    return (struct asked){
        .group = group, .way = way, .deadline_ns = cox_deadline_after_ms(away_ms)};
}

/* Its second rank replies nothing any more. *ret_thread: which gathers. */
static struct test_group *group_start(enum way way, pid_t *ret_pid, pid_t *ret_thread)
{
    struct test_group *group = test_group_start(2, NULL);
    *ret_thread = way_has_thread(way) ? thread_of(group, ways[way].channel) : gettid();
    *ret_pid = cox_executor_pid(test_group_executor(group), 1);
    test_stop_process(*ret_pid);
    return group;
}

static void go_on(struct test_group *group, pid_t pid)
{
    assert_int_equal(kill(pid, SIGCONT), 0);
    test_group_free(group);
}

#define AWAY_MS 100

/* ---- tests ---- */

static bool gathers_until(enum way way, uint64_t away_ms)
{
    pid_t pid, thread;
    struct test_group *group = group_start(way, &pid, &thread);
    struct asked asked = asked_of(group, way, away_ms);
    assert_int_equal(ask(&asked), COX_TIMEOUT);
    assert_true(cox_now_ns() >= asked.deadline_ns);
    bool slept = slept_until(&asked, thread);
    if (way != SUBMIT && thread != gettid())
        slept = slept_until(&asked, gettid()) || slept;
    go_on(group, pid);
    return slept;
}

static int setup(void **state)
{
    test_needs_processes();
    return test_setup(state);
}

#define DEADLINE_TEST(name) TEST_WITH(name, setup, test_teardown)

DEADLINE_TEST(b2_a_gathering_caller_sleeps_until_the_deadline)
{
    for (int way = 0; way < WAY_COUNT; way++)
        for (uint64_t away_ms = AWAY_MS; !gathers_until((enum way)way, away_ms);)
            away_ms *= 2;
}

static void *ask_main(void *context)
{
    ask(context);
    return NULL;
}

/* Or has slept: then it has begun. */
static bool sleeps_for(struct asked *asked)
{
    const pid_t caller = atomic_load(&asked->caller);
    const size_t end = atomic_load(&sleep_count);
    bool found = false;
    for (size_t i = asked->begin; caller && i < end && !found; i++)
        found = atomic_load(&sleeps[i].thread) == caller;
    return found;
}

/* Two threads ask the same. One of them gathers for both, or has the command, and the other waits
 * for its turn. */
static bool waits_its_turn_until(enum way way, uint64_t away_ms)
{
    pid_t pid, gatherer;
    struct test_group *group = group_start(way, &pid, &gatherer);
    struct asked first = asked_of(group, way, TEST_PATIENCE_MS);
    pthread_t thread = test_thread(ask_main, &first);
    AWAIT(sleeps_for(&first));
    struct asked asked = asked_of(group, way, away_ms);
    const int r = ask(&asked);
    assert_int_equal(kill(pid, SIGCONT), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(r, COX_TIMEOUT);
    assert_int_not_equal(first.status, COX_TIMEOUT);
    const bool slept =
        slept_until(&asked, gettid()) || gatherer_slept_until(&asked, atomic_load(&first.caller));
    test_group_free(group);
    return slept;
}

DEADLINE_TEST(b2_a_caller_that_waits_for_its_turn_sleeps_until_the_deadline)
{
    static const enum way in_turn[] = {LINK_STATUS, LORA, RECOVER, INIT};
    for (size_t i = 0; i < sizeof in_turn / sizeof *in_turn; i++)
        for (uint64_t away_ms = AWAY_MS; !waits_its_turn_until(in_turn[i], away_ms);)
            away_ms *= 2;
}

/* In slices, since no wakeup announces room: a rank still owes the reply to the call before. */
static bool waits_for_room_until(uint64_t away_ms)
{
    pid_t pid, thread;
    struct test_group *group = group_start(CALL, &pid, &thread);
    struct asked first = asked_of(group, CALL, AWAY_MS);
    assert_int_equal(ask(&first), COX_TIMEOUT);
    struct asked asked = asked_of(group, CALL, away_ms);
    assert_int_equal(ask(&asked), COX_TIMEOUT);
    asked.end = atomic_load(&sleep_count);
    const bool slept = slept_until(&asked, gettid());
    go_on(group, pid);
    return slept;
}

DEADLINE_TEST(b2_a_caller_that_waits_for_room_sleeps_until_the_deadline)
{
    for (uint64_t away_ms = AWAY_MS; !waits_for_room_until(away_ms);)
        away_ms += 1;
}
