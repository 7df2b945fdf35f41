#include "group_links.h"

#include "channel/base/idioms.h"
#include "channel/base/thread.h"
#include "channel/shm/geometry.h"
#include "coordinator/executor/core.h"
#include "coordinator/executor/requests_internal.h"
#include "proto/executor.pb-c.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define LINK_COUNT_MAX 64
/* The limit of another group's message; far above the size for 128 ranks. */
#define REMOTE_INFO_SIZE_MAX ((size_t)1 << 20)
/* The interval between checks whether ranks have linked. */
#define LOOK_NS (2 * COX_NSEC_PER_MSEC)

typedef Coxswain__RemoteInfo RemoteInfo;
typedef Coxswain__KvLayout KvLayout;
typedef Coxswain__PDLinkRequest LinkRequest;
typedef Coxswain__PDLinkRequest__PDLinkInfo LinkInfo;

struct known {
    /* by name */
    struct known *next;
    RemoteInfo *info;
};

struct cox_group_links {
    struct cox_executor *executor;
    struct cox_log log;
    /* everything below; not held over a call of the executor */
    pthread_mutex_t lock;
    /* on CLOCK_MONOTONIC; an order has ended */
    pthread_cond_t wake;
    /* an order is in progress: only it changes the known links and the role */
    bool busy;
    struct known *known;
    size_t count;
    enum cox_role role;
};

/* ---- words ---- */

const char *cox_role_name(uint32_t role)
{
    static const char *const names[] = {"unknown", "prefill", "decode", "standard"};
    return role < sizeof names / sizeof names[0] ? names[role] : names[0];
}

int cox_role_parse(const char *text, enum cox_role *ret_role, struct cox_error *err)
{
    for (uint32_t role = COX_ROLE_PREFILL; role <= COX_ROLE_STANDARD; role++)
        if (strcmp(text, cox_role_name(role)) == 0) {
            *ret_role = (enum cox_role)role;
            return 0;
        }
    return cox_fail(err, COX_INVALID, "'%.64s' is no role: expected prefill, decode or standard",
                    text);
}

/* ---- constructor and destructor ---- */

static void info_free(RemoteInfo *info)
{
    if (info)
        coxswain__remote_info__free_unpacked(info, NULL);
}

COX_DEFINE_FREEP(RemoteInfo, info_free);

int cox_group_links_new(struct cox_executor *executor, const struct cox_log *log,
                        struct cox_group_links **ret_links, struct cox_error *err)
{
    struct cox_group_links *links = calloc(1, sizeof *links);
    if (!links)
        return cox_fail(err, -ENOMEM, "no memory for the links");
    links->executor = executor;
    links->log = *log;
    links->role = COX_ROLE_STANDARD;
    pthread_mutex_init(&links->lock, NULL);
    cox_condition_init(&links->wake);
    *ret_links = links;
    return 0;
}

static void known_remove(struct cox_group_links *links, struct known **link)
{
    struct known *known = *link;
    *link = known->next;
    links->count--;
    info_free(known->info);
    free(known);
}

struct cox_group_links *cox_group_links_free(struct cox_group_links *links)
{
    if (links) {
        while (links->known)
            known_remove(links, &links->known);
        pthread_cond_destroy(&links->wake);
        pthread_mutex_destroy(&links->lock);
        free(links);
    }
    return NULL;
}

/* ---- what another group says of itself ---- */

static const char *cluster_of(const RemoteInfo *info)
{
    return info->n_host_info == 1 ? info->host_info[0]->cluster_id : NULL;
}

static int number_check(const char *cluster, const char *what, uint32_t rank, uint64_t theirs,
                        uint64_t ours, struct cox_error *err)
{
    return theirs == ours
               ? 0
               : cox_fail(err, COX_INVALID,
                          "the KV cache of the group '%s' has another layout: rank %" PRIu32
                          " has %s %" PRIu64 ", here it is %" PRIu64,
                          cluster, rank, what, theirs, ours);
}

static int model_check(const char *cluster, uint64_t theirs, uint64_t ours, struct cox_error *err)
{
    return theirs == ours
               ? 0
               : cox_fail(
                     err, COX_INVALID,
                     "the group '%s' computes with another model, or other weights: the model's digest is %016" PRIx64
                     " there and %016" PRIx64
                     " here, and keys and values of one are none of the other's (coxswain reload switches a group that runs)",
                     cluster, theirs, ours);
}

static int layout_check(const char *cluster, uint32_t rank, const KvLayout *theirs,
                        const KvLayout *ours, struct cox_error *err)
{
    if (!theirs || !ours)
        return cox_fail(err, COX_INVALID,
                        "the KV cache of rank %" PRIu32 " of the group %s'%s' has no layout", rank,
                        theirs ? "to be linked with " : "", cluster);
    int r = model_check(cluster, theirs->model_digest, ours->model_digest, err);
    if (r)
        return r;
#define CHECK(field, what)                                                                         \
    if ((r = number_check(cluster, what, rank, theirs->field, ours->field, err)))                  \
    return r
    CHECK(rank, "number");
    CHECK(rank_count, "ranks");
    CHECK(layer_count, "layers");
    CHECK(kv_head_first, "first head");
    CHECK(kv_head_count, "heads");
    CHECK(head_dim, "numbers per head");
    CHECK(block_size, "positions per block");
    CHECK(block_bytes, "bytes per block");
    CHECK(element_bytes, "bytes per number");
#undef CHECK
    return 0;
}

static int info_check(const struct cox_group_links *links, const RemoteInfo *info,
                      const RemoteInfo *own, struct cox_error *err)
{
    const char *cluster = cluster_of(info);
    struct cox_error error = {0};
    if (!cluster || !info->has_epoch || cox_name_check(cluster, &error))
        return cox_fail(err, COX_CORRUPT, "what is to be linked has no name or no epoch");
    if (strcmp(cluster, cox_executor_name(links->executor)) == 0)
        return cox_fail(err, COX_INVALID, "the group '%s' cannot be linked with itself", cluster);
    if (info->n_kv_pools != own->n_kv_pools)
        return cox_fail(err, COX_INVALID,
                        "the group '%s' has %zu ranks, this one %zu: only as many can be linked",
                        cluster, info->n_kv_pools, own->n_kv_pools);
    int r = 0;
    for (size_t i = 0; !r && i < info->n_kv_pools; i++)
        r = layout_check(cluster, (uint32_t)i, info->kv_pools[i]->layout, own->kv_pools[i]->layout,
                         err);
    return r;
}

static int own_info(const struct cox_group_links *links, RemoteInfo **ret_own,
                    struct cox_error *err)
{
    _cox_cleanup_(cox_free_ptr) uint8_t *bytes = NULL;
    size_t size;
    int r = cox_executor_remote_info(links->executor, &bytes, &size, err);
    if (r)
        return r;
    *ret_own = coxswain__remote_info__unpack(NULL, size, bytes);
    return *ret_own ? 0 : cox_fail(err, -ENOMEM, "no memory for the links");
}

/* ---- orders ---- */

/* Orders run one at a time: the previous one may wait for room on the channel until its own
 * deadline.
 */
static int order_enter(struct cox_group_links *links, uint64_t deadline_ns, struct cox_error *err)
{
    const struct timespec until = cox_deadline_timespec(deadline_ns);
    int r = 0;
    pthread_mutex_lock(&links->lock);
    while (links->busy && r != ETIMEDOUT)
        r = pthread_cond_timedwait(&links->wake, &links->lock, &until);
    r = links->busy ? COX_TIMEOUT : 0;
    links->busy = true;
    pthread_mutex_unlock(&links->lock);
    return r ? cox_fail(err, r, "another order about links was under way until the deadline") : 0;
}

static void order_leave(struct cox_group_links *links)
{
    pthread_mutex_lock(&links->lock);
    links->busy = false;
    pthread_cond_signal(&links->wake);
    pthread_mutex_unlock(&links->lock);
}

static int info_send(const struct cox_group_links *links, LinkInfo *info, uint64_t deadline_ns,
                     struct cox_error *err)
{
    LinkRequest request = COXSWAIN__PDLINK_REQUEST__INIT;
    request.pd_link_info = &info;
    request.n_pd_link_info = 1;
    return cox_executor_link(links->executor, &request, deadline_ns, err);
}

static int link_send(const struct cox_group_links *links, RemoteInfo *remote, uint64_t deadline_ns,
                     struct cox_error *err)
{
    LinkInfo info = COXSWAIN__PDLINK_REQUEST__PDLINK_INFO__INIT;
    COX_SET(&info, pd_role, (Coxswain__PDRole)links->role);
    COX_SET(&info, link_num, 1);
    info.link_info = &remote;
    info.n_link_info = 1;
    return info_send(links, &info, deadline_ns, err);
}

static int role_send(const struct cox_group_links *links, uint32_t role, uint64_t deadline_ns,
                     struct cox_error *err)
{
    LinkInfo info = COXSWAIN__PDLINK_REQUEST__PDLINK_INFO__INIT;
    info.has_pd_role = info.has_change_role = info.change_role = true;
    info.pd_role = (Coxswain__PDRole)role;
    return info_send(links, &info, deadline_ns, err);
}

/* The place of the group in the list, or where it belongs. */
static struct known **known_find(struct cox_group_links *links, const char *cluster)
{
    struct known **link = &links->known;
    while (*link && strcmp(cluster_of((*link)->info), cluster) < 0)
        link = &(*link)->next;
    return link;
}

static bool is_known(struct cox_group_links *links, const char *cluster)
{
    pthread_mutex_lock(&links->lock);
    const struct known *known = *known_find(links, cluster);
    bool is = known && strcmp(cluster_of(known->info), cluster) == 0;
    pthread_mutex_unlock(&links->lock);
    return is;
}

static void known_put(struct cox_group_links *links, struct known *known)
{
    pthread_mutex_lock(&links->lock);
    struct known **link = known_find(links, cluster_of(known->info));
    if (*link && strcmp(cluster_of((*link)->info), cluster_of(known->info)) == 0)
        known_remove(links, link);
    known->next = *link;
    *link = known;
    links->count++;
    pthread_mutex_unlock(&links->lock);
}

/* Inside an order, which keeps the list as it is. */
static int link_order(struct cox_group_links *links, RemoteInfo **info, uint64_t deadline_ns,
                      struct cox_error *err)
{
    if (links->count >= LINK_COUNT_MAX && !is_known(links, cluster_of(*info)))
        return cox_fail(err, COX_FULL, "%d groups are linked: unlink one first", LINK_COUNT_MAX);
    struct known *known = calloc(1, sizeof *known);
    if (!known)
        return cox_fail(err, -ENOMEM, "no memory for a link");
    int r = link_send(links, *info, deadline_ns, err);
    if (r) {
        free(known);
        return r;
    }
    known->info = cox_steal_ptr(info);
    known_put(links, known);
    return 0;
}

int cox_group_links_link(struct cox_group_links *links, const void *bytes, size_t size,
                         uint64_t deadline_ns, struct cox_error *err)
{
    _cox_cleanup_(info_freep) RemoteInfo *own = NULL;
    if (size > REMOTE_INFO_SIZE_MAX)
        return cox_fail(err, COX_TOO_LARGE, "a RemoteInfo of %zu bytes: at most %zu", size,
                        REMOTE_INFO_SIZE_MAX);
    _cox_cleanup_(info_freep) RemoteInfo *info = coxswain__remote_info__unpack(NULL, size, bytes);
    if (!info)
        return cox_fail(err, COX_CORRUPT, "the bytes are no RemoteInfo");
    int r = own_info(links, &own, err);
    if (!r)
        r = info_check(links, info, own, err);
    if (!r)
        r = order_enter(links, deadline_ns, err);
    if (r)
        return r;
    r = link_order(links, &info, deadline_ns, err);
    order_leave(links);
    return r;
}

int cox_group_links_unlink(struct cox_group_links *links, const char *cluster_id,
                           uint64_t deadline_ns, struct cox_error *err)
{
    RemoteInfo remote = COXSWAIN__REMOTE_INFO__INIT, *remotes = &remote;
    Coxswain__HostInfo host = COXSWAIN__HOST_INFO__INIT, *hosts = &host;
    LinkInfo info = COXSWAIN__PDLINK_REQUEST__PDLINK_INFO__INIT;
    host.cluster_id = (char *)(uintptr_t)cluster_id;
    remote.host_info = &hosts;
    remote.n_host_info = 1;
    COX_SET(&info, unlink_num, 1);
    info.unlink_info = &remotes;
    info.n_unlink_info = 1;
    int r = order_enter(links, deadline_ns, err);
    if (r)
        return r;
    COX_SET(&info, pd_role, (Coxswain__PDRole)links->role);
    r = is_known(links, cluster_id)
            ? info_send(links, &info, deadline_ns, err)
            : cox_fail(err, COX_NOT_FOUND, "the group '%s' is not linked with '%.128s'",
                       cox_executor_name(links->executor), cluster_id);
    if (!r) {
        pthread_mutex_lock(&links->lock);
        known_remove(links, known_find(links, cluster_id));
        pthread_mutex_unlock(&links->lock);
    }
    order_leave(links);
    return r;
}

int cox_group_links_set_role(struct cox_group_links *links, uint32_t role, uint64_t deadline_ns,
                             struct cox_error *err)
{
    if (role < COX_ROLE_PREFILL || role > COX_ROLE_STANDARD)
        return cox_fail(err, COX_INVALID, "no such role: expected 1 to 3");
    int r = order_enter(links, deadline_ns, err);
    if (r)
        return r;
    r = role_send(links, role, deadline_ns, err);
    if (!r) {
        pthread_mutex_lock(&links->lock);
        links->role = (enum cox_role)role;
        pthread_mutex_unlock(&links->lock);
    }
    order_leave(links);
    return r;
}

enum cox_role cox_group_links_role(struct cox_group_links *links)
{
    pthread_mutex_lock(&links->lock);
    enum cox_role role = links->role;
    pthread_mutex_unlock(&links->lock);
    return role;
}

/* ---- how they are ---- */

void cox_group_link_list_free(struct cox_group_link *list, size_t count)
{
    for (size_t i = 0; list && i < count; i++) {
        free(list[i].cluster_id);
        free(list[i].text);
    }
    free(list);
}

int cox_group_links_list(struct cox_group_links *links, struct cox_group_link **ret_list,
                         size_t *ret_count)
{
    size_t count = 0;
    int r = 0;
    pthread_mutex_lock(&links->lock);
    struct cox_group_link *list = calloc(links->count + 1, sizeof *list);
    for (const struct known *known = links->known; list && !r && known; known = known->next) {
        list[count].cluster_id = strdup(cluster_of(known->info));
        list[count].epoch = known->info->epoch;
        r = list[count++].cluster_id ? 0 : -ENOMEM;
    }
    pthread_mutex_unlock(&links->lock);
    if (!list || r) {
        cox_group_link_list_free(list, count);
        return -ENOMEM;
    }
    *ret_list = list;
    *ret_count = count;
    return 0;
}

/* A list with room for `more`. */
static struct cox_group_link *link_of(struct cox_group_link *list, size_t *count, char **name)
{
    for (size_t i = 0; i < *count; i++)
        if (strcmp(list[i].cluster_id, *name) == 0)
            return &list[i];
    list[*count] = (struct cox_group_link){.cluster_id = cox_steal_ptr(name)};
    return &list[(*count)++];
}

static void status_add(struct cox_group_link *list, size_t *count, char **names, size_t name_count,
                       enum cox_link_state state)
{
    for (size_t i = 0; i < name_count; i++)
        link_of(list, count, &names[i])->state = state;
}

static int link_compare(const void *a, const void *b)
{
    return strcmp(((const struct cox_group_link *)a)->cluster_id,
                  ((const struct cox_group_link *)b)->cluster_id);
}

int cox_group_links_status(struct cox_group_links *links, uint64_t deadline_ns,
                           struct cox_group_link **ret_list, size_t *ret_count,
                           struct cox_error *err)
{
    _cox_cleanup_(cox_link_status_deinit) struct cox_link_status status = {0};
    struct cox_group_link *list;
    size_t count;
    int r = cox_executor_link_status(links->executor, deadline_ns, &status, err);
    if (r)
        return r;
    r = cox_group_links_list(links, &list, &count);
    size_t more =
        status.failed_count + status.success_count + status.running_count + status.waiting_count;
    struct cox_group_link *grown = r ? NULL : reallocarray(list, count + more + 1, sizeof *list);
    if (!grown) {
        if (!r)
            cox_group_link_list_free(list, count);
        return cox_fail(err, -ENOMEM, "no memory for the link status");
    }
    list = grown;
    status_add(list, &count, status.waiting, status.waiting_count, COX_LINK_WAITING);
    status_add(list, &count, status.running, status.running_count, COX_LINK_RUNNING);
    status_add(list, &count, status.success, status.success_count, COX_LINK_SUCCESS);
    for (size_t i = 0; i < status.failed_count; i++) {
        struct cox_group_link *link = link_of(list, &count, &status.failed[i].cluster_id);
        link->state = COX_LINK_FAILED;
        link->code = status.failed[i].code;
        if (!link->text)
            link->text = cox_steal_ptr(&status.failed[i].text);
    }
    qsort(list, count, sizeof *list, link_compare);
    *ret_list = list;
    *ret_count = count;
    return 0;
}

/* ---- once more ---- */

/* Waits until no link of this group is waiting or running. */
static int links_await(struct cox_group_links *links, uint64_t deadline_ns, struct cox_error *err)
{
    for (;;) {
        struct cox_group_link *list;
        size_t count;
        bool pending = false;
        int r = cox_group_links_status(links, deadline_ns, &list, &count, err);
        if (r)
            return r;
        for (size_t i = 0; i < count; i++)
            pending = pending || (list[i].epoch && list[i].state <= COX_LINK_RUNNING);
        cox_group_link_list_free(list, count);
        if (!pending)
            return 0;
        if (cox_now_ns() >= deadline_ns)
            return cox_fail(err, COX_TIMEOUT, "ranks have not linked in time");
        nanosleep(&(struct timespec){.tv_nsec = LOOK_NS}, NULL);
    }
}

/* *ret_any: there are links to wait for. */
static int links_tell(struct cox_group_links *links, uint64_t deadline_ns, bool *ret_any,
                      struct cox_error *err)
{
    int r = order_enter(links, deadline_ns, err);
    if (r)
        return r;
    if (links->role != COX_ROLE_STANDARD)
        r = role_send(links, links->role, deadline_ns, err);
    for (const struct known *known = links->known; !r && known; known = known->next)
        r = link_send(links, known->info, deadline_ns, err);
    *ret_any = links->known != NULL;
    order_leave(links);
    return r;
}

void cox_group_links_resend(struct cox_group_links *links, uint64_t deadline_ns)
{
    struct cox_error error = {0};
    bool any = false;
    int r = links_tell(links, deadline_ns, &any, &error);
    if (!r && any)
        r = links_await(links, deadline_ns, &error);
    if (r)
        cox_log_write(&links->log, 4, "the links could not be sent to the ranks again: %s",
                      error.text);
}
