#include "crew.h"
#include "tests/lib/test.h"

#include <linux/futex.h>

#define BROKEN 99

static void broken(const char *what)
{
    fprintf(stderr, "rank: %s\n", what);
    _exit(BROKEN);
}

void crew_open(struct crew *crew, uint32_t rank_count)
{
    const size_t size = CREW_RANK_COUNT_MAX * sizeof(struct crew_rank) + 128;
    uint8_t *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    assert_true(memory != MAP_FAILED);
    *crew = (struct crew){
        .rank_count = rank_count,
        .group_fd = memfd_create("crew", MFD_CLOEXEC),
        .void_through = (_Atomic uint64_t *)memory,
        .asked = (_Atomic uint32_t *)(memory + 64),
        .met = (_Atomic uint32_t *)(memory + 96),
        .ranks = (struct crew_rank *)(memory + 128),
    };
    assert_true(crew->group_fd >= 0);
    assert_int_equal(fchmod(crew->group_fd, 0600), 0);
    assert_int_equal(ftruncate(crew->group_fd,
                               (off_t)cox_group_memory_size(rank_count, COX_GROUP_VALUE_SIZE_MIN)),
                     0);
}

void crew_start(struct crew *crew, uint32_t rank,
                int (*fn)(struct crew *crew, uint32_t rank, struct crew_rank *self, void *context),
                void *context)
{
    struct crew_rank *self = &crew->ranks[rank];
    const pid_t parent = getpid();

    crew->pids[rank] = fork();
    assert_true(crew->pids[rank] >= 0);
    if (crew->pids[rank] > 0)
        return;
    /* A test that fails leaves no process behind. */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != parent)
        broken("nobody to work for");
    self->result = fn(crew, rank, self, context);
    _exit(0);
}

void crew_wait(struct crew *crew)
{
    for (uint32_t rank = 0; rank < crew->rank_count; rank++)
        if (crew->pids[rank] > 0) {
            assert_int_equal(waitpid(crew->pids[rank], &crew->statuses[rank], 0), crew->pids[rank]);
            crew->pids[rank] = 0;
            if (WIFEXITED(crew->statuses[rank]) && WEXITSTATUS(crew->statuses[rank]) == BROKEN)
                fail_msg("rank %u is broken", rank);
        }
}

void crew_close(struct crew *crew)
{
    munmap((void *)crew->void_through, CREW_RANK_COUNT_MAX * sizeof(struct crew_rank) + 128);
    close(crew->group_fd);
}

/* As cox_batch_cancelled. */
static bool is_void(void *context)
{
    const struct crew *crew = context;

    if (!crew->step)
        return false;
    atomic_fetch_add(crew->asked, 1);
    syscall(SYS_futex, crew->asked, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    return crew->step <= atomic_load(crew->void_through);
}

struct cox_group *crew_join(struct crew *crew, uint32_t rank)
{
    struct cox_group *group = NULL;
    const struct cox_group_options options = {
        .size = sizeof(struct cox_group_options),
        .fd = crew->group_fd,
        .rank = rank,
        .rank_count = crew->rank_count,
        .incarnation = 7,
        .deadline_ns = COX_DEADLINE_NEVER,
        .cancelled = is_void,
        .context = crew,
    };

    if (cox_group_join(&options, &group, test_err()))
        broken(test_error.text);
    if (cox_group_align(group, 1))
        broken("align");
    return group;
}

void crew_keep(struct crew_rank *self, const float *numbers, size_t count)
{
    if (count > CREW_NUMBER_COUNT - self->number_count)
        broken("too many numbers");
    memcpy(self->numbers + self->number_count, numbers, count * sizeof(float));
    self->number_count += count;
}

/* The lower half of a word is what little-endian machines have at its address. */
void crew_await_void(struct crew *crew, uint64_t step)
{
    uint64_t seen;

    while ((seen = atomic_load(crew->void_through)) < step)
        syscall(SYS_futex, crew->void_through, FUTEX_WAIT, (uint32_t)seen, NULL, NULL, 0);
}

void crew_set_void(struct crew *crew, uint64_t step)
{
    atomic_store(crew->void_through, step);
    syscall(SYS_futex, crew->void_through, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void crew_meet(struct crew *crew, uint32_t count)
{
    uint32_t seen = atomic_fetch_add(crew->met, 1) + 1;

    syscall(SYS_futex, crew->met, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    for (; seen < count; seen = atomic_load(crew->met))
        syscall(SYS_futex, crew->met, FUTEX_WAIT, seen, NULL, NULL, 0);
}

void crew_ask(struct crew *crew)
{
    atomic_fetch_add(crew->asked, 1);
    syscall(SYS_futex, crew->asked, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void crew_await_asked(struct crew *crew)
{
    while (atomic_load(crew->asked) == 0)
        syscall(SYS_futex, crew->asked, FUTEX_WAIT, 0, NULL, NULL, 0);
}
