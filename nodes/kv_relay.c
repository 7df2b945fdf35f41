#include "kv_relay.h"

#include "channel/base/base_internal.h"
#include "channel/base/idioms.h"
#include "channel/base/thread.h"
#include "channel/kv/kv_internal.h"

#include <coxswain/handle.h>
#include <coxswain/kv.h>

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/uio.h>

#define ADDRESS_SIZE 128
#define CLUSTER_SIZE 256
#define SOURCE_COUNT_MAX 512
#define VIEW_COUNT_MAX 16
#define SERVER_COUNT_MAX 32
#define BLOCK_COUNT_MAX COX_KV_FETCH_COUNT_MAX
/* Fetches that wait for a thread, of one process and in all. An agent has one at a time. */
#define ASK_COUNT_MAX 256
#define ASK_COUNT_MAX_PEER 32
/* Of a piece, with one block at least: small enough that it is still in the cache when it is sent, or
 * put in its place. */
#define PIECE_SIZE ((uint64_t)256 << 10)
/* Without a piece for this long, it is tried whether the other agent is there. */
#define LOOK_MS 500
/* Of blocks that were pulled under any user: one that no sequence has. */
#define USER_ANY (COX_KV_EXPECTED - 1)
/* The other agent must have the question by then. */
#define FETCH_MS 5000
#define STOP_LOOK_MS 10
#define REPLY_MS 10000
#define REPLY_BYTES_PER_MS 10000

/* Direct messages, little-endian. FETCH: */
struct fetch {
    uint64_t id;
    uint64_t user;
    struct cox_handle handle;
    char address[ADDRESS_SIZE];
    uint32_t count;
    uint32_t reserved;
    /* count block numbers, u32 each, follow */
};
/* BLOCKS: the answer, in pieces and in order, or its end with a status. */
struct blocks {
    uint64_t id;
    int32_t status;
    /* this piece's place in the blocks that were asked for */
    uint32_t first, count;
    uint32_t reserved;
    uint64_t block_size;
    /* count statuses, i32 each, follow; then the bytes of those whose status is 0 */
};

/* KV blocks of a rank of another machine, and what stands for them here. */
struct source {
    char cluster[CLUSTER_SIZE];
    uint32_t rank;
    struct cox_handle remote;
    char node[COX_NODE_NAME_MAX + 1];
    char address[ADDRESS_SIZE];
    struct cox_kv_blocks *blocks;
    /* of each block: its pages are there */
    bool *reserved;
    uint32_t block_count;
    uint64_t block_size;
    struct cox_exporter *exporter;
    struct cox_handle local;
};

/* A rank's blocks that another machine has fetched from. */
struct view {
    struct cox_handle handle;
    struct cox_kv_view *view;
};

/* A fetch of another agent. */
struct ask {
    struct ask *next;
    char peer[COX_DIRECT_NAME_MAX + 1];
    uint8_t *bytes;
    size_t size;
};

/* The blocks that pull waits for. */
struct fetching {
    /* 0: none */
    uint64_t id;
    struct source *source;
    const uint32_t *numbers;
    /* how many there are, and how many have come */
    uint32_t count, arrived;
    uint64_t user;
    /* of the other agent, or of what it sent */
    int status;
    /* there is no such link any more: pull frees the source */
    bool unlinked;
};

struct cox_kv_relay {
    struct cox_direct *direct;
    char address[ADDRESS_SIZE];
    struct cox_log log;
    bool (*is_rank)(void *context, pid_t pid);
    void *context;

    pthread_mutex_t lock;
    pthread_cond_t arrived;
    /* under the lock; sources are added and removed by link */
    struct source *sources[SOURCE_COUNT_MAX];
    uint32_t source_count;
    struct fetching fetching;
    /* of the request that is expected last */
    bool cancelled;
    /* no pull begins any more */
    bool stopped;
    /* the question of `fetching` is on its way */
    bool sending;
    /* Begins anywhere: blocks for an earlier process at this address, of any group, fit no fetch of
     * this one. */
    uint64_t last_id;

    /* of fetches by others */
    pthread_mutex_t view_lock;
    struct view views[VIEW_COUNT_MAX];
    uint32_t view_count;

    /* which wait for a thread; threads are started when none is idle */
    pthread_mutex_t serve_lock;
    pthread_cond_t asked;
    struct ask *asks, **asks_end;
    uint32_t ask_count;
    pthread_t servers[SERVER_COUNT_MAX];
    uint32_t server_count, idle_count;
    bool ending;
};

int cox_kv_relay_new(struct cox_direct *direct, const char *address, const struct cox_log *log,
                     bool (*is_rank)(void *context, pid_t pid), void *context,
                     struct cox_kv_relay **ret_relay, struct cox_error *err)
{
    struct cox_kv_relay *relay = calloc(1, sizeof *relay);
    if (!relay)
        return cox_fail(err, -ENOMEM, "no memory for pulls between machines");
    relay->direct = direct;
    relay->log = *log;
    relay->is_rank = is_rank;
    relay->context = context;
    if (getrandom(&relay->last_id, sizeof relay->last_id, 0) != (ssize_t)sizeof relay->last_id)
        relay->last_id = cox_now_ns();
    relay->last_id >>= 1; /* never 0 again */
    snprintf(relay->address, sizeof relay->address, "%s", address);
    pthread_mutex_init(&relay->lock, NULL);
    pthread_mutex_init(&relay->view_lock, NULL);
    pthread_mutex_init(&relay->serve_lock, NULL);
    cox_condition_init(&relay->asked);
    relay->asks_end = &relay->asks;
    cox_condition_init(&relay->arrived);
    *ret_relay = relay;
    return 0;
}

/* Nobody waits for this block any longer. */
static void block_give_up(struct source *source, uint32_t block)
{
    if (cox_kv_blocks_user(source->blocks, block) == COX_KV_EXPECTED)
        cox_kv_blocks_take(source->blocks, block);
}

static void source_free(struct source *source)
{
    for (uint32_t b = 0; source->blocks && b < source->block_count; b++)
        block_give_up(source, b);
    if (source->exporter)
        cox_exporter_put(source->exporter, &source->local);
    cox_exporter_free(source->exporter);
    cox_kv_blocks_free(source->blocks);
    free(source->reserved);
    free(source);
}

void cox_kv_relay_end(struct cox_kv_relay *relay)
{
    pthread_mutex_lock(&relay->serve_lock);
    relay->ending = true;
    pthread_cond_broadcast(&relay->asked);
    pthread_mutex_unlock(&relay->serve_lock);
    for (; relay->server_count > 0; relay->server_count--) /* no other is started */
        pthread_join(relay->servers[relay->server_count - 1], NULL);
    while (relay->asks) {
        struct ask *ask = relay->asks;
        relay->asks = ask->next;
        free(ask->bytes);
        free(ask);
    }
    relay->asks_end = &relay->asks;
    relay->ask_count = 0;
}

struct cox_kv_relay *cox_kv_relay_free(struct cox_kv_relay *relay)
{
    if (!relay)
        return NULL;
    cox_kv_relay_end(relay);
    for (uint32_t i = 0; i < relay->source_count; i++)
        source_free(relay->sources[i]);
    for (uint32_t i = 0; i < relay->view_count; i++)
        cox_kv_view_free(relay->views[i].view);
    pthread_cond_destroy(&relay->arrived);
    pthread_mutex_destroy(&relay->lock);
    pthread_mutex_destroy(&relay->view_lock);
    pthread_cond_destroy(&relay->asked);
    pthread_mutex_destroy(&relay->serve_lock);
    free(relay);
    return NULL;
}

/* ---- links ---- */

static const char *cluster_of(const Coxswain__RemoteInfo *info)
{
    const char *cluster = info->n_host_info ? info->host_info[0]->cluster_id : NULL;
    return cluster ? cluster : "";
}

/* With lock. */
static struct source *source_find(const struct cox_kv_relay *relay, const char *cluster,
                                  uint32_t rank)
{
    for (uint32_t i = 0; i < relay->source_count; i++)
        if (relay->sources[i]->rank == rank && !strcmp(relay->sources[i]->cluster, cluster))
            return relay->sources[i];
    return NULL;
}

/* cluster: NULL: of all. */
static void sources_remove(struct cox_kv_relay *relay, const char *cluster)
{
    pthread_mutex_lock(&relay->lock);
    for (uint32_t i = relay->source_count; i-- > 0;) {
        struct source *source = relay->sources[i];
        if (cluster && strcmp(source->cluster, cluster))
            continue;
        relay->sources[i] = relay->sources[--relay->source_count];
        if (source == relay->fetching.source)
            relay->fetching.unlinked = true;
        else
            source_free(source);
    }
    pthread_cond_broadcast(&relay->arrived);
    pthread_mutex_unlock(&relay->lock);
}

void cox_kv_relay_unlink(struct cox_kv_relay *relay)
{
    sources_remove(relay, NULL);
}

/* "HOST" of "HOST:PORT" is the same: the ranks share a machine. */
static bool same_host(const char *a, const char *b)
{
    const char *a_end = strrchr(a, ':'), *b_end = strrchr(b, ':');
    return a_end && b_end && a_end - a == b_end - b && !strncmp(a, b, (size_t)(a_end - a));
}

static int source_new(struct cox_kv_relay *relay, const char *cluster, uint32_t rank,
                      const Coxswain__KvPool *pool, const char *control_socket,
                      struct source **ret_source, struct cox_error *err)
{
    const struct cox_exporter_options options = {.size = sizeof(struct cox_exporter_options),
                                                 .socket_path = control_socket};
    if (relay->source_count == SOURCE_COUNT_MAX)
        return cox_fail(err, COX_FULL, "this node has %d links to ranks of other machines already",
                        SOURCE_COUNT_MAX);
    struct source *source = calloc(1, sizeof *source);
    if (!source)
        return cox_fail(err, -ENOMEM, "no memory for a link");
    snprintf(source->cluster, sizeof source->cluster, "%s", cluster);
    source->rank = rank;
    memcpy(&source->remote, pool->blocks.data, sizeof source->remote);
    snprintf(source->node, sizeof source->node, "%s", pool->node);
    snprintf(source->address, sizeof source->address, "%s", pool->address);
    source->block_count = pool->block_count;
    source->block_size = pool->layout->block_bytes;
    source->reserved = calloc((size_t)source->block_count + 1, sizeof *source->reserved);
    int r = source->reserved ? cox_kv_blocks_new_sparse(source->block_count, source->block_size,
                                                        &source->blocks, err)
                             : cox_fail(err, -ENOMEM, "no memory for a link");
    if (r == 0)
        r = cox_exporter_new(&options, &source->exporter, err);
    if (r == 0)
        r = cox_exporter_export(source->exporter, cox_kv_blocks_info(source->blocks).fd, 0, 0,
                                &source->local, err);
    if (r) {
        source_free(source);
        return r;
    }
    pthread_mutex_lock(&relay->lock);
    relay->sources[relay->source_count++] = source;
    pthread_mutex_unlock(&relay->lock);
    *ret_source = source;
    return 0;
}

/* A pool of another machine that a link can name. */
static bool is_remote(const struct cox_kv_relay *relay, const Coxswain__KvPool *pool)
{
    return pool->node && pool->address && !same_host(pool->address, relay->address) &&
           pool->blocks.len == sizeof(struct cox_handle) && pool->layout;
}

/* Whether the source still stands for this pool. */
static bool source_is_of(const struct source *source, const Coxswain__KvPool *pool)
{
    return source && !memcmp(&source->remote, pool->blocks.data, sizeof source->remote) &&
           !strcmp(source->node, pool->node) && !strcmp(source->address, pool->address) &&
           source->block_count == pool->block_count &&
           source->block_size == pool->layout->block_bytes;
}

/* Whether all of a group's sources are there already: the request has come before, and the ranks had no
 * room for it. */
static bool is_linked(struct cox_kv_relay *relay, const Coxswain__RemoteInfo *info,
                      uint32_t rank_first, uint32_t rank_count)
{
    bool linked = true;
    pthread_mutex_lock(&relay->lock);
    for (uint32_t rank = rank_first; rank < rank_first + rank_count && rank < info->n_kv_pools;
         rank++)
        if (is_remote(relay, info->kv_pools[rank]))
            linked = linked &&
                     source_is_of(source_find(relay, cluster_of(info), rank), info->kv_pools[rank]);
    pthread_mutex_unlock(&relay->lock);
    return linked;
}

static int link_one(struct cox_kv_relay *relay, Coxswain__RemoteInfo *info, uint32_t rank_first,
                    uint32_t rank_count, const char *control_socket, struct cox_error *err)
{
    const char *cluster = cluster_of(info);
    const bool linked = is_linked(relay, info, rank_first, rank_count);
    if (!linked)
        sources_remove(relay, cluster);
    for (uint32_t rank = rank_first; rank < rank_first + rank_count && rank < info->n_kv_pools;
         rank++) {
        Coxswain__KvPool *pool = info->kv_pools[rank];
        if (!is_remote(relay, pool))
            continue;
        struct source *source = linked ? source_find(relay, cluster, rank) : NULL;
        int r = linked ? 0 : source_new(relay, cluster, rank, pool, control_socket, &source, err);
        if (r)
            return r;
        memcpy(pool->blocks.data, &source->local, sizeof source->local);
    }
    return 0;
}

int cox_kv_relay_link(struct cox_kv_relay *relay, Coxswain__PDLinkRequest *request,
                      uint32_t rank_first, uint32_t rank_count, const char *control_socket,
                      struct cox_error *err)
{
    int r = 0;
    for (size_t i = 0; i < request->n_pd_link_info; i++) {
        const Coxswain__PDLinkRequest__PDLinkInfo *info = request->pd_link_info[i];
        for (size_t k = 0; k < info->n_unlink_info; k++)
            sources_remove(relay, cluster_of(info->unlink_info[k]));
        for (size_t k = 0; r == 0 && k < info->n_link_info; k++)
            r = link_one(relay, info->link_info[k], rank_first, rank_count, control_socket, err);
    }
    return r;
}

/* ---- pulls ---- */

static const char *name_of(const Coxswain__PullKVRequest__PullKVInfo *info)
{
    return info->cluster_id ? info->cluster_id : "";
}

static uint32_t block_at(const ProtobufCBinaryData *table, size_t i)
{
    return (uint32_t)cox_le64_get(table->data + i * sizeof(int64_t));
}

static size_t blocks_in(const ProtobufCBinaryData *table)
{
    return table->len / sizeof(int64_t);
}

/* The block numbers of all tables, as a pull has them: i64 each. Returns how many; they are freed by the
 * caller. 0: none, or no memory for them. */
static size_t blocks_of(const Coxswain__PullKVRequest__PullKVInfo *info, uint32_t **ret_blocks)
{
    size_t count = 0, at = 0;
    for (size_t t = 0; t < info->n_src_block_tables; t++)
        count += blocks_in(&info->src_block_tables[t]);
    *ret_blocks = count ? calloc(count, sizeof **ret_blocks) : NULL;
    for (size_t t = 0; *ret_blocks && t < info->n_src_block_tables; t++)
        for (size_t i = 0; i < blocks_in(&info->src_block_tables[t]); i++)
            (*ret_blocks)[at++] = block_at(&info->src_block_tables[t], i);
    return *ret_blocks ? count : 0;
}

/* Two pulls of a request may copy the same block: what has come for one stays for the other, unless the
 * block has another user by now. Returns 0, or COX_NO_SPACE. */
static int block_put(struct source *source, uint32_t block, uint64_t user, const uint8_t *bytes)
{
    const uint64_t now = cox_kv_blocks_user(source->blocks, block);
    if (now == user || (user == USER_ANY && now != COX_KV_UNUSED && now != COX_KV_EXPECTED))
        return 0;
    if (!source->reserved[block]) {
        if (cox_kv_blocks_reserve(source->blocks, block))
            return COX_NO_SPACE;
        source->reserved[block] = true;
    }
    if (now != COX_KV_EXPECTED)
        cox_kv_blocks_take(source->blocks, block);
    memcpy((uint8_t *)cox_kv_blocks_info(source->blocks).memory + block * source->block_size, bytes,
           source->block_size);
    cox_kv_blocks_give(source->blocks, block, user);
    return 0;
}

/* Puts a piece in the place of the source's blocks. Returns 0; COX_CORRUPT; the owner's status. With
 * lock. */
static int piece_use(struct fetching *fetching, const uint8_t *bytes, size_t size)
{
    struct source *source = fetching->source;
    struct blocks head;
    memcpy(&head, bytes, sizeof head);
    if (head.status)
        return head.status > 0 ? head.status : COX_CORRUPT;
    size -= sizeof head;
    if (head.first != fetching->arrived || head.count == 0 ||
        head.count > fetching->count - fetching->arrived || head.block_size != source->block_size ||
        size < head.count * sizeof(int32_t))
        return COX_CORRUPT;
    const uint8_t *statuses = bytes + sizeof head;
    const uint8_t *at = statuses + head.count * sizeof(int32_t);
    size -= head.count * sizeof(int32_t);
    for (uint32_t i = 0; i < head.count; i++) {
        const uint32_t number = fetching->numbers[head.first + i];
        int32_t status;
        memcpy(&status, statuses + i * sizeof status, sizeof status);
        if (status)
            continue;
        if (size < source->block_size)
            return COX_CORRUPT;
        const uint64_t user = fetching->user == COX_KV_UNUSED ? USER_ANY : fetching->user;
        if (number < source->block_count && block_put(source, number, user, at))
            return COX_NO_SPACE;
        at += source->block_size;
        size -= source->block_size;
    }
    fetching->arrived += head.count;
    return 0;
}

static bool fetching_is_over(const struct fetching *fetching)
{
    return fetching->status || fetching->unlinked || fetching->arrived == fetching->count;
}

/* Whether no process listens at this address any more. *fd: a probe whose result was not there the last
 * time, or -1. */
static bool is_gone(const char *address, int *fd)
{
    int r;
    if (*fd < 0) {
        r = cox_direct_probe(address);
        *fd = r < 0 ? -1 : r;
    } else {
        r = cox_direct_probe_result(*fd);
        if (r != -EINPROGRESS)
            cox_close_fd(fd);
    }
    return r == -ECONNREFUSED;
}

/* The other agent sends a piece within this time, or gives up, which is not said. */
static uint64_t silence_ns(const struct source *source)
{
    return (FETCH_MS + REPLY_MS + source->block_size / REPLY_BYTES_PER_MS) * COX_NSEC_PER_MSEC;
}

/* Returns 0; COX_TIMEOUT; COX_CLOSED: unlinked, or cancelled; COX_PEER_DEAD; COX_CORRUPT; the owner's
 * status. */
static int fetching_await(struct cox_kv_relay *relay, uint64_t deadline_ns)
{
    const struct fetching *fetching = &relay->fetching;
    uint64_t heard_ns = cox_now_ns();
    uint32_t arrived = 0;
    bool gone = false;
    int fd = -1;
    pthread_mutex_lock(&relay->lock);
    while (!fetching_is_over(fetching) && !relay->cancelled && !gone &&
           cox_now_ns() < deadline_ns) {
        const uint64_t look_ns = cox_deadline_min(deadline_ns, cox_deadline_after_ms(LOOK_MS));
        const struct timespec until = cox_deadline_timespec(look_ns);
        int r = 0;
        while (!fetching_is_over(fetching) && !relay->cancelled && r == 0)
            r = pthread_cond_timedwait(&relay->arrived, &relay->lock, &until);
        if (fetching->arrived != arrived)
            heard_ns = cox_now_ns();
        else if (r && !fetching->unlinked)
            gone = is_gone(fetching->source->address, &fd);
        if (cox_now_ns() >= heard_ns + silence_ns(fetching->source))
            break;
        arrived = fetching->arrived;
    }
    int r = fetching->status;
    if (r == 0 && fetching->arrived < fetching->count)
        r = fetching->unlinked || relay->cancelled ? COX_CLOSED
            : gone                                 ? COX_PEER_DEAD
                                                   : COX_TIMEOUT;
    pthread_mutex_unlock(&relay->lock);
    cox_close_fd(&fd);
    return r;
}

/* From now on pieces are put in the place of these blocks. Returns whether there is such a link, and
 * somebody waits; then end has to be called. */
static bool fetching_begin(struct cox_kv_relay *relay,
                           const Coxswain__PullKVRequest__PullKVInfo *info, uint32_t rank,
                           const uint32_t *numbers, uint32_t count)
{
    pthread_mutex_lock(&relay->lock);
    struct source *source = relay->cancelled ? NULL : source_find(relay, name_of(info), rank);
    if (source)
        relay->fetching = (struct fetching){
            .id = ++relay->last_id,
            .source = source,
            .numbers = numbers,
            .count = count,
            .user = info->has_src_sequence ? cox_kv_user_of(info->src_sequence) : COX_KV_UNUSED,
        };
    pthread_mutex_unlock(&relay->lock);
    return source != NULL;
}

static void fetching_end(struct cox_kv_relay *relay)
{
    pthread_mutex_lock(&relay->lock);
    struct fetching fetching = relay->fetching;
    relay->fetching = (struct fetching){0};
    pthread_mutex_unlock(&relay->lock);
    if (fetching.unlinked)
        source_free(fetching.source);
}

/* Sends the question. COX_CLOSED: nobody waits. */
static int fetch_send(struct cox_kv_relay *relay, const char *peer, const struct iovec parts[2],
                      uint64_t deadline_ns, struct cox_error *err)
{
    pthread_mutex_lock(&relay->lock);
    relay->sending = !relay->cancelled;
    const bool sends = relay->sending;
    pthread_mutex_unlock(&relay->lock);
    const int r = sends ? cox_direct_send(relay->direct, peer, relay->fetching.source->address,
                                          COX_DIRECT_FETCH, parts, 2, deadline_ns, err)
                        : COX_CLOSED;
    pthread_mutex_lock(&relay->lock);
    relay->sending = false;
    pthread_cond_broadcast(&relay->arrived);
    pthread_mutex_unlock(&relay->lock);
    return r;
}

static int blocks_fetch(struct cox_kv_relay *relay, uint64_t deadline_ns, struct cox_error *err)
{
    const struct fetching *fetching = &relay->fetching; /* what is read here does not change */
    const struct source *source = fetching->source;
    struct fetch fetch = {.id = fetching->id,
                          .user = fetching->user,
                          .handle = source->remote,
                          .count = fetching->count};
    char peer[COX_NODE_NAME_MAX + 8];
    snprintf(fetch.address, sizeof fetch.address, "%s", relay->address);
    snprintf(peer, sizeof peer, "node-%s", source->node);
    const struct iovec parts[] = {{.iov_base = &fetch, .iov_len = sizeof fetch},
                                  {.iov_base = (void *)(uintptr_t)fetching->numbers,
                                   .iov_len = fetching->count * sizeof *fetching->numbers}};
    int r = fetch_send(relay, peer, parts,
                       cox_deadline_min(deadline_ns, cox_deadline_after_ms(FETCH_MS)), err);
    if (r)
        return r;
    r = fetching_await(relay, deadline_ns);
    if (r == COX_TIMEOUT)
        return cox_fail(err, r, "node %s has not sent %" PRIu32 " KV blocks in time", source->node,
                        fetching->count);
    if (r == COX_PEER_DEAD)
        return cox_fail(err, r,
                        "the agent of node %s has died, and has not sent %" PRIu32 " KV blocks",
                        source->node, fetching->count);
    return r ? cox_fail(err, r, "node %s refuses %" PRIu32 " KV blocks: %s", source->node,
                        fetching->count, cox_status_text(r))
             : 0;
}

/* What one rank pulls in one pull. COX_CLOSED is not an error: nobody waits. */
static int pull_one(struct cox_kv_relay *relay, const Coxswain__PullKVRequest__PullKVInfo *info,
                    uint32_t rank, const uint32_t *numbers, size_t count, uint64_t deadline_ns,
                    struct cox_error *err)
{
    int r = 0;
    for (size_t at = 0; r == 0 && at < count; at += BLOCK_COUNT_MAX) {
        const size_t left = count - at;
        if (!fetching_begin(relay, info, rank, numbers + at,
                            left < BLOCK_COUNT_MAX ? (uint32_t)left : BLOCK_COUNT_MAX))
            return 0;
        r = blocks_fetch(relay, deadline_ns, err);
        fetching_end(relay);
    }
    return r == COX_CLOSED ? 0 : r;
}

/* What is done with each block of a request's pulls, under the lock. */
static void blocks_each(struct cox_kv_relay *relay, const Coxswain__PullKVRequest *request,
                        uint32_t rank_first, uint32_t rank_count,
                        void (*what)(struct source *source, uint32_t block))
{
    for (size_t i = 0; i < request->n_pull_kv_infos; i++) {
        const Coxswain__PullKVRequest__PullKVInfo *info = request->pull_kv_infos[i];
        for (uint32_t rank = rank_first; rank < rank_first + rank_count; rank++) {
            struct source *source = source_find(relay, name_of(info), rank);
            for (size_t t = 0; source && t < info->n_src_block_tables; t++)
                for (size_t k = 0; k < blocks_in(&info->src_block_tables[t]); k++)
                    what(source, block_at(&info->src_block_tables[t], k));
        }
    }
}

static void block_expect(struct source *source, uint32_t block)
{
    cox_kv_blocks_expect(source->blocks, block);
}

void cox_kv_relay_expect(struct cox_kv_relay *relay, const Coxswain__PullKVRequest *request,
                         uint32_t rank_first, uint32_t rank_count)
{
    pthread_mutex_lock(&relay->lock);
    relay->cancelled = relay->stopped;
    blocks_each(relay, request, rank_first, rank_count, block_expect);
    pthread_mutex_unlock(&relay->lock);
}

void cox_kv_relay_give_up(struct cox_kv_relay *relay, const Coxswain__PullKVRequest *request,
                          uint32_t rank_first, uint32_t rank_count)
{
    pthread_mutex_lock(&relay->lock);
    blocks_each(relay, request, rank_first, rank_count, block_give_up);
    pthread_mutex_unlock(&relay->lock);
}

void cox_kv_relay_cancel(struct cox_kv_relay *relay)
{
    pthread_mutex_lock(&relay->lock);
    relay->cancelled = true;
    pthread_cond_broadcast(&relay->arrived);
    pthread_mutex_unlock(&relay->lock);
}

void cox_kv_relay_stop(struct cox_kv_relay *relay)
{
    pthread_mutex_lock(&relay->lock);
    relay->stopped = relay->cancelled = true;
    pthread_cond_broadcast(&relay->arrived);
    /* Again and again: a send that has just begun is not under way yet. */
    while (relay->sending) {
        const struct timespec until = cox_deadline_timespec(cox_deadline_after_ms(STOP_LOOK_MS));
        cox_direct_drop_address(relay->direct, relay->fetching.source->address);
        pthread_cond_timedwait(&relay->arrived, &relay->lock, &until);
    }
    pthread_mutex_unlock(&relay->lock);
}

/* 0 in a message: never. */
static uint64_t until(uint64_t deadline_ns, uint64_t time_ns)
{
    return time_ns ? cox_deadline_min(deadline_ns, time_ns) : deadline_ns;
}

void cox_kv_relay_pull(struct cox_kv_relay *relay, const Coxswain__PullKVRequest *request,
                       uint32_t rank_first, uint32_t rank_count, uint64_t deadline_ns)
{
    for (size_t i = 0; i < request->n_pull_kv_infos; i++) {
        const Coxswain__PullKVRequest__PullKVInfo *info = request->pull_kv_infos[i];
        const uint64_t end_ns = until(until(deadline_ns, info->deadline_ns), info->lease_ns);
        uint32_t *numbers;
        const size_t count = blocks_of(info, &numbers);
        for (uint32_t rank = rank_first; rank < rank_first + rank_count; rank++) {
            struct cox_error why = {0};
            if (pull_one(relay, info, rank, numbers, count, end_ns, &why))
                cox_log_write(&relay->log, 4, "a pull from the group '%s', rank %" PRIu32 ": %s",
                              name_of(info), rank, why.text);
        }
        free(numbers);
    }
    cox_kv_relay_give_up(relay, request, rank_first, rank_count); /* what has not come */
}

/* ---- what others fetch ---- */

/* Those of processes that are no ranks any more keep their memory. With view_lock. */
static void views_forget(struct cox_kv_relay *relay)
{
    struct cox_handle_info info;
    for (uint32_t i = relay->view_count; i-- > 0;) {
        if (cox_handle_parse(&relay->views[i].handle, &info, NULL) == 0 &&
            relay->is_rank(relay->context, (pid_t)info.pid))
            continue;
        cox_kv_view_free(relay->views[i].view);
        memmove(relay->views + i, relay->views + i + 1,
                (--relay->view_count - i) * sizeof *relay->views);
    }
}

/* With view_lock. */
static int view_find(struct cox_kv_relay *relay, const struct cox_handle *handle,
                     struct cox_kv_view **ret_view, struct cox_error *err)
{
    const struct cox_importer_options options = {.size = sizeof(struct cox_importer_options)};
    struct cox_importer *importer = NULL;
    struct cox_handle_info info;
    const struct cox_import *import = NULL;
    for (uint32_t i = 0; i < relay->view_count; i++)
        if (!memcmp(&relay->views[i].handle, handle, sizeof *handle)) {
            *ret_view = relay->views[i].view;
            return 0;
        }
    views_forget(relay);
    int r = cox_handle_parse(handle, &info, err);
    if (r == 0 && !relay->is_rank(relay->context, (pid_t)info.pid))
        return cox_fail(err, COX_DENIED, "process %" PRIu32 " is no rank of this node", info.pid);
    if (r == 0)
        r = cox_importer_new(&options, &importer, err);
    if (r == 0)
        r = cox_importer_open(importer, handle, 0, &import, err);
    if (r) {
        cox_importer_free(importer);
        return r;
    }
    if (relay->view_count == VIEW_COUNT_MAX) {
        cox_kv_view_free(relay->views[0].view);
        memmove(relay->views, relay->views + 1, (VIEW_COUNT_MAX - 1) * sizeof *relay->views);
        relay->view_count--;
    }
    struct view *view = &relay->views[relay->view_count];
    r = cox_kv_view_attach(import->fd, &view->view, err);
    cox_importer_free(importer);
    if (r)
        return r;
    view->handle = *handle;
    relay->view_count++;
    *ret_view = view->view;
    return 0;
}

/* One fetch of another agent. */
struct serving {
    struct fetch fetch;
    /* u32 each */
    const uint8_t *numbers;
    uint32_t done;
    /* a piece; owned */
    uint8_t *bytes;
    size_t size;
    uint64_t block_size;
};

/* Copies the next piece. With view_lock. Returns 0, COX_NO_SPACE, or COX_CORRUPT: the rank has changed its
 * blocks' size. */
static int piece_copy(struct serving *serving, const struct cox_kv_view *view)
{
    const struct fetch *fetch = &serving->fetch;
    const uint64_t block_size = cox_kv_view_info(view).block_size;
    const uint32_t left = fetch->count - serving->done;
    uint64_t count = block_size < PIECE_SIZE ? PIECE_SIZE / block_size : 1;
    count = count < left ? count : left;
    struct blocks head = {.id = fetch->id,
                          .first = serving->done,
                          .count = (uint32_t)count,
                          .block_size = block_size};
    if (!serving->bytes) { /* no later piece is larger */
        serving->bytes = malloc(sizeof head + count * (sizeof(int32_t) + block_size));
        serving->block_size = block_size;
    }
    if (!serving->bytes || serving->block_size != block_size)
        return serving->bytes ? COX_CORRUPT : COX_NO_SPACE;
    memcpy(serving->bytes, &head, sizeof head);
    uint8_t *statuses = serving->bytes + sizeof head;
    uint8_t *at = statuses + count * sizeof(int32_t);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t number;
        memcpy(&number, serving->numbers + (serving->done + i) * sizeof number, sizeof number);
        const int32_t status = cox_kv_view_copy(view, number, fetch->user, 0, at, NULL);
        memcpy(statuses + i * sizeof status, &status, sizeof status);
        at += status ? 0 : block_size;
    }
    serving->done += (uint32_t)count;
    serving->size = (size_t)(at - serving->bytes);
    return 0;
}

/* The view is looked for each time: it may have had to make room. */
static int piece_make(struct cox_kv_relay *relay, struct serving *serving, struct cox_error *err)
{
    struct cox_kv_view *view = NULL;
    pthread_mutex_lock(&relay->view_lock);
    int r = view_find(relay, &serving->fetch.handle, &view, err);
    if (r == 0)
        r = piece_copy(serving, view);
    pthread_mutex_unlock(&relay->view_lock);
    return r;
}

static int blocks_send(struct cox_kv_relay *relay, const char *peer, const struct fetch *fetch,
                       const void *bytes, size_t size, struct cox_error *err)
{
    const struct iovec part = {.iov_base = (void *)(uintptr_t)bytes, .iov_len = size};
    return cox_direct_send(relay->direct, peer, fetch->address, COX_DIRECT_BLOCKS, &part, 1,
                           cox_deadline_after_ms(REPLY_MS + size / REPLY_BYTES_PER_MS), err);
}

static void serve_fetch(struct cox_kv_relay *relay, const char *peer, const uint8_t *bytes,
                        size_t size)
{
    struct serving serving = {.numbers = bytes + sizeof serving.fetch};
    struct fetch *fetch = &serving.fetch;
    struct cox_error why = {0}, lost = {0};
    int r = 0, sent = 0;
    if (size < sizeof *fetch)
        return;
    memcpy(fetch, bytes, sizeof *fetch);
    fetch->address[ADDRESS_SIZE - 1] = '\0';
    if (fetch->count > BLOCK_COUNT_MAX || size != sizeof *fetch + fetch->count * sizeof(uint32_t))
        return;
    while (r == 0 && sent == 0 && serving.done < fetch->count) {
        r = piece_make(relay, &serving, &why);
        if (r == 0)
            sent = blocks_send(relay, peer, fetch, serving.bytes, serving.size, &lost);
    }
    if (r) {
        const struct blocks refusal = {.id = fetch->id, .status = r > 0 ? r : COX_NOT_FOUND};
        sent = blocks_send(relay, peer, fetch, &refusal, sizeof refusal, &lost);
    }
    if (r || sent)
        cox_log_write(&relay->log, 4, "KV blocks for %s: %s", peer, sent ? lost.text : why.text);
    free(serving.bytes);
}

static void *serve_main(void *context)
{
    struct cox_kv_relay *relay = context;
    pthread_setname_np(pthread_self(), "cox-kv-serve");
    pthread_mutex_lock(&relay->serve_lock);
    while (!relay->ending) {
        struct ask *ask = relay->asks;
        if (!ask) {
            relay->idle_count++;
            pthread_cond_wait(&relay->asked, &relay->serve_lock);
            relay->idle_count--;
            continue;
        }
        relay->asks = ask->next;
        if (!relay->asks)
            relay->asks_end = &relay->asks;
        relay->ask_count--;
        pthread_mutex_unlock(&relay->serve_lock);
        serve_fetch(relay, ask->peer, ask->bytes, ask->size);
        free(ask->bytes);
        free(ask);
        pthread_mutex_lock(&relay->serve_lock);
    }
    pthread_mutex_unlock(&relay->serve_lock);
    return NULL;
}

/* With serve_lock. */
static bool ask_has_room(const struct cox_kv_relay *relay, const char *peer)
{
    uint32_t of_peer = 0;
    for (const struct ask *ask = relay->asks; ask; ask = ask->next)
        of_peer += strcmp(ask->peer, peer) == 0;
    return relay->ask_count < ASK_COUNT_MAX && of_peer < ASK_COUNT_MAX_PEER;
}

/* Takes bytes. */
static void fetch_take(struct cox_kv_relay *relay, const char *peer, uint8_t *bytes, size_t size)
{
    struct ask *ask = calloc(1, sizeof *ask);
    if (!ask) {
        free(bytes);
        return;
    }
    *ask = (struct ask){.bytes = bytes, .size = size};
    snprintf(ask->peer, sizeof ask->peer, "%s", peer);
    pthread_mutex_lock(&relay->serve_lock);
    if (relay->ask_count >= relay->idle_count && relay->server_count < SERVER_COUNT_MAX &&
        !relay->ending &&
        cox_thread_start(&relay->servers[relay->server_count], serve_main, relay) == 0)
        relay->server_count++;
    const bool taken = relay->server_count > 0 && !relay->ending && ask_has_room(relay, ask->peer);
    if (taken) {
        *relay->asks_end = ask;
        relay->asks_end = &ask->next;
        relay->ask_count++;
        pthread_cond_signal(&relay->asked);
    }
    pthread_mutex_unlock(&relay->serve_lock);
    if (!taken) {
        free(bytes);
        free(ask);
    }
}

static void piece_take(struct cox_kv_relay *relay, const char *peer, const uint8_t *bytes,
                       size_t size)
{
    struct fetching *fetching = &relay->fetching;
    uint64_t id;
    if (size < sizeof(struct blocks))
        return;
    memcpy(&id, bytes, sizeof id);
    pthread_mutex_lock(&relay->lock);
    if (id && id == fetching->id && !strcmp(peer + strlen("node-"), fetching->source->node) &&
        !fetching_is_over(fetching)) {
        fetching->status = piece_use(fetching, bytes, size);
        if (fetching_is_over(fetching))
            pthread_cond_broadcast(&relay->arrived);
    }
    pthread_mutex_unlock(&relay->lock);
}

void cox_kv_relay_take(struct cox_kv_relay *relay, const char *peer, uint32_t kind, uint8_t *bytes,
                       size_t size)
{
    if (kind == COX_DIRECT_FETCH) {
        fetch_take(relay, peer, bytes, size);
        return;
    }
    piece_take(relay, peer, bytes, size);
    free(bytes);
}
