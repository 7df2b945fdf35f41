/* Pulls between machines (nodes/kv_relay.h), which are addresses of the loopback here: node b has
 * the blocks, node a fetches them, and node c has nothing to say. */
#include "nodes/kv_relay.h"
#include "tests/lib/test.h"

#include <arpa/inet.h>

#include <coxswain/handle.h>
#include <coxswain/kv.h>

#define GROUP "second"
/* Several blocks in a piece, and several pieces. */
#define BLOCK_SIZE ((size_t)64 << 10)
#define BLOCK_COUNT 31u
#define SEQUENCE 7
#define BODY_SIZE (sizeof(int32_t) + BLOCK_SIZE)
#define PATIENCE_MS 10000
#define SHORT_MS 300

struct node {
    struct cox_direct *direct;
    struct cox_kv_relay *relay;
    char address[32];
    pid_t rank;
    /* fetches are not served: the last one's id is kept */
    bool mute;
    _Atomic uint64_t asked;
    char said[1024];
};

static struct cluster {
    struct node a, b, c;
    /* of b's rank */
    struct cox_kv_blocks *blocks;
    struct cox_exporter *exporter;
    /* whose they are */
    int64_t sequence;
    /* as many as a link says that there are */
    uint32_t pool_count;
    struct cox_handle remote;
    /* what node a's rank gets, for them */
    struct cox_handle local;
    /* listens, and nobody accepts */
    int silent_fd;
} cluster;

/* What answers a fetch, as kv_relay.c has it. */
struct piece {
    uint64_t id;
    int32_t status;
    uint32_t first, count;
    uint32_t reserved;
    uint64_t block_size;
};

static void on_log(void *context, int level, const char *text)
{
    struct node *node = context;
    (void)level;
    snprintf(node->said, sizeof node->said, "%s", text);
}

static bool is_rank(void *context, pid_t pid)
{
    const struct node *node = context;
    return pid == node->rank;
}

static void on_message(void *context, const char *peer, const char *group, uint32_t kind,
                       uint8_t *bytes, size_t size)
{
    struct node *node = context;
    (void)group;
    uint64_t id = 0;
    if (!node->mute) {
        cox_kv_relay_take(node->relay, peer, kind, bytes, size);
        return;
    }
    if (size >= sizeof id)
        memcpy(&id, bytes, sizeof id);
    free(bytes);
    atomic_store(&node->asked, id);
}

static void node_start(struct node *node, const char *group, const char *name, const char *host)
{
    char listen[32];
    struct cox_error err = {0};
    const struct cox_log log = {.fn = on_log, .context = node};
    snprintf(listen, sizeof listen, "%s:0", host);
    const struct cox_direct_options options = {.name = name,
                                               .group = group,
                                               .insecure_loopback = true,
                                               .listen = listen,
                                               .context = node,
                                               .on_message = on_message};
    node->rank = getpid();
    if (cox_direct_open(&options, &node->direct, &err))
        fail_msg("%s: %s", name, err.text);
    snprintf(node->address, sizeof node->address, "%s:%u", host, cox_direct_port(node->direct));
    assert_int_equal(
        cox_kv_relay_new(node->direct, node->address, &log, is_rank, node, &node->relay, &err), 0);
}

static void block_fill(uint8_t *block, uint32_t number)
{
    for (size_t i = 0; i < BLOCK_SIZE; i += sizeof number) {
        const uint32_t word = number * UINT32_C(2654435761) + (uint32_t)i;
        memcpy(block + i, &word, sizeof word);
    }
}

/* Makes all blocks a sequence's. */
static void blocks_give(int64_t sequence)
{
    cluster.sequence = sequence;
    for (uint32_t b = 0; b < BLOCK_COUNT; b++) {
        assert_int_equal(cox_kv_blocks_take(cluster.blocks, b), 0);
        assert_int_equal(cox_kv_blocks_give(cluster.blocks, b, cox_kv_user_of(sequence)), 0);
    }
}

static void blocks_make(void)
{
    assert_ok(cox_kv_blocks_new(BLOCK_COUNT, BLOCK_SIZE, &cluster.blocks, test_err()));
    assert_ok(cox_exporter_new(NULL, &cluster.exporter, test_err()));
    assert_ok(cox_exporter_export(cluster.exporter, cox_kv_blocks_info(cluster.blocks).fd, 0, 0,
                                  &cluster.remote, test_err()));
    for (uint32_t b = 0; b < BLOCK_COUNT; b++) {
        block_fill((uint8_t *)cox_kv_blocks_info(cluster.blocks).memory + b * BLOCK_SIZE, b);
    }
    blocks_give(SEQUENCE);
}

/* Node `from` to the ranks of node `to`, which have the same blocks. link: or unlink. */
static void ask_link_of(struct node *from, struct node *to, bool link)
{
    Coxswain__KvLayout layout = COXSWAIN__KV_LAYOUT__INIT;
    Coxswain__KvPool pool = COXSWAIN__KV_POOL__INIT, *pools = &pool;
    Coxswain__HostInfo host = COXSWAIN__HOST_INFO__INIT, *hosts = &host;
    Coxswain__RemoteInfo remote = COXSWAIN__REMOTE_INFO__INIT, *remotes = &remote;
    Coxswain__PDLinkRequest__PDLinkInfo info = COXSWAIN__PDLINK_REQUEST__PDLINK_INFO__INIT;
    Coxswain__PDLinkRequest__PDLinkInfo *infos = &info;
    Coxswain__PDLinkRequest request = COXSWAIN__PDLINK_REQUEST__INIT;
    struct cox_handle handle = cluster.remote;
    layout.block_bytes = BLOCK_SIZE;
    pool.block_count = cluster.pool_count;
    pool.layout = &layout;
    pool.blocks = (ProtobufCBinaryData){.data = (uint8_t *)&handle, .len = sizeof handle};
    pool.node = to == &cluster.a ? "a" : "b";
    pool.address = to->address;
    host.cluster_id = GROUP;
    remote.n_host_info = remote.n_kv_pools = request.n_pd_link_info = 1;
    remote.host_info = &hosts;
    remote.kv_pools = &pools;
    request.pd_link_info = &infos;
    info.n_link_info = link;
    info.n_unlink_info = !link;
    info.link_info = info.unlink_info = &remotes;
    assert_ok(cox_kv_relay_link(from->relay, &request, 0, 1, NULL, test_err()));
    cluster.local = handle;
}

static void ask_link(bool link)
{
    ask_link_of(&cluster.a, &cluster.b, link);
}

/* All blocks, in an order that is not theirs. */
static uint32_t block_at(uint32_t i)
{
    return i * 7 % BLOCK_COUNT;
}

/* A request to pull all blocks of these sequences, one after the other. */
struct request {
    int64_t numbers[BLOCK_COUNT];
    ProtobufCBinaryData table;
    Coxswain__PullKVRequest__PullKVInfo infos[2], *pointers[2];
    Coxswain__PullKVRequest message;
};

static void request_make(struct request *request, const int64_t *sequences, size_t count)
{
    request->message = (Coxswain__PullKVRequest)COXSWAIN__PULL_KVREQUEST__INIT;
    request->message.n_pull_kv_infos = count;
    request->message.pull_kv_infos = request->pointers;
    for (uint32_t i = 0; i < BLOCK_COUNT; i++)
        request->numbers[i] = block_at(i);
    request->table =
        (ProtobufCBinaryData){.data = (uint8_t *)request->numbers, .len = sizeof request->numbers};
    for (size_t i = 0; i < count; i++) {
        Coxswain__PullKVRequest__PullKVInfo *info = request->pointers[i] = &request->infos[i];
        *info = (Coxswain__PullKVRequest__PullKVInfo)COXSWAIN__PULL_KVREQUEST__PULL_KVINFO__INIT;
        info->cluster_id = GROUP;
        info->n_src_block_tables = 1;
        info->src_block_tables = &request->table;
        info->has_src_sequence = 1;
        info->src_sequence = sequences[i];
    }
}

static void request_pull(const struct request *request, uint64_t deadline_ns)
{
    cox_kv_relay_expect(cluster.a.relay, &request->message, 0, 1);
    cox_kv_relay_pull(cluster.a.relay, &request->message, 0, 1, deadline_ns);
}

static void pull_until(uint64_t deadline_ns)
{
    struct request request;
    request_make(&request, &cluster.sequence, 1);
    request_pull(&request, deadline_ns);
}

static void pull(void)
{
    pull_until(cox_deadline_after_ms(PATIENCE_MS));
}

/* As a rank of node a would pull it. */
static int local_copy(const struct cox_kv_view *view, uint32_t block)
{
    static uint8_t copied[BLOCK_SIZE], expected[BLOCK_SIZE];
    int r = cox_kv_view_copy(view, block, cox_kv_user_of(cluster.sequence), 0, copied, NULL);
    block_fill(expected, block);
    if (r == 0 && memcmp(copied, expected, BLOCK_SIZE))
        fail_msg("block %" PRIu32 " has other bytes", block);
    return r;
}

TEST_OWNED(cox_kv_view_free)

/* As a link would attach it; the test's own. */
static struct cox_kv_view *local_view(void)
{
    struct cox_kv_view *view = NULL;
    int fd;
    assert_ok(
        cox_handle_open(&cluster.local, NULL, cox_deadline_after_ms(PATIENCE_MS), &fd, test_err()));
    assert_ok(cox_kv_view_attach(fd, &view, test_err()));
    close(fd);
    return test_own(view, cox_kv_view_free_owned);
}

/* How many of the blocks have come; the others must be unused. */
static uint32_t local_count(void)
{
    struct cox_kv_view *view = local_view();
    uint32_t count = 0;
    for (uint32_t b = 0; b < BLOCK_COUNT; b++) {
        const int r = local_copy(view, b);
        assert_true(r == 0 || r == COX_STALE);
        count += r == 0;
    }
    test_release(view);
    return count;
}

/* What node a has said, and how many blocks it has got. */
static void check_pulled(const char *said, uint32_t count)
{
    if (said[0])
        assert_contains(cluster.a.said, said);
    else
        assert_string_equal(cluster.a.said, "");
    assert_int_equal(local_count(), count);
}

/* None has come, nor is awaited. */
static void check_given_up(const struct cox_kv_view *view)
{
    for (uint32_t b = 0; b < BLOCK_COUNT; b++)
        assert_int_equal(local_copy(view, b), COX_STALE);
}

static int set_up(void **state)
{
    (void)state;
    cluster = (struct cluster){.pool_count = BLOCK_COUNT};
    node_start(&cluster.a, "first", "node-a", "127.0.0.1");
    node_start(&cluster.b, GROUP, "node-b", "127.0.0.2");
    node_start(&cluster.c, "third", "node-c", "127.0.0.3");
    blocks_make();
    ask_link(true);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    struct node *nodes[] = {&cluster.a, &cluster.b, &cluster.c};
    for (int i = 0; i < 3; i++) {
        if (nodes[i]->direct)
            cox_direct_end(nodes[i]->direct);
        cox_kv_relay_end(nodes[i]->relay);
        cox_direct_close(nodes[i]->direct);
    }
    for (int i = 0; i < 3; i++)
        cox_kv_relay_free(nodes[i]->relay);
    cox_exporter_free(cluster.exporter);
    cox_kv_blocks_free(cluster.blocks);
    return 0;
}

#define RELAY_TEST(name) TEST_WITH(name, set_up, tear_down)

/* ---- tests ---- */

RELAY_TEST(blocks_come_in_pieces)
{
    assert_int_equal(local_count(), 0);
    pull();
    check_pulled("", BLOCK_COUNT);
    pull();
    assert_int_equal(local_count(), BLOCK_COUNT);
}

RELAY_TEST(a_stale_block_is_unused_and_the_others_come)
{
    pull();
    cox_kv_blocks_take(cluster.blocks, 0);
    cox_kv_blocks_take(cluster.blocks, 11);
    cox_kv_blocks_give(cluster.blocks, 11, SEQUENCE + 1);
    pull();
    check_pulled("", BLOCK_COUNT - 2);
}

RELAY_TEST(pulls_of_one_request_may_share_blocks)
{
    static const int64_t sequences[][2] = {
        {SEQUENCE, SEQUENCE}, {SEQUENCE, SEQUENCE + 1}, {SEQUENCE + 1, SEQUENCE}};
    struct request request;
    for (size_t i = 0; i < sizeof sequences / sizeof sequences[0]; i++) {
        request_make(&request, sequences[i], 2);
        request_pull(&request, cox_deadline_after_ms(PATIENCE_MS));
        check_pulled("", BLOCK_COUNT);
    }
}

/* A pull of any sequence leaves nothing that a pull of one takes for its own. */
RELAY_TEST(a_pull_of_any_sequence_is_of_none)
{
    static const int64_t sequences[] = {0, 1};
    struct request request;
    struct cox_kv_view *view = local_view();
    uint8_t bytes[BLOCK_SIZE];
    request_make(&request, sequences, 2);
    request.infos[0].has_src_sequence = 0;
    request_pull(&request, cox_deadline_after_ms(PATIENCE_MS));
    for (uint32_t b = 0; b < BLOCK_COUNT; b++) {
        assert_int_equal(cox_kv_view_copy(view, b, cox_kv_user_of(1), 0, bytes, NULL), COX_STALE);
        assert_int_equal(cox_kv_view_copy(view, b, COX_KV_UNUSED, 0, bytes, NULL), 0);
    }
    /* Nor does it take what a pull of one sequence has. */
    request_make(&request, &cluster.sequence, 1);
    request.infos[1] = request.infos[0];
    request.infos[1].has_src_sequence = 0;
    request.pointers[1] = &request.infos[1];
    request.message.n_pull_kv_infos = 2;
    request_pull(&request, cox_deadline_after_ms(PATIENCE_MS));
    assert_int_equal(local_count(), BLOCK_COUNT);
}

static void *mutual_main(void *context)
{
    enum { COUNT = 1500 }; /* more bytes than the buffers of a connection hold */
    struct cox_kv_relay *relay = context;
    struct request request;
    int64_t *numbers = calloc(COUNT, sizeof *numbers);
    request_make(&request, &cluster.sequence, 1);
    for (uint32_t i = 0; i < COUNT; i++)
        numbers[i] = block_at(i);
    request.table =
        (ProtobufCBinaryData){.data = (uint8_t *)numbers, .len = COUNT * sizeof *numbers};
    for (int i = 0; i < 3; i++) {
        cox_kv_relay_expect(relay, &request.message, 0, 1);
        cox_kv_relay_pull(relay, &request.message, 0, 1, cox_deadline_after_ms(PATIENCE_MS));
    }
    free(numbers);
    return NULL;
}

RELAY_TEST(two_nodes_pull_from_each_other)
{
    const struct cox_handle local = cluster.local;
    ask_link_of(&cluster.b, &cluster.a, true);
    pthread_t thread = test_thread(mutual_main, cluster.b.relay);
    mutual_main(cluster.a.relay);
    pthread_join(thread, NULL);
    assert_string_equal(cluster.a.said, "");
    assert_string_equal(cluster.b.said, "");
    assert_int_equal(local_count(), BLOCK_COUNT);
    cluster.local = local;
    assert_int_equal(local_count(), BLOCK_COUNT);
}

/* A rank may have more than the link has said, and the request may name them. */
RELAY_TEST(a_block_that_the_link_has_not_moves_no_other)
{
    cluster.pool_count = BLOCK_COUNT - 10;
    ask_link(true);
    pull();
    struct cox_kv_view *view = local_view();
    for (uint32_t b = 0; b < BLOCK_COUNT; b++)
        assert_int_equal(local_copy(view, b), b < cluster.pool_count ? 0 : COX_INVALID);
}

/* Its memory is not kept, nor served. */
RELAY_TEST(a_rank_that_has_gone_is_forgotten)
{
    const struct cox_handle first = cluster.remote;
    pull();
    assert_int_equal(local_count(), BLOCK_COUNT);
    cluster.b.rank = 1; /* the process is a rank no more */
    assert_int_equal(cox_exporter_export(cluster.exporter, cox_kv_blocks_info(cluster.blocks).fd, 0,
                                         0, &cluster.remote, NULL),
                     0);
    for (int i = 0; i < 2; i++) { /* the next one is not there, and then the first one neither */
        ask_link(true);
        pull();
        check_pulled("refuses", 0);
        cluster.remote = first;
        cluster.a.said[0] = '\0';
    }
}

/* Of ranks that had no room for it, or were replaced. */
RELAY_TEST(a_link_that_comes_again_ends_no_pull)
{
    const struct cox_handle local = cluster.local;
    pull();
    ask_link(true);
    assert_memory_equal(&cluster.local, &local, sizeof local);
    assert_int_equal(local_count(), BLOCK_COUNT);
    cox_kv_relay_unlink(cluster.a.relay);
    ask_link(true);
    assert_memory_not_equal(&cluster.local, &local, sizeof local);
    assert_int_equal(local_count(), 0);
}

/* More than one fetch may have. */
RELAY_TEST(long_tables_are_pulled_whole)
{
    enum { COUNT = 66000 };
    struct request request;
    int64_t *numbers = test_own(calloc(COUNT, sizeof *numbers), free);
    request_make(&request, &cluster.sequence, 1);
    for (uint32_t i = 0; i < COUNT; i++) /* none exists but the last */
        numbers[i] = i < COUNT - 1 ? BLOCK_COUNT + i : 3;
    request.table =
        (ProtobufCBinaryData){.data = (uint8_t *)numbers, .len = COUNT * sizeof *numbers};
    request_pull(&request, cox_deadline_after_ms(PATIENCE_MS));
    check_pulled("", 1);
}

RELAY_TEST(what_is_not_passed_on_is_given_up)
{
    struct request request;
    struct cox_kv_view *view = local_view();
    request_make(&request, &cluster.sequence, 1);
    cox_kv_relay_expect(cluster.a.relay, &request.message, 0, 1);
    for (uint32_t b = 0; b < BLOCK_COUNT; b++)
        assert_int_equal(local_copy(view, b), COX_EMPTY);
    cox_kv_relay_give_up(cluster.a.relay, &request.message, 0, 1);
    assert_int_equal(local_count(), 0);
}

RELAY_TEST(a_sequence_may_have_any_number)
{
    static const int64_t sequences[] = {0, -1, INT64_MIN, INT64_MAX};
    for (size_t i = 0; i < sizeof sequences / sizeof sequences[0]; i++) {
        blocks_give(sequences[i]);
        pull();
        assert_int_equal(local_count(), BLOCK_COUNT);
    }
}

RELAY_TEST(memory_of_another_process_is_refused)
{
    cluster.b.rank = 1;
    pull();
    check_pulled("refuses", 0);
}

struct reply {
    struct node *from;
    struct piece piece;
    /* behind it: a status and a block, both zero, if all of it is sent */
    size_t body_size;
    enum { SENDS, UNLINKS, CANCELS, DIES } does;
};

/* Once the fetch has arrived at b, which is mute. */
static void *reply_main(void *context)
{
    struct reply *reply = context;
    uint64_t id;
    while ((id = atomic_load(&cluster.b.asked)) == 0)
        usleep(1000);
    if (reply->does == UNLINKS)
        ask_link(false);
    if (reply->does == CANCELS)
        cox_kv_relay_cancel(cluster.a.relay);
    if (reply->does == DIES)
        cluster.b.direct = cox_direct_close(cluster.b.direct);
    if (reply->does != SENDS)
        return NULL;
    reply->piece.id = id;
    static uint8_t body[BODY_SIZE];
    const struct iovec parts[] = {{.iov_base = &reply->piece, .iov_len = sizeof reply->piece},
                                  {.iov_base = body, .iov_len = reply->body_size}};
    assert_int_equal(cox_direct_send(reply->from->direct, "node-a", cluster.a.address,
                                     COX_DIRECT_BLOCKS, parts, 2,
                                     cox_deadline_after_ms(PATIENCE_MS), NULL),
                     0);
    return NULL;
}

/* Returns how long the pull took. */
static uint64_t pull_with(struct reply *reply, uint64_t timeout_ms)
{
    const uint64_t start_ns = cox_now_ns();
    cluster.b.mute = true;
    pthread_t thread = test_thread(reply_main, reply);
    pull_until(cox_deadline_after_ms(timeout_ms));
    pthread_join(thread, NULL);
    return (cox_now_ns() - start_ns) / COX_NSEC_PER_MSEC;
}

RELAY_TEST(only_the_node_that_was_asked_answers)
{
    struct reply reply = {.from = &cluster.c, .piece = {.status = COX_DENIED}};
    assert_true(pull_with(&reply, SHORT_MS) >= SHORT_MS);
    check_pulled("in time", 0);
}

RELAY_TEST(a_piece_out_of_its_place_or_cut_off_ends_the_pull)
{
    for (uint32_t cut = 0; cut < 2; cut++) {
        struct reply reply = {
            .from = &cluster.b,
            .piece = {.first = !cut, .count = 1, .block_size = BLOCK_SIZE},
            .body_size = BODY_SIZE - cut,
        };
        assert_true(pull_with(&reply, PATIENCE_MS) < PATIENCE_MS);
        check_pulled("refuses", 0);
        cluster.a.said[0] = '\0';
        atomic_store(&cluster.b.asked, 0);
    }
}

RELAY_TEST(an_unlink_ends_the_pull)
{
    struct reply reply = {.does = UNLINKS};
    struct cox_kv_view *view = local_view();
    assert_true(pull_with(&reply, PATIENCE_MS) < PATIENCE_MS);
    /* And the wait of a rank that pulls from it. */
    check_given_up(view);
}

static void expect_end(struct reply *reply)
{
    struct cox_kv_view *view = local_view();
    cluster.b.mute = true;
    pthread_t thread = test_thread(reply_main, reply);
    pull_until(COX_DEADLINE_NEVER);
    pthread_join(thread, NULL);
    check_given_up(view);
}

RELAY_TEST(a_cancel_ends_the_pull)
{
    struct reply reply = {.does = CANCELS};
    expect_end(&reply);
    assert_string_equal(cluster.a.said, "");
    /* And that one alone. */
    cluster.b.mute = false;
    pull();
    assert_int_equal(local_count(), BLOCK_COUNT);
}

/* Once the fetch has a connection. */
static void *stop_main(void *context)
{
    (void)context;
    struct pollfd p = {.fd = cluster.silent_fd, .events = POLLIN};
    while (poll(&p, 1, -1) != 1)
        continue;
    cox_kv_relay_stop(cluster.a.relay);
    return NULL;
}

/* The other agent's machine accepts connections, and the agent reads none. */
RELAY_TEST(a_stop_ends_a_fetch_that_is_not_taken)
{
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK + 3)};
    socklen_t size = sizeof address;
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0 && bind(fd, (struct sockaddr *)&address, sizeof address) == 0 &&
                listen(fd, 4) == 0 && getsockname(fd, (struct sockaddr *)&address, &size) == 0);
    snprintf(cluster.b.address, sizeof cluster.b.address, "127.0.0.4:%u", ntohs(address.sin_port));
    ask_link(true);
    cluster.silent_fd = fd;
    pthread_t thread = test_thread(stop_main, NULL);
    pull();
    pthread_join(thread, NULL);
    pull(); /* nor does another one begin */
    assert_int_equal(local_count(), 0);
    assert_string_equal(cluster.a.said, ""); /* not that it was not taken in time */
    close(fd);
}

RELAY_TEST(the_death_of_the_other_agent_ends_the_pull)
{
    struct reply reply = {.does = DIES};
    expect_end(&reply);
    assert_contains(cluster.a.said, "the agent of node b has died");
}

/* Of which the request may have no deadline. */
RELAY_TEST(the_end_of_a_lease_ends_the_pull)
{
    struct request request;
    cluster.b.mute = true;
    for (int i = 0; i < 2; i++) {
        request_make(&request, &cluster.sequence, 1);
        *(i ? &request.infos[0].lease_ns : &request.infos[0].deadline_ns) =
            cox_deadline_after_ms(SHORT_MS);
        request_pull(&request, COX_DEADLINE_NEVER);
        assert_contains(cluster.a.said, "in time");
        cluster.a.said[0] = '\0';
    }
}

static void *pull_main(void *context)
{
    (void)context;
    pull();
    return NULL;
}

RELAY_TEST(a_rank_copies_what_has_come_while_the_rest_comes)
{
    struct reply reply = {
        .from = &cluster.b,
        .piece = {.first = 0, .count = 1, .block_size = BLOCK_SIZE},
        .body_size = BODY_SIZE,
    };
    const uint64_t deadline_ns = cox_deadline_after_ms(PATIENCE_MS);
    struct cox_kv_view *view = local_view();
    uint8_t bytes[BLOCK_SIZE];
    cluster.b.mute = true;
    pthread_t thread = test_thread(pull_main, NULL);
    reply_main(&reply);
    assert_int_equal(
        cox_kv_view_copy(view, block_at(0), cox_kv_user_of(SEQUENCE), deadline_ns, bytes, NULL), 0);
    assert_int_equal(local_copy(view, block_at(1)), COX_EMPTY);
    reply.piece.status = COX_DENIED; /* of the rest */
    reply_main(&reply);
    assert_int_equal(
        cox_kv_view_copy(view, block_at(1), cox_kv_user_of(SEQUENCE), deadline_ns, bytes, NULL),
        COX_STALE);
    pthread_join(thread, NULL);
}
