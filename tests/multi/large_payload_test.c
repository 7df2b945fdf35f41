/* Requests and replies that do not fit their frame or slot: complete on every rank, in one memory,
 * counted, and released once no process reads them, whichever process dies when. */
#include "channel/base/fault.h"
#include "channel/memory/large_payload.h"
#include "proto/executor.pb-c.h"
#include "large_payload_bytes.h"
#include "rights.h"
#include "testing.h"

#define MIB (UINT64_C(1) << 20)
/* Small frames and slots, so that little is much: 16 KiB less the prefix. */
#define ROOM ((size_t)(16 << 10) - 4)

static const char *const worker_command[] = {COX_TEST_BIN_DIR "/large_payload_worker", NULL};

static struct cox_executor_options small_options(uint32_t rank_count)
{
    struct cox_executor_options options = {
        .size = sizeof(struct cox_executor_options), .workers.command = worker_command, .depth = 2};
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
        options.memory.request_size[c] = 2 * (16 << 10);
        options.memory.response_size[c] = (uint64_t)rank_count * 2 * (16 << 10);
    }
    return options;
}

static struct test_group *small_group(uint32_t rank_count)
{
    const struct cox_executor_options options = small_options(rank_count);
    return test_group_start(rank_count, &options);
}

/* ---- which process holds how much of it ---- */

struct held {
    /* memory of large payloads that is kept, by inode */
    size_t payloads;
    size_t large;
    uint64_t bytes;
};

static void held_add(struct held *held, uint64_t inodes[64], uint64_t inode, uint64_t size)
{
    for (size_t i = 0; i < held->payloads; i++)
        if (inodes[i] == inode)
            return;
    assert_true(held->payloads < 64);
    inodes[held->payloads++] = inode;
    held->bytes += size;
    held->large += size > COX_LARGE_PAYLOAD_KEEP_SIZE;
}

/* Mapped by the process. */
static struct held held_by(pid_t pid)
{
    struct held held = {0};
    uint64_t inodes[64], begin, end, inode;
    char path[64], line[512];
    snprintf(path, sizeof path, "/proc/%jd/maps", (intmax_t)pid);
    FILE *maps = fopen(path, "re");
    while (maps && fgets(line, sizeof line, maps))
        if (strstr(line, "memfd:cox_large_payload") &&
            sscanf(line, "%" SCNx64 "-%" SCNx64 " %*s %*s %*s %" SCNu64, &begin, &end, &inode) == 3)
            held_add(&held, inodes, inode, end - begin);
    if (maps)
        fclose(maps);
    return held;
}

/* Open, or mapped. */
static size_t fds_of_payloads(pid_t pid)
{
    char path[64], target[128];
    size_t count = 0;
    snprintf(path, sizeof path, "/proc/%jd/fd", (intmax_t)pid);
    DIR *folder = opendir(path);
    struct dirent *entry;
    while (folder && (entry = readdir(folder))) {
        ssize_t length = readlinkat(dirfd(folder), entry->d_name, target, sizeof target - 1);
        target[length > 0 ? length : 0] = '\0';
        count += strstr(target, "memfd:cox_large_payload") != NULL;
    }
    if (folder)
        closedir(folder);
    return count;
}

static const struct cox_channel_stats *stats_of(struct test_group *g, enum cox_channel_id channel)
{
    static struct cox_channel_stats stats;
    stats = test_stats(test_group_executor(g), channel);
    return &stats;
}

/* Payloads larger than what is kept are gone, here and in every live rank; so is every use of what
 * is kept. */
static void expect_nothing_held(struct test_group *g, uint64_t dead)
{
    const uint32_t rank_count = cox_executor_rank_count(test_group_executor(g));
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
        AWAIT(stats_of(g, (enum cox_channel_id)c)->large_held_bytes == 0);
    AWAIT(held_by(getpid()).large == 0);
    for (uint32_t rank = 0; rank < rank_count; rank++)
        AWAIT(dead >> rank & 1 || held_by(test_pid(g, rank)).large == 0);
    /* One fd for each that is kept, and none for what is gone; the control socket's copies are here
     * as well, and another thread closes them. */
    AWAIT(fds_of_payloads(getpid()) <= 2 * held_by(getpid()).payloads + 4 * rank_count);
}

/* ---- requests ---- */

struct bytes {
    uint8_t *at;
    size_t size;
};

/* A line, and bytes behind it up to size. */
static struct bytes bytes_make(size_t size, const char *line)
{
    struct bytes bytes = {.at = malloc(size), .size = size};
    assert_non_null(bytes.at);
    size_t length = strlen(line);
    assert_true(length < size);
    payload_fill(bytes.at, size, 99);
    memcpy(bytes.at, line, length);
    bytes.at[length] = '\n';
    return bytes;
}

static void bytes_free(struct bytes *bytes)
{
    free(bytes->at);
}

#define BYTES _cox_cleanup_(bytes_free) struct bytes

static const struct cox_submit_options *until(uint64_t deadline_ns)
{
    static struct cox_submit_options options;
    options = (struct cox_submit_options){
        .size = sizeof options, .gather = COX_GATHER_ALL, .deadline_ns = deadline_ns};
    return &options;
}

/* Looks at replies in place: they may be gigabytes. */
struct look {
    size_t sizes[8];
    uint64_t digests[8];
    char words[8][128];
    enum cox_outcome outcomes[8];
    int32_t codes[8];
    char texts[8][512];
    int status;
    /* of an init */
    size_t reply_sizes[8];
    bool reply_right[8];
    char number[8][32];
};

static void look_at_init(struct look *look, uint32_t rank,
                         const Coxswain__ExecuteResponse__InitResults *results)
{
    for (size_t i = 0; i < results->n_init_result_map; i++) {
        const char *key = results->init_result_map[i]->key,
                   *value = results->init_result_map[i]->value;
        if (strcmp(key, "maxPositionEmbeddings") == 0)
            snprintf(look->number[rank], sizeof look->number[rank], "%s", value);
        if (strcmp(key, "earlyStoppingIds") != 0)
            continue;
        look->reply_sizes[rank] = strlen(value);
        look->reply_right[rank] =
            strspn(value, (char[]){(char)('a' + rank), '\0'}) == look->reply_sizes[rank];
    }
}

static void visit(void *context, const struct cox_completion *completion)
{
    struct look *look = context;
    look->status = completion->status;
    for (uint32_t rank = 0; rank < completion->rank_count && rank < 8; rank++) {
        const struct cox_rank_result *result = &completion->ranks[rank];
        look->outcomes[rank] = result->outcome;
        look->codes[rank] = result->code;
        snprintf(look->texts[rank], sizeof look->texts[rank], "%s",
                 result->text ? result->text : "");
        look->sizes[rank] = result->size;
        look->digests[rank] = result->bytes ? payload_digest(result->bytes, result->size) : 0;
        size_t shown =
            result->size < sizeof look->words[rank] ? result->size : sizeof look->words[rank] - 1;
        if (result->bytes)
            memcpy(look->words[rank], result->bytes, shown);
        if (result->response && result->response->init_results)
            look_at_init(look, rank, result->response->init_results);
    }
}

static struct cox_error last_error;

static int ask(struct test_group *g, const struct bytes *bytes, uint64_t timeout_ms,
               struct look *ret_look)
{
    *ret_look = (struct look){0};
    last_error = (struct cox_error){0};
    return cox_executor_call_opaque(
        test_group_executor(g), bytes->at, bytes->size,
        until(timeout_ms ? cox_deadline_after_ms(timeout_ms) : test_patience()), visit, ret_look,
        &last_error);
}

static int ask_line(struct test_group *g, size_t size, uint64_t timeout_ms, struct look *ret_look,
                    const char *line)
{
    BYTES bytes = bytes_make(size, line);
    return ask(g, &bytes, timeout_ms, ret_look);
}

static void expect_whole(struct test_group *g, uint32_t n, size_t size)
{
    struct look look;
    BYTES bytes = bytes_make(size, "sum");
    char expected[32];
    snprintf(expected, sizeof expected, "%016" PRIx64, payload_digest(bytes.at, size));
    if (ask(g, &bytes, 0, &look))
        fail_msg("%zu bytes: %s", size, last_error.text);
    for (uint32_t rank = 0; rank < n; rank++)
        assert_string_equal(look.words[rank], expected);
}

static uint64_t digest_of_reply(size_t size, uint32_t rank)
{
    uint8_t *bytes = malloc(size);
    assert_non_null(bytes);
    payload_fill(bytes, size, rank);
    uint64_t digest = payload_digest(bytes, size);
    free(bytes);
    return digest;
}

static void expect_replies(struct test_group *g, uint32_t n, size_t size)
{
    struct look look;
    char line[64];
    snprintf(line, sizeof line, "size %zu", size);
    if (ask_line(g, 100, 0, &look, line))
        fail_msg("replies of %zu bytes: %s", size, last_error.text);
    for (uint32_t rank = 0; rank < n; rank++) {
        assert_int_equal(look.sizes[rank], size);
        assert_int_equal(look.digests[rank], digest_of_reply(size, rank));
    }
}

/* Each rank writes and reads a gigabyte byte by byte: 16 s were seen beside four busy loops on two
 * cores. */
#define LARGE_SIZE ((size_t)1 << 28)
#define LARGE_PATIENCE_MS (8 * TEST_PATIENCE_MS)

/* A message: an init, whose configuration and reply are as large as one likes. */
static int ask_init(struct test_group *g, size_t blob_size, size_t reply_size,
                    struct look *ret_look, uint64_t *ret_digest)
{
    typedef Coxswain__ExecuteRequest__ConfigEntry entry;
    char *blob = malloc(blob_size + 1), number[32];
    assert_non_null(blob);
    payload_fill((uint8_t *)blob, blob_size, 5);
    blob[blob_size] = '\0';
    *ret_digest = payload_digest(blob, blob_size);
    snprintf(number, sizeof number, "%zu", reply_size);
    entry first = COXSWAIN__EXECUTE_REQUEST__CONFIG_ENTRY__INIT, second = first;
    first.key = (char[]){"blob"};
    first.value = blob;
    second.key = (char[]){"answer"};
    second.value = number;
    entry *entries[] = {&first, &second};
    Coxswain__ExecuteRequest request = COXSWAIN__EXECUTE_REQUEST__INIT;
    request.has_execute_type = 1;
    request.execute_type = COXSWAIN__EXECUTE_TYPE__MODEL_INIT;
    request.n_config = 2;
    request.config = entries;
    *ret_look = (struct look){0};
    last_error = (struct cox_error){0};
    const bool large = blob_size + reply_size >= LARGE_SIZE;
    int r = cox_executor_call(
        test_group_executor(g), &request,
        until(cox_deadline_after_ms(large ? LARGE_PATIENCE_MS : TEST_PATIENCE_MS)), visit, ret_look,
        &last_error);
    free(blob);
    return r;
}

static void expect_init(struct test_group *g, uint32_t n, size_t blob_size, size_t reply_size)
{
    struct look look;
    uint64_t digest;
    char expected[32];
    if (ask_init(g, blob_size, reply_size, &look, &digest))
        fail_msg("init of %zu, replied with %zu: %s", blob_size, reply_size, last_error.text);
    snprintf(expected, sizeof expected, "%" PRIu64, digest >> 1);
    for (uint32_t rank = 0; rank < n; rank++) {
        assert_string_equal(look.number[rank], expected);
        assert_int_equal(look.reply_sizes[rank], reply_size);
        assert_true(reply_size == 0 || look.reply_right[rank]);
    }
}

#define FOR_EACH_N(n) for (uint32_t n = 1; n <= 4; n *= 2)

/* ---- whole, up to a gigabyte ---- */

TEST(m3_requests_and_replies_around_a_frame_and_far_beyond_come_whole)
{
    static const size_t sizes[] = {ROOM - 1, ROOM,        ROOM + 1, 65536,    65537,
                                   4 * MIB,  4 * MIB + 1, ROOM + 1, 64 * MIB, 20000};
    for (uint32_t n = 1; n <= 4; n *= 2)
        for (int replies = 0; replies < 2; replies++) {
            OWN_GROUP *g = small_group(n);
            uint64_t count = 0, bytes = 0, all = 0;
            for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
                const uint64_t size = sizes[i], copies = replies ? n : 1;
                if (replies)
                    expect_replies(g, n, size);
                else
                    expect_whole(g, n, size);
                count += size > ROOM ? copies : 0;
                bytes += size > ROOM ? copies * size : 0;
                all += copies * size;
                const struct cox_channel_stats *stats = stats_of(g, COX_CHANNEL_EXECUTE);
                assert_int_equal(replies ? stats->large_replies : stats->large_requests, count);
                assert_int_equal(replies ? stats->large_reply_bytes : stats->large_request_bytes,
                                 bytes);
                assert_int_equal(replies ? stats->reply_bytes : stats->request_bytes, all);
                assert_int_equal(replies ? stats->large_requests : stats->large_replies, 0);
                expect_nothing_held(g, 0);
            }
        }
}

TEST(m3_messages_travel_out_of_line_as_well)
{
    FOR_EACH_N(n)
    {
        OWN_GROUP *g = small_group(n);
        expect_init(g, n, 100, 100);
        assert_int_equal(stats_of(g, COX_CHANNEL_EXECUTE)->large_requests, 0);
        assert_int_equal(stats_of(g, COX_CHANNEL_EXECUTE)->large_replies, 0);
        for (size_t size = ROOM - 64; size <= ROOM + 64; size += 16) {
            expect_init(g, n, size, 0);
            expect_init(g, n, 0, size);
        }
        expect_init(g, n, 64 * MIB, 64 * MIB);
        assert_true(stats_of(g, COX_CHANNEL_EXECUTE)->large_requests > 1);
        assert_true(stats_of(g, COX_CHANNEL_EXECUTE)->large_replies > n);
        expect_nothing_held(g, 0);
    }
}

/* Of what the machine has left. */
static bool has_memory(uint64_t bytes)
{
    char line[128];
    uint64_t available_kib = 0;
    FILE *file = fopen("/proc/meminfo", "re");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "MemAvailable: %" SCNu64, &available_kib) == 1)
            break;
    if (file)
        fclose(file);
    return available_kib * 1024 > bytes;
}

TEST(m3_a_gigabyte_and_more_each_way)
{
    const size_t size = 1024 * MIB + 4097;
    if (!has_memory(6 * 1024 * MIB)) {
        print_message("skipped: this machine has less than 6 GiB of memory available\n");
        skip();
    }
    OWN_GROUP *g = small_group(2);
    expect_whole(g, 2, size);
    expect_nothing_held(g, 0);
    struct look look;
    char line[64];
    snprintf(line, sizeof line, "only 1 size %zu", size);
    if (ask_line(g, 100, 0, &look, line))
        fail_msg("a reply of %zu bytes: %s", size, last_error.text);
    assert_int_equal(look.sizes[1], size);
    assert_int_equal(look.digests[1], digest_of_reply(size, 1));
    expect_nothing_held(g, 0);
    expect_init(g, 2, size, 0);
    expect_nothing_held(g, 0);
    expect_whole(g, 2, 100);
}

/* ---- no copy for readers ---- */

TEST(m3_all_ranks_read_the_one_memory_of_the_coordinator_in_place)
{
    FOR_EACH_N(n)
    {
        OWN_GROUP *g = small_group(n);
        static const size_t sizes[] = {20000, 64 * MIB, 20000};
        char before[64] = "";
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            struct look look;
            assert_int_equal(ask_line(g, sizes[i], 0, &look, "where"), 0);
            for (uint32_t rank = 0; rank < n; rank++) {
                /* Shared, and not to be written. */
                assert_contains(look.words[rank], "memfd:cox_large_payload");
                assert_memory_equal(look.words[rank], "r--s ", 5);
                assert_string_equal(look.words[rank], look.words[0]);
            }
            assert_true(i == 0 || strcmp(before, look.words[0]) != 0); /* two frames */
            snprintf(before, sizeof before, "%.60s", look.words[0]);
        }
    }
}

/* The next request in the frame finds the memory, mapped already, as long as it fits. */
TEST(m3_memory_of_moderate_size_is_kept_for_the_next)
{
    struct cox_executor_options options = small_options(2);
    options.depth = 1;
    struct test_group *g = test_group_start(2, &options);
    static const struct {
        size_t size;
        bool same;
    } cases[] = {{40000, false}, {50000, true},    {65536, true},     {65537, false},
                 {40000, true},  {131072, true},   {17 * MIB, false}, {40000, false},
                 {40001, true},  {4 * MIB, false}, {40000, true}};
    char seen[64] = "";
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct look look;
        assert_int_equal(ask_line(g, cases[i].size, 0, &look, "where"), 0);
        assert_int_equal(strncmp(look.words[0], seen, 60) == 0, cases[i].same);
        snprintf(seen, sizeof seen, "%.60s", look.words[0]);
        expect_nothing_held(g, 0);
        assert_int_equal(held_by(getpid()).payloads, cases[i].size <= COX_LARGE_PAYLOAD_KEEP_SIZE);
        assert_int_equal(held_by(cox_executor_pid(test_group_executor(g), 1)).payloads,
                         cases[i].size <= COX_LARGE_PAYLOAD_KEEP_SIZE);
    }
    test_group_free(g);
    assert_int_equal(held_by(getpid()).payloads, 0);
    assert_int_equal(fds_of_payloads(getpid()), 0);
}

/* ---- both directions ---- */

static size_t submit_until_full(struct test_group *g, const struct bytes *bytes)
{
    size_t count = 0;
    int r = 0;
    while (r == 0 && count < 100) {
        r = cox_executor_submit_opaque(test_group_executor(g), bytes->at, bytes->size,
                                       until(test_patience()), NULL, NULL);
        count += r == 0;
    }
    assert_int_equal(r, COX_FULL);
    return count;
}

TEST(p11_both_directions_full_at_once_get_through)
{
    FOR_EACH_N(n)
    {
        OWN_GROUP *g = small_group(n);
        assert_ok(
            cox_executor_set_handler(test_group_executor(g), COX_CHANNEL_EXECUTE, test_handler, g));
        BYTES bytes = bytes_make(6 * MIB, "size 6000000 with");
        uint64_t digest = payload_digest(bytes.at, bytes.size);
        size_t done = 0;
        for (int round = 0; round < 5; round++) {
            size_t count = submit_until_full(g, &bytes);
            assert_true(count >= 2);
            for (size_t i = 0; i < count; i++, done++) {
                const struct test_completion *c = test_await(g, done);
                assert_int_equal(c->status, 0);
                for (uint32_t rank = 0; rank < n; rank++) {
                    assert_int_equal(c->ranks[rank].size, 6000008);
                    assert_memory_equal(c->ranks[rank].bytes, &digest, 8);
                }
            }
        }
        expect_nothing_held(g, 0);
    }
}

/* ---- limits ---- */

TEST(m3_what_is_too_large_even_out_of_line_is_refused_with_all_sizes)
{
    struct cox_executor_options options = small_options(2);
    options.memory.large_payload_size_max = 100000;
    options.memory.reply_size_max = 200000;
    OWN_GROUP *g = test_group_start(2, &options);
    struct look look;
    expect_whole(g, 2, 100000);
    assert_int_equal(ask_line(g, 100001, 0, &look, "sum"), COX_TOO_LARGE);
    assert_contains(last_error.text, " 100001 bytes");
    assert_contains(last_error.text, "holds 16380");
    assert_contains(last_error.text, "a large payload 100000 at most");
    expect_replies(g, 2, 200000);
    assert_int_equal(ask_line(g, 100, 0, &look, "only 1 size 200001"), COX_REJECTED);
    assert_int_equal(look.outcomes[1], COX_OUTCOME_ERROR);
    assert_int_equal(look.codes[1], COX_TOO_LARGE);
    assert_contains(look.texts[1], "200001 bytes");
    assert_contains(look.texts[1], "a large payload 200000 at most");
    uint64_t digest;
    assert_int_equal(ask_init(g, 100000, 0, &look, &digest), COX_TOO_LARGE);
    expect_whole(g, 2, 100000);
    expect_nothing_held(g, 0);
}

TEST(m3_without_large_payloads_it_is_refused_as_ever)
{
    struct cox_executor_options options = small_options(2);
    options.memory.refuse_large_payloads = true;
    OWN_GROUP *g = test_group_start(2, &options);
    struct look look;
    expect_whole(g, 2, ROOM);
    assert_int_equal(ask_line(g, ROOM + 1, 0, &look, "sum"), COX_TOO_LARGE);
    assert_contains(last_error.text, "use a larger request region");
    expect_replies(g, 2, ROOM);
    assert_int_equal(ask_line(g, 100, 0, &look, "only 0 size 16381"), COX_REJECTED);
    assert_int_equal(look.codes[0], COX_TOO_LARGE);
    assert_contains(look.texts[0],
                    "16381 bytes, a slot holds 16380, and there are no large payloads");
    expect_whole(g, 2, ROOM);
}

TEST(m3_no_memory_for_a_large_payload_is_reported_and_the_group_continues)
{
    test_needs_processes();
    OWN_GROUP *g = small_group(2);
    struct rlimit usual, low;
    struct look look;
    getrlimit(RLIMIT_FSIZE, &usual);
    low = (struct rlimit){.rlim_cur = MIB, .rlim_max = usual.rlim_max};
    BYTES bytes = bytes_make(8 * MIB, "sum");
    setrlimit(RLIMIT_FSIZE, &low);
    int r = ask(g, &bytes, 0, &look);
    setrlimit(RLIMIT_FSIZE, &usual);
    assert_int_equal(r, COX_NO_SPACE);
    assert_contains(last_error.text, "8388608 bytes");
    expect_whole(g, 2, 8 * MIB);
    /* And in a rank. */
    char expected[16];
    snprintf(expected, sizeof expected, "%d", COX_NO_SPACE);
    assert_int_equal(ask_line(g, 100, 0, &look, "limit 8000000"), 0);
    assert_string_equal(look.words[0], expected);
    expect_replies(g, 2, 8000000);
    expect_nothing_held(g, 0);
}

TEST(m3_an_reply_may_grow_shrink_and_stay_small)
{
    OWN_GROUP *g = small_group(2);
    static const struct {
        const char *line;
        size_t size;
    } cases[] = {
        {"grow 1000000 1000000", 1000000},
        {"grow 1000000 50000", 50000},
        {"grow 1000000 16380", 16380},
        {"grow 8000000 100", 100},
        {"grow 8000000 0", 0},
        {"grow 100 100", 100},
        {"again 20000 8000000", 8000000},
        {"again 8000000 20000", 20000},
        {"again 8000000 100", 100},
        {"again 100 20000", 20000},
    };
    struct look look;
    for (size_t i = 0; i < 3 * sizeof cases / sizeof *cases; i++) {
        const size_t size = cases[i / 3].size;
        if (ask_line(g, 100, 0, &look, cases[i / 3].line))
            fail_msg("%s: %s", cases[i / 3].line, last_error.text);
        for (uint32_t rank = 0; rank < 2; rank++) {
            assert_int_equal(look.sizes[rank], size);
            assert_int_equal(look.digests[rank], digest_of_reply(size, rank));
        }
    }
    expect_nothing_held(g, 0);
}

/* ---- freed once, whatever happens ---- */

TEST(m3_a_late_rank_keeps_the_memory_until_it_has_returned_it)
{
    OWN_GROUP *g = small_group(2);
    struct test_pipe *pipe = test_pipe_new();
    struct look look;
    char line[300];
    snprintf(line, sizeof line, "only 1 hold %s", test_pipe_path(pipe));
    BYTES bytes = bytes_make(8 * MIB, line);
    /* The machine may be slow, so the memory may be opened late; but it is read, and held, beyond
     * the deadline. */
    assert_int_equal(ask(g, &bytes, 500, &look), COX_TIMEOUT);
    assert_int_equal(look.outcomes[1], COX_OUTCOME_LATE);
    assert_true(stats_of(g, COX_CHANNEL_EXECUTE)->large_held_bytes >= 8 * MIB);
    test_await_lines(g, 1, "holds", 1);
    /* Also if another thread checks. */
    assert_int_equal(ask_line(g, 100, 20, &look, "sum"), COX_TIMEOUT);
    assert_true(stats_of(g, COX_CHANNEL_EXECUTE)->large_held_bytes >= 8 * MIB);
    test_pipe_release(pipe, 1);
    expect_nothing_held(g, 0); /* no requests meanwhile */
    expect_whole(g, 2, 8 * MIB);
}

TEST(m3_a_late_reply_out_of_line_is_dropped_and_freed)
{
    OWN_GROUP *g = small_group(2);
    struct test_pipe *pipe = test_pipe_new();
    struct look look;
    char line[300];
    snprintf(line, sizeof line, "only 0 late %s 8000000", test_pipe_path(pipe));
    assert_int_equal(ask_line(g, 20000, 300, &look, line), COX_TIMEOUT);
    test_await_lines(g, 0, "holds", 1);
    test_pipe_release(pipe, 1);
    expect_whole(g, 2, 100);
    assert_int_equal(stats_of(g, COX_CHANNEL_EXECUTE)->late_replies, 1);
    assert_int_equal(stats_of(g, COX_CHANNEL_EXECUTE)->large_replies, 0);
    expect_nothing_held(g, 0);
}

/* Rank 1 of three dies of it; the others are asked again, and a replacement takes its place. */
static void expect_death(struct test_group *g, size_t size, const char *line)
{
    struct look look;
    assert_int_equal(ask_line(g, size, 0, &look, line), COX_PEER_DEAD);
    assert_int_equal(look.outcomes[1], COX_OUTCOME_DEAD);
    expect_nothing_held(g, 2);
    test_restart_rank(g, 1);
    expect_whole(g, 3, size > ROOM ? size : 8 * MIB);
    expect_replies(g, 3, 5 * MIB);
    expect_nothing_held(g, 0);
}

TEST(m3_a_rank_that_dies_reading_or_writing_out_of_line_leaves_nothing)
{
    test_needs_processes();
    OWN_GROUP *g = small_group(3);
    expect_death(g, 8 * MIB, "only 1 die");
    expect_death(g, 20000, "only 1 die");
    expect_death(g, 100, "only 1 half 8000000");
    expect_death(g, 100, "only 1 half 20000");
    expect_death(g, 8 * MIB, "only 1 half 8000000");
}

#if COX_TESTING
TEST(m3_a_rank_killed_at_any_step_of_a_large_payload_leaves_nothing)
{
    test_needs_processes();
    static const char *const points[] = {
        "rank.taken:kill:1",     "large_payload.opened:kill:1",   "execute:kill:1",
        "memory.created:kill:1", "large_payload.exported:kill:1", "large_payload.written:kill:1",
        "reply.written:kill:1",  "reply.tagged:kill:1",           "rank.done:kill:1",
    };
    for (size_t i = 0; i < sizeof points / sizeof *points; i++) {
        setenv("COXSWAIN_FAULT", points[i], 1);
        setenv("COXSWAIN_FAULT_INCARNATION", "1", 1);
        OWN_GROUP *g = small_group(3);
        struct look look;
        BYTES bytes = bytes_make(8 * MIB, "size 8000000");
        int r = ask(g, &bytes, 0, &look);
        /* Once it has replied, that may count, if its memory is open before it is gone. */
        if (r != COX_PEER_DEAD && !(r == 0 && strstr(points[i], "done")))
            fail_msg("%s: %d: %s", points[i], r, last_error.text);
        unsetenv("COXSWAIN_FAULT");
        unsetenv("COXSWAIN_FAULT_INCARNATION");
        test_await_death(g, 1);
        expect_nothing_held(g, 2);
        test_restart_rank(g, 1);
        expect_whole(g, 3, 8 * MIB);
        expect_replies(g, 3, 8000000);
        expect_nothing_held(g, 0);
    }
}
#endif

/* ---- liars ---- */

TEST(m3_a_forged_reference_is_corrupt_for_that_rank_alone)
{
    test_needs_processes();
    test_needs(test_can_take_fds());
    struct cox_executor_options options = small_options(3);
    options.memory.reply_size_max = 16 * MIB;
    OWN_GROUP *g = test_group_start(3, &options);
    static const struct {
        const char *how;
        int code;
    } cases[] = {
        {"garbage", COX_CORRUPT}, {"crc", COX_CORRUPT},
        {"pid", COX_CORRUPT},     {"start", COX_CORRUPT},
        {"offset", COX_CORRUPT},  {"size", COX_TOO_LARGE},
        {"all", COX_TOO_LARGE},   {"zero", COX_CORRUPT},
        {"beyond", COX_CORRUPT},  {"short", COX_CORRUPT},
        {"none", COX_CORRUPT},    {"unsealed", COX_CORRUPT},
        {"shrinks", COX_CORRUPT}, {"file", COX_CORRUPT},
        {"device", COX_CORRUPT},  {"system", COX_CORRUPT},
        {"fd", COX_CORRUPT},      {"large", COX_TOO_LARGE},
        {"nonsense", 0},          {"holes", 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char line[64];
        struct look look;
        snprintf(line, sizeof line, "only 1 forge %s", cases[i].how);
        int r = ask_line(g, 20000, 0, &look, line);
        if ((r == 0) != (cases[i].code == 0) || look.codes[1] != cases[i].code)
            fail_msg("%s: %d, rank 1 %d: %s", cases[i].how, r, look.codes[1], last_error.text);
        for (uint32_t rank = 0; rank < 3; rank += 2) /* or the failure was first */
            assert_true(look.outcomes[rank] == COX_OUTCOME_OK ||
                        (r && look.outcomes[rank] == COX_OUTCOME_LATE));
        if (cases[i].code)
            assert_contains(last_error.text, "rank 1");
        else
            assert_int_equal(look.sizes[1], MIB);
        expect_whole(g, 3, 20000);
        expect_replies(g, 3, 20000);
    }
    assert_int_equal(fds_of_payloads(getpid()) > 0, 1);
}

/* ---- ways to the memory ---- */

/* Fds cannot be taken from process to process: the control socket has them, or /proc. */
TEST(m3_a_large_payload_opens_where_pidfd_getfd_is_denied)
{
    test_needs_processes();
    test_needs(test_can_take_fds());
    static const char *const command[] = {COX_TEST_BIN_DIR "/without", "pidfd_getfd=EPERM",
                                          COX_TEST_BIN_DIR "/large_payload_worker", NULL};
    static const enum cox_socket_use uses[] = {COX_SOCKET_IF_POSSIBLE, COX_SOCKET_NONE};
    struct cox_executor_options options = small_options(2);
    options.workers.command = command;
    for (size_t i = 0; i < sizeof uses / sizeof uses[0]; i++) {
        options.socket.use = uses[i];
        OWN_GROUP *g = test_group_start(2, &options);
        expect_whole(g, 2, 20000);
        expect_whole(g, 2, 8 * MIB);
        expect_replies(g, 2, 8000000);
        expect_nothing_held(g, 0);
    }
}
