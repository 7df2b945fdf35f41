#include "channel/base/base_internal.h"
#include "channel_fixture.h"

LEAK_TEST(every_status_has_a_text_of_its_own)
{
    for (int a = 0; a < COX_STATUS_COUNT; a++) {
        const char *text = cox_status_text(a);
        assert_non_null(text);
        assert_true(text[0]);
        for (int b = 0; b < a; b++)
            assert_string_not_equal(text, cox_status_text(b));
        assert_string_not_equal(text, cox_status_text(COX_STATUS_COUNT));
    }
}

LEAK_TEST(any_number_has_a_text)
{
    static const int strange[] = {COX_STATUS_COUNT, INT_MAX, -4095, INT_MIN + 1, INT_MIN};
    for (size_t i = 0; i < sizeof strange / sizeof strange[0]; i++)
        assert_contains(cox_status_text(strange[i]), "unknown");
    assert_string_equal(cox_status_text(-ENOENT), "No such file or directory");
    assert_string_equal(cox_status_text(-EPERM), "Operation not permitted");
}

LEAK_TEST(the_first_failure_is_the_reported_one)
{
    struct cox_error err = {0};
    assert_int_equal(cox_fail(&err, COX_FULL, "%d of %s", 8, "frames"), COX_FULL);
    assert_int_equal(cox_fail(&err, -EIO, "clean-up"), -EIO);
    assert_int_equal(err.code, COX_FULL);
    assert_string_equal(err.text, "8 of frames");
    assert_int_equal(cox_fail(NULL, COX_STALE, "nobody reads this"), COX_STALE);
}

LEAK_TEST(long_texts_are_cut_to_what_fits)
{
    char text[3000];
    struct {
        struct cox_error err;
        char behind;
    } guarded = {.behind = 'x'};
    memset(text, 'a', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    cox_fail(&guarded.err, COX_INVALID, "%s", text);
    assert_int_equal(strlen(guarded.err.text), sizeof guarded.err.text - 1);
    assert_int_equal(guarded.behind, 'x');
}

/* Characters of one to four bytes; wherever a text of them is cut, whole ones are left. */
LEAK_TEST(texts_are_cut_between_characters)
{
    static const char *const characters[] = {"a", "\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x9a\xa3"};
    for (size_t c = 0; c < 4; c++)
        for (size_t size = 0; size < 20; size++) {
            size_t width = strlen(characters[c]);
            char text[64] = "";
            for (size_t i = 0; i < 10; i++)
                strcat(text, characters[c]);
            text[size] = '\0';
            cox_text_trim(text);
            assert_int_equal(strlen(text), strlen(text) / width * width);
            assert_true(strlen(text) + width > (size < 10 * width ? size : 10 * width));
        }
    char odd[] = "a\x80\x80\x80\x80"; /* no UTF-8 at all: as it is */
    cox_text_trim(odd);
    assert_int_equal(strlen(odd), 5);
    /* As failures are. */
    char text[3000];
    for (size_t i = 0; i + 2 < sizeof text; i += 2)
        memcpy(text + i, "\xc3\xa9", 3);
    struct cox_error err = {0};
    cox_fail(&err, COX_INVALID, "%s", text);
    assert_int_equal(strlen(err.text), (sizeof err.text - 1) / 2 * 2);
}

struct logged {
    int level;
    size_t length;
    char text[2000];
};

static void keep_log(void *context, int level, const char *text)
{
    struct logged *logged = context;
    logged->level = level;
    logged->length = strlen(text);
    snprintf(logged->text, sizeof logged->text, "%s", text);
}

LEAK_TEST(log_lines_reach_the_hook_or_are_dropped)
{
    struct logged logged = {0};
    const struct cox_log log = {.fn = keep_log, .context = &logged}, silent = {0};
    char text[3000];
    cox_log_write(&log, 4, "rank %d: %s", 3, "late");
    assert_int_equal(logged.level, 4);
    assert_string_equal(logged.text, "rank 3: late");
    memset(text, 'a', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    cox_log_write(&log, 3, "%s", text);
    assert_int_equal(logged.length, 1023);
    cox_log_write(&silent, 3, "%s", "nobody");
    cox_log_write(NULL, 3, "%s", "nobody");
}

LEAK_TEST(deadlines_saturate)
{
    uint64_t before = cox_now_ns(), deadline = cox_deadline_after_ms(1000), after = cox_now_ns();
    assert_true(before + COX_NSEC_PER_SEC <= deadline && deadline <= after + COX_NSEC_PER_SEC);
    assert_true(cox_deadline_after_ns(0) >= after);
    assert_true(cox_deadline_after_ns(UINT64_MAX) == COX_DEADLINE_NEVER);
    assert_true(cox_deadline_after_ns(UINT64_MAX - before / 2) == COX_DEADLINE_NEVER);
    assert_true(cox_deadline_after_ms(UINT64_MAX) == COX_DEADLINE_NEVER);
    assert_true(cox_deadline_after_ms(UINT64_MAX / COX_NSEC_PER_MSEC) == COX_DEADLINE_NEVER);
    /* The product would wrap around to 2 ms. */
    assert_true(cox_deadline_after_ms(UINT64_MAX / COX_NSEC_PER_MSEC + 3) == COX_DEADLINE_NEVER);
    assert_true(cox_deadline_min(COX_DEADLINE_NEVER, 5) == 5);
    assert_true(cox_deadline_min(5, COX_DEADLINE_NEVER) == 5);
}

LEAK_TEST(the_clock_never_goes_back)
{
    struct timespec ts;
    uint64_t last = 0;
    for (int i = 0; i < 1000; i++) {
        uint64_t now = cox_now_ns();
        assert_true(now >= last);
        last = now;
    }
    clock_gettime(CLOCK_MONOTONIC, &ts);
    assert_true((uint64_t)ts.tv_sec - last / COX_NSEC_PER_SEC <= 1);
}

static void false_assertion(void *context)
{
    COX_ASSERT(context != NULL);
}

LEAK_TEST(a_false_assertion_aborts_in_every_build)
{
    int here = 0;
    child_run(false_assertion, &here);
    child_aborts(false_assertion, NULL);
}

static void speaking_assertion(void *context)
{
    int *fds = context;
    CHECK(dup2(fds[1], STDERR_FILENO) == STDERR_FILENO);
    close(fds[1]);
    signal(SIGABRT, SIG_DFL);
    COX_ASSERT(1 + 1 == 3);
}

LEAK_TEST(a_false_assertion_says_what_and_where)
{
    int fds[2];
    char text[512];
    assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
    pid_t pid = child_start(speaking_assertion, fds);
    close(fds[1]);
    FILE *file = fdopen(fds[0], "r");
    assert_non_null(fgets(text, sizeof text, file));
    fclose(file);
    assert_int_equal(child_status(pid) & 0x7f, SIGABRT);
    assert_contains(text, "1 + 1 == 3");
    assert_contains(text, "base_test.c");
}

static void unread_assertion(void *context)
{
    int fds[2];
    char bytes[4096] = {0};
    CHECK(pipe2(fds, O_NONBLOCK) == 0 && dup2(fds[1], STDERR_FILENO) == STDERR_FILENO);
    while (write(fds[1], bytes, sizeof bytes) > 0)
        continue;
    CHECK(fcntl(fds[1], F_SETFL, 0) == 0);
    flockfile(stderr); /* as a thread that is inside such a write */
    COX_ASSERT(context);
}

LEAK_TEST(a_false_assertion_aborts_though_nobody_reads_it)
{
    child_aborts(unread_assertion, NULL);
}

LEAK_TEST(cleanup_closes_frees_and_keeps_errno)
{
    int none = -1, kept;
    errno = EXFULL;
    cox_close_fd(&none);
    {
        _cox_cleanup_(cox_close_fd) int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
        _cox_cleanup_(cox_close_fd) int given = open("/dev/null", O_RDONLY | O_CLOEXEC);
        _cox_cleanup_(cox_free_ptr) char *bytes = malloc(10);
        _cox_cleanup_(cox_free_ptr) char *stolen = malloc(10);
        assert_true(fd >= 0 && given >= 0 && bytes && stolen);
        kept = cox_steal_fd(&given);
        assert_int_equal(given, -1);
        free(cox_steal_ptr(&stolen));
        assert_null(stolen);
        errno = EXFULL;
    }
    assert_int_equal(errno, EXFULL);
    assert_int_equal(fcntl(kept, F_GETFD), FD_CLOEXEC);
    int bad = 9999; /* close fails, errno stays */
    errno = EXFULL;
    cox_close_fd(&bad);
    assert_int_equal(errno, EXFULL);
    assert_int_equal(bad, -1);
    close(kept);
}

LEAK_TEST(an_array_grows_by_doubling_and_keeps_its_items)
{
    uint32_t *items = NULL;
    size_t capacity = 0, growths = 0;
    for (uint32_t i = 0; i < 1000; i++) {
        const size_t before = capacity;
        assert_int_equal(cox_reserve((void **)&items, &capacity, i + 1, sizeof *items), 0);
        assert_true(capacity > i);
        growths += capacity != before;
        items[i] = i;
    }
    assert_true(growths <= 11);
    for (uint32_t i = 0; i < 1000; i++)
        assert_int_equal(items[i], i);
    assert_int_equal(cox_reserve((void **)&items, &capacity, 5000, sizeof *items), 0);
    assert_int_equal(capacity, 5000);
    uint32_t *const kept = items;
    assert_int_equal(cox_reserve((void **)&items, &capacity, (size_t)UINT32_MAX + 1, 1), -ENOMEM);
    volatile size_t too_large = SIZE_MAX / 2; /* volatile: gcc warns about the product */
    assert_int_equal(cox_reserve((void **)&items, &capacity, UINT32_MAX, too_large), -ENOMEM);
    assert_ptr_equal(items, kept);
    assert_int_equal(capacity, 5000);
    free(items);
}

LEAK_TEST(rank_sets_hold_each_rank_up_to_the_last)
{
    for (uint32_t count = 0; count <= COX_RANK_COUNT_MAX; count++) {
        struct cox_rank_set set = cox_rank_set_first(count);
        for (uint32_t rank = 0; rank < COX_RANK_COUNT_MAX; rank++)
            assert_int_equal(cox_rank_set_has(&set, rank), rank < count);
    }
    for (uint32_t only = 0; only < COX_RANK_COUNT_MAX; only++) {
        struct cox_rank_set set = {{0}};
        cox_rank_set_add(&set, only);
        for (uint32_t rank = 0; rank < COX_RANK_COUNT_MAX; rank++)
            assert_int_equal(cox_rank_set_has(&set, rank), rank == only);
    }
}
