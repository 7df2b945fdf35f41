/* The memory in which ranks exchange slices, and the engine above it, with each of their calls
 * failing in turn. */
#include "countdown.h"
#include "testing.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

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
    struct cox_error err = {0};

    group_fd = memfd_create("countdown", MFD_CLOEXEC);
    assert_true(group_fd >= 0);
    assert_int_equal(fchmod(group_fd, 0600), 0);
    assert_int_equal(ftruncate(group_fd, (off_t)cox_group_memory_size(1, COX_GROUP_VALUE_SIZE_MIN)),
                     0);
    options.fd = group_fd;
    if (cox_group_join(&options, &group, &err))
        fail_msg("%s", err.text);
}

static void group_drop(void)
{
    group = cox_group_leave(group);
    close(group_fd);
}

static int exchange_new(void *object, struct cox_error *err)
{
    return cox_tensor_gather_new(group, 8, 1000, COX_DEADLINE_NEVER, object, err);
}

static void exchange_free(void *object)
{
    cox_tensor_gather_freep(object);
}

static int engine_new(void *object, struct cox_error *err)
{
    static const struct cox_engine_options options = {.block_count = 4};

    (void)err;
    return cox_engine_new(&options, object);
}

static void engine_free(void *object)
{
    cox_engine_free(*(struct cox_engine **)object);
}

static int links_new(void *object, struct cox_error *err)
{
    (void)err;
    return cox_links_new(NULL, object);
}

static void links_free(void *object)
{
    cox_links_free(*(struct cox_links **)object);
}

static int pulls_new(void *object, struct cox_error *err)
{
    (void)err;
    return cox_pulls_new(object);
}

static void pulls_free(void *object)
{
    cox_pulls_free(*(struct cox_pulls **)object);
}

static int transfer_new(void *object, struct cox_error *err)
{
    static const struct cox_transfer_options options;

    (void)err;
    return cox_transfer_new(&options, object);
}

static void transfer_free(void *object)
{
    cox_transfer_free(*(struct cox_transfer **)object);
}

static const struct countdown_subject transfers[] = {
    {
        .name = "links_new",
        .size = sizeof(struct cox_links *),
        .construct = links_new,
        .destroy = links_free,
        .wordless = true,
    },
    {
        .name = "pulls_new",
        .size = sizeof(struct cox_pulls *),
        .construct = pulls_new,
        .destroy = pulls_free,
        .wordless = true,
    },
    {
        .name = "transfer_new",
        .size = sizeof(struct cox_transfer *),
        .construct = transfer_new,
        .destroy = transfer_free,
        .wordless = true,
    },
};
static const struct countdown_subject exchange = {
    .name = "exchange_new",
    .size = sizeof(struct cox_tensor_gather *),
    .construct = exchange_new,
    .destroy = exchange_free,
    .prepare = group_make,
    .restore = group_drop,
    .codes = codes,
    .word = "is none", /* the group, of an fd that it could not look at */
    .lenient = true,
    .costly = true,
};
static const struct countdown_subject engine = {
    .name = "engine_new",
    .size = sizeof(struct cox_engine *),
    .construct = engine_new,
    .destroy = engine_free,
    .wordless = true,
};

TEST(b15_b19_an_exchange_is_made_whole_or_not_at_all)
{
    countdown_once(&exchange);
    countdown_sticky(&exchange);
    countdown_interrupted(&exchange);
}

TEST(b15_b19_an_engine_is_made_whole_or_not_at_all)
{
    countdown_once(&engine);
    countdown_sticky(&engine);
}

TEST(b15_b19_links_and_pulls_are_made_whole_or_not_at_all)
{
    for (size_t i = 0; i < sizeof transfers / sizeof transfers[0]; i++) {
        countdown_once(&transfers[i]);
        countdown_sticky(&transfers[i]);
    }
}
