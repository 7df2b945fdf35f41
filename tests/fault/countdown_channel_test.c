/* Shared memory, semaphores, process identity, and a worker that attaches to them, with each of
 * their calls failing in turn. */
#include "channel/attach/named/semaphore_gate.h"
#include "channel/attach/named/names.h"
#include "channel/attach/named/named_channel.h"
#include "channel/base/peer.h"
#include "channel/base/semaphore.h"
#include "channel/base/thread.h"
#include "channel/shm/channel.h"
#include "channel/shm/fd_bundle.h"
#include "channel/shm/region.h"
#include "channel/attach/legacy/legacy_bridge.h"
#include "channel/shm/tokens.h"
#include "proto/executor.pb-c.h"
#include "proto/wire.h"
#include "channel/attach/legacy/legacy_shim.h"
#include "worker/loop/worker_internal.h"
#include "worker/sequences/batch_builder.h"
#include "worker/sequences/sequence_store.h"
#include "worker/sequences/table.h"
#include "countdown.h"
#include "testing.h"

#define REGION_SIZE 8192

static struct cox_geometry geometry; /* of the group at hand */

/* ---- one region, one semaphore ---- */

CONSTRUCT(region_create, cox_region_create(object, countdown_object(), REGION_SIZE, err))

static void region_created_destroy(void *object)
{
    cox_region_detach(object);
    assert_int_equal(cox_region_unlink(countdown_object()), 0);
}

static struct cox_region own_region;

static void region_prepare(void)
{
    assert_int_equal(cox_region_create(&own_region, countdown_object(), REGION_SIZE, NULL), 0);
}

static void region_restore(void)
{
    region_created_destroy(&own_region);
}

CONSTRUCT(region_attach,
          cox_region_attach(object, countdown_object(), REGION_SIZE, COX_REGION_READ, err))
DESTROY(region_detach, cox_region_detach(object))
CONSTRUCT(semaphore_create, cox_semaphore_create(object, countdown_object(), 3, err))

static void semaphore_created_destroy(void *object)
{
    cox_semaphore_detach(object);
    assert_int_equal(cox_semaphore_unlink(countdown_object()), 0);
}

static struct cox_semaphore own_semaphore;

static void semaphore_prepare(void)
{
    assert_int_equal(cox_semaphore_create(&own_semaphore, countdown_object(), 3, NULL), 0);
}

static void semaphore_restore(void)
{
    semaphore_created_destroy(&own_semaphore);
}

CONSTRUCT(semaphore_attach, cox_semaphore_attach(object, countdown_object(), err))
DESTROY(semaphore_detach, cox_semaphore_detach(object))

/* ---- a group ---- */

static struct cox_control own_control = COX_CONTROL_NONE;
static struct cox_channel own_channels[COX_CHANNEL_COUNT];

static void group_create(void)
{
    assert_ok(cox_control_create(&own_control, countdown_group(), &geometry, test_err()));
    for (int c = 0; c < COX_CHANNEL_COUNT; c++)
        assert_ok(cox_channel_create(&own_channels[c], countdown_group(), &own_control,
                                     (enum cox_channel_id)c, test_err()));
    char object[COX_OBJECT_NAME_SIZE];
    _cox_cleanup_(cox_region_detach) struct cox_region group = {0};
    if (geometry.mode != &cox_attach_legacy &&
        cox_region_create(&group, cox_name_group(object, countdown_group()),
                          cox_geometry_group_size(&geometry), test_err()))
        fail_msg("%s", test_error.text);
}

static void group_close(void)
{
    for (int c = 0; c < COX_CHANNEL_COUNT; c++)
        cox_channel_close(&own_channels[c]);
    cox_control_close(&own_control);
}

static void group_prepare(void)
{
    geometry = countdown_geometry(NULL);
    group_create();
}

static void group_restore(void)
{
    cox_control_unlink_names(countdown_group(), &geometry, COX_CONTROL_PART_COUNT);
    group_close();
}

/* Names without a live group. */
static void leftovers_prepare(void)
{
    group_prepare();
    group_close();
}

static void leftovers_restore(void)
{
    cox_control_unlink_names(countdown_group(), &geometry, COX_CONTROL_PART_COUNT);
}

static void geometry_prepare(void)
{
    geometry = countdown_geometry(NULL);
}

CONSTRUCT(control_create, cox_control_create(object, countdown_group(), &geometry, err))

static void control_created_destroy(void *object)
{
    struct cox_control *control = object;
    /* Names of a dead group went before. */
    assert_int_equal(cox_control_unlink_names(countdown_group(), &geometry, COX_CHANNEL_COUNT), 1);
    cox_control_close(control);
}

CONSTRUCT(control_attach, cox_control_attach(object, countdown_group(), err))
DESTROY(control_close, cox_control_close(object))
CONSTRUCT(control_sweep, cox_control_sweep(countdown_group(), object, err))

static void control_swept(void *object)
{
    (void)object; /* a count that the failing unlinks made wrong */
    assert_int_equal(test_count_names(countdown_group()), 0);
}

/* ---- its channels ---- */

static void control_prepare(void)
{
    geometry = countdown_geometry(NULL);
    assert_ok(cox_control_create(&own_control, countdown_group(), &geometry, test_err()));
}

static enum cox_channel_id channel_id;

CONSTRUCT(channel_create,
          cox_channel_create(object, countdown_group(), &own_control, channel_id, err))
CONSTRUCT(channel_attach,
          cox_channel_attach(object, countdown_group(), &own_control, channel_id, 1, err))
DESTROY(channel_close, cox_channel_close(object))
CONSTRUCT(gate_create,
          cox_gate_create_semaphores(object, countdown_group(), channel_id, &geometry, err))
CONSTRUCT(gate_attach,
          cox_gate_attach_semaphores(object, countdown_group(), NULL, channel_id, 1, err))
DESTROY(gate_close, cox_gate_close(object))

/* Only what is the test's own: names that a failed attempt left are found. */
static void control_restore(void)
{
    char name[COX_OBJECT_NAME_SIZE];
    assert_int_equal(cox_region_unlink(cox_name_control(name, countdown_group())), 0);
    cox_control_close(&own_control);
}

static void gate_created_destroy(void *object)
{
    char name[COX_OBJECT_NAME_SIZE];
    for (uint32_t rank = 0; rank < COUNTDOWN_RANK_COUNT; rank++)
        for (int b = 0; b < COX_WAKEUP_COUNT; b++)
            if (cox_wakeup_exists(channel_id, (enum cox_wakeup)b))
                cox_semaphore_unlink(
                    cox_name_wakeup(name, countdown_group(), channel_id, (enum cox_wakeup)b, rank));
    cox_gate_close(object);
}

static void channel_created_destroy(void *object)
{
    char name[COX_OBJECT_NAME_SIZE];
    struct cox_channel *channel = object;
    gate_created_destroy(&channel->gate);
    cox_region_unlink(cox_name_request(name, countdown_group(), channel_id));
    cox_region_unlink(cox_name_response(name, countdown_group(), channel_id));
    cox_channel_close(channel);
}

/* ---- what a rank that is started again gets ---- */

static struct cox_fd_bundle own_inherit;
static struct cox_gate *own_gate; /* that of the group's channel */

CONSTRUCT(bundle_open, cox_fd_bundle_open(object, countdown_group(), &geometry, err))
DESTROY(bundle_close, cox_fd_bundle_close(object))
CONSTRUCT(gate_renew, cox_gate_renew(own_gate, channel_id, 1, geometry.depth, object, err))

static void wakeups_close(void *object)
{
    int *fds = object;
    for (int b = 0; b < COX_WAKEUP_COUNT; b++)
        cox_close_fd(&fds[b]);
}

static void renew_prepare(void)
{
    group_prepare();
    own_gate = malloc(sizeof *own_gate);
    assert_non_null(own_gate);
    assert_ok(
        cox_gate_attach_semaphores(own_gate, countdown_group(), NULL, channel_id, 1, test_err()));
}

static void renew_restore(void)
{
    cox_gate_close(own_gate);
    free(own_gate);
    group_restore();
}

static void bundle_prepare(void)
{
    renew_prepare();
    assert_ok(
        cox_fd_bundle_open(&own_inherit, countdown_group(), &geometry, test_err()) ||
        (channel_id != COX_CHANNEL_ERROR &&
         cox_gate_renew(own_gate, channel_id, 1, geometry.depth,
                        &own_inherit.fds[cox_fd_bundle_wakeup(channel_id, (enum cox_wakeup)0)],
                        test_err())));
}

static void bundle_restore(void)
{
    cox_fd_bundle_close(&own_inherit);
    renew_restore();
}

CONSTRUCT(bundle_attach,
          cox_fd_bundle_attach(&own_inherit, object, &own_control, channel_id, 1, err))

/* ---- processes and threads ---- */

CONSTRUCT(peer_open, cox_peer_open(getpid(), 0, object))
DESTROY(peer_close, cox_peer_close(object))

static void *thread_main(void *argument)
{
    return argument;
}

CONSTRUCT(thread_start, cox_thread_start(object, thread_main, NULL))
DESTROY(thread_join, pthread_join(*(pthread_t *)object, NULL))

/* ---- private memory of both sides ---- */

static const int too_large[] = {COX_TOO_LARGE, 0};

CONSTRUCT(arena_init, cox_arena_init(object, 4096, 65536))
DESTROY(arena_deinit, cox_arena_deinit(object))

/* A request of many small parts, through an arena that grows. */
static int request_unpack(void *object, struct cox_error *err)
{
    (void)err;
    Coxswain__ExecuteRequest request = COXSWAIN__EXECUTE_REQUEST__INIT;
    Coxswain__ExecuteRequest *unpacked = NULL;
    Coxswain__ExecuteRequest__ConfigEntry entries[64], *list[64];
    uint8_t bytes[8192];
    size_t size;
    for (size_t i = 0; i < 64; i++) {
        list[i] = &entries[i];
        coxswain__execute_request__config_entry__init(list[i]);
        entries[i].key = "a key that is as long as this";
        entries[i].value = "a value that is somewhat longer than its key, for the arena to grow";
    }
    request.has_execute_type = 1;
    request.execute_type = COXSWAIN__EXECUTE_TYPE__MODEL_INIT;
    request.n_config = 64;
    request.config = list;
    struct cox_arena *arena = object;
    int r = cox_arena_init(arena, 64, 65536);
    if (r == 0)
        r = cox_wire_request_pack(&request, bytes, sizeof bytes, &size);
    if (r == 0)
        r = cox_wire_request_unpack(arena, bytes, size, &unpacked);
    if (r == 0)
        assert_int_equal(unpacked->n_config, 64);
    else
        cox_arena_deinit(arena);
    return r;
}

CONSTRUCT(table_new, cox_table_new(64, 1024, object))
DESTROY(table_free, cox_table_free(*(struct cox_table **)object))
CONSTRUCT(sequence_store_init, cox_sequence_store_init(object, 64, 1024))
DESTROY(sequence_store_deinit, cox_sequence_store_deinit(object))
CONSTRUCT(batch_builder_init, cox_batch_builder_init(object, 64))
DESTROY(batch_builder_deinit, cox_batch_builder_deinit(object))

/* ---- a worker of the group ---- */

static const struct cox_worker_callbacks callbacks = COX_WORKER_CALLBACKS_INIT;

static struct cox_worker_options worker_options(void)
{
    struct cox_worker_options options = {
        .size = sizeof(struct cox_worker_options),
        .rank = 1,
        .rank_count = COUNTDOWN_RANK_COUNT,
        .parent_pid = getpid(),
        .on_orphan = COX_ORPHAN_RETURN,
        .sequence_count_max = 64,
        .token_count_max = 1024,
    };
    snprintf(options.prefix, sizeof options.prefix, "/%s", countdown_group());
    return options;
}

static int worker_new(void *object, struct cox_error *err)
{
    const struct cox_worker_options options = worker_options();
    return cox_worker_new(&options, &callbacks, NULL, object, err);
}

/* Serves until the first look at its coordinator: there stop is called, on the thread of run. */
static struct cox_worker *served;

static void worker_stop_at_poll(void)
{
    cox_worker_stop(served);
}

DESTROY(worker_free, cox_worker_free(*(struct cox_worker **)object))

static void served_prepare(void)
{
    group_prepare();
    assert_int_equal(worker_new(&served, NULL), 0);
    countdown_at_poll = worker_stop_at_poll;
}

static void served_restore(void)
{
    countdown_at_poll = NULL;
    served = cox_worker_free(served);
    group_restore();
}

CONSTRUCT(worker_run, cox_worker_run(served, err))

static int worker_start(void *object, struct cox_error *err)
{
    (void)object;
    int r = cox_worker_start(served, COX_WORKER_TAKES(COX_CHANNEL_EXECUTE), err);
    if (r)
        return r;
    cox_worker_stop(served);
    return cox_worker_join(served, err);
}

/* Legacy: regions and semaphores without a control region. */
static void legacy_prepare(void)
{
    char object[COX_OBJECT_NAME_SIZE];
    geometry = countdown_geometry(&cox_attach_legacy);
    group_create();
    assert_int_equal(cox_region_unlink(cox_name_control(object, countdown_group())), 0);
}

CONSTRUCT(legacy_shim_create,
          cox_legacy_shim_create(object, countdown_group(), COUNTDOWN_RANK_COUNT, getpid(), err))

/* The coordinator's half, over the channel of a legacy group. */
static void legacy_group_prepare(void)
{
    geometry = countdown_geometry(&cox_attach_legacy);
    group_create();
}

static int legacy_bridge_new(void *object, struct cox_error *err)
{
    int r = cox_legacy_bridge_new(&own_channels[COX_CHANNEL_EXECUTE], object);
    return r ? cox_fail(err, r, "no memory for the bridge") : 0;
}

static void legacy_bridge_deinit(void *object)
{
    struct cox_tokens **tokens = object;
    (*tokens)->ops->free(*tokens);
}

/* ---- tests ---- */

COUNTDOWN_TEST(b15_b19_no_object_leaks_when_any_call_fails, EACH_MODE,
               SUBJECT(region_create, MAKES(struct cox_region, region_created_destroy),
                       .lenient = true),
               SUBJECT(region_attach, MAKES(struct cox_region, region_detach),
                       AROUND(region_prepare, region_restore)),
               NAMED_SUBJECT("region_attach to nothing", region_attach,
                             .size = sizeof(struct cox_region), .expected = COX_NOT_FOUND),
               NAMED_SUBJECT("region_create over another", region_create,
                             AROUND(region_prepare, region_restore),
                             .size = sizeof(struct cox_region), .expected = COX_TAKEN),
               SUBJECT(semaphore_create, MAKES(struct cox_semaphore, semaphore_created_destroy)),
               SUBJECT(semaphore_attach, MAKES(struct cox_semaphore, semaphore_detach),
                       AROUND(semaphore_prepare, semaphore_restore)),
               SUBJECT(peer_open, MAKES(struct cox_peer, peer_close), .wordless = true),
               /* pthread_create may leave rubbish */
               SUBJECT(thread_start, MAKES(pthread_t, thread_join), .in_place = true,
                       .wordless = true))

COUNTDOWN_TEST(b4_b19_b53_no_control_region_stays_when_any_call_fails, EACH_MODE,
               SUBJECT(control_create, MAKES(struct cox_control, control_created_destroy),
                       .lenient = true, .prepare = geometry_prepare),
               NAMED_SUBJECT("control_create over leftovers", control_create,
                             MAKES(struct cox_control, control_created_destroy),
                             AROUND(leftovers_prepare, leftovers_restore), .lenient = true),
               NAMED_SUBJECT("control_create over a live group", control_create,
                             AROUND(group_prepare, group_restore), .lenient = true,
                             .size = sizeof(struct cox_control), .expected = COX_TAKEN),
               SUBJECT(control_attach, MAKES(struct cox_control, control_close),
                       AROUND(group_prepare, group_restore)),
               SUBJECT(control_sweep, MAKES(uint32_t, control_swept),
                       AROUND(leftovers_prepare, leftovers_restore)))

static void channels_try(void)
{
    COUNTDOWN(EACH_MODE,
              SUBJECT(channel_create, MAKES(struct cox_channel, channel_created_destroy),
                      AROUND(control_prepare, control_restore), .lenient = true),
              SUBJECT(channel_attach, MAKES(struct cox_channel, channel_close),
                      AROUND(group_prepare, group_restore)),
              SUBJECT(gate_create, MAKES(struct cox_gate, gate_created_destroy),
                      AROUND(control_prepare, control_restore)),
              SUBJECT(gate_attach, MAKES(struct cox_gate, gate_close),
                      AROUND(group_prepare, group_restore)),
              SUBJECT(bundle_attach, MAKES(struct cox_channel, channel_close),
                      AROUND(bundle_prepare, bundle_restore)));
}

TEST(b4_b15_b19_no_channel_stays_when_any_call_fails)
{
    channel_id = COX_CHANNEL_ERROR;
    channels_try();
    channel_id = COX_CHANNEL_EXECUTE;
    channels_try();
    COUNTDOWN(EACH_MODE,
              SUBJECT(bundle_open, MAKES(struct cox_fd_bundle, bundle_close),
                      AROUND(group_prepare, group_restore), .in_place = true),
              SUBJECT(gate_renew, MAKES(int[COX_WAKEUP_COUNT], wakeups_close),
                      AROUND(renew_prepare, renew_restore)));
}

COUNTDOWN_TEST(private_memory_is_given_back_when_any_of_it_is_refused, FAIL_ONE | FAIL_REST,
               SUBJECT(arena_init, MAKES(struct cox_arena, arena_deinit), .in_place = true,
                       .wordless = true),
               SUBJECT(request_unpack, MAKES(struct cox_arena, arena_deinit), .in_place = true,
                       .codes = too_large, .wordless = true),
               SUBJECT(table_new, MAKES(struct cox_table *, table_free), .wordless = true),
               SUBJECT(sequence_store_init, MAKES(struct cox_sequence_store, sequence_store_deinit),
                       .in_place = true, .wordless = true),
               SUBJECT(batch_builder_init, MAKES(struct cox_batch_builder, batch_builder_deinit),
                       .in_place = true, .wordless = true))

TEST(b15_b19_no_worker_leaks_when_any_call_fails)
{
    channel_id = COX_CHANNEL_EXECUTE;
    COUNTDOWN(EACH_MODE,
              SUBJECT(worker_new, MAKES(struct cox_worker *, worker_free),
                      AROUND(group_prepare, group_restore), .costly = true),
              NAMED_SUBJECT("worker_new of a legacy group", worker_new,
                            MAKES(struct cox_worker *, worker_free),
                            AROUND(legacy_prepare, group_restore), .costly = true),
              SUBJECT(worker_run, AROUND(served_prepare, served_restore)),
              SUBJECT(worker_start, AROUND(served_prepare, served_restore)),
              SUBJECT(legacy_shim_create, MAKES(struct cox_control, control_close),
                      AROUND(legacy_prepare, group_restore)),
              SUBJECT(legacy_bridge_new, MAKES(struct cox_tokens *, legacy_bridge_deinit),
                      AROUND(legacy_group_prepare, group_restore)));
}
