/* lead_send: how frames go to the nodes: by NATS, once for all where that will do, or by direct connections. */
#include "channel/base/idioms.h"
#include "lead_private.h"

#include <stdlib.h>

/* Takes bytes and fd. The lock is held. */
void cox_lead_send_large(struct cox_nodes *nodes, uint32_t node, uint32_t kind, uint8_t *bytes,
                         size_t size, int fd, uint64_t fd_size)
{
    if (nodes->outboxes[node]) {
        cox_outbox_put(nodes->outboxes[node], nodes->links[node].address, kind, bytes, size, fd,
                       fd_size);
        return;
    }
    free(bytes); /* as if it were lost */
    cox_close_fd(&fd);
}

/* A request that names an image follows it. */
static bool goes_by_nats(const struct cox_nodes *nodes, const uint8_t *bytes, size_t size)
{
    return size <= cox_cluster_size_max(nodes->cluster) / 2 &&
           !(nodes->images.count && bytes[4] == COX_FRAME_REQUEST &&
             cox_images_named(&nodes->images, bytes, size));
}

/* A frame with a large request behind it. Takes bytes. */
static void send_request(struct cox_nodes *nodes, uint32_t node, uint8_t *bytes, size_t size,
                         struct cox_large_request *large)
{
    if (nodes->cluster && nodes->outboxes[node])
        cox_outbox_put_large(nodes->outboxes[node], nodes->links[node].address, COX_DIRECT_FRAME,
                             bytes, size, cox_large_request_ref(large));
    else
        free(bytes); /* as if it were lost */
}

void cox_lead_send_to(struct cox_nodes *nodes, uint32_t node, uint8_t *bytes, size_t size)
{
    if (!nodes->cluster) /* while it is opened, or closed */
        free(bytes);
    else if (goes_by_nats(nodes, bytes, size))
        cox_cluster_send(nodes->cluster, nodes->links[node].node, bytes, size);
    else
        cox_lead_send_large(nodes, node, COX_DIRECT_FRAME, bytes, size, -1, 0);
}

/* Of a link; the lock is held. */
void cox_lead_on_send(void *context, const struct cox_lead_link *link, uint8_t *bytes, size_t size,
                      struct cox_large_request *large)
{
    struct cox_nodes *nodes = context;
    if (large) /* not gathered: it goes by direct connections */
        send_request(nodes, link->index, bytes, size, large);
    else if (nodes->gathering)
        nodes->gathered[link->index] = (struct gathered){.bytes = bytes, .size = size};
    else
        cox_lead_send_to(nodes, link->index, bytes, size);
}

/* Whether what was gathered is one request that every node can take as its own. */
static bool same_for_all(const struct cox_nodes *nodes)
{
    const struct gathered *first = &nodes->gathered[0];
    if (nodes->node_count < 2 || !nodes->cluster || !first->bytes ||
        !goes_by_nats(nodes, first->bytes, first->size))
        return false;
    for (uint32_t i = 0; i < nodes->node_count; i++) {
        const struct cox_lead_link *link = &nodes->links[i];
        const struct gathered *one = &nodes->gathered[i];
        if (link->state != COX_NODE_ALIVE || link->peers_there != nodes->peers_version ||
            !one->bytes || one->size != first->size ||
            !cox_frame_same_for_all(one->bytes, first->bytes, first->size))
            return false;
    }
    return true;
}

/* One copy for all where that will do: the server makes the others. */
void cox_lead_send_gathered(struct cox_nodes *nodes)
{
    const bool same = same_for_all(nodes);
    for (uint32_t i = 0; i < nodes->node_count; i++) {
        struct gathered *one = &nodes->gathered[i];
        if (one->bytes && !same)
            cox_lead_send_to(nodes, i, one->bytes, one->size);
        else if (i > 0)
            free(one->bytes);
    }
    if (same) {
        struct gathered *first = &nodes->gathered[0];
        cox_frame_address_all(first->bytes, nodes->peers_version);
        cox_cluster_send(nodes->cluster, NULL, first->bytes, first->size);
    }
}

/* An outbox has lost a message for this node. */
void cox_lead_on_lost(void *context, uint32_t node)
{
    struct cox_nodes *nodes = context;
    pthread_mutex_lock(&nodes->lock);
    cox_lead_link_lost(&nodes->links[node], cox_now_ns());
    pthread_mutex_unlock(&nodes->lock);
}

void cox_lead_send(struct cox_nodes *nodes, uint32_t node, enum cox_frame_kind kind,
                   const ProtobufCMessage *message)
{
    const struct cox_frame head = {.kind = kind,
                                   .epoch = nodes->epoch,
                                   .incarnation = nodes->links[node].incarnation,
                                   .sent_ns = cox_now_ns()};
    size_t size;
    uint8_t *bytes = cox_frame_of_message(&head, message, &size);
    if (bytes)
        cox_lead_send_to(nodes, node, bytes, size);
}
