#include "kv_relay.h"

#include "channel/base/thread.h"
#include "channel/handle/handle.h"
#include "channel/memory/pool/kv_blocks.h"

#include <endian.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#define ADDRESS_SIZE 128
#define CLUSTER_SIZE 256
#define SOURCE_COUNT_MAX 512
#define VIEW_COUNT_MAX 16
#define BLOCK_COUNT_MAX 65536
#define REPLY_MS 10000
#define REPLY_BYTES_PER_MS 10000

/* Direct messages, little-endian. FETCH: */
struct fetch {
    uint64_t id;
    uint64_t generation;
    struct cox_handle handle;
    char address[ADDRESS_SIZE];
    uint32_t count;
    uint32_t reserved;
    /* count block numbers, u32 each, follow */
};
/* BLOCKS: */
struct blocks {
    uint64_t id;
    int32_t status;
    uint32_t count;
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

struct cox_kv_relay {
    struct cox_direct *direct;
    char address[ADDRESS_SIZE];
    struct cox_log log;
    bool (*is_rank)(void *context, pid_t pid);
    void *context;

    /* of link and pull */
    struct source *sources[SOURCE_COUNT_MAX];
    uint32_t source_count;

    pthread_mutex_t lock;
    pthread_cond_t arrived;
    /* the reply that pull waits for; bytes NULL: it has not come */
    uint64_t awaited;
    uint8_t *reply;
    size_t reply_size;

    /* of fetches by others */
    pthread_mutex_t view_lock;
    struct view views[VIEW_COUNT_MAX];
    uint32_t view_count;
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
    snprintf(relay->address, sizeof relay->address, "%s", address);
    pthread_mutex_init(&relay->lock, NULL);
    pthread_mutex_init(&relay->view_lock, NULL);
    cox_condition_init(&relay->arrived);
    *ret_relay = relay;
    return 0;
}

static void source_free(struct source *source)
{
    if (source->exporter)
        cox_exporter_put(source->exporter, &source->local);
    cox_exporter_free(source->exporter);
    cox_kv_blocks_free(source->blocks);
    free(source);
}

struct cox_kv_relay *cox_kv_relay_free(struct cox_kv_relay *relay)
{
    if (!relay)
        return NULL;
    for (uint32_t i = 0; i < relay->source_count; i++)
        source_free(relay->sources[i]);
    for (uint32_t i = 0; i < relay->view_count; i++)
        cox_kv_view_free(relay->views[i].view);
    free(relay->reply);
    pthread_cond_destroy(&relay->arrived);
    pthread_mutex_destroy(&relay->lock);
    pthread_mutex_destroy(&relay->view_lock);
    free(relay);
    return NULL;
}

/* ---- links ---- */

static const char *cluster_of(const Coxswain__RemoteInfo *info)
{
    const char *cluster = info->n_host_info ? info->host_info[0]->cluster_id : NULL;
    return cluster ? cluster : "";
}

static struct source *source_find(const struct cox_kv_relay *relay, const char *cluster,
                                  uint32_t rank)
{
    for (uint32_t i = 0; i < relay->source_count; i++)
        if (relay->sources[i]->rank == rank && !strcmp(relay->sources[i]->cluster, cluster))
            return relay->sources[i];
    return NULL;
}

static void sources_remove(struct cox_kv_relay *relay, const char *cluster)
{
    for (uint32_t i = relay->source_count; i-- > 0;)
        if (!strcmp(relay->sources[i]->cluster, cluster)) {
            source_free(relay->sources[i]);
            relay->sources[i] = relay->sources[--relay->source_count];
        }
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
    int r = cox_kv_blocks_new(source->block_count, source->block_size, &source->blocks, err);
    if (r == 0)
        r = cox_exporter_new(&options, &source->exporter, err);
    if (r == 0)
        r = cox_exporter_export(source->exporter, cox_kv_blocks_fd(source->blocks), 0, 0,
                                &source->local, err);
    if (r) {
        source_free(source);
        return r;
    }
    relay->sources[relay->source_count++] = source;
    *ret_source = source;
    return 0;
}

static int link_one(struct cox_kv_relay *relay, Coxswain__RemoteInfo *info, uint32_t rank_first,
                    uint32_t rank_count, const char *control_socket, struct cox_error *err)
{
    const char *cluster = cluster_of(info);
    sources_remove(relay, cluster);
    for (uint32_t rank = rank_first; rank < rank_first + rank_count && rank < info->n_kv_pools;
         rank++) {
        Coxswain__KvPool *pool = info->kv_pools[rank];
        struct source *source = NULL;
        if (!pool->node || !pool->address || same_host(pool->address, relay->address) ||
            pool->blocks.len != sizeof source->remote || !pool->layout)
            continue;
        int r = source_new(relay, cluster, rank, pool, control_socket, &source, err);
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

/* The block numbers of all tables, as a pull has them: i64 each. Returns how many; they are freed by the
 * caller. */
static uint32_t blocks_of(const Coxswain__PullKVRequest__PullKVInfo *info, uint32_t **ret_blocks)
{
    size_t count = 0, at = 0;
    for (size_t t = 0; t < info->n_src_block_tables; t++)
        count += info->src_block_tables[t].len / sizeof(int64_t);
    *ret_blocks = count && count <= BLOCK_COUNT_MAX ? calloc(count, sizeof **ret_blocks) : NULL;
    if (!*ret_blocks)
        return 0;
    for (size_t t = 0; t < info->n_src_block_tables; t++)
        for (size_t i = 0; i < info->src_block_tables[t].len / sizeof(int64_t); i++) {
            int64_t block;
            memcpy(&block, info->src_block_tables[t].data + i * sizeof block, sizeof block);
            (*ret_blocks)[at++] = (uint32_t)(int64_t)le64toh((uint64_t)block);
        }
    return (uint32_t)count;
}

/* Puts the reply in the place of the source's blocks. Returns 0; COX_CORRUPT; the owner's status. */
static int reply_use(struct source *source, const uint32_t *numbers, uint32_t count,
                     uint64_t generation, const uint8_t *bytes, size_t size)
{
    struct blocks head;
    if (size < sizeof head)
        return COX_CORRUPT;
    memcpy(&head, bytes, sizeof head);
    if (head.status)
        return head.status > 0 ? head.status : COX_CORRUPT;
    const uint8_t *statuses = bytes + sizeof head;
    const uint8_t *at = statuses + (size_t)count * sizeof(int32_t);
    if (head.count != count || head.block_size != source->block_size ||
        size < sizeof head + (size_t)count * sizeof(int32_t))
        return COX_CORRUPT;
    size -= sizeof head + (size_t)count * sizeof(int32_t);
    for (uint32_t i = 0; i < count; i++) {
        int32_t status;
        memcpy(&status, statuses + i * sizeof status, sizeof status);
        if (status || numbers[i] >= source->block_count)
            continue;
        if (size < source->block_size)
            return COX_CORRUPT;
        memcpy((uint8_t *)cox_kv_blocks_memory(source->blocks) + numbers[i] * source->block_size,
               at, source->block_size);
        cox_kv_blocks_give(source->blocks, numbers[i],
                           generation == COX_KV_UNUSED ? 1 : generation);
        at += source->block_size;
        size -= source->block_size;
    }
    return 0;
}

static int reply_await(struct cox_kv_relay *relay, uint64_t deadline_ns, uint8_t **ret_bytes,
                       size_t *ret_size)
{
    const struct timespec until = cox_deadline_timespec(deadline_ns);
    pthread_mutex_lock(&relay->lock);
    while (!relay->reply && cox_now_ns() < deadline_ns)
        pthread_cond_timedwait(&relay->arrived, &relay->lock, &until);
    *ret_bytes = relay->reply;
    *ret_size = relay->reply_size;
    relay->reply = NULL;
    relay->awaited = 0;
    pthread_mutex_unlock(&relay->lock);
    return *ret_bytes ? 0 : COX_TIMEOUT;
}

static int source_fetch(struct cox_kv_relay *relay, struct source *source, const uint32_t *numbers,
                        uint32_t count, uint64_t generation, uint64_t deadline_ns,
                        struct cox_error *err)
{
    static _Atomic uint64_t ids;
    struct fetch fetch = {.id = 1 + atomic_fetch_add(&ids, 1),
                          .generation = generation,
                          .handle = source->remote,
                          .count = count};
    char peer[COX_NODE_NAME_MAX + 8];
    uint8_t *bytes = NULL;
    size_t size;
    snprintf(fetch.address, sizeof fetch.address, "%s", relay->address);
    snprintf(peer, sizeof peer, "node-%s", source->node);
    for (uint32_t i = 0; i < count; i++)
        cox_kv_blocks_take(source->blocks, numbers[i]);
    pthread_mutex_lock(&relay->lock);
    relay->awaited = fetch.id;
    pthread_mutex_unlock(&relay->lock);
    const struct iovec parts[] = {
        {.iov_base = &fetch, .iov_len = sizeof fetch},
        {.iov_base = (void *)(uintptr_t)numbers, .iov_len = count * sizeof *numbers}};
    int r = cox_direct_send(relay->direct, peer, source->address, COX_DIRECT_FETCH, parts, 2,
                            deadline_ns, err);
    if (r)
        return r;
    r = reply_await(relay, deadline_ns, &bytes, &size);
    if (r)
        return cox_fail(err, r, "node %s has not sent %" PRIu32 " KV blocks in time", source->node,
                        count);
    r = reply_use(source, numbers, count, generation, bytes, size);
    free(bytes);
    return r ? cox_fail(err, r, "node %s refuses %" PRIu32 " KV blocks: %s", source->node, count,
                        cox_status_text(r))
             : 0;
}

void cox_kv_relay_pull(struct cox_kv_relay *relay, const Coxswain__PullKVRequest *request,
                       uint32_t rank_first, uint32_t rank_count, uint64_t deadline_ns)
{
    for (size_t i = 0; i < request->n_pull_kv_infos; i++) {
        const Coxswain__PullKVRequest__PullKVInfo *info = request->pull_kv_infos[i];
        uint32_t *numbers, count = blocks_of(info, &numbers);
        for (uint32_t rank = rank_first; count && rank < rank_first + rank_count; rank++) {
            struct source *source =
                source_find(relay, info->cluster_id ? info->cluster_id : "", rank);
            struct cox_error why = {0};
            if (source &&
                source_fetch(relay, source, numbers, count,
                             info->has_src_sequence ? (uint64_t)info->src_sequence : COX_KV_UNUSED,
                             deadline_ns, &why))
                cox_log_write(&relay->log, 4, "a pull from the group '%s', rank %" PRIu32 ": %s",
                              source->cluster, rank, why.text);
        }
        free(numbers);
    }
}

/* ---- what others fetch ---- */

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

/* Copies what the view has. NULL: no memory. */
static uint8_t *blocks_copy(const struct cox_kv_view *view, const struct fetch *fetch,
                            const uint8_t *numbers, size_t *ret_size)
{
    const uint64_t block_size = cox_kv_view_size(view);
    const size_t statuses = fetch->count * sizeof(int32_t);
    struct blocks head = {.id = fetch->id, .count = fetch->count, .block_size = block_size};
    uint8_t *bytes = malloc(sizeof head + statuses + fetch->count * block_size);
    if (!bytes)
        return NULL;
    memcpy(bytes, &head, sizeof head);
    uint8_t *at = bytes + sizeof head + statuses;
    for (uint32_t i = 0; i < fetch->count; i++) {
        uint32_t number;
        memcpy(&number, numbers + i * sizeof number, sizeof number);
        const int32_t status = cox_kv_view_copy(view, number, fetch->generation, at, NULL);
        memcpy(bytes + sizeof head + i * sizeof status, &status, sizeof status);
        at += status ? 0 : block_size;
    }
    *ret_size = (size_t)(at - bytes);
    return bytes;
}

static void serve_fetch(struct cox_kv_relay *relay, const char *peer, const uint8_t *bytes,
                        size_t size)
{
    struct fetch fetch;
    struct cox_kv_view *view = NULL;
    struct cox_error why = {0};
    uint8_t *reply = NULL;
    if (size < sizeof fetch)
        return;
    memcpy(&fetch, bytes, sizeof fetch);
    fetch.address[ADDRESS_SIZE - 1] = '\0';
    if (fetch.count > BLOCK_COUNT_MAX || size != sizeof fetch + fetch.count * sizeof(uint32_t))
        return;
    struct blocks refusal = {.id = fetch.id};
    pthread_mutex_lock(&relay->view_lock);
    int r = view_find(relay, &fetch.handle, &view, &why);
    if (r == 0) {
        reply = blocks_copy(view, &fetch, bytes + sizeof fetch, &size);
        r = reply ? 0 : COX_NO_SPACE;
    }
    pthread_mutex_unlock(&relay->view_lock);
    refusal.status = r > 0 ? r : r ? COX_NOT_FOUND : 0;
    const struct iovec part = {.iov_base = reply ? (void *)reply : (void *)&refusal,
                               .iov_len = reply ? size : sizeof refusal};
    struct cox_error lost = {0};
    r = cox_direct_send(relay->direct, peer, fetch.address, COX_DIRECT_BLOCKS, &part, 1,
                        cox_deadline_after_ms(REPLY_MS + part.iov_len / REPLY_BYTES_PER_MS), &lost);
    if (r || refusal.status)
        cox_log_write(&relay->log, 4, "KV blocks for %s: %s", peer, r ? lost.text : why.text);
    free(reply);
}

void cox_kv_relay_take(struct cox_kv_relay *relay, const char *peer, uint32_t kind, uint8_t *bytes,
                       size_t size)
{
    uint64_t id = 0;
    if (kind == COX_DIRECT_FETCH) {
        serve_fetch(relay, peer, bytes, size);
    } else if (size >= sizeof(struct blocks)) {
        memcpy(&id, bytes, sizeof id);
        pthread_mutex_lock(&relay->lock);
        if (relay->awaited == id && !relay->reply) {
            relay->reply = cox_steal_ptr(&bytes);
            relay->reply_size = size;
            pthread_cond_broadcast(&relay->arrived);
        }
        pthread_mutex_unlock(&relay->lock);
    }
    free(bytes);
}
