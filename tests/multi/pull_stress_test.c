/*
 * Pulls from a process that gives its blocks to other sequences all the time, as fast as it can:
 * requirement P9. What is pulled is the sequence's that was asked for, every word of it, or the
 * pull is stale. Then the same while readers are killed.
 */
#include "testing.h"

#include <coxswain/handle.h>
#include <coxswain/kv.h>
#include "engine/rank/links.h"
#include "engine/rank/pulls.h"

#define BLOCK_COUNT 4u

static const struct cox_cache_geometry geometry = {
    .layer_count = 4,
    .kv_head_count = 4,
    .head_dim = 16,
    .block_size = 16,
    .block_count = BLOCK_COUNT,
};

/* Of all processes. */
struct board {
    struct cox_kv_pool kv;
    _Atomic bool ready, readers_stop, stop;
    /* the sequence that has the block; about */
    _Atomic uint64_t present[BLOCK_COUNT];
    _Atomic uint64_t renewed;
    _Atomic uint64_t pulled, stale;
    /* line */
    _Atomic int failed;
};
static struct board *board;

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            atomic_store(&board->failed, __LINE__);                                                \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

static uint64_t word_of(uint64_t sequence, uint32_t block, size_t i)
{
    return (sequence * 0x9e3779b97f4a7c15u) ^ ((uint64_t)block << 32) ^ i;
}

static void fill(uint64_t *words, uint64_t sequence, uint32_t block)
{
    for (size_t i = 0; i < cox_cache_block_size(&geometry) / 8; i++)
        words[i] = word_of(sequence, block, i);
}

static bool is_whole(const uint64_t *words, uint64_t sequence, uint32_t block)
{
    bool whole = true;
    for (size_t i = 0; i < cox_cache_block_size(&geometry) / 8; i++)
        whole = whole && words[i] == word_of(sequence, block, i);
    return whole;
}

static _Noreturn void owner_main(void)
{
    struct cox_cache *cache = NULL;
    struct cox_exporter *exporter = NULL;
    struct cox_handle handle;
    CHECK(cox_cache_new(&geometry, &cache, NULL) == 0);
    CHECK(cox_exporter_new(NULL, &exporter, NULL) == 0);
    CHECK(cox_exporter_export(exporter, cox_kv_blocks_info(cox_cache_kv_blocks(cache)).fd, 0, 0,
                              &handle, NULL) == 0);
    memcpy(board->kv.handle, &handle, sizeof handle);
    board->kv.block_count = BLOCK_COUNT;
    board->kv.layout.block_bytes = cox_cache_block_size(&geometry);
    atomic_store(&board->ready, true);
    for (uint64_t sequence = 1; !atomic_load(&board->stop); sequence++) {
        const uint32_t block = (uint32_t)(sequence % BLOCK_COUNT);
        cox_cache_take(cache, block);
        fill(cox_cache_block(cache, block), sequence, block);
        cox_cache_give(cache, block, sequence);
        atomic_store(&board->present[block], sequence);
        atomic_fetch_add(&board->renewed, 1);
        /* On one processor they would never meet otherwise. */
        if (sequence % 7 == 0)
            sched_yield();
    }
    cox_exporter_free(exporter);
    cox_cache_free(cache);
    _exit(0);
}

static struct cox_link *attach(struct cox_links **ret_links)
{
    const struct cox_link_target target = {.cluster = "A", .epoch = 1, .kv = &board->kv};
    struct cox_link *link = NULL;
    int r;
    CHECK(cox_links_new(NULL, ret_links) == 0);
    cox_links_use_layout(*ret_links, &board->kv.layout);
    CHECK(cox_links_set(*ret_links, &target, NULL) == 0);
    while ((r = cox_links_take(*ret_links, "A", 1, &link, NULL)) == COX_STATE)
        sched_yield();
    CHECK(r == 0);
    return link;
}

static _Noreturn void reader_main(void)
{
    struct cox_links *links;
    struct cox_pulls *pulls = NULL;
    struct cox_cache *cache = NULL;
    struct cox_link *link = attach(&links);
    CHECK(cox_pulls_new(&pulls) == 0 && cox_cache_new(&geometry, &cache, NULL) == 0);
    cox_pulls_open(pulls, cache);
    for (uint32_t i = 0; !atomic_load(&board->readers_stop); i++) {
        const uint32_t block = i % BLOCK_COUNT;
        const struct cox_pull_pair pair = {block, block};
        struct cox_pull pull = {
            .request_id = "r",
            .link = link,
            .pairs = &pair,
            .count = 1,
            .from_user = atomic_load(&board->present[block]),
            .to_user = 5,
            .deadline_ns = COX_DEADLINE_NEVER,
            .lease_ns = COX_DEADLINE_NEVER,
        };
        if (!pull.from_user)
            continue;
        /* Also on busy processors some are renewed between the choice and the copy. */
        if (i % 8 == 0)
            sched_yield();
        int r = cox_pulls_run(pulls, &pull, NULL);
        CHECK(r == 0 || r == COX_STALE);
        CHECK(r || is_whole(cox_cache_block(cache, block), pull.from_user, block));
        atomic_fetch_add(r ? &board->stale : &board->pulled, 1);
    }
    cox_links_release(links, link);
    cox_links_free(links);
    cox_pulls_free(pulls);
    cox_cache_free(cache);
    _exit(0);
}

static pid_t start(void (*main_of)(void))
{
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        main_of();
    }
    return pid;
}

static void expect_exit(pid_t pid)
{
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (!WIFEXITED(status) || WEXITSTATUS(status))
        fail_msg("a process ended with %#x, line %d", (unsigned)status,
                 atomic_load(&board->failed));
}

static void board_open(void)
{
    board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(board, MAP_FAILED);
}

static bool board_goes_on(uint64_t pulled, uint64_t stale)
{
    return atomic_load(&board->failed) == 0 &&
           (atomic_load(&board->pulled) < pulled || atomic_load(&board->stale) < stale);
}

/* Until this much has been pulled and refused since. */
static void await(uint64_t pulled, uint64_t stale)
{
    AWAIT(!board_goes_on(pulled, stale));
    if (board_goes_on(pulled, stale) || atomic_load(&board->failed))
        fail_msg("%llu pulled, %llu stale, line %d", (unsigned long long)board->pulled,
                 (unsigned long long)board->stale, atomic_load(&board->failed));
}

static void board_close(pid_t owner)
{
    atomic_store(&board->stop, true);
    expect_exit(owner);
    print_message("%llu renewed, %llu pulled, %llu stale\n", (unsigned long long)board->renewed,
                  (unsigned long long)board->pulled, (unsigned long long)board->stale);
    munmap(board, sizeof *board);
}

static pid_t owner_start(void)
{
    pid_t owner;
    board_open();
    owner = start(owner_main);
    AWAIT(!(!atomic_load(&board->ready) && !atomic_load(&board->failed)));
    return owner;
}

TEST(p9_what_is_pulled_while_the_owner_renews_is_whole_or_stale)
{
    const pid_t owner = owner_start();
    pid_t readers[3];
    for (int i = 0; i < 3; i++)
        readers[i] = start(reader_main);
    await(20000, 1000);
    atomic_store(&board->readers_stop, true);
    for (int i = 0; i < 3; i++)
        expect_exit(readers[i]);
    board_close(owner);
}

/* Wherever they are: the owner continues, and nothing of theirs is left. */
TEST(p9_readers_killed_anywhere_delay_no_other)
{
    const pid_t owner = owner_start();
    for (int i = 0; i < 60; i++) {
        pid_t reader = start(reader_main);
        await(atomic_load(&board->pulled) + 50 + (uint64_t)i, 0);
        kill(reader, SIGKILL);
        assert_int_equal(waitpid(reader, NULL, 0), reader);
        const uint64_t renewed = atomic_load(&board->renewed);
        AWAIT(!(atomic_load(&board->renewed) < renewed + 10 * BLOCK_COUNT &&
                !atomic_load(&board->failed)));
    }
    board_close(owner);
}
