#include "direct_tls.h"

#include "channel/base/idioms.h"

#include <string.h>
#include <sys/socket.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

/* AES-128 first: about a tenth faster than AES-256, which is OpenSSL's first. */
#define CIPHER_SUITES "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256"

/* What a server asks the kernel for at once. */
#define READ_AHEAD_SIZE ((size_t)256 << 10)

static void key_free(EVP_PKEY **key)
{
    EVP_PKEY_free(*key);
}

static void file_close(FILE **file)
{
    if (*file)
        fclose(*file);
}

static void check_free(X509_STORE_CTX **check)
{
    X509_STORE_CTX_free(*check);
}

/* ---- sockets ---- */

static void socket_failed(struct cox_direct_socket *socket, int e)
{
    if (e == EPIPE)
        socket->ended = true;
    else if (e != EAGAIN && e != EWOULDBLOCK)
        socket->error = e;
}

size_t cox_direct_socket_send(struct cox_direct_socket *socket, const void *bytes, size_t size)
{
    ssize_t count;
    do
        count = send(socket->fd, bytes, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (count < 0 && errno == EINTR);
    if (count < 0)
        socket_failed(socket, errno);
    return count < 0 ? 0 : (size_t)count;
}

size_t cox_direct_socket_receive(struct cox_direct_socket *socket, void *bytes, size_t size)
{
    ssize_t count;
    do
        count = recv(socket->fd, bytes, size, MSG_DONTWAIT);
    while (count < 0 && errno == EINTR);
    if (count < 0)
        socket_failed(socket, errno);
    else if (count == 0 && size > 0)
        socket->ended = true;
    return count < 0 ? 0 : (size_t)count;
}

bool cox_direct_socket_flush(struct cox_direct_socket *socket)
{
    while (socket->waiting_first < socket->waiting_end) {
        const size_t count = cox_direct_socket_send(socket, socket->waiting + socket->waiting_first,
                                                    socket->waiting_end - socket->waiting_first);
        if (count == 0)
            return false;
        socket->waiting_first += count;
    }
    socket->waiting_first = socket->waiting_end = 0;
    return true;
}

/* A record waits, once there is room for it. */
static size_t socket_gather(struct cox_direct_socket *socket, const void *bytes, size_t size)
{
    if (size > COX_DIRECT_WAITING_SIZE - socket->waiting_end && !cox_direct_socket_flush(socket))
        return 0;
    const size_t room = COX_DIRECT_WAITING_SIZE - socket->waiting_end;
    const size_t count = size < room ? size : room;
    memcpy(socket->waiting + socket->waiting_end, bytes, count);
    socket->waiting_end += count;
    return count;
}

static bool socket_would_block(const struct cox_direct_socket *socket)
{
    return !socket->ended && socket->error == 0;
}

static int bio_write(BIO *bio, const char *bytes, size_t size, size_t *ret_size)
{
    struct cox_direct_socket *socket = BIO_get_data(bio);
    BIO_clear_retry_flags(bio);
    *ret_size = socket->gathers ? socket_gather(socket, bytes, size)
                                : cox_direct_socket_send(socket, bytes, size);
    if (*ret_size == 0 && socket_would_block(socket))
        BIO_set_retry_write(bio);
    return *ret_size > 0;
}

static int bio_read(BIO *bio, char *bytes, size_t size, size_t *ret_size)
{
    struct cox_direct_socket *socket = BIO_get_data(bio);
    BIO_clear_retry_flags(bio);
    *ret_size = cox_direct_socket_receive(socket, bytes, size);
    if (*ret_size == 0 && socket_would_block(socket))
        BIO_set_retry_read(bio);
    return *ret_size > 0;
}

static long bio_control(BIO *bio, int command, long number, void *pointer)
{
    (void)bio, (void)number, (void)pointer;
    return command == BIO_CTRL_FLUSH; /* what waits is flushed by the stream */
}

static BIO_METHOD *bio_method_new(void)
{
    BIO_METHOD *method = BIO_meth_new(BIO_TYPE_SOURCE_SINK, "coxswain");
    if (!method)
        return NULL;
    BIO_meth_set_write_ex(method, bio_write);
    BIO_meth_set_read_ex(method, bio_read);
    BIO_meth_set_ctrl(method, bio_control);
    return method;
}

/* ---- names and reasons ---- */

const char *cox_direct_tls_reason(void)
{
    const unsigned long code = ERR_get_error();
    ERR_clear_error();
    const char *text = NULL;
    if (ERR_SYSTEM_ERROR(code))
        text = strerror(ERR_GET_REASON(code));
    else if (code)
        text = ERR_reason_error_string(code);
    return text ? text : "unknown error";
}

bool cox_direct_name_is_valid(const char *name)
{
    const size_t size = strnlen(name, COX_DIRECT_NAME_MAX + 1);
    return size >= 1 && size <= COX_DIRECT_NAME_MAX &&
           strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789.-_") ==
               size;
}

bool cox_direct_tls_name(const X509 *certificate, char ret_name[COX_DIRECT_NAME_MAX + 1])
{
    X509_NAME *subject = X509_get_subject_name(certificate);
    const int at = X509_NAME_get_index_by_NID(subject, NID_commonName, -1);
    if (at < 0 || X509_NAME_get_index_by_NID(subject, NID_commonName, at) >= 0)
        return false;
    unsigned char *text = NULL;
    const int size =
        ASN1_STRING_to_UTF8(&text, X509_NAME_ENTRY_get_data(X509_NAME_get_entry(subject, at)));
    char name[COX_DIRECT_NAME_MAX + 1] = {0};
    if (size > 0 && size <= COX_DIRECT_NAME_MAX)
        memcpy(name, text, (size_t)size);
    OPENSSL_free(text);
    /* A NUL within the name makes it shorter than its size. */
    if (!cox_direct_name_is_valid(name) || strlen(name) != (size_t)size)
        return false;
    memcpy(ret_name, name, sizeof name);
    return true;
}

/* ---- files ---- */

/* An encrypted key must not make OpenSSL ask at the terminal. */
static int no_passphrase(char *buffer, int size, int writes, void *context)
{
    (void)buffer, (void)size, (void)writes, (void)context;
    return -1;
}

/* OpenSSL's own texts for a file that cannot be opened do not say which. */
static int file_open(const char *path, FILE **ret_file, struct cox_error *err)
{
    FILE *file = fopen(path, "re");
    if (!file)
        return cox_fail(err, COX_INVALID, "cannot read %s: %s", path, strerror(errno));
    *ret_file = file;
    return 0;
}

static int ca_load(SSL_CTX *context, const char *path, struct cox_error *err)
{
    _cox_cleanup_(file_close) FILE *file = NULL;
    int r = file_open(path, &file, err);
    if (r)
        return r;
    if (SSL_CTX_load_verify_locations(context, path, NULL) != 1)
        return cox_fail(err, COX_INVALID, "%s has no CA certificate in PEM: %s", path,
                        cox_direct_tls_reason());
    return 0;
}

static int certificate_load(SSL_CTX *context, const char *path, struct cox_error *err)
{
    _cox_cleanup_(file_close) FILE *file = NULL;
    int r = file_open(path, &file, err);
    if (r)
        return r;
    if (SSL_CTX_use_certificate_chain_file(context, path) != 1)
        return cox_fail(err, COX_INVALID, "%s has no usable certificate in PEM: %s", path,
                        cox_direct_tls_reason());
    return 0;
}

static int key_load(SSL_CTX *context, const char *path, const char *certificate,
                    struct cox_error *err)
{
    _cox_cleanup_(file_close) FILE *file = NULL;
    int r = file_open(path, &file, err);
    if (r)
        return r;
    _cox_cleanup_(key_free) EVP_PKEY *key = PEM_read_PrivateKey(file, NULL, no_passphrase, NULL);
    if (!key)
        return cox_fail(err, COX_INVALID,
                        "%s has no private key in PEM that is readable without a passphrase: %s",
                        path, cox_direct_tls_reason());
    if (X509_check_private_key(SSL_CTX_get0_certificate(context), key) != 1) {
        ERR_clear_error();
        return cox_fail(err, COX_INVALID, "the key %s does not belong to the certificate %s", path,
                        certificate);
    }
    if (SSL_CTX_use_PrivateKey(context, key) != 1)
        return cox_fail(err, COX_INVALID, "the key %s cannot be used: %s", path,
                        cox_direct_tls_reason());
    return 0;
}

static void time_format(const ASN1_TIME *time, char text[32])
{
    struct tm parts;
    if (ASN1_TIME_to_tm(time, &parts) != 1 ||
        strftime(text, 32, "%Y-%m-%d %H:%M:%S UTC", &parts) == 0)
        strcpy(text, "an invalid time");
}

static int time_check(const X509 *certificate, const char *path, struct cox_error *err)
{
    char text[32];
    /* 0: a time that is none */
    if (X509_cmp_current_time(X509_get0_notAfter(certificate)) <= 0) {
        time_format(X509_get0_notAfter(certificate), text);
        return cox_fail(err, COX_INVALID, "the certificate %s has expired: it ended at %s", path,
                        text);
    }
    if (X509_cmp_current_time(X509_get0_notBefore(certificate)) >= 0) {
        time_format(X509_get0_notBefore(certificate), text);
        return cox_fail(err, COX_INVALID, "the certificate %s is not valid yet: it begins at %s",
                        path, text);
    }
    return 0;
}

/* What the peers will check, so that it fails here and with the path. A process is the client of
 * some connections and the server of others: an extended key usage needs both. */
static int chain_check(SSL_CTX *context, const char *ca, const char *path, struct cox_error *err)
{
    static const int purposes[] = {X509_PURPOSE_SSL_CLIENT, X509_PURPOSE_SSL_SERVER};
    static const char *const words[] = {"client", "server"};
    STACK_OF(X509) *chain = NULL;
    SSL_CTX_get0_chain_certs(context, &chain);
    for (int i = 0; i < 2; i++) {
        _cox_cleanup_(check_free) X509_STORE_CTX *check = X509_STORE_CTX_new();
        if (!check ||
            X509_STORE_CTX_init(check, SSL_CTX_get_cert_store(context),
                                SSL_CTX_get0_certificate(context), chain) != 1 ||
            X509_STORE_CTX_set_purpose(check, purposes[i]) != 1)
            return cox_fail(err, -ENOMEM, "cannot check %s: %s", path, cox_direct_tls_reason());
        if (X509_verify_cert(check) == 1)
            continue;
        const int error = X509_STORE_CTX_get_error(check);
        ERR_clear_error();
        return cox_fail(err, COX_INVALID,
                        "the certificate %s is not valid as a TLS %s's, by the CA %s: %s", path,
                        words[i], ca, X509_verify_cert_error_string(error));
    }
    return 0;
}

static int name_check(const X509 *certificate, const char *path, const char *own_name,
                      struct cox_error *err)
{
    char name[COX_DIRECT_NAME_MAX + 1];
    if (!cox_direct_tls_name(certificate, name))
        return cox_fail(err, COX_INVALID,
                        "the certificate %s has no common name (CN) of 1 to %d letters, digits "
                        "and \".-_\", or more than one; it must be %s",
                        path, COX_DIRECT_NAME_MAX, own_name);
    if (strcmp(name, own_name))
        return cox_fail(err, COX_INVALID, "the certificate %s is that of %s, not of %s", path, name,
                        own_name);
    return 0;
}

static int context_configure(SSL_CTX *context)
{
    SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, NULL);
    /* No tickets: they would wait, unread, in the connection of a sender, which only sends. */
    SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_options(context, SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION);
    /* A retried write passes the same bytes, but after a poll. */
    SSL_CTX_set_mode(context, SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    return SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION) == 1 &&
                   SSL_CTX_set_num_tickets(context, 0) == 1 &&
                   SSL_CTX_set_ciphersuites(context, CIPHER_SUITES) == 1
               ? 0
               : -ENOMEM;
}

static int files_load(SSL_CTX *context, const char *ca, const char *certificate, const char *key,
                      const char *own_name, struct cox_error *err)
{
    int r = ca_load(context, ca, err);
    if (r == 0)
        r = certificate_load(context, certificate, err);
    if (r == 0)
        r = key_load(context, key, certificate, err);
    const X509 *own = SSL_CTX_get0_certificate(context);
    if (r == 0)
        r = name_check(own, certificate, own_name, err);
    if (r == 0)
        r = time_check(own, certificate, err);
    return r ? r : chain_check(context, ca, certificate, err);
}

int cox_direct_tls_open(const char *ca, const char *certificate, const char *key,
                        const char *own_name, struct cox_direct_tls *ret_tls, struct cox_error *err)
{
    ERR_clear_error();
    _cox_cleanup_(cox_direct_tls_close) struct cox_direct_tls tls = {
        .context = SSL_CTX_new(TLS_method()), .method = bio_method_new()};
    int r = tls.context && tls.method ? context_configure(tls.context) : -ENOMEM;
    if (r)
        return cox_fail(err, r, "cannot set up TLS: %s", cox_direct_tls_reason());
    r = files_load(tls.context, ca, certificate, key, own_name, err);
    if (r)
        return r;
    *ret_tls = tls;
    tls = (struct cox_direct_tls){NULL, NULL};
    return 0;
}

void cox_direct_tls_close(struct cox_direct_tls *tls)
{
    SSL_CTX_free(tls->context);
    BIO_meth_free(tls->method);
    *tls = (struct cox_direct_tls){NULL, NULL};
}

SSL *cox_direct_tls_start(const struct cox_direct_tls *tls, struct cox_direct_socket *socket,
                          bool serves)
{
    SSL *ssl = SSL_new(tls->context);
    BIO *bio = BIO_new(tls->method);
    if (!ssl || !bio) {
        SSL_free(ssl);
        BIO_free(bio);
        return NULL;
    }
    BIO_set_data(bio, socket);
    BIO_set_init(bio, 1);
    SSL_set_bio(ssl, bio, bio);
    if (serves) {
        SSL_set_accept_state(ssl);
        /* A server receives the messages: several records with one call. */
        SSL_set_read_ahead(ssl, 1);
        SSL_set_default_read_buffer_len(ssl, READ_AHEAD_SIZE);
    } else {
        SSL_set_connect_state(ssl);
    }
    return ssl;
}
