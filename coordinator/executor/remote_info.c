/* remote_info: what other groups need to pull KV blocks from this one, taken from the ranks'
 * replies to init. */

#include "channel/base/idioms.h"
#include "coordinator/transport/transport.h"
#include "proto/executor.pb-c.h"
#include "core.h"
#include "executor_internal.h"
#include "requests_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef Coxswain__ExecuteResponse ExecuteResponse;
typedef Coxswain__KvPool KvPool;

/* Each rank's reply, packed: it is passed on without being read. */
struct cox_kv_caches {
    uint32_t rank_count;
    struct {
        /* NULL: the rank described none */
        uint8_t *bytes;
        size_t size;
    } ranks[];
};

struct cox_kv_caches *cox_kv_caches_free(struct cox_kv_caches *caches)
{
    for (uint32_t rank = 0; caches && rank < caches->rank_count; rank++)
        free(caches->ranks[rank].bytes);
    free(caches);
    return NULL;
}

static const KvPool *pool_of(const struct cox_rank_result *reply)
{
    const ExecuteResponse *response = reply->response;
    return response && response->result_case == COXSWAIN__EXECUTE_RESPONSE__RESULT_INIT_RESULTS &&
                   response->init_results
               ? response->init_results->kv_pool
               : NULL;
}

struct cox_kv_caches *cox_kv_caches_new(const struct cox_completion *completion)
{
    struct cox_kv_caches *caches =
        calloc(1, sizeof *caches + completion->rank_count * sizeof caches->ranks[0]);
    if (!caches)
        return NULL;
    caches->rank_count = completion->rank_count;
    for (uint32_t rank = 0; rank < caches->rank_count; rank++) {
        const KvPool *pool = pool_of(&completion->ranks[rank]);
        if (!pool)
            continue;
        size_t size = coxswain__kv_pool__get_packed_size(pool);
        caches->ranks[rank].bytes = malloc(size + 1);
        if (!caches->ranks[rank].bytes)
            return cox_kv_caches_free(caches);
        caches->ranks[rank].size = coxswain__kv_pool__pack(pool, caches->ranks[rank].bytes);
    }
    return caches;
}

void cox_executor_set_kv_caches(struct cox_executor *executor, struct cox_kv_caches *caches)
{
    pthread_mutex_lock(&executor->recover_lock);
    struct cox_kv_caches *before = executor->kv_caches;
    executor->kv_caches = caches;
    pthread_mutex_unlock(&executor->recover_lock);
    cox_kv_caches_free(before);
}

uint64_t cox_executor_kv_epoch(const struct cox_executor *executor, uint64_t epoch)
{
    /* Epochs of one coordinator are small numbers, so they start at a number derived from the
     * coordinator's identity (splitmix64). */
    uint64_t mixed = executor->started_ns + ((uint64_t)getpid() << 40);
    mixed = (mixed ^ (mixed >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    mixed = (mixed ^ (mixed >> 27)) * UINT64_C(0x94d049bb133111eb);
    /* acquire: partner is the release in renew; a digest that is read after this belongs to this
     * epoch, or to a later one. */
    const uint64_t changes = atomic_load_explicit(&executor->kv_changes, memory_order_acquire);
    return (mixed ^ (mixed >> 31)) + epoch + (changes << 32);
}

void cox_executor_renew_kv(struct cox_executor *executor, uint64_t model_digest)
{
    /* In this order: an epoch with a later digest is one from which nothing can be pulled; the
     * other way round, new keys and values would be taken for old ones. relaxed: the release below
     * publishes it. */
    atomic_store_explicit(&executor->kv_digest, model_digest, memory_order_relaxed);
    atomic_fetch_add_explicit(&executor->kv_changes, 1, memory_order_release);
}

/* The lock is held. Checks that every rank has described a cache. */
static int caches_check(const struct cox_executor *executor, struct cox_error *err)
{
    const struct cox_kv_caches *caches = executor->kv_caches;
    if (!caches)
        return cox_fail(err, COX_STATE, "the group's ranks were not initialized");
    for (uint32_t rank = 0; rank < caches->rank_count; rank++)
        if (!caches->ranks[rank].bytes)
            return cox_fail(
                err, COX_UNSUPPORTED,
                "the workers of the group '%s' tell of no KV cache that others could pull from (rank %" PRIu32
                ")",
                executor->name, rank);
    return 0;
}

/* The pools as messages, of the present model; they are the caller's, also after a failure. The
 * lock is held. */
static int pools_unpack(const struct cox_executor *executor, KvPool **pools)
{
    const struct cox_kv_caches *caches = executor->kv_caches;
    /* relaxed: the epoch was read before, with acquire. */
    const uint64_t digest = atomic_load_explicit(&executor->kv_digest, memory_order_relaxed);
    for (uint32_t rank = 0; rank < caches->rank_count; rank++) {
        pools[rank] =
            coxswain__kv_pool__unpack(NULL, caches->ranks[rank].size, caches->ranks[rank].bytes);
        if (!pools[rank])
            return -ENOMEM;
        if (digest && pools[rank]->layout) {
            COX_SET(pools[rank]->layout, model_digest, digest);
        }
    }
    return 0;
}

/* Says on which machine a rank is that is not on this one. */
static int pool_place(const struct cox_executor *executor, uint32_t rank, KvPool *pool,
                      struct cox_error *err)
{
    const struct cox_transport *transport = executor->remote.transport;
    char node[COX_NODE_NAME_MAX + 1], address[128];
    if (!transport || !transport->place ||
        !transport->place(transport->context, rank, node, sizeof node, address, sizeof address))
        return 0;
    pool->node = strdup(node);
    pool->address = strdup(address);
    return pool->node && pool->address
               ? 0
               : cox_fail(err, -ENOMEM, "no memory for the group's KV caches");
}

int cox_executor_remote_info(struct cox_executor *executor, uint8_t **ret_bytes, size_t *ret_size,
                             struct cox_error *err)
{
    Coxswain__RemoteInfo info = COXSWAIN__REMOTE_INFO__INIT;
    Coxswain__HostInfo host = COXSWAIN__HOST_INFO__INIT, *hosts = &host;
    KvPool *pools[COX_RANK_COUNT_MAX] = {NULL};
    host.cluster_id = executor->name;
    info.host_info = &hosts;
    info.n_host_info = 1;
    info.control_socket = (char *)(uintptr_t)cox_executor_socket(executor);
    /* Read before the caches and their model: with newer caches than the epoch, a pull finds
     * nothing. */
    COX_SET(&info, epoch, cox_executor_kv_epoch(executor, cox_executor_epoch(executor)));
    info.kv_pools = pools;
    pthread_mutex_lock(&executor->recover_lock);
    int r = caches_check(executor, err);
    if (!r && pools_unpack(executor, pools))
        r = cox_fail(err, -ENOMEM, "no memory for the group's KV caches");
    pthread_mutex_unlock(&executor->recover_lock);
    info.n_kv_pools = executor->geometry.rank_count;
    for (uint32_t rank = 0; !r && rank < executor->geometry.rank_count; rank++)
        r = pool_place(executor, rank, pools[rank], err);
    if (!r) {
        size_t size = coxswain__remote_info__get_packed_size(&info);
        uint8_t *bytes = malloc(size + 1);
        if (bytes) {
            *ret_size = coxswain__remote_info__pack(&info, bytes);
            *ret_bytes = bytes;
        } else {
            r = cox_fail(err, -ENOMEM, "no memory for the group's KV caches");
        }
    }
    for (uint32_t rank = 0; rank < COX_RANK_COUNT_MAX; rank++)
        if (pools[rank])
            coxswain__kv_pool__free_unpacked(pools[rank], NULL);
    return r;
}
