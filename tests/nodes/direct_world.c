#include "direct_world.h"

#include <arpa/inet.h>

#include <openssl/pem.h>
#include <openssl/x509v3.h>

#define DAY 86400L

/* ---- certificates, in a folder of this program ---- */

static char folder[64];

struct authority {
    EVP_PKEY *key;
    X509 *certificate;
};

const char *path(const char *file)
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

int certificates_make(void **state)
{
    (void)state;
    /* ThreadSanitizer has a thread of its own, from the first on. */
    pthread_t thread = test_thread(nothing, NULL);
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

int certificates_remove(void **state)
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

int setup(void **state)
{
    (void)state;
    fds_before = entries("/proc/self/fd");
    threads_before = entries("/proc/self/task");
    return 0;
}

void moment(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

int teardown(void **state)
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

/* ---- a receiver that remembers ---- */

static void box_free(void *object)
{
    struct box *box = object;
    free(box->bytes);
    pthread_mutex_destroy(&box->lock);
    pthread_cond_destroy(&box->changed);
    free(box);
}

struct box *box_new(void)
{
    struct box *box = calloc(1, sizeof *box);
    assert_non_null(box);
    pthread_mutex_init(&box->lock, NULL);
    pthread_cond_init(&box->changed, NULL);
    return test_own(box, box_free);
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

static void box_end(void *context, const char *peer, int code, const char *text)
{
    struct box *box = context;
    pthread_mutex_lock(&box->lock);
    box->end_count++;
    box->end_has_peer = peer != NULL;
    box->end_code = code;
    const size_t at = strlen(box->ends);
    snprintf(box->ends + at, sizeof box->ends - at, "%s\n", text);
    pthread_cond_broadcast(&box->changed);
    pthread_mutex_unlock(&box->lock);
}

void box_hold(struct box *box, bool held)
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

void box_await(struct box *box, uint32_t message_count)
{
    pthread_mutex_lock(&box->lock);
    bool came = true;
    while (came && box->message_count < message_count)
        came = box_wait(box);
    pthread_mutex_unlock(&box->lock);
    assert_true(came);
}

void box_await_end(struct box *box, const char *text)
{
    pthread_mutex_lock(&box->lock);
    bool came = true;
    while (came && !strstr(box->ends, text))
        came = box_wait(box);
    pthread_mutex_unlock(&box->lock);
    if (!came)
        fail_msg("'%s' is not in: %s", text, box->ends);
}

/* The texts of ends so far. */
void box_forget(struct box *box)
{
    pthread_mutex_lock(&box->lock);
    box->ends[0] = '\0';
    pthread_mutex_unlock(&box->lock);
}

struct cox_direct_options options_of(const char *name, const char *file, struct box *box)
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

TEST_OWNED(cox_direct_close)

struct cox_direct *opened(const struct cox_direct_options *options)
{
    struct cox_direct *direct = NULL;
    assert_ok(cox_direct_open(options, &direct, test_err()));
    return test_own(direct, cox_direct_close_owned);
}

struct cox_direct *node_of(const char *group, const char *name, const char *file, struct box *box)
{
    struct cox_direct_options options = options_of(name, file, box);
    options.group = group;
    return opened(&options);
}

struct cox_direct *node(const char *name, const char *file, struct box *box)
{
    return node_of(NULL, name, file, box);
}

const char *address_of(uint16_t port)
{
    static char text[32];
    snprintf(text, sizeof text, "127.0.0.1:%u", port);
    return text;
}

int send_bytes(struct cox_direct *from, const char *peer, uint16_t port, uint32_t kind,
               const void *bytes, size_t size, uint64_t timeout_ms, struct cox_error *err)
{
    char address[32];
    snprintf(address, sizeof address, "127.0.0.1:%u", port);
    const struct iovec part = {.iov_base = (void *)bytes, .iov_len = size};
    return cox_direct_send(from, peer, address, kind, &part, 1, cox_deadline_after_ms(timeout_ms),
                           err);
}

void sends(struct cox_direct *from, const char *peer, uint16_t port, const char *text)
{
    assert_ok(send_bytes(from, peer, port, 99, text, strlen(text), PATIENCE_MS, test_err()));
}

void refuses(struct cox_direct *from, const char *peer, uint16_t port, int code, const char *text)
{
    struct cox_error err = {0};
    assert_int_equal(send_bytes(from, peer, port, 99, "x", 1, PATIENCE_MS, &err), code);
    assert_int_equal(err.code, code);
    assert_contains(err.text, text);
}

int raw_listen(uint16_t *ret_port)
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
