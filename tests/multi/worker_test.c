/*
 * One worker process from start to end: how it becomes a rank, and how it stops being one. The
 * program is its own worker: the first argument selects what is odd about it.
 */
#include "channel/attach/named/names.h"
#include "channel/base/peer.h"
#include "channel/shm/control.h"
#include "channel/shm/geometry.h"
#include "channel/shm/state.h"
#include "proto/executor.pb-c.h"
#include "testing.h"

#include <coxswain/worker.h>

#include <dlfcn.h>
#include <linux/futex.h>

/* ---- the worker ---- */

static struct cox_worker *self;
static _Thread_local bool broken; /* the channel thread that must stop */

/* Until the worker leaves. */
static void *report_main(void *argument)
{
    while (cox_worker_report_fault(self, "hot", COX_DEADLINE_NEVER) != COX_CLOSED)
        continue;
    return argument;
}

static sigjmp_buf survived;

static void on_fault_signal(int number)
{
    siglongjmp(survived, number);
}

/* As hosts do that probe memory, or guard a stack. Returns the signal. */
static int fault_and_survive(void)
{
    struct sigaction action = {.sa_handler = on_fault_signal}, saved;
    sigaction(SIGSEGV, &action, &saved);
    volatile char *page = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int number = sigsetjmp(survived, 1);
    if (number == 0)
        *page = 1;
    munmap((void *)(uintptr_t)page, 4096);
    sigaction(SIGSEGV, &saved, NULL);
    return number;
}

static int on_opaque(void *context, const uint8_t *request, size_t request_size, uint8_t *reply,
                     size_t reply_capacity, size_t *ret_reply_size, struct cox_error *err)
{
    (void)context;
    (void)err;
    char text[64] = "";
    memcpy(text, request, request_size < sizeof text ? request_size : sizeof text - 1);
    if (strcmp(text, "pid") == 0) {
        *ret_reply_size = (size_t)snprintf((char *)reply, reply_capacity, "%d", getpid());
        return 0;
    }
    if (strcmp(text, "report late") == 0) {
        int r = cox_worker_report_fault(self, "late", 0);
        *ret_reply_size = (size_t)snprintf((char *)reply, reply_capacity, "%d", r);
        return 0;
    }
    if (strcmp(text, "report wide") == 0) {
        char wide[2 * 400 + 1] = "";
        for (size_t i = 0; i < 400; i++)
            memcpy(wide + 2 * i, "\xc3\xa9", 3);
        cox_worker_report_fault(self, wide, test_patience());
        *ret_reply_size = 0;
        return 0;
    }
    if (strcmp(text, "fault") == 0) {
        *ret_reply_size =
            (size_t)snprintf((char *)reply, reply_capacity, "%d", fault_and_survive());
        return 0;
    }
    if (strcmp(text, "break") == 0)
        broken = true;
    if (strcmp(text, "stop") == 0)
        cox_worker_stop(self);
    const char *echo = strncmp(text, "echo ", 5) == 0 ? text + 5 : text;
    *ret_reply_size = (size_t)snprintf((char *)reply, reply_capacity, "%s", echo);
    return 0;
}

static const char *mode;

static bool mode_is(const char *which)
{
    return strcmp(mode, which) == 0;
}

static void on_finalize(void *context)
{
    (void)context;
    printf("finalizes\n");
    while (mode_is("worker_that_finalizes_for_ever"))
        pause();
}

/* In the rank's own line, before it attaches. */
static void spoil_line(const struct cox_worker_options *options)
{
    _cox_cleanup_(cox_control_close) struct cox_control control = COX_CONTROL_NONE;
    COX_ASSERT(cox_control_attach(&control, options->prefix + 1, NULL) == 0);
    cox_state_set_taken(cox_state_line(&control, options->rank, COX_CHANNEL_TRANSFER), 5);
}

static int worker_main(int argc, char **argv)
{
    static const struct cox_worker_callbacks callbacks = {
        .size = sizeof(struct cox_worker_callbacks), .opaque = on_opaque, .finalize = on_finalize};
    struct cox_worker_options options = COX_WORKER_OPTIONS_INIT;
    setvbuf(stdout, NULL, _IOLBF, 0);
    int r = cox_worker_options_parse(&options, &argc, argv, test_err());
    if (mode_is("worker_with_wild_limits"))
        options.sequence_count_max = UINT32_MAX;
    if (r == 0 && mode_is("worker_in_a_spoilt_line"))
        spoil_line(&options);
    if (r == 0)
        r = cox_worker_new(&options, &callbacks, NULL, &self, test_err());
    pthread_t reporters[8];
    size_t reporter_count = r == 0 && mode_is("worker_that_reports") ? 8 : 0;
    for (size_t i = 0; i < reporter_count; i++)
        COX_ASSERT(pthread_create(&reporters[i], NULL, report_main, NULL) == 0);
    if (r == 0) {
        printf("attached as %d\n", getpid());
        while (mode_is("worker_that_never_runs"))
            pause();
        if (!mode_is("worker_that_only_attaches"))
            r = cox_worker_run(self, test_err());
    }
    printf("run: %d %s\n", r, test_error.text);
    while (mode_is("worker_that_never_frees"))
        pause();
    cox_worker_free(self);
    if (mode_is("worker_that_ends_late"))
        usleep(70000);
    while (mode_is("worker_that_stays") || mode_is("worker_that_only_attaches"))
        pause();
    for (size_t i = 0; i < reporter_count; i++)
        pthread_join(reporters[i], NULL);
    printf("freed\n");
    return r;
}

/* In place of the C library's: in a worker with this option the kernel refuses to sleep. It reads
 * arguments that were not given. */
__attribute__((no_sanitize("address"))) long syscall(long number, ...)
{
    long a[6];
    va_list args;
    va_start(args, number);
    for (size_t i = 0; i < sizeof a / sizeof a[0]; i++)
        a[i] = va_arg(args, long);
    va_end(args);
    if (number == SYS_futex && (int)a[1] == FUTEX_WAIT_BITSET && mode &&
        mode_is("worker_with_a_broken_semaphore") && broken) {
        errno = EINVAL;
        return -1;
    }
    long (*next)(long, ...);
    *(void **)&next = dlsym(RTLD_NEXT, "syscall");
    return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

/* ---- groups of it ---- */

static const char *const *command_of(const char *which)
{
    static const char *command[3];
    command[0] = test_program;
    command[1] = which;
    return command;
}

/* ---- one process for a rank ---- */

/* A second process of rank 0: by names, which are still there. Returns its exit status. */
static int run_second(struct test_group *g, char *output, size_t output_size)
{
    char name[72], coordinator[16], line[4400];
    snprintf(name, sizeof name, "/%s", cox_executor_name(test_group_executor(g)));
    snprintf(coordinator, sizeof coordinator, "%d", getpid());
    snprintf(
        line, sizeof line,
        "exec %s worker --shm_name_prefix %s --local_rank 0 --local_world_size %u --parent_pid %s",
        test_program, name, cox_executor_rank_count(test_group_executor(g)), coordinator);
    FILE *pipe = popen(line, "re");
    assert_non_null(pipe);
    size_t length = fread(output, 1, output_size - 1, pipe);
    output[length] = '\0';
    int status = pclose(pipe);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(a_second_process_of_a_rank_is_refused)
{
    char name[64], output[1024], holder[128];
    for (int legacy = 0; legacy < 2; legacy++) {
        struct cox_executor_options options = {.size = sizeof(struct cox_executor_options),
                                               .workers.command = command_of("worker"),
                                               .name = test_unique_name(name),
                                               .memory.keep_names = true,
                                               .workers.legacy = legacy};
        /* The sizes of the contract need more than a container has in /dev/shm. */
        for (int c = 0; c < COX_TWO_WAY_COUNT && legacy; c++) {
            options.memory.request_size[c] = 16384;
            options.memory.response_size[c] = UINT64_C(2) * COX_LEGACY_SLOT_STRIDE;
        }
        OWN_GROUP *g = test_group_start(2, &options);
        test_await_lines(g, 0, "attached", 1);
        assert_int_equal(run_second(g, output, sizeof output), COX_TAKEN);
        snprintf(holder, sizeof holder, "rank 0 of /%s is held by process %d", name,
                 test_pid(g, 0));
        assert_contains(output, holder);
        for (int k = 0; k < 20 && !legacy; k++)
            test_expect_echo(g, "after");
    }
}

/* Those whose process stays attached for ever are refused as well, whichever is first. */
TEST(of_many_at_once_one_is_the_rank)
{
    char name[64], line[4400];
    /* Each rank is a shell that starts four workers of the rank; one may stay. */
    snprintf(line, sizeof line, "for i in 1 2 3 4; do %s worker \"$@\" & done; wait", test_program);
    const char *const command[] = {"/bin/sh", "-c", line, "sh", NULL};
    OWN_GROUP *g =
        test_group_start(2, START_WITH(.workers.command = command, .name = test_unique_name(name),
                                       .memory.keep_names = true));
    char refused[32];
    snprintf(refused, sizeof refused, "run: %d ", COX_TAKEN);
    for (int rank = 0; rank < 2; rank++)
        test_await_lines(g, rank, refused, 3);
    for (int k = 0; k < 20; k++)
        test_expect_echo(g, "one for each rank");
    for (int rank = 0; rank < 2; rank++)
        assert_int_equal(test_count_lines(g, rank, "run: "), 3);
}

/* Nor does its group start. */
static void expect_refusal(const char *which, const char *text)
{
    struct test_group *g = NULL;
    assert_refused(test_group_try(START_WITH(.workers.command = command_of(which), .rank_count = 1),
                                  &g, test_err()),
                   COX_PEER_DEAD, text);
}

TEST(p10_a_worker_refuses_a_line_that_cannot_be)
{
    test_needs_names();
    expect_refusal("worker_in_a_spoilt_line",
                   "transfer channel of rank 0 stands at sequence 5, but only 0 were");
}

/* ---- leaving ---- */

/* Rank 0 leaves by its own will, with a request behind it, and its process stays. */
TEST(p2_a_rank_that_left_is_reported_though_its_process_lives)
{
    static const char *const modes[] = {"worker_that_never_frees", "worker_that_stays",
                                        "worker_that_only_attaches"};
    for (size_t i = 0; i < sizeof modes / sizeof modes[0]; i++) {
        OWN_GROUP *g = test_group_start(
            2, START_WITH(.workers.command = command_of(modes[i]), .times.finalize_ms = 200));
        const struct test_how first = {.gather = COX_GATHER_ALL, .ranks = 1};
        const struct test_how second = {.gather = COX_GATHER_ALL, .ranks = 2};
        char says[96];
        snprintf(says, sizeof says, "rank 0 (pid %d) left the group, its process lives",
                 test_pid(g, 0));
        bool serves = strcmp(modes[i], "worker_that_only_attaches") != 0;
        uint64_t begin = cox_now_ns();
        if (serves) {
            assert_int_equal(test_submit(g, &first, "stop"), 0);
            assert_int_equal(test_submit(g, &first, "echo behind it"), 0);
            assert_int_equal(test_await(g, 0)->status, 0);
            const struct test_completion *c = test_await(g, 1);
            assert_int_equal(c->status, COX_PEER_DEAD);
            assert_int_equal(c->ranks[0].outcome, COX_OUTCOME_DEAD);
            assert_contains(c->text, says);
        }
        assert_int_equal(test_call_how(g, NULL, &first, "echo x"), COX_PEER_DEAD);
        assert_contains(test_error_text(g), says);
        assert_true(cox_now_ns() - begin < TEST_PATIENCE_MS * COX_NSEC_PER_MSEC / 2);
        if (serves) /* the other is not concerned */
            assert_int_equal(test_call_how(g, NULL, &second, "echo x"), 0);
        assert_int_equal(
            cox_executor_restart(test_group_executor(g), 0, test_patience(), test_err()),
            COX_STATE);
    }
}

/* That it has left is seen after a slice (50 ms) at most. Its process has two more to end, and
 * takes 70 ms in all; it may get no processor in that time. */
TEST(p2_a_rank_that_left_and_ended_is_dead)
{
    const struct cox_executor_options options = {
        .size = sizeof options, .workers.command = command_of("worker_that_ends_late")};
    bool ended = false;
    for (int i = 0; i < 5 && !ended; i++) {
        OWN_GROUP *g = test_group_start(1, &options);
        test_submit(g, &(struct test_how){.gather = COX_GATHER_ALL}, "stop");
        test_submit(g, &(struct test_how){.gather = COX_GATHER_ALL}, "echo behind it");
        const struct test_completion *c = test_await(g, 1);
        assert_int_equal(c->status, COX_PEER_DEAD);
        ended = strstr(c->text, "exited with status 0") != NULL;
        if (!ended)
            assert_contains(c->text, "left the group, its process lives");
    }
    assert_true(ended);
}

/* ---- reports ---- */

struct held {
    struct cox_executor *executor;
    sem_t heard, freed, released;
};

static void hold_fault(void *context, int32_t rank, const char *text)
{
    struct held *held = context;
    (void)rank;
    (void)text;
    sem_post(&held->heard);
    while (sem_wait(&held->released))
        continue;
    sem_post(&held->released); /* for good */
}

static void hear_freed(void *context, uint32_t rank, bool is_stderr, const char *text)
{
    struct held *held = context;
    (void)rank;
    (void)is_stderr;
    if (strcmp(text, "freed") == 0)
        sem_post(&held->freed);
}

/* Eight threads are inside a report, for which there is no room, when the worker is freed. */
TEST(m9_free_lets_reports_out_first)
{
    for (int round = 0; round < 5; round++) {
        struct held held;
        sem_init(&held.heard, 0, 0);
        sem_init(&held.freed, 0, 0);
        sem_init(&held.released, 0, 0);
        assert_ok(cox_executor_start(
            START_WITH(.workers.command = command_of("worker_that_reports"), .rank_count = 1,
                       .hooks.fault = hold_fault, .hooks.line = hear_freed, .hooks.context = &held),
            &held.executor, test_err()));
        const bool heard = test_sem_await(&held.heard);
        cox_executor_call_opaque(
            held.executor, "stop", 4,
            SUBMIT_WITH(.gather = COX_GATHER_ALL, .deadline_ns = test_patience()), NULL, NULL,
            test_err());
        const bool freed = test_sem_await(&held.freed);
        sem_post(&held.released);
        cox_executor_free(held.executor);
        assert_true(heard && freed);
        sem_destroy(&held.heard);
        sem_destroy(&held.freed);
        sem_destroy(&held.released);
    }
}

GROUP_TEST_WITH(a_report_after_its_deadline_takes_a_slot_that_is_free, 1,
                .workers.command = command_of("worker"))
{
    OWN_COMPLETION c = {0};
    assert_int_equal(test_call(g, &c, "report late"), 0);
    assert_string_equal(c.ranks[0].bytes, "0");
    test_await_faults(g, 1);
    assert_string_equal(test_fault(g, 0), "0 late");
}

GROUP_TEST_WITH(a_report_is_cut_between_characters, 1, .workers.command = command_of("worker"))
{
    assert_int_equal(test_call(g, NULL, "report wide"), 0);
    test_await_faults(g, 1);
    const char *text = test_fault(g, 0) + 2; /* behind the rank */
    assert_true(strlen(text) > 700);
    assert_int_equal(strlen(text) % 2, 0);
}

GROUP_TEST_WITH(a_channel_thread_that_fails_is_what_run_returns, 1,
                .workers.command = command_of("worker_with_a_broken_semaphore"))
{
    test_needs_names();
    char text[160];
    test_call(g, NULL, "break"); /* replied, or the process is faster than the reply */
    snprintf(
        text, sizeof text,
        "run: %d rank 0, waiting for a request on the semaphore of the channel execute: Invalid argument",
        -EINVAL);
    test_await_lines(g, 0, text, 1);
}

GROUP_TEST_WITH(m5_a_callback_has_the_fault_handlers_of_its_host, 1,
                .workers.command = command_of("worker"))
{
    for (int k = 0; k < 3; k++) {
        OWN_COMPLETION c = {0};
        assert_int_equal(test_call(g, &c, "fault"), 0);
        assert_int_equal(atoi(c.ranks[0].bytes), SIGSEGV);
    }
}

/* Once a rank has its memory, the coordinator has no other mapping of it than one for reading. */
TEST(b16_p10_a_coordinator_cannot_write_a_ranks_words)
{
    if (test_attach() != COX_ATTACH_SEALED)
        skip();
    OWN_GROUP *g = test_group_start(2, START_WITH(.workers.command = command_of("worker")));
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[512], permissions[8];
    uint32_t count = 0;
    assert_non_null(maps);
    while (fgets(line, sizeof line, maps)) {
        if (!strstr(line, "memfd:cox_rank"))
            continue;
        count++;
        assert_int_equal(sscanf(line, "%*s %7s", permissions), 1);
        assert_string_equal(permissions, "r--s");
    }
    fclose(maps);
    assert_int_equal(count, 2);
}

TEST(impossible_limits_are_reported)
{
    expect_refusal("worker_with_wild_limits",
                   "room for 4294967295 sequences of 131072 tokens was asked for: allowed");
}

#if COX_TESTING

static void keep_status(void *context, const struct cox_completion *completion)
{
    atomic_store((_Atomic int *)context, completion->status);
}

/* The rank is halted between the look at the frame's record and the copy of its bytes. */
TEST(p10_a_frame_that_is_written_again_is_not_served)
{
    char name[64];
    setenv("COXSWAIN_FAULT", "rank.taken:stop:0:1", 1);
    OWN_GROUP *g =
        test_group_start(1, START_WITH(.workers.command = command_of("worker"),
                                       .name = test_unique_name(name), .memory.keep_names = true));
    unsetenv("COXSWAIN_FAULT");
    struct cox_executor *executor = test_group_executor(g);
    _cox_cleanup_(cox_control_close) struct cox_control control = COX_CONTROL_NONE;
    assert_int_equal(cox_control_attach(&control, name, NULL), 0);
    _Atomic int status = -1;
    assert_ok(cox_executor_set_handler(executor, COX_CHANNEL_EXECUTE, keep_status, &status));
    Coxswain__ExecuteRequest request = COXSWAIN__EXECUTE_REQUEST__INIT;
    request.has_execute_type = 1;
    request.execute_type = COXSWAIN__EXECUTE_TYPE__MODEL_INIT;
    uint64_t sequence;
    assert_ok(cox_executor_submit(
        executor, &request, SUBMIT_WITH(.gather = COX_GATHER_ALL, .deadline_ns = test_patience()),
        &sequence, NULL));
    AWAIT(cox_peer_stopped(test_pid(g, 0)));
    struct cox_layout_channel_state *shared = cox_state_channel(&control, COX_CHANNEL_EXECUTE);
    atomic_fetch_add(&shared->frames[sequence % control.geometry.depth].sequence,
                     control.geometry.depth);
    assert_int_equal(kill(test_pid(g, 0), SIGCONT), 0);
    AWAIT(atomic_load(&status) != -1);
    assert_int_equal(atomic_load(&status), COX_CORRUPT);
    test_expect_echo(g, "x");
}

#endif

/* ---- orphans ---- */

/* On the supervisor's thread: prints which process the worker is, and dies at the line `text`. */
static void die_at_line(void *context, uint32_t rank, bool is_stderr, const char *text)
{
    const char *last = context;
    (void)rank;
    (void)is_stderr;
    if (strncmp(text, "attached as ", 12) == 0)
        dprintf(STDOUT_FILENO, "%s\n", text + 12);
    if (strncmp(text, last, strlen(last)) == 0)
        raise(SIGKILL);
}

/* Its worker sits in a shell, so that the kernel does not end it with us. argument: the mode. */
static int coordinator_main(const char *argument)
{
    char line[4400];
    snprintf(line, sizeof line, "%s %s; true", test_program, argument);
    const char *const command[] = {"/bin/sh", "-c", line, NULL};
    bool at_once = strcmp(argument, "worker_that_never_runs") == 0;
    const struct cox_executor_options options = {
        .size = sizeof(struct cox_executor_options),
        .rank_count = 1,
        .workers.command = command,
        .workers.environment_only = true,
        .hooks.line = die_at_line,
        .hooks.context = at_once                                            ? "attached"
                         : strcmp(argument, "worker_that_never_frees") == 0 ? "run: 0"
                                                                            : "finalizes",
        .times.finalize_ms = TEST_PATIENCE_MS,
    };
    struct cox_executor *executor;
    int r = cox_executor_start(&options, &executor, test_err());
    if (r) {
        fprintf(stderr, "start: %d %s\n", r, test_error.text);
        return 1;
    }
    if (!at_once)
        cox_executor_stop(executor);
    for (;;)
        pause();
}

TEST(p1_an_orphan_ends_before_and_after_it_serves)
{
    static const char *const modes[] = {"worker_that_never_runs", "worker_that_finalizes_for_ever",
                                        "worker_that_never_frees"};
    for (size_t i = 0; i < sizeof modes / sizeof modes[0]; i++) {
        struct test_helper helper = test_helper_start("coordinator", modes[i]);
        char text[16] = "";
        ssize_t length = read(helper.out, text, sizeof text - 1);
        assert_true(length > 0);
        struct cox_peer worker = COX_PEER_NONE;
        int opened = cox_peer_open(atoi(text), 0, &worker);
        assert_int_equal(test_helper_wait(&helper), 128 + SIGKILL);
        bool ended =
            opened == COX_PEER_DEAD ||
            poll(&(struct pollfd){.fd = worker.pidfd, .events = POLLIN}, 1, TEST_PATIENCE_MS) == 1;
        if (!ended)
            kill(worker.pid, SIGKILL);
        cox_peer_close(&worker);
        if (!ended)
            fail_msg("a %s lives on", modes[i]);
        test_sweep_sockets(1);
        char name[32];
        uint32_t count;
        snprintf(name, sizeof name, "%jd_0", (intmax_t)helper.pid);
        assert_int_equal(cox_control_sweep(name, &count, NULL), 0);
    }
}

int main(int argc, char **argv)
{
    if (argc > 1 && strncmp(argv[1], "worker", 6) == 0) {
        mode = argv[1];
        return worker_main(argc, argv);
    }
    if (argc > 2 && strcmp(argv[1], "coordinator") == 0)
        return coordinator_main(argv[2]);
    return test_run(NULL, NULL);
}
