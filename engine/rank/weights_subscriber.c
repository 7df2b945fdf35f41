#include "weights_subscriber.h"

#include "channel/base/fault.h"
#include "channel/base/idioms.h"

#include <coxswain/handle.h>

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define LABEL "cox_weights"

/* An image that this process has mapped; version 0: none. */
struct held {
    uint64_t version;
    struct cox_handle handle;
    struct cox_region region;
};

struct cox_weights_subscriber {
    /* NULL: none */
    char *control_socket;
    struct held present, next;
};

int cox_weights_subscriber_new(const char *control_socket,
                               struct cox_weights_subscriber **ret_weights)
{
    struct cox_weights_subscriber *weights = calloc(1, sizeof *weights);

    if (weights && control_socket)
        weights->control_socket = strdup(control_socket);
    if (!weights || (control_socket && !weights->control_socket)) {
        free(weights);
        return -ENOMEM;
    }
    *ret_weights = weights;
    return 0;
}

static void held_drop(struct held *held)
{
    cox_region_detach(&held->region);
    *held = (struct held){0};
}

struct cox_weights_subscriber *cox_weights_subscriber_free(struct cox_weights_subscriber *weights)
{
    if (!weights)
        return NULL;
    held_drop(&weights->next);
    held_drop(&weights->present);
    free(weights->control_socket);
    free(weights);
    return NULL;
}

uint64_t cox_weights_subscriber_version(const struct cox_weights_subscriber *weights)
{
    return weights->present.version;
}

static int held_open(const struct cox_weights_subscriber *weights,
                     const struct cox_weights_candidate *candidate, uint64_t deadline_ns,
                     struct held *ret_held, struct cox_error *err)
{
    struct held held = {.version = candidate->version, .handle = candidate->handle};
    _cox_cleanup_(cox_close_fd) int fd = -1;
    int r = cox_handle_open(&candidate->handle, weights->control_socket, deadline_ns, &fd, err);

    if (r == 0)
        r = cox_region_attach_fd(&held.region, fd, LABEL, candidate->size, COX_REGION_SEALED, err);
    if (r)
        return r;
    if (held.region.size != candidate->size) {
        r = cox_fail(err, COX_CORRUPT, "region " LABEL " has %" PRIu64 " bytes, expected %" PRIu64,
                     held.region.size, candidate->size);
        cox_region_detach(&held.region);
        return r;
    }
    *ret_held = held;
    return 0;
}

static int weights_open(struct cox_weights_subscriber *weights, uint64_t version,
                        const struct cox_weights_candidate *candidate, uint64_t deadline_ns,
                        struct cox_error *err)
{
    struct cox_error why = {0};
    struct held opened;
    int r;

    if (!candidate || candidate->version != version)
        return cox_fail(err, COX_NOT_FOUND,
                        "version %" PRIu64
                        " of the model's weights is required, this rank has version %" PRIu64
                        ", and was not offered the other",
                        version, weights->present.version);
    if (weights->present.version &&
        memcmp(&candidate->handle, &weights->present.handle, sizeof candidate->handle) == 0) {
        held_drop(&weights->next);
        weights->present.version = version;
        return 0;
    }
    r = held_open(weights, candidate, deadline_ns, &opened, &why);
    if (r)
        return cox_fail(err, r, "version %" PRIu64 " of the model's weights: %s", version,
                        why.text);
    held_drop(&weights->next);
    weights->next = opened;
    cox_fault_point(COX_FAULT_WEIGHTS_TAKEN);
    return 0;
}

int cox_weights_subscriber_take(struct cox_weights_subscriber *weights, uint64_t version,
                                const struct cox_weights_candidate *candidate, uint64_t deadline_ns,
                                const void **ret_bytes, uint64_t *ret_size, struct cox_error *err)
{
    const struct held *held;
    int r;

    if (version < weights->present.version)
        return cox_fail(err, COX_STALE,
                        "version %" PRIu64
                        " of the model's weights was requested after version %" PRIu64,
                        version, weights->present.version);
    if (version != weights->present.version && version != weights->next.version) {
        r = weights_open(weights, version, candidate, deadline_ns, err);
        if (r)
            return r;
    }
    held = version == weights->present.version ? &weights->present : &weights->next;
    *ret_bytes = held->region.base;
    *ret_size = held->region.size;
    return 0;
}

void cox_weights_subscriber_commit(struct cox_weights_subscriber *weights)
{
    if (!weights->next.version)
        return;
    held_drop(&weights->present);
    weights->present = weights->next;
    weights->next = (struct held){0};
    cox_fault_point(COX_FAULT_WEIGHTS_SWITCHED);
}
