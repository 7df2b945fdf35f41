#include "direct.h"

#include "channel/base/idioms.h"
#include "channel/base/thread.h"
#include "channel/socket/socket.h"
#include "direct_object.h"

#include <poll.h>
#include <string.h>
#include <sys/socket.h>

#define PART_COUNT_MAX 8

/* One call of send. */
struct sending {
    struct cox_direct *direct;
    struct cox_direct_peer *peer;
    const struct cox_direct_message *message;
    uint64_t size;
    uint64_t deadline_ns;
    /* of the peer, when it began */
    uint64_t drop_count;
};

static void list_free(struct addrinfo **list)
{
    if (*list)
        freeaddrinfo(*list);
}

/* ---- peers ---- */

static void peer_free(struct cox_direct_peer *peer)
{
    cox_direct_stream_end(&peer->stream);
    pthread_cond_destroy(&peer->idle);
    free(peer);
}

/* The lock is held. Without a send, and without a connection that the peer has not ended. */
static bool peer_is_unused(const struct cox_direct_peer *peer)
{
    return peer->send_count == 0 && (peer->fd < 0 || !cox_direct_stream_is_quiet(&peer->stream));
}

/* The lock is held. A process that is started again has another address: the old ones go. */
static void peers_prune(struct cox_direct *direct)
{
    struct cox_direct_peer **at = &direct->peers;
    while (*at) {
        struct cox_direct_peer *peer = *at;
        if (!peer_is_unused(peer)) {
            at = &peer->next;
            continue;
        }
        *at = peer->next;
        peer_free(peer);
    }
}

/* The lock is held. address is not too long. NULL: no memory. */
static struct cox_direct_peer *peer_find(struct cox_direct *direct, const char *name,
                                         const char *address)
{
    for (struct cox_direct_peer *p = direct->peers; p; p = p->next)
        if (!strcmp(p->name, name) && !strcmp(p->address, address))
            return p;
    peers_prune(direct);
    struct cox_direct_peer *peer = calloc(1, sizeof *peer);
    if (!peer)
        return NULL;
    strcpy(peer->name, name);
    strcpy(peer->address, address);
    cox_direct_stream_init(&peer->stream);
    cox_condition_init(&peer->idle);
    peer->fd = -1;
    peer->next = direct->peers;
    direct->peers = peer;
    return peer;
}

/* The lock is held. Whoever uses or waits for the stream wakes up; unused, it ends here. */
static void peer_shut_down(struct cox_direct_peer *peer)
{
    if (peer->fd >= 0)
        shutdown(peer->fd, SHUT_RDWR);
    pthread_cond_broadcast(&peer->idle);
    if (!peer->busy) {
        peer->fd = -1;
        cox_direct_stream_end(&peer->stream);
    }
}

/* Has busy. Others must not find the number of an fd that is closed. */
static void peer_end(struct cox_direct *direct, struct cox_direct_peer *peer)
{
    pthread_mutex_lock(&direct->lock);
    peer->fd = -1;
    pthread_mutex_unlock(&direct->lock);
    cox_direct_stream_end(&peer->stream);
}

/* The lock is held. */
static void peer_release(struct cox_direct_peer *peer)
{
    peer->busy = false;
    pthread_cond_broadcast(&peer->idle);
}

/* ---- connecting ---- */

/* The lock is held. */
static int sending_state(const struct sending *sending, struct cox_error *err)
{
    if (sending->direct->closing)
        return cox_fail(err, COX_CLOSED, "the connections of this process are being closed");
    if (sending->drop_count != sending->peer->drop_count)
        return cox_fail(err, COX_CLOSED, "%s was dropped", sending->peer->name);
    return 0;
}

/* What has shut the fd down is the cause of every failure after it. */
static int sending_check(const struct sending *sending, struct cox_error *err)
{
    pthread_mutex_lock(&sending->direct->lock);
    int r = sending_state(sending, err);
    pthread_mutex_unlock(&sending->direct->lock);
    return r;
}

static int connect_to(struct sending *sending, const struct addrinfo *address, uint64_t deadline_ns,
                      struct cox_error *err)
{
    struct cox_direct_peer *peer = sending->peer;
    int r = cox_direct_address_socket(address, &peer->stream.socket.fd);
    if (r)
        return cox_fail(err, r, "no socket: %s", cox_status_text(r));
    const int fd = peer->stream.socket.fd;
    pthread_mutex_lock(&sending->direct->lock);
    peer->fd = fd;
    pthread_mutex_unlock(&sending->direct->lock);
    int e = connect(fd, address->ai_addr, address->ai_addrlen) ? errno : 0;
    /* Who shuts down before connect has not ended it: but has then been counted before this. */
    r = sending_check(sending, err);
    if (r == 0 && (e == EINPROGRESS || e == EINTR)) {
        socklen_t size = sizeof e;
        r = cox_socket_wait(fd, POLLOUT, deadline_ns);
        if (r == 0 && getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &size))
            e = errno;
    }
    if (r == 0)
        r = -e;
    if (r == 0)
        return 0;
    cox_fail(err, r, "%s", r == COX_TIMEOUT ? "no answer until the deadline" : cox_status_text(r));
    peer_end(sending->direct, peer);
    return r;
}

/* The addresses of a host in turn. Each but the last gets half of the time that is left. */
static int connect_to_any(struct sending *sending, const struct addrinfo *list,
                          struct cox_error *err)
{
    int r = 0;
    for (const struct addrinfo *a = list; a; a = a->ai_next) {
        const uint64_t now = cox_now_ns(), end = sending->deadline_ns;
        cox_error_clear(err);
        r = connect_to(sending, a, a->ai_next && end > now ? now + (end - now) / 2 : end, err);
        if (r == 0 || r == COX_CLOSED)
            return r;
    }
    return r;
}

/* A process has one address: a connection to it at another is to one that is dead, even if nothing
 * else says so. */
static void peer_reached(struct cox_direct *direct, struct cox_direct_peer *peer, const char *group)
{
    pthread_mutex_lock(&direct->lock);
    peer->greeted = true;
    strcpy(peer->group, group);
    for (struct cox_direct_peer *p = direct->peers; p; p = p->next)
        if (p != peer && p->greeted && !strcmp(p->name, peer->name) && !strcmp(p->group, group))
            peer_shut_down(p);
    pthread_mutex_unlock(&direct->lock);
}

static int peer_greet(struct sending *sending, struct cox_error *err)
{
    struct cox_direct *direct = sending->direct;
    struct cox_direct_peer *peer = sending->peer;
    char name[COX_DIRECT_NAME_SIZE], group[COX_DIRECT_NAME_SIZE];
    int r = 0;
    if (!direct->insecure)
        r = cox_direct_stream_secure(&peer->stream, &direct->tls, false, sending->deadline_ns, name,
                                     err);
    if (r == 0 && !direct->insecure && strcmp(name, peer->name))
        return cox_fail(err, COX_DENIED, "the process there is %s, by its certificate", name);
    if (r == 0)
        r = cox_direct_stream_write_greeting(&peer->stream, direct->name, direct->group,
                                             sending->deadline_ns, err);
    if (r == 0)
        r = cox_direct_stream_read_greeting(&peer->stream, sending->deadline_ns, name, group, err);
    if (r == 0 && strcmp(name, peer->name))
        return cox_fail(err, COX_DENIED, "the process there says that it is %s", name);
    if (r == 0)
        peer_reached(direct, peer, group);
    /* It does not speak as this process does: whatever it is, it is not the peer. */
    if (r == COX_CORRUPT)
        return COX_DENIED;
    return r == COX_CLOSED ? -ECONNRESET : r;
}

static int peer_connect(struct sending *sending, struct cox_error *err)
{
    _cox_cleanup_(list_free) struct addrinfo *list = NULL;
    int r =
        cox_direct_address_resolve(sending->peer->address, sending->direct->insecure, &list, err);
    if (r)
        return r;
    r = connect_to_any(sending, list, err);
    if (r == 0)
        r = peer_greet(sending, err);
    return r;
}

/* ---- sending ---- */

static bool is_connected(const struct sending *sending)
{
    const struct cox_direct_peer *peer = sending->peer;
    return peer->stream.socket.fd >= 0 && cox_direct_stream_is_quiet(&peer->stream);
}

/* Has busy. An old connection may end at any time, and then takes no whole message: this message is
 * sent once more, through a new one. */
static int sending_run(struct sending *sending, struct cox_error *err)
{
    struct cox_direct_peer *peer = sending->peer;
    for (;;) {
        const bool old = is_connected(sending);
        int r = 0;
        if (!old) {
            peer_end(sending->direct, peer);
            r = peer_connect(sending, err);
        }
        if (r == 0)
            r = cox_direct_stream_write_message(&peer->stream, sending->message, sending->size,
                                                sending->deadline_ns, err);
        if (r == 0)
            return 0;
        peer_end(sending->direct, peer);
        struct cox_error cause = {0};
        const int stopped = sending_check(sending, &cause);
        if (stopped) {
            *err = cause;
            return stopped;
        }
        if (!old || (r != COX_CLOSED && r != -ECONNRESET))
            return r == COX_CLOSED ? -ECONNRESET : r;
        cox_error_clear(err);
    }
}

/* The lock is held. Waits for the sends before this one. */
static int sending_begin(struct sending *sending, struct cox_error *err)
{
    struct cox_direct_peer *peer = sending->peer;
    const struct timespec until = cox_deadline_timespec(sending->deadline_ns);
    sending->drop_count = peer->drop_count;
    int r, e = 0;
    while ((r = sending_state(sending, err)) == 0 && peer->busy && e == 0)
        e = pthread_cond_timedwait(&peer->idle, &sending->direct->lock, &until);
    if (r)
        return r;
    if (peer->busy)
        return cox_fail(err, COX_TIMEOUT, "another message was being sent until the deadline");
    peer->busy = true;
    return 0;
}

static int sending_do(struct sending *sending, const char *name, const char *address,
                      struct cox_error *err)
{
    struct cox_direct *direct = sending->direct;
    pthread_mutex_lock(&direct->lock);
    struct cox_direct_peer *peer = peer_find(direct, name, address);
    if (!peer) {
        pthread_mutex_unlock(&direct->lock);
        return cox_fail(err, -ENOMEM, "no memory");
    }
    direct->send_count++;
    peer->send_count++;
    sending->peer = peer;
    int r = sending_begin(sending, err);
    if (r == 0) {
        pthread_mutex_unlock(&direct->lock);
        r = sending_run(sending, err);
        pthread_mutex_lock(&direct->lock);
        peer_release(peer);
    }
    peer->send_count--;
    direct->send_count--;
    pthread_cond_broadcast(&direct->changed);
    pthread_mutex_unlock(&direct->lock);
    return r;
}

/* ---- public ---- */

static int options_check(const struct cox_direct_options *options, struct cox_error *err)
{
    if (!options->name || !cox_direct_name_is_valid(options->name))
        return cox_fail(err, COX_INVALID,
                        "the name of a process has 1 to %d letters, digits and \".-_\"",
                        COX_DIRECT_NAME_MAX);
    if (options->group && options->group[0] && !cox_direct_name_is_valid(options->group))
        return cox_fail(err, COX_INVALID,
                        "the name of a group has at most %d letters, digits and \".-_\"",
                        COX_DIRECT_NAME_MAX);
    const bool all = options->ca && options->certificate && options->key;
    const bool none = !options->ca && !options->certificate && !options->key;
    if (options->insecure_loopback ? !none : !all)
        return cox_fail(err, COX_INVALID, "%s",
                        options->insecure_loopback ? "without TLS there are no certificates"
                                                   : "TLS needs a CA, a certificate and a key");
    if (options->size_max > COX_DIRECT_SIZE_MAX)
        return cox_fail(err, COX_INVALID, "size_max is %llu; at most %llu are possible",
                        (unsigned long long)options->size_max,
                        (unsigned long long)COX_DIRECT_SIZE_MAX);
    COX_ASSERT(options->on_message || !options->listen);
    COX_ASSERT((options->on_memory && options->memory) || !options->to_memory);
    return 0;
}

static int direct_listen(struct cox_direct *direct, const char *address, struct cox_error *err)
{
    _cox_cleanup_(list_free) struct addrinfo *list = NULL;
    int r = cox_direct_address_resolve(address, direct->insecure, &list, err);
    if (r)
        return r;
    r = cox_direct_address_listen(list, &direct->listen_fd, &direct->port);
    if (r)
        return cox_fail(err, r, "cannot listen at %s: %s", address, cox_status_text(r));
    r = cox_direct_incoming_start(direct);
    if (r == 0)
        return 0;
    cox_close_fd(&direct->listen_fd);
    return cox_fail(err, r, "no thread to accept with: %s", cox_status_text(r));
}

static void direct_close(struct cox_direct **direct)
{
    cox_direct_close(*direct);
}

int cox_direct_check_certificate(const char *ca, const char *certificate, const char *key,
                                 const char *name, struct cox_error *err)
{
    struct cox_direct_tls tls = {0};
    int r = cox_direct_tls_open(ca, certificate, key, name, &tls, err);
    cox_direct_tls_close(&tls);
    return r;
}

int cox_direct_open(const struct cox_direct_options *options, struct cox_direct **ret_direct,
                    struct cox_error *err)
{
    int r = options_check(options, err);
    if (r)
        return r;
    _cox_cleanup_(direct_close) struct cox_direct *direct = calloc(1, sizeof *direct);
    if (!direct)
        return cox_fail(err, -ENOMEM, "no memory");
    strcpy(direct->name, options->name);
    strcpy(direct->group, options->group ? options->group : "");
    direct->insecure = options->insecure_loopback;
    direct->size_max = options->size_max ? options->size_max : COX_DIRECT_SIZE_MAX;
    direct->context = options->context;
    direct->on_message = options->on_message;
    direct->on_announce = options->on_announce;
    direct->to_memory = options->to_memory;
    direct->on_memory = options->on_memory;
    direct->memory = options->memory;
    direct->on_end = options->on_end;
    direct->listen_fd = -1;
    pthread_mutex_init(&direct->lock, NULL);
    cox_condition_init(&direct->changed);
    if (!direct->insecure)
        r = cox_direct_tls_open(options->ca, options->certificate, options->key, options->name,
                                &direct->tls, err);
    if (r == 0 && options->listen)
        r = direct_listen(direct, options->listen, err);
    if (r)
        return r;
    *ret_direct = cox_steal_ptr(&direct);
    return 0;
}

void cox_direct_end(struct cox_direct *direct)
{
    pthread_mutex_lock(&direct->lock);
    direct->closing = true;
    for (struct cox_direct_peer *p = direct->peers; p; p = p->next)
        peer_shut_down(p);
    pthread_cond_broadcast(&direct->changed);
    pthread_mutex_unlock(&direct->lock);
}

struct cox_direct *cox_direct_close(struct cox_direct *direct)
{
    if (!direct)
        return NULL;
    cox_direct_end(direct);
    cox_direct_incoming_stop(direct);
    pthread_mutex_lock(&direct->lock);
    while (direct->send_count > 0)
        pthread_cond_wait(&direct->changed, &direct->lock);
    pthread_mutex_unlock(&direct->lock);
    cox_close_fd(&direct->listen_fd);
    while (direct->peers) {
        struct cox_direct_peer *peer = direct->peers;
        direct->peers = peer->next;
        peer_free(peer);
    }
    cox_direct_tls_close(&direct->tls);
    pthread_cond_destroy(&direct->changed);
    pthread_mutex_destroy(&direct->lock);
    free(direct);
    return NULL;
}

uint16_t cox_direct_port(const struct cox_direct *direct)
{
    return direct->port;
}

uint64_t cox_direct_refused(struct cox_direct *direct)
{
    pthread_mutex_lock(&direct->lock);
    const uint64_t count = direct->refused_count;
    pthread_mutex_unlock(&direct->lock);
    return count;
}

int cox_direct_send_message(struct cox_direct *direct, const char *peer, const char *address,
                            const struct cox_direct_message *message, uint64_t deadline_ns,
                            struct cox_error *err)
{
    COX_ASSERT(message->count >= 0 && message->count <= PART_COUNT_MAX);
    struct sending sending = {.direct = direct, .message = message, .deadline_ns = deadline_ns};
    if (!cox_direct_name_is_valid(peer))
        return cox_fail(err, COX_INVALID, "'%.70s' is not the name of a process", peer);
    if (strlen(address) > COX_DIRECT_ADDRESS_MAX)
        return cox_fail(err, COX_INVALID,
                        "'%.280s' is not an address: HOST:PORT or [IPV6]:PORT, the port a number",
                        address);
    for (int i = 0; i < message->count; i++) {
        if (message->parts[i].iov_len > direct->size_max - sending.size)
            return cox_fail(err, COX_TOO_LARGE, "a message to %s has more than %llu bytes", peer,
                            (unsigned long long)direct->size_max);
        sending.size += message->parts[i].iov_len;
    }
    /* What a first try had to say must not stand in the way of the second's. */
    struct cox_error cause = {0};
    int r = sending_do(&sending, peer, address, &cause);
    return r ? cox_fail(err, r, "cannot send to %s at %.280s: %.600s", peer, address, cause.text)
             : 0;
}

int cox_direct_send(struct cox_direct *direct, const char *peer, const char *address, uint32_t kind,
                    const struct iovec *parts, int count, uint64_t deadline_ns,
                    struct cox_error *err)
{
    const struct cox_direct_message message = {.kind = kind, .parts = parts, .count = count};
    return cox_direct_send_message(direct, peer, address, &message, deadline_ns, err);
}

void cox_direct_drop(struct cox_direct *direct, const char *peer)
{
    pthread_mutex_lock(&direct->lock);
    cox_direct_incoming_drop(direct, peer);
    for (struct cox_direct_peer *p = direct->peers; p; p = p->next)
        if (!strcmp(p->name, peer) && (!p->greeted || !strcmp(p->group, direct->group))) {
            p->drop_count++;
            peer_shut_down(p);
        }
    pthread_mutex_unlock(&direct->lock);
}

void cox_direct_drop_address(struct cox_direct *direct, const char *address)
{
    pthread_mutex_lock(&direct->lock);
    for (struct cox_direct_peer *p = direct->peers; p; p = p->next)
        if (!strcmp(p->address, address)) {
            p->drop_count++;
            peer_shut_down(p);
        }
    pthread_mutex_unlock(&direct->lock);
}
