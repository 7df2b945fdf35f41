/* The executor's own memory, shared by the files that implement executor.h and operations.h. */
#ifndef COX_COORDINATOR_EXECUTOR_INTERNAL_H
#define COX_COORDINATOR_EXECUTOR_INTERNAL_H

#include "../channel/channel.h"
#include "collect.h"
#include "executor.h"
#include "operations.h"

struct cox_executor {
    struct cox_executor_options options; /* command and devices are only valid during start */
    char name[COX_NAME_SIZE_MAX + 1];
    struct cox_geometry geometry;
    struct cox_control control;
    bool named; /* names are in /dev/shm */
    int channels_made;
    struct cox_channel channels[COX_CHANNEL_COUNT];
    struct cox_collector collectors[COX_TWO_WAY_COUNT];
    struct cox_supervisor *supervisor;
    _Atomic bool started;
    _Atomic bool stopping;

    pthread_t error_thread;
    bool error_threaded;
    uint8_t *error_copy;
    struct cox_arena error_arena;

    pthread_mutex_t recover_lock; /* protects the two below; never held over a call */
    pthread_cond_t recover_cond;  /* CLOCK_MONOTONIC; recovering became false */
    bool recovering;              /* one recovery command at a time */
    enum cox_engine_state engine_state;
};

#endif
