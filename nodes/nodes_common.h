/* nodes_common: what all files of nodes/ share. Private to libcoxswain-nodes. */
#ifndef COX_NODES_COMMON_H
#define COX_NODES_COMMON_H

#include "channel/base/base.h"
#include "channel/shm/geometry.h"
#include "coordinator/transport/transport.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Nodes of a group, at most. */
#define COX_NODE_COUNT_MAX 64
/* Frames of a channel, as channel/shm/layout.h. */
#define COX_NODE_DEPTH_MAX 32

/* Times, in milliseconds; 0: the default. */
struct cox_node_times {
    /* beats, both ways; default 100 */
    uint64_t beat_ms;
    /* silence after which a node is suspect; default 300 */
    uint64_t suspect_ms;
    /* silence after which it is dead; default 800 */
    uint64_t dead_ms;
    /* a request that was not acknowledged is asked again; default 150 */
    uint64_t again_ms;
    /* how long agents wait for another lead; default 30,000 */
    uint64_t lead_grace_ms;
};

#define COX_NODE_TIMES_DEFAULT                                                                     \
    {                                                                                              \
        .beat_ms = 100, .suspect_ms = 300, .dead_ms = 800, .again_ms = 150,                        \
        .lead_grace_ms = 30000                                                                     \
    }

#endif
