/* lead_transport: what the executor calls: requests, ranks, shared memory, recorders, stacks. */
#include "channel/base/idioms.h"
#include "lead_private.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The end of the group, and what was published before it, must be with the server by then. */
#define FLUSH_MS 500
/* What is left of the time for stacks when a node has gathered them, at most. */
#define STACKS_WAY_NS (100 * COX_NSEC_PER_MSEC)

static uint32_t node_of(const struct cox_nodes *nodes, uint32_t rank)
{
    uint32_t node = 0;
    while (rank >= nodes->links[node].rank_first + nodes->links[node].rank_count)
        node++;
    return node;
}

static int transport_start(void *context, struct cox_executor *executor,
                           const struct cox_transport_host *host, struct cox_error *err)
{
    struct cox_nodes *nodes = context;
    (void)err;
    pthread_mutex_lock(&nodes->delivery);
    nodes->executor = executor;
    nodes->host = host;
    pthread_mutex_unlock(&nodes->delivery);
    pthread_mutex_lock(&nodes->lock);
    nodes->started = true;
    for (uint32_t i = 0; i < nodes->node_count; i++)
        if (nodes->links[i].state == COX_NODE_ABSENT && nodes->hellos[i].agent &&
            !nodes->hellos[i].refusal[0])
            cox_lead_admit(nodes, i);
    pthread_mutex_unlock(&nodes->lock);
    return 0;
}

static uint64_t transport_first_sequence(void *context, enum cox_channel_id channel)
{
    const struct cox_nodes *nodes = context;
    return channel < COX_TWO_WAY_COUNT ? nodes->first_sequence[channel] : 0;
}

static bool transport_continued(void *context)
{
    const struct cox_nodes *nodes = context;
    return nodes->continued;
}

/* The lock is held. */
static int taken_over(const struct cox_nodes *nodes, struct cox_error *err)
{
    return nodes->taken_over[0] ? cox_fail(err, COX_TAKEN, "%s", nodes->taken_over) : 0;
}

static int transport_taken_over(void *context, struct cox_error *err)
{
    struct cox_nodes *nodes = context;
    pthread_mutex_lock(&nodes->lock);
    int r = taken_over(nodes, err);
    pthread_mutex_unlock(&nodes->lock);
    return r;
}

static int transport_open(void *context, uint32_t rank, uint32_t incarnation, struct cox_error *err)
{
    struct cox_nodes *nodes = context;
    pthread_mutex_lock(&nodes->lock);
    int r = taken_over(nodes, err);
    struct cox_lead_link *link = &nodes->links[node_of(nodes, rank)];
    if (r == 0)
        cox_lead_link_want(link, rank, incarnation);
    const bool absent = r == 0 && link->state == COX_NODE_ABSENT && rank == link->rank_first;
    pthread_mutex_unlock(&nodes->lock);
    if (absent)
        cox_log_write(&nodes->options.log, 4,
                      "rank %" PRIu32 " waits for node %s: run there: coxswain node --name %s "
                      "--node %s --cluster FILE, with the servers %.100s",
                      rank, link->node, nodes->group, link->node, nodes->url);
    return r;
}

static void transport_kill(void *context, uint32_t rank)
{
    struct cox_nodes *nodes = context;
    pthread_mutex_lock(&nodes->lock);
    cox_lead_link_kill(&nodes->links[node_of(nodes, rank)], rank);
    pthread_mutex_unlock(&nodes->lock);
}

static void transport_publish(void *context, const struct cox_transport_request *request)
{
    struct cox_nodes *nodes = context;
    /* What is too large for NATS is copied once, for all nodes and however often it is sent. If there is
     * no memory for that, each link has a copy. */
    struct cox_large_request *large =
        request->size > COX_DIRECT_SMALL_SIZE ? cox_large_request_new(request->size) : NULL;
    const uint64_t now_ns = cox_now_ns();
    pthread_mutex_lock(&nodes->lock);
    memset(nodes->gathered, 0, nodes->node_count * sizeof *nodes->gathered);
    nodes->gathering = true;
    for (uint32_t i = 0; i < nodes->node_count; i++)
        cox_lead_link_publish(&nodes->links[i], request, large, now_ns);
    nodes->gathering = false;
    cox_lead_send_gathered(nodes);
    pthread_mutex_unlock(&nodes->lock);
    /* It takes time: without the lock, and while the connections send what is there. */
    if (large)
        cox_large_request_fill(large, request->bytes);
    cox_large_request_unref(large);
}

static void transport_cancel_steps(void *context, enum cox_channel_id channel, uint64_t through)
{
    struct cox_nodes *nodes = context;
    const uint64_t now_ns = cox_now_ns();
    pthread_mutex_lock(&nodes->lock);
    for (uint32_t i = 0; i < nodes->node_count; i++) {
        cox_lead_link_cancel(&nodes->links[i], channel, through);
        cox_lead_link_tick(&nodes->links[i],
                           now_ns); /* ranks wait in the step: not at the next beat */
    }
    pthread_mutex_unlock(&nodes->lock);
}

static void transport_ended(void *context, enum cox_channel_id channel, uint64_t through)
{
    struct cox_nodes *nodes = context;
    const uint64_t now_ns = cox_now_ns();
    pthread_mutex_lock(&nodes->lock);
    for (uint32_t i = 0; i < nodes->node_count; i++) {
        cox_lead_link_end(&nodes->links[i], channel, through);
        cox_lead_link_tick(&nodes->links[i], now_ns);
    }
    pthread_mutex_unlock(&nodes->lock);
}

static bool transport_place(void *context, uint32_t rank, char *node, size_t node_size,
                            char *address, size_t address_size)
{
    struct cox_nodes *nodes = context;
    pthread_mutex_lock(&nodes->lock);
    const struct cox_lead_link *link = &nodes->links[node_of(nodes, rank)];
    snprintf(node, node_size, "%s", link->node);
    snprintf(address, address_size, "%s", link->address);
    pthread_mutex_unlock(&nodes->lock);
    return address[0] != '\0';
}

static int transport_share(void *context, const void *handle, int fd, uint64_t size,
                           uint64_t digest, struct cox_error *err)
{
    struct cox_nodes *nodes = context;
    struct cox_image image = {.fd = fcntl(fd, F_DUPFD_CLOEXEC, 3), .size = size, .digest = digest};
    if (image.fd < 0)
        return cox_fail(err, -errno, "dup: %s", cox_status_text(-errno));
    memcpy(image.handle.bytes, handle, sizeof image.handle.bytes);
    pthread_mutex_lock(&nodes->lock);
    const bool room = nodes->images.count < COX_IMAGE_COUNT_MAX;
    if (room)
        nodes->images.images[nodes->images.count++] = image;
    for (uint32_t i = 0; room && i < nodes->node_count; i++)
        if (nodes->links[i].state != COX_NODE_ABSENT)
            cox_lead_image_send(nodes, i, &image);
    pthread_mutex_unlock(&nodes->lock);
    if (!room)
        cox_close_fd(&image.fd);
    return room ? 0
                : cox_fail(err, COX_FULL, "%d images are shared with the nodes already",
                           COX_IMAGE_COUNT_MAX);
}

static void transport_unshare(void *context, const void *handle)
{
    struct cox_nodes *nodes = context;
    pthread_mutex_lock(&nodes->lock);
    for (uint32_t i = 0; i < nodes->images.count; i++) {
        struct cox_image *image = &nodes->images.images[i];
        if (memcmp(&image->handle, handle, sizeof image->handle) != 0)
            continue;
        for (uint32_t node = 0; node < nodes->node_count; node++) {
            uint8_t *bytes = malloc(sizeof image->handle);
            if (bytes)
                memcpy(bytes, handle, sizeof image->handle);
            if (bytes && nodes->links[node].state != COX_NODE_ABSENT)
                cox_lead_send_large(nodes, node, COX_DIRECT_DROP_IMAGE, bytes, sizeof image->handle,
                                    -1, 0);
            else
                free(bytes);
        }
        cox_close_fd(&image->fd);
        *image = nodes->images.images[--nodes->images.count];
        break;
    }
    pthread_mutex_unlock(&nodes->lock);
}

static bool transport_trouble(void *context, uint32_t rank, char *buffer, size_t buffer_size)
{
    struct cox_nodes *nodes = context;
    pthread_mutex_lock(&nodes->lock);
    const bool said = cox_lead_link_trouble(&nodes->links[node_of(nodes, rank)], cox_now_ns(),
                                            buffer, buffer_size);
    pthread_mutex_unlock(&nodes->lock);
    return said;
}

static void transport_process(void *context, uint32_t rank,
                              struct cox_transport_process *ret_process)
{
    struct cox_nodes *nodes = context;
    pthread_mutex_lock(&nodes->lock);
    const struct cox_lead_link *link = &nodes->links[node_of(nodes, rank)];
    const struct cox_lead_rank *is = &link->ranks[rank - link->rank_first];
    *ret_process = (struct cox_transport_process){
        .stopped = is->stopped, .cpu_ns = is->cpu_ns, .resident_bytes = is->resident_bytes};
    pthread_mutex_unlock(&nodes->lock);
}

static void recorder_ask(struct cox_nodes *nodes, const struct cox_recorder_fetch *fetch,
                         const struct cox_lead_link *link)
{
    struct cox_frame head = {.kind = COX_FRAME_RECORDER_ASK,
                             .epoch = nodes->epoch,
                             .incarnation = link->incarnation,
                             .sequence = fetch->number,
                             .sent_ns = cox_now_ns()};
    uint8_t *bytes = malloc(COX_FRAME_HEAD_SIZE);
    if (!bytes)
        return; /* as if it were lost */
    cox_rank_set_add(&head.asked, fetch->rank);
    cox_frame_pack_head(&head, bytes);
    cox_lead_send_to(nodes, link->index, bytes, COX_FRAME_HEAD_SIZE);
}

static int transport_recorder(void *context, uint32_t rank, void *copy, uint64_t deadline_ns,
                              struct cox_error *err)
{
    struct cox_nodes *nodes = context;
    struct cox_recorder_fetch fetch = {.rank = rank, .copy = copy};
    char trouble[256] = "";
    const uint64_t begin_ns = cox_now_ns();
    uint64_t now_ns = begin_ns;
    pthread_mutex_lock(&nodes->lock);
    const struct cox_lead_link *link = &nodes->links[node_of(nodes, rank)];
    bool silent = cox_lead_link_trouble(link, begin_ns, trouble, sizeof trouble);
    cox_recorder_fetch_begin(&nodes->fetches, &fetch);
    if (!silent)
        recorder_ask(nodes, &fetch, link);
    /* Nothing wakes this when a node becomes suspect: it is looked at. */
    while (!fetch.done && !silent && !nodes->stopping && now_ns < deadline_ns) {
        const uint64_t until_ns =
            now_ns + COX_LEAD_TICK_NS < deadline_ns ? now_ns + COX_LEAD_TICK_NS : deadline_ns;
        const struct timespec until = cox_deadline_timespec(until_ns);
        pthread_cond_timedwait(&nodes->fetched, &nodes->lock, &until);
        now_ns = cox_now_ns();
        silent = cox_lead_link_trouble(link, now_ns, trouble, sizeof trouble);
    }
    cox_recorder_fetch_end(&nodes->fetches, &fetch);
    const bool stopping = nodes->stopping;
    pthread_mutex_unlock(&nodes->lock);
    if (fetch.done && fetch.err.code)
        return cox_fail(err, fetch.status, "%s", fetch.err.text);
    if (fetch.done)
        return fetch.status;
    if (silent)
        return cox_fail(err, COX_PEER_DEAD, "%s", trouble);
    return stopping
               ? cox_fail(err, COX_CLOSED, "the group ends")
               : cox_fail(err, COX_TIMEOUT,
                          "node %s has not sent its recorder in %.1f s: see the log of its agent",
                          link->node, (double)(now_ns - begin_ns) / 1e9);
}

/* ---- stacks ---- */

/* The lock is held. */
static void stacks_ask(struct cox_nodes *nodes, const struct cox_lead_link *link,
                       const struct cox_rank_set *asked, uint64_t now_ns, uint64_t deadline_ns)
{
    struct cox_rank_set there = {{0}};
    for (uint32_t rank = link->rank_first; rank < link->rank_first + link->rank_count; rank++)
        if (cox_rank_set_has(asked, rank))
            cox_rank_set_add(&there, rank);
    if (!(there.words[0] | there.words[1]))
        return;
    /* What comes later than the lead waits would be in vain: their way takes time. */
    const uint64_t left_ns = deadline_ns > now_ns ? deadline_ns - now_ns : 0;
    const uint64_t way_ns = left_ns / 4 < STACKS_WAY_NS ? left_ns / 4 : STACKS_WAY_NS;
    const struct cox_frame head = {.kind = COX_FRAME_STACKS_ASK,
                                   .epoch = nodes->epoch,
                                   .incarnation = link->incarnation,
                                   .sequence = nodes->stacks.number,
                                   .deadline_ns = deadline_ns - way_ns,
                                   .sent_ns = now_ns,
                                   .asked = there};
    uint8_t *bytes = malloc(COX_FRAME_HEAD_SIZE);
    if (!bytes)
        return; /* as if it were lost */
    cox_frame_pack_head(&head, bytes);
    cox_lead_send_to(nodes, link->index, bytes, COX_FRAME_HEAD_SIZE);
}

/* Asks each node once, as soon as it is alive. One that is suspect may answer again in time; those
 * that are dead are not awaited. The lock is held. */
static void stacks_tick(struct cox_nodes *nodes, const struct cox_rank_set *asked, uint64_t now_ns,
                        uint64_t deadline_ns, bool *done)
{
    for (uint32_t i = 0; i < nodes->node_count; i++) {
        const struct cox_lead_link *link = &nodes->links[i];
        if (link->state == COX_NODE_ALIVE && !done[i]) {
            stacks_ask(nodes, link, asked, now_ns, deadline_ns);
            done[i] = true;
        }
        for (uint32_t k = 0; k < link->rank_count && link->state == COX_NODE_ABSENT; k++)
            cox_stacks_fetch_forget(&nodes->stacks, link->rank_first + k);
    }
}

/* Why there is no text of a rank. The lock is held. */
static void stacks_explain(const struct cox_nodes *nodes, uint32_t rank, uint64_t begin_ns,
                           uint64_t now_ns, struct cox_transport_stacks *to)
{
    const struct cox_lead_link *link = &nodes->links[node_of(nodes, rank)];
    if (!cox_lead_link_trouble(link, now_ns, to->why, sizeof to->why))
        snprintf(to->why, sizeof to->why,
                 "node %s has not sent its stacks in %.1f s: see the log of its agent", link->node,
                 (double)(now_ns - begin_ns) / 1e9);
}

static void transport_stacks(void *context, const struct cox_rank_set *asked, uint64_t deadline_ns,
                             struct cox_transport_stacks *ret_stacks)
{
    struct cox_nodes *nodes = context;
    struct cox_stacks_fetch *fetch = &nodes->stacks;
    const uint64_t begin_ns = cox_now_ns();
    uint64_t now_ns = begin_ns;
    bool done[COX_NODE_COUNT_MAX] = {false};
    pthread_mutex_lock(&nodes->lock);
    cox_stacks_fetch_begin(fetch);
    for (uint32_t rank = 0; rank < nodes->world; rank++)
        if (cox_rank_set_has(asked, rank))
            cox_rank_set_add(&fetch->awaited, rank);
    stacks_tick(nodes, asked, now_ns, deadline_ns, done);
    /* Nothing wakes this when a node comes or dies: it is looked at. */
    while (cox_stacks_fetch_awaits(fetch) && !nodes->stopping && now_ns < deadline_ns) {
        const struct timespec until =
            cox_deadline_timespec(cox_deadline_min(now_ns + COX_LEAD_TICK_NS, deadline_ns));
        pthread_cond_timedwait(&nodes->fetched, &nodes->lock, &until);
        now_ns = cox_now_ns();
        stacks_tick(nodes, asked, now_ns, deadline_ns, done);
    }
    for (uint32_t rank = 0; rank < nodes->world; rank++) {
        struct cox_transport_stacks *to = &ret_stacks[rank];
        to->text = fetch->texts[rank];
        if (!to->text && cox_rank_set_has(asked, rank))
            stacks_explain(nodes, rank, begin_ns, now_ns, to);
    }
    cox_stacks_fetch_begin(fetch);
    pthread_mutex_unlock(&nodes->lock);
}

static uint64_t transport_refused(void *context)
{
    struct cox_nodes *nodes = context;
    uint64_t refused = cox_direct_refused(nodes->direct);
    pthread_mutex_lock(&nodes->lock);
    for (uint32_t i = 0; i < nodes->node_count; i++)
        refused += nodes->links[i].refused;
    pthread_mutex_unlock(&nodes->lock);
    return refused;
}

static void transport_stop(void *context, bool failed)
{
    struct cox_nodes *nodes = context;
    pthread_mutex_lock(&nodes->delivery);
    nodes->executor = NULL;
    pthread_mutex_unlock(&nodes->delivery);
    pthread_mutex_lock(&nodes->lock);
    for (uint32_t i = 0; i < nodes->node_count; i++) {
        nodes->links[i].finishing = nodes->links[i].changed = true;
        nodes->links[i].failed = failed;
        cox_lead_link_tick(&nodes->links[i], cox_now_ns());
    }
    nodes->stopping = true;
    pthread_mutex_unlock(&nodes->lock);
    cox_cluster_flush(nodes->cluster, cox_deadline_after_ms(FLUSH_MS));
}

void cox_lead_transport_init(struct cox_nodes *nodes)
{
    nodes->transport = (struct cox_transport){
        .context = nodes,
        .continued = transport_continued,
        .start = transport_start,
        .first_sequence = transport_first_sequence,
        .open = transport_open,
        .kill = transport_kill,
        .publish = transport_publish,
        .cancel_steps = transport_cancel_steps,
        .ended = transport_ended,
        .place = transport_place,
        .share = transport_share,
        .unshare = transport_unshare,
        .trouble = transport_trouble,
        .process = transport_process,
        .recorder = transport_recorder,
        .stacks = transport_stacks,
        .taken_over = transport_taken_over,
        .refused = transport_refused,
        .stop = transport_stop,
    };
}
