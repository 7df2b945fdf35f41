#include "nodes/direct/direct.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

#include "nodes/direct/direct_object.h"

#define PATIENCE_MS 30000
#define MIB ((size_t)1 << 20)
#define DAY 86400L

/* ---- certificates, in a folder of this program ---- */

static char folder[64];

struct authority {
    EVP_PKEY *key;
    X509 *certificate;
};

static const char *path(const char *file)
{
    static char paths[8][sizeof folder + 256];
    static int next;
    char *p = paths[next++ % 8];
    snprintf(p, sizeof paths[0], "%s/%s", folder, file);
    return p;
}

static void name_add(X509 *certificate, const char *cn)
{
    X509_NAME_add_entry_by_txt(X509_get_subject_name(certificate), "CN", MBSTRING_UTF8,
                               (const unsigned char *)cn, -1, -1, 0);
}

static void extension_add(X509 *certificate, int nid, const char *value)
{
    X509_EXTENSION *extension = X509V3_EXT_conf_nid(NULL, NULL, nid, value);
    assert_non_null(extension);
    X509_add_ext(certificate, extension, -1);
    X509_EXTENSION_free(extension);
}

static X509 *certificate_new(EVP_PKEY *key, const char *cn, long from, long until)
{
    static long serial;
    X509 *c = X509_new();
    X509_set_version(c, 2);
    ASN1_INTEGER_set(X509_get_serialNumber(c), ++serial);
    X509_gmtime_adj(X509_getm_notBefore(c), from);
    X509_gmtime_adj(X509_getm_notAfter(c), until);
    X509_set_pubkey(c, key);
    name_add(c, cn);
    return c;
}

static void certificate_write(X509 *c, const char *file)
{
    FILE *f = fopen(path(file), "we");
    assert_true(f && PEM_write_X509(f, c) == 1);
    fclose(f);
}

static void key_write(EVP_PKEY *key, const char *file, const char *passphrase)
{
    FILE *f = fopen(path(file), "we");
    assert_non_null(f);
    assert_int_equal(PEM_write_PrivateKey(f, key, passphrase ? EVP_aes_128_cbc() : NULL,
                                          (const unsigned char *)passphrase,
                                          passphrase ? (int)strlen(passphrase) : 0, NULL, NULL),
                     1);
    fclose(f);
}

static struct authority authority_make(const char *cn, const char *file)
{
    struct authority a = {.key = EVP_EC_gen("P-256")};
    a.certificate = certificate_new(a.key, cn, -DAY, DAY);
    extension_add(a.certificate, NID_basic_constraints, "critical,CA:TRUE");
    X509_set_issuer_name(a.certificate, X509_get_subject_name(a.certificate));
    X509_sign(a.certificate, a.key, EVP_sha256());
    certificate_write(a.certificate, file);
    return a;
}

struct kind {
    const char *cn, *second_cn, *usage;
    long from, until;
};

/* FILE.crt and FILE.key. */
static void process_make(const struct authority *a, const char *file, struct kind kind)
{
    EVP_PKEY *key = EVP_EC_gen("P-256");
    X509 *c =
        certificate_new(key, kind.cn, kind.from ? kind.from : -DAY, kind.until ? kind.until : DAY);
    if (kind.second_cn)
        name_add(c, kind.second_cn);
    if (kind.usage)
        extension_add(c, NID_ext_key_usage, kind.usage);
    X509_set_issuer_name(c, X509_get_subject_name(a->certificate));
    X509_sign(c, a->key, EVP_sha256());
    char name[64];
    snprintf(name, sizeof name, "%s.crt", file);
    certificate_write(c, name);
    snprintf(name, sizeof name, "%s.key", file);
    key_write(key, name, NULL);
    X509_free(c);
    EVP_PKEY_free(key);
}

static void authority_free(struct authority *a)
{
    X509_free(a->certificate);
    EVP_PKEY_free(a->key);
}

static void *nothing(void *argument)
{
    return argument;
}

static int certificates_make(void **state)
{
    (void)state;
    /* ThreadSanitizer has a thread of its own, from the first on. */
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, nothing, NULL), 0);
    pthread_join(thread, NULL);
    snprintf(folder, sizeof folder, "/tmp/cox-direct-XXXXXX");
    assert_non_null(mkdtemp(folder));
    struct authority ours = authority_make("ours", "ca.crt");
    struct authority theirs = authority_make("theirs", "foreign-ca.crt");
    process_make(&ours, "a", (struct kind){.cn = "node-a", .usage = "clientAuth,serverAuth"});
    process_make(&ours, "b", (struct kind){.cn = "node-b"});
    process_make(&ours, "expired", (struct kind){.cn = "node-b", .from = -3 * DAY, .until = -DAY});
    process_make(&ours, "early", (struct kind){.cn = "node-b", .from = DAY, .until = 2 * DAY});
    process_make(&ours, "two", (struct kind){.cn = "node-b", .second_cn = "node-a"});
    process_make(&ours, "odd", (struct kind){.cn = "node b"});
    process_make(&ours, "server", (struct kind){.cn = "node-b", .usage = "serverAuth"});
    process_make(&theirs, "foreign", (struct kind){.cn = "node-b"});
    EVP_PKEY *key = EVP_EC_gen("P-256");
    key_write(key, "secret.key", "passphrase");
    EVP_PKEY_free(key);
    authority_free(&ours);
    authority_free(&theirs);
    return 0;
}

static int certificates_remove(void **state)
{
    (void)state;
    DIR *d = opendir(folder);
    for (struct dirent *e; d && (e = readdir(d));)
        unlink(path(e->d_name));
    closedir(d);
    return rmdir(folder);
}

/* ---- leaks ---- */

static int entries(const char *of)
{
    DIR *d = opendir(of);
    int count = 0;
    while (readdir(d))
        count++;
    closedir(d);
    return count;
}

static int fds_before, threads_before;

static int setup(void **state)
{
    (void)state;
    fds_before = entries("/proc/self/fd");
    threads_before = entries("/proc/self/task");
    return 0;
}

static void moment(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

static int teardown(void **state)
{
    (void)state;
    /* A joined thread stays in /proc for a moment. */
    for (int i = 0; i < 1000 && entries("/proc/self/task") > threads_before; i++)
        moment();
    const int fds = entries("/proc/self/fd"), threads = entries("/proc/self/task");
    if (fds != fds_before || threads != threads_before)
        print_error("fds: %d, were %d; threads: %d, were %d\n", fds, fds_before, threads,
                    threads_before);
    return fds != fds_before || threads != threads_before || waitpid(-1, NULL, WNOHANG) != -1;
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

/* ---- a receiver that remembers ---- */

struct box {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* on_message does not return */
    bool held;
    uint32_t message_count, end_count;
    uint64_t next[8];
    bool disorder;
    char peer[64], group[64];
    uint32_t kind;
    uint8_t *bytes;
    size_t size;
    bool end_has_peer;
    char ends[8192];
};

static void box_init(struct box *box)
{
    memset(box, 0, sizeof *box);
    pthread_mutex_init(&box->lock, NULL);
    pthread_cond_init(&box->changed, NULL);
}

static void box_deinit(struct box *box)
{
    free(box->bytes);
    pthread_mutex_destroy(&box->lock);
    pthread_cond_destroy(&box->changed);
}

static void box_message(void *context, const char *peer, const char *group, uint32_t kind,
                        uint8_t *bytes, size_t size)
{
    struct box *box = context;
    pthread_mutex_lock(&box->lock);
    if (kind < 8 && size >= 8) {
        uint64_t number;
        memcpy(&number, bytes, sizeof number);
        box->disorder |= number != box->next[kind]++;
    }
    snprintf(box->peer, sizeof box->peer, "%s", peer);
    snprintf(box->group, sizeof box->group, "%s", group);
    free(box->bytes);
    box->kind = kind;
    box->bytes = bytes;
    box->size = size;
    box->message_count++;
    pthread_cond_broadcast(&box->changed);
    while (box->held)
        pthread_cond_wait(&box->changed, &box->lock);
    pthread_mutex_unlock(&box->lock);
}

static void box_end(void *context, const char *peer, const char *text)
{
    struct box *box = context;
    pthread_mutex_lock(&box->lock);
    box->end_count++;
    box->end_has_peer = peer != NULL;
    const size_t at = strlen(box->ends);
    snprintf(box->ends + at, sizeof box->ends - at, "%s\n", text);
    pthread_cond_broadcast(&box->changed);
    pthread_mutex_unlock(&box->lock);
}

static void box_hold(struct box *box, bool held)
{
    pthread_mutex_lock(&box->lock);
    box->held = held;
    pthread_cond_broadcast(&box->changed);
    pthread_mutex_unlock(&box->lock);
}

static bool box_wait(struct box *box)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += PATIENCE_MS / 1000;
    return pthread_cond_timedwait(&box->changed, &box->lock, &until) != ETIMEDOUT;
}

static void box_await(struct box *box, uint32_t message_count)
{
    pthread_mutex_lock(&box->lock);
    bool came = true;
    while (came && box->message_count < message_count)
        came = box_wait(box);
    pthread_mutex_unlock(&box->lock);
    assert_true(came);
}

static void box_await_end(struct box *box, const char *text)
{
    pthread_mutex_lock(&box->lock);
    bool came = true;
    while (came && !strstr(box->ends, text))
        came = box_wait(box);
    pthread_mutex_unlock(&box->lock);
    if (!came)
        fail_msg("'%s' is not in: %s", text, box->ends);
}

static uint32_t box_message_count(struct box *box)
{
    pthread_mutex_lock(&box->lock);
    const uint32_t count = box->message_count;
    pthread_mutex_unlock(&box->lock);
    return count;
}

static uint32_t box_end_count(struct box *box)
{
    pthread_mutex_lock(&box->lock);
    const uint32_t count = box->end_count;
    pthread_mutex_unlock(&box->lock);
    return count;
}

/* The last end. */
static bool box_end_has_peer(struct box *box)
{
    pthread_mutex_lock(&box->lock);
    const bool has = box->end_has_peer;
    pthread_mutex_unlock(&box->lock);
    return has;
}

/* The texts of ends so far. */
static void box_forget(struct box *box)
{
    pthread_mutex_lock(&box->lock);
    box->ends[0] = '\0';
    pthread_mutex_unlock(&box->lock);
}

/* file: of the certificate; NULL: without TLS. */
static struct cox_direct_options options_of(const char *name, const char *file, struct box *box)
{
    static char names[8][2][128];
    static int next;
    struct cox_direct_options o = {.name = name,
                                   .insecure_loopback = !file,
                                   .context = box,
                                   .on_message = box_message,
                                   .on_end = box_end,
                                   .listen = box ? "127.0.0.1:0" : NULL};
    if (file) {
        const int i = next++ % 8;
        snprintf(names[i][0], sizeof names[i][0], "%s/%s.crt", folder, file);
        snprintf(names[i][1], sizeof names[i][1], "%s/%s.key", folder, file);
        o.ca = path("ca.crt");
        o.certificate = names[i][0];
        o.key = names[i][1];
    }
    return o;
}

static struct cox_direct *opened(const struct cox_direct_options *options)
{
    struct cox_direct *direct = NULL;
    struct cox_error err = {0};
    if (cox_direct_open(options, &direct, &err))
        fail_msg("%s", err.text);
    return direct;
}

static struct cox_direct *node_of(const char *group, const char *name, const char *file,
                                  struct box *box)
{
    struct cox_direct_options options = options_of(name, file, box);
    options.group = group;
    return opened(&options);
}

static struct cox_direct *node(const char *name, const char *file, struct box *box)
{
    return node_of(NULL, name, file, box);
}

static const char *address_of(uint16_t port)
{
    static char text[32];
    snprintf(text, sizeof text, "127.0.0.1:%u", port);
    return text;
}

static int send_bytes(struct cox_direct *from, const char *peer, uint16_t port, uint32_t kind,
                      const void *bytes, size_t size, uint64_t timeout_ms, struct cox_error *err)
{
    char address[32];
    snprintf(address, sizeof address, "127.0.0.1:%u", port);
    const struct iovec part = {.iov_base = (void *)bytes, .iov_len = size};
    return cox_direct_send(from, peer, address, kind, &part, 1, cox_deadline_after_ms(timeout_ms),
                           err);
}

static void sends(struct cox_direct *from, const char *peer, uint16_t port, const char *text)
{
    struct cox_error err = {0};
    if (send_bytes(from, peer, port, 99, text, strlen(text), PATIENCE_MS, &err))
        fail_msg("%s", err.text);
}

static void refuses(struct cox_direct *from, const char *peer, uint16_t port, int code,
                    const char *text)
{
    struct cox_error err = {0};
    assert_int_equal(send_bytes(from, peer, port, 99, "x", 1, PATIENCE_MS, &err), code);
    assert_int_equal(err.code, code);
    if (!strstr(err.text, text))
        fail_msg("'%s' is not in: %s", text, err.text);
}

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

static void order(const char *file_a, const char *file_b)
{
    struct box box;
    box_init(&box);
    struct cox_direct *b = node("node-b", file_b, &box), *a = node("node-a", file_a, NULL);
    struct sender senders[4];
    memset(senders, 0, sizeof senders);
    for (uint32_t i = 0; i < 4; i++) {
        senders[i].direct = a;
        senders[i].port = cox_direct_port(b);
        senders[i].kind = i;
        senders[i].size = 40000;
        senders[i].timeout_ms = PATIENCE_MS;
        senders[i].count = 200;
        assert_int_equal(pthread_create(&senders[i].thread, NULL, sender_main, &senders[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(senders[i].thread, NULL);
        if (senders[i].r)
            fail_msg("%s", senders[i].err.text);
    }
    box_await(&box, 800);
    assert_false(box.disorder);
    assert_string_equal(box.peer, "node-a");
    assert_int_equal(box_end_count(&box), 0);
    cox_direct_close(a);
    box_await_end(&box, "the peer has closed the connection");
    assert_true(box_end_has_peer(&box));
    cox_direct_close(b);
    assert_int_equal(box_end_count(&box), 1);
    box_deinit(&box);
}

static void messages_of_several_threads_arrive_in_order(void **state)
{
    (void)state;
    order("a", "b");
    order(NULL, NULL);
}

static void sizes(const char *file_a, const char *file_b)
{
    static const size_t all[] = {0, 1, 16360, 16361, 16384, 40000, MIB - 1, MIB, 64 * MIB};
    struct box box;
    box_init(&box);
    struct cox_direct *b = node("node-b", file_b, &box), *a = node("node-a", file_a, NULL);
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
        box_await(&box, i + 1);
        assert_int_equal(box.kind, 100 + i);
        assert_int_equal(box.size, all[i]);
        assert_true(all[i] == 0 ? !box.bytes : !memcmp(box.bytes, bytes, all[i]));
    }
    free(bytes);
    cox_direct_close(a);
    cox_direct_close(b);
    box_deinit(&box);
}

static void messages_of_all_sizes_arrive_whole(void **state)
{
    (void)state;
    sizes("a", "b");
    sizes(NULL, NULL);
}

static void what_is_too_large_is_not_sent_and_not_accepted(void **state)
{
    (void)state;
    struct box box;
    box_init(&box);
    struct cox_direct_options options = options_of("node-b", "b", &box);
    options.size_max = 1000;
    struct cox_direct *b = opened(&options), *a = node("node-a", "a", NULL);
    const uint16_t port = cox_direct_port(b);
    uint8_t bytes[1001] = {0};
    struct cox_error err = {0};
    assert_int_equal(send_bytes(b, "node-a", 1, 0, bytes, 1001, 0, &err), COX_TOO_LARGE);
    struct iovec huge[2] = {{bytes, SIZE_MAX}, {bytes, 2}};
    assert_int_equal(cox_direct_send(a, "node-b", address_of(port), 0, huge, 2, 0, NULL),
                     COX_TOO_LARGE);
    assert_int_equal(send_bytes(a, "node-b", port, 9, bytes, 1000, PATIENCE_MS, NULL), 0);
    assert_int_equal(send_bytes(a, "node-b", port, 9, bytes, 1001, PATIENCE_MS, NULL), 0);
    box_await_end(&box, "announced a message of 1001 bytes; at most 1000");
    assert_int_equal(box_message_count(&box), 1);
    sends(a, "node-b", port, "again");
    box_await(&box, 2);
    cox_direct_close(a);
    cox_direct_close(b);
    box_deinit(&box);
}

static void ipv6_addresses_are_in_brackets(void **state)
{
    (void)state;
    struct box box;
    box_init(&box);
    struct cox_direct_options options = options_of("node-b", NULL, &box);
    options.listen = "[::1]:0";
    struct cox_direct *b = NULL, *a = node("node-a", NULL, NULL);
    int r = cox_direct_open(&options, &b, NULL);
    if (r == 0) {
        char address[32];
        snprintf(address, sizeof address, "[::1]:%u", cox_direct_port(b));
        assert_int_equal(cox_direct_send(a, "node-b", address, 9, NULL, 0,
                                         cox_deadline_after_ms(PATIENCE_MS), NULL),
                         0);
        box_await(&box, 1);
    }
    cox_direct_close(a);
    cox_direct_close(b);
    box_deinit(&box);
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
    uint8_t *bytes = NULL;
    uint32_t kind;
    size_t size;
    end->r = cox_direct_stream_secure(&end->stream, &end->tls, true,
                                      cox_deadline_after_ms(PATIENCE_MS), name, &end->err);
    while (end->r == 0) {
        end->r = cox_direct_stream_read_message(&end->stream, MIB, &kind, &bytes, &size, &end->err);
        if (end->r)
            break;
        end->received += size == 100000 && bytes[size - 1] == (uint8_t)kind;
        free(bytes);
    }
    return NULL;
}

static void keys_are_changed_in_time(void **state)
{
    (void)state;
    int fds[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    struct end a = {.name = "node-a"}, b = {.name = "node-b"};
    end_open(&a, "a", fds[0]);
    end_open(&b, "b", fds[1]);
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, end_receive, &b), 0);
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
        assert_int_equal(
            cox_direct_stream_write_message(&a.stream, i, &part, 1, sizeof bytes, deadline, &a.err),
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
    struct cox_error err = {0};
    assert_int_equal(cox_direct_open(&options, &direct, &err), code);
    assert_null(direct);
    if (!strstr(err.text, text))
        fail_msg("'%s' is not in: %s", text, err.text);
}

static void open_says_what_is_wrong_with_the_files(void **state)
{
    (void)state;
    struct cox_direct_options o = options_of("node-b", "b", NULL);
    o.ca = path("none.crt");
    open_refuses(o, COX_INVALID, "none.crt: No such file or directory");
    o.ca = path("b.key");
    open_refuses(o, COX_INVALID, "b.key has no CA certificate in PEM");
    o = options_of("node-b", "b", NULL);
    o.certificate = path("b.key");
    open_refuses(o, COX_INVALID, "b.key has no usable certificate");
    o = options_of("node-b", "b", NULL);
    o.key = path("a.key");
    open_refuses(o, COX_INVALID, "a.key does not belong to the certificate");
    o.key = path("a.crt");
    open_refuses(o, COX_INVALID, "a.crt has no private key");
    o.key = path("secret.key");
    open_refuses(o, COX_INVALID, "readable without a passphrase");
    o.key = path("none.key");
    open_refuses(o, COX_INVALID, "none.key: No such file or directory");
    open_refuses(options_of("node-b", "a", NULL), COX_INVALID, "is that of node-a, not of node-b");
    open_refuses(options_of("node-b", "expired", NULL), COX_INVALID, "expired.crt has expired");
    open_refuses(options_of("node-b", "early", NULL), COX_INVALID, "is not valid yet");
    open_refuses(options_of("node-b", "two", NULL), COX_INVALID, "or more than one");
    open_refuses(options_of("node-b", "odd", NULL), COX_INVALID, "no common name");
    open_refuses(options_of("node-b", "server", NULL), COX_INVALID, "as a TLS client's");
    open_refuses(options_of("node-b", "foreign", NULL), COX_INVALID, "by the CA");
}

static void open_says_what_is_wrong_with_the_options(void **state)
{
    (void)state;
    struct box box;
    box_init(&box);
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
    o = options_of("node-b", NULL, &box);
    o.size_max = COX_DIRECT_SIZE_MAX + 1;
    open_refuses(o, COX_INVALID, "size_max");
    static const char *const addresses[] = {"",      "1.2.3.4", ":80",   "::1:80",
                                            "[::1]", "a:b",     "a:80x", "a:99999999",
                                            "[]:80", "a:70000", "[a:80"};
    for (size_t i = 0; i < sizeof addresses / sizeof *addresses; i++) {
        o = options_of("node-b", NULL, &box);
        o.listen = addresses[i];
        open_refuses(o, COX_INVALID, "is not an address");
    }
    o.listen = "0.0.0.0:0";
    open_refuses(o, COX_DENIED, "is not a loopback address");
    o.listen = "[::]:0";
    open_refuses(o, COX_DENIED, "is not a loopback address");
    struct cox_direct *b = node("node-b", NULL, &box);
    o.listen = address_of(cox_direct_port(b));
    open_refuses(o, -EADDRINUSE, "cannot listen at");
    struct cox_error err = {0};
    assert_int_equal(cox_direct_send(b, "node-a", "192.0.2.1:80", 0, NULL, 0, 0, &err), COX_DENIED);
    assert_int_equal(cox_direct_send(b, "node a", "127.0.0.1:80", 0, NULL, 0, 0, NULL),
                     COX_INVALID);
    assert_int_equal(cox_direct_send(b, "node-a", "127.0.0.1", 0, NULL, 0, 0, NULL), COX_INVALID);
    char endless[300];
    memset(endless, 'a', sizeof endless);
    strcpy(endless + sizeof endless - 4, ":80");
    assert_int_equal(cox_direct_send(b, "node-a", endless, 0, NULL, 0, 0, NULL), COX_INVALID);
    cox_direct_close(b);
    box_deinit(&box);
}

static void a_process_of_another_name_is_refused(void **state)
{
    (void)state;
    for (int tls = 0; tls < 2; tls++) {
        struct box box;
        box_init(&box);
        struct cox_direct *b = node("node-b", tls ? "b" : NULL, &box),
                          *a = node("node-a", tls ? "a" : NULL, NULL);
        refuses(a, "node-c", cox_direct_port(b), COX_DENIED,
                tls ? "is node-b, by its certificate" : "says that it is node-b");
        assert_int_equal(box_message_count(&box), 0);
        cox_direct_close(a);
        cox_direct_close(b);
        box_deinit(&box);
    }
}

static void a_process_of_another_ca_is_refused_by_both_sides(void **state)
{
    (void)state;
    struct box box;
    box_init(&box);
    struct cox_direct *a = node("node-a", "a", &box);
    struct cox_direct_options options = options_of("node-b", "foreign", &box);
    options.ca = path("foreign-ca.crt");
    struct cox_direct *foreign = opened(&options);
    refuses(a, "node-b", cox_direct_port(foreign), COX_DENIED,
            "the peer's certificate is not valid");
    refuses(foreign, "node-a", cox_direct_port(a), COX_DENIED,
            "the peer's certificate is not valid");
    cox_direct_close(foreign);
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
    box_await_end(&box, "the peer's certificate is not valid");
    assert_false(box_end_has_peer(&box));
    assert_int_equal(box_message_count(&box), 0);
    cox_direct_close(foreign);
    cox_direct_close(a);
    box_deinit(&box);
}

/* ---- peers that are no cox_direct ---- */

static int raw_connect(uint16_t port)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in to = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    assert_int_equal(connect(fd, (struct sockaddr *)&to, sizeof to), 0);
    return fd;
}

/* name and group: of at most 64 bytes. */
static void greeting_fill(uint8_t record[128], const char *name, const char *group)
{
    memset(record, 0, 128);
    memcpy(record, name, strlen(name));
    memcpy(record + 64, group, strlen(group));
}

static void raw_hello(int fd, const char *name)
{
    uint8_t record[128];
    greeting_fill(record, name, "");
    assert_int_equal(send(fd, record, 128, MSG_NOSIGNAL), 128);
    assert_int_equal(recv(fd, record, 128, MSG_WAITALL), 128);
    assert_string_equal((char *)record, "node-b");
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
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, raw_client_main, &client), 0);
    pthread_join(thread, NULL);
}

static void raw_tls_client(uint16_t port, const char *file, int version)
{
    raw_tls_client_says(port, file, version, NULL);
}

static void certificates_that_are_not_valid_are_refused(void **state)
{
    (void)state;
    struct box box;
    box_init(&box);
    struct cox_direct *b = node("node-b", "b", &box);
    const uint16_t port = cox_direct_port(b);
    static const int versions[] = {TLS1_2_VERSION, TLS1_3_VERSION};
    for (int i = 0; i < 2; i++) {
        box_forget(&box);
        raw_tls_client(port, NULL, versions[i]);
        box_await_end(&box, "peer did not return a certificate");
        raw_tls_client(port, "expired", versions[i]);
        box_await_end(&box, "certificate has expired");
        raw_tls_client(port, "early", versions[i]);
        box_await_end(&box, "certificate is not yet valid");
        raw_tls_client(port, "two", versions[i]);
        box_await_end(&box, "has no name that is valid");
        raw_tls_client(port, "server", versions[i]);
        box_await_end(&box, "certificate purpose");
        raw_tls_client_says(port, "a", versions[i], "node-c");
        box_await_end(&box, "says that it is node-c: its certificate is that of node-a");
    }
    raw_tls_client(port, "a", TLS1_1_VERSION);
    box_await_end(&box, "TLS: ");
    assert_int_equal(box_message_count(&box), 0);
    assert_false(box_end_has_peer(&box));
    cox_direct_close(b);
    box_deinit(&box);
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

static int raw_listen(uint16_t *ret_port)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in own = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof own;
    assert_int_equal(bind(fd, (struct sockaddr *)&own, sizeof own), 0);
    assert_int_equal(listen(fd, 8), 0);
    getsockname(fd, (struct sockaddr *)&own, &size);
    *ret_port = ntohs(own.sin_port);
    return fd;
}

static void refuses_server(const char *own, const char *file, const char *text)
{
    struct raw_server server = {.context = file ? raw_context(file) : NULL};
    server.fd = raw_listen(&server.port);
    assert_int_equal(pthread_create(&server.thread, NULL, raw_server_main, &server), 0);
    struct cox_direct *a = node("node-a", own, NULL);
    refuses(a, "node-b", server.port, COX_DENIED, text);
    cox_direct_close(a);
    pthread_join(server.thread, NULL);
    SSL_CTX_free(server.context);
    close(server.fd);
}

static void servers_that_are_not_valid_are_refused(void **state)
{
    (void)state;
    refuses_server("a", "expired", "certificate has expired");
    refuses_server("a", "early", "certificate is not yet valid");
    refuses_server("a", "two", "has no name that is valid");
    refuses_server("a", NULL, "TLS: ");
    refuses_server(NULL, NULL, "does not begin with a name");
}

static void heads_that_are_none_end_the_connection(void **state)
{
    (void)state;
    struct box box;
    box_init(&box);
    struct cox_direct *b = node("node-b", NULL, &box);
    const uint16_t port = cox_direct_port(b);
    for (int i = 0; i < 3; i++) {
        box_forget(&box);
        int fd = raw_connect(port);
        raw_hello(fd, "node-a");
        raw_head(fd, i == 0 ? 1 : 0x44584f43, i == 1 ? COX_DIRECT_SIZE_MAX + 1 : 0, i == 2);
        box_await_end(&box, i == 1 ? "at most 2147483648 are accepted" : "is not a message");
        assert_true(box_end_has_peer(&box));
        close(fd);
    }
    /* 64 characters: no NUL behind them */
    static const char full[] = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    static const char *const names[][2] = {
        {"GET / HTTP/1.1", ""}, {"", ""},           {"", "group"}, {"a b", ""},     {"a\nb", ""},
        {"node-a", "a b"},      {"node-a", "a\nb"}, {full, ""},    {"node-a", full}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        box_forget(&box);
        int fd = raw_connect(port);
        uint8_t record[128];
        greeting_fill(record, names[i][0], names[i][1]);
        assert_int_equal(send(fd, record, 128, MSG_NOSIGNAL), 128);
        box_await_end(&box, "does not begin with a name");
        close(fd);
    }
    assert_int_equal(box_message_count(&box), 0);
    cox_direct_close(b);
    box_deinit(&box);
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

static void a_large_size_allocates_nothing_before_bytes_arrive(void **state)
{
    (void)state;
    struct box box;
    box_init(&box);
    struct cox_direct *b = node("node-b", NULL, &box);
    const long before = peak_kib();
    int fd = raw_connect(cox_direct_port(b));
    raw_hello(fd, "node-a");
    raw_head(fd, 0x44584f43, COX_DIRECT_SIZE_MAX, 0);
    assert_int_equal(send(fd, "12345", 5, MSG_NOSIGNAL), 5);
    shutdown(fd, SHUT_WR);
    box_await_end(&box, "has ended within a message");
    assert_true(peak_kib() - before < 512 << 10);
    close(fd);
    cox_direct_close(b);
    box_deinit(&box);
}

static void silence_holds_nobody_up(void **state)
{
    (void)state;
    struct box box;
    box_init(&box);
    struct cox_direct *b = node("node-b", "b", &box), *a = node("node-a", "a", NULL);
    const uint64_t begin = cox_now_ns();
    int silent = raw_connect(cox_direct_port(b));
    sends(a, "node-b", cox_direct_port(b), "x");
    box_await(&box, 1);
    box_await_end(&box, "the deadline has passed");
    assert_true(cox_now_ns() - begin >= 2 * COX_NSEC_PER_SEC);
    assert_false(box_end_has_peer(&box));
    close(silent);
    /* close does not wait for a handshake */
    silent = raw_connect(cox_direct_port(b));
    cox_direct_close(a);
    cox_direct_close(b);
    close(silent);
    box_deinit(&box);
}

static void connections_are_limited(void **state)
{
    (void)state;
    struct box box;
    box_init(&box);
    struct cox_direct *b = node("node-b", NULL, &box);
    const uint16_t port = cox_direct_port(b);
    int fds[256];
    for (int i = 0; i < 256; i++) {
        char name[16];
        snprintf(name, sizeof name, "node-%d", i);
        fds[i] = raw_connect(port);
        raw_hello(fds[i], name);
    }
    struct cox_direct *a = node("node-a", NULL, NULL);
    refuses(a, "node-b", port, -ECONNRESET, "cannot send to node-b");
    box_await_end(&box, "refused: there are 256 already");
    assert_int_equal(box_end_count(&box), 1);
    close(fds[0]);
    box_await_end(&box, "the connection from node-0");
    /* It is counted until on_end has returned. */
    int r;
    for (int i = 0; (r = send_bytes(a, "node-b", port, 9, "x", 1, PATIENCE_MS, NULL)) && i < 1000;
         i++)
        moment();
    assert_int_equal(r, 0);
    cox_direct_close(b);
    for (int i = 1; i < 256; i++)
        close(fds[i]);
    cox_direct_close(a);
    box_deinit(&box);
}

static void a_later_connection_replaces_the_earlier_one_in_order(void **state)
{
    (void)state;
    struct box box;
    box_init(&box);
    box_hold(&box, true);
    struct cox_direct *b = node("node-b", "b", &box), *a = node("node-a", "a", NULL);
    const uint16_t port = cox_direct_port(b);
    sends(a, "node-b", port, "first");
    sends(a, "node-b", port, "second");
    box_await(&box, 1);
    struct cox_direct *again = node("node-a", "a", NULL);
    /* The first one's messages are not yet delivered. */
    struct cox_error err = {0};
    assert_int_equal(send_bytes(again, "node-b", port, 9, "third", 5, 200, &err), COX_TIMEOUT);
    assert_int_equal(box_message_count(&box), 1);
    box_hold(&box, false);
    sends(again, "node-b", port, "fourth");
    box_await(&box, 3);
    assert_memory_equal(box.bytes, "fourth", 6);
    box_await_end(&box, "was replaced by a later one");
    cox_direct_close(again);
    cox_direct_close(a);
    cox_direct_close(b);
    box_deinit(&box);
}

/* ---- ends ---- */

static void await_send(struct cox_direct *direct)
{
    for (bool found = false; !found; moment()) {
        pthread_mutex_lock(&direct->lock);
        found = direct->send_count > 0;
        pthread_mutex_unlock(&direct->lock);
    }
}

static void blocked_send_ends(bool by_close, const char *file_a, const char *file_b)
{
    struct box box;
    box_init(&box);
    box_hold(&box, true);
    struct cox_direct *b = node("node-b", file_b, &box), *a = node("node-a", file_a, NULL);
    const uint16_t port = cox_direct_port(b);
    sends(a, "node-b", port, "x");
    box_await(&box, 1);
    /* The first fills the socket, the second waits for the first. */
    struct sender senders[2];
    memset(senders, 0, sizeof senders);
    for (int i = 0; i < 2; i++) {
        senders[i].direct = a;
        senders[i].port = port;
        senders[i].kind = 50;
        senders[i].size = 64 * MIB;
        senders[i].timeout_ms = 10 * PATIENCE_MS;
        senders[i].count = 1;
        assert_int_equal(pthread_create(&senders[i].thread, NULL, sender_main, &senders[i]), 0);
    }
    await_send(a);
    const uint64_t begin = cox_now_ns();
    if (by_close)
        for (bool both = false; !both; moment()) {
            pthread_mutex_lock(&a->lock);
            both = a->send_count == 2;
            pthread_mutex_unlock(&a->lock);
        }
    if (by_close)
        cox_direct_close(a);
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
    box_hold(&box, false);
    if (!by_close) {
        sends(a, "node-b", port, "after");
        cox_direct_close(a);
    }
    cox_direct_close(b);
    box_deinit(&box);
}

static void drop_ends_sends_at_once(void **state)
{
    (void)state;
    blocked_send_ends(false, "a", "b");
    blocked_send_ends(false, NULL, NULL);
}

static void close_ends_sends_at_once(void **state)
{
    (void)state;
    blocked_send_ends(true, "a", "b");
    blocked_send_ends(true, NULL, NULL);
}

static void close_ends_a_connect_that_is_not_answered(void **state)
{
    (void)state;
    /* Accepted by the kernel, and no more. */
    uint16_t port;
    int listening = raw_listen(&port);
    struct cox_direct *a = node("node-a", "a", NULL);
    struct sender sender = {
        .direct = a, .port = port, .size = 100, .timeout_ms = 10 * PATIENCE_MS, .count = 1};
    assert_int_equal(pthread_create(&sender.thread, NULL, sender_main, &sender), 0);
    await_send(a);
    cox_direct_close(a);
    pthread_join(sender.thread, NULL);
    assert_int_equal(sender.r, COX_CLOSED);
    close(listening);
}

static void drop_ends_what_comes_from_a_process(void **state)
{
    (void)state;
    struct box box;
    box_init(&box);
    struct cox_direct *b = node("node-b", "b", &box), *a = node("node-a", "a", NULL);
    sends(a, "node-b", cox_direct_port(b), "x");
    box_await(&box, 1);
    cox_direct_drop(b, "node-c");
    cox_direct_drop(b, "node-a");
    box_await_end(&box, "was ended here");
    /* not a ban */
    sends(a, "node-b", cox_direct_port(b), "y");
    box_await(&box, 2);
    cox_direct_drop(a, "node-b");
    box_await_end(&box, "the peer has closed");
    sends(a, "node-b", cox_direct_port(b), "z");
    box_await(&box, 3);
    cox_direct_close(a);
    cox_direct_close(b);
    box_deinit(&box);
}

/* ---- groups ---- */

/* Machines a and b with a process of each of two groups, all of which listen. */
struct groups {
    struct cox_direct *a[2], *b[2];
    struct box box_a[2], box_b[2];
};

static void groups_open(struct groups *groups, bool tls)
{
    static const char *const names[2] = {"first", "second"};
    for (int i = 0; i < 2; i++) {
        box_init(&groups->box_a[i]);
        box_init(&groups->box_b[i]);
        groups->a[i] = node_of(names[i], "node-a", tls ? "a" : NULL, &groups->box_a[i]);
        groups->b[i] = node_of(names[i], "node-b", tls ? "b" : NULL, &groups->box_b[i]);
    }
}

static void groups_close(struct groups *groups)
{
    for (int i = 0; i < 2; i++) {
        cox_direct_close(groups->a[i]);
        cox_direct_close(groups->b[i]);
    }
    for (int i = 0; i < 2; i++) {
        box_deinit(&groups->box_a[i]);
        box_deinit(&groups->box_b[i]);
    }
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
                struct box *box = &groups->box_a[to];
                const uint32_t came = box_message_count(box);
                sends(groups->b[from], "node-a", cox_direct_port(groups->a[to]), "x");
                box_await(box, came + 1);
                assert_string_equal(box->peer, "node-b");
                assert_string_equal(box->group, from ? "second" : "first");
            }
}

static void groups_of_one_machine_have_connections_of_their_own(void **state)
{
    (void)state;
    for (int tls = 0; tls < 2; tls++) {
        struct groups groups;
        groups_open(&groups, tls);
        groups_send(&groups, 10);
        for (int i = 0; i < 2; i++) {
            assert_int_equal(accept_count(groups.a[i]), 2);
            assert_int_equal(box_end_count(&groups.box_a[i]), 0);
        }
        groups_close(&groups);
    }
}

static void drop_leaves_other_groups_alone(void **state)
{
    (void)state;
    struct groups groups;
    groups_open(&groups, true);
    groups_send(&groups, 1);
    /* what comes from a process */
    cox_direct_drop(groups.a[0], "node-b");
    box_await_end(&groups.box_a[0], "was ended here");
    groups_send(&groups, 1);
    assert_int_equal(accept_count(groups.a[0]), 3);
    assert_int_equal(box_end_count(&groups.box_a[0]), 1);
    /* what goes to it */
    cox_direct_drop(groups.b[1], "node-a");
    box_await_end(&groups.box_a[1], "the peer has closed");
    groups_send(&groups, 1);
    assert_int_equal(accept_count(groups.a[0]), 3);
    assert_int_equal(accept_count(groups.a[1]), 3);
    assert_int_equal(box_end_count(&groups.box_a[1]), 1);
    groups_close(&groups);
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

static void addresses_of_the_past_are_forgotten(void **state)
{
    (void)state;
    struct groups groups;
    groups_open(&groups, true);
    struct cox_direct *sender = groups.b[0];
    const uint16_t stays = cox_direct_port(groups.a[1]);
    sends(sender, "node-a", stays, "x");
    for (int i = 0; i < 20; i++) {
        cox_direct_close(groups.a[0]);
        groups.a[0] = node_of("first", "node-a", "a", &groups.box_a[0]);
        sends(sender, "node-a", cox_direct_port(groups.a[0]), "x");
        refuses(sender, "node-a", 1, -ECONNREFUSED, "Connection refused");
    }
    /* the two that are there, and the last one that refused */
    assert_true(peer_count(sender) <= 3);
    assert_int_equal(accept_count(groups.a[1]), 1);
    groups_close(&groups);
}

static void a_process_at_another_address_is_the_same_one_again(void **state)
{
    (void)state;
    struct groups groups;
    groups_open(&groups, true);
    groups_send(&groups, 1);
    /* The earlier one is not seen to end: its machine is dead. */
    struct box box;
    box_init(&box);
    struct cox_direct *again = node_of("first", "node-a", "a", &box);
    sends(groups.b[0], "node-a", cox_direct_port(again), "x");
    box_await(&box, 1);
    box_await_end(&groups.box_a[0], "the peer has closed");
    assert_int_equal(box_end_count(&groups.box_a[0]), 1);
    assert_int_equal(box_end_count(&groups.box_a[1]), 0);
    cox_direct_close(again);
    box_deinit(&box);
    groups_close(&groups);
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

static void child_stop(const struct child *child)
{
    siginfo_t info;
    kill(child->pid, SIGSTOP);
    assert_int_equal(waitid(P_PID, (id_t)child->pid, &info, WSTOPPED), 0);
}

static void child_kill(const struct child *child)
{
    kill(child->pid, SIGKILL);
    assert_int_equal(waitpid(child->pid, NULL, 0), child->pid);
}

static void deadlines_are_kept_when_a_peer_stops(void **state)
{
    (void)state;
    static const char *const files[][2] = {{"a", "b"}, {NULL, NULL}};
    uint8_t *bytes = calloc(1, 64 * MIB);
    for (int i = 0; i < 2; i++) {
        struct child child = child_start(files[i][1], 0);
        struct cox_direct *a = node("node-a", files[i][0], NULL);
        sends(a, "node-b", child.port, "x");
        child_stop(&child);
        struct cox_error err = {0};
        uint64_t begin = cox_now_ns();
        assert_int_equal(send_bytes(a, "node-b", child.port, 0, bytes, 64 * MIB, 300, &err),
                         COX_TIMEOUT);
        uint64_t took = cox_now_ns() - begin;
        assert_true(took >= 300 * COX_NSEC_PER_MSEC && took < 5 * COX_NSEC_PER_SEC);
        /* the connection is ended: a new one, which the kernel accepts and nobody serves */
        begin = cox_now_ns();
        assert_int_equal(send_bytes(a, "node-b", child.port, 0, bytes, 1, 300, NULL), COX_TIMEOUT);
        took = cox_now_ns() - begin;
        assert_true(took >= 300 * COX_NSEC_PER_MSEC && took < 5 * COX_NSEC_PER_SEC);
        kill(child.pid, SIGCONT);
        sends(a, "node-b", child.port, "y");
        cox_direct_close(a);
        child_kill(&child);
    }
    free(bytes);
}

static void a_peer_that_died_is_opened_again(void **state)
{
    (void)state;
    static const char *const files[][2] = {{"a", "b"}, {NULL, NULL}};
    for (int i = 0; i < 2; i++) {
        struct child first = child_start(files[i][1], 0);
        /* Listens at once, for the next: fork cannot be while there are threads. */
        struct child other = child_start(files[i][1], 0);
        struct cox_direct *a = node("node-a", files[i][0], NULL);
        sends(a, "node-b", first.port, "x");
        child_kill(&first);
        refuses(a, "node-b", first.port, -ECONNREFUSED, "Connection refused");
        sends(a, "node-b", other.port, "at another address");
        cox_direct_close(a);
        child_kill(&other);
    }
    struct box box;
    box_init(&box);
    struct cox_direct *b = node("node-b", "b", &box), *a = node("node-a", "a", NULL);
    const uint16_t port = cox_direct_port(b);
    sends(a, "node-b", port, "x");
    box_await(&box, 1);
    cox_direct_close(b);
    struct cox_direct_options options = options_of("node-b", "b", &box);
    options.listen = address_of(port);
    b = opened(&options);
    sends(a, "node-b", port, "y");
    box_await(&box, 2);
    cox_direct_close(b);
    cox_direct_close(a);
    box_deinit(&box);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(deadlines_are_kept_when_a_peer_stops),
        TEST(a_peer_that_died_is_opened_again),
        TEST(messages_of_several_threads_arrive_in_order),
        TEST(messages_of_all_sizes_arrive_whole),
        TEST(what_is_too_large_is_not_sent_and_not_accepted),
        TEST(ipv6_addresses_are_in_brackets),
        TEST(keys_are_changed_in_time),
        TEST(open_says_what_is_wrong_with_the_files),
        TEST(open_says_what_is_wrong_with_the_options),
        TEST(a_process_of_another_name_is_refused),
        TEST(a_process_of_another_ca_is_refused_by_both_sides),
        TEST(certificates_that_are_not_valid_are_refused),
        TEST(servers_that_are_not_valid_are_refused),
        TEST(heads_that_are_none_end_the_connection),
        TEST(a_large_size_allocates_nothing_before_bytes_arrive),
        TEST(silence_holds_nobody_up),
        TEST(connections_are_limited),
        TEST(a_later_connection_replaces_the_earlier_one_in_order),
        TEST(drop_ends_sends_at_once),
        TEST(close_ends_sends_at_once),
        TEST(close_ends_a_connect_that_is_not_answered),
        TEST(drop_ends_what_comes_from_a_process),
        TEST(groups_of_one_machine_have_connections_of_their_own),
        TEST(drop_leaves_other_groups_alone),
        TEST(addresses_of_the_past_are_forgotten),
        TEST(a_process_at_another_address_is_the_same_one_again),
    };
    return cmocka_run_group_tests(tests, certificates_make, certificates_remove);
}
