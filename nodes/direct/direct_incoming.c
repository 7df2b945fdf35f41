/* Incoming connections; the other half of direct.c. */
#include "channel/base/base_internal.h"
#include "channel/base/idioms.h"
#include "channel/base/thread.h"
#include "channel/memory/payload_memory.h"
#include "direct_address.h"
#include "direct_object.h"

#include <string.h>
#include <sys/socket.h>

/* Also those that were ended, and whose threads have not. */
#define INCOMING_COUNT_MAX (2 * (COX_DIRECT_KNOWN_MAX + COX_DIRECT_UNKNOWN_MAX))
/* For TLS and the greetings: a few times over an ocean. */
#define HANDSHAKE_NS COX_NSEC_PER_SEC
/* What a message is first allocated; when that has arrived, so many times as much in addition. */
#define ARRIVAL_GROWTH 7
/* What goes to new memory is read in pieces that stay in the cache until they are written. */
#define PIECE_SIZE ((size_t)128 << 10)
/* Until accept is tried again, when fds or memory were short. */
#define SHORTAGE_NS (100 * COX_NSEC_PER_MSEC)

enum cause {
    CAUSE_NONE = 0, /* the peer, or the network */
    CAUSE_REPLACED, /* what had arrived is still delivered */
    CAUSE_CROWDED,  /* it made room for another one */
    CAUSE_DROPPED,
    CAUSE_CLOSED,
};

struct cox_direct_incoming {
    struct cox_direct *direct;
    pthread_t thread;
    /* in the order in which they were accepted, and so were opened */
    uint64_t number;
    struct cox_direct_stream stream;
    /* for texts; and how much of it is the machine */
    char address[80];
    size_t host_size;

    /* under the lock: */
    struct cox_direct_incoming *next;
    /* empty until they are known */
    char peer[COX_DIRECT_NAME_SIZE], group[COX_DIRECT_NAME_SIZE];
    enum cause cause;
    /* bytes of the message that arrives */
    uint64_t taken;
};

static void end_report(struct cox_direct *direct, const char *peer, int code, const char *format,
                       ...) __attribute__((format(printf, 4, 5)));
static void end_report(struct cox_direct *direct, const char *peer, int code, const char *format,
                       ...)
{
    if (!direct->on_end)
        return;
    char text[sizeof((struct cox_error *)NULL)->text];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    direct->on_end(direct->context, peer, code, text);
}

/* The lock is held. The first cause stays, but one that discards messages overrides REPLACED. */
static void incoming_shut_down(struct cox_direct_incoming *incoming, enum cause cause)
{
    if (incoming->cause < cause)
        incoming->cause = cause;
    shutdown(incoming->stream.socket.fd, SHUT_RDWR);
    pthread_cond_broadcast(&incoming->direct->changed);
}

static enum cause incoming_cause(struct cox_direct_incoming *incoming)
{
    pthread_mutex_lock(&incoming->direct->lock);
    const enum cause cause = incoming->cause;
    pthread_mutex_unlock(&incoming->direct->lock);
    return cause;
}

/* Those of several groups on one machine have one name. */
static bool same_process(const struct cox_direct_incoming *a, const struct cox_direct_incoming *b)
{
    return !strcmp(a->peer, b->peer) && !strcmp(a->group, b->group);
}

static void refused_count(struct cox_direct *direct)
{
    pthread_mutex_lock(&direct->lock);
    direct->refused_count++;
    pthread_mutex_unlock(&direct->lock);
}

/* ---- room ---- */

/* Whether both compete for one share, and are of one process or, while it is not known, machine. */
static bool same_crowd(const struct cox_direct_incoming *a, const struct cox_direct_incoming *b)
{
    if (a->peer[0] || b->peer[0])
        return !strcmp(a->peer, b->peer);
    return a->host_size == b->host_size && !memcmp(a->address, b->address, a->host_size);
}

static uint32_t crowd_size(const struct cox_direct_incoming *of)
{
    uint32_t size = 0;
    for (const struct cox_direct_incoming *i = of->direct->incoming; i; i = i->next)
        size += i->cause == CAUSE_NONE && same_crowd(i, of);
    return size;
}

/* Makes room for one more in the share of the known, or of the others. Among the known every process
 * has a right to one. Returns 0, or COX_FULL. The lock is held. */
static int room_make(struct cox_direct *direct, bool known, struct cox_error *err)
{
    const uint32_t max = known ? COX_DIRECT_KNOWN_MAX : COX_DIRECT_UNKNOWN_MAX;
    struct cox_direct_incoming *oldest = NULL;
    uint32_t count = 0, largest = known ? 1 : 0;
    /* The latest comes first. */
    for (struct cox_direct_incoming *i = direct->incoming; i; i = i->next) {
        if (i->cause != CAUSE_NONE || (i->peer[0] != '\0') != known)
            continue;
        const uint32_t size = crowd_size(i);
        count++;
        if (size > largest || (oldest && size == largest)) {
            largest = size;
            oldest = i;
        }
    }
    if (count < max)
        return 0;
    if (!oldest)
        return cox_fail(err, COX_FULL, "there are %d connections already", COX_DIRECT_KNOWN_MAX);
    incoming_shut_down(oldest, CAUSE_CROWDED);
    return 0;
}

/* Counts the memory of a message of which so much is about to be allocated. Returns 0, or
 * COX_NO_SPACE. */
static int memory_take(struct cox_direct_incoming *incoming, uint64_t size, struct cox_error *err)
{
    struct cox_direct *direct = incoming->direct;
    uint64_t all = size, of_peer = size;
    pthread_mutex_lock(&direct->lock);
    for (const struct cox_direct_incoming *i = direct->incoming; i; i = i->next) {
        if (i == incoming || i->taken <= COX_DIRECT_SMALL_SIZE)
            continue;
        all += i->taken;
        of_peer += strcmp(i->peer, incoming->peer) ? 0 : i->taken;
    }
    const uint64_t all_max = COX_DIRECT_BUDGET * direct->size_max, peer_max = direct->size_max;
    const bool fits = size <= COX_DIRECT_SMALL_SIZE || (all <= all_max && of_peer <= peer_max);
    if (fits)
        incoming->taken = size;
    pthread_mutex_unlock(&direct->lock);
    return fits ? 0
                : cox_fail(err, COX_NO_SPACE,
                           "messages under way have %llu bytes, %llu of them from this process: at "
                           "most %llu, and %llu of one process, are taken",
                           (unsigned long long)all, (unsigned long long)of_peer,
                           (unsigned long long)all_max, (unsigned long long)peer_max);
}

static void memory_release(struct cox_direct_incoming *incoming)
{
    pthread_mutex_lock(&incoming->direct->lock);
    incoming->taken = 0;
    pthread_mutex_unlock(&incoming->direct->lock);
}

/* ---- opening ---- */

static bool has_earlier(const struct cox_direct_incoming *incoming)
{
    for (const struct cox_direct_incoming *i = incoming->direct->incoming; i; i = i->next)
        if (i->number < incoming->number && same_process(i, incoming))
            return true;
    return false;
}

/* A process has one connection to this one: a later one means that the earlier is dead, even if
 * nothing else says so. Waits until all of the earlier one is delivered, for the order. */
static int incoming_register(struct cox_direct_incoming *incoming, const char *peer,
                             const char *group, struct cox_error *err)
{
    struct cox_direct *direct = incoming->direct;
    pthread_mutex_lock(&direct->lock);
    int r = room_make(direct, true, err);
    if (r) {
        pthread_mutex_unlock(&direct->lock);
        return r;
    }
    strcpy(incoming->peer, peer);
    strcpy(incoming->group, group);
    for (struct cox_direct_incoming *i = direct->incoming; i; i = i->next)
        if (i != incoming && same_process(i, incoming))
            /* Their handshakes may end in another order. */
            incoming_shut_down(i->number < incoming->number ? i : incoming, CAUSE_REPLACED);
    while (incoming->cause == CAUSE_NONE && has_earlier(incoming))
        pthread_cond_wait(&direct->changed, &direct->lock);
    const enum cause cause = incoming->cause;
    pthread_mutex_unlock(&direct->lock);
    return cause == CAUSE_NONE ? 0 : cox_fail(err, COX_CLOSED, "ended before it began");
}

/* Until the first message: who is it? */
static int incoming_open(struct cox_direct_incoming *incoming, struct cox_error *err)
{
    struct cox_direct *direct = incoming->direct;
    struct cox_direct_stream *stream = &incoming->stream;
    const uint64_t deadline_ns = cox_deadline_after_ns(HANDSHAKE_NS);
    char certified[COX_DIRECT_NAME_SIZE], peer[COX_DIRECT_NAME_SIZE], group[COX_DIRECT_NAME_SIZE];
    int r = 0;
    if (!direct->insecure)
        r = cox_direct_stream_secure(stream, &direct->tls, true, deadline_ns, certified, err);
    if (r == 0)
        r = cox_direct_stream_read_greeting(stream, deadline_ns, peer, group, err);
    if (r == 0 && !direct->insecure && strcmp(peer, certified))
        return cox_fail(err, COX_DENIED,
                        "the process says that it is %s: its certificate is that of %s", peer,
                        certified);
    if (r == 0)
        r = incoming_register(incoming, peer, group, err);
    if (r)
        return r;
    /* Another deadline: messages of an earlier connection may have been delivered meanwhile. */
    return cox_direct_stream_write_greeting(stream, direct->name, direct->group,
                                            cox_deadline_after_ns(HANDSHAKE_NS), err);
}

/* A message: all of it in bytes, or the front there, and what follows it in memory. */
struct body {
    uint32_t kind;
    uint8_t *bytes;
    size_t size;
    /* NULL: all is in bytes */
    struct cox_payload_memory *memory;
};

static void body_deinit(struct body *body)
{
    free(body->bytes);
    cox_payload_memory_unref(body->memory);
}

/* Room for so many bytes of it: those of memory are allocated as they are written. */
static int body_grow(struct cox_direct_incoming *incoming, struct body *body, size_t room,
                     struct cox_error *err)
{
    int r = memory_take(incoming, room, err);
    if (r || room == 0 || body->memory)
        return r;
    uint8_t *grown = cox_allocate_large(body->bytes, room);
    if (!grown)
        return cox_fail(err, COX_NO_SPACE, "no memory for a message of %zu bytes", room);
    body->bytes = grown;
    return 0;
}

/* The front is there: whether the message is wanted, and where the rest goes. */
static int body_announce(struct cox_direct_incoming *incoming, struct body *body,
                         struct cox_error *err)
{
    struct cox_direct *direct = incoming->direct;
    int r = direct->on_announce
                ? direct->on_announce(direct->context, incoming->peer, incoming->group, body->kind,
                                      body->size, body->bytes, err)
                : 0;
    if (r || body->size <= COX_DIRECT_FRONT_SIZE || !direct->to_memory ||
        !direct->to_memory(direct->context, body->kind, body->size, body->bytes))
        return r;
    return cox_payload_memory_take(direct->memory, body->size - COX_DIRECT_FRONT_SIZE,
                                   &body->memory, err);
}

/* Reads what is between the two places. buffer_size: what bytes has room for. */
static int body_fill(struct cox_direct_incoming *incoming, struct body *body, size_t from,
                     size_t to, size_t buffer_size, uint64_t deadline_ns, struct cox_error *err)
{
    uint8_t *piece = body->bytes + COX_DIRECT_FRONT_SIZE, *at = body->bytes + from;
    uint8_t *kept = body->memory ? cox_payload_memory_bytes(body->memory) : NULL;
    if (kept)
        at = kept + from - COX_DIRECT_FRONT_SIZE;
    if (kept || !body->memory)
        return cox_direct_stream_read_body(&incoming->stream, at, to - from, deadline_ns, err);
    int r = 0;
    for (size_t done = from, size; r == 0 && done < to; done += size) {
        size = buffer_size - COX_DIRECT_FRONT_SIZE;
        size = size < PIECE_SIZE ? size : PIECE_SIZE;
        size = size < to - done ? size : to - done;
        r = cox_direct_stream_read_body(&incoming->stream, piece, size, deadline_ns, err);
        if (r == 0)
            r = cox_payload_memory_fill(body->memory, done - COX_DIRECT_FRONT_SIZE, piece, size,
                                        err);
    }
    return r;
}

/* A head alone makes nobody allocate much, and what has begun must come. */
static int body_read(struct cox_direct_incoming *incoming, struct body *body, struct cox_error *err)
{
    const uint64_t patience_ns = cox_deadline_after_ns(COX_DIRECT_PATIENCE_NS);
    const size_t size = body->size,
                 first = size < COX_DIRECT_SMALL_SIZE ? size : COX_DIRECT_SMALL_SIZE;
    size_t done = 0, room = first,
           end = size < COX_DIRECT_FRONT_SIZE ? size : COX_DIRECT_FRONT_SIZE;
    int r = body_grow(incoming, body, room, err);
    if (r == 0 && end > 0)
        r = cox_direct_stream_read_body(&incoming->stream, body->bytes, end, patience_ns, err);
    if (r == 0)
        r = body_announce(incoming, body, err);
    for (done = end, end = room; r == 0 && done < size; end = room) {
        r = body_fill(incoming, body, done, end, first, patience_ns + end * COX_DIRECT_NS_PER_BYTE,
                      err);
        done = end;
        if (done < size)
            room = ARRIVAL_GROWTH * done < size - done ? done + ARRIVAL_GROWTH * done : size;
        if (r == 0 && done < size)
            r = body_grow(incoming, body, room, err);
    }
    return r;
}

/* Passes a message on. */
static int body_deliver(struct cox_direct_incoming *incoming, struct body *body,
                        struct cox_error *err)
{
    struct cox_direct *direct = incoming->direct;
    if (!body->memory) {
        direct->on_message(direct->context, incoming->peer, incoming->group, body->kind,
                           cox_steal_ptr(&body->bytes), body->size);
        return 0;
    }
    int r = cox_payload_memory_finish(body->memory, err);
    if (r == 0)
        direct->on_memory(direct->context, incoming->peer, incoming->group, body->kind, body->bytes,
                          body->memory, body->size - COX_DIRECT_FRONT_SIZE);
    return r;
}

static int incoming_receive(struct cox_direct_incoming *incoming, struct cox_error *err)
{
    struct cox_direct *direct = incoming->direct;
    for (;;) {
        _cox_cleanup_(body_deinit) struct body body = {0};
        uint64_t size = 0;
        int r = cox_direct_stream_read_head(&incoming->stream, direct->size_max, &body.kind, &size,
                                            err);
        body.size = (size_t)size;
        if (r == 0)
            r = body_read(incoming, &body, err);
        if (r)
            return r;
        /* After shutdown(2) the kernel still gives what has arrived. */
        if (incoming_cause(incoming) > CAUSE_REPLACED)
            return cox_fail(err, COX_CLOSED, "a message was discarded");
        r = body_deliver(incoming, &body, err);
        if (r)
            return r;
        memory_release(incoming);
    }
}

static void incoming_report(struct cox_direct_incoming *incoming, int r,
                            const struct cox_error *err)
{
    struct cox_direct *direct = incoming->direct;
    const enum cause cause = incoming_cause(incoming);
    const char *peer = incoming->peer[0] ? incoming->peer : NULL;
    const char *name = peer ? peer : "unknown", *address = incoming->address;
    if (!peer && cause == CAUSE_CLOSED)
        return;
    if (!peer)
        refused_count(direct);
    if (cause == CAUSE_CLOSED || cause == CAUSE_DROPPED)
        end_report(direct, peer, 0, "the connection from %s (%s) was ended here", name, address);
    else if (cause == CAUSE_CROWDED)
        end_report(direct, peer, COX_FULL, "the connection from %s (%s) made room for another one",
                   name, address);
    else if (cause == CAUSE_REPLACED)
        end_report(direct, peer, 0, "the connection from %s (%s) was replaced by a later one", name,
                   address);
    else
        end_report(direct, peer, peer && r == COX_CLOSED ? 0 : r,
                   "the connection from %s (%s) has ended%s: %s", name, address,
                   r == COX_CORRUPT && incoming->stream.socket.ended ? " within a message" : "",
                   err->text);
}

/* Joins a thread that does nothing more but join the one before it. */
static void incoming_join(struct cox_direct_incoming *incoming)
{
    if (!incoming)
        return;
    pthread_join(incoming->thread, NULL);
    free(incoming);
}

/* Nobody finds it any more: then its fd may be closed. Returns the one that ended before. */
static struct cox_direct_incoming *incoming_leave(struct cox_direct_incoming *incoming)
{
    struct cox_direct *direct = incoming->direct;
    pthread_mutex_lock(&direct->lock);
    struct cox_direct_incoming **at = &direct->incoming;
    while (*at != incoming)
        at = &(*at)->next;
    *at = incoming->next;
    direct->incoming_count--;
    struct cox_direct_incoming *before = direct->ended;
    direct->ended = incoming;
    pthread_cond_broadcast(&direct->changed);
    pthread_mutex_unlock(&direct->lock);
    return before;
}

static void *incoming_main(void *argument)
{
    struct cox_direct_incoming *incoming = argument;
    struct cox_error err = {0};
    /* The thread that accepts holds the lock until all of incoming is written. */
    (void)incoming_cause(incoming);
    int r = incoming_open(incoming, &err);
    if (r == 0)
        r = incoming_receive(incoming, &err);
    /* The peer need not wait until on_end has returned. */
    shutdown(incoming->stream.socket.fd, SHUT_RDWR);
    incoming_report(incoming, r, &err);
    /* Each joins the one before: one is left, for the next or for stop. */
    struct cox_direct_incoming *before = incoming_leave(incoming);
    cox_direct_stream_end(&incoming->stream);
    incoming_join(before);
    return NULL;
}

/* ---- accepting ---- */

/* Takes fd when it returns 0. */
static int incoming_start(struct cox_direct *direct, int fd, const char *address)
{
    _cox_cleanup_(cox_free_ptr) struct cox_direct_incoming *incoming = calloc(1, sizeof *incoming);
    if (!incoming)
        return -ENOMEM;
    incoming->direct = direct;
    cox_direct_stream_init(&incoming->stream);
    incoming->stream.socket.fd = fd;
    strcpy(incoming->address, address);
    const char *colon = strrchr(address, ':');
    incoming->host_size = colon ? (size_t)(colon - address) : strlen(address);
    pthread_mutex_lock(&direct->lock);
    int r = direct->incoming_count < INCOMING_COUNT_MAX ? room_make(direct, false, NULL) : COX_FULL;
    if (direct->closing)
        r = COX_CLOSED;
    if (r == 0)
        r = cox_thread_start(&incoming->thread, incoming_main, incoming);
    if (r == 0) {
        incoming->number = ++direct->accept_count;
        incoming->next = direct->incoming;
        direct->incoming = incoming;
        direct->incoming_count++;
        incoming = NULL;
    }
    pthread_mutex_unlock(&direct->lock);
    return r;
}

static void connection_accept(struct cox_direct *direct, int *fd, const struct sockaddr *from,
                              socklen_t size)
{
    char address[80];
    cox_direct_address_format(from, size, address);
    int r = 0;
    if (direct->insecure && !cox_direct_address_is_loopback(from))
        r = COX_DENIED;
    if (r == 0)
        r = cox_fd_raise(fd);
    if (r == 0)
        r = cox_direct_address_configure(*fd);
    if (r == 0)
        r = incoming_start(direct, *fd, address);
    if (r == 0)
        *fd = -1;
    if (r == 0 || r == COX_CLOSED)
        return;
    refused_count(direct);
    end_report(direct, NULL, r, "a connection from %s was refused: %s", address,
               r == COX_DENIED ? "without TLS it must be from loopback" : cox_status_text(r));
}

/* Waits a little, or until closing. Returns false when closing. */
static bool shortage_wait(struct cox_direct *direct)
{
    const struct timespec until = cox_deadline_timespec(cox_deadline_after_ns(SHORTAGE_NS));
    pthread_mutex_lock(&direct->lock);
    while (!direct->closing &&
           pthread_cond_timedwait(&direct->changed, &direct->lock, &until) != ETIMEDOUT)
        continue;
    const bool closing = direct->closing;
    pthread_mutex_unlock(&direct->lock);
    return !closing;
}

static void *accepting_main(void *argument)
{
    struct cox_direct *direct = argument;
    for (;;) {
        struct sockaddr_storage from;
        socklen_t size = sizeof from;
        _cox_cleanup_(cox_close_fd) int fd = accept4(direct->listen_fd, (struct sockaddr *)&from,
                                                     &size, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0)
            connection_accept(direct, &fd, (struct sockaddr *)&from, size);
        else if (errno != EINTR && errno != ECONNABORTED && !shortage_wait(direct))
            return NULL; /* closing has shut the socket down */
    }
}

int cox_direct_incoming_start(struct cox_direct *direct)
{
    return cox_thread_start(&direct->accepting, accepting_main, direct);
}

void cox_direct_incoming_stop(struct cox_direct *direct)
{
    if (direct->listen_fd >= 0) {
        shutdown(direct->listen_fd, SHUT_RDWR);
        pthread_join(direct->accepting, NULL);
    }
    pthread_mutex_lock(&direct->lock);
    for (struct cox_direct_incoming *i = direct->incoming; i; i = i->next)
        incoming_shut_down(i, CAUSE_CLOSED);
    while (direct->incoming)
        pthread_cond_wait(&direct->changed, &direct->lock);
    struct cox_direct_incoming *ended = direct->ended;
    direct->ended = NULL;
    pthread_mutex_unlock(&direct->lock);
    incoming_join(ended);
}

void cox_direct_incoming_drop(struct cox_direct *direct, const char *peer)
{
    for (struct cox_direct_incoming *i = direct->incoming; i; i = i->next)
        if (!strcmp(i->peer, peer) && !strcmp(i->group, direct->group))
            incoming_shut_down(i, CAUSE_DROPPED);
}
