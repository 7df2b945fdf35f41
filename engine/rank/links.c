#include "links.h"

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "channel/base/idioms.h"
#include "channel/base/fault.h"
#include <coxswain/handle.h>
#include <coxswain/kv.h>
#include "channel/base/thread.h"

#define ATTACH_MS 5000
#define RECORD_COUNT_MAX (2 * COX_LINK_COUNT_MAX)

_Static_assert(sizeof(struct cox_handle) == sizeof((struct cox_kv_pool *)NULL)->handle,
               "a handle travels as plain bytes");

struct cox_links {
    struct cox_log log;
    pthread_mutex_t lock;
    /* an eventfd that wakes the thread: a link waits, or free was called */
    int news_fd;
    struct cox_link *records[RECORD_COUNT_MAX];
    uint32_t count;
    /* references besides those of the list and the thread */
    uint32_t taken;
    struct cox_kv_layout layout;
    bool has_layout;
    bool ending;
    bool started;
    pthread_t thread;
};

/* ---- one link; with the lock held if it is in the list ---- */

static void link_detach(struct cox_link *link)
{
    if (!link->view)
        return;
    link->view = cox_kv_view_free(link->view);
    cox_peer_close(&link->owner);
    cox_fault_point(COX_FAULT_LINK_DETACHED);
}

/* A failed link keeps its mapping only while a pull reads it. */
static void link_unref(struct cox_link *link)
{
    link->references--;
    if (link->references == 0 || (link->references == 1 && link->state == COX_LINK_FAILED))
        link_detach(link);
    if (link->references == 0)
        free(link);
}

static void link_move(struct cox_link *link, enum cox_link_state to)
{
    COX_ASSERT(cox_link_may_move(link->state, to));
    link->state = to;
}

static void link_fail(struct cox_link *link, int code, const char *text)
{
    link_move(link, COX_LINK_FAILED);
    link->error = (struct cox_error){0};
    cox_fail(&link->error, code, "%s", text);
    if (link->references == 1)
        link_detach(link);
}

static void link_check(struct cox_link *link)
{
    if (link->state == COX_LINK_SUCCESS && !cox_peer_alive(&link->owner))
        link_fail(link, COX_PEER_DEAD, "the remote rank has died: link its group again");
}

/* ---- the list ---- */

static uint32_t links_find(const struct cox_links *links, const char *cluster)
{
    uint32_t i = 0;
    while (i < links->count && strcmp(links->records[i]->cluster, cluster) != 0)
        i++;
    return i;
}

static void links_drop(struct cox_links *links, uint32_t index, int why)
{
    struct cox_link *link = links->records[index];
    atomic_store_explicit(&link->over, why, memory_order_release);
    memmove(&links->records[index], &links->records[index + 1],
            (links->count - index - 1) * sizeof(struct cox_link *));
    links->count--;
    link_unref(link);
}

static uint32_t links_count_live(const struct cox_links *links)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < links->count; i++)
        count += links->records[i]->state != COX_LINK_FAILED;
    return count;
}

static void links_make_room(struct cox_links *links)
{
    uint32_t i = 0;
    while (links->count == RECORD_COUNT_MAX && links->records[i]->state != COX_LINK_FAILED)
        i++;
    if (links->count == RECORD_COUNT_MAX)
        links_drop(links, i, COX_CLOSED);
}

static int links_check_layout(const struct cox_links *links, const struct cox_link *link,
                              struct cox_error *err)
{
    return links->has_layout
               ? cox_kv_layout_check(&link->kv.layout, &links->layout, err)
               : cox_fail(err, COX_STATE, "this rank has no KV cache to pull into: init first");
}

/* ---- the thread ---- */

/* Checks that the attached view matches the request. */
static int link_check_view(const struct cox_link *link, const struct cox_kv_view *view,
                           struct cox_error *err)
{
    const struct cox_kv_info info = cox_kv_view_info(view);
    if (info.block_count != link->kv.block_count || info.block_size != link->kv.layout.block_bytes)
        return cox_fail(err, COX_CORRUPT,
                        "there are %u blocks of %llu bytes, but the link request has %u of %llu",
                        info.block_count, (unsigned long long)info.block_size, link->kv.block_count,
                        (unsigned long long)link->kv.layout.block_bytes);
    return 0;
}

static void free_view(struct cox_kv_view **view)
{
    cox_kv_view_free(*view);
}

static int link_attach(const struct cox_link *link, struct cox_kv_view **ret_view,
                       struct cox_peer *ret_owner, struct cox_error *err)
{
    _cox_cleanup_(free_view) struct cox_kv_view *view = NULL;
    _cox_cleanup_(cox_close_fd) int fd = -1;
    struct cox_handle handle;
    struct cox_handle_info info;
    memcpy(&handle, link->kv.handle, sizeof handle);
    int r = cox_handle_parse(&handle, &info, err);
    if (r == 0)
        r = cox_handle_open(&handle, link->control_socket[0] ? link->control_socket : NULL,
                            cox_deadline_after_ms(ATTACH_MS), &fd, err);
    if (r == 0)
        r = cox_kv_view_attach(fd, &view, err);
    if (r == 0)
        r = link_check_view(link, view, err);
    if (r)
        return r;
    r = cox_peer_open((pid_t)info.pid, info.start, ret_owner);
    if (r)
        return cox_fail(err, r, "process %u, the owner of the blocks: %s", info.pid,
                        cox_status_text(r));
    *ret_view = cox_steal_ptr(&view);
    return 0;
}

static struct cox_link *links_next(struct cox_links *links)
{
    for (uint32_t i = 0; i < links->count; i++)
        if (links->records[i]->state == COX_LINK_WAITING)
            return links->records[i];
    return NULL;
}

/* Called with the lock held; releases it meanwhile. */
static void links_attach(struct cox_links *links, struct cox_link *link)
{
    struct cox_kv_view *view = NULL;
    struct cox_peer owner = COX_PEER_NONE;
    struct cox_error err = {0};
    link_move(link, COX_LINK_RUNNING);
    link->references++;
    int r = links_check_layout(links, link, &err);
    pthread_mutex_unlock(&links->lock);
    if (r == 0) {
        r = link_attach(link, &view, &owner, &err);
        if (r == 0)
            cox_fault_point(COX_FAULT_LINK_ATTACHED);
    }
    pthread_mutex_lock(&links->lock);
    link->view = view;
    link->owner = owner;
    /* The layout may have changed meanwhile. */
    if (r == 0)
        r = links_check_layout(links, link, &err);
    if (r == 0)
        link_move(link, COX_LINK_SUCCESS);
    else
        link_fail(link, r, err.text[0] ? err.text : cox_status_text(r));
    cox_log_write(&links->log, r ? 4 : 6, "link to %s: %s", link->cluster,
                  r ? link->error.text : "attached");
    link_unref(link);
}

static void links_wake(const struct cox_links *links)
{
    const uint64_t one = 1;
    while (write(links->news_fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

/* Called with the lock held; releases it meanwhile. Watches the remote processes, so that memory is
 * unmapped also when no pull notices a death. Closing a pidfd meanwhile is harmless: it ends the
 * wait once, at most. */
static void links_await(struct cox_links *links)
{
    struct pollfd fds[1 + COX_LINK_COUNT_MAX] = {{.fd = links->news_fd, .events = POLLIN}};
    nfds_t count = 1;
    uint64_t news;
    for (uint32_t i = 0; i < links->count; i++) {
        const struct cox_link *link = links->records[i];
        link_check(links->records[i]);
        if (link->state != COX_LINK_SUCCESS || link->owner.pidfd < 0)
            continue;
        COX_ASSERT(count <= COX_LINK_COUNT_MAX); /* no more links than that are not failed */
        fds[count++] = (struct pollfd){.fd = link->owner.pidfd, .events = POLLIN};
    }
    pthread_mutex_unlock(&links->lock);
    poll(fds, count, -1);
    while (read(links->news_fd, &news, sizeof news) < 0 && errno == EINTR)
        ;
    pthread_mutex_lock(&links->lock);
}

static void *links_main(void *argument)
{
    struct cox_links *links = argument;
    pthread_mutex_lock(&links->lock);
    while (!links->ending) {
        struct cox_link *link = links_next(links);
        if (link)
            links_attach(links, link);
        else
            links_await(links);
    }
    pthread_mutex_unlock(&links->lock);
    return NULL;
}

/* ---- constructor and destructor ---- */

int cox_links_new(const struct cox_log *log, struct cox_links **ret_links)
{
    struct cox_links *links = calloc(1, sizeof *links);
    if (!links)
        return -ENOMEM;
    if (log)
        links->log = *log;
    links->news_fd = -1;
    pthread_mutex_init(&links->lock, NULL);
    *ret_links = links;
    return 0;
}

struct cox_links *cox_links_free(struct cox_links *links)
{
    if (!links)
        return NULL;
    pthread_mutex_lock(&links->lock);
    links->ending = true;
    pthread_mutex_unlock(&links->lock);
    if (links->started) {
        links_wake(links);
        pthread_join(links->thread, NULL);
    }
    cox_close_fd(&links->news_fd);
    COX_ASSERT(links->taken == 0);
    while (links->count)
        links_drop(links, links->count - 1, COX_CLOSED);
    pthread_mutex_destroy(&links->lock);
    free(links);
    return NULL;
}

void cox_links_use_layout(struct cox_links *links, const struct cox_kv_layout *layout)
{
    pthread_mutex_lock(&links->lock);
    links->has_layout = layout != NULL;
    if (layout)
        links->layout = *layout;
    for (uint32_t i = 0; layout && i < links->count; i++) {
        struct cox_link *link = links->records[i];
        struct cox_error err = {0};
        if (link->state == COX_LINK_SUCCESS && links_check_layout(links, link, &err))
            link_fail(link, err.code, err.text);
    }
    pthread_mutex_unlock(&links->lock);
}

/* ---- links ---- */

static struct cox_link *link_make(const struct cox_link_target *target)
{
    struct cox_link *link = calloc(1, sizeof *link);
    if (!link)
        return NULL;
    strcpy(link->cluster, target->cluster);
    link->epoch = target->epoch;
    link->owner.pidfd = -1;
    link->references = 1;
    if (!target->kv) {
        link_fail(link, target->error->code, target->error->text);
        return link;
    }
    link->kv = *target->kv;
    if (target->control_socket && strlen(target->control_socket) < sizeof link->control_socket)
        strcpy(link->control_socket, target->control_socket);
    return link;
}

static bool link_is_same(const struct cox_link *link, const struct cox_link_target *target)
{
    return target->kv && link->state != COX_LINK_FAILED && link->epoch == target->epoch &&
           memcmp(link->kv.handle, target->kv->handle, sizeof link->kv.handle) == 0;
}

static int links_start(struct cox_links *links)
{
    if (links->started)
        return 0;
    if (links->news_fd < 0)
        links->news_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int r = links->news_fd < 0 ? -errno : cox_thread_start(&links->thread, links_main, links);
    links->started = r == 0;
    return r;
}

int cox_links_set(struct cox_links *links, const struct cox_link_target *target,
                  struct cox_error *err)
{
    if (!target->cluster || !target->cluster[0] ||
        strlen(target->cluster) > COX_CLUSTER_ID_SIZE_MAX)
        return cox_fail(err, COX_INVALID, "a link needs a cluster id of 1 to %d bytes",
                        COX_CLUSTER_ID_SIZE_MAX);
    struct cox_link *link = link_make(target);
    if (!link)
        return cox_fail(err, -ENOMEM, "no memory for a link to %s", target->cluster);
    pthread_mutex_lock(&links->lock);
    const uint32_t i = links_find(links, target->cluster);
    int r = 0;
    if (i < links->count) {
        link_check(links->records[i]);
        if (link_is_same(links->records[i], target)) {
            pthread_mutex_unlock(&links->lock);
            free(link);
            return 0;
        }
        links_drop(links, i, COX_STALE);
    }
    if (link->state == COX_LINK_WAITING && links_count_live(links) == COX_LINK_COUNT_MAX)
        link_fail(link, COX_FULL, "there are 64 links, the maximum: unlink one");
    if (link->state == COX_LINK_WAITING && (r = links_start(links)) != 0)
        link_fail(link, r, "no thread to attach the link");
    links_make_room(links);
    links->records[links->count++] = link;
    if (link->state == COX_LINK_WAITING)
        links_wake(links);
    pthread_mutex_unlock(&links->lock);
    return 0;
}

int cox_links_remove(struct cox_links *links, const char *cluster)
{
    pthread_mutex_lock(&links->lock);
    const uint32_t i = links_find(links, cluster);
    const bool found = i < links->count;
    if (found)
        links_drop(links, i, COX_CLOSED);
    pthread_mutex_unlock(&links->lock);
    return found ? 0 : COX_NOT_FOUND;
}

static int links_check(struct cox_links *links, uint32_t i, const char *cluster, uint64_t epoch,
                       struct cox_error *err)
{
    if (i == links->count)
        return cox_fail(err, COX_NOT_FOUND, "there is no link to %.255s", cluster);
    struct cox_link *link = links->records[i];
    link_check(link);
    /* A handle that no longer exists means a cache that no longer exists. */
    if (link->state == COX_LINK_FAILED)
        return cox_fail(err, link->error.code == COX_NOT_FOUND ? COX_STALE : link->error.code,
                        "the link to %s has failed: %s", cluster, link->error.text);
    if (link->state != COX_LINK_SUCCESS)
        return cox_fail(err, COX_STATE, "the link to %s is %s", cluster,
                        cox_link_state_name(link->state));
    if (epoch && epoch != link->epoch)
        return cox_fail(err, COX_STALE,
                        "%s is linked in epoch %llu, and the pull is for epoch %llu", cluster,
                        (unsigned long long)link->epoch, (unsigned long long)epoch);
    return 0;
}

int cox_links_take(struct cox_links *links, const char *cluster, uint64_t epoch,
                   struct cox_link **ret_link, struct cox_error *err)
{
    pthread_mutex_lock(&links->lock);
    const uint32_t i = links_find(links, cluster);
    int r = links_check(links, i, cluster, epoch, err);
    if (r == 0) {
        links->taken++;
        links->records[i]->references++;
        *ret_link = links->records[i];
    }
    pthread_mutex_unlock(&links->lock);
    return r;
}

void cox_links_release(struct cox_links *links, struct cox_link *link)
{
    pthread_mutex_lock(&links->lock);
    links->taken--;
    link_unref(link);
    pthread_mutex_unlock(&links->lock);
}

void cox_links_each(struct cox_links *links, void (*fn)(void *context, const struct cox_link *link),
                    void *context)
{
    pthread_mutex_lock(&links->lock);
    for (uint32_t i = 0; i < links->count; i++) {
        link_check(links->records[i]);
        fn(context, links->records[i]);
    }
    pthread_mutex_unlock(&links->lock);
}
