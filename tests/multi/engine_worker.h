/*
 * engine_worker: a test that is its own worker, with the engine of coxswain-worker.
 *
 * Processes and threads: the worker's process. Ownership: nothing is left. Blocks: until the end of
 * the group.
 */
#ifndef COX_TESTS_MULTI_ENGINE_WORKER_H
#define COX_TESTS_MULTI_ENGINE_WORKER_H

#include "engine/rank/engine.h"
#include "testing.h"

#include <coxswain/worker.h>

/* While it runs. */
static struct cox_worker *engine_worker;

/* Returns main's exit status. callbacks get the engine as their context; adjust may be NULL. */
static inline int engine_worker_main(int argc, char **argv,
                                     const struct cox_engine_options *engine_options,
                                     const struct cox_worker_callbacks *callbacks,
                                     void (*adjust)(struct cox_worker_options *options))
{
    struct cox_worker_options options = COX_WORKER_OPTIONS_INIT;
    struct cox_engine *engine = NULL;
    int r = cox_worker_options_parse(&options, &argc, argv, test_err());
    if (adjust)
        adjust(&options);
    if (r == 0)
        r = cox_engine_new(engine_options, &engine);
    if (r == 0)
        r = cox_worker_new(&options, callbacks, engine, &engine_worker, test_err());
    if (r == 0) {
        cox_engine_serve(engine, engine_worker);
        r = cox_worker_run(engine_worker, test_err());
    }
    if (r)
        fprintf(stderr, "%s\n", test_error.text);
    cox_worker_free(engine_worker);
    cox_engine_free(engine);
    return r != 0;
}

#endif
