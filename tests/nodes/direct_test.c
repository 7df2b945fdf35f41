#include "direct_world.h"

#include "nodes/direct/direct_object.h"

/* ---- messages ---- */

struct sender {
    struct cox_direct *direct;
    uint16_t port;
    uint32_t kind;
    /* of each message, if there is one; the largest of several */
    size_t size;
    uint64_t timeout_ms;
    int count, r;
    atomic_bool done;
    struct cox_error err;
    pthread_t thread;
};

static void *sender_main(void *argument)
{
    struct sender *s = argument;
    uint8_t *bytes = calloc(1, s->size);
    for (int i = 0; s->r == 0 && i < s->count; i++) {
        const uint64_t number = (uint64_t)i;
        memcpy(bytes, &number, sizeof number);
        s->r = send_bytes(s->direct, "node-b", s->port, s->kind, bytes,
                          s->count == 1 ? s->size : 8 + (size_t)i * 7919 % (s->size - 7),
                          s->timeout_ms, &s->err);
    }
    free(bytes);
    s->done = true;
    return NULL;
}

static void sender_start(struct sender *sender, struct cox_direct *direct, uint16_t port,
                         uint32_t kind, size_t size, int count)
{
    *sender = (struct sender){.direct = direct,
                              .port = port,
                              .kind = kind,
                              .size = size,
                              .timeout_ms = 10 * PATIENCE_MS,
                              .count = count};
    sender->thread = test_thread(sender_main, sender);
}

/* With TLS, and then without; file_a and file_b are the certificates of both, or NULL. */
#define BOTH_TEST(name)                                                                            \
    static void name##_with(const char *file_a, const char *file_b);                               \
    TEST(name)                                                                                     \
    {                                                                                              \
        name##_with("a", "b");                                                                     \
        name##_with(NULL, NULL);                                                                   \
    }                                                                                              \
    static void name##_with(const char *file_a, const char *file_b)

BOTH_TEST(messages_of_several_threads_arrive_in_order)
{
    struct box *box = box_new();
    struct cox_direct *b = node("node-b", file_b, box), *a = node("node-a", file_a, NULL);
    struct sender senders[4];
    for (uint32_t i = 0; i < 4; i++)
        sender_start(&senders[i], a, cox_direct_port(b), i, 40000, 200);
    for (int i = 0; i < 4; i++) {
        pthread_join(senders[i].thread, NULL);
        if (senders[i].r)
            fail_msg("%s", senders[i].err.text);
    }
    box_await(box, 800);
    assert_false(box->disorder);
    assert_string_equal(box->peer, "node-a");
    assert_int_equal(box->end_count, 0);
    test_release(a);
    box_await_end(box, "the peer has closed the connection");
    assert_true(box->end_has_peer);
    test_release(b);
    assert_int_equal(box->end_count, 1);
}

BOTH_TEST(messages_of_all_sizes_arrive_whole)
{
    static const size_t all[] = {0, 1, 16360, 16361, 16384, 40000, MIB - 1, MIB, 64 * MIB};
    struct box *box = box_new();
    struct cox_direct *b = node("node-b", file_b, box), *a = node("node-a", file_a, NULL);
    uint8_t *bytes = malloc(64 * MIB);
    for (size_t i = 0; i < 64 * MIB; i++)
        bytes[i] = (uint8_t)(i * 31 + i / 4099);
    for (uint32_t i = 0; i < sizeof all / sizeof *all; i++) {
        const size_t third = all[i] / 3;
        const struct iovec parts[4] = {{bytes, third},
                                       {NULL, 0},
                                       {bytes + third, third},
                                       {bytes + 2 * third, all[i] - 2 * third}};
        struct cox_error err = {0};
        assert_int_equal(cox_direct_send(a, "node-b", address_of(cox_direct_port(b)), 100 + i,
                                         parts, 4, cox_deadline_after_ms(PATIENCE_MS), &err),
                         0);
        box_await(box, i + 1);
        assert_int_equal(box->kind, 100 + i);
        assert_int_equal(box->size, all[i]);
        assert_true(all[i] == 0 ? !box->bytes : !memcmp(box->bytes, bytes, all[i]));
    }
    free(bytes);
}

TEST(what_is_too_large_is_not_sent_and_not_accepted)
{
    struct box *box = box_new();
    struct cox_direct_options options = options_of("node-b", "b", box);
    options.size_max = 1000;
    struct cox_direct *b = opened(&options), *a = node("node-a", "a", NULL);
    const uint16_t port = cox_direct_port(b);
    uint8_t bytes[1001] = {0};
    assert_int_equal(send_bytes(b, "node-a", 1, 0, bytes, 1001, 0, NULL), COX_TOO_LARGE);
    struct iovec huge[2] = {{bytes, SIZE_MAX}, {bytes, 2}};
    assert_int_equal(cox_direct_send(a, "node-b", address_of(port), 0, huge, 2, 0, NULL),
                     COX_TOO_LARGE);
    assert_int_equal(send_bytes(a, "node-b", port, 9, bytes, 1000, PATIENCE_MS, NULL), 0);
    assert_int_equal(send_bytes(a, "node-b", port, 9, bytes, 1001, PATIENCE_MS, NULL), 0);
    box_await_end(box, "announced a message of 1001 bytes; at most 1000");
    assert_int_equal(box->message_count, 1);
    sends(a, "node-b", port, "again");
    box_await(box, 2);
}

TEST(ipv6_addresses_are_in_brackets)
{
    struct box *box = box_new();
    struct cox_direct_options options = options_of("node-b", NULL, box);
    options.listen = "[::1]:0";
    struct cox_direct *b = NULL, *a = node("node-a", NULL, NULL);
    int r = cox_direct_open(&options, &b, NULL);
    if (r == 0) {
        char address[32];
        snprintf(address, sizeof address, "[::1]:%u", cox_direct_port(b));
        assert_int_equal(cox_direct_send(a, "node-b", address, 9, NULL, 0,
                                         cox_deadline_after_ms(PATIENCE_MS), NULL),
                         0);
        box_await(box, 1);
    }
    cox_direct_close(b);
    if (r == -EADDRNOTAVAIL || r == -EAFNOSUPPORT)
        skip(); /* this machine has no IPv6 */
    assert_int_equal(r, 0);
}

struct end {
    struct cox_direct_stream stream;
    struct cox_direct_tls tls;
    const char *name;
    int r, received;
    struct cox_error err;
};

static void end_open(struct end *end, const char *file, int fd)
{
    const struct cox_direct_options o = options_of(end->name, file, NULL);
    cox_direct_stream_init(&end->stream);
    end->stream.socket.fd = fd;
    assert_int_equal(cox_direct_tls_open(o.ca, o.certificate, o.key, o.name, &end->tls, &end->err),
                     0);
}

static void *end_receive(void *argument)
{
    struct end *end = argument;
    char name[COX_DIRECT_NAME_SIZE];
    uint8_t bytes[100000];
    uint32_t kind;
    uint64_t size;
    end->r = cox_direct_stream_secure(&end->stream, &end->tls, true,
                                      cox_deadline_after_ms(PATIENCE_MS), name, &end->err);
    while (end->r == 0) {
        end->r = cox_direct_stream_read_head(&end->stream, sizeof bytes, &kind, &size, &end->err);
        if (end->r == 0)
            end->r = cox_direct_stream_read_body(&end->stream, bytes, size,
                                                 cox_deadline_after_ms(PATIENCE_MS), &end->err);
        if (end->r)
            break;
        end->received += size == sizeof bytes && bytes[size - 1] == (uint8_t)kind;
    }
    return NULL;
}

TEST(keys_are_changed_in_time)
{
    int fds[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    struct end a = {.name = "node-a"}, b = {.name = "node-b"};
    end_open(&a, "a", fds[0]);
    end_open(&b, "b", fds[1]);
    pthread_t thread = test_thread(end_receive, &b);
    const uint64_t deadline = cox_deadline_after_ms(PATIENCE_MS);
    char name[COX_DIRECT_NAME_SIZE];
    assert_int_equal(cox_direct_stream_secure(&a.stream, &a.tls, false, deadline, name, &a.err), 0);
    assert_string_equal(name, "node-b");
    uint8_t bytes[100000];
    for (uint32_t i = 0; i < 100; i++) {
        memset(bytes, (int)i, sizeof bytes);
        const struct iovec part = {bytes, sizeof bytes};
        /* within the message: after its first record */
        a.stream.key_used = COX_DIRECT_KEY_USED_MAX - 1;
        assert_int_equal(cox_direct_stream_write_message(
                             &a.stream,
                             &(struct cox_direct_message){.kind = i, .parts = &part, .count = 1},
                             sizeof bytes, deadline, &a.err),
                         0);
        assert_true(a.stream.key_used < sizeof bytes);
    }
    cox_direct_stream_end(&a.stream);
    pthread_join(thread, NULL);
    assert_int_equal(b.received, 100);
    assert_int_equal(b.r, COX_CLOSED);
    cox_direct_stream_end(&b.stream);
    cox_direct_tls_close(&a.tls);
    cox_direct_tls_close(&b.tls);
}

/* ---- who is it ---- */

static void open_refuses(struct cox_direct_options options, int code, const char *text)
{
    struct cox_direct *direct = NULL;
    assert_refused(cox_direct_open(&options, &direct, test_err()), code, text);
    assert_null(direct);
}

TEST(open_says_what_is_wrong_with_the_files)
{
    static const struct {
        /* of the certificate of node-b, and what else it has in its place */
        const char *file, *ca, *certificate, *key, *text;
    } bad[] = {
        {"b", .ca = "none.crt", .text = "none.crt: No such file or directory"},
        {"b", .ca = "b.key", .text = "b.key has no CA certificate in PEM"},
        {"b", .certificate = "b.key", .text = "b.key has no usable certificate"},
        {"b", .key = "a.key", .text = "a.key does not belong to the certificate"},
        {"b", .key = "a.crt", .text = "a.crt has no private key"},
        {"b", .key = "secret.key", .text = "readable without a passphrase"},
        {"b", .key = "none.key", .text = "none.key: No such file or directory"},
        {"a", .text = "is that of node-a, not of node-b"},
        {"expired", .text = "expired.crt has expired"},
        {"early", .text = "is not valid yet"},
        {"two", .text = "or more than one"},
        {"odd", .text = "no common name"},
        {"server", .text = "as a TLS client's"},
        {"foreign", .text = "by the CA"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct cox_direct_options o = options_of("node-b", bad[i].file, NULL);
        o.ca = bad[i].ca ? path(bad[i].ca) : o.ca;
        o.certificate = bad[i].certificate ? path(bad[i].certificate) : o.certificate;
        o.key = bad[i].key ? path(bad[i].key) : o.key;
        open_refuses(o, COX_INVALID, bad[i].text);
    }
}

TEST(open_says_what_is_wrong_with_the_options)
{
    struct box *box = box_new();
    struct cox_direct_options o = options_of("", NULL, NULL);
    open_refuses(o, COX_INVALID, "the name of a process");
    o = options_of("node-b", NULL, NULL);
    o.group = "a b";
    open_refuses(o, COX_INVALID, "the name of a group");
    o = options_of("node-b", NULL, NULL);
    o.ca = path("ca.crt");
    open_refuses(o, COX_INVALID, "without TLS");
    o = options_of("node-b", "b", NULL);
    o.key = NULL;
    open_refuses(o, COX_INVALID, "TLS needs");
    o = options_of("node-b", NULL, box);
    o.size_max = COX_DIRECT_SIZE_MAX + 1;
    open_refuses(o, COX_INVALID, "size_max");
    o = options_of("node-b", NULL, box);
    static const char *const addresses[] = {"",      "1.2.3.4", ":80",   "::1:80",
                                            "[::1]", "a:b",     "a:80x", "a:99999999",
                                            "[]:80", "a:70000", "[a:80"};
    for (size_t i = 0; i < sizeof addresses / sizeof *addresses; i++) {
        o.listen = addresses[i];
        open_refuses(o, COX_INVALID, "is not an address");
    }
    o.listen = "0.0.0.0:0";
    open_refuses(o, COX_DENIED, "is not a loopback address");
    o.listen = "[::]:0";
    open_refuses(o, COX_DENIED, "is not a loopback address");
    struct cox_direct *b = node("node-b", NULL, box);
    o.listen = address_of(cox_direct_port(b));
    open_refuses(o, -EADDRINUSE, "cannot listen at");
    char endless[300];
    memset(endless, 'a', sizeof endless);
    strcpy(endless + sizeof endless - 4, ":80");
    const struct {
        const char *peer, *address;
        int code;
    } nowhere[] = {{"node-a", "192.0.2.1:80", COX_DENIED},
                   {"node a", "127.0.0.1:80", COX_INVALID},
                   {"node-a", "127.0.0.1", COX_INVALID},
                   {"node-a", endless, COX_INVALID}};
    for (size_t i = 0; i < sizeof nowhere / sizeof nowhere[0]; i++)
        assert_int_equal(
            cox_direct_send(b, nowhere[i].peer, nowhere[i].address, 0, NULL, 0, 0, NULL),
            nowhere[i].code);
}

BOTH_TEST(a_process_of_another_name_is_refused)
{
    struct box *box = box_new();
    struct cox_direct *b = node("node-b", file_b, box), *a = node("node-a", file_a, NULL);
    refuses(a, "node-c", cox_direct_port(b), COX_DENIED,
            file_a ? "is node-b, by its certificate" : "says that it is node-b");
    assert_int_equal(box->message_count, 0);
}

TEST(a_process_of_another_ca_is_refused_by_both_sides)
{
    struct box *box = box_new();
    struct cox_direct *a = node("node-a", "a", box);
    struct cox_direct_options options = options_of("node-b", "foreign", box);
    options.ca = path("foreign-ca.crt");
    struct cox_direct *foreign = opened(&options);
    refuses(a, "node-b", cox_direct_port(foreign), COX_DENIED,
            "the peer's certificate is not valid");
    refuses(foreign, "node-a", cox_direct_port(a), COX_DENIED,
            "the peer's certificate is not valid");
    test_release(foreign);
    /* It knows our CA, and fails only because we do not know its. */
    FILE *both = fopen(path("both.crt"), "we");
    static const char *const files[] = {"ca.crt", "foreign-ca.crt"};
    for (int i = 0; i < 2; i++) {
        FILE *f = fopen(path(files[i]), "re");
        for (int c; (c = fgetc(f)) != EOF;)
            fputc(c, both);
        fclose(f);
    }
    fclose(both);
    options.ca = path("both.crt");
    foreign = opened(&options);
    refuses(foreign, "node-a", cox_direct_port(a), COX_DENIED, "unknown ca");
    box_await_end(box, "the peer's certificate is not valid");
    assert_false(box->end_has_peer);
    assert_int_equal(box->message_count, 0);
}

/* ---- ends ---- */

static void await_sends(struct cox_direct *direct, uint32_t count)
{
    for (bool found = false; !found; moment()) {
        pthread_mutex_lock(&direct->lock);
        found = direct->send_count >= count;
        pthread_mutex_unlock(&direct->lock);
    }
}

static void blocked_send_ends(bool by_close, const char *file_a, const char *file_b)
{
    struct box *box = box_new();
    box_hold(box, true);
    struct cox_direct *b = node("node-b", file_b, box), *a = node("node-a", file_a, NULL);
    const uint16_t port = cox_direct_port(b);
    sends(a, "node-b", port, "x");
    box_await(box, 1);
    /* The first fills the socket, the second waits for the first. */
    struct sender senders[2];
    for (int i = 0; i < 2; i++)
        sender_start(&senders[i], a, port, 50, 64 * MIB, 1);
    await_sends(a, by_close ? 2 : 1);
    const uint64_t begin = cox_now_ns();
    if (by_close)
        test_release(a);
    while (!senders[0].done || !senders[1].done) {
        if (!by_close)
            cox_direct_drop(a, "node-b");
        moment();
    }
    assert_true(cox_now_ns() - begin < 20 * COX_NSEC_PER_SEC);
    for (int i = 0; i < 2; i++) {
        pthread_join(senders[i].thread, NULL);
        assert_int_equal(senders[i].r, COX_CLOSED);
    }
    box_hold(box, false);
    if (!by_close) {
        sends(a, "node-b", port, "after");
        test_release(a);
    }
}

BOTH_TEST(drop_and_close_end_sends_at_once)
{
    blocked_send_ends(false, file_a, file_b);
    blocked_send_ends(true, file_a, file_b);
}

TEST(close_ends_a_connect_that_is_not_answered)
{
    /* Accepted by the kernel, and no more. */
    uint16_t port;
    int listening = raw_listen(&port);
    struct cox_direct *a = node("node-a", "a", NULL);
    struct sender sender;
    sender_start(&sender, a, port, 0, 100, 1);
    await_sends(a, 1);
    test_release(a);
    pthread_join(sender.thread, NULL);
    assert_int_equal(sender.r, COX_CLOSED);
    close(listening);
}

TEST(drop_ends_what_comes_from_a_process)
{
    struct box *box = box_new();
    struct cox_direct *b = node("node-b", "b", box), *a = node("node-a", "a", NULL);
    sends(a, "node-b", cox_direct_port(b), "x");
    box_await(box, 1);
    cox_direct_drop(b, "node-c");
    cox_direct_drop(b, "node-a");
    box_await_end(box, "was ended here");
    /* not a ban */
    sends(a, "node-b", cox_direct_port(b), "y");
    box_await(box, 2);
    cox_direct_drop(a, "node-b");
    box_await_end(box, "the peer has closed");
    sends(a, "node-b", cox_direct_port(b), "z");
    box_await(box, 3);
}

/* ---- groups ---- */

/* Machines a and b with a process of each of two groups, all of which listen. */
struct groups {
    struct cox_direct *a[2], *b[2];
    struct box *box_a[2], *box_b[2];
};

static struct groups *groups_new(bool tls)
{
    static const char *const names[2] = {"first", "second"};
    struct groups *groups = test_own(calloc(1, sizeof *groups), free);
    for (int i = 0; i < 2; i++) {
        groups->box_a[i] = box_new();
        groups->box_b[i] = box_new();
        groups->a[i] = node_of(names[i], "node-a", tls ? "a" : NULL, groups->box_a[i]);
        groups->b[i] = node_of(names[i], "node-b", tls ? "b" : NULL, groups->box_b[i]);
    }
    return groups;
}

static uint64_t accept_count(struct cox_direct *direct)
{
    pthread_mutex_lock(&direct->lock);
    const uint64_t count = direct->accept_count;
    pthread_mutex_unlock(&direct->lock);
    return count;
}

/* Each of machine b sends to each of machine a, `count` times in turn. */
static void groups_send(struct groups *groups, uint32_t count)
{
    for (uint32_t n = 0; n < count; n++)
        for (int from = 0; from < 2; from++)
            for (int to = 0; to < 2; to++) {
                struct box *box = groups->box_a[to];
                const uint32_t came = box->message_count;
                sends(groups->b[from], "node-a", cox_direct_port(groups->a[to]), "x");
                box_await(box, came + 1);
                assert_string_equal(box->peer, "node-b");
                assert_string_equal(box->group, from ? "second" : "first");
            }
}

TEST(groups_of_one_machine_have_connections_of_their_own)
{
    for (int tls = 0; tls < 2; tls++) {
        struct groups *groups = groups_new(tls);
        groups_send(groups, 10);
        for (int i = 0; i < 2; i++) {
            assert_int_equal(accept_count(groups->a[i]), 2);
            assert_int_equal(groups->box_a[i]->end_count, 0);
        }
    }
}

TEST(drop_leaves_other_groups_alone)
{
    struct groups *groups = groups_new(true);
    groups_send(groups, 1);
    /* what comes from a process */
    cox_direct_drop(groups->a[0], "node-b");
    box_await_end(groups->box_a[0], "was ended here");
    groups_send(groups, 1);
    assert_int_equal(accept_count(groups->a[0]), 3);
    assert_int_equal(groups->box_a[0]->end_count, 1);
    /* what goes to it */
    cox_direct_drop(groups->b[1], "node-a");
    box_await_end(groups->box_a[1], "the peer has closed");
    groups_send(groups, 1);
    assert_int_equal(accept_count(groups->a[0]), 3);
    assert_int_equal(accept_count(groups->a[1]), 3);
    assert_int_equal(groups->box_a[1]->end_count, 1);
}

static int peer_count(struct cox_direct *direct)
{
    int count = 0;
    pthread_mutex_lock(&direct->lock);
    for (const struct cox_direct_peer *p = direct->peers; p; p = p->next)
        count++;
    pthread_mutex_unlock(&direct->lock);
    return count;
}

TEST(addresses_of_the_past_are_forgotten)
{
    struct groups *groups = groups_new(true);
    struct cox_direct *sender = groups->b[0];
    const uint16_t stays = cox_direct_port(groups->a[1]);
    sends(sender, "node-a", stays, "x");
    for (int i = 0; i < 20; i++) {
        test_release(groups->a[0]);
        groups->a[0] = node_of("first", "node-a", "a", groups->box_a[0]);
        sends(sender, "node-a", cox_direct_port(groups->a[0]), "x");
        refuses(sender, "node-a", 1, -ECONNREFUSED, "Connection refused");
    }
    /* the two that are there, and the last one that refused */
    assert_true(peer_count(sender) <= 3);
    assert_int_equal(accept_count(groups->a[1]), 1);
}

TEST(a_process_at_another_address_is_the_same_one_again)
{
    struct groups *groups = groups_new(true);
    groups_send(groups, 1);
    /* The earlier one is not seen to end: its machine is dead. */
    struct box *box = box_new();
    struct cox_direct *again = node_of("first", "node-a", "a", box);
    sends(groups->b[0], "node-a", cox_direct_port(again), "x");
    box_await(box, 1);
    box_await_end(groups->box_a[0], "the peer has closed");
    assert_int_equal(groups->box_a[0]->end_count, 1);
    assert_int_equal(groups->box_a[1]->end_count, 0);
}

/* ---- peers in other processes ---- */

struct child {
    pid_t pid;
    uint16_t port;
};

static void child_message(void *context, const char *peer, const char *group, uint32_t kind,
                          uint8_t *bytes, size_t size)
{
    (void)context, (void)peer, (void)group, (void)kind, (void)size;
    free(bytes);
}

/* Before this process has threads. port 0: any. */
static struct child child_start(const char *file, uint16_t port)
{
    struct child child = {.port = port};
    int fds[2];
    assert_int_equal(pipe(fds), 0);
    const pid_t parent = getpid();
    child.pid = fork();
    assert_true(child.pid >= 0);
    if (child.pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(1);
        struct box unused;
        struct cox_direct_options options = options_of("node-b", file, &unused);
        struct cox_direct *direct = NULL;
        options.on_message = child_message;
        options.on_end = NULL;
        options.listen = address_of(port);
        struct cox_error err = {0};
        if (cox_direct_open(&options, &direct, &err)) {
            fprintf(stderr, "%s\n", err.text);
            _exit(1);
        }
        const uint16_t own = cox_direct_port(direct);
        if (write(fds[1], &own, sizeof own) != sizeof own)
            _exit(1);
        for (;;)
            pause();
    }
    close(fds[1]);
    assert_int_equal(read(fds[0], &child.port, sizeof child.port), sizeof child.port);
    close(fds[0]);
    return child;
}

BOTH_TEST(deadlines_are_kept_when_a_peer_stops)
{
    uint8_t *bytes = test_own(calloc(1, 64 * MIB), free);
    struct child child = child_start(file_b, 0);
    struct cox_direct *a = node("node-a", file_a, NULL);
    sends(a, "node-b", child.port, "x");
    kill(child.pid, SIGSTOP);
    test_await_stopped(child.pid);
    /* With the second the connection is ended: a new one, which the kernel accepts, and which
     * nobody serves. */
    for (int i = 0; i < 2; i++) {
        const uint64_t begin = cox_now_ns();
        assert_int_equal(send_bytes(a, "node-b", child.port, 0, bytes, i ? 1 : 64 * MIB, 300, NULL),
                         COX_TIMEOUT);
        const uint64_t took = cox_now_ns() - begin;
        assert_true(took >= 300 * COX_NSEC_PER_MSEC && took < 5 * COX_NSEC_PER_SEC);
    }
    kill(child.pid, SIGCONT);
    sends(a, "node-b", child.port, "y");
    test_release(a);
    test_kill_child(child.pid);
}

BOTH_TEST(a_peer_that_died_is_opened_again)
{
    struct child first = child_start(file_b, 0);
    /* Listens at once, for the next: fork cannot be while there are threads. */
    struct child other = child_start(file_b, 0);
    struct cox_direct *a = node("node-a", file_a, NULL);
    sends(a, "node-b", first.port, "x");
    test_kill_child(first.pid);
    refuses(a, "node-b", first.port, -ECONNREFUSED, "Connection refused");
    sends(a, "node-b", other.port, "at another address");
    test_release(a);
    test_kill_child(other.pid);
}

TEST(a_peer_that_listens_again_is_opened_again)
{
    struct box *box = box_new();
    struct cox_direct *b = node("node-b", "b", box), *a = node("node-a", "a", NULL);
    const uint16_t port = cox_direct_port(b);
    sends(a, "node-b", port, "x");
    box_await(box, 1);
    test_release(b);
    struct cox_direct_options options = options_of("node-b", "b", box);
    options.listen = address_of(port);
    b = opened(&options);
    sends(a, "node-b", port, "y");
    box_await(box, 2);
}

int main(void)
{
    return test_run(certificates_make, certificates_remove);
}
