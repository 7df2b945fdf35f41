/* The client's side, at control sockets that do not keep their promises. */
#include "channel/socket/hello.h"
#include "control_socket_fixture.h"

#include <sys/time.h>

static char path[100];
static int listener = -1;

static void listen_at_path(int backlog)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    mkdir(runtime_dir, 0700);
    snprintf(path, sizeof path, "%s/odd.sock", runtime_dir);
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    unlink(path);
    listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(listener, (const struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(listen(listener, backlog), 0);
}

/* What an odd control socket replies with: a hello reply with these changes, or other bytes. */
struct script {
    const char *what;
    int expected;
    /* the reply says so many fds; so many come with the first byte, and with the last one */
    uint32_t fds_said, fd_count, late_count;
    /* what is missing at its end, and what stands at a place in it */
    int cut;
    uint8_t at, value;
    /* in place of it the end of a refusal, from the length of its reason on; nothing: no reply */
    const char *refusal;
    size_t refusal_size;
    bool nothing;
    /* the connection is closed at once, not when the client has gone */
    bool closes;
    enum cox_hello_role role;
    /* set by script_format */
    uint8_t bytes[512];
    size_t size;
};

#define REFUSAL(text) .refusal = text, .refusal_size = sizeof text - 1

static void script_format(struct script *script)
{
    static const struct cox_hello_reply said = {.version = 1, .rank = 1, .rank_count = 4};
    if (script->nothing)
        return;
    cox_hello_reply_format(&said, script->fds_said, script->bytes);
    if (script->value)
        script->bytes[script->at] = script->value;
    script->size = (size_t)(COX_HELLO_REPLY_SIZE - script->cut);
    if (!script->refusal)
        return;
    script->bytes[0] = 0;
    script->bytes[1] = COX_FULL;
    memcpy(script->bytes + 2, script->refusal, script->refusal_size);
    script->size = 2 + script->refusal_size;
}

static void *odd_socket(void *argument)
{
    const struct script *script = argument;
    uint8_t frame[COX_HELLO_SIZE];
    int many[COX_SOCKET_FD_COUNT_MAX];
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    for (int i = 0; i < COX_SOCKET_FD_COUNT_MAX; i++)
        many[i] = host_fds[i % COX_HELLO_FD_COUNT_MAX];
    size_t late = script->late_count > 0;
    if (cox_socket_receive(fd, frame, sizeof frame, NULL, 0, NULL, PATIENCE) == 0 && script->size) {
        cox_socket_send(fd, script->bytes, script->size - late, many, script->fd_count, PATIENCE);
        if (late)
            cox_socket_send(fd, script->bytes + script->size - 1, 1, many, script->late_count,
                            PATIENCE);
    }
    if (!script->closes)
        cox_socket_receive(fd, frame, 1, NULL, 0, NULL, PATIENCE);
    close(fd);
    return NULL;
}

static void play(struct script *script)
{
    struct cox_hello hello = {.role = script->role ? script->role : COX_HELLO_WORKER, .rank = 1};
    struct cox_control_connection session;
    memset(&session, 0x5a, sizeof session);
    script_format(script);
    int before = fd_count();
    if (hello.role != COX_HELLO_WORKER)
        hello.rank = 0;
    pthread_t thread = test_thread(odd_socket, script);
    uint64_t deadline_ns = script->expected == COX_TIMEOUT ? cox_deadline_after_ms(50) : PATIENCE;
    int r = cox_control_socket_connect(path, &hello, deadline_ns, &session, test_err());
    if (r != script->expected)
        fail_msg("%s: %d '%s', expected %d", script->what, r, test_error.text, script->expected);
    if (r == 0)
        cox_control_connection_close(&session);
    else {
        assert_int_equal(test_error.code, r);
        assert_int_equal(session.fd, 0x5a5a5a5a);
    }
    pthread_join(thread, NULL);
    if (fd_count() != before)
        fail_msg("%s: %d fds, then %d", script->what, before, fd_count());
}

SOCKET_TEST(a11_k18_b17_an_odd_reply_is_corrupt_and_leaves_nothing)
{
    struct script scripts[] = {
        {"in order", 0, 4, .fd_count = 4},
        {"in order, no fds", 0, 0, .fd_count = 0},
        {"one too few", COX_CORRUPT, 4, .fd_count = 3},
        {"one too many", COX_CORRUPT, 4, .fd_count = 5},
        {"none", COX_CORRUPT, 4, .fd_count = 0},
        {"unexpected", COX_CORRUPT, 0, .fd_count = 1},
        {"more than it takes", COX_CORRUPT, 33, .fd_count = 33},
        {"as many as there are", COX_CORRUPT, 128, .fd_count = 128},
        {"for a command", COX_CORRUPT, 4, .fd_count = 4, .role = COX_HELLO_COMMAND},
        {"late fds", COX_CORRUPT, 4, .fd_count = 4, .late_count = 1},
        {"all fds late", COX_CORRUPT, 4, .fd_count = 0, .late_count = 4},
        {"more bytes", COX_CORRUPT, 4, .fd_count = 4, .cut = -1},
        {"cut", COX_CORRUPT, 4, .fd_count = 4, .cut = 1, .closes = true},
        {"one byte", COX_CORRUPT, 4, .fd_count = 4, .cut = COX_HELLO_REPLY_SIZE - 1,
         .closes = true},
        {"another rank", COX_CORRUPT, 4, .fd_count = 4, .at = 1 + 12, .value = 2},
        {"no answer", COX_CORRUPT, 4, .fd_count = 4, .at = 0, .value = 2},
        {"refused", COX_FULL, REFUSAL("\2no"), .closes = true},
        {"refused with an fd", COX_CORRUPT, .fd_count = 1, REFUSAL("\2no"), .closes = true},
        {"half a reason", COX_CORRUPT, REFUSAL("\11no"), .closes = true},
        {"no reason's length", COX_CORRUPT, REFUSAL(""), .closes = true},
        {"an empty reason", COX_FULL, REFUSAL("\0"), .closes = true},
        {"nothing", COX_CLOSED, .nothing = true, .closes = true},
    };
    listen_at_path(8);
    for (size_t i = 0; i < sizeof scripts / sizeof *scripts; i++)
        play(&scripts[i]);
    cox_close_fd(&listener);
}

/* One after the other. */
struct replies {
    const struct script *scripts;
    size_t count;
};

static void *odd_sockets(void *argument)
{
    const struct replies *replies = argument;
    for (size_t i = 0; i < replies->count; i++)
        odd_socket((void *)(uintptr_t)&replies->scripts[i]);
    return NULL;
}

/* Of a reply that is sent over a socket: whatever comes, it is a hello reply or an error, and
 * nothing stays. */
SOCKET_TEST(p10_a11_any_bit_of_an_reply_may_be_another)
{
    enum { BIT_COUNT = 8 * COX_HELLO_REPLY_SIZE, RANDOM_COUNT = 500 };
    struct script *scripts = calloc(BIT_COUNT + RANDOM_COUNT, sizeof *scripts);
    struct replies replies = {scripts, BIT_COUNT + RANDOM_COUNT};
    struct cox_hello hello = worker_hello();
    uint64_t seed = 17;
    size_t accepted = 0;
    assert_non_null(scripts);
    for (size_t i = 0; i < replies.count; i++) {
        scripts[i] = (struct script){"flipped", 0, 4, .fd_count = 4, .closes = true};
        script_format(&scripts[i]);
        if (i < BIT_COUNT) {
            scripts[i].bytes[i / 8] ^= (uint8_t)(1u << (i % 8));
            continue;
        }
        scripts[i].size = random_next(&seed) % sizeof scripts[i].bytes;
        scripts[i].fd_count =
            random_next(&seed) % 2 ? (uint32_t)random_next(&seed) % COX_SOCKET_FD_COUNT_MAX : 0;
        scripts[i].late_count = scripts[i].size > 1 && random_next(&seed) % 4 == 0;
        for (size_t at = 0; at < sizeof scripts[i].bytes; at++)
            scripts[i].bytes[at] = (uint8_t)random_next(&seed);
        scripts[i].bytes[0] %= 3;
    }
    listen_at_path(8);
    int before = fd_count();
    pthread_t thread = test_thread(odd_sockets, &replies);
    for (size_t i = 0; i < replies.count; i++) {
        struct cox_control_connection session;
        int r = cox_control_socket_connect(path, &hello, PATIENCE, &session, test_err());
        if (r == 0) {
            accepted++;
            assert_true(i < BIT_COUNT && session.fd_count == 4 && session.hello_reply.rank < 4);
            cox_control_connection_close(&session);
            continue;
        }
        if (r < 0 || r == COX_TIMEOUT || !test_error.text[0] || test_error.code != r)
            fail_msg("reply %zu: %d '%s'", i, r, test_error.text);
        assert_true(i >= BIT_COUNT || r == COX_CORRUPT);
    }
    pthread_join(thread, NULL);
    assert_int_equal(fd_count(), before);
    /* Of attach one bit, of a rank among four two, of how many ranks some, incarnation, and
     * group_incarnation.
     */
    assert_in_range(accepted, 1 + 2 + 64, 1 + 2 + 64 + 8);
    free(scripts);
    cox_close_fd(&listener);
}

struct kind {
    int code;
    char text[sizeof((struct cox_error *)0)->text];
};

static void kind_add(struct kind *kinds, size_t *count, const char *where,
                     const struct cox_hello *hello, uint64_t deadline_ns, int expected)
{
    struct cox_control_connection session;
    int r = cox_control_socket_connect(where, hello, deadline_ns, &session, test_err());
    if (r != expected || test_error.code != expected)
        fail_msg("%s: %d '%s', expected %d", where, r, test_error.text, expected);
    for (size_t i = 0; i < *count; i++) {
        assert_int_not_equal(kinds[i].code, r);
        assert_string_not_equal(kinds[i].text, test_error.text);
    }
    kinds[*count].code = r;
    snprintf(kinds[(*count)++].text, sizeof kinds[0].text, "%s", test_error.text);
}

static void short_of_fds(void *context)
{
    struct rlimit limit;
    struct cox_hello hello = worker_hello();
    struct cox_control_connection session;
    (void)context;
    CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    limit.rlim_cur = 3;
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    CHECK(cox_control_socket_connect(path, &hello, PATIENCE, &session, test_err()) == -EMFILE);
    CHECK(test_error.code == -EMFILE && strstr(test_error.text, "open files"));
}

/* A timeout, a missing control socket, a dead one, another user's, one that sends garbage, one that
 * refuses for a reason of its own, and errors of the system: each has its own code and text. */
SOCKET_TEST(a28_b18_each_way_to_fail_has_its_code_and_its_words)
{
    struct kind kinds[16];
    size_t count = 0;
    struct cox_hello hello = worker_hello(), odd = hello;
    struct script nonsense = {"nonsense", COX_CORRUPT, 4, .fd_count = 3},
                  silence = {.nothing = true};
    script_format(&nonsense);
    listen_at_path(8);
    pthread_t thread = test_thread(odd_socket, &silence);
    kind_add(kinds, &count, path, &hello, cox_deadline_after_ms(20), COX_TIMEOUT);
    pthread_join(thread, NULL);
    thread = test_thread(odd_socket, &nonsense);
    kind_add(kinds, &count, path, &hello, PATIENCE, COX_CORRUPT);
    pthread_join(thread, NULL);
    cox_close_fd(&listener);
    kind_add(kinds, &count, path, &hello, PATIENCE, COX_CLOSED);
    unlink(path);
    kind_add(kinds, &count, path, &hello, PATIENCE, COX_NOT_FOUND);
    kind_add(kinds, &count, "/dev/null", &hello, PATIENCE, COX_DENIED);
    kind_add(kinds, &count, "", &hello, PATIENCE, COX_INVALID);
    socket_start(NULL);
    snprintf(path, sizeof path, "%s", cox_control_socket_path(control_socket));
    odd.version = 2;
    kind_add(kinds, &count, path, &odd, PATIENCE, COX_VERSION);
    static const int reasons[] = {COX_TAKEN, COX_FULL, COX_STATE, COX_UNSUPPORTED, COX_REJECTED};
    for (size_t i = 0; i < sizeof reasons / sizeof *reasons; i++) {
        HOST(host.refuse = reasons[i]; snprintf(host.reason, sizeof host.reason, "reason %zu", i));
        kind_add(kinds, &count, path, &hello, PATIENCE, reasons[i]);
    }
    client_run(short_of_fds, NULL);
}

SOCKET_TEST(a2_b18_a_socket_that_does_not_reply_is_a_timeout)
{
    listen_at_path(8);
    struct script scripts[] = {
        {"silence", COX_TIMEOUT, .nothing = true},
        {"half", COX_TIMEOUT, 4, .fd_count = 4, .cut = COX_HELLO_REPLY_SIZE - 100},
        {"half a reason", COX_TIMEOUT, REFUSAL("\11no")},
    };
    for (size_t i = 0; i < sizeof scripts / sizeof *scripts; i++)
        play(&scripts[i]);
    cox_close_fd(&listener);
}

static void *sockets_in_turn(void *argument)
{
    for (struct script *script = argument; script->what; script++)
        odd_socket(script);
    return NULL;
}

/* What a control socket says to a process that was stopped between its connect and its hello. */
SOCKET_TEST(a15_b2_a_client_whose_hello_came_too_late_connects_again)
{
    struct script scripts[] = {
        {"late", COX_TIMEOUT, REFUSAL("\2no"), .closes = true},
        {"late", COX_TIMEOUT, REFUSAL("\2no"), .closes = true},
        {"in time", 0, 4, .fd_count = 4},
        {0},
    };
    const struct cox_hello hello = {.role = COX_HELLO_WORKER, .rank = 1};
    struct cox_control_connection session;
    listen_at_path(8);
    for (size_t i = 0; i < 3; i++) {
        script_format(&scripts[i]);
        if (scripts[i].refusal)
            scripts[i].bytes[1] = COX_TIMEOUT;
    }
    pthread_t thread = test_thread(sockets_in_turn, scripts);
    struct cox_error err = {0};
    assert_int_equal(cox_control_socket_connect(path, &hello, PATIENCE, &session, &err), 0);
    assert_int_equal(err.code, 0); /* the tries in vain are forgotten */
    cox_control_connection_close(&session);
    pthread_join(thread, NULL);
    /* The last try's failure counts. */
    scripts[2] = scripts[0];
    scripts[2].bytes[1] = COX_FULL;
    thread = test_thread(sockets_in_turn, scripts);
    assert_refused(cox_control_socket_connect(path, &hello, PATIENCE, &session, test_err()),
                   COX_FULL, "no");
    pthread_join(thread, NULL);
    /* But not for ever. */
    scripts[2] = scripts[0];
    thread = test_thread(sockets_in_turn, scripts);
    assert_refused(cox_control_socket_connect(path, &hello, PATIENCE, &session, test_err()),
                   COX_TIMEOUT, "no");
    pthread_join(thread, NULL);
    cox_close_fd(&listener);
}

/* connect() itself waits there. */
SOCKET_TEST(a2_b2_a_full_backlog_is_a_timeout)
{
    int waiting[4], count = 0;
    struct cox_hello hello = worker_hello();
    struct cox_control_connection session;
    listen_at_path(0);
    for (int fd; count < 4; count++) { /* until no more fit */
        struct sockaddr_un address = {.sun_family = AF_UNIX};
        snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
        fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        waiting[count] = fd;
        if (connect(fd, (const struct sockaddr *)&address, sizeof address) < 0)
            break;
    }
    assert_true(count < 4 && errno == EAGAIN);
    int before = fd_count();
    const uint64_t deadlines[] = {0, cox_deadline_after_ms(30)};
    for (int i = 0; i < 2; i++) {
        assert_refused(cox_control_socket_connect(path, &hello, deadlines[i], &session, test_err()),
                       COX_TIMEOUT, "so many wait there");
    }
    assert_int_equal(fd_count(), before);
    for (int i = 0; i <= count; i++)
        close(waiting[i]);
    cox_close_fd(&listener);
}

static void *make_room(void *argument)
{
    (void)argument;
    /* The one that is in the way goes; then the client's turn comes. */
    for (int i = 0; i < 2; i++) {
        uint8_t frame[COX_HELLO_SIZE];
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (cox_socket_receive(fd, frame, sizeof frame, NULL, 0, NULL, PATIENCE) == 0) {
            static const uint8_t full[] = {0, COX_FULL, 1, 'x'};
            cox_socket_send(fd, full, sizeof full, NULL, 0, PATIENCE);
        }
        close(fd);
    }
    return NULL;
}

SOCKET_TEST(a2_a_place_in_the_backlog_is_waited_for)
{
    struct cox_hello hello = worker_hello();
    struct cox_control_connection session;
    listen_at_path(0);
    int first = raw_connect(path);
    assert_int_equal(shutdown(first, SHUT_WR), 0);
    pthread_t thread = test_thread(make_room, NULL);
    assert_int_equal(cox_control_socket_connect(path, &hello, PATIENCE, &session, NULL), COX_FULL);
    pthread_join(thread, NULL);
    close(first);
    cox_close_fd(&listener);
}

static void serve(void *context)
{
    int *told = context;
    socket_start(NULL);
    tell(told[1]);
    for (;;)
        pause();
}

SOCKET_TEST(a24_b2_a_stopped_coordinator_is_a_timeout)
{
    struct cox_hello hello = worker_hello();
    struct cox_control_connection session;
    char expected[sizeof test_error.text];
    int told[2];
    test_pipe(told);
    pid_t pid = client_start(serve, told);
    assert_true(heard(told[0]));
    snprintf(path, sizeof path, "%s/test.sock", runtime_dir);
    int status;
    kill(pid, SIGSTOP);
    assert_int_equal(waitpid(pid, &status, WUNTRACED), pid); /* all its threads have stopped */
    snprintf(expected, sizeof expected,
             "%s: no whole reply came in time: process %d, the coordinator, is stopped by a signal",
             path, (int)pid);
    assert_refused(
        cox_control_socket_connect(path, &hello, cox_deadline_after_ms(50), &session, test_err()),
        COX_TIMEOUT, "");
    assert_string_equal(test_error.text, expected);
    kill(pid, SIGCONT);
    assert_int_equal(cox_control_socket_connect(path, &hello, PATIENCE, &session, NULL), 0);
    kill(pid, SIGKILL);
    child_status(pid);
    assert_int_equal(raw_reply(session.fd, NULL), -COX_CLOSED); /* A24: at once, no hang */
    cox_control_connection_close(&session);
}

SOCKET_TEST(k19_paths_that_cannot_be)
{
    struct cox_hello hello = worker_hello();
    struct cox_control_connection session;
    char text[5000], slash[5000], link[100];
    memset(text, 'x', sizeof text);
    text[4999] = '\0';
    memcpy(slash, text, sizeof text);
    slash[4500] = '/';
    const char *const tail = text + 4999; /* that many characters of x before it */
    int before = fd_count();
    listen_at_path(1);
    snprintf(link, sizeof link, "%s/link", runtime_dir);
    assert_int_equal(symlink("odd.sock", link), 0);
    const struct {
        const char *path;
        int code;
    } paths[] = {
        {text, COX_INVALID},       {slash, COX_INVALID},        {"", COX_INVALID},
        {"/tmp/", COX_INVALID},    {tail - 83, COX_INVALID},    {tail - 82, COX_NOT_FOUND},
        {"/dev/null", COX_DENIED}, {"/dev/null/x", COX_DENIED}, {"/nonexistent/x", COX_NOT_FOUND},
        {link, COX_DENIED},
    };
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++)
        assert_refused(
            cox_control_socket_connect(paths[i].path, &hello, PATIENCE, &session, test_err()),
            paths[i].code, "");
    cox_close_fd(&listener);
    assert_int_equal(fd_count(), before);
}

SOCKET_TEST(a22_the_longest_path_of_a_name)
{
    char directory[COX_SOCKET_PATH_SIZE + 2], found[COX_SOCKET_PATH_SIZE];
    const char *set = getenv("COXSWAIN_RUNTIME_DIR");
    char *before = strdup(set ? set : "");
    for (size_t over = 0; over <= 2; over++) {
        const size_t size = COX_SOCKET_PATH_SIZE - 1 - strlen("/x.sock") + over;
        memset(directory, 'd', size);
        directory[0] = '/';
        directory[size] = '\0';
        assert_int_equal(setenv("COXSWAIN_RUNTIME_DIR", directory, 1), 0);
        if (over == 0)
            assert_ok(cox_control_socket_find("x", found, test_err()));
        else
            assert_refused(cox_control_socket_find("x", found, test_err()), COX_TOO_LARGE,
                           over == 1 ? "has 4096 bytes: expected less than 4096"
                                     : "has 4097 bytes: expected less than 4096");
    }
    assert_int_equal(setenv("COXSWAIN_RUNTIME_DIR", before, 1), 0);
    free(before);
}

static volatile sig_atomic_t alarms;
static void alarmed(int signal_number)
{
    (void)signal_number;
    alarms = alarms + 1;
}

static void interrupted_connections(void *context)
{
    struct sigaction action = {.sa_handler = alarmed};
    struct itimerval often = {{0, 100}, {0, 100}};
    (void)context;
    CHECK(sigaction(SIGALRM, &action, NULL) == 0 && setitimer(ITIMER_REAL, &often, NULL) == 0);
    for (int i = 0; i < 50 || alarms < 5; i++) {
        _cox_cleanup_(cox_control_connection_close) struct cox_control_connection session;
        if (connect_as(COX_HELLO_WORKER, &session))
            fprintf(stderr, "%s\n", test_error.text);
        CHECK(test_error.code == 0 && session.fd_count == 4);
    }
}

OPEN_SOCKET_TEST(k17_b47_interruptions_change_nothing)
{
    client_run(interrupted_connections, NULL);
}

SOCKET_TEST(a18_a_session_can_be_made_by_hand)
{
    struct cox_control_connection session = {
        .fd = -1, .hello_reply = {.rank_count = 2}, .fd_count = 1};
    int before = fd_count();
    session.fds[0] = dup(host_fds[0]);
    cox_control_connection_close(&session);
    cox_control_connection_close(&session);
    assert_int_equal(fd_count(), before);
}
