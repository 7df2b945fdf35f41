/* Structs of options that callers of other releases give: smaller ones, larger ones, and those that
 * were never initialized. */
#include <coxswain/executor.h>

#include <coxswain/handle.h>
#include <coxswain/memory/queue.h>
#include "coordinator/executor/executor_internal.h"
#include "tests/lib/test.h"
#include <coxswain/group.h>
#include <coxswain/worker.h>

/* Bytes behind a struct that a newer header would know. */
#define ADDED 24

union any_options {
    size_t size;
    struct cox_executor_options executor;
    struct cox_executor_nodes nodes;
    struct cox_submit_options submit;
    struct cox_worker_options worker;
    struct cox_worker_callbacks callbacks;
    struct cox_pool_options pool;
    struct cox_pool_attach_options attach;
    struct cox_queue_options queue;
    struct cox_publisher_options publisher;
    struct cox_subscriber_options subscriber;
    struct cox_exporter_options exporter;
    struct cox_importer_options importer;
    struct cox_group_options group;
};

struct any {
    union any_options options;
    unsigned char added[ADDED];
};

/* ---- the functions that take options ---- */

/* Where all memory ends that can be read. */
static void *nowhere;
static struct cox_pool *shared_pool;
static struct cox_queue *shared_queue;
static int pool_fds[2];
static const struct cox_worker_options worker_options = COX_WORKER_OPTIONS_INIT;
static const struct cox_worker_callbacks worker_callbacks = COX_WORKER_CALLBACKS_INIT;

/* use_NAME makes one with these options, if it can be, and releases it. */
#define USE(name, type, make, release)                                                             \
    static int use_##name(const void *options, struct cox_error *err)                              \
    {                                                                                              \
        struct type *made = NULL;                                                                  \
        int r = make;                                                                              \
        release(made);                                                                             \
        return r;                                                                                  \
    }

USE(executor, cox_executor, cox_executor_start(options, &made, err), cox_executor_free)
USE(worker, cox_worker, cox_worker_new(options, &worker_callbacks, NULL, &made, err),
    cox_worker_free)
USE(callbacks, cox_worker, cox_worker_new(&worker_options, options, NULL, &made, err),
    cox_worker_free)
USE(pool, cox_pool, cox_pool_create(options, &made, err), cox_pool_free)
USE(pool_attach, cox_pool, cox_pool_attach(pool_fds, options, &made, err), cox_pool_free)
USE(queue, cox_queue, cox_queue_create(options, &made, err), cox_queue_free)
USE(queue_attach, cox_queue, cox_queue_attach(cox_queue_fd(shared_queue), options, &made, err),
    cox_queue_free)
USE(publisher, cox_publisher, cox_publisher_new(shared_queue, options, &made, err),
    cox_publisher_free)
USE(subscriber, cox_subscriber, cox_subscriber_new(shared_queue, options, &made, err),
    cox_subscriber_free)
USE(exporter, cox_exporter, cox_exporter_new(options, &made, err), cox_exporter_free)
USE(importer, cox_importer, cox_importer_new(options, &made, err), cox_importer_free)
USE(group, cox_group, cox_group_join(options, &made, err), cox_group_leave)

/* Of a group that is to have no ranks: its nodes are looked at, and no node is asked. */
static int use_nodes(const void *options, struct cox_error *err)
{
    struct cox_executor *executor = NULL;
    struct cox_executor_options group = COX_EXECUTOR_OPTIONS_INIT;
    group.nodes = options;
    int r = cox_executor_start(&group, &executor, err);
    cox_executor_free(executor);
    return r;
}

/* Of an executor that was never started: only what is checked before it is needed can be seen. */
static int use_submit(const void *options, struct cox_error *err)
{
    struct cox_executor *executor = calloc(1, sizeof *executor);
    executor->geometry.rank_count = 1;
    executor->geometry.mode = &cox_attach_named;
    int r = cox_executor_submit_opaque(executor, "x", 1, options, NULL, err);
    free(executor);
    return r;
}

static int use_worker_parse(const void *options, struct cox_error *err)
{
    char *argv[] = {"worker", "--local_rank=x", NULL};
    int argc = 2;
    struct any copy;
    memcpy(&copy, options, sizeof copy);
    return cox_worker_options_parse(&copy.options.worker, &argc, argv, err);
}

/* ---- the options ---- */

static const char *const command[] = {"/nowhere", NULL};

/* A struct of options, and a value behind `cut` that a caller of an older release leaves there. */
struct subject {
    const char *type;
    size_t size;
    /* where its last field ends */
    size_t end;
    /* bytes that the older release knew */
    size_t cut;
    int (*use)(const void *options, struct cox_error *err);
    union any_options options;
    /* reading what is behind the cut is not an error but a crash */
    bool crashes;
};

#define SUBJECT(type_, last, first_unknown)                                                        \
    .type = #type_, .size = sizeof(struct type_),                                                  \
    .end = offsetof(struct type_, last) + sizeof(((struct type_ *)0)->last),                       \
    .cut = offsetof(struct type_, first_unknown)

static size_t subjects_make(struct subject *subjects)
{
    const struct subject all[] = {
        {SUBJECT(cox_executor_options, nodes, socket), .use = use_executor,
         .options.executor = {.rank_count = COX_RANK_COUNT_MAX + 1,
                              .workers.command = command,
                              .workers.external = true,
                              .socket.use = COX_SOCKET_NONE}},
        {SUBJECT(cox_executor_nodes, reserved, nodes), .use = use_nodes,
         .options.nodes = {.nodes = "a:x"}},
        {SUBJECT(cox_submit_options, epoch, deadline_ns), .use = use_submit,
         .options.submit = {.gather = COX_GATHER_NONE, .deadline_ns = COX_DEADLINE_NEVER}},
        {SUBJECT(cox_worker_options, frames_context, prefix), .use = use_worker,
         .options.worker = {.prefix = "no_slash"}},
        {SUBJECT(cox_worker_options, frames_context, prefix), .use = use_worker_parse,
         .crashes = true},
        {SUBJECT(cox_worker_callbacks, finalize, init), .use = use_callbacks, .crashes = true},
        {SUBJECT(cox_pool_options, reserved, slab_size), .use = use_pool,
         .options.pool = {.block_size = 64, .block_count = 1, .slab_size = 4096}},
        {SUBJECT(cox_pool_attach_options, incarnation, domains), .use = use_pool_attach,
         .options.attach = {.domains = nowhere}, .crashes = true},
        {SUBJECT(cox_queue_options, reserved, depth), .use = use_queue,
         .options.queue = {.depth = 3}},
        {SUBJECT(cox_queue_options, reserved, depth), .use = use_queue_attach,
         .options.queue = {.depth = COX_QUEUE_DEPTH_MAX}},
        {SUBJECT(cox_publisher_options, socket_path, exporter), .use = use_publisher,
         .options.publisher = {.pool = shared_pool, .exporter = nowhere}, .crashes = true},
        {SUBJECT(cox_subscriber_options, exporter, pool), .use = use_subscriber,
         .options.subscriber = {.pool = nowhere}, .crashes = true},
        {SUBJECT(cox_exporter_options, deadline_ms, socket_path), .use = use_exporter,
         .options.exporter = {.socket_path = "/nowhere/to/be/found"}},
        {SUBJECT(cox_importer_options, reserved, socket_path), .use = use_importer,
         .options.importer = {.socket_path = nowhere}, .crashes = true},
        {SUBJECT(cox_group_options, reserved, rank_count), .use = use_group,
         .options.group = {.fd = -1, .rank_count = COX_RANK_COUNT_MAX + 1}},
    };
    memcpy(subjects, all, sizeof all);
    return sizeof all / sizeof all[0];
}

static struct subject subjects[32];
static size_t subject_count;

static int setup(void **state)
{
    (void)state;
    nowhere = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const struct cox_pool_options small = {
        .size = sizeof(struct cox_pool_options), .block_size = 64, .block_count = 1};
    assert_int_equal(cox_pool_create(&small, &shared_pool, NULL), 0);
    cox_pool_fds(shared_pool, pool_fds);
    assert_int_equal(cox_queue_create(NULL, &shared_queue, NULL), 0);
    subject_count = subjects_make(subjects);
    return nowhere == MAP_FAILED;
}

static int teardown(void **state)
{
    (void)state;
    cox_queue_free(shared_queue);
    cox_pool_free(shared_pool);
    return munmap(nowhere, 4096);
}

/* The first `known` bytes of the options, zeros behind; the size says `size`. */
static void any_of(const struct subject *subject, size_t known, size_t size, struct any *ret_any)
{
    memset(ret_any, 0, sizeof *ret_any);
    memcpy(ret_any, &subject->options, known);
    memcpy(ret_any, &size, sizeof size);
}

/* ---- the tests ---- */

PLAIN_TEST(uninitialized_options_are_refused)
{
    static const size_t sizes[] = {0, 1, sizeof(size_t) - 1, 65537, SIZE_MAX};
    for (size_t i = 0; i < subject_count; i++)
        for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
            struct cox_error err = {0};
            struct any any;
            any_of(&subjects[i], subjects[i].cut, sizes[s], &any);
            int r = subjects[i].use(&any, &err);
            if (r != COX_INVALID || !strstr(err.text, subjects[i].type) ||
                !strstr(err.text, "not initialized with COX_") || !strstr(err.text, "_INIT;"))
                fail_msg("%s of %zu bytes: %d, %s", subjects[i].type, sizes[s], r, err.text);
        }
}

/* What is behind the caller's size is not its options: the result is that of zeros there. */
PLAIN_TEST(smaller_options_have_defaults_for_the_rest)
{
    for (size_t i = 0; i < subject_count; i++) {
        const struct subject *subject = &subjects[i];
        struct cox_error expected = {0}, err = {0}, whole = {0};
        struct any any;
        any_of(subject, subject->cut, subject->size, &any);
        int r_expected = subject->use(&any, &expected);
        any_of(subject, subject->size, subject->cut, &any);
        int r = subject->use(&any, &err);
        if (r != r_expected || strcmp(err.text, expected.text) != 0)
            fail_msg("%s: %d, %s; expected %d, %s", subject->type, r, err.text, r_expected,
                     expected.text);
        if (subject->crashes)
            continue;
        /* Otherwise what is behind the cut would make no difference. */
        any_of(subject, subject->size, subject->size, &any);
        if (subject->use(&any, &whole) == r && strcmp(whole.text, err.text) == 0)
            fail_msg("%s: the whole struct has the same result", subject->type);
    }
}

PLAIN_TEST(larger_options_are_taken_while_zero)
{
    for (size_t i = 0; i < subject_count; i++) {
        const struct subject *subject = &subjects[i];
        struct cox_error expected = {0}, err = {0};
        unsigned char bytes[sizeof(struct any) + ADDED];
        struct any any;
        any_of(subject, subject->cut, subject->size, &any);
        int r_expected = subject->use(&any, &expected);
        memset(bytes, 0, sizeof bytes);
        memcpy(bytes, &any, subject->size);
        const size_t size = subject->size + ADDED;
        memcpy(bytes, &size, sizeof size);
        if (subject->use(bytes, &err) != r_expected || strcmp(err.text, expected.text) != 0)
            fail_msg("%s: %s; expected %s", subject->type, err.text, expected.text);
        for (size_t at = subject->size; at < size; at++) {
            cox_error_clear(&err);
            bytes[at] = 1;
            if (subject->use(bytes, &err) != COX_INVALID || !strstr(err.text, subject->type) ||
                !strstr(err.text, "newer header"))
                fail_msg("%s: byte %zu: %s", subject->type, at, err.text);
            bytes[at] = 0;
        }
    }
}

/* A field that is added later must not lie in padding that today's callers do not clear. */
PLAIN_TEST(structs_end_with_their_last_field)
{
    for (size_t i = 0; i < subject_count; i++)
        if (subjects[i].end != subjects[i].size)
            fail_msg(
                "%s has %zu bytes behind the field that SUBJECT names as its last: name the new "
                "last field there, or, if these bytes are padding, add a reserved field",
                subjects[i].type, subjects[i].size - subjects[i].end);
}

/* The struct of an older caller is written as far as that caller knows it. */
PLAIN_TEST(parsing_writes_no_further_than_the_caller_knows)
{
    const size_t cut = offsetof(struct cox_worker_options, fd_store);
    char *argv[] = {"worker", "--shm_name_prefix=/group", "--local_rank=1", "--local_world_size=2",
                    NULL};
    int argc = 4;
    struct cox_worker_options options;
    memset(&options, 0, sizeof options);
    memset((char *)&options + cut, 0x5a, sizeof options - cut);
    options.size = cut;
    assert_int_equal(cox_worker_options_parse(&options, &argc, argv, NULL), 0);
    assert_int_equal(options.size, cut);
    assert_int_equal(options.rank, 1);
    for (size_t i = cut; i < sizeof options; i++)
        assert_int_equal(((unsigned char *)&options)[i], 0x5a);
}

int main(void)
{
    return test_run(setup, teardown);
}
