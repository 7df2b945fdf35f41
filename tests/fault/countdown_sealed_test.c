/* Memory without names, and groups that have no other, with each of their calls failing in turn. */
#include "channel/shm/fd_bundle.h"
#include "channel/shm/region.h"
#include "channel/attach/sealed/sealed.h"
#include "coordinator/executor/executor_internal.h"
#include "coordinator/process/supervise.h"
#include "countdown.h"
#include "testing.h"

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

static void named_prepare(void)
{
    _cox_cleanup_(cox_region_detach) struct cox_region region = {0};
    assert_ok(cox_region_create(&region, countdown_object(), 8192, test_err()));
}

static void named_restore(void)
{
    cox_region_unlink(countdown_object());
}

CONSTRUCT(region_open, cox_region_open(countdown_object(), COX_REGION_WRITE, object, err))
DESTROY(fd_close, cox_close_fd(object))

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
    assert_ok(sealed_create(&there, test_err()));
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

/* ---- whole groups. Not with all calls failing from one on: the control socket's thread fails at
 * the same time, so the first failure is not always the reported one. ---- */

static int executor_start(void *object, struct cox_error *err)
{
    const struct cox_executor_options options = countdown_options(COX_ATTACH_SEALED, false);
    return cox_executor_start(&options, object, err);
}

static int executor_start_without_socket(void *object, struct cox_error *err)
{
    struct cox_executor_options options = countdown_options(COX_ATTACH_SEALED, false);
    options.socket.use = COX_SOCKET_NONE;
    return cox_executor_start(&options, object, err);
}

DESTROY(executor_free, cox_executor_free(*(struct cox_executor **)object))

/* A worker that the control socket could not let in tells why in its last line. */
static const int worker_ended[] = {COX_PEER_DEAD, 0};

/* ---- tests ---- */

COUNTDOWN_TEST(b4_b15_b19_b47_no_memory_without_a_name_stays_when_any_call_fails, EACH_MODE,
               SUBJECT(unnamed_create, MAKES(struct unnamed, unnamed_destroy), .lenient = true),
               SUBJECT(region_open, MAKES(int, fd_close), AROUND(named_prepare, named_restore)),
               SUBJECT(sealed_create, MAKES(struct memory, sealed_destroy), .lenient = true,
                       .in_place = true),
               SUBJECT(sealed_attach, MAKES(struct memory, sealed_destroy),
                       AROUND(memory_prepare, memory_restore), .in_place = true),
               SUBJECT(sealed_renew, AROUND(memory_prepare, memory_restore), .lenient = true),
               SUBJECT(bundle_adopt, MAKES(struct cox_fd_bundle, bundle_close),
                       AROUND(memory_prepare, memory_restore), .in_place = true))

COUNTDOWN_TEST(
    b4_b15_nothing_is_left_of_a_sealed_group_when_any_call_of_its_start_fails, FAIL_ONE | INTERRUPT,
    NAMED_SUBJECT("executor_start, sealed", executor_start,
                  MAKES(struct cox_executor *, executor_free), .codes = worker_ended,
                  .word = "exited with status", .lenient = true, .costly = true),
    NAMED_SUBJECT("executor_start, sealed, without a socket", executor_start_without_socket,
                  MAKES(struct cox_executor *, executor_free), .lenient = true, .costly = true))

int main(void)
{
    countdown_environment_shrink();
    geometry = countdown_geometry(&cox_attach_sealed);
    return test_run(NULL, NULL);
}
