/* Ranks that get other processes, with each of the calls for that failing in turn: then the rank is
 * dead, nothing of the attempt is left, and the next one works. */
#include "channel/attach/named/names.h"
#include "channel/attach/named/named_channel.h"
#include "channel/shm/channel.h"
#include "channel/shm/region.h"
#include "channel/socket/control_socket.h"
#include "coordinator/executor/core.h"
#include "countdown.h"
#include "testing.h"

#include <coxswain/executor.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define RANK_COUNT 2

static const char *group_name(void)
{
    static char name[64];
    return countdown_name(name, "r");
}

/* ---- regions that legacy workers took along ---- */

static const char *object_name(void)
{
    static char name[65] = "/";
    countdown_name(name + 1, "o");
    return name;
}

static struct cox_region region;

static void region_prepare(void)
{
    struct cox_error err = {0};
    if (cox_region_create(&region, object_name(), 8192, &err))
        fail_msg("%s", err.text);
}

static void region_restore(void)
{
    cox_region_detach(&region);
    cox_region_unlink(object_name());
}

/* The mapping stays where it was, and can be written to, whatever happens. */
static int region_renew(void *object, struct cox_error *err)
{
    (void)object;
    const struct cox_region before = region;
    int r = cox_region_renew(&region, object_name(), err);
    assert_ptr_equal(region.base, before.base);
    assert_int_equal(region.size, before.size);
    memset(region.base, 1, region.size);
    return r;
}

static const struct countdown_subject one_region =
    SUBJECT(region_renew, AROUND(region_prepare, region_restore), .lenient = true);

static struct cox_control control = COX_CONTROL_NONE;
static struct cox_channel channel;

static void channel_prepare(void)
{
    struct cox_geometry_choice choice = {.depth = 1};
    struct cox_geometry geometry;
    struct cox_error err = {0};
    assert_int_equal(cox_geometry_resolve(RANK_COUNT, &choice, &geometry, NULL), 0);
    if (cox_control_create(&control, group_name(), &geometry, &err) ||
        cox_channel_create(&channel, group_name(), &control, COX_CHANNEL_LINK, &err))
        fail_msg("%s", err.text);
}

static void channel_restore(void)
{
    cox_control_unlink_names(group_name(), &control.geometry, COX_CHANNEL_COUNT);
    cox_channel_close(&channel);
    cox_control_close(&control);
}

CONSTRUCT(channel_renew, cox_channel_renew_regions(&channel, group_name(), err))

static const struct countdown_subject one_channel =
    SUBJECT(channel_renew, AROUND(channel_prepare, channel_restore), .lenient = true);

/* ---- groups ---- */

static const char *const scripted[] = {COX_TEST_BIN_DIR "/scripted_worker", NULL};
static const char *const native[] = {COX_TEST_BIN_DIR "/legacy_native", NULL};

static enum cox_attach attach;
static bool legacy;
static struct cox_executor *live;

static void group_prepare(void)
{
    struct cox_executor_options options = {
        .size = sizeof(struct cox_executor_options),
        .spin = COX_SPIN_OFF, /* a failure to read the processors is not an error */
        .name = group_name(),
        .rank_count = RANK_COUNT,
        .workers.command = legacy ? native : scripted,
        .depth = 1,
        .memory.attach = attach,
        .workers.legacy = legacy,
        .times.start_timeout_ms = TEST_PATIENCE_MS,
        /* Legacy workers may not have attached yet, and then hear no goodbye. */
        .times.finalize_ms = legacy ? 1 : TEST_PATIENCE_MS,
    };
    struct cox_error err = {0};
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
        options.memory.request_size[c] = 16384;
        options.memory.response_size[c] =
            legacy ? RANK_COUNT * COX_LEGACY_SLOT_STRIDE : UINT64_C(131072);
    }
    if (cox_executor_start(&options, &live, &err))
        fail_msg("%s", err.text);
}

static void rank_await_death(uint32_t rank)
{
    struct cox_executor_status status;
    struct cox_rank_status ranks[RANK_COUNT];
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
    for (uint32_t rank = 0; rank < RANK_COUNT; rank++)
        assert_int_equal(cox_executor_kill(live, rank, NULL), 0);
    for (uint32_t rank = 0; rank < RANK_COUNT; rank++)
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
    struct cox_error err = {0};
    int r = legacy ? cox_executor_restart(live, COX_RANK_ALL, test_patience(), &err)
                   : cox_executor_restart(live, 1, test_patience(), &err);
    if (r == 0 && !legacy)
        r = cox_executor_restart(live, 0, test_patience(), &err);
    if (r == 0 && !legacy)
        r = cox_executor_call_opaque(live, "echo x", 6, &options, NULL, NULL, &err);
    if (r)
        fail_msg("once more: %d: %s", r, err.text);
    live = cox_executor_free(live);
}

/* A worker that could not be let in tells why in its last line. */
static const int worker_ended[] = {COX_PEER_DEAD, 0};

static const struct countdown_subject one_rank =
    SUBJECT(restart_one, AROUND(dead_prepare, group_restore), .codes = worker_ended,
            .word = "exited with status", .lenient = true, .costly = true);
static const struct countdown_subject all_ranks =
    SUBJECT(restart_all, AROUND(all_dead_prepare, group_restore), .codes = worker_ended,
            .word = "exited with status", .lenient = true, .costly = true);

/* ---- tests ---- */

TEST(b15_a_region_that_could_not_be_renewed_is_renewed_later)
{
    countdown_once(&one_region);
    countdown_sticky(&one_region);
    countdown_interrupted(&one_region);
    countdown_once(&one_channel);
    countdown_sticky(&one_channel);
}

static void each_restart(enum cox_attach how)
{
    attach = how;
    legacy = false;
    countdown_once(&one_rank);
    countdown_once(&all_ranks);
    countdown_interrupted(&one_rank);
}

TEST(b15_p8_a_restart_is_undone_when_any_call_fails_named)
{
    each_restart(COX_ATTACH_NAMED);
}

TEST(b15_p8_a_restart_is_undone_when_any_call_fails_sealed)
{
    each_restart(COX_ATTACH_SEALED);
}

TEST(b15_p8_a_restart_of_legacy_workers_is_undone_when_any_call_fails)
{
    attach = COX_ATTACH_NAMED;
    legacy = true;
    countdown_once(&all_ranks);
}

/* Every variable is two allocations for every process. */
static void environment_shrink(void)
{
    char path[4096];
    snprintf(path, sizeof path, "%s", getenv("PATH"));
    clearenv();
    setenv("PATH", path, 1);
    setenv("ASAN_OPTIONS", "detect_leaks=0", 1);
}

int main(void)
{
    environment_shrink();
    return test_run(NULL, NULL);
}
