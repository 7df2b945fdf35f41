#include "cluster.h"

#include "channel/base/idioms.h"
#include "channel/base/thread.h"
#include "coordinator/transport/nodes.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <nats/nats.h>
#include <netdb.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define PING_MS 100
#define PINGS_MAX 2
#define RECONNECT_MS 50
/* A server that takes nothing for so long is lost. Without a limit a write waits with the lock of the
 * connection held, which its pings need as well. */
#define WRITE_MS 300
/* One attempt to connect; a server that is stopped does not hold up the others longer. */
#define ATTEMPT_MS 500
/* What it waits for is told after so long. */
#define TELL_MS 1000
#define CHECK_MS 2000
/* the same, of a server that took the place of another; the thread that asks sends nothing meanwhile */
#define CHECK_AGAIN_MS 500
/* What the server must have: at most these, at least this. */
#define SERVER_PING_MS_MAX 250
#define SERVER_WRITE_DEADLINE_MS_MAX 2000
#define SERVER_PAYLOAD_MIN (256u << 10)
/* What the certificate of a server is for, whatever its host: a node's certificate is none of a server. */
#define SERVER_NAME "coxswain-nats"
/* Frames that wait to be sent; more are dropped, oldest first. */
#define QUEUE_COUNT_MAX 4096
/* A caller of send writes to the connection itself if something came from it within this time, and no
 * more than this was written since: it fits into the buffer of the socket, so the caller is not held up
 * by a connection that is about to be found lost. */
#define HEARD_NS (150 * COX_NSEC_PER_MSEC)
#define UNHEARD_SIZE_MAX (32u << 10)

/* libnats frees a message on a thread of its own, which it wakes for each. Messages that were handled
 * are given to it this many at a time, or once they are so large together. */
#define HANDLED_COUNT_MAX 64
#define HANDLED_SIZE_MAX ((size_t)1 << 20)

struct outgoing {
    struct outgoing *next;
    char node[COX_NODE_NAME_MAX + 1];
    size_t size;
    uint8_t *bytes;
};

struct cox_cluster {
    char group[COX_NAME_SIZE_MAX + 1];
    /* "": the lead */
    char node[COX_NODE_NAME_MAX + 1];
    bool insecure;
    struct cox_cluster_options hooks;
    natsConnection *connection;
    natsSubscription *frames, *to_all, *gone;
    size_t size_max;

    /* messages that nothing reads any more; owned. Of the thread that calls on_frame, and of close */
    natsMsg *handled[HANDLED_COUNT_MAX];
    uint32_t handled_count;
    size_t handled_size;

    /* when something came last, and what was written since */
    _Atomic uint64_t heard_ns;
    _Atomic size_t unheard_size;

    pthread_mutex_t lock;
    /* the thread has work; what flush and close wait for */
    pthread_cond_t queued, changed;
    struct outgoing *first, **end;
    uint32_t count;
    /* somebody writes to the connection: the thread, or a caller of send */
    bool sending;
    bool connected, stopping;
    /* another server is there, whose settings are not known */
    bool unchecked;
    /* the connection and subscriptions that may still call this object */
    uint32_t callers;
    bool threaded;
    pthread_t thread;
    /* the last refusal that the server told: a subject, for example */
    char refused[256];
};

/* ---- sending ---- */

static int cluster_check(struct cox_cluster *cluster, int64_t timeout_ms, struct cox_error *err);

static void outgoing_free(struct outgoing *outgoing)
{
    if (outgoing)
        free(outgoing->bytes);
    free(outgoing);
}

/* Whether a write cannot block, as far as is known. The lock is held. */
static bool may_send(struct cox_cluster *cluster)
{
    const uint64_t heard_ns = atomic_load_explicit(&cluster->heard_ns, memory_order_relaxed);
    return cluster->connected && !cluster->stopping && cox_now_ns() - heard_ns < HEARD_NS &&
           atomic_load_explicit(&cluster->unheard_size, memory_order_relaxed) +
                   cluster->first->size <=
               UNHEARD_SIZE_MAX;
}

/* Takes the first of the queue and sends it. The lock is held, and released meanwhile. */
static void send_first(struct cox_cluster *cluster)
{
    struct outgoing *outgoing = cluster->first;
    char subject[256];
    cluster->sending = true;
    cluster->first = outgoing->next;
    cluster->count--;
    if (!cluster->first)
        cluster->end = &cluster->first;
    pthread_mutex_unlock(&cluster->lock);
    if (cluster->node[0])
        snprintf(subject, sizeof subject, "cox.%s.from.%s", cluster->group, cluster->node);
    else if (outgoing->node[0])
        snprintf(subject, sizeof subject, "cox.%s.to.%s", cluster->group, outgoing->node);
    else
        snprintf(subject, sizeof subject, "cox.%s.all", cluster->group);
    atomic_fetch_add_explicit(&cluster->unheard_size, outgoing->size, memory_order_relaxed);
    /* Without a connection it is lost, and asked for again. */
    natsConnection_Publish(cluster->connection, subject, outgoing->bytes, (int)outgoing->size);
    outgoing_free(outgoing);
    pthread_mutex_lock(&cluster->lock);
    cluster->sending = false;
}

/* What runs is not ended for it: silence is seen all the same, but not as soon. */
static void check_again(struct cox_cluster *cluster)
{
    struct cox_error why = {0};
    char url[256] = "";
    natsConnection_GetConnectedUrl(cluster->connection, url, sizeof url);
    if (cluster_check(cluster, CHECK_AGAIN_MS, &why))
        cox_log_write(&cluster->hooks.log, 3,
                      "the cluster: %s: %s; a process that starts there is refused", url, why.text);
}

static void *cluster_main(void *context)
{
    struct cox_cluster *cluster = context;
    pthread_setname_np(pthread_self(), "cox-nats-send");
    pthread_mutex_lock(&cluster->lock);
    while (!cluster->stopping || cluster->first) {
        if (cluster->first && !cluster->sending) {
            send_first(cluster);
            continue;
        }
        if (cluster->unchecked) {
            cluster->unchecked = false;
            pthread_mutex_unlock(&cluster->lock);
            check_again(cluster);
            pthread_mutex_lock(&cluster->lock);
            continue;
        }
        pthread_cond_broadcast(&cluster->changed);
        pthread_cond_wait(&cluster->queued, &cluster->lock);
    }
    pthread_cond_broadcast(&cluster->changed);
    pthread_mutex_unlock(&cluster->lock);
    return NULL;
}

void cox_cluster_send(struct cox_cluster *cluster, const char *node, uint8_t *bytes, size_t size)
{
    struct outgoing *outgoing = calloc(1, sizeof *outgoing), *dropped = NULL;
    if (!outgoing) {
        free(bytes);
        return;
    }
    if (node)
        snprintf(outgoing->node, sizeof outgoing->node, "%s", node);
    outgoing->bytes = bytes;
    outgoing->size = size;
    pthread_mutex_lock(&cluster->lock);
    *cluster->end = outgoing;
    cluster->end = &outgoing->next;
    if (++cluster->count > QUEUE_COUNT_MAX) {
        dropped = cluster->first;
        cluster->first = dropped->next;
        cluster->count--;
    }
    /* Whoever sends now sends this one too. */
    const bool sends = !cluster->sending;
    while (sends && cluster->first && may_send(cluster))
        send_first(cluster);
    if (sends && cluster->first)
        pthread_cond_signal(&cluster->queued);
    else if (sends)
        pthread_cond_broadcast(&cluster->changed);
    pthread_mutex_unlock(&cluster->lock);
    outgoing_free(dropped);
}

void cox_cluster_flush(struct cox_cluster *cluster, uint64_t deadline_ns)
{
    const struct timespec until = cox_deadline_timespec(deadline_ns);
    pthread_mutex_lock(&cluster->lock);
    while ((cluster->first || cluster->sending) && cox_now_ns() < deadline_ns)
        pthread_cond_timedwait(&cluster->changed, &cluster->lock, &until);
    pthread_mutex_unlock(&cluster->lock);
    const uint64_t now_ns = cox_now_ns();
    if (now_ns < deadline_ns)
        natsConnection_FlushTimeout(cluster->connection,
                                    1 + (int64_t)((deadline_ns - now_ns) / COX_NSEC_PER_MSEC));
}

/* ---- what libnats calls ---- */

static void handled_free(struct cox_cluster *cluster)
{
    while (cluster->handled_count)
        natsMsg_Destroy(cluster->handled[--cluster->handled_count]);
    cluster->handled_size = 0;
}

/* Takes the message. */
static void handled_add(struct cox_cluster *cluster, natsMsg *message)
{
    cluster->handled[cluster->handled_count++] = message;
    cluster->handled_size += (size_t)natsMsg_GetDataLength(message);
    if (cluster->handled_count == HANDLED_COUNT_MAX || cluster->handled_size > HANDLED_SIZE_MAX)
        handled_free(cluster);
}

static void on_frame(natsConnection *connection, natsSubscription *subscription, natsMsg *message,
                     void *context)
{
    (void)connection, (void)subscription;
    struct cox_cluster *cluster = context;
    const char *subject = natsMsg_GetSubject(message);
    const char *from = strrchr(subject, '.');
    atomic_store_explicit(&cluster->heard_ns, cox_now_ns(), memory_order_relaxed);
    atomic_store_explicit(&cluster->unheard_size, 0, memory_order_relaxed);
    cluster->hooks.on_frame(cluster->hooks.context, cluster->node[0] || !from ? NULL : from + 1,
                            (const uint8_t *)natsMsg_GetData(message),
                            (size_t)natsMsg_GetDataLength(message));
    handled_add(cluster, message);
}

/* {"server": {"id": ...}, "client": {"id": ...}, "reason": ...} */
static void on_gone(natsConnection *connection, natsSubscription *subscription, natsMsg *message,
                    void *context)
{
    (void)connection, (void)subscription;
    struct cox_cluster *cluster = context;
    json_t *root =
        json_loadb(natsMsg_GetData(message), (size_t)natsMsg_GetDataLength(message), 0, NULL);
    const char *server = json_string_value(json_object_get(json_object_get(root, "server"), "id"));
    const json_t *client = json_object_get(json_object_get(root, "client"), "id");
    const char *reason = json_string_value(json_object_get(root, "reason"));
    if (server && json_is_integer(client) && cluster->hooks.on_gone)
        cluster->hooks.on_gone(cluster->hooks.context, server, (uint64_t)json_integer_value(client),
                               reason ? reason : "");
    json_decref(root);
    natsMsg_Destroy(message);
}

static void on_disconnected(natsConnection *connection, void *context)
{
    struct cox_cluster *cluster = context;
    const char *text = NULL;
    const natsStatus s = natsConnection_GetLastError(connection, &text);
    if (s == NATS_STALE_CONNECTION)
        text = "the server does not answer";
    pthread_mutex_lock(&cluster->lock);
    const bool stopping = cluster->stopping;
    cluster->connected = false;
    pthread_mutex_unlock(&cluster->lock);
    if (cluster->hooks.on_connection && !stopping)
        cluster->hooks.on_connection(cluster->hooks.context, false,
                                     text && *text ? text
                                                   : "the server has ended it, or does not answer");
}

static void on_reconnected(natsConnection *connection, void *context)
{
    struct cox_cluster *cluster = context;
    char url[256] = "";
    natsConnection_GetConnectedUrl(connection, url, sizeof url);
    pthread_mutex_lock(&cluster->lock);
    cluster->connected = true;
    cluster->unchecked = !cluster->insecure;
    pthread_cond_signal(&cluster->queued);
    pthread_mutex_unlock(&cluster->lock);
    if (cluster->hooks.on_connection)
        cluster->hooks.on_connection(cluster->hooks.context, true, url);
}

static void callers_add(struct cox_cluster *cluster)
{
    pthread_mutex_lock(&cluster->lock);
    cluster->callers++;
    pthread_mutex_unlock(&cluster->lock);
}

/* A subscription that has ended: its last message was handled. */
static void on_ended(void *context)
{
    struct cox_cluster *cluster = context;
    pthread_mutex_lock(&cluster->lock);
    cluster->callers -= cluster->callers > 0;
    pthread_cond_broadcast(&cluster->changed);
    pthread_mutex_unlock(&cluster->lock);
}

/* The last callback of a connection. */
static void on_closed(natsConnection *connection, void *context)
{
    (void)connection;
    on_ended(context);
}

static void on_error(natsConnection *connection, natsSubscription *subscription, natsStatus status,
                     void *context)
{
    (void)subscription;
    struct cox_cluster *cluster = context;
    const char *text = NULL;
    natsConnection_GetLastError(connection, &text);
    pthread_mutex_lock(&cluster->lock);
    snprintf(cluster->refused, sizeof cluster->refused, "%s",
             text && *text ? text : natsStatus_GetText(status));
    pthread_mutex_unlock(&cluster->lock);
    cox_log_write(&cluster->hooks.log, 4, "NATS: %s",
                  text && *text ? text : natsStatus_GetText(status));
}

/* ---- open ---- */

static int options_fill(struct cox_cluster *cluster, natsOptions *options,
                        const struct cox_cluster_access *ways, struct cox_error *err)
{
    char list[1024], *urls[16], *rest = NULL;
    int count = 0;
    if (snprintf(list, sizeof list, "%s", ways->url) >= (int)sizeof list)
        return cox_fail(err, COX_INVALID, "the list of servers is too long");
    for (char *url = strtok_r(list, ",", &rest); url; url = strtok_r(NULL, ",", &rest)) {
        if (count == 16)
            return cox_fail(err, COX_INVALID, "at most 16 servers can be named");
        if (strncmp(url, "tls://", 6) != 0 && !ways->insecure_loopback)
            return cox_fail(err, COX_INVALID,
                            "'%s' is no tls://HOST:PORT; without TLS the cluster works on loopback "
                            "addresses only, with insecure_loopback",
                            url);
        if (ways->insecure_loopback && !strstr(url, "//127.") && !strstr(url, "//[::1]") &&
            !strstr(url, "//localhost"))
            return cox_fail(
                err, COX_DENIED,
                "insecure_loopback: '%s' is no loopback address (nats://127.0.0.1:PORT)", url);
        urls[count++] = url;
    }
    natsStatus s = natsOptions_SetServers(options, (const char **)urls, count);
    if (s == NATS_OK && !ways->insecure_loopback) {
        const char *paths[] = {ways->ca, ways->certificate, ways->key};
        static const char *const names[] = {"ca", "cert", "key"};
        for (int i = 0; i < 3; i++)
            if (!paths[i])
                return cox_fail(err, COX_INVALID,
                                "--%s FILE is missing: the cluster needs a certificate "
                                "(coxswain-certificates makes them)",
                                names[i]);
            else if (access(paths[i], R_OK) < 0)
                return cox_fail(err, COX_INVALID, "--%s %s: %s", names[i], paths[i],
                                cox_status_text(-errno));
        s = natsOptions_SetSecure(options, true);
        if (s == NATS_OK)
            s = natsOptions_LoadCATrustedCertificates(options, ways->ca);
        if (s == NATS_OK)
            s = natsOptions_LoadCertificatesChain(options, ways->certificate, ways->key);
        if (s != NATS_OK)
            return cox_fail(err, COX_INVALID,
                            "the certificates %s, %s and the key %s cannot be used: %s", ways->ca,
                            ways->certificate, ways->key, nats_GetLastError(NULL));
    }
    if (s == NATS_OK)
        s = natsOptions_SetPingInterval(options, PING_MS);
    if (s == NATS_OK)
        s = natsOptions_SetMaxPingsOut(options, PINGS_MAX);
    if (s == NATS_OK)
        s = natsOptions_SetReconnectBufSize(options, 0);
    if (s == NATS_OK)
        s = natsOptions_SetReconnectWait(options, RECONNECT_MS);
    if (s == NATS_OK)
        s = natsOptions_SetReconnectJitter(options, 10, 10);
    if (s == NATS_OK)
        s = natsOptions_SetMaxReconnect(options, -1);
    if (s == NATS_OK)
        s = natsOptions_SetTimeout(options, ATTEMPT_MS);
    if (s == NATS_OK)
        s = natsOptions_SetWriteDeadline(options, WRITE_MS);
    if (s == NATS_OK && !ways->insecure_loopback)
        s = natsOptions_SetExpectedHostname(options, SERVER_NAME);
    if (s == NATS_OK) {
        char inbox[COX_NODE_NAME_MAX + 16];
        snprintf(inbox, sizeof inbox, "_INBOX.%s%s", cluster->node[0] ? "node-" : "lead",
                 cluster->node);
        s = natsOptions_SetCustomInboxPrefix(options, inbox);
    }
    if (s == NATS_OK)
        s = natsOptions_SetSendAsap(options, true);
    /* One thread for all subscriptions: what the lead says is taken in its order. */
    if (s == NATS_OK)
        s = natsOptions_UseGlobalMessageDelivery(options, true);
    if (s == NATS_OK)
        s = natsOptions_SetNoEcho(options, true);
    if (s == NATS_OK)
        s = natsOptions_SetDisconnectedCB(options, on_disconnected, cluster);
    if (s == NATS_OK)
        s = natsOptions_SetReconnectedCB(options, on_reconnected, cluster);
    if (s == NATS_OK)
        s = natsOptions_SetErrorHandler(options, on_error, cluster);
    if (s == NATS_OK)
        s = natsOptions_SetClosedCB(options, on_closed, cluster);
    return s == NATS_OK ? 0
                        : cox_fail(err, COX_INVALID, "the options of the NATS connection: %s",
                                   natsStatus_GetText(s));
}

/* What became of a connection to HOST:PORT of an URL, without a word of NATS. */
static void server_try(const char *url, char *text, size_t size)
{
    const char *scheme = strstr(url, "//"), *colon = strrchr(url, ':');
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
    const struct timeval patience = {.tv_usec = ATTEMPT_MS * 1000};
    struct addrinfo *found = NULL;
    char host[COX_CLUSTER_HOST_SIZE];
    const char *at = scheme ? scheme + 2 : url;
    if (!colon || colon < at) {
        snprintf(text, size, "no HOST:PORT");
        return;
    }
    if (*at == '[')
        snprintf(host, sizeof host, "%.*s", (int)strcspn(at + 1, "]"), at + 1);
    else
        snprintf(host, sizeof host, "%.*s", (int)(colon - at), at);
    int r = getaddrinfo(host, colon + 1, &hints, &found);
    if (r) {
        snprintf(text, size, "%s: %s", host, gai_strerror(r));
        return;
    }
    _cox_cleanup_(cox_close_fd) int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    r = fd < 0 || setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience) < 0 ||
                connect(fd, found->ai_addr, found->ai_addrlen) < 0
            ? errno
            : 0;
    freeaddrinfo(found);
    snprintf(text, size, "%s",
             r == EINPROGRESS ? "does not answer"
             : r              ? cox_status_text(-r)
                              : "accepts the connection, and does not speak NATS");
}

/* The same of each server. */
static void servers_try(const char *urls, char *text, size_t size)
{
    char list[1024], *rest = NULL;
    size_t length = 0;
    snprintf(text, size, "no URL");
    snprintf(list, sizeof list, "%s", urls);
    for (char *url = strtok_r(list, ",", &rest); url && length < size;
         url = strtok_r(NULL, ",", &rest)) {
        char what[160];
        server_try(url, what, sizeof what);
        length += (size_t)snprintf(text + length, size - length, "%s%s: %s", length ? "; " : "",
                                   url, what);
    }
}

/* Returns NATS_OK, or the last failure, of which text says more. */
static natsStatus connect_once(struct cox_cluster *cluster, natsOptions *options, char *text,
                               size_t size)
{
    const natsStatus s = natsConnection_Connect(&cluster->connection, options);
    const char *last = s == NATS_OK ? NULL : nats_GetLastError(NULL);
    const char *behind = last ? strstr(last, "): ") : NULL; /* "(conn.c:773): ..." */
    snprintf(text, size, "%s", behind ? behind + 3 : last ? last : natsStatus_GetText(s));
    return s;
}

/* Fails for good: trying again does not help. */
static int connect_refused(const struct cox_cluster_access *access, natsStatus s, const char *text,
                           struct cox_error *err)
{
    const char *certificate = access->certificate ? access->certificate : "none";
    switch (s) {
    case NATS_INVALID_ARG:
        return cox_fail(err, COX_INVALID, "the cluster %s: %s: expected tls://HOST:PORT",
                        access->url, text);
    case NATS_SECURE_CONNECTION_WANTED:
        return cox_fail(err, COX_UNSUPPORTED,
                        "the server of the cluster %s has no TLS: start it with coxswain-nats.conf",
                        access->url);
    case NATS_SECURE_CONNECTION_REQUIRED:
        return cox_fail(err, COX_UNSUPPORTED,
                        "the server of the cluster %s wants TLS: give tls://HOST:PORT and "
                        "certificates in place of insecure_loopback",
                        access->url);
    case NATS_SSL_ERROR:
        if (access->insecure_loopback)
            return connect_refused(access, NATS_SECURE_CONNECTION_REQUIRED, text, err);
        if (strstr(text, "certificate") && !strstr(text, "alert"))
            return cox_fail(err, COX_DENIED,
                            "this process does not accept the server of the cluster %s: %s: it "
                            "needs a certificate for '" SERVER_NAME "' of the CA in %s",
                            access->url, text, access->ca ? access->ca : "no file");
        break;
    default:
        break;
    }
    return cox_fail(err, COX_DENIED,
                    "the cluster %s refuses this process: %s: certificate %s (is it of the "
                    "server's CA, in its time, its node in the server's configuration, and "
                    "verify_and_map set there?)",
                    access->url, text, certificate);
}

static int cluster_connect(struct cox_cluster *cluster, natsOptions *options,
                           const struct cox_cluster_options *from, struct cox_error *err)
{
    const uint64_t deadline_ns = cox_deadline_after_ms(from->timeout_ms),
                   tell_ns = cox_deadline_after_ms(TELL_MS);
    bool told = false;
    callers_add(cluster);
    for (;;) {
        char text[256], server[256];
        const natsStatus s = connect_once(cluster, options, text, sizeof text);
        int r = 0;
        if (s == NATS_OK)
            return 0;
        const bool late = cox_now_ns() >= deadline_ns;
        if (from->cancelled && from->cancelled(from->cancel_context))
            r = cox_fail(err, COX_CLOSED, "cancelled while the cluster was connected to");
        else if (s == NATS_CONNECTION_AUTH_FAILED || s == NATS_SSL_ERROR ||
                 s == NATS_NOT_PERMITTED || s == NATS_INVALID_ARG ||
                 s == NATS_SECURE_CONNECTION_WANTED || s == NATS_SECURE_CONNECTION_REQUIRED)
            r = connect_refused(&from->access, s, text, err);
        else if (late || (!told && cox_now_ns() >= tell_ns)) {
            servers_try(from->access.url, server, sizeof server);
            if (late)
                r = cox_fail(err, COX_TIMEOUT,
                             "no server of the cluster answers: %s (is nats-server running there, "
                             "and is this its address and port?)",
                             server);
            else
                cox_log_write(&cluster->hooks.log, 4, "waiting for the cluster: %s", server);
            told = true;
        }
        if (r) {
            on_ended(cluster);
            return r;
        }
        usleep(RECONNECT_MS * 1000);
    }
}

static int check_value(const json_t *data, const char *name, json_int_t unit, json_int_t min,
                       json_int_t max, const char *should, struct cox_error *err)
{
    const json_t *value = json_object_get(data, name);
    const json_int_t number = json_integer_value(value) / unit;
    if (!json_is_integer(value))
        return cox_fail(err, COX_UNSUPPORTED, "the server does not say its %s", name);
    return number >= min && number <= max
               ? 0
               : cox_fail(err, COX_UNSUPPORTED,
                          "the server is configured otherwise: %s is %" JSON_INTEGER_FORMAT
                          ", it should be %s (coxswain-nats.conf)",
                          name, number, should);
}

/* Asks the server for its settings: with others, a dead node would be seen late or never. */
static int cluster_check(struct cox_cluster *cluster, int64_t timeout_ms, struct cox_error *err)
{
    char id[64] = "", subject[160], inbox[160];
    natsSubscription *replies = NULL;
    natsMsg *reply = NULL;
    natsConnection_GetConnectedServerId(cluster->connection, id, sizeof id);
    snprintf(subject, sizeof subject, "$SYS.REQ.SERVER.%s.VARZ", id);
    snprintf(inbox, sizeof inbox, "_INBOX.%s%s.%jd", cluster->node[0] ? "node-" : "lead",
             cluster->node, (intmax_t)getpid());
    natsStatus s = natsConnection_SubscribeSync(&replies, cluster->connection, inbox);
    if (s == NATS_OK)
        s = natsConnection_PublishRequest(cluster->connection, subject, inbox, NULL, 0);
    if (s == NATS_OK)
        s = natsSubscription_NextMsg(&reply, replies, timeout_ms);
    natsSubscription_Destroy(replies);
    if (s != NATS_OK)
        return cox_fail(
            err, COX_UNSUPPORTED,
            "the server does not tell its settings (%s: %s): its configuration lacks the "
            "import of $SYS.REQ.SERVER.*.VARZ (coxswain-nats.conf)",
            subject, natsStatus_GetText(s));
    json_t *root =
        json_loadb(natsMsg_GetData(reply), (size_t)natsMsg_GetDataLength(reply), 0, NULL);
    const json_t *data = json_object_get(root, "data");
    int r = data ? 0 : cox_fail(err, COX_CORRUPT, "the server's settings cannot be read");
    if (r == 0)
        r = check_value(data, "ping_interval", 1000000, 1, SERVER_PING_MS_MAX,
                        "\"100ms\", at most 250", err);
    if (r == 0)
        r = check_value(data, "ping_max", 1, 1, 3, "2", err);
    if (r == 0)
        r = check_value(data, "write_deadline", 1000000, 1, SERVER_WRITE_DEADLINE_MS_MAX,
                        "\"1s\", at most 2000 ms", err);
    if (r == 0)
        r = check_value(data, "max_payload", 1, SERVER_PAYLOAD_MIN, INT32_MAX, "1MB", err);
    if (r == 0 && !json_is_true(json_object_get(data, "tls_verify")))
        r = cox_fail(
            err, COX_UNSUPPORTED,
            "the server asks its clients for no certificate: set tls { verify_and_map: true "
            "} (coxswain-nats.conf)");
    json_decref(root);
    natsMsg_Destroy(reply);
    return r;
}

static natsStatus cluster_subscribe_to(struct cox_cluster *cluster, const char *subject,
                                       natsMsgHandler handler, natsSubscription **ret_subscription)
{
    natsStatus s =
        natsConnection_Subscribe(ret_subscription, cluster->connection, subject, handler, cluster);
    if (s != NATS_OK)
        return s;
    callers_add(cluster);
    s = natsSubscription_SetOnCompleteCB(*ret_subscription, on_ended, cluster);
    if (s != NATS_OK)
        on_ended(cluster);
    return s;
}

static int cluster_subscribe(struct cox_cluster *cluster, struct cox_error *err)
{
    char subject[256];
    natsStatus s;
    if (cluster->node[0])
        snprintf(subject, sizeof subject, "cox.%s.to.%s", cluster->group, cluster->node);
    else
        snprintf(subject, sizeof subject, "cox.%s.from.*", cluster->group);
    s = cluster_subscribe_to(cluster, subject, on_frame, &cluster->frames);
    if (s == NATS_OK && cluster->node[0]) {
        snprintf(subject, sizeof subject, "cox.%s.all", cluster->group);
        s = cluster_subscribe_to(cluster, subject, on_frame, &cluster->to_all);
    }
    if (s == NATS_OK && cluster->hooks.on_gone && !cluster->insecure)
        s = cluster_subscribe_to(cluster, "$SYS.ACCOUNT.COX.DISCONNECT", on_gone, &cluster->gone);
    if (s == NATS_OK)
        s = natsConnection_FlushTimeout(cluster->connection, CHECK_MS);
    if (s != NATS_OK)
        return cox_fail(err, COX_TIMEOUT, "subscribing to %s: %s", subject, natsStatus_GetText(s));
    char refused[256];
    usleep(1000); /* a refusal comes beside the flush */
    pthread_mutex_lock(&cluster->lock);
    memcpy(refused, cluster->refused, sizeof refused);
    pthread_mutex_unlock(&cluster->lock);
    return refused[0] ? cox_fail(err, COX_DENIED,
                                 "the server does not allow this certificate to be %s%s: %s",
                                 cluster->node[0] ? "node " : "the lead", cluster->node, refused)
                      : 0;
}

int cox_cluster_open(const struct cox_cluster_options *options, struct cox_cluster **ret_cluster,
                     struct cox_error *err)
{
    int r = cox_node_name_check("group", options->group, err);
    if (r == 0 && options->node)
        r = cox_node_name_check("node", options->node, err);
    if (r)
        return r;
    struct cox_cluster *cluster = calloc(1, sizeof *cluster);
    natsOptions *nats = NULL;
    if (!cluster || natsOptions_Create(&nats) != NATS_OK) {
        free(cluster);
        return cox_fail(err, -ENOMEM, "no memory for a NATS connection");
    }
    snprintf(cluster->group, sizeof cluster->group, "%s", options->group);
    if (options->node)
        snprintf(cluster->node, sizeof cluster->node, "%s", options->node);
    cluster->insecure = options->access.insecure_loopback;
    cluster->hooks = *options;
    cluster->hooks.access = (struct cox_cluster_access){0};
    cluster->hooks.group = cluster->hooks.node = NULL;
    cluster->end = &cluster->first;
    pthread_mutex_init(&cluster->lock, NULL);
    cox_condition_init(&cluster->queued);
    cox_condition_init(&cluster->changed);
    cluster->connected = true;
    r = options_fill(cluster, nats, &options->access, err);
    if (r == 0)
        r = cluster_connect(cluster, nats, options, err);
    natsOptions_Destroy(nats);
    if (r == 0 && !cluster->insecure)
        r = cluster_check(cluster, CHECK_MS, err);
    if (r == 0)
        cluster->size_max = (size_t)natsConnection_GetMaxPayload(cluster->connection);
    if (r == 0)
        r = cox_thread_start(&cluster->thread, cluster_main, cluster);
    cluster->threaded = r == 0;
    if (r == 0)
        r = cluster_subscribe(cluster, err);
    if (r) {
        cox_cluster_close(cluster);
        return r;
    }
    *ret_cluster = cluster;
    return 0;
}

struct cox_cluster *cox_cluster_close(struct cox_cluster *cluster)
{
    if (!cluster)
        return NULL;
    pthread_mutex_lock(&cluster->lock);
    cluster->stopping = true;
    pthread_cond_signal(&cluster->queued);
    pthread_mutex_unlock(&cluster->lock);
    if (cluster->threaded)
        pthread_join(cluster->thread, NULL);
    natsSubscription_Destroy(cluster->frames);
    natsSubscription_Destroy(cluster->to_all);
    natsSubscription_Destroy(cluster->gone);
    natsConnection_Close(cluster->connection);
    /* Threads of libnats call until then. */
    pthread_mutex_lock(&cluster->lock);
    while (cluster->callers)
        pthread_cond_wait(&cluster->changed, &cluster->lock);
    pthread_mutex_unlock(&cluster->lock);
    natsConnection_Destroy(cluster->connection);
    handled_free(cluster);
    while (cluster->first) {
        struct outgoing *outgoing = cluster->first;
        cluster->first = outgoing->next;
        outgoing_free(outgoing);
    }
    pthread_cond_destroy(&cluster->queued);
    pthread_cond_destroy(&cluster->changed);
    pthread_mutex_destroy(&cluster->lock);
    free(cluster);
    return NULL;
}

bool cox_cluster_identity(struct cox_cluster *cluster, char server_id[64], uint64_t *ret_client_id)
{
    return natsConnection_Status(cluster->connection) == NATS_CONN_STATUS_CONNECTED &&
           natsConnection_GetConnectedServerId(cluster->connection, server_id, 64) == NATS_OK &&
           natsConnection_GetClientID(cluster->connection, ret_client_id) == NATS_OK;
}

size_t cox_cluster_size_max(const struct cox_cluster *cluster)
{
    return cluster->size_max;
}

/* "127.0.0.1" if it is not known. */
static void local_address(struct cox_cluster *cluster, char host[COX_CLUSTER_HOST_SIZE])
{
    char *address = NULL;
    int port, length = 0;
    if (natsConnection_GetLocalIPAndPort(cluster->connection, &address, &port) == NATS_OK)
        length =
            snprintf(host, COX_CLUSTER_HOST_SIZE, strchr(address, ':') ? "[%s]" : "%s", address);
    free(address);
    if (length <= 0 || length >= COX_CLUSTER_HOST_SIZE)
        snprintf(host, COX_CLUSTER_HOST_SIZE, "127.0.0.1");
}

void cox_cluster_listen_address(struct cox_cluster *cluster, const char *wanted,
                                char host[COX_CLUSTER_HOST_SIZE],
                                char listen[COX_CLUSTER_LISTEN_SIZE])
{
    const char *colon = wanted ? strrchr(wanted, ':') : NULL;
    if (!wanted) {
        local_address(cluster, host);
        snprintf(listen, COX_CLUSTER_LISTEN_SIZE, "%s:0", host);
        return;
    }
    snprintf(listen, COX_CLUSTER_LISTEN_SIZE, "%s", wanted);
    snprintf(host, COX_CLUSTER_HOST_SIZE, "%.*s",
             (int)(colon ? colon - wanted : (ptrdiff_t)strlen(wanted)), wanted);
}
