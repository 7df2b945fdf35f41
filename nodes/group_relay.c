#include "group_relay.h"

#include "channel/base/base_internal.h"
#include "channel/base/idioms.h"
#include "channel/base/thread.h"

#include <endian.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* How long the thread blocks before it looks whether the incarnation is over. */
#define LOOK_NS (50 * COX_NSEC_PER_MSEC)
#define SEND_MS 250
/* Messages kept for incarnations to come: how many, their bytes from one node and in all, and how
 * long. Machines get an init within seconds of each other. */
#define EARLY_MAX 4096
#define EARLY_SIZE_MAX_NODE ((size_t)64 << 20)
#define EARLY_SIZE_MAX ((size_t)256 << 20)
#define EARLY_NS (60 * COX_NSEC_PER_SEC)

struct early {
    struct early *next;
    char node[COX_NODE_NAME_MAX + 1];
    uint64_t incarnation;
    uint64_t came_ns;
    uint8_t *bytes;
    size_t size;
};

struct cox_group_relay {
    struct cox_direct *direct;
    char node[COX_NODE_NAME_MAX + 1];
    struct cox_log log;

    /* the mirror, for apply; and the fields below */
    pthread_mutex_t lock;
    struct cox_agent_peer peers[COX_NODE_COUNT_MAX];
    uint32_t peer_count;
    struct cox_group_mirror *mirror;
    uint64_t incarnation;
    struct early *first, **end;
    uint32_t early_count;
    size_t early_size;

    /* collect's thread; ends with its incarnation */
    bool threaded;
    _Atomic bool over;
    /* a machine has come that may not have what was sent before */
    _Atomic bool resend;
    pthread_t thread;
};

/* Takes the first of what `at` points to out of the list. The lock is held, or nobody else is there. */
static void early_drop(struct cox_group_relay *relay, struct early **at)
{
    struct early *early = *at;
    *at = early->next;
    if (!*at)
        relay->end = at;
    relay->early_count--;
    relay->early_size -= early->size;
    free(early->bytes);
    free(early);
}

static void relay_send(struct cox_group_relay *relay, const uint8_t *bytes, size_t size)
{
    struct cox_agent_peer peers[COX_NODE_COUNT_MAX];
    pthread_mutex_lock(&relay->lock);
    const uint32_t count = relay->peer_count;
    memcpy(peers, relay->peers, count * sizeof *peers);
    pthread_mutex_unlock(&relay->lock);
    uint64_t head = htole64(relay->incarnation);
    const struct iovec parts[] = {{.iov_base = &head, .iov_len = sizeof head},
                                  {.iov_base = (void *)(uintptr_t)bytes, .iov_len = size}};
    for (uint32_t i = 0; i < count; i++) {
        struct cox_error why = {0};
        char name[COX_NODE_NAME_MAX + 8];
        snprintf(name, sizeof name, "node-%.*s", COX_NODE_NAME_MAX, peers[i].node);
        if (!peers[i].address[0] || atomic_load(&relay->over))
            continue;
        int r = cox_direct_send(relay->direct, name, peers[i].address, COX_DIRECT_GROUP, parts, 2,
                                cox_deadline_after_ms(SEND_MS), &why);
        /* The node is dead, or soon is: the lead cancels what waits for its ranks. */
        if (r && !atomic_load(&relay->over))
            cox_log_write(&relay->log, 5, "the rank group: %s at %s: %s", name, peers[i].address,
                          why.text);
    }
}

static void *relay_main(void *context)
{
    struct cox_group_relay *relay = context;
    pthread_setname_np(pthread_self(), "cox-node-group");
    uint8_t *buffer = malloc(cox_group_mirror_size_max(relay->mirror));
    COX_ASSERT(buffer);
    while (!atomic_load(&relay->over)) {
        if (atomic_exchange(&relay->resend, false))
            cox_group_mirror_forget(relay->mirror);
        const size_t size = cox_group_mirror_collect(relay->mirror, buffer);
        if (size)
            relay_send(relay, buffer, size);
        else
            cox_group_mirror_wait(relay->mirror, cox_deadline_after_ns(LOOK_NS));
    }
    free(buffer);
    return NULL;
}

void cox_group_relay_pause(struct cox_group_relay *relay)
{
    atomic_store(&relay->over, true);
    if (relay->threaded)
        cox_group_mirror_wake(relay->mirror);
    if (relay->threaded)
        pthread_join(relay->thread, NULL);
    relay->threaded = false;
    pthread_mutex_lock(&relay->lock);
    relay->mirror = cox_group_mirror_close(relay->mirror);
    pthread_mutex_unlock(&relay->lock);
}

int cox_group_relay_new(struct cox_direct *direct, const char *node, const struct cox_log *log,
                        struct cox_group_relay **ret_relay, struct cox_error *err)
{
    struct cox_group_relay *relay = calloc(1, sizeof *relay);
    if (!relay)
        return cox_fail(err, -ENOMEM, "no memory for the rank group");
    relay->direct = direct;
    relay->log = *log;
    snprintf(relay->node, sizeof relay->node, "%s", node);
    pthread_mutex_init(&relay->lock, NULL);
    relay->end = &relay->first;
    *ret_relay = relay;
    return 0;
}

struct cox_group_relay *cox_group_relay_free(struct cox_group_relay *relay)
{
    if (!relay)
        return NULL;
    cox_group_relay_pause(relay);
    while (relay->first)
        early_drop(relay, &relay->first);
    pthread_mutex_destroy(&relay->lock);
    free(relay);
    return NULL;
}

static const struct cox_agent_peer *peer_find(const struct cox_group_relay *relay, const char *node)
{
    for (uint32_t i = 0; i < relay->peer_count; i++)
        if (strcmp(relay->peers[i].node, node) == 0)
            return &relay->peers[i];
    return NULL;
}

/* What is kept: applies what is of this incarnation and of a known machine. The lock is held. */
static void relay_catch_up(struct cox_group_relay *relay)
{
    struct early **at = &relay->first;
    while (*at) {
        struct early *early = *at;
        const struct cox_agent_peer *peer = peer_find(relay, early->node);
        struct cox_error why = {0};
        if (early->incarnation > relay->incarnation ||
            (early->incarnation == relay->incarnation && (!peer || !relay->mirror))) {
            at = &early->next;
            continue;
        }
        if (early->incarnation == relay->incarnation &&
            cox_group_mirror_apply(relay->mirror, peer->rank_first, peer->rank_count, early->bytes,
                                   early->size, &why))
            cox_log_write(&relay->log, 4, "the rank group, from node %s: %s", early->node,
                          why.text);
        early_drop(relay, at);
    }
}

size_t cox_group_relay_expire(struct cox_group_relay *relay, uint64_t now_ns)
{
    pthread_mutex_lock(&relay->lock);
    while (relay->first && now_ns >= relay->first->came_ns + EARLY_NS)
        early_drop(relay, &relay->first);
    const size_t size = relay->early_size;
    pthread_mutex_unlock(&relay->lock);
    return size;
}

void cox_group_relay_set_peers(struct cox_group_relay *relay, const struct cox_agent_peer *peers,
                               uint32_t count)
{
    bool news = false;
    pthread_mutex_lock(&relay->lock);
    for (uint32_t i = 0; i < count; i++) {
        const struct cox_agent_peer *known = peer_find(relay, peers[i].node);
        news = news || (strcmp(peers[i].node, relay->node) != 0 &&
                        (!known || strcmp(known->address, peers[i].address) != 0));
    }
    /* A connection to a node that was away is slow to find out that it is back: a new one is fast. */
    for (uint32_t i = 0; i < relay->peer_count; i++) {
        uint32_t at = 0;
        char name[COX_NODE_NAME_MAX + 8];
        while (at < count && (strcmp(relay->peers[i].node, peers[at].node) != 0 ||
                              relay->peers[i].incarnation != peers[at].incarnation))
            at++;
        snprintf(name, sizeof name, "node-%.*s", COX_NODE_NAME_MAX, relay->peers[i].node);
        if (at == count)
            cox_direct_drop(relay->direct, name);
        news = news || at == count;
    }
    relay->peer_count = 0;
    for (uint32_t i = 0; i < count; i++)
        if (strcmp(peers[i].node, relay->node) != 0)
            relay->peers[relay->peer_count++] = peers[i];
    if (news) {
        relay_catch_up(relay);
        atomic_store(&relay->resend, true);
        if (relay->mirror)
            cox_group_mirror_wake(relay->mirror);
    }
    pthread_mutex_unlock(&relay->lock);
}

int cox_group_relay_begin(struct cox_group_relay *relay,
                          const struct cox_group_mirror_options *options, struct cox_error *err)
{
    struct cox_group_mirror *mirror = NULL;
    cox_group_relay_pause(relay);
    int r = cox_group_mirror_open(options, &mirror, err);
    if (r)
        return r;
    pthread_mutex_lock(&relay->lock);
    relay->mirror = mirror;
    relay->incarnation = options->incarnation;
    relay_catch_up(relay);
    pthread_mutex_unlock(&relay->lock);
    atomic_store(&relay->over, false);
    r = cox_thread_start(&relay->thread, relay_main, relay);
    relay->threaded = r == 0;
    return r ? cox_fail(err, r, "the thread of the rank group: %s", cox_status_text(r)) : 0;
}

/* The lock is held. */
static bool early_has_room(const struct cox_group_relay *relay, const char *node, size_t size)
{
    size_t of_node = size;
    for (const struct early *early = relay->first; early; early = early->next)
        of_node += strcmp(early->node, node) == 0 ? early->size : 0;
    return relay->early_count < EARLY_MAX && of_node <= EARLY_SIZE_MAX_NODE &&
           relay->early_size + size <= EARLY_SIZE_MAX;
}

/* The lock is held. Takes no ownership of bytes. */
static void relay_keep(struct cox_group_relay *relay, const char *node, uint64_t incarnation,
                       const uint8_t *bytes, size_t size)
{
    struct early *early = early_has_room(relay, node, size) ? calloc(1, sizeof *early) : NULL;
    if (!early)
        return;
    early->incarnation = incarnation;
    early->came_ns = cox_now_ns();
    early->size = size;
    early->bytes = malloc(size ? size : 1);
    snprintf(early->node, sizeof early->node, "%s", node);
    if (!early->bytes) {
        free(early);
        return;
    }
    memcpy(early->bytes, bytes, size);
    *relay->end = early;
    relay->end = &early->next;
    relay->early_count++;
    relay->early_size += size;
}

void cox_group_relay_take(struct cox_group_relay *relay, const char *node, uint8_t *bytes,
                          size_t size)
{
    uint64_t incarnation;
    struct cox_error why = {0};
    if (size >= sizeof incarnation) {
        incarnation = cox_le64_get(bytes);
        const uint8_t *rest = bytes + sizeof incarnation;
        size -= sizeof incarnation;
        pthread_mutex_lock(&relay->lock);
        const struct cox_agent_peer *peer = peer_find(relay, node);
        const bool present = relay->mirror && incarnation == relay->incarnation;
        if (present && peer) {
            if (cox_group_mirror_apply(relay->mirror, peer->rank_first, peer->rank_count, rest,
                                       size, &why))
                cox_log_write(&relay->log, 4, "the rank group, from node %s: %s", node, why.text);
        } else if (present || incarnation > relay->incarnation) {
            relay_keep(relay, node, incarnation, rest, size);
        }
        pthread_mutex_unlock(&relay->lock);
    }
    free(bytes);
}
