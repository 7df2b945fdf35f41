/* The memory in which ranks exchange slices, and the engine above it, with each of their calls
 * failing in turn. */
#include "countdown.h"
#include "testing.h"

#include "engine/rank/engine.h"
#include "engine/rank/tensor_gather.h"
#include "engine/rank/links.h"
#include "engine/rank/pulls.h"
#include "engine/rank/transfer.h"

/* Documented for want of memory; and for a group, one call of whose operation failed. */
static const int codes[] = {COX_NO_SPACE, COX_DENIED, COX_INVALID, 0};

static int group_fd;
static struct cox_group *group;

/* A group of one: what fails in an operation ends it for good, so each attempt has one of its own.
 */
static void group_make(void)
{
    struct cox_group_options options = {.size = sizeof(struct cox_group_options),
                                        .rank_count = 1,
                                        .deadline_ns = COX_DEADLINE_NEVER};

    group_fd = memfd_create("countdown", MFD_CLOEXEC);
    assert_true(group_fd >= 0);
    assert_int_equal(fchmod(group_fd, 0600), 0);
    assert_int_equal(ftruncate(group_fd, (off_t)cox_group_memory_size(1, COX_GROUP_VALUE_SIZE_MIN)),
                     0);
    options.fd = group_fd;
    assert_ok(cox_group_join(&options, &group, test_err()));
}

static void group_drop(void)
{
    group = cox_group_leave(group);
    close(group_fd);
}

CONSTRUCT(exchange_new, cox_tensor_gather_new(group, 8, 1000, COX_DEADLINE_NEVER, object, err))
DESTROY(exchange_free, cox_tensor_gather_freep(object))

static int engine_new(void *object, struct cox_error *err)
{
    static const struct cox_engine_options options = {.block_count = 4};

    (void)err;
    return cox_engine_new(&options, object);
}

DESTROY(engine_free, cox_engine_free(*(struct cox_engine **)object))
CONSTRUCT(links_new, cox_links_new(NULL, object))
DESTROY(links_free, cox_links_free(*(struct cox_links **)object))
CONSTRUCT(pulls_new, cox_pulls_new(object))
DESTROY(pulls_free, cox_pulls_free(*(struct cox_pulls **)object))

static int transfer_new(void *object, struct cox_error *err)
{
    static const struct cox_transfer_options options;

    (void)err;
    return cox_transfer_new(&options, object);
}

DESTROY(transfer_free, cox_transfer_free(*(struct cox_transfer **)object))

COUNTDOWN_TEST(b15_b19_an_exchange_is_made_whole_or_not_at_all, EACH_MODE,
               /* The group "is none", of an fd that it could not look at. */
               SUBJECT(exchange_new, MAKES(struct cox_tensor_gather *, exchange_free),
                       AROUND(group_make, group_drop), .codes = codes, .word = "is none",
                       .lenient = true, .costly = true))
COUNTDOWN_TEST(b15_b19_an_engine_is_made_whole_or_not_at_all, FAIL_ONE | FAIL_REST,
               SUBJECT(engine_new, MAKES(struct cox_engine *, engine_free), .wordless = true),
               SUBJECT(links_new, MAKES(struct cox_links *, links_free), .wordless = true),
               SUBJECT(pulls_new, MAKES(struct cox_pulls *, pulls_free), .wordless = true),
               SUBJECT(transfer_new, MAKES(struct cox_transfer *, transfer_free), .wordless = true))
