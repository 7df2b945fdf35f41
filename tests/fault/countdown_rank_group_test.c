/* The rank group's constructor with each of its calls failing in turn: alone under a name, alone in
 * memory that came another way, and with another rank that waits. */
#include "channel/base/peer.h"
#include "worker/group/group_layout.h"
#include "countdown.h"
#include "testing.h"

static char name[64];
static int memory_fd = -1;
static pid_t other = -1;

static int group_join(uint32_t rank, uint32_t rank_count, void *object, struct cox_error *err)
{
    const struct cox_group_options options = {
        .size = sizeof(struct cox_group_options),
        .name = memory_fd < 0 ? name : NULL,
        .fd = memory_fd,
        .rank = rank,
        .rank_count = rank_count,
        .deadline_ns = cox_deadline_after_ms(TEST_PATIENCE_MS),
    };
    return cox_group_join(&options, object, err);
}

CONSTRUCT(join_alone, group_join(0, 1, object, err))
CONSTRUCT(join_two, group_join(0, 2, object, err))
DESTROY(leave, cox_group_leave(*(struct cox_group **)object))

static void prepare_name(void)
{
    countdown_name(name, "ranks");
}

static void prepare_memory(void)
{
    memory_fd = memfd_create("group", MFD_CLOEXEC);
    assert_int_equal(ftruncate(memory_fd, (off_t)cox_group_memory_size(2, 0)), 0);
}

static void restore_memory(void)
{
    cox_close_fd(&memory_fd);
}

/* The other rank is a process that does nothing: what it would do would be counted, too. Its words
 * are written here. */
static void prepare_other(void)
{
    uint64_t start;
    prepare_memory();
    other = fork();
    assert_true(other >= 0);
    while (other == 0)
        pause();
    assert_int_equal(cox_peer_start_time(other, &start), 0);
    size_t size = cox_group_memory_size(2, 0);
    struct cox_group_layout *layout =
        mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, memory_fd, 0);
    assert_ptr_not_equal(layout, MAP_FAILED);
    struct cox_group_layout_identity *identity = &layout->ranks[1].identity;
    identity->said_count = 2;
    identity->said_size = COX_GROUP_VALUE_SIZE_MIN;
    identity->holder = cox_group_holder(COX_GROUP_JOINED, other, start);
    munmap(layout, size);
}

static void restore_other(void)
{
    kill(other, SIGKILL);
    assert_int_equal(waitpid(other, NULL, 0), other);
    restore_memory();
}

COUNTDOWN_TEST(
    b15_b19_b47_the_first_failure_is_reported_and_nothing_is_left, EACH_MODE,
    NAMED_SUBJECT("group_join, alone under a name", join_alone, MAKES(struct cox_group *, leave),
                  .lenient = true, .prepare = prepare_name),
    NAMED_SUBJECT("group_join, alone in memory by fd", join_alone, MAKES(struct cox_group *, leave),
                  AROUND(prepare_memory, restore_memory), .lenient = true),
    NAMED_SUBJECT("group_join, with another rank", join_two, MAKES(struct cox_group *, leave),
                  AROUND(prepare_other, restore_other), .lenient = true))
