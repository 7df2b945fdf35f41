/* Memory without names, and groups that have no other, with each of their calls failing in turn. */
#include "channel/base/idioms.h"
#include "channel/shm/fd_bundle.h"
#include "channel/shm/region.h"
#include "channel/attach/sealed/sealed.h"
#include "coordinator/executor/executor_internal.h"
#include "coordinator/process/supervise.h"
#include "countdown.h"
#include "testing.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define RANK_COUNT 2

static struct cox_geometry geometry_make(void)
{
    struct cox_geometry_choice choice = {.depth = 2, .mode = &cox_attach_sealed};
    struct cox_geometry made;
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
        choice.request_size[c] = 8192;
        choice.response_size[c] = 65536;
    }
    assert_int_equal(cox_geometry_resolve(RANK_COUNT, &choice, &made, NULL), 0);
    return made;
}

static struct cox_geometry geometry;

/* ---- one region ---- */

struct unnamed {
    struct cox_region region;
    int fd;
};

static int unnamed_create(void *object, struct cox_error *err)
{
    struct unnamed *unnamed = object, made = {.fd = -1};
    int r = cox_region_create_unnamed(&made.region, "countdown", 8192, F_SEAL_SHRINK | F_SEAL_GROW,
                                      false, &made.fd, err);
    if (r == 0)
        *unnamed = made;
    return r;
}

static void unnamed_destroy(void *object)
{
    struct unnamed *unnamed = object;
    cox_region_detach(&unnamed->region);
    cox_close_fd(&unnamed->fd);
}

static const char *object_name(void)
{
    static char name[65] = "/";
    countdown_name(name + 1, "o");
    return name;
}

static void named_prepare(void)
{
    struct cox_region region = {0};
    struct cox_error err = {0};
    if (cox_region_create(&region, object_name(), 8192, &err))
        fail_msg("%s", err.text);
    cox_region_detach(&region);
}

static void named_restore(void)
{
    cox_region_unlink(object_name());
}

CONSTRUCT(region_open, cox_region_open(object_name(), COX_REGION_WRITE, object, err))
DESTROY(fd_close, cox_close_fd(object))

static const struct countdown_subject regions[] = {
    SUBJECT(unnamed_create, MAKES(struct unnamed, unnamed_destroy), .lenient = true),
    SUBJECT(region_open, MAKES(int, fd_close), AROUND(named_prepare, named_restore)),
};

/* ---- the memory of a group ---- */

struct memory {
    struct cox_sealed sealed;
    struct cox_control control;
};

static struct memory there; /* the coordinator's, where a rank is tried */

static int sealed_create(void *object, struct cox_error *err)
{
    struct memory *memory = object;
    return cox_sealed_create(&memory->sealed, &memory->control, &geometry, false, err);
}

static void sealed_destroy(void *object)
{
    struct memory *memory = object;
    cox_sealed_close(&memory->sealed);
    cox_control_close(&memory->control);
}

static void memory_prepare(void)
{
    struct cox_error err = {0};
    if (sealed_create(&there, &err))
        fail_msg("%s", err.text);
}

static void memory_restore(void)
{
    sealed_destroy(&there);
}

static int sealed_attach(void *object, struct cox_error *err)
{
    struct memory *memory = object;
    int fds[COX_SEALED_FD_COUNT];
    cox_sealed_hand_out(&there.sealed, 1, fds);
    return cox_sealed_attach(&memory->sealed, &memory->control, 1, fds, err);
}

/* The mapping and the number stay what they were, whatever happens. */
static int sealed_renew(void *object, struct cox_error *err)
{
    (void)object;
    const struct cox_region before = there.sealed.ranks[1];
    const int fd = there.sealed.rank_fds[1];
    int r = cox_sealed_renew_rank(&there.sealed, &geometry, 1, err);
    assert_ptr_equal(there.sealed.ranks[1].base, before.base);
    assert_int_equal(there.sealed.ranks[1].size, before.size);
    assert_int_equal(there.sealed.rank_fds[1], fd);
    memset(before.base, 1, before.size);
    return r;
}

static int bundle_adopt(void *object, struct cox_error *err)
{
    int fds[COX_SEALED_FD_COUNT], own[COX_SEALED_FD_COUNT];
    struct cox_fd_bundle *bundle = object;
    cox_sealed_hand_out(&there.sealed, 1, fds);
    for (int i = 0; i < COX_SEALED_FD_COUNT; i++)
        own[i] = dup(fds[i]);
    int r = cox_fd_bundle_adopt(bundle, own, COX_SEALED_FD_COUNT, err);
    for (int i = 0; i < COX_SEALED_FD_COUNT; i++)
        assert_int_equal(own[i], -1); /* taken or closed */
    return r;
}

DESTROY(bundle_close, cox_fd_bundle_close(object))

static const struct countdown_subject memories[] = {
    SUBJECT(sealed_create, MAKES(struct memory, sealed_destroy), .lenient = true, .in_place = true),
    SUBJECT(sealed_attach, MAKES(struct memory, sealed_destroy),
            AROUND(memory_prepare, memory_restore), .in_place = true),
    SUBJECT(sealed_renew, AROUND(memory_prepare, memory_restore), .lenient = true),
    SUBJECT(bundle_adopt, MAKES(struct cox_fd_bundle, bundle_close),
            AROUND(memory_prepare, memory_restore), .in_place = true),
};

/* ---- whole groups. Not with all calls failing from one on: the control socket's thread fails at
 * the same time, so the first failure is not always the reported one. ---- */

static const char *const scripted[] = {COX_TEST_BIN_DIR "/scripted_worker", NULL};

static struct cox_executor_options executor_options(void)
{
    static char name[64];
    struct cox_executor_options options = {
        .size = sizeof(struct cox_executor_options),
        .spin = COX_SPIN_OFF, /* a failure to read the processors is not an error */
        .name = countdown_name(name, "g"),
        .rank_count = RANK_COUNT,
        .workers.command = scripted,
        .workers.environment_only = true,
        .depth = 1,
        .memory.attach = COX_ATTACH_SEALED,
        .socket.use = COX_SOCKET_REQUIRED, /* or what it fails for would be logged alone */
        .times.start_timeout_ms = TEST_PATIENCE_MS,
        .times.finalize_ms = TEST_PATIENCE_MS,
    };
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
        options.memory.request_size[c] = 16384;
        options.memory.response_size[c] = 131072;
    }
    return options;
}

static int executor_start(void *object, struct cox_error *err)
{
    const struct cox_executor_options options = executor_options();
    return cox_executor_start(&options, object, err);
}

static int executor_start_without_socket(void *object, struct cox_error *err)
{
    struct cox_executor_options options = executor_options();
    options.socket.use = COX_SOCKET_NONE;
    return cox_executor_start(&options, object, err);
}

DESTROY(executor_free, cox_executor_free(*(struct cox_executor **)object))

/* A worker that the control socket could not let in tells why in its last line. */
static const int worker_ended[] = {COX_PEER_DEAD, 0};

static const struct countdown_subject group_start = NAMED_SUBJECT(
    "executor_start, sealed", executor_start, MAKES(struct cox_executor *, executor_free),
    .codes = worker_ended, .word = "exited with status", .lenient = true, .costly = true);

static const struct countdown_subject group_start_without_socket =
    NAMED_SUBJECT("executor_start, sealed, without a socket", executor_start_without_socket,
                  MAKES(struct cox_executor *, executor_free), .lenient = true, .costly = true);

/* ---- tests ---- */

#define EACH(subjects, how)                                                                        \
    do {                                                                                           \
        for (size_t i = 0; i < sizeof(subjects) / sizeof((subjects)[0]); i++)                      \
            how(&(subjects)[i]);                                                                   \
    } while (0)

TEST(b4_b15_no_memory_without_a_name_stays_when_any_call_fails)
{
    EACH(regions, countdown_once);
    EACH(memories, countdown_once);
}

TEST(b19_memory_without_a_name_reports_the_first_of_many_failures)
{
    EACH(regions, countdown_sticky);
    EACH(memories, countdown_sticky);
}

TEST(b47_memory_without_a_name_is_made_through_interruptions)
{
    EACH(regions, countdown_interrupted);
    EACH(memories, countdown_interrupted);
}

TEST(b4_b15_nothing_is_left_of_a_sealed_group_when_any_call_of_its_start_fails)
{
    countdown_once(&group_start);
}

TEST(b4_b15_nor_of_one_whose_processes_inherit_its_memory)
{
    countdown_once(&group_start_without_socket);
    countdown_interrupted(&group_start_without_socket);
}

TEST(a_sealed_group_starts_through_interruptions)
{
    countdown_interrupted(&group_start);
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
    geometry = geometry_make();
    return test_run(NULL, NULL);
}
