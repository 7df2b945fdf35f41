#include "pulls.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "channel/base/idioms.h"
#include "channel/base/fault.h"
#include "channel/base/thread.h"
#include <coxswain/kv.h>

/* Interval of the check that the remote process lives: a system call per block would be too slow.
 * And of all checks, while a block is awaited. */
#define LOOK_NS (10 * COX_NSEC_PER_MSEC)

struct cox_pulls {
    pthread_mutex_t lock;
    /* CLOCK_MONOTONIC; signals that no run is active */
    pthread_cond_t out;
    /* under lock; unchanged while a run is active */
    struct cox_cache *cache;
    /* under lock: the active run */
    const struct cox_pull *present;
    /* under lock */
    uint64_t run_count;
    /* Cancels the active run. relaxed; partner: pull_check. The flag carries no other data. */
    _Atomic bool cancelled;
    _Atomic bool closing;
    /* under lock: a ring of ids */
    char *ids[COX_CANCELLED_COUNT_MAX];
    uint32_t id_next;
};

/* One run. */
struct pull_run {
    struct cox_pulls *pulls;
    struct cox_cache *cache;
    struct cox_pull *pull;
    uint64_t looked_ns;
};

/* ---- constructor and destructor ---- */

int cox_pulls_new(struct cox_pulls **ret_pulls)
{
    struct cox_pulls *pulls = calloc(1, sizeof *pulls);
    if (!pulls)
        return -ENOMEM;
    pthread_mutex_init(&pulls->lock, NULL);
    cox_condition_init(&pulls->out);
    *ret_pulls = pulls;
    return 0;
}

struct cox_pulls *cox_pulls_free(struct cox_pulls *pulls)
{
    if (!pulls)
        return NULL;
    COX_ASSERT(!pulls->present);
    for (uint32_t i = 0; i < COX_CANCELLED_COUNT_MAX; i++)
        free(pulls->ids[i]);
    pthread_cond_destroy(&pulls->out);
    pthread_mutex_destroy(&pulls->lock);
    free(pulls);
    return NULL;
}

void cox_pulls_open(struct cox_pulls *pulls, struct cox_cache *cache)
{
    pthread_mutex_lock(&pulls->lock);
    pulls->cache = cache;
    pthread_mutex_unlock(&pulls->lock);
}

int cox_pulls_clear(struct cox_pulls *pulls, uint64_t deadline_ns, struct cox_error *err)
{
    const struct timespec until = cox_deadline_timespec(deadline_ns);
    int r = 0, waited = 0;
    pthread_mutex_lock(&pulls->lock);
    const struct cox_pull *present = pulls->present;
    const uint64_t number = pulls->run_count;
    if (present)
        atomic_store_explicit(&pulls->closing, true, memory_order_relaxed);
    while (pulls->present && pulls->run_count == number && waited == 0)
        waited = pthread_cond_timedwait(&pulls->out, &pulls->lock, &until);
    if (pulls->present && pulls->run_count == number)
        r = cox_fail(err, COX_TIMEOUT, "the pull of request '%.100s' did not end in time",
                     present->request_id);
    pthread_mutex_unlock(&pulls->lock);
    return r;
}

/* ---- cancelled ids ---- */

bool cox_pulls_cancel(struct cox_pulls *pulls, const char *request_id)
{
    bool kept = true;
    pthread_mutex_lock(&pulls->lock);
    if (pulls->present && strcmp(pulls->present->request_id, request_id) == 0) {
        atomic_store_explicit(&pulls->cancelled, true, memory_order_relaxed);
    } else {
        char *id = strlen(request_id) <= COX_REQUEST_ID_SIZE_MAX ? strdup(request_id) : NULL;
        kept = id != NULL;
        if (kept) {
            free(pulls->ids[pulls->id_next]);
            pulls->ids[pulls->id_next] = id;
            pulls->id_next = (pulls->id_next + 1) % COX_CANCELLED_COUNT_MAX;
        }
    }
    pthread_mutex_unlock(&pulls->lock);
    return kept;
}

/* Under the lock. Consumes all entries of this id. */
static bool pulls_was_cancelled(struct cox_pulls *pulls, const char *request_id)
{
    bool was = false;
    for (uint32_t i = 0; i < COX_CANCELLED_COUNT_MAX; i++)
        if (pulls->ids[i] && strcmp(pulls->ids[i], request_id) == 0) {
            free(pulls->ids[i]);
            pulls->ids[i] = NULL;
            was = true;
        }
    return was;
}

/* ---- whether a run must end ---- */

static int over_text(int over, const struct cox_pull *pull, struct cox_error *err)
{
    return over == COX_STALE
               ? cox_fail(err, over, "%s was linked again meanwhile", pull->link->cluster)
               : cox_fail(err, over, "%s was unlinked meanwhile", pull->link->cluster);
}

static int run_check(struct pull_run *run, struct cox_error *err)
{
    const struct cox_pull *pull = run->pull;
    const int over = atomic_load_explicit(&pull->link->over, memory_order_acquire);
    const uint64_t now = cox_now_ns();
    if (over)
        return over_text(over, pull, err);
    if (atomic_load_explicit(&run->pulls->cancelled, memory_order_relaxed))
        return cox_fail(err, COX_ABORTED, "cancelled");
    if (atomic_load_explicit(&run->pulls->closing, memory_order_relaxed))
        return cox_fail(err, COX_ABORTED, "all pulls of this rank were cleared");
    if (pull->cancelled && pull->cancelled(pull->context))
        return cox_fail(err, COX_ABORTED, "the transfer was cancelled, or the rank is pausing");
    if (now >= pull->deadline_ns)
        return cox_fail(err, COX_TIMEOUT, "its deadline has passed");
    if (now >= pull->lease_ns)
        return cox_fail(err, COX_STALE, "the lease of %s on the blocks has expired",
                        pull->link->cluster);
    if (now - run->looked_ns < LOOK_NS)
        return 0;
    run->looked_ns = now;
    return cox_peer_alive(&pull->link->owner)
               ? 0
               : cox_fail(err, COX_PEER_DEAD, "the rank of %s that has the blocks is dead",
                          pull->link->cluster);
}

/* ---- blocks ---- */

static int run_check_pairs(const struct pull_run *run, struct cox_error *err)
{
    const struct cox_pull *pull = run->pull;
    const uint32_t from_count = pull->link->kv.block_count;
    const uint32_t to_count = cox_cache_geometry(run->cache)->block_count;
    _cox_cleanup_(cox_free_ptr) uint8_t *seen = calloc(to_count / 8 + 1, 1);
    if (!seen)
        return cox_fail(err, -ENOMEM, "no memory to check %u blocks", pull->count);
    for (uint32_t i = 0; i < pull->count; i++) {
        const struct cox_pull_pair *pair = &pull->pairs[i];
        if (pair->from >= from_count)
            return cox_fail(err, COX_INVALID, "block %u of %s does not exist; there are %u",
                            pair->from, pull->link->cluster, from_count);
        if (pair->to >= to_count)
            return cox_fail(err, COX_INVALID, "KV block %u does not exist; there are %u", pair->to,
                            to_count);
        if (seen[pair->to / 8] >> pair->to % 8 & 1)
            return cox_fail(err, COX_INVALID, "KV block %u is a destination twice", pair->to);
        seen[pair->to / 8] |= (uint8_t)(1 << pair->to % 8);
    }
    return 0;
}

static int run_copy(struct pull_run *run, const struct cox_pull_pair *pair, struct cox_error *err)
{
    struct cox_pull *pull = run->pull;
    struct cox_error why = {0};
    int r;
    do {
        r = run_check(run, err);
        if (r)
            return r;
        r = cox_kv_view_copy(pull->link->view, pair->from, pull->from_user,
                             cox_deadline_min(pull->deadline_ns, cox_now_ns() + LOOK_NS),
                             cox_cache_block(run->cache, pair->to), &why);
    } while (r == COX_EMPTY);
    if (r)
        return cox_fail(err, r, "%s: %s", pull->link->cluster, why.text);
    cox_fault_point(COX_FAULT_PULL_COPIED);
    pull->copied_bytes += pull->link->kv.layout.block_bytes;
    return 0;
}

/* A block that a step has taken meanwhile no longer contains the copy. */
static int run_give(const struct pull_run *run, struct cox_error *err)
{
    const struct cox_pull *pull = run->pull;
    for (uint32_t i = 0; i < pull->count; i++)
        if (!cox_cache_is_taken(run->cache, pull->pairs[i].to))
            return cox_fail(err, COX_STALE, "a step has written KV block %u meanwhile",
                            pull->pairs[i].to);
    for (uint32_t i = 0; pull->to_user && i < pull->count; i++)
        cox_cache_give(run->cache, pull->pairs[i].to, pull->to_user);
    return 0;
}

static int run_all(struct pull_run *run, struct cox_error *err)
{
    struct cox_pull *pull = run->pull;
    int r = run_check_pairs(run, err);
    const uint64_t begin = cox_now_ns();
    if (r == 0)
        r = run_check(run, err);
    for (uint32_t i = 0; r == 0 && i < pull->count; i++)
        cox_cache_take(run->cache, pull->pairs[i].to);
    for (uint32_t i = 0; r == 0 && i < pull->count; i++)
        r = run_copy(run, &pull->pairs[i], err);
    if (r == 0)
        r = run_give(run, err);
    pull->copy_ns = cox_now_ns() - begin;
    return r;
}

/* ---- entry points ---- */

static int run_enter(struct pull_run *run, struct cox_error *err)
{
    struct cox_pulls *pulls = run->pulls;
    int r = 0;
    pthread_mutex_lock(&pulls->lock);
    COX_ASSERT(!pulls->present);
    if (pulls_was_cancelled(pulls, run->pull->request_id))
        r = cox_fail(err, COX_ABORTED, "cancelled before it began");
    else if (!pulls->cache)
        r = cox_fail(err, COX_STATE, "this rank has no KV cache to pull into");
    if (r == 0) {
        atomic_store_explicit(&pulls->cancelled, false, memory_order_relaxed);
        atomic_store_explicit(&pulls->closing, false, memory_order_relaxed);
        pulls->present = run->pull;
        pulls->run_count++;
        run->cache = pulls->cache;
    }
    pthread_mutex_unlock(&pulls->lock);
    return r;
}

static void run_leave(const struct pull_run *run)
{
    struct cox_pulls *pulls = run->pulls;
    pthread_mutex_lock(&pulls->lock);
    pulls->present = NULL;
    pthread_cond_broadcast(&pulls->out);
    pthread_mutex_unlock(&pulls->lock);
}

int cox_pulls_run(struct cox_pulls *pulls, struct cox_pull *pull, struct cox_error *err)
{
    struct pull_run run = {.pulls = pulls, .pull = pull};
    pull->copied_bytes = pull->copy_ns = 0;
    int r = run_enter(&run, err);
    if (r)
        return r;
    r = run_all(&run, err);
    run_leave(&run);
    return r;
}
