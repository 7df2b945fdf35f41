#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/base/options.h"
#include "channel/handle/handle_internal.h"
#include "channel/memory/host_memory.h"
#include "memory/pool/pool_internal.h"
#include "queue_internal.h"
#include "queue_lock.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SEALS ((unsigned)(F_SEAL_SHRINK | F_SEAL_GROW))

/* ---- geometry ---- */

static uint32_t either(uint32_t wanted, uint32_t standard)
{
    return wanted ? wanted : standard;
}

/* Computes all offsets. Also for numbers from shared memory, so each is checked. */
static int geometry_resolve(const struct cox_queue_options *options,
                            struct cox_queue_geometry *ret_geometry, struct cox_error *err)
{
    const struct {
        const char *name;
        uint32_t value, limit;
    } numbers[] = {
        {"depth", either(options->depth, 16), COX_QUEUE_DEPTH_MAX},
        {"domains", either(options->domain_count_max, 4), COX_DOMAIN_COUNT_MAX},
        {"publishers", either(options->publisher_count_max, 8), COX_QUEUE_ENDPOINT_COUNT_MAX},
        {"subscribers", either(options->subscriber_count_max, 64), COX_QUEUE_ENDPOINT_COUNT_MAX},
        {"pools", either(options->pool_count_max, 16), COX_QUEUE_POOL_COUNT_MAX},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        if (numbers[i].value > numbers[i].limit)
            return cox_fail(err, COX_INVALID, "queue of %" PRIu32 " %s: at most %" PRIu32,
                            numbers[i].value, numbers[i].name, numbers[i].limit);
    const uint32_t depth = numbers[0].value;
    if (depth & (depth - 1))
        return cox_fail(err, COX_INVALID, "queue of depth %" PRIu32 ": not a power of two", depth);
    struct cox_queue_geometry geometry = {
        .depth = depth,
        .domain_count_max = numbers[1].value,
        .publisher_count_max = numbers[2].value,
        .subscriber_count_max = numbers[3].value,
        .pool_count_max = numbers[4].value,
    };
    /* A pool whose processes are idle has at most depth copies to be freed. */
    const uint64_t pending_free = (uint64_t)depth * geometry.pool_count_max;
    geometry.pending_free_count_max = pending_free < COX_QUEUE_PENDING_FREE_COUNT_MAX
                                          ? (uint32_t)pending_free
                                          : COX_QUEUE_PENDING_FREE_COUNT_MAX;
    geometry.publishers = sizeof(struct cox_queue_layout) +
                          geometry.pool_count_max * sizeof(struct cox_queue_layout_pool);
    geometry.subscribers = geometry.publishers +
                           geometry.publisher_count_max * sizeof(struct cox_queue_layout_publisher);
    geometry.pending_frees = geometry.subscribers + geometry.subscriber_count_max *
                                                        sizeof(struct cox_queue_layout_subscriber);
    geometry.rows = geometry.pending_frees +
                    geometry.pending_free_count_max * sizeof(struct cox_queue_layout_pending_free);
    geometry.rows = (geometry.rows + 127) / 128 * 128;
    geometry.row_size = sizeof(struct cox_queue_layout_row) +
                        geometry.domain_count_max * sizeof(struct cox_queue_layout_copy);
    geometry.size = geometry.rows + depth * geometry.row_size;
    *ret_geometry = geometry;
    return 0;
}

/* Checks the expected limits: a queue never grows. */
static int geometry_suffices(const struct cox_queue_geometry *geometry,
                             const struct cox_queue_options *expected, struct cox_error *err)
{
    const struct {
        const char *name;
        uint32_t present, expected;
    } numbers[] = {
        {"messages", geometry->depth, expected->depth},
        {"domains", geometry->domain_count_max, expected->domain_count_max},
        {"publishers", geometry->publisher_count_max, expected->publisher_count_max},
        {"subscribers", geometry->subscriber_count_max, expected->subscriber_count_max},
        {"pools", geometry->pool_count_max, expected->pool_count_max},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        if (numbers[i].expected > numbers[i].present)
            return cox_fail(
                err, COX_UNSUPPORTED,
                "the queue has room for %" PRIu32 " %s, expected %" PRIu32
                ": a queue does not grow while processes are attached; make another one",
                numbers[i].present, numbers[i].name, numbers[i].expected);
    return 0;
}

/* ---- create and attach ---- */

/* Creates the private object. Takes region and fd over in any case. */
static int queue_make(struct cox_region *region, int *fd, const struct cox_queue_geometry *geometry,
                      uint64_t id, struct cox_queue **ret_queue, struct cox_error *err)
{
    struct cox_queue *queue = calloc(1, sizeof *queue);
    uint32_t *counts = calloc(geometry->depth + 1, sizeof *counts);
    int r = queue && counts ? 0 : -ENOMEM;
    if (r)
        cox_fail(err, r, "queue: %s", cox_status_text(r));
    else
        r = cox_queue_identity(&queue->identity, err);
    if (r) {
        free(counts);
        free(queue);
        cox_region_detach(region);
        cox_close_fd(fd);
        return r;
    }
    queue->region = *region;
    queue->layout = region->base;
    queue->id = id;
    queue->geometry = *geometry;
    queue->pid = getpid();
    queue->fd = cox_steal_fd(fd);
    queue->counts = counts;
    queue->drained = UINT64_MAX;
    pthread_mutex_init(&queue->mutex, NULL);
    *ret_queue = queue;
    return 0;
}

/* Initializes the memory, before other processes can attach. */
static int layout_fill(struct cox_queue_layout *layout, const struct cox_queue_geometry *geometry,
                       uint64_t *ret_id, struct cox_error *err)
{
    struct cox_queue_layout_header *header = &layout->header;
    uint64_t id = 0, system = 0;
    int r = cox_pool_make_id("queue: getrandom", &id, err);
    if (r == 0)
        r = cox_handle_system(&system, err);
    if (r)
        return r;
    header->version = COX_QUEUE_VERSION;
    header->abi = COX_QUEUE_ABI;
    header->size = geometry->size;
    header->id = id;
    header->system = system;
    header->depth = geometry->depth;
    header->domain_count_max = geometry->domain_count_max;
    header->publisher_count_max = geometry->publisher_count_max;
    header->subscriber_count_max = geometry->subscriber_count_max;
    header->pool_count_max = geometry->pool_count_max;
    header->pending_free_count_max = geometry->pending_free_count_max;
    /* release: partner is the acquire load of attach. */
    atomic_store_explicit(&header->queue_magic, COX_QUEUE_MAGIC, memory_order_release);
    cox_fault_point(COX_FAULT_QUEUE_FILLED);
    *ret_id = id;
    return 0;
}

int cox_queue_create(const struct cox_queue_options *options, struct cox_queue **ret_queue,
                     struct cox_error *err)
{
    struct cox_queue_options known;
    struct cox_queue_geometry geometry;
    struct cox_region region = {0};
    uint64_t id = 0;
    _cox_cleanup_(cox_close_fd) int fd = -1;
    int r = cox_options_copy(&known, sizeof known, options, "cox_queue_options", err);
    if (r == 0)
        r = geometry_resolve(&known, &geometry, err);
    if (r == 0)
        r = cox_region_create_unnamed(&region, "cox_queue", geometry.size, SEALS, false, &fd, err);
    if (r)
        return r;
    r = layout_fill(region.base, &geometry, &id, err);
    if (r) {
        cox_region_detach(&region);
        return r;
    }
    return queue_make(&region, &fd, &geometry, id, ret_queue, err);
}

/* Copies the header once, and checks the copy. */
static int header_read(const struct cox_region *region, struct cox_queue_geometry *ret_geometry,
                       uint64_t *ret_id, struct cox_error *err)
{
    struct cox_queue_layout *layout = region->base;
    /* acquire: partner is the release store of create. */
    if (atomic_load_explicit(&layout->header.queue_magic, memory_order_acquire) != COX_QUEUE_MAGIC)
        return cox_fail(err, COX_CORRUPT, "the memory is not that of a queue");
    /* volatile: the compiler reads each field exactly once. */
    struct cox_queue_layout_header header;
    const volatile unsigned char *from = (const volatile unsigned char *)&layout->header;
    for (size_t i = 0; i < sizeof header; i++)
        ((unsigned char *)&header)[i] = from[i];
    if (header.version != COX_QUEUE_VERSION || header.abi != COX_QUEUE_ABI)
        return cox_fail(err, COX_VERSION,
                        "queue of version %" PRIu32 ", abi %08" PRIx32 "; expected %u, %08x",
                        header.version, header.abi, COX_QUEUE_VERSION, COX_QUEUE_ABI);
    const struct cox_queue_options options = {
        .size = sizeof(struct cox_queue_options),
        .depth = header.depth,
        .domain_count_max = header.domain_count_max,
        .publisher_count_max = header.publisher_count_max,
        .subscriber_count_max = header.subscriber_count_max,
        .pool_count_max = header.pool_count_max,
    };
    struct cox_queue_geometry geometry;
    int r = geometry_resolve(&options, &geometry, err);
    if (r)
        return r == COX_INVALID ? COX_CORRUPT : r;
    if (header.depth != geometry.depth || header.domain_count_max != geometry.domain_count_max ||
        header.publisher_count_max != geometry.publisher_count_max ||
        header.subscriber_count_max != geometry.subscriber_count_max ||
        header.pool_count_max != geometry.pool_count_max ||
        header.pending_free_count_max != geometry.pending_free_count_max ||
        header.size != geometry.size || region->size < geometry.size || header.id == 0)
        return cox_fail(err, COX_CORRUPT,
                        "queue: its header speaks of %" PRIu64 " bytes, its numbers of %" PRIu64
                        ", there are %" PRIu64,
                        header.size, geometry.size, region->size);
    uint64_t system;
    r = cox_handle_system(&system, err);
    if (r)
        return r;
    if (system != header.system)
        return cox_fail(err, COX_DENIED,
                        "queue: its processes are of another pid or time namespace than this one");
    *ret_geometry = geometry;
    *ret_id = header.id;
    return 0;
}

int cox_queue_attach(int fd, const struct cox_queue_options *expected, struct cox_queue **ret_queue,
                     struct cox_error *err)
{
    struct cox_queue_options known;
    struct cox_queue_geometry geometry;
    struct cox_region region = {0};
    uint64_t id = 0;
    int r = cox_options_copy(&known, sizeof known, expected, "cox_queue_options", err);
    if (r)
        return r;
    _cox_cleanup_(cox_close_fd) int own = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (own < 0)
        return cox_fail(err, -errno, "queue: dup: %s", cox_status_text(-errno));
    /* Memory that could shrink, or is of huge pages, would end this process with SIGBUS. */
    r = cox_host_memory_check_fd(own, sizeof(struct cox_queue_layout), true, err);
    if (r == 0)
        r = cox_region_attach_fd(&region, own, "cox_queue", sizeof(struct cox_queue_layout),
                                 COX_REGION_WRITE, err);
    if (r)
        return r;
    r = header_read(&region, &geometry, &id, err);
    if (r == 0)
        r = geometry_suffices(&geometry, &known, err);
    if (r) {
        cox_region_detach(&region);
        return r;
    }
    return queue_make(&region, &own, &geometry, id, ret_queue, err);
}

struct cox_queue *cox_queue_free(struct cox_queue *queue)
{
    if (!queue)
        return NULL;
    /* acquire: partner is the release by the last freed endpoint. */
    COX_ASSERT(atomic_load_explicit(&queue->endpoint_count, memory_order_acquire) == 0);
    COX_ASSERT(queue->pool_count == 0);
    cox_region_detach(&queue->region);
    cox_close_fd(&queue->fd);
    pthread_mutex_destroy(&queue->mutex);
    free(queue->pools);
    free(queue->counts);
    free(queue);
    return NULL;
}

int cox_queue_fd(const struct cox_queue *queue)
{
    return queue->fd;
}

int cox_queue_export(struct cox_queue *queue, struct cox_exporter *exporter,
                     struct cox_handle *ret_handle, struct cox_error *err)
{
    return cox_exporter_export(exporter, queue->fd, 0, 0, ret_handle, err);
}

int cox_queue_open(const struct cox_handle *handle, const char *socket_path, uint64_t deadline_ns,
                   const struct cox_queue_options *expected, struct cox_queue **ret_queue,
                   struct cox_error *err)
{
    _cox_cleanup_(cox_close_fd) int fd = -1;
    int r = cox_handle_open(handle, socket_path, deadline_ns, &fd, err);
    return r ? r : cox_queue_attach(fd, expected, ret_queue, err);
}

/* ---- under the lock ---- */

int cox_queue_enter_until(struct cox_queue *queue, uint64_t deadline_ns, struct cox_error *err)
{
    bool repair;
    if (queue->pid != getpid())
        return cox_fail(err, COX_STATE, "queue: not in the child of a fork; attach there");
    int r = cox_queue_lock_until(&queue->layout->lock, queue->identity, deadline_ns, &repair, err);
    if (r)
        return r;
    if (COX_QUEUE_LOAD(queue->layout->state.queue_head) > COX_QUEUE_HEAD_MAX) {
        cox_queue_leave(queue);
        return cox_fail(err, COX_CORRUPT, "queue: the number of its last message makes no sense");
    }
    if (repair)
        cox_queue_repair(queue);
    return 0;
}

int cox_queue_enter(struct cox_queue *queue, struct cox_error *err)
{
    return cox_queue_enter_until(queue, COX_DEADLINE_NEVER, err);
}

void cox_queue_leave(struct cox_queue *queue)
{
    cox_queue_unlock(&queue->layout->lock, queue->identity);
}

/* ---- dead processes ---- */

/* Under the lock, clears a word that still names the dead process. Returns whether it did. */
static bool reap(struct cox_queue *queue, _Atomic uint64_t *process, uint64_t seen)
{
    if (cox_queue_enter(queue, NULL))
        return false;
    bool reaped = COX_QUEUE_LOAD(*process) == seen;
    if (reaped) {
        atomic_store_explicit(process, 0, memory_order_relaxed);
        cox_fault_point(COX_FAULT_QUEUE_REAPED);
        cox_queue_recount(queue);
    }
    cox_queue_leave(queue);
    return reaped;
}

/* Caches the last live identity: endpoints of one process are mostly adjacent. */
static bool is_dead(const struct cox_queue *queue, uint64_t identity, uint64_t *last_alive)
{
    if (identity == 0 || identity == queue->identity || identity == *last_alive)
        return false;
    if (!cox_queue_identity_alive(identity))
        return true;
    *last_alive = identity;
    return false;
}

static uint32_t reap_publishers(struct cox_queue *queue)
{
    uint32_t count = 0, end = cox_queue_bound(COX_QUEUE_LOAD(queue->layout->state.publisher_end),
                                              queue->geometry.publisher_count_max);
    uint64_t alive = 0;
    for (uint32_t i = 0; i < end; i++) {
        struct cox_queue_layout_publisher *publisher = cox_queue_publisher_at(queue, i);
        uint64_t seen = COX_QUEUE_LOAD(publisher->publisher_process);
        if (is_dead(queue, seen, &alive) && reap(queue, &publisher->publisher_process, seen))
            count++;
    }
    return count;
}

uint32_t cox_queue_reap_dead(struct cox_queue *queue, bool all)
{
    uint32_t count = all ? reap_publishers(queue) : 0;
    uint32_t end = cox_queue_bound(COX_QUEUE_LOAD(queue->layout->state.subscriber_end),
                                   queue->geometry.subscriber_count_max);
    const uint64_t head = COX_QUEUE_LOAD(queue->layout->state.queue_head);
    uint64_t alive = 0;
    for (uint32_t i = 0; i < end; i++) {
        struct cox_queue_layout_subscriber *subscriber = cox_queue_subscriber_at(queue, i);
        uint64_t seen = COX_QUEUE_LOAD(subscriber->subscriber_process);
        /* A subscriber that took everything keeps no message. */
        if (!all && COX_QUEUE_LOAD(subscriber->subscriber_next) > head)
            continue;
        if (is_dead(queue, seen, &alive) && reap(queue, &subscriber->subscriber_process, seen))
            count++;
    }
    return count;
}

uint32_t cox_queue_sweep(struct cox_queue *queue)
{
    if (queue->pid != getpid())
        return 0;
    /* Takes the lock even if all endpoints are alive: a process may have died with it. */
    if (cox_queue_enter(queue, NULL) == 0)
        cox_queue_leave(queue);
    uint32_t count = cox_queue_reap_dead(queue, true);
    if (cox_queue_enter(queue, NULL) == 0) {
        cox_queue_drain(queue);
        cox_queue_leave(queue);
    }
    cox_queue_pools_sweep(queue);
    return count;
}
