/* Ranks that get other processes, with each of the calls for that failing in turn: then the rank is
 * dead, nothing of the attempt is left, and the next one works. */
#include "channel/attach/named/names.h"
#include "channel/attach/named/named_channel.h"
#include "channel/shm/channel.h"
#include "channel/shm/region.h"
#include "channel/socket/control_socket.h"
#include "countdown.h"
#include "testing.h"

static struct cox_region region;

static void region_prepare(void)
{
    assert_ok(cox_region_create(&region, countdown_object(), 8192, test_err()));
}

static void region_restore(void)
{
    cox_region_detach(&region);
    cox_region_unlink(countdown_object());
}

/* The mapping stays where it was, and can be written to, whatever happens. */
static int region_renew(void *object, struct cox_error *err)
{
    (void)object;
    const struct cox_region before = region;
    int r = cox_region_renew(&region, countdown_object(), err);
    assert_ptr_equal(region.base, before.base);
    assert_int_equal(region.size, before.size);
    memset(region.base, 1, region.size);
    return r;
}

static struct cox_control control = COX_CONTROL_NONE;
static struct cox_channel channel;

static void channel_prepare(void)
{
    struct cox_geometry_choice choice = {.depth = 1};
    struct cox_geometry geometry;
    assert_int_equal(cox_geometry_resolve(COUNTDOWN_RANK_COUNT, &choice, &geometry, NULL), 0);
    assert_ok(
        cox_control_create(&control, countdown_group(), &geometry, test_err()) ||
        cox_channel_create(&channel, countdown_group(), &control, COX_CHANNEL_LINK, test_err()));
}

static void channel_restore(void)
{
    cox_control_unlink_names(countdown_group(), &control.geometry, COX_CHANNEL_COUNT);
    cox_channel_close(&channel);
    cox_control_close(&control);
}

CONSTRUCT(channel_renew, cox_channel_renew_regions(&channel, countdown_group(), err))

/* ---- groups ---- */

static const char *const native[] = {COX_TEST_BIN_DIR "/legacy_native", NULL};

static enum cox_attach attach;
static bool legacy;
static struct cox_executor *live;

static void group_prepare(void)
{
    struct cox_executor_options options = countdown_options(attach, legacy);
    options.workers.environment_only = false;
    options.socket.use = COX_SOCKET_IF_POSSIBLE;
    if (legacy)
        options.workers.command = native;
    assert_ok(cox_executor_start(&options, &live, test_err()));
}

static void rank_await_death(uint32_t rank)
{
    struct cox_executor_status status;
    struct cox_rank_status ranks[COUNTDOWN_RANK_COUNT];
    uint64_t deadline_ns = test_patience();
    do {
        cox_executor_read_status(live, &status, ranks);
        assert_true(cox_now_ns() < deadline_ns);
        nanosleep(&(struct timespec){.tv_nsec = COX_NSEC_PER_MSEC}, NULL);
    } while (ranks[rank].liveness != COX_LIVENESS_DEAD);
}

/* The control socket notices deaths with a delay; after a full connection it has noticed the
 * earlier ones. */
static void socket_settle(void)
{
    const struct cox_hello hello = {.role = COX_HELLO_COMMAND};
    struct cox_control_connection session = {.fd = -1};
    assert_int_equal(cox_control_socket_connect(cox_executor_socket(live), &hello, test_patience(),
                                                &session, NULL),
                     COX_UNSUPPORTED);
}

/* What deaths cost is not to be counted. */
static void dead_prepare(void)
{
    group_prepare();
    assert_int_equal(cox_executor_kill(live, 1, NULL), 0);
    rank_await_death(1);
    socket_settle();
}

static void all_dead_prepare(void)
{
    group_prepare();
    for (uint32_t rank = 0; rank < COUNTDOWN_RANK_COUNT; rank++)
        assert_int_equal(cox_executor_kill(live, rank, NULL), 0);
    for (uint32_t rank = 0; rank < COUNTDOWN_RANK_COUNT; rank++)
        rank_await_death(rank);
    socket_settle();
}

CONSTRUCT(restart_one, cox_executor_restart(live, 1, test_patience(), err))
CONSTRUCT(restart_all, cox_executor_restart(live, COX_RANK_ALL, test_patience(), err))

/* Whatever came of it: it can be tried again, and then all reply. */
static void group_restore(void)
{
    const struct cox_submit_options options = {.size = sizeof(struct cox_submit_options),
                                               .gather = COX_GATHER_ALL,
                                               .deadline_ns = test_patience()};
    int r = legacy ? cox_executor_restart(live, COX_RANK_ALL, test_patience(), test_err())
                   : cox_executor_restart(live, 1, test_patience(), test_err());
    if (r == 0 && !legacy)
        r = cox_executor_restart(live, 0, test_patience(), test_err());
    if (r == 0 && !legacy)
        r = cox_executor_call_opaque(live, "echo x", 6, &options, NULL, NULL, test_err());
    assert_ok(r);
    live = cox_executor_free(live);
}

/* A worker that could not be let in tells why in its last line. */
static const int worker_ended[] = {COX_PEER_DEAD, 0};

/* ---- tests ---- */

TEST(b15_a_region_that_could_not_be_renewed_is_renewed_later)
{
    COUNTDOWN(EACH_MODE,
              SUBJECT(region_renew, AROUND(region_prepare, region_restore), .lenient = true));
    COUNTDOWN(FAIL_ONE | FAIL_REST,
              SUBJECT(channel_renew, AROUND(channel_prepare, channel_restore), .lenient = true));
}

static void restarts_try(enum cox_attach how, bool native_workers)
{
    attach = how;
    legacy = native_workers;
    COUNTDOWN(FAIL_ONE,
              SUBJECT(restart_all, AROUND(all_dead_prepare, group_restore), .codes = worker_ended,
                      .word = "exited with status", .lenient = true, .costly = true));
    if (!legacy)
        COUNTDOWN(FAIL_ONE | INTERRUPT,
                  SUBJECT(restart_one, AROUND(dead_prepare, group_restore), .codes = worker_ended,
                          .word = "exited with status", .lenient = true, .costly = true));
}

TEST(b15_p8_a_restart_is_undone_when_any_call_fails)
{
    restarts_try(COX_ATTACH_NAMED, false);
    restarts_try(COX_ATTACH_SEALED, false);
    restarts_try(COX_ATTACH_NAMED, true);
}

int main(void)
{
    countdown_environment_shrink();
    return test_run(NULL, NULL);
}
