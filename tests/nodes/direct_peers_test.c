/* Peers of a direct connection that are no cox_direct: their certificates, greetings, heads, and
 * silence. */
#include "channel/memory/payload_memory.h"
#include "direct_world.h"

#include <arpa/inet.h>

#include <openssl/err.h>
#include <openssl/ssl.h>

/* A test over it. */
#define BOX_TEST(name)                                                                             \
    static void name##_in(struct box *box);                                                        \
    TEST(name)                                                                                     \
    {                                                                                              \
        name##_in(box_new());                                                                      \
    }                                                                                              \
    static void name##_in(__attribute__((unused)) struct box *box)

/* From a machine of its own: 127.0.0.`machine`. */
static int raw_connect_from(uint8_t machine, uint16_t port)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in from = {.sin_family = AF_INET,
                               .sin_addr.s_addr = htonl(INADDR_LOOPBACK - 1 + machine)};
    assert_int_equal(bind(fd, (struct sockaddr *)&from, sizeof from), 0);
    struct sockaddr_in to = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    assert_int_equal(connect(fd, (struct sockaddr *)&to, sizeof to), 0);
    return fd;
}

static int raw_connect(uint16_t port)
{
    return raw_connect_from(1, port);
}

/* name and group: of at most 64 bytes. */
static void greeting_fill(uint8_t record[128], const char *name, const char *group)
{
    memset(record, 0, 128);
    memcpy(record, name, strlen(name));
    memcpy(record + 64, group, strlen(group));
}

static void raw_hello_of(int fd, const char *name, const char *group)
{
    uint8_t record[128];
    greeting_fill(record, name, group);
    assert_int_equal(send(fd, record, 128, MSG_NOSIGNAL), 128);
    assert_int_equal(recv(fd, record, 128, MSG_WAITALL), 128);
    assert_string_equal((char *)record, "node-b");
}

static void raw_hello(int fd, const char *name)
{
    raw_hello_of(fd, name, "");
}

static void raw_head(int fd, uint32_t magic, uint64_t size, uint64_t reserved)
{
    struct {
        uint32_t magic, kind;
        uint64_t size, reserved;
    } head = {magic, 1, size, reserved};
    assert_int_equal(send(fd, &head, sizeof head, MSG_NOSIGNAL), 24);
}

static SSL_CTX *raw_context(const char *file)
{
    SSL_CTX *context = SSL_CTX_new(TLS_method());
    char name[64];
    if (file) {
        snprintf(name, sizeof name, "%s.crt", file);
        assert_int_equal(SSL_CTX_use_certificate_chain_file(context, path(name)), 1);
        snprintf(name, sizeof name, "%s.key", file);
        assert_int_equal(SSL_CTX_use_PrivateKey_file(context, path(name), SSL_FILETYPE_PEM), 1);
    }
    return context;
}

/* OpenSSL's own sockets raise it. What is tested must not: its threads have it unblocked here. */
static void sigpipe_block(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
}

struct raw_client {
    uint16_t port;
    const char *file;
    int version;
    /* says that it is this; NULL: nothing */
    const char *name;
};

/* Handshakes and waits for the other side's end. */
static void *raw_client_main(void *argument)
{
    const struct raw_client *client = argument;
    sigpipe_block();
    SSL_CTX *context = raw_context(client->file);
    SSL_CTX_set_max_proto_version(context, client->version);
    SSL *ssl = SSL_new(context);
    int fd = raw_connect(client->port);
    SSL_set_fd(ssl, fd);
    uint8_t byte;
    uint8_t record[128];
    if (SSL_connect(ssl) == 1) {
        greeting_fill(record, client->name ? client->name : "", "");
        if (client->name)
            SSL_write(ssl, record, sizeof record);
        SSL_read(ssl, &byte, 1);
    }
    ERR_clear_error();
    SSL_free(ssl);
    SSL_CTX_free(context);
    close(fd);
    return NULL;
}

static void raw_tls_client_says(uint16_t port, const char *file, int version, const char *name)
{
    struct raw_client client = {port, file, version, name};
    pthread_t thread = test_thread(raw_client_main, &client);
    pthread_join(thread, NULL);
}

static void raw_tls_client(uint16_t port, const char *file, int version)
{
    raw_tls_client_says(port, file, version, NULL);
}

BOX_TEST(certificates_that_are_not_valid_are_refused)
{
    struct cox_direct *b = node("node-b", "b", box);
    const uint16_t port = cox_direct_port(b);
    static const int versions[] = {TLS1_2_VERSION, TLS1_3_VERSION};
    for (int i = 0; i < 2; i++) {
        box_forget(box);
        raw_tls_client(port, NULL, versions[i]);
        box_await_end(box, "peer did not return a certificate");
        raw_tls_client(port, "expired", versions[i]);
        box_await_end(box, "certificate has expired");
        raw_tls_client(port, "early", versions[i]);
        box_await_end(box, "certificate is not yet valid");
        raw_tls_client(port, "two", versions[i]);
        box_await_end(box, "has no name that is valid");
        raw_tls_client(port, "server", versions[i]);
        box_await_end(box, "certificate purpose");
        raw_tls_client_says(port, "a", versions[i], "node-c");
        box_await_end(box, "says that it is node-c: its certificate is that of node-a");
    }
    raw_tls_client(port, "a", TLS1_1_VERSION);
    box_await_end(box, "TLS: ");
    assert_int_equal(box->message_count, 0);
    assert_false(box->end_has_peer);
}

struct raw_server {
    int fd;
    uint16_t port;
    /* NULL: says nothing that makes sense */
    SSL_CTX *context;
    pthread_t thread;
};

static void *raw_server_main(void *argument)
{
    struct raw_server *server = argument;
    sigpipe_block();
    int fd = accept(server->fd, NULL, NULL);
    uint8_t byte;
    if (server->context) {
        SSL *ssl = SSL_new(server->context);
        SSL_set_fd(ssl, fd);
        if (SSL_accept(ssl) == 1)
            SSL_read(ssl, &byte, 1);
        ERR_clear_error();
        SSL_free(ssl);
    } else {
        uint8_t nonsense[256];
        memset(nonsense, 'x', sizeof nonsense);
        send(fd, nonsense, sizeof nonsense, MSG_NOSIGNAL);
        while (recv(fd, &byte, 1, 0) > 0)
            continue;
    }
    close(fd);
    return NULL;
}

static void refuses_server(const char *own, const char *file, const char *text)
{
    struct raw_server server = {.context = file ? raw_context(file) : NULL};
    server.fd = raw_listen(&server.port);
    assert_int_equal(pthread_create(&server.thread, NULL, raw_server_main, &server), 0);
    struct cox_direct *a = node("node-a", own, NULL);
    refuses(a, "node-b", server.port, COX_DENIED, text);
    test_release(a);
    pthread_join(server.thread, NULL);
    SSL_CTX_free(server.context);
    close(server.fd);
}

TEST(servers_that_are_not_valid_are_refused)
{
    refuses_server("a", "expired", "certificate has expired");
    refuses_server("a", "early", "certificate is not yet valid");
    refuses_server("a", "two", "has no name that is valid");
    refuses_server("a", NULL, "TLS: ");
    refuses_server(NULL, NULL, "does not begin with a name");
}

BOX_TEST(heads_that_are_none_end_the_connection)
{
    struct cox_direct *b = node("node-b", NULL, box);
    const uint16_t port = cox_direct_port(b);
    for (int i = 0; i < 3; i++) {
        box_forget(box);
        int fd = raw_connect(port);
        raw_hello(fd, "node-a");
        raw_head(fd, i == 0 ? 1 : 0x44584f43, i == 1 ? COX_DIRECT_SIZE_MAX + 1 : 0, i == 2);
        box_await_end(box, i == 1 ? "at most 2147483648 are accepted" : "is not a message");
        assert_true(box->end_has_peer);
        close(fd);
    }
    /* 64 characters: no NUL behind them */
    static const char full[] = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    static const char *const names[][2] = {
        {"GET / HTTP/1.1", ""}, {"", ""},           {"", "group"}, {"a b", ""},     {"a\nb", ""},
        {"node-a", "a b"},      {"node-a", "a\nb"}, {full, ""},    {"node-a", full}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        box_forget(box);
        int fd = raw_connect(port);
        uint8_t record[128];
        greeting_fill(record, names[i][0], names[i][1]);
        assert_int_equal(send(fd, record, 128, MSG_NOSIGNAL), 128);
        box_await_end(box, "does not begin with a name");
        close(fd);
    }
    assert_int_equal(box->message_count, 0);
}

static long peak_kib(void)
{
    FILE *f = fopen("/proc/self/status", "re");
    char line[256];
    long peak = -1;
    while (fgets(line, sizeof line, f))
        sscanf(line, "VmPeak: %ld", &peak);
    fclose(f);
    return peak;
}

BOX_TEST(a_large_size_allocates_nothing_before_bytes_arrive)
{
    struct cox_direct *b = node("node-b", NULL, box);
    const long before = peak_kib();
    int fd = raw_connect(cox_direct_port(b));
    raw_hello(fd, "node-a");
    raw_head(fd, 0x44584f43, COX_DIRECT_SIZE_MAX, 0);
    assert_int_equal(send(fd, "12345", 5, MSG_NOSIGNAL), 5);
    shutdown(fd, SHUT_WR);
    box_await_end(box, "has ended within a message");
    assert_true(peak_kib() - before < 512 << 10);
    close(fd);
}

BOX_TEST(silence_holds_nobody_up)
{
    struct cox_direct *b = node("node-b", "b", box), *a = node("node-a", "a", NULL);
    const uint64_t begin = cox_now_ns();
    int silent = raw_connect(cox_direct_port(b));
    sends(a, "node-b", cox_direct_port(b), "x");
    box_await(box, 1);
    box_await_end(box, "the deadline has passed");
    assert_true(cox_now_ns() - begin >= COX_NSEC_PER_SEC);
    assert_int_equal(cox_direct_refused(b), 1);
    assert_false(box->end_has_peer);
    close(silent);
    /* close does not wait for a handshake */
    silent = raw_connect(cox_direct_port(b));
    close(silent);
}

/* What has begun must come: a head, and a body that is announced as 2 GiB. */
BOX_TEST(messages_that_stall_end)
{
    struct cox_direct *b = node("node-b", NULL, box);
    int head = raw_connect(cox_direct_port(b)), body = raw_connect(cox_direct_port(b));
    raw_hello(head, "node-h");
    assert_int_equal(send(head, "C", 1, MSG_NOSIGNAL), 1);
    raw_hello(body, "node-a");
    raw_head(body, 0x44584f43, COX_DIRECT_SIZE_MAX, 0);
    assert_int_equal(send(body, "12345", 5, MSG_NOSIGNAL), 5);
    box_await_end(box, "the connection from node-h (");
    box_await_end(box, "the connection from node-a (");
    assert_contains(box->ends, "has ended: the deadline has passed");
    assert_int_equal(box->end_code, COX_TIMEOUT);
    assert_int_equal(box->message_count, 0);
    close(head);
    close(body);
}

/* So much of a message. */
static void raw_send(int fd, size_t size)
{
    static const uint8_t bytes[64 << 10];
    while (size > 0) {
        const size_t part = size < sizeof bytes ? size : sizeof bytes;
        const ssize_t sent = send(fd, bytes, part, MSG_NOSIGNAL);
        if (sent < 0)
            return; /* it was ended */
        size -= (size_t)sent;
    }
}

BOX_TEST(messages_under_way_have_a_budget)
{
    struct cox_direct_options options = options_of("node-b", NULL, box);
    /* More than the kernel has between two processes. */
    options.size_max = 32 * MIB;
    struct cox_direct *b = opened(&options);
    const uint16_t port = cox_direct_port(b);
    int fds[6];
    for (int i = 0; i < 6; i++) {
        char name[16];
        snprintf(name, sizeof name, "node-%d", i < 2 ? 0 : i);
        fds[i] = raw_connect(port);
        raw_hello_of(fds[i], name, i == 1 ? "other" : "");
    }
    raw_head(fds[0], 0x44584f43, 32 * MIB, 0);
    raw_send(fds[0], 32 * MIB - 1);
    /* The same process, as one of another group. */
    raw_head(fds[1], 0x44584f43, 16 * MIB, 0);
    raw_send(fds[1], 16 * MIB);
    box_await_end(box,
                  "41943040 of them from this process: at most 134217728, and 33554432 of one");
    assert_int_equal(box->end_code, COX_NO_SPACE);
    for (int i = 2; i < 6; i++) {
        raw_head(fds[i], 0x44584f43, 32 * MIB, 0);
        raw_send(fds[i], 32 * MIB - 1);
    }
    box_await_end(box, "messages under way have 142606336 bytes, 8388608 of them from this");
    assert_int_equal(box->end_count, 2);
    /* Small ones come in any case; and others when there is room again. */
    struct cox_direct *a = node("node-a", NULL, NULL);
    sends(a, "node-b", port, "small");
    box_await(box, 1);
    raw_send(fds[0], 1);
    box_await(box, 2);
    for (int i = 0; i < 6; i++)
        close(fds[i]);
}

static int announce(void *context, const char *peer, const char *group, uint32_t kind,
                    uint64_t size, const uint8_t *front, struct cox_error *err)
{
    (void)context, (void)group;
    return kind == 1 && size == 100 && front[COX_DIRECT_FRONT_SIZE - 1] == 'x'
               ? cox_fail(err, COX_DENIED, "%s says what is not wanted", peer)
               : 0;
}

BOX_TEST(messages_that_are_not_wanted_are_not_read)
{
    struct cox_direct_options options = options_of("node-b", NULL, box);
    options.on_announce = announce;
    struct cox_direct *b = opened(&options), *a = node("node-a", NULL, NULL);
    const uint16_t port = cox_direct_port(b);
    uint8_t bytes[100];
    memset(bytes, 'x', sizeof bytes);
    assert_int_equal(send_bytes(a, "node-b", port, 2, bytes, 100, PATIENCE_MS, NULL), 0);
    box_await(box, 1);
    assert_int_equal(send_bytes(a, "node-b", port, 2, NULL, 0, PATIENCE_MS, NULL), 0);
    box_await(box, 2);
    int fd = raw_connect(port);
    raw_hello(fd, "node-c");
    raw_head(fd, 0x44584f43, 100, 0);
    raw_send(fd, 10); /* zeros */
    memset(bytes, 'x', sizeof bytes);
    assert_int_equal(send(fd, bytes, COX_DIRECT_FRONT_SIZE - 10, MSG_NOSIGNAL),
                     COX_DIRECT_FRONT_SIZE - 10);
    box_await_end(box, "has ended: node-c says what is not wanted");
    assert_int_equal(box->message_count, 2);
    close(fd);
}

static bool odd_to_memory(void *context, uint32_t kind, uint64_t size, const uint8_t *front)
{
    (void)context, (void)front;
    assert_true(size > COX_DIRECT_FRONT_SIZE);
    return kind % 2;
}

static void pool_free(void *object)
{
    cox_payload_memory_pool_deinit(object);
    free(object);
}

/* For messages to a node that is opened later, and so closed before. */
static struct cox_payload_memory_pool *pool_new(void)
{
    struct cox_payload_memory_pool *pool = calloc(1, sizeof *pool);
    assert_non_null(pool);
    cox_payload_memory_pool_init(pool);
    return test_own(pool, pool_free);
}

/* That of the last message of kind REFERRED. */
#define REFERRED 11
static struct cox_payload_memory *referred;

/* Puts front and memory together again, for the box. */
static void to_box(void *context, const char *peer, const char *group, uint32_t kind,
                   const uint8_t *front, struct cox_payload_memory *memory, uint64_t memory_size)
{
    struct box *box = context;
    uint8_t *bytes = malloc(COX_DIRECT_FRONT_SIZE + memory_size);
    assert_non_null(bytes);
    memcpy(bytes, front, COX_DIRECT_FRONT_SIZE);
    assert_int_equal(
        pread(cox_payload_memory_fd(memory), bytes + COX_DIRECT_FRONT_SIZE, memory_size, 0),
        memory_size);
    pthread_mutex_lock(&box->lock);
    if (kind == REFERRED)
        referred = cox_payload_memory_ref(memory);
    free(box->bytes);
    snprintf(box->peer, sizeof box->peer, "%s", peer);
    snprintf(box->group, sizeof box->group, "%s", group);
    box->kind = kind;
    box->bytes = bytes;
    box->size = COX_DIRECT_FRONT_SIZE + memory_size;
    box->message_count++;
    pthread_cond_broadcast(&box->changed);
    pthread_mutex_unlock(&box->lock);
}

BOX_TEST(messages_go_to_memory_of_their_own)
{
    static const size_t sizes[] = {0, 1, 96, 97, 98, 4096, MIB, MIB + 1, 3 * MIB, 20 * MIB + 12345};
    struct cox_direct_options options = options_of("node-b", NULL, box);
    options.memory = pool_new();
    options.to_memory = odd_to_memory;
    options.on_memory = to_box;
    struct cox_direct *b = opened(&options), *a = node("node-a", NULL, NULL);
    uint8_t *bytes = malloc(21 * MIB);
    assert_non_null(bytes);
    for (size_t i = 0; i < 21 * MIB; i++)
        bytes[i] = (uint8_t)(i * 31 + (i >> 9));
    uint32_t count = 0;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (uint32_t kind = 8; kind < 10; kind++) {
            assert_int_equal(send_bytes(a, "node-b", cox_direct_port(b), kind, bytes, sizes[i],
                                        PATIENCE_MS, NULL),
                             0);
            box_await(box, ++count);
            assert_int_equal(box->kind, kind);
            assert_int_equal(box->size, sizes[i]);
            assert_memory_equal(box->bytes ? box->bytes : bytes, bytes, sizes[i]);
        }
    free(bytes);
    /* One that ends within leaves no memory behind. */
    int fd = raw_connect(cox_direct_port(b));
    raw_hello(fd, "node-c");
    raw_head(fd, 0x44584f43, 8 * MIB, 0);
    raw_send(fd, 3 * MIB);
    close(fd);
    box_await_end(box, "node-c (127.0.0.1");
    assert_int_equal(box->message_count, count);
}

static void check_referred(const uint8_t *bytes, size_t size)
{
    uint8_t *copy = malloc(size);
    assert_non_null(copy);
    assert_int_equal(pread(cox_payload_memory_fd(referred), copy, size, 0), size);
    assert_memory_equal(copy, bytes, size);
    free(copy);
}

BOX_TEST(memory_gets_the_next_message_once_nobody_refers_to_it)
{
    struct cox_direct_options options = options_of("node-b", NULL, box);
    struct cox_payload_memory_pool *pool = options.memory = pool_new();
    options.to_memory = odd_to_memory;
    options.on_memory = to_box;
    struct cox_direct *b = opened(&options), *a = node("node-a", NULL, NULL);
    const uint16_t port = cox_direct_port(b);
    const size_t size = 3 * MIB;
    uint8_t *bytes = malloc(size);
    assert_non_null(bytes);
    memset(bytes, 1, size);
    assert_int_equal(send_bytes(a, "node-b", port, REFERRED, bytes, size, PATIENCE_MS, NULL), 0);
    box_await(box, 1);
    for (int i = 2; i < 6; i++) {
        memset(bytes, i, size);
        assert_int_equal(send_bytes(a, "node-b", port, 9, bytes, size, PATIENCE_MS, NULL), 0);
        box_await(box, (uint32_t)i);
        assert_memory_equal(box->bytes, bytes, size);
    }
    memset(bytes, 1, size);
    check_referred(bytes, size - COX_DIRECT_FRONT_SIZE);
    /* From now on it is the one that was released last. */
    assert_int_equal(send_bytes(a, "node-b", port, 2, bytes, 1, PATIENCE_MS, NULL), 0);
    box_await(box, 6);
    const struct cox_payload_memory *last = referred;
    referred = cox_payload_memory_unref(referred);
    memset(bytes, 7, size);
    assert_int_equal(send_bytes(a, "node-b", port, REFERRED, bytes, size, PATIENCE_MS, NULL), 0);
    box_await(box, 7);
    assert_ptr_equal(referred, last);
    check_referred(bytes, size - COX_DIRECT_FRONT_SIZE);
    /* A message that ends within it leaves it to the next one. */
    referred = cox_payload_memory_unref(referred);
    int fd = raw_connect(port);
    raw_hello(fd, "node-c");
    raw_head(fd, 0x44584f43, size, 0);
    raw_send(fd, MIB);
    close(fd);
    box_await_end(box, "node-c (127.0.0.1");
    memset(bytes, 8, size);
    assert_int_equal(send_bytes(a, "node-b", port, 9, bytes, size, PATIENCE_MS, NULL), 0);
    box_await(box, 8);
    assert_memory_equal(box->bytes, bytes, size);
    assert_non_null(pool->kept);
    free(bytes);
}

/* As many bytes of a part are there as the test has said. */
struct growing {
    pthread_mutex_t lock;
    pthread_cond_t grown;
    size_t there, asked;
};

static size_t growing_await(void *context, size_t done)
{
    struct growing *growing = context;
    pthread_mutex_lock(&growing->lock);
    growing->asked = done;
    pthread_cond_broadcast(&growing->grown);
    while (growing->there <= done)
        pthread_cond_wait(&growing->grown, &growing->lock);
    const size_t there = growing->there;
    pthread_mutex_unlock(&growing->lock);
    return there;
}

struct growing_send {
    struct cox_direct *from;
    uint16_t port;
    struct cox_direct_message message;
    int result;
};

static void *growing_send_main(void *argument)
{
    struct growing_send *send = argument;
    char address[32];
    snprintf(address, sizeof address, "127.0.0.1:%u", send->port);
    send->result = cox_direct_send_message(send->from, "node-b", address, &send->message,
                                           cox_deadline_after_ms(PATIENCE_MS), NULL);
    return NULL;
}

BOX_TEST(a_part_is_sent_as_it_is_written)
{
    static const size_t steps[] = {1, 100, 5 * MIB, 5 * MIB + 1, 9 * MIB};
    struct cox_direct *b = node("node-b", "b", box), *a = node("node-a", "a", NULL);
    struct growing growing = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, SIZE_MAX};
    uint8_t *bytes = malloc(9 * MIB), first[100];
    assert_non_null(bytes);
    memset(first, 'f', sizeof first);
    const struct iovec parts[] = {{first, sizeof first}, {bytes, 9 * MIB}};
    struct growing_send send = {.from = a,
                                .port = cox_direct_port(b),
                                .message = {.kind = 9,
                                            .parts = parts,
                                            .count = 2,
                                            .await = growing_await,
                                            .await_context = &growing}};
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, growing_send_main, &send), 0);
    for (size_t i = 0, done = 0; i < sizeof steps / sizeof *steps; done = steps[i++]) {
        pthread_mutex_lock(&growing.lock);
        while (growing.asked != done) /* all before it was taken */
            pthread_cond_wait(&growing.grown, &growing.lock);
        pthread_mutex_unlock(&growing.lock);
        for (size_t at = done; at < steps[i]; at++)
            bytes[at] = (uint8_t)(at * 7 + (at >> 10));
        pthread_mutex_lock(&growing.lock);
        growing.there = steps[i];
        pthread_cond_broadcast(&growing.grown);
        pthread_mutex_unlock(&growing.lock);
    }
    pthread_join(thread, NULL);
    assert_int_equal(send.result, 0);
    box_await(box, 1);
    assert_int_equal(box->size, sizeof first + 9 * MIB);
    assert_memory_equal(box->bytes, first, sizeof first);
    assert_memory_equal(box->bytes + sizeof first, bytes, 9 * MIB);
    free(bytes);
}

struct flood {
    uint16_t port;
    _Atomic bool over;
    _Atomic uint32_t count;
};

/* Bare connections of two machines, as fast as they go, which say nothing. */
static void *flood_main(void *argument)
{
    struct flood *flood = argument;
    int fds[400];
    for (uint32_t i = 0; !atomic_load(&flood->over); i++) {
        if (i >= 400)
            close(fds[i % 400]);
        fds[i % 400] = raw_connect_from((uint8_t)(2 + i % 2), flood->port);
        atomic_fetch_add(&flood->count, 1);
    }
    for (uint32_t i = 0; i < 400 && i < atomic_load(&flood->count); i++)
        close(fds[i]);
    return NULL;
}

BOX_TEST(machines_that_knock_keep_no_process_out)
{
    struct cox_direct *b = node("node-b", "b", box);
    struct flood flood = {.port = cox_direct_port(b)};
    pthread_t thread = test_thread(flood_main, &flood);
    while (atomic_load(&flood.count) < 300)
        moment();
    for (uint32_t i = 0; i < 20; i++) {
        struct cox_direct *a = node("node-a", "a", NULL);
        sends(a, "node-b", flood.port, "x");
        box_await(box, i + 1);
        test_release(a);
    }
    atomic_store(&flood.over, true);
    pthread_join(thread, NULL);
    assert_true(cox_direct_refused(b) > 100);
}

struct storm {
    pthread_barrier_t *barrier;
    uint16_t port;
    int r;
    pthread_t thread;
    struct cox_direct *direct;
};

static void *storm_main(void *argument)
{
    struct storm *storm = argument;
    pthread_barrier_wait(storm->barrier);
    storm->r = send_bytes(storm->direct, "node-b", storm->port, 9, "x", 1, PATIENCE_MS, NULL);
    return NULL;
}

/* As after a restart of the lead; behind one address, as behind a NAT. */
BOX_TEST(all_nodes_of_a_cluster_connect_at_once)
{
    struct cox_direct *b = node("node-b", "b", box);
    struct storm storms[COX_NODE_COUNT_MAX] = {0};
    pthread_barrier_t barrier;
    pthread_barrier_init(&barrier, NULL, COX_NODE_COUNT_MAX);
    for (int i = 0; i < COX_NODE_COUNT_MAX; i++) {
        char group[16];
        snprintf(group, sizeof group, "g%d", i);
        storms[i] = (struct storm){.barrier = &barrier, .port = cox_direct_port(b)};
        storms[i].direct = node_of(group, "node-a", "a", NULL);
        assert_int_equal(pthread_create(&storms[i].thread, NULL, storm_main, &storms[i]), 0);
    }
    for (int i = 0; i < COX_NODE_COUNT_MAX; i++)
        pthread_join(storms[i].thread, NULL);
    pthread_barrier_destroy(&barrier);
    for (int i = 0; i < COX_NODE_COUNT_MAX; i++)
        assert_int_equal(storms[i].r, 0);
    box_await(box, COX_NODE_COUNT_MAX);
    for (int i = 0; i < COX_NODE_COUNT_MAX; i++)
        test_release(storms[i].direct);
}

BOX_TEST(known_processes_have_a_connection_each)
{
    struct cox_direct *b = node("node-b", NULL, box);
    const uint16_t port = cox_direct_port(b);
    int fds[COX_DIRECT_KNOWN_MAX];
    for (int i = 0; i < COX_DIRECT_KNOWN_MAX; i++) {
        char name[16];
        snprintf(name, sizeof name, "node-%d", i > 1 ? i : 0);
        fds[i] = raw_connect(port);
        raw_hello_of(fds[i], name, i == 1 ? "other" : "");
    }
    /* Who has two gives one. */
    struct cox_direct *a = node("node-a", NULL, NULL), *c = node("node-c", NULL, NULL);
    sends(a, "node-b", port, "x");
    box_await_end(box, "the connection from node-0");
    assert_int_equal(box->end_code, COX_FULL);
    assert_int_equal(box->end_count, 1);
    refuses(c, "node-b", port, -ECONNRESET, "cannot send to node-b");
    box_await_end(box, "there are 224 connections already");
    assert_int_equal(cox_direct_refused(b), 1);
    close(fds[1]);
    box_await_end(box, "the peer has closed the connection");
    /* It is counted until on_end has returned. */
    int r;
    for (int i = 0; (r = send_bytes(c, "node-b", port, 9, "x", 1, PATIENCE_MS, NULL)) && i < 1000;
         i++)
        moment();
    assert_int_equal(r, 0);
    test_release(b);
    for (int i = 0; i < COX_DIRECT_KNOWN_MAX; i++)
        if (i != 1)
            close(fds[i]);
}

BOX_TEST(a_later_connection_replaces_the_earlier_one_in_order)
{
    box_hold(box, true);
    struct cox_direct *b = node("node-b", "b", box), *a = node("node-a", "a", NULL);
    const uint16_t port = cox_direct_port(b);
    sends(a, "node-b", port, "first");
    sends(a, "node-b", port, "second");
    box_await(box, 1);
    struct cox_direct *again = node("node-a", "a", NULL);
    /* The first one's messages are not yet delivered. */
    assert_int_equal(send_bytes(again, "node-b", port, 9, "third", 5, 200, NULL), COX_TIMEOUT);
    assert_int_equal(box->message_count, 1);
    box_hold(box, false);
    sends(again, "node-b", port, "fourth");
    box_await(box, 3);
    assert_memory_equal(box->bytes, "fourth", 6);
    box_await_end(box, "was replaced by a later one");
}

int main(void)
{
    return test_run(certificates_make, certificates_remove);
}
