/* A paused worker: nothing is begun; running callbacks return, are interrupted, or are left; and
 * everything works afterwards. */
#include "channel/base/base_internal.h"
#include "channel/base/fault.h"
#include "channel/base/tsan.h"
#include "coordinator/executor/requests_internal.h"
#include "proto/wire.h"
#include "tests/lib/token_hash.h"
#include "ranks.h"
#include "steps.h"

#define TYPE(name) COXSWAIN__EXECUTE_TYPE__##name
#define RANK_COUNT 4u
#define CHAT_TOKEN_MAX 4096

/* ThreadSanitizer keeps a signal until the thread calls something it knows, and loses track of a
 * thread's stack when a handler jumps. */
static void needs_jumps(void)
{
    test_needs_processes();
#ifdef COX_TSAN
    skip();
#endif
}

static struct test_group *group_with(uint32_t rank_count, const char *const *command)
{
    struct test_group *g =
        test_group_start(rank_count, START_WITH(.workers.command = command,
                                                .times.finalize_ms = 500, .times.term_ms = 500));
    test_init(g);
    return g;
}

static struct test_group *group_of(uint32_t rank_count, const char *mode)
{
    const char *const command[] = {test_worker_program(), mode, NULL};
    return group_with(rank_count, command);
}

/* ---- commands ---- */

static void expect_recovered(struct test_group *g, enum cox_recover_command command)
{
    int r = test_recover(g, command, NULL, test_err());
    if (r)
        fail_msg("%s: %d: %s", cox_recover_command_name(command), r, test_error.text);
}

struct told {
    int32_t results[RANK_COUNT];
    char texts[RANK_COUNT][256];
};

static void visit_told(void *context, const struct cox_completion *completion)
{
    struct told *told = context;
    for (uint32_t rank = 0; rank < completion->rank_count && rank < RANK_COUNT; rank++) {
        const Coxswain__ExecuteResponse *response = completion->ranks[rank].response;
        const Coxswain__RecoverCommandResponse *body =
            response && response->result_case ==
                            COXSWAIN__EXECUTE_RESPONSE__RESULT_RECOVER_COMMAND_RESPONSE
                ? response->recover_command_response
                : NULL;
        told->results[rank] = body && body->has_command_result ? body->command_result : -1;
        snprintf(told->texts[rank], sizeof told->texts[rank], "%s",
                 body && body->error_msg ? body->error_msg : "");
    }
}

/* The same past the coordinator's gate: the workers' part alone. */
static struct told tell(struct test_group *g, int type)
{
    Coxswain__RecoverCommandRequest body = COXSWAIN__RECOVER_COMMAND_REQUEST__INIT;
    Coxswain__ExecuteRequest request = COXSWAIN__EXECUTE_REQUEST__INIT;
    struct told told = {.results = {0}};
    request.has_execute_type = 1;
    request.execute_type = (Coxswain__ExecuteType)type;
    request.request_case = COXSWAIN__EXECUTE_REQUEST__REQUEST_RECOVER_COMMAND_REQUEST;
    request.recover_command_request = &body;
    assert_ok(
        cox_executor_call(test_group_executor(g), &request,
                          SUBMIT_WITH(.gather = COX_GATHER_ALL, .deadline_ns = test_patience()),
                          visit_told, &told, test_err()));
    return told;
}

static void expect_told(struct test_group *g, int type)
{
    const struct told told = tell(g, type);
    for (uint32_t rank = 0; rank < cox_executor_rank_count(test_group_executor(g)); rank++)
        if (told.results[rank])
            fail_msg("rank %" PRIu32 ": %" PRId32 ": %s", rank, told.results[rank],
                     told.texts[rank]);
}

/* ---- steps of one sequence ---- */

struct chat {
    int32_t tokens[CHAT_TOKEN_MAX];
    uint32_t count;
    /* 0: to be announced */
    uint64_t base;
    /* what is to come, the prompt included; NULL: of scripted workers */
    const int32_t *reference;
    /* then it begins again */
    uint32_t limit;
};

static void chat_begin(struct chat *chat)
{
    *chat = (struct chat){.tokens = {1, 5, 10}, .count = 3, .limit = CHAT_TOKEN_MAX};
}

static void step_fill(struct test_step *s, const struct chat *chat)
{
    static const int32_t blocks[] = {1, 2};
    test_step_init(s, chat->base, COXSWAIN__FORWARD_TYPE__MIXED);
    test_step_add(s, &(struct test_row){.id = 1000,
                                        .slot = 3,
                                        .tokens = chat->tokens,
                                        .token_count = chat->count,
                                        .position = chat->base ? chat->count - 1 : 0,
                                        .announce = !chat->base,
                                        .blocks = blocks,
                                        .block_count = 2});
}

static int step_call(struct test_group *g, const struct chat *chat, struct test_completion *c,
                     struct cox_error *err)
{
    struct test_step s;
    step_fill(&s, chat);
    return test_step_call(g, &s, test_patience(), c, err);
}

static int32_t next_token(const struct chat *chat)
{
    if (chat->reference)
        return chat->reference[chat->count];
    /* What scripted workers reply. */
    return (int32_t)(test_token_hash(chat->tokens, chat->count) % 50000);
}

/* One token more, or *ret_status, and the next one announces everything. False: a wrong token. */
static bool chat_step(struct test_group *g, struct chat *chat, int *ret_status,
                      struct cox_error *err)
{
    OWN_COMPLETION c = {0};
    int r = step_call(g, chat, &c, err);
    bool right = r != 0 || (c.token_count == 1 && c.tokens[0] == next_token(chat));
    chat->base = r ? 0 : c.sequence;
    if (r == 0 && right)
        chat->tokens[chat->count++] = c.tokens[0];
    if (chat->count == chat->limit) {
        chat->count = 3;
        chat->base = 0;
    }
    *ret_status = r;
    return right;
}

static void expect_step(struct test_group *g, struct chat *chat)
{
    int r;
    bool right = chat_step(g, chat, &r, test_err());
    if (r || !right)
        fail_msg("a step: %d: %s", r, test_error.text);
}

/* Every rank replies a step and a request. */
static void expect_all_serve(struct test_group *g)
{
    struct chat chat;
    chat_begin(&chat);
    expect_step(g, &chat);
    expect_step(g, &chat);
    test_expect_echo(g, "all of us");
}

static void submit_step(struct test_group *g, const struct chat *chat)
{
    struct test_step s;
    step_fill(&s, chat);
    assert_ok(cox_executor_submit(
        test_group_executor(g), &s.request,
        SUBMIT_WITH(.gather = COX_GATHER_ALL, .deadline_ns = test_patience()), NULL, test_err()));
}

static void submit_pull(struct test_group *g)
{
    Coxswain__PullKVRequest pull = COXSWAIN__PULL_KVREQUEST__INIT;
    Coxswain__ExecuteRequest request = COXSWAIN__EXECUTE_REQUEST__INIT;
    request.has_execute_type = 1;
    request.execute_type = TYPE(KV_TRANSFER);
    request.request_case = COXSWAIN__EXECUTE_REQUEST__REQUEST_PULL_KV_REQUEST;
    request.pull_kv_request = &pull;
    assert_ok(cox_executor_submit(
        test_group_executor(g), &request,
        SUBMIT_WITH(.gather = COX_GATHER_ALL, .deadline_ns = test_patience()), NULL, test_err()));
}

static void collect(struct test_group *g)
{
    struct cox_executor *executor = test_group_executor(g);
    assert_int_equal(cox_executor_set_handler(executor, COX_CHANNEL_TRANSFER, test_handler, g), 0);
    assert_int_equal(cox_executor_set_handler(executor, COX_CHANNEL_EXECUTE, test_handler, g), 0);
}

static void expect_rank(const struct test_completion *c, uint32_t rank, int code, const char *words)
{
    if (!c->ranks)
        fail_msg("no replies");
    if (c->ranks[rank].outcome != COX_OUTCOME_ERROR)
        fail_msg("rank %" PRIu32 " has outcome %d: %s", rank, (int)c->ranks[rank].outcome, c->text);
    if (c->ranks[rank].code != code)
        fail_msg("rank %" PRIu32 ": %d: %s", rank, c->ranks[rank].code, c->ranks[rank].text);
    assert_contains(c->ranks[rank].text, words);
}

/* The other ranks have done with what was published last: their replies are there before this
 * one's. */
static void await_others(struct test_group *g, enum cox_channel_id channel, uint32_t but)
{
    struct cox_executor *executor = test_group_executor(g);
    struct cox_executor_status status;
    struct cox_rank_status ranks[RANK_COUNT];
    for (uint32_t rank = 0; rank < cox_executor_rank_count(executor); rank++) {
        const struct cox_rank_channel_status *said = &ranks[rank].channels[channel];
        AWAIT(rank == but ||
              (cox_executor_read_status(executor, &status, ranks),
               said->state == 0 && said->sequence == status.channels[channel].published));
    }
}

/* Refused on this rank. */
static void expect_refused(struct test_group *g, uint32_t rank)
{
    const struct test_how how = {.gather = COX_GATHER_ALL, .ranks = UINT64_C(1) << rank};
    OWN_COMPLETION c = {0};
    assert_int_not_equal(test_call_how(g, &c, &how, "echo anybody"), 0);
    expect_rank(&c, rank, COX_ABORTED, "paused");
}

/* ---- one rank hangs ---- */

/* The hang of rank 2 in a step: paused on all ranks, and all go on. */
static void step_hang(const char *mode, const char *trick, const char *line, uint64_t grace_ms,
                      int code, const char *words)
{
    OWN_GROUP *g = group_of(RANK_COUNT, mode);
    struct chat chat;
    chat_begin(&chat);
    collect(g);
    assert_int_equal(test_call(g, NULL, "grace %" PRIu64, grace_ms), 0);
    for (int round = 0; round < 2; round++) {
        assert_int_equal(test_call(g, NULL, "only 2 step %s 1", trick), 0);
        const uint64_t begin_ns = cox_now_ns();
        submit_step(g, &chat);
        test_await_lines(g, 2, line, (size_t)round + 1);
        await_others(g, COX_CHANNEL_EXECUTE, 2);
        expect_recovered(g, round ? COX_RECOVER_PAUSE_NET : COX_RECOVER_PAUSE);
        const struct test_completion *c = test_await(g, (size_t)round);
        expect_rank(c, 2, code, words);
        if (strcmp(words, "was left after") == 0) {
            uint64_t ms;
            const char *text = strstr(c->ranks[2].text, words);
            assert_int_equal(sscanf(text, "was left after %" SCNu64 " ms", &ms), 1);
            assert_true(ms <= (cox_now_ns() - begin_ns) / COX_NSEC_PER_MSEC);
        }
        for (uint32_t rank = 0; rank < RANK_COUNT; rank++)
            expect_refused(g, rank);
        expect_recovered(g, COX_RECOVER_REINIT);
        expect_recovered(g, COX_RECOVER_START);
        expect_all_serve(g);
    }
}

TEST(m12_an_endless_loop_in_one_rank_is_left)
{
    needs_jumps();
    step_hang("leaves", "spin", "spin", 0, COX_ABORTED, "was left after");
}

/* ---- a process that is held up ---- */

struct pause_thread {
    struct test_group *group;
    struct cox_error err;
    int r;
};

static void *pause_main(void *argument)
{
    struct pause_thread *pause = argument;
    pause->r = test_recover(pause->group, COX_RECOVER_PAUSE, NULL, &pause->err);
    return NULL;
}

/* All stages of a pause are over by the clock before the process runs again: each still has its
 * time. On one processor, where the thread to be left does not run beside the thread that checks
 * it. */
TEST(m12_a_pause_that_is_held_up_leaves_an_endless_loop_all_the_same)
{
    cpu_set_t before, one;
    size_t cpu = 0;
    needs_jumps();
    assert_int_equal(sched_getaffinity(0, sizeof before, &before), 0);
    while (!CPU_ISSET(cpu, &before))
        cpu++;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
    OWN_GROUP *g = group_of(RANK_COUNT, "leaves");
    assert_int_equal(sched_setaffinity(0, sizeof before, &before), 0);
    struct chat chat;
    chat_begin(&chat);
    collect(g);
    assert_int_equal(test_call(g, NULL, "only 2 step spin 1"), 0);
    submit_step(g, &chat);
    test_await_lines(g, 2, "spin", 1);
    await_others(g, COX_CHANNEL_EXECUTE, 2);
    const pid_t pid = cox_executor_pid(test_group_executor(g), 2);
    struct pause_thread pause = {.group = g};
    pthread_t thread = test_thread(pause_main, &pause);
    AWAIT(test_rank_status(test_group_executor(g), 2).channels[COX_CHANNEL_RECOVER].state == 2);
    assert_int_equal(kill(pid, SIGSTOP), 0);
    const uint64_t over_ns = cox_deadline_after_ms(4 * UINT64_C(500));
    while (cox_now_ns() < over_ns)
        sched_yield();
    assert_int_equal(kill(pid, SIGCONT), 0);
    pthread_join(thread, NULL);
    if (pause.r)
        fail_msg("%d: %s", pause.r, pause.err.text);
    expect_rank(test_await(g, 0), 2, COX_ABORTED, "was left after");
    expect_recovered(g, COX_RECOVER_START);
    expect_all_serve(g);
}

TEST(m12_a_blocked_read_in_one_rank_is_interrupted)
{
    step_hang("pauses", "read", "reads", 2000, -EINTR, "the read ended");
}

TEST(m12_a_step_that_asks_comes_out)
{
    step_hang("pauses", "yield", "yields", TEST_PATIENCE_MS, COX_ABORTED, "left a step");
}

/* Opaque requests and pulls, at the same time. */
TEST(m12_both_channels_are_left)
{
    needs_jumps();
    OWN_GROUP *g = group_of(RANK_COUNT, "leaves");
    collect(g);
    for (size_t round = 0; round < 2; round++) {
        assert_int_equal(test_call(g, NULL, "only 1 pull spin"), 0);
        submit_pull(g);
        assert_int_equal(test_submit(g, &test_all, "only 1 spin"), 0);
        test_await_lines(g, 1, "spin", 2 * (round + 1));
        await_others(g, COX_CHANNEL_EXECUTE, 1);
        await_others(g, COX_CHANNEL_TRANSFER, 1);
        expect_recovered(g, COX_RECOVER_PAUSE);
        for (size_t i = 2 * round; i < 2 * round + 2; i++)
            expect_rank(test_await(g, i), 1, COX_ABORTED, "was left after");
        expect_recovered(g, COX_RECOVER_START);
        expect_all_serve(g);
    }
    submit_pull(g);
    assert_int_equal(test_await(g, 4)->status, 0);
}

TEST(m12_a_rank_that_stays_stuck_reports_it)
{
    OWN_GROUP *g = group_of(RANK_COUNT, "pauses");
    struct cox_recover_result results[RANK_COUNT];
    assert_int_equal(test_call(g, NULL, "grace 30"), 0);
    assert_int_equal(test_submit(g, &test_all, "only 1 spin"), 0);
    test_await_lines(g, 1, "spin", 1);
    await_others(g, COX_CHANNEL_EXECUTE, 1); /* it does not end before rank 1 has replied */
    for (int i = 0; i < 2; i++) {
        uint64_t ms = 0;
        assert_int_equal(test_recover(g, COX_RECOVER_PAUSE, results, test_err()), COX_REJECTED);
        for (uint32_t rank = 0; rank < RANK_COUNT; rank++)
            assert_int_equal(results[rank].result, rank == 1 ? COX_TIMEOUT : 0);
        assert_int_equal(sscanf(results[1].text, "stuck for %" SCNu64 " ms", &ms), 1);
        assert_true(ms >= 60);
        assert_contains(results[1].text, "an opaque request");
        assert_contains(results[1].text, "execute channel");
        assert_contains(test_error.text, "rank 1");
    }
    /* The others are paused, and go on when told to. */
    expect_refused(g, 0);
    expect_refused(g, 3);
    expect_told(g, TYPE(START_COMMAND_EXEC));
    const struct test_how others = {.gather = COX_GATHER_ALL, .ranks = 13};
    assert_int_equal(test_call_how(g, NULL, &others, "echo without it"), 0);
}

/* ---- nothing is begun ---- */

TEST(m12_what_comes_while_paused_is_refused_in_order)
{
    OWN_GROUP *g = group_of(2, "pauses");
    const struct test_how how = {.gather = COX_GATHER_ALL, .ranks = 1};
    struct chat chat;
    OWN_COMPLETION c = {0};
    chat_begin(&chat);
    expect_step(g, &chat);
    collect(g);
    for (int i = 0; i < 3; i++) /* while idle, and again */
        expect_told(g, i == 1 ? TYPE(PAUSE_COMMAND_EXEC_ROCE) : TYPE(PAUSE_COMMAND_EXEC));
    for (size_t i = 0; i < 8; i++) {
        assert_int_equal(test_submit_persist(g, &how, "echo anybody"), 0);
        const struct test_completion *reply = test_await(g, i);
        assert_true(i == 0 || reply->sequence > test_await(g, i - 1)->sequence);
        expect_rank(reply, 0, COX_ABORTED, "paused");
    }
    submit_pull(g);
    const struct test_completion *pulled = test_await(g, 8);
    for (uint32_t rank = 0; rank < 2; rank++)
        if (pulled->ranks[rank].outcome != COX_OUTCOME_LATE)
            expect_rank(pulled, rank, COX_ABORTED, "paused");
    assert_int_not_equal(step_call(g, &chat, &c, test_err()), 0);
    for (uint32_t rank = 0; rank < 2; rank++)
        if (c.ranks[rank].outcome != COX_OUTCOME_LATE)
            expect_rank(&c, rank, COX_ABORTED, "paused");
    /* Tables are looked after all the same. */
    const int64_t id = 1000;
    assert_ok(cox_executor_cleanup(test_group_executor(g), &id, 1, test_patience(), test_err()));
    expect_refused(g, 0); /* behind it */
    expect_refused(g, 1);
    expect_told(g, TYPE(START_COMMAND_EXEC));
    expect_told(g, TYPE(START_COMMAND_EXEC));
    assert_int_equal(test_call(g, &c, "tell log"), 0);
    for (uint32_t rank = 0; rank < 2; rank++)
        assert_string_equal(c.ranks[rank].bytes, "pause;pause_net;pause;cleanup 3;start;start;");
    expect_all_serve(g);
}

TEST(m12_a_rank_forgets_its_sequences_in_a_reinit_alone)
{
    OWN_GROUP *g = group_of(RANK_COUNT, "pauses");
    struct chat chat;
    OWN_COMPLETION c = {0};
    chat_begin(&chat);
    expect_step(g, &chat);
    expect_recovered(g, COX_RECOVER_PAUSE);
    expect_recovered(g, COX_RECOVER_START);
    assert_int_not_equal(chat.base, 0);
    expect_step(g, &chat); /* it builds on the one before */
    /* One that fails changes nothing. */
    assert_int_equal(test_call(g, NULL, "recover reinit 9 no"), 0);
    tell(g, TYPE(RECOVER_COMMAND_EXEC));
    expect_step(g, &chat);
    expect_recovered(g, COX_RECOVER_PAUSE);
    expect_recovered(g, COX_RECOVER_REINIT);
    expect_recovered(g, COX_RECOVER_START);
    assert_int_equal(step_call(g, &chat, &c, test_err()), COX_STALE);
    chat.base = 0;
    expect_step(g, &chat);
    expect_step(g, &chat);
}

/* ---- an init ---- */

struct init_thread {
    struct test_group *group;
    const char *key;
    int result;
    struct cox_error err;
};

static void *init_main(void *argument)
{
    struct init_thread *init = argument;
    const struct cox_config_entry config = {init->key, "1"};
    struct cox_init_summary summary;
    init->result = cox_executor_init(test_group_executor(init->group), &config, 1, test_patience(),
                                     &summary, &init->err);
    return NULL;
}

TEST(m12_an_init_that_asks_comes_out)
{
    OWN_GROUP *g = group_of(2, "pauses");
    struct init_thread init = {.group = g, .key = "yield"};
    assert_int_equal(test_call(g, NULL, "grace %d", TEST_PATIENCE_MS), 0);
    pthread_t thread = test_thread(init_main, &init);
    test_await_lines(g, 1, "yields", 1);
    const struct told told = tell(g, TYPE(PAUSE_COMMAND_EXEC));
    pthread_join(thread, NULL);
    for (uint32_t rank = 0; rank < 2; rank++)
        assert_int_equal(told.results[rank], 0);
    assert_int_not_equal(init.result, 0);
    assert_contains(init.err.text, "left an init");
    /* Another one is begun while paused. */
    init = (struct init_thread){.group = g, .key = "none"};
    init_main(&init);
    assert_int_equal(init.result, 0);
    expect_told(g, TYPE(START_COMMAND_EXEC));
    expect_all_serve(g);
}

TEST(m12_an_init_is_never_left)
{
    OWN_GROUP *g = group_of(2, "leaves");
    struct init_thread init = {.group = g, .key = "spin"};
    assert_int_equal(test_call(g, NULL, "grace 20"), 0);
    pthread_t thread = test_thread(init_main, &init);
    test_await_lines(g, 1, "spin", 1);
    const struct told told = tell(g, TYPE(PAUSE_COMMAND_EXEC));
    assert_int_equal(cox_executor_stop(test_group_executor(g)), 1);
    pthread_join(thread, NULL);
    assert_int_equal(told.results[0], 0);
    assert_int_equal(told.results[1], COX_TIMEOUT);
    assert_contains(told.texts[1], "stuck for");
    assert_contains(told.texts[1], "MODEL_INIT");
}

/* ---- again and again ---- */

/* A callback that ends just when it is left: either way there is one reply, and it is right. */
TEST(m12_a_callback_that_ends_as_it_is_left)
{
    needs_jumps();
    OWN_GROUP *g = group_of(2, "leaves");
    size_t done = 0, left = 0;
    assert_int_equal(test_call(g, NULL, "grace 2"), 0);
    /* A busy machine may take long until it is right for once. */
    const uint64_t deadline_ns = test_patience();
    for (size_t i = 0; i < 400 || (left == 0 && cox_now_ns() < deadline_ns); i++) {
        char busy[32];
        snprintf(busy, sizeof busy, "busy %zu", 3800 + 40 * (i % 40));
        assert_int_equal(test_submit_persist(g, &test_all, busy), 0);
        struct told told;
        bool out;
        do { /* the time for a jump is short, on a busy machine */
            told = tell(g, TYPE(PAUSE_COMMAND_EXEC));
            out = told.results[0] == 0 && told.results[1] == 0;
            for (uint32_t rank = 0; rank < 2 && !out; rank++)
                assert_true(told.results[rank] == 0 || told.results[rank] == COX_TIMEOUT);
        } while (!out);
        const struct test_completion *c = test_await(g, i);
        for (uint32_t rank = 0; rank < 2; rank++) {
            if (c->ranks[rank].outcome == COX_OUTCOME_OK) {
                assert_string_equal(c->ranks[rank].bytes, "done");
                done++;
            } else if (c->ranks[rank].outcome == COX_OUTCOME_ERROR) {
                assert_int_equal(c->ranks[rank].code, COX_ABORTED);
                left += strstr(c->ranks[rank].text, "was left after") != NULL;
            }
        }
        expect_told(g, TYPE(START_COMMAND_EXEC));
    }
    print_message("%zu replies, %zu left\n", done, left);
    assert_true(left > 0);
    expect_all_serve(g);
}

struct traffic {
    struct test_group *group;
    struct chat chat;
    _Atomic bool ends;
    size_t replied, refused;
    /* empty: nothing */
    char wrong[512];
};

static bool is_refusal(int status)
{
    return status == COX_REJECTED || status == COX_ABORTED || status == COX_STATE ||
           status == COX_STALE;
}

/* Steps and requests, one after the other. */
static void *traffic_main(void *argument)
{
    struct traffic *traffic = argument;
    while (!atomic_load(&traffic->ends) && !traffic->wrong[0]) {
        int r;
        if (!chat_step(traffic->group, &traffic->chat, &r, test_err()))
            snprintf(traffic->wrong, sizeof traffic->wrong, "a wrong token");
        else if (r && !is_refusal(r))
            snprintf(traffic->wrong, sizeof traffic->wrong, "a step: %d: %.300s", r,
                     test_error.text);
        *(r ? &traffic->refused : &traffic->replied) += 1;
    }
    return NULL;
}

/* That many, while steps of the chat go on; between two of them it may linger that long. */
static void pause_at_random(struct test_group *g, const struct chat *chat, int count,
                            uint64_t linger_ns)
{
    struct traffic *traffic = calloc(1, sizeof *traffic);
    unsigned seed = 1;
    assert_non_null(traffic);
    traffic->group = g;
    traffic->chat = *chat;
    pthread_t thread = test_thread(traffic_main, traffic);
    int r = 0;
    for (int i = 0; i < count && r == 0; i++) {
        const bool reinit = rand_r(&seed) % 3 == 0, again = rand_r(&seed) % 3 == 0;
        if (rand_r(&seed) % 2)
            for (uint64_t until_ns = cox_deadline_after_ns((uint64_t)rand_r(&seed) % linger_ns);
                 cox_now_ns() < until_ns;)
                sched_yield(); /* somewhere in a step */
        r = test_recover(g, again ? COX_RECOVER_PAUSE_NET : COX_RECOVER_PAUSE, NULL, test_err());
        if (r == 0 && reinit)
            r = test_recover(g, COX_RECOVER_REINIT, NULL, test_err());
        if (r == 0)
            r = test_recover(g, COX_RECOVER_START, NULL, test_err());
    }
    atomic_store(&traffic->ends, true);
    pthread_join(thread, NULL);
    const struct traffic ended = *traffic;
    free(traffic);
    assert_ok(r);
    if (ended.wrong[0])
        fail_msg("%s", ended.wrong);
    print_message("%zu steps, %zu refused\n", ended.replied, ended.refused);
    assert_true(ended.replied > 0);
}

TEST(m12_pauses_at_random_against_running_steps)
{
    OWN_GROUP *g = group_of(RANK_COUNT, "pauses");
    struct chat chat;
    chat_begin(&chat);
    assert_int_equal(test_call(g, NULL, "grace %d", TEST_PATIENCE_MS), 0);
    pause_at_random(g, &chat, 200, 3 * COX_NSEC_PER_MSEC);
    expect_all_serve(g);
}

/* ---- the reference worker ---- */

#define GENERATED 24u

static struct test_group *model_group(uint32_t rank_count)
{
    static const char *const command[] = {COX_TEST_BIN_DIR "/coxswain-worker", "--model",
                                          COX_TEST_SOURCE_DIR "/models/sums", NULL};
    test_needs_processes();
    return group_with(rank_count, command);
}

/* The undisturbed result: the prompt and what follows it. */
static void model_reference(int32_t reference[GENERATED])
{
    OWN_GROUP *g = model_group(1);
    struct chat chat;
    chat_begin(&chat);
    while (chat.count < GENERATED) {
        OWN_COMPLETION c = {0};
        assert_ok(step_call(g, &chat, &c, test_err()));
        assert_int_equal(c.token_count, 1);
        chat.tokens[chat.count++] = c.tokens[0];
        chat.base = c.sequence;
    }
    memcpy(reference, chat.tokens, GENERATED * sizeof reference[0]);
}

TEST(m12_the_model_goes_on_with_the_same_tokens_after_pauses)
{
    int32_t reference[GENERATED];
    struct chat chat;
    model_reference(reference);
    for (uint32_t n = 1; n <= 4; n *= 2) {
        OWN_GROUP *g = model_group(n);
        chat_begin(&chat);
        chat.reference = reference;
        chat.limit = GENERATED;
        pause_at_random(g, &chat, 60, 30 * COX_NSEC_PER_MSEC);
        while (chat.count + 1 < GENERATED)
            expect_step(g, &chat);
    }
}

#if COX_TESTING
/* Generates to the end, whatever is refused in between. */
static void *generate_main(void *argument)
{
    struct traffic *traffic = argument;
    const uint64_t deadline_ns = cox_deadline_after_ms(3 * TEST_PATIENCE_MS);
    while (traffic->chat.count + 1 < GENERATED && !traffic->wrong[0]) {
        int r;
        if (!chat_step(traffic->group, &traffic->chat, &r, test_err()))
            snprintf(traffic->wrong, sizeof traffic->wrong, "a wrong token");
        else if (r && (!is_refusal(r) || cox_now_ns() > deadline_ns))
            snprintf(traffic->wrong, sizeof traffic->wrong, "a step: %d: %.300s", r,
                     test_error.text);
        traffic->refused += r != 0;
    }
    return NULL;
}

/* Rank 2 hangs in the middle of a step, while others wait for it in their group. */
static void model_hang(const int32_t *reference, const char *plan)
{
    struct traffic *traffic = calloc(1, sizeof *traffic);
    char path[] = "/tmp/cox_pause_XXXXXX";
    int fd = mkostemp(path, O_CLOEXEC);
    assert_true(traffic && fd >= 0);
    assert_int_equal(ftruncate(fd, sizeof(struct cox_fault_counts)), 0);
    const struct cox_fault_counts *counts =
        mmap(NULL, sizeof *counts, PROT_READ, MAP_SHARED, fd, 0);
    assert_true(counts != MAP_FAILED);
    setenv("COXSWAIN_FAULT", plan, 1);
    setenv("COXSWAIN_FAULT_COUNTS", path, 1);
    OWN_GROUP *g = model_group(RANK_COUNT);
    unsetenv("COXSWAIN_FAULT");
    unsetenv("COXSWAIN_FAULT_COUNTS");
    traffic->group = g;
    chat_begin(&traffic->chat);
    traffic->chat.reference = reference;
    traffic->chat.limit = GENERATED;
    pthread_t thread = test_thread(generate_main, traffic);
    AWAIT(atomic_load(&counts->struck));
    static const enum cox_recover_command commands[] = {COX_RECOVER_PAUSE, COX_RECOVER_CLEAR,
                                                        COX_RECOVER_REINIT, COX_RECOVER_START};
    int r = 0;
    for (size_t i = 0; r == 0 && i < 4; i++)
        r = test_recover(g, commands[i], NULL, test_err());
    pthread_join(thread, NULL);
    const struct traffic ended = *traffic;
    free(traffic);
    munmap((void *)(uintptr_t)counts, sizeof *counts);
    close(fd);
    unlink(path);
    if (r || ended.wrong[0])
        fail_msg("%s: %d: %s; %s", plan, r, r ? test_error.text : "", ended.wrong);
    assert_true(ended.refused > 0);
}

TEST(m12_a_rank_that_hangs_in_the_model_goes_on_with_the_same_tokens)
{
    static const char *const plans[] = {
        "exchange.written:spin:2:1",
        "exchange.written:read:2:30",
        "exchange.read:spin:2:40",
        "group.arrived:spin:2:60",
    };
    int32_t reference[GENERATED];
    needs_jumps();
    model_reference(reference);
    for (size_t i = 0; i < sizeof plans / sizeof plans[0]; i++)
        model_hang(reference, plans[i]);
}
#endif
