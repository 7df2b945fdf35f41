/* Links to KV blocks of this same process, and pulls through them: what needs no groups. */
#include "coordinator/executor/requests_internal.h"
#include "engine/rank/links.h"
#include "engine/rank/pulls.h"
#include "tests/lib/rights.h"
#include "tests/lib/test.h"

#include <coxswain/kv.h>

static const struct cox_cache_geometry geometry = {
    .layer_count = 1,
    .kv_head_count = 1,
    .head_dim = 4,
    .block_size = 4,
    .block_count = 80,
};

/* Another group's rank, in this process. */
struct remote {
    struct cox_cache *cache;
    struct cox_exporter *exporter;
    struct cox_kv_pool kv;
};

static void remote_free(void *object)
{
    struct remote *remote = object;
    cox_exporter_free(remote->exporter);
    cox_cache_free(remote->cache);
    free(remote);
}

static struct remote *remote_new(void)
{
    struct remote *remote = test_own(calloc(1, sizeof(*remote)), remote_free);
    struct cox_handle handle;
    assert_ok(cox_cache_new(&geometry, &remote->cache, test_err()));
    assert_ok(cox_exporter_new(NULL, &remote->exporter, test_err()));
    assert_ok(cox_exporter_export(remote->exporter,
                                  cox_kv_blocks_info(cox_cache_kv_blocks(remote->cache)).fd, 0, 0,
                                  &handle, test_err()));
    memcpy(remote->kv.handle, &handle, sizeof(handle));
    remote->kv.block_count = geometry.block_count;
    remote->kv.layout = (struct cox_kv_layout){
        .rank_count = 1,
        .layer_count = 1,
        .kv_head_count = 1,
        .head_dim = 4,
        .block_size = 4,
        .element_bytes = 4,
        .block_bytes = cox_cache_block_size(&geometry),
    };
    return remote;
}

TEST_OWNED(cox_links_free)

static struct cox_links *links_new(const struct remote *remote)
{
    struct cox_links *links = NULL;
    assert_int_equal(cox_links_new(NULL, &links), 0);
    cox_links_use_layout(links, &remote->kv.layout);
    return test_own(links, cox_links_free_owned);
}

static void set(struct cox_links *links, const char *cluster, uint64_t epoch,
                const struct cox_kv_pool *kv)
{
    const struct cox_error bad = {.code = COX_CORRUPT, .text = "made no sense"};
    const struct cox_link_target target = {
        .cluster = cluster, .epoch = epoch, .kv = kv, .error = &bad};

    assert_int_equal(cox_links_set(links, &target, NULL), 0);
}

struct looked {
    const char *cluster;
    bool found, settled;
    enum cox_link_state state;
    struct cox_error error;
    uint32_t counts[4];
};

/* In the line of a mapping of KV blocks; this process has its own. */
#define OF_KV "memfd:cox_payload_kv"

static void on_link(void *context, const struct cox_link *link)
{
    struct looked *looked = context;

    looked->counts[link->state]++;
    if (!looked->cluster || strcmp(link->cluster, looked->cluster) != 0)
        return;
    looked->found = true;
    looked->state = link->state;
    looked->error = link->error;
}

static bool is_at_rest(struct cox_links *links, struct looked *looked)
{
    *looked = (struct looked){.cluster = looked->cluster};
    cox_links_each(links, on_link, looked);
    return looked->counts[COX_LINK_WAITING] + looked->counts[COX_LINK_RUNNING] == 0;
}

/* Once nothing is under way. */
static struct looked look(struct cox_links *links, const char *cluster)
{
    struct looked looked = {.cluster = cluster};

    AWAIT(is_at_rest(links, &looked));
    return looked;
}

static void expect_state(struct cox_links *links, const char *cluster, enum cox_link_state state,
                         int code, const char *text)
{
    const struct looked looked = look(links, cluster);

    assert_true(looked.found);
    if (looked.state != state || looked.error.code != code || !strstr(looked.error.text, text))
        fail_msg("%s: %s: %s", cluster, cox_link_state_name(looked.state), looked.error.text);
}

PLAIN_TEST(m10_a_link_is_attached_taken_and_let_go_of)
{
    struct cox_link *link = NULL;

    struct remote *remote = remote_new();
    struct cox_links *links = links_new(remote);

    assert_int_equal(cox_links_take(links, "A", 0, &link, NULL), COX_NOT_FOUND);
    set(links, "A", 1, &remote->kv);
    expect_state(links, "A", COX_LINK_SUCCESS, 0, "");
    assert_int_equal(test_mapping_count(OF_KV), 2);
    assert_int_equal(cox_links_take(links, "A", 2, &link, NULL), COX_STALE);
    assert_int_equal(cox_links_take(links, "A", 1, &link, NULL), 0);
    /* The same again is nothing; another epoch is another link. What is taken stays. */
    set(links, "A", 1, &remote->kv);
    assert_int_equal(atomic_load(&link->over), 0);
    set(links, "A", 2, &remote->kv);
    assert_int_equal(atomic_load(&link->over), COX_STALE);
    expect_state(links, "A", COX_LINK_SUCCESS, 0, "");
    assert_int_equal(test_mapping_count(OF_KV), 3);
    cox_links_release(links, link);
    assert_int_equal(test_mapping_count(OF_KV), 2);
    assert_int_equal(cox_links_take(links, "A", 2, &link, NULL), 0);
    assert_int_equal(cox_links_remove(links, "A"), 0);
    assert_int_equal(cox_links_remove(links, "A"), COX_NOT_FOUND);
    assert_int_equal(atomic_load(&link->over), COX_CLOSED);
    assert_false(look(links, "A").found);
    cox_links_release(links, link);
    assert_int_equal(test_mapping_count(OF_KV), 1);
}

PLAIN_TEST(m10_links_that_cannot_be_say_why)
{
    struct cox_kv_pool kv;
    struct cox_link *link = NULL;
    char name[COX_CLUSTER_ID_SIZE_MAX + 2];

    struct remote *remote = remote_new();
    struct cox_links *links = links_new(remote);

    memset(name, 'n', sizeof(name) - 1);
    name[sizeof(name) - 1] = '\0';
    struct cox_link_target target = {.cluster = "", .kv = &remote->kv};
    assert_int_equal(cox_links_set(links, &target, NULL), COX_INVALID);
    target.cluster = name;
    assert_int_equal(cox_links_set(links, &target, NULL), COX_INVALID);
    name[COX_CLUSTER_ID_SIZE_MAX] = '\0';
    set(links, name, 1, &remote->kv);
    expect_state(links, name, COX_LINK_SUCCESS, 0, "");

    set(links, "nonsense", 1, NULL);
    expect_state(links, "nonsense", COX_LINK_FAILED, COX_CORRUPT, "made no sense");
    kv = remote->kv;
    kv.handle[40] ^= 1;
    set(links, "handle", 1, &kv);
    expect_state(links, "handle", COX_LINK_FAILED, COX_CORRUPT, "");
    kv = remote->kv;
    kv.block_count++;
    set(links, "count", 1, &kv);
    expect_state(links, "count", COX_LINK_FAILED, COX_CORRUPT,
                 "80 blocks of 128 bytes, but the link request has 81");
    kv = remote->kv;
    kv.layout.head_dim = 5;
    kv.layout.model_digest = 17;
    set(links, "layout", 1, &kv);
    expect_state(links, "layout", COX_LINK_FAILED, COX_INVALID,
                 "head_dim 5 there, 4 here; model_digest 17 there, 0 here");
    assert_int_equal(cox_links_take(links, "layout", 1, &link, NULL), COX_INVALID);
    /* A failed one is tried again. */
    set(links, "layout", 1, &remote->kv);
    expect_state(links, "layout", COX_LINK_SUCCESS, 0, "");

    /* Own blocks have another layout from now on, and links that do not fit are dropped. */
    cox_links_use_layout(links, &kv.layout);
    expect_state(links, "layout", COX_LINK_FAILED, COX_INVALID, "head_dim 4 there, 5 here");
    assert_int_equal(test_mapping_count(OF_KV), 1);
    cox_links_use_layout(links, NULL);
    set(links, "early", 1, &remote->kv);
    expect_state(links, "early", COX_LINK_FAILED, COX_STATE, "no KV cache to pull into");
}

/* Another group's rank, in a process of its own, until it is killed. */
static pid_t other_start(struct cox_kv_pool *ret_kv)
{
    int pipes[2], quits[2];

    assert_int_equal(pipe(pipes), 0);
    assert_int_equal(pipe(quits), 0);
    const pid_t pid = fork();
    if (pid == 0) {
        const struct remote *other = remote_new();
        char byte;
        close(quits[1]);
        if (write(pipes[1], &other->kv, sizeof(other->kv)) != sizeof(other->kv))
            _exit(1);
        _exit(read(quits[0], &byte, 1) == 0 ? 0 : 1);
    }
    assert_int_equal(read(pipes[0], ret_kv, sizeof(*ret_kv)), sizeof(*ret_kv));
    close(pipes[0]);
    close(pipes[1]);
    close(quits[0]);
    return pid; /* the other end of quits goes with this process, and it with that */
}

static void other_kill(pid_t pid)
{
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
}

PLAIN_TEST(m10_a_closed_cache_is_stale_and_a_dead_owner_is_dead)
{
    struct cox_link *link = NULL;
    struct cox_kv_pool kv;

    if (!test_can_take_fds())
        skip();
    struct remote *remote = remote_new();
    struct cox_links *links = links_new(remote);
    remote->exporter = cox_exporter_free(remote->exporter);
    set(links, "closed", 1, &remote->kv);
    expect_state(links, "closed", COX_LINK_FAILED, COX_NOT_FOUND, "");
    assert_int_equal(cox_links_take(links, "closed", 1, &link, NULL), COX_STALE);

    const pid_t pid = other_start(&kv);
    set(links, "other", 1, &kv);
    expect_state(links, "other", COX_LINK_SUCCESS, 0, "");
    other_kill(pid);
    assert_int_equal(cox_links_take(links, "other", 1, &link, NULL), COX_PEER_DEAD);
    expect_state(links, "other", COX_LINK_FAILED, COX_PEER_DEAD, "has died");
}

/* Memory of dead owners is mapped only here: it is released although no pull uses the links; but
 * not during a read. */
PLAIN_TEST(m10_the_memory_of_the_dead_is_let_go_of_unasked)
{
    struct cox_link *link = NULL;
    struct cox_kv_pool kvs[3];
    pid_t pids[3];
    char name[16];

    if (!test_can_take_fds())
        skip();
    struct remote *remote = remote_new();
    struct cox_links *links = links_new(remote);
    set(links, "alive", 1, &remote->kv);
    expect_state(links, "alive", COX_LINK_SUCCESS, 0, "");
    const size_t before = test_mapping_count(OF_KV);
    for (int i = 0; i < 3; i++) {
        snprintf(name, sizeof(name), "G%d", i);
        pids[i] = other_start(&kvs[i]);
        set(links, name, 1, &kvs[i]);
        expect_state(links, name, COX_LINK_SUCCESS, 0, "");
    }
    const size_t each = (test_mapping_count(OF_KV) - before) / 3;
    assert_true(each > 0);
    assert_int_equal(cox_links_take(links, "G1", 1, &link, NULL), 0);
    /* A link whose end is not waited for any more blocks no other. */
    assert_int_equal(cox_links_remove(links, "G2"), 0);
    AWAIT(test_mapping_count(OF_KV) == before + 2 * each);
    other_kill(pids[2]);
    other_kill(pids[0]);
    AWAIT(test_mapping_count(OF_KV) == before + each);
    other_kill(pids[1]);
    /* The thread has seen it, for it has attached another one since. */
    set(links, "again", 1, &remote->kv);
    expect_state(links, "again", COX_LINK_SUCCESS, 0, "");
    assert_int_equal(cox_links_remove(links, "again"), 0);
    assert_int_equal(test_mapping_count(OF_KV), before + each);
    cox_links_release(links, link);
    assert_int_equal(test_mapping_count(OF_KV), before);
    expect_state(links, "G0", COX_LINK_FAILED, COX_PEER_DEAD, "has died");
    expect_state(links, "alive", COX_LINK_SUCCESS, 0, "");
}

/* 64 links live: one more is refused, of the refused the oldest are forgotten, and there is room
 * once one is gone. */
PLAIN_TEST(m10_there_are_64_links_and_no_more)
{
    struct remote *remotes[] = {remote_new(), remote_new(), remote_new()};
    struct cox_links *links = links_new(remotes[0]);
    char name[16];

    for (int i = 0; i < COX_LINK_COUNT_MAX + 100; i++) {
        snprintf(name, sizeof(name), "G%d", i);
        set(links, name, 1, &remotes[i % 3]->kv);
    }
    struct looked looked = look(links, "G63");
    assert_int_equal(looked.counts[COX_LINK_SUCCESS], COX_LINK_COUNT_MAX);
    assert_int_equal(looked.counts[COX_LINK_FAILED], COX_LINK_COUNT_MAX);
    assert_int_equal(looked.state, COX_LINK_SUCCESS);
    expect_state(links, "G163", COX_LINK_FAILED, COX_FULL, "there are 64 links");
    assert_false(look(links, "G64").found);
    assert_int_equal(cox_links_remove(links, "G5"), 0);
    set(links, "G163", 1, &remotes[0]->kv);
    expect_state(links, "G163", COX_LINK_SUCCESS, 0, "");
}

/* ---- pulls ---- */

struct side {
    struct remote *remote;
    struct cox_links *links;
    struct cox_link *link;
    struct cox_pulls *pulls;
    struct cox_cache *cache;
};

static void side_free(void *object)
{
    struct side *side = object;
    cox_links_release(side->links, side->link);
    cox_pulls_free(side->pulls);
    cox_cache_free(side->cache);
    free(side);
}

static struct side *side_new(void)
{
    struct remote *remote = remote_new();
    struct cox_links *links = links_new(remote);
    struct side *side = test_own(calloc(1, sizeof(*side)), side_free);
    side->remote = remote;
    side->links = links;
    set(links, "A", 1, &remote->kv);
    expect_state(links, "A", COX_LINK_SUCCESS, 0, "");
    assert_int_equal(cox_links_take(links, "A", 1, &side->link, NULL), 0);
    assert_int_equal(cox_pulls_new(&side->pulls), 0);
    assert_int_equal(cox_cache_new(&geometry, &side->cache, NULL), 0);
    cox_pulls_open(side->pulls, side->cache);
    for (uint32_t block = 0; block < geometry.block_count; block++) {
        memset(cox_cache_block(remote->cache, block), 'A' + (int)block,
               (size_t)cox_cache_block_size(&geometry));
        cox_cache_give(remote->cache, block, 7);
    }
    return side;
}

static uint64_t user_of(const struct cox_cache *cache, uint32_t block)
{
    return cox_kv_blocks_user(cox_cache_kv_blocks(cache), block);
}

static const struct cox_pull_pair one_pair = {3, 5};

static struct cox_pull pull_of(const struct side *side, const char *id)
{
    return (struct cox_pull){
        .request_id = id,
        .link = side->link,
        .pairs = &one_pair,
        .count = 1,
        .from_user = 7,
        .to_user = 9,
        .deadline_ns = COX_DEADLINE_NEVER,
        .lease_ns = COX_DEADLINE_NEVER,
    };
}

PLAIN_TEST(m11_a_pull_copies_and_gives)
{
    struct side *side = side_new();
    struct cox_pull pull = pull_of(side, "r");
    assert_int_equal(cox_pulls_run(side->pulls, &pull, NULL), 0);
    assert_int_equal(pull.copied_bytes, cox_cache_block_size(&geometry));
    assert_memory_equal(cox_cache_block(side->cache, 5), cox_cache_block(side->remote->cache, 3),
                        (size_t)cox_cache_block_size(&geometry));
    assert_int_equal(user_of(side->cache, 5), 9);
}

PLAIN_TEST(p9_the_newest_1024_cancelled_ids_are_kept)
{
    char id[16], *longer = calloc(COX_REQUEST_ID_SIZE_MAX + 2, 1);

    struct side *side = side_new();
    for (int i = 0; i <= COX_CANCELLED_COUNT_MAX; i++) {
        snprintf(id, sizeof(id), "r%d", i);
        assert_true(cox_pulls_cancel(side->pulls, id));
    }
    memset(longer, 'x', COX_REQUEST_ID_SIZE_MAX + 1);
    assert_false(cox_pulls_cancel(side->pulls, longer));
    struct cox_pull pull = pull_of(side, "r0");
    assert_int_equal(cox_pulls_run(side->pulls, &pull, NULL), 0); /* forgotten */
    pull.request_id = "r1";
    assert_int_equal(cox_pulls_run(side->pulls, &pull, NULL), COX_ABORTED);
    assert_int_equal(cox_pulls_run(side->pulls, &pull, NULL), 0);
    pull.request_id = "r1024";
    assert_int_equal(cox_pulls_run(side->pulls, &pull, NULL), COX_ABORTED);
    free(longer);
}

PLAIN_TEST(p9_without_a_cache_nothing_is_pulled)
{
    struct side *side = side_new();
    struct cox_pull pull = pull_of(side, "r");
    cox_pulls_open(side->pulls, NULL);
    assert_int_equal(cox_pulls_clear(side->pulls, 0, NULL), 0);
    assert_int_equal(cox_pulls_run(side->pulls, &pull, NULL), COX_STATE);
    cox_pulls_open(side->pulls, side->cache);
    assert_int_equal(cox_pulls_clear(side->pulls, 0, NULL), 0);
    assert_int_equal(cox_pulls_run(side->pulls, &pull, NULL), 0);
}

static bool takes_it(void *context)
{
    struct side *side = context;

    /* A step, between the copy of the first block and the second. */
    if (user_of(side->remote->cache, 0) == 7) {
        cox_cache_give(side->cache, 5, 33);
        return false;
    }
    return false;
}

/* A coordinator that lets a step write where a pull goes gets an error, not what is neither. */
PLAIN_TEST(p9_a_destination_that_was_taken_meanwhile_is_stale)
{
    static const struct cox_pull_pair pairs[] = {{3, 5}, {4, 6}};
    struct side *side = side_new();
    struct cox_pull pull = pull_of(side, "r");
    pull.pairs = pairs;
    pull.count = 2;
    pull.cancelled = takes_it;
    pull.context = side;
    assert_refused(cox_pulls_run(side->pulls, &pull, test_err()), COX_STALE,
                   "written KV block 5 meanwhile");
    assert_int_equal(user_of(side->cache, 6), COX_CACHE_UNUSED);
}

/* ---- blocks on their way ---- */

enum { ARRIVAL_GIVE, ARRIVAL_TAKE, ARRIVAL_NEVER };

struct arrival {
    struct side *side;
    int how;
    /* checks of the pull so far */
    int checks;
    int cancel_at;
};

/* Block 3 comes, or does not, once the pull has waited for it. */
static bool arrival_look(void *context)
{
    struct arrival *arrival = context;
    struct cox_kv_blocks *blocks = cox_cache_kv_blocks(arrival->side->remote->cache);

    if (++arrival->checks == 4 && arrival->how == ARRIVAL_GIVE)
        cox_kv_blocks_give(blocks, 3, 7);
    if (arrival->checks == 4 && arrival->how == ARRIVAL_TAKE)
        cox_kv_blocks_take(blocks, 3);
    return arrival->checks == arrival->cancel_at;
}

static void expect_pull(struct side *side, struct arrival *arrival, struct cox_pull *pull, int code)
{
    arrival->side = side;
    pull->cancelled = arrival_look;
    pull->context = arrival;
    assert_int_equal(cox_kv_blocks_expect(cox_cache_kv_blocks(side->remote->cache), 3), 0);
    assert_int_equal(cox_pulls_run(side->pulls, pull, NULL), code);
    assert_int_equal(user_of(side->cache, 5), code ? COX_CACHE_UNUSED : 9);
    if (code)
        assert_int_equal(pull->copied_bytes, 0);
}

PLAIN_TEST(a_pull_waits_for_a_block_on_its_way)
{
    struct side *side = side_new();
    struct cox_pull pull = pull_of(side, "r");
    expect_pull(side, &(struct arrival){.how = ARRIVAL_GIVE}, &pull, 0);
    expect_pull(side, &(struct arrival){.how = ARRIVAL_TAKE}, &pull, COX_STALE);
    expect_pull(side, &(struct arrival){.how = ARRIVAL_NEVER, .cancel_at = 6}, &pull, COX_ABORTED);
    pull.deadline_ns = cox_deadline_after_ms(30);
    expect_pull(side, &(struct arrival){.how = ARRIVAL_NEVER}, &pull, COX_TIMEOUT);
    pull.deadline_ns = COX_DEADLINE_NEVER;
    pull.lease_ns = cox_deadline_after_ms(30);
    expect_pull(side, &(struct arrival){.how = ARRIVAL_NEVER}, &pull, COX_STALE);
}

/* ---- many blocks ---- */

/* All blocks there, to as many here. */
struct whole {
    struct side *side;
    struct cox_pull_pair pairs[80];
    struct cox_pull pull;
    /* bytes; 0: never */
    uint64_t cancel_at;
    /* the same */
    uint64_t clear_at;
};

static bool whole_look(void *context)
{
    struct whole *whole = context;

    /* A clear from another thread, that does not wait. */
    if (whole->clear_at && whole->pull.copied_bytes == whole->clear_at)
        assert_int_equal(cox_pulls_clear(whole->side->pulls, 0, NULL), COX_TIMEOUT);
    return whole->cancel_at && whole->pull.copied_bytes == whole->cancel_at;
}

static struct side *whole_open(struct whole *whole)
{
    struct side *side = side_new();
    *whole = (struct whole){.side = side, .pull = pull_of(side, "r")};
    for (uint32_t i = 0; i < geometry.block_count; i++)
        whole->pairs[i] = (struct cox_pull_pair){i, geometry.block_count - 1 - i};
    whole->pull.pairs = whole->pairs;
    whole->pull.count = geometry.block_count;
    whole->pull.cancelled = whole_look;
    whole->pull.context = whole;
    return side;
}

static void expect_copied(const struct whole *whole, uint32_t count)
{
    const size_t size = (size_t)cox_cache_block_size(&geometry);
    uint8_t *nothing = calloc(1, size);

    assert_int_equal(whole->pull.copied_bytes, count * size);
    for (uint32_t i = 0; i < geometry.block_count; i++)
        assert_memory_equal(cox_cache_block(whole->side->cache, whole->pairs[i].to),
                            i < count ? cox_cache_block(whole->side->remote->cache, i) : nothing,
                            size);
    free(nothing);
}

PLAIN_TEST(m11_all_blocks_are_copied_and_given)
{
    struct whole whole;
    struct side *side = whole_open(&whole);
    assert_int_equal(cox_pulls_run(side->pulls, &whole.pull, NULL), 0);
    expect_copied(&whole, geometry.block_count);
    for (uint32_t block = 0; block < geometry.block_count; block++)
        assert_int_equal(user_of(side->cache, block), 9);
}

PLAIN_TEST(p9_a_stale_block_ends_the_pull_and_nothing_is_given)
{
    for (uint32_t stale = 10; stale < geometry.block_count; stale += 60) {
        struct whole whole;
        char text[40];
        struct side *side = whole_open(&whole);
        cox_cache_take(side->remote->cache, stale);
        snprintf(text, sizeof text, "A: block %u belongs to another", stale);
        assert_refused(cox_pulls_run(side->pulls, &whole.pull, test_err()), COX_STALE, text);
        expect_copied(&whole, stale);
        for (uint32_t block = 0; block < geometry.block_count; block++)
            assert_int_equal(user_of(side->cache, block), COX_CACHE_UNUSED);
    }
}

PLAIN_TEST(p9_a_pull_that_ends_between_two_copies_reports_what_it_copied)
{
    for (uint32_t copied = 1; copied < geometry.block_count; copied += 13) {
        struct whole whole;
        struct side *side = whole_open(&whole);
        whole.cancel_at = copied * cox_cache_block_size(&geometry);
        assert_int_equal(cox_pulls_run(side->pulls, &whole.pull, NULL), COX_ABORTED);
        expect_copied(&whole, copied);
        whole.cancel_at = 0; /* and again, as if nothing had been */
        assert_int_equal(cox_pulls_run(side->pulls, &whole.pull, NULL), 0);
        expect_copied(&whole, geometry.block_count);
    }
}

PLAIN_TEST(p9_a_clear_ends_the_pull_before_its_next_block)
{
    struct whole whole;
    struct side *side = whole_open(&whole);
    whole.clear_at = 7 * cox_cache_block_size(&geometry);
    assert_int_equal(cox_pulls_run(side->pulls, &whole.pull, NULL), COX_ABORTED);
    expect_copied(&whole, 8);
}

/* ---- the states of a link (coxswain/requests.h) ---- */

PLAIN_TEST(m11_a_link_moves_forward_or_fails_and_stays_failed)
{
    static const char *const moves[] = {
        "waiting running", "waiting failed", "running success", "running failed", "success failed",
    };
    uint32_t count = 0;
    for (uint32_t from = COX_LINK_WAITING; from <= COX_LINK_FAILED; from++)
        for (uint32_t to = COX_LINK_WAITING; to <= COX_LINK_FAILED; to++) {
            if (!cox_link_may_move((enum cox_link_state)from, (enum cox_link_state)to))
                continue;
            char move[32];
            snprintf(move, sizeof move, "%s %s", cox_link_state_name(from),
                     cox_link_state_name(to));
            assert_true(count < sizeof moves / sizeof moves[0]);
            assert_string_equal(move, moves[count++]);
        }
    assert_int_equal(count, sizeof moves / sizeof moves[0]);
    assert_string_equal(cox_link_state_name(COX_LINK_FAILED + 1), "unknown");
}

PLAIN_TEST(m11_one_rank_decides_how_far_a_group_has_linked)
{
    static const enum cox_link_state worst_first[] = {COX_LINK_FAILED, COX_LINK_RUNNING,
                                                      COX_LINK_WAITING, COX_LINK_SUCCESS};
    for (size_t a = 0; a < 4; a++)
        for (size_t b = 0; b < 4; b++)
            assert_int_equal(cox_link_merge(worst_first[a], worst_first[b]),
                             worst_first[a < b ? a : b]);
}
