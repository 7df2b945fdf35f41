/* The control connections of a group, and what it says of itself, whatever its workers and the
 * handlers of its host are in. */
#include "channel/shm/state.h"
#include "channel/socket/closer.h"
#include "channel/socket/socket.h"
#include "coordinator/executor/executor_internal.h"
#include "coordinator/server/control_server.h"
#include "program/client/client.h"
#include "proto/control.pb-c.h"
#include "testing.h"

#include <arpa/inet.h>
#include <netinet/in.h>

typedef CoxswainControl__StatusReply status_reply;

/* The linker sends the libraries' calls here. */
static atomic_bool no_threads;

int __real_pthread_create(pthread_t *ret_thread, const pthread_attr_t *attributes,
                          void *(*main)(void *), void *argument);
int __wrap_pthread_create(pthread_t *ret_thread, const pthread_attr_t *attributes,
                          void *(*main)(void *), void *argument);
int __wrap_pthread_create(pthread_t *ret_thread, const pthread_attr_t *attributes,
                          void *(*main)(void *), void *argument)
{
    return atomic_load(&no_threads) ? EAGAIN
                                    : __real_pthread_create(ret_thread, attributes, main, argument);
}

/* ---- status, asked directly ---- */

struct stuck {
    struct cox_executor *executor;
    sem_t entered, go_on;
    /* as the handler saw it */
    struct cox_executor_status inside;
};

static void stuck_handler(void *context, const struct cox_completion *completion)
{
    struct stuck *stuck = context;
    struct cox_rank_status ranks[2];
    (void)completion;
    cox_executor_read_status(stuck->executor, &stuck->inside, ranks);
    sem_post(&stuck->entered);
    sem_wait(&stuck->go_on);
}

TEST(p3_status_replies_while_a_handler_is_stuck)
{
    struct test_group *group = test_group_start(2, NULL);
    struct stuck stuck = {.executor = test_group_executor(group)};
    struct cox_executor_status status;
    struct cox_rank_status ranks[2];
    sem_init(&stuck.entered, 0, 0);
    sem_init(&stuck.go_on, 0, 0);
    assert_ok(cox_executor_set_handler(stuck.executor, COX_CHANNEL_EXECUTE, stuck_handler, &stuck));
    uint64_t sequence;
    for (int i = 0; i < 3; i++) /* one is in the handler, two are behind it */
        assert_ok(cox_executor_submit_opaque(stuck.executor, "echo x", 6,
                                             SUBMIT_WITH(.deadline_ns = test_patience()), &sequence,
                                             test_err()));
    assert_true(test_sem_await(&stuck.entered));
    cox_executor_read_status(stuck.executor, &status, ranks);
    assert_string_equal(status.name, cox_executor_name(stuck.executor));
    assert_int_equal(status.channels[COX_CHANNEL_EXECUTE].published, sequence);
    assert_true(status.channels[COX_CHANNEL_EXECUTE].in_flight >= 2);
    assert_int_equal(status.channels[COX_CHANNEL_EXECUTE].stats.submitted, 3);
    assert_true(stuck.inside.rank_count == 2 && stuck.inside.depth == status.depth);
    for (uint32_t rank = 0; rank < 2; rank++) {
        assert_int_equal(ranks[rank].liveness, COX_LIVENESS_ALIVE);
        assert_int_equal(ranks[rank].pid, cox_executor_pid(stuck.executor, rank));
        assert_int_equal(ranks[rank].incarnation, 1);
        assert_true(ranks[rank].channels[COX_CHANNEL_EXECUTE].known);
        assert_string_equal(ranks[rank].death, "");
    }
    for (int i = 0; i < 3; i++)
        sem_post(&stuck.go_on);
    test_group_free(group);
    sem_destroy(&stuck.entered);
    sem_destroy(&stuck.go_on);
}

GROUP_TEST(a25_p3_status_reports_what_a_rank_does_and_which_is_late, 2)
{
    struct test_pipe *pipe = test_pipe_new();
    struct cox_executor_status status;
    struct cox_rank_status ranks[2];
    const struct test_how how = {.ranks = 2, .timeout_ms = 300};
    assert_int_equal(test_call_how(g, NULL, &how, "block %s", test_pipe_path(pipe)), COX_TIMEOUT);
    test_await_lines(g, 1, "blocked", 1);
    cox_executor_read_status(executor, &status, ranks);
    struct cox_rank_channel_status *line = &ranks[1].channels[COX_CHANNEL_EXECUTE];
    assert_string_equal(cox_rank_state_name(line->state), "running");
    assert_int_equal(line->sequence, status.channels[COX_CHANNEL_EXECUTE].published);
    assert_true(line->age_ns > 0 && line->age_ns < test_patience());
    assert_int_equal(status.channels[COX_CHANNEL_EXECUTE].late.words[0], 2);
    assert_int_equal(status.channels[COX_CHANNEL_EXECUTE].in_flight, 0);
    assert_int_equal(status.channels[COX_CHANNEL_EXECUTE].stats.timeouts, 1);
    test_pipe_release(pipe, 1);
    assert_int_equal(test_submit_persist(g, &(struct test_how){0}, "echo x"), 0);
    test_await(g, 0);
    cox_executor_read_status(executor, &status, ranks);
    assert_int_equal(status.channels[COX_CHANNEL_EXECUTE].late.words[0], 0);
    assert_int_equal(status.channels[COX_CHANNEL_EXECUTE].stats.late_replies, 1);
}

GROUP_TEST(p10_status_believes_nothing_that_a_rank_writes, 1)
{
    struct cox_layout_rank_line *line = cox_state_line(&executor->control, 0, COX_CHANNEL_LINK);
    /* In a sealed group the coordinator itself may only read there. */
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    assert_int_equal(
        mprotect((void *)((uintptr_t)line & ~(page - 1)), page, PROT_READ | PROT_WRITE), 0);
    for (uint64_t bits = 1; bits; bits = bits * 3 + 1) {
        struct cox_executor_status status;
        struct cox_rank_status rank;
        atomic_store(&line->word, bits);
        atomic_store(&line->stamp_ns, ~bits);
        cox_executor_read_status(executor, &status, &rank);
        assert_non_null(cox_rank_state_name(rank.channels[COX_CHANNEL_LINK].state));
        assert_true(rank.channels[COX_CHANNEL_LINK].age_ns <= cox_now_ns());
        if (bits >> 60)
            break;
    }
    atomic_store(&line->word, UINT64_MAX);
    atomic_store(&line->stamp_ns, UINT64_MAX);
    struct cox_executor_status status;
    struct cox_rank_status rank;
    cox_executor_read_status(executor, &status, &rank);
    assert_string_equal(cox_rank_state_name(rank.channels[COX_CHANNEL_LINK].state), "unknown");
    assert_int_equal(rank.channels[COX_CHANNEL_LINK].age_ns, 0);
    assert_string_equal(cox_rank_liveness_name(99), "unknown");
}

/* ---- connections ---- */

static _Atomic int stop_count;

static void on_stop(void *context, pid_t pid)
{
    (void)context, (void)pid;
    atomic_fetch_add(&stop_count, 1);
}

static struct cox_control_server *service_new(void)
{
    const struct cox_control_options options = {.model = "/a/model", .stop = on_stop};
    struct cox_control_server *service = NULL;
    assert_ok(cox_control_server_new(&options, &service, test_err()));
    return service;
}

/* From now on the group can be asked; refusal: of prompts. */
static void group_attach(struct cox_control_server *service, struct test_group *group,
                         const char *refusal)
{
    struct cox_control_phase phase = {.executor = test_group_executor(group)};
    snprintf(phase.refusal, sizeof phase.refusal, "%s", refusal);
    cox_control_server_update(service, &phase);
}

static void pair_open(int fds[2])
{
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
}

/* Returns our end. */
static int connect_to(struct cox_control_server *service)
{
    int fds[2];
    pair_open(fds);
    assert_ok(cox_control_server_take(service, fds[1], test_err()));
    return fds[0];
}

static struct cox_client client_to(struct cox_control_server *service)
{
    struct cox_client client;
    cox_client_init(&client, connect_to(service));
    return client;
}

static void await_connections(struct cox_control_server *service, uint32_t count)
{
    uint64_t deadline_ns = test_patience();
    while (cox_control_server_connection_count(service) != count) {
        if (cox_now_ns() > deadline_ns)
            fail_msg("%u connections are served, not %u",
                     cox_control_server_connection_count(service), count);
        nanosleep(&(struct timespec){.tv_nsec = COX_NSEC_PER_MSEC}, NULL);
    }
}

static int ask(struct cox_client *client, int request_case, CoxswainControl__ControlReply **reply,
               struct cox_error *err)
{
    CoxswainControl__ControlRequest request = COXSWAIN_CONTROL__CONTROL_REQUEST__INIT;
    CoxswainControl__StatusRequest status = COXSWAIN_CONTROL__STATUS_REQUEST__INIT;
    CoxswainControl__StopRequest stop = COXSWAIN_CONTROL__STOP_REQUEST__INIT;
    CoxswainControl__CancelRequest cancel = COXSWAIN_CONTROL__CANCEL_REQUEST__INIT;
    CoxswainControl__CompleteRequest complete = COXSWAIN_CONTROL__COMPLETE_REQUEST__INIT;
    *err = (struct cox_error){0};
    request.request_case = (CoxswainControl__ControlRequest__RequestCase)request_case;
    if (request_case == COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_STATUS)
        request.status = &status;
    else if (request_case == COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_STOP)
        request.stop = &stop;
    else if (request_case == COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_CANCEL)
        request.cancel = &cancel;
    else
        request.complete = &complete;
    return cox_client_ask(client, &request, test_patience(), reply, err);
}

#define ASK_STATUS COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_STATUS
#define ASK_STOP COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_STOP
#define ASK_CANCEL COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_CANCEL
#define ASK_COMPLETE COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_COMPLETE

GROUP_TEST(a_service_without_its_group_and_without_prompts_says_why, 2)
{
    struct cox_control_server *service = service_new();
    CoxswainControl__ControlReply *reply;
    struct cox_client client = client_to(service);
    assert_refused(ask(&client, ASK_STATUS, &reply, test_err()), COX_STATE, "being started");
    assert_int_equal(ask(&client, ASK_STATUS, &reply, test_err()),
                     COX_CLOSED); /* it ended with that */
    cox_client_close(&client);

    group_attach(service, g, "it sings");
    client = client_to(service);
    assert_ok(ask(&client, ASK_CANCEL, &reply, test_err()));
    assert_int_equal(reply->reply_case, COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_DONE);
    for (int i = 0; i < 3; i++) { /* one connection, several questions */
        assert_ok(ask(&client, ASK_STATUS, &reply, test_err()));
        const status_reply *status = reply->status;
        assert_string_equal(status->name, cox_executor_name(executor));
        assert_string_equal(status->model, "/a/model");
        assert_string_equal(status->refusal, "it sings");
        assert_null(status->serving);
        assert_int_equal(status->n_ranks, 2);
        assert_int_equal(status->pid, getpid());
    }
    assert_int_equal(ask(&client, ASK_COMPLETE, &reply, test_err()), COX_UNSUPPORTED);
    assert_string_equal(test_error.text, "it sings");
    cox_client_close(&client);
    cox_control_server_free(service);
}

GROUP_TEST(p3_status_replies_where_no_thread_can_be_started, 2)
{
    struct cox_control_server *service = service_new();
    CoxswainControl__ControlReply *reply;
    int fds[2];
    group_attach(service, g, "");
    atomic_store(&no_threads, true);
    for (int i = 0; i < 3; i++) { /* one after the other */
        struct cox_client client = client_to(service);
        assert_ok(ask(&client, ASK_STATUS, &reply, test_err()));
        assert_int_equal(reply->status->n_ranks, 2);
        if (i == 2) { /* and not two at a time */
            pair_open(fds);
            assert_refused(cox_control_server_take(service, fds[1], test_err()), -EAGAIN,
                           "starting a thread");
            close(fds[0]);
            close(fds[1]);
        }
        cox_client_close(&client);
        await_connections(service, 0);
    }
    struct cox_client client = client_to(service); /* the end does not wait for its client */
    atomic_store(&no_threads, false);
    cox_control_server_free(service);
    cox_client_close(&client);
}

TEST(stop_is_passed_on_and_its_connection_lasts_until_the_end)
{
    struct cox_control_server *service = service_new();
    CoxswainControl__ControlReply *reply;
    _cox_cleanup_(cox_client_close) struct cox_client client = client_to(service);
    atomic_store(&stop_count, 0);
    for (int i = 1; i <= 2; i++) { /* also of a group that is being started */
        assert_ok(ask(&client, ASK_STOP, &reply, test_err()));
        assert_int_equal(reply->reply_case, COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_DONE);
        assert_ok(ask(&client, ASK_STOP, &reply, test_err())); /* the one before has returned */
        assert_int_equal(atomic_load(&stop_count) >= 2 * i - 1, 1);
    }
    struct pollfd fd = {.fd = client.stream.fd, .events = POLLIN};
    assert_int_equal(poll(&fd, 1, 0), 0);
    cox_control_server_free(service);
    assert_int_equal(poll(&fd, 1, TEST_PATIENCE_MS), 1);
    assert_int_equal(cox_stream_fill(&client.stream), COX_CLOSED);
}

/* A connection that is not counted any more may lie with the thread that closes it. */
static void await_fds(size_t count)
{
    AWAIT(test_count_fds() == count);
    assert_int_equal(test_count_fds(), count);
}

/* A connection without a request is closed for one with a request, however many there are. */
GROUP_TEST(b21_a_client_without_requests_has_no_place_when_there_are_many, 1)
{
    enum { COUNT = 3 * COX_CONTROL_CONNECTION_MAX };
    struct cox_control_server *service = service_new();
    struct cox_client silent[COUNT];
    CoxswainControl__ControlReply *reply;
    test_await_socket(g); /* as above */
    size_t before = test_count_fds();
    group_attach(service, g, "");
    for (int i = 0; i < COUNT; i++) {
        silent[i] = client_to(service);
        await_connections(service, i < COX_CONTROL_CONNECTION_MAX ? (uint32_t)i + 1
                                                                  : COX_CONTROL_CONNECTION_MAX);
        struct cox_client client = client_to(service);
        assert_ok(ask(&client, ASK_STATUS, &reply, test_err()));
        cox_client_close(&client);
        await_connections(service, i + 1 < COX_CONTROL_CONNECTION_MAX
                                       ? (uint32_t)i + 1
                                       : COX_CONTROL_CONNECTION_MAX - 1);
    }
    /* They get the reason, the oldest first; the youngest could still send a request. */
    for (int i = 0; i < 2; i++) {
        assert_int_equal(cox_client_next(&silent[i], &reply, test_err()), COX_EMPTY);
        struct pollfd fd = {.fd = silent[i].stream.fd, .events = POLLIN};
        assert_int_equal(poll(&fd, 1, TEST_PATIENCE_MS), 1);
        assert_int_equal(cox_stream_fill(&silent[i].stream), 0);
        assert_ok(cox_client_next(&silent[i], &reply, test_err()));
        assert_int_equal(reply->reply_case, COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_ERROR);
        assert_int_equal(reply->error->code, COX_FULL);
        assert_contains(reply->error->text, "asked for nothing");
    }
    /* Also a client that asks too late, which must not take that for the end of the group. */
    assert_refused(ask(&silent[2], ASK_STATUS, &reply, test_err()), COX_FULL, "asked for nothing");
    assert_int_equal(ask(&silent[2], ASK_STATUS, &reply, test_err()),
                     COX_CLOSED); /* it ended with that */
    assert_ok(ask(&silent[COUNT - 1], ASK_STATUS, &reply, test_err()));
    for (int i = 0; i < COUNT; i++)
        cox_client_close(&silent[i]);
    await_connections(service, 0);
    await_fds(before);
    cox_control_server_free(service);
}

TEST(full_of_clients_that_sent_a_stop)
{
    struct cox_control_server *service = service_new();
    struct cox_client clients[COX_CONTROL_CONNECTION_MAX];
    CoxswainControl__ControlReply *reply;
    int more[2];
    for (int i = 0; i < COX_CONTROL_CONNECTION_MAX; i++) {
        clients[i] = client_to(service);
        assert_ok(ask(&clients[i], ASK_STOP, &reply, test_err()));
    }
    pair_open(more);
    int r;
    while ((r = cox_control_server_take(service, more[1], test_err())) ==
           0) { /* one had not gone on yet */
        close(more[0]);
        pair_open(more);
    }
    assert_refused(r, COX_FULL, "32 control connections are busy");
    close(more[0]);
    close(more[1]);
    cox_control_server_free(service);
    for (int i = 0; i < COX_CONTROL_CONNECTION_MAX; i++)
        cox_client_close(&clients[i]);
}

/* A unix socket whose queue has a TCP socket that lingers over bytes that are never read: until
 * *ret_end is closed, its last close hangs. */
static int trap(int *ret_end)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    const struct linger on = {1, 3600};
    static const char bytes[65536];
    socklen_t size = sizeof address;
    const int small = 4096;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), pair[2];
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(listener, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
    assert_int_equal(bind(listener, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(listen(listener, 16), 0);
    assert_int_equal(getsockname(listener, (struct sockaddr *)&address, &size), 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&address, sizeof address), 0);
    *ret_end = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    assert_true(*ret_end >= 0);
    close(listener);
    while (send(fd, bytes, sizeof bytes, MSG_DONTWAIT) > 0)
        continue;
    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_LINGER, &on, sizeof on), 0);
    assert_int_equal(cox_socket_pair(pair), 0);
    assert_int_equal(cox_socket_send(pair[0], "x", 1, &fd, 1, test_patience()), 0);
    close(fd);
    close(pair[0]);
    return pair[1];
}

/* A place may be long in coming where threads of connections that are served still do not run. */
static int take_patiently(struct cox_control_server *service, int fd, struct cox_error *err)
{
    const uint64_t deadline_ns = test_patience();
    for (;;) {
        cox_error_clear(err); /* or it keeps the first text, and the last one is not seen */
        int r = cox_control_server_take(service, fd, err);
        if (r != COX_FULL || !strstr(err->text, "are busy") || cox_now_ns() >= deadline_ns)
            return r;
        nanosleep(&(struct timespec){.tv_nsec = COX_NSEC_PER_MSEC}, NULL);
    }
}

/* Clients that send such, one after the other, do not take all fds of the coordinator. */
TEST(g1g_so_many_closes_hang_that_no_client_is_served)
{
    enum { MOST = COX_CLOSER_WAITING_MAX + COX_CONTROL_CONNECTION_MAX };
    static int ends[MOST + 1];
    struct rlimit limit, before;
    uint32_t count = 0;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    limit = before;
    limit.rlim_cur = 16384 < limit.rlim_max ? 16384 : limit.rlim_max;
    if (limit.rlim_cur < 8192)
        skip();
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &limit), 0);
    const size_t fd_count = test_count_fds();
    struct cox_control_server *service = service_new();
    for (int r = 0; r == 0 && count <= MOST; count++) {
        int fds[2], unwanted = trap(&ends[count]);
        pair_open(fds);
        assert_int_equal(cox_socket_send(fds[0], "x", 1, &unwanted, 1, test_patience()), 0);
        close(unwanted);
        close(fds[0]);
        r = take_patiently(service, fds[1], test_err());
        if (r == 0)
            continue;
        assert_int_equal(r, COX_FULL);
        if (!strstr(test_error.text, "their closes hang"))
            fail_msg("after %zu connections: %s", (size_t)count, test_error.text);
        close(ends[count]);
        ends[count] = -1;
        close(fds[1]);
    }
    if (count > MOST)
        fail_msg("%u connections with fds whose closes hang, and more are let in", count);
    for (uint32_t i = 0; i < count; i++)
        if (ends[i] >= 0)
            close(ends[i]);
    cox_control_server_free(service);
    await_fds(fd_count);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
}

static void bytes_send(int fd, const void *bytes, size_t size)
{
    for (size_t sent = 0; sent < size;) {
        ssize_t r = send(fd, (const char *)bytes + sent, size - sent, MSG_NOSIGNAL);
        if (r < 0)
            return; /* it had enough */
        sent += (size_t)r;
    }
}

TEST(b14_a_client_believes_no_group_either)
{
    static const struct {
        const char *bytes;
        size_t size;
        int code;
    } replies[] = {
        {"\0\0\0\0", 4, COX_CORRUPT},
        {"\xff\xff\xff\xff", 4, COX_CORRUPT},
        {"\2\0\0\0\xff\xff", 6, COX_CORRUPT},
        {"\2\0\0\0\x22\0", 6, COX_REJECTED},         /* an error without a word */
        {"\4\0\0\0\x22\2\x08\x63", 8, COX_REJECTED}, /* of a code that is none */
        {"\5\0\0\0\x0a\0", 6, COX_CLOSED},           /* and no more */
        {"", 0, COX_CLOSED},
    };
    for (size_t i = 0; i < sizeof replies / sizeof *replies; i++) {
        int fds[2];
        struct cox_client client;
        CoxswainControl__ControlReply *reply;
        pair_open(fds);
        cox_client_init(&client, fds[0]);
        bytes_send(fds[1], replies[i].bytes, replies[i].size);
        shutdown(fds[1], SHUT_WR);
        assert_int_equal(ask(&client, ASK_STATUS, &reply, test_err()), replies[i].code);
        assert_true(test_error.text[0]);
        cox_client_close(&client);
        close(fds[1]);
    }
}

TEST(text_of_another_process_is_made_fit_for_a_terminal)
{
    static const char *const pairs[][2] = {
        {"plain\ttext\nhere", "plain\ttext\nhere"},
        {"\x1b[31mred\x07", "?[31mred?"},
        {"h\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80", "h\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80"},
        {"\xc3", "?"},
        {"\xe2\x82", "??"},
        {"\xc0\xaf\xed\xa0\x80\xf5", "??????"},
        {"\xc2\x9b\x7f", "???"},
    };
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        char text[64];
        snprintf(text, sizeof text, "%s", pairs[i][0]);
        cox_client_clean_text(text);
        assert_string_equal(text, pairs[i][1]);
    }
}
