/* nodes_common: what all files of nodes/ share. Private to libcoxswain-nodes. */
#ifndef COX_NODES_COMMON_H
#define COX_NODES_COMMON_H

#include <coxswain/base.h>
#include "channel/shm/geometry.h"
#include "coordinator/transport/nodes_library.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Frames of a channel, as channel/shm/layout.h. */
#define COX_NODE_DEPTH_MAX 32

/* A beat is sent after so many times beat_ms, whatever else was sent. */
#define COX_NODE_BEATS_MAX 10

#define COX_NODE_TIMES_DEFAULT                                                                     \
    {                                                                                              \
        .beat_ms = 100, .suspect_ms = 300, .dead_ms = 800, .again_ms = 150, .lead_grace_ms = 30000 \
    }

#endif
