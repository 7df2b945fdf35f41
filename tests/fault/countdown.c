#include "countdown.h"

#include "channel/base/peer.h"
#include "testing.h"

#if defined(__SANITIZE_ADDRESS__)
#define HAS_LEAK_CHECK 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define HAS_LEAK_CHECK 1
#endif
#endif
#ifdef HAS_LEAK_CHECK
#include <sanitizer/lsan_interface.h>
#endif

#define OBJECT_SIZE_MAX (256 << 10)
#define PATTERN 0xa5
/* Places in the libraries that were seen to fail. */
#define SITE_COUNT_MAX 1024
/* No constructor here makes so many calls. */
#define CALL_COUNT_MAX 20000

enum mode { ONCE, STICKY, INTERRUPTED };
static const char *const mode_names[] = {"once", "from then on", "interrupted"};

/* In shared memory: a child between fork and exec counts on. */
struct countdown {
    _Atomic bool armed;
    _Atomic int mode;
    _Atomic bool lenient;
    _Atomic bool own_only;
    /* calls until one fails */
    _Atomic int left;
    /* the fields below are set */
    _Atomic bool fired;
    struct countdown_call call;
    const void *_Atomic site;
};

static struct countdown *countdown;
static _Atomic long block_count;

__attribute__((constructor)) static void countdown_map(void)
{
    void *map =
        mmap(NULL, sizeof *countdown, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    COX_ASSERT(map != MAP_FAILED);
    countdown = map;
}

/* ---- counting ---- */

static bool call_counts(const struct countdown_call *call, enum mode mode)
{
    if (countdown->own_only && (call->flags & COUNTDOWN_FOREIGN))
        return false;
    if (mode == INTERRUPTED)
        return call->flags & COUNTDOWN_INTERRUPTIBLE;
    /* What follows a failure that goes unnoticed would be taken for the first one. */
    bool passes = mode == STICKY && countdown->lenient && !countdown->fired &&
                  (call->flags & COUNTDOWN_PASSABLE);
    return call->error && !passes;
}

bool countdown_fails(const struct countdown_call *call, const void *site)
{
    /* Before the map is there: libraries' own constructors. */
    if (!countdown || !countdown->armed)
        return false;
    enum mode mode = (enum mode)countdown->mode;
    if (!call_counts(call, mode))
        return false;
    int left = atomic_fetch_sub(&countdown->left, 1) - 1;
    bool later = left < 0 && mode == STICKY && !(call->flags & COUNTDOWN_ONCE);
    if (left == 0) {
        countdown->call = *call;
        countdown->site = site;
        countdown->fired = true;
        errno = mode == INTERRUPTED ? EINTR : call->error;
    } else if (later) {
        errno = COUNTDOWN_LATER;
    }
    return left == 0 || later;
}

int countdown_took_back(void)
{
    if (!countdown || !countdown->armed)
        return 0;
    errno = COUNTDOWN_LATER;
    return -1;
}

void countdown_block(int difference)
{
    atomic_fetch_add_explicit(&block_count, difference, memory_order_relaxed);
}

static void arm(const struct countdown_subject *subject, enum mode mode, int k)
{
    countdown->mode = mode;
    countdown->lenient = subject->lenient;
    countdown->own_only = subject->own_only;
    countdown->left = k;
    countdown->fired = false;
    countdown->armed = true;
}

/* ---- what there is ---- */

struct belongings {
    size_t fds, threads, names, maps;
    bool children;
    /* and threads to join */
    long blocks;
    sigset_t mask;
};

static size_t count_entries(const char *folder, const char *part)
{
    DIR *dir = opendir(folder);
    COX_ASSERT(dir);
    size_t count = 0;
    for (const struct dirent *entry; (entry = readdir(dir));)
        count += entry->d_name[0] != '.' && strstr(entry->d_name, part) != NULL;
    closedir(dir);
    return count;
}

/* Without those that end: one that was joined is listed for a moment still. */
static size_t count_threads(void)
{
    DIR *dir = opendir("/proc/self/task");
    COX_ASSERT(dir);
    size_t count = 0;
    for (const struct dirent *entry; (entry = readdir(dir));)
        count += entry->d_name[0] != '.' && !cox_peer_exiting((pid_t)atoi(entry->d_name));
    closedir(dir);
    return count;
}

static size_t count_maps(void)
{
    char line[512];
    size_t count = 0;
    FILE *maps = fopen("/proc/self/maps", "re");
    COX_ASSERT(maps);
    while (fgets(line, sizeof line, maps))
        count += strstr(line, "/dev/shm") != NULL || strstr(line, "/memfd:") != NULL;
    fclose(maps);
    return count;
}

static void belongings_look(struct belongings *ret)
{
    siginfo_t info;
    char prefix[64];
    memset(ret, 0, sizeof *ret);
    ret->blocks = block_count;
    ret->fds = count_entries("/proc/self/fd", "");
    ret->threads = count_threads();
    ret->names = count_entries("/dev/shm", countdown_name(prefix, ""));
    ret->maps = count_maps();
    ret->children = waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT | __WALL) == 0;
    pthread_sigmask(SIG_SETMASK, NULL, &ret->mask);
}

static bool belongings_equal(const struct belongings *a, const struct belongings *b)
{
    return a->fds == b->fds && a->threads == b->threads && a->names == b->names &&
           a->maps == b->maps && a->children == b->children && a->blocks == b->blocks &&
           memcmp(&a->mask, &b->mask, sizeof a->mask) == 0;
}

const char *countdown_name(char buffer[64], const char *which)
{
    snprintf(buffer, 64, "countdown_%d_%s", (int)getpid(), which);
    return buffer;
}

/* ---- one attempt ---- */

struct attempt {
    const struct countdown_subject *subject;
    enum mode mode;
    int k;
    bool fired;
    struct countdown_call call;
    const void *site;
    int result;
    struct cox_error err;
};

static _Alignas(64) unsigned char object[OBJECT_SIZE_MAX];
static const void *sites[SITE_COUNT_MAX];
static size_t site_count;

#define EXPECT(attempt, condition, ...)                                                            \
    do {                                                                                           \
        if (!(condition))                                                                          \
            attempt_fail(attempt, __VA_ARGS__);                                                    \
    } while (0)

__attribute__((format(printf, 2, 3))) static void attempt_fail(const struct attempt *attempt,
                                                               const char *format, ...)
{
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fail_msg("%s, call %d (%s) fails %s: %s; result %d (%s), text '%s'", attempt->subject->name,
             attempt->k, attempt->fired ? attempt->call.name : "none", mode_names[attempt->mode],
             text, attempt->result, cox_status_text(attempt->result), attempt->err.text);
}

static void attempt_expect_nothing_left(const struct attempt *attempt,
                                        const struct belongings *before, const char *when)
{
    struct belongings now;
    belongings_look(&now);
    EXPECT(
        attempt, belongings_equal(before, &now),
        "%s: fds %zu then %zu, threads %zu %zu, names %zu %zu, mappings %zu %zu, children %d %d, blocks %ld %ld, signal mask %s",
        when, before->fds, now.fds, before->threads, now.threads, before->names, now.names,
        before->maps, now.maps, before->children, now.children, before->blocks, now.blocks,
        memcmp(&before->mask, &now.mask, sizeof now.mask) ? "changed" : "kept");
}

/* The sanitizer sees what the count of blocks cannot, blocks of other libraries; it takes its time.
 */
static void attempt_expect_no_leak(const struct attempt *attempt)
{
#ifdef HAS_LEAK_CHECK
    EXPECT(attempt, __lsan_do_recoverable_leak_check() == 0, "memory was leaked");
#else
    (void)attempt;
#endif
}

static bool code_is_listed(const int *codes, int code)
{
    for (; codes && *codes; codes++)
        if (*codes == code)
            return true;
    return false;
}

/* The text has the words of the error that was injected, or those that say as much. */
static bool text_explains(const struct attempt *attempt)
{
    const char *text = attempt->err.text, *word = attempt->subject->word;
    int e = attempt->call.error;
    return strstr(text, cox_status_text(-e)) || (e == ENOMEM && strstr(text, "memory")) ||
           (e == ENOSPC && strstr(text, "bytes")) || (word && strstr(text, word));
}

static void attempt_check_failure(const struct attempt *attempt)
{
    const struct countdown_subject *subject = attempt->subject;
    int r = attempt->result;
    EXPECT(attempt, attempt->mode != INTERRUPTED, "an interruption left its wrapper");
    EXPECT(attempt,
           r == -attempt->call.error || (r > 0 && r == attempt->call.status) ||
               code_is_listed(subject->codes, r),
           "not the code of the first failure");
    if (!subject->wordless) {
        EXPECT(attempt, !strstr(attempt->err.text, "line -1"), "the text names no place");
        EXPECT(attempt, attempt->err.code == r, "err has the code %d", attempt->err.code);
        EXPECT(attempt, text_explains(attempt), "the text does not explain the failure");
        EXPECT(attempt, !strstr(attempt->err.text, cox_status_text(-COUNTDOWN_LATER)),
               "the text tells of a later failure");
    }
    for (size_t i = 0; !subject->in_place && i < subject->size; i++)
        EXPECT(attempt, object[i] == PATTERN, "byte %zu of the out-parameter was touched", i);
}

static void attempt_check_success(const struct attempt *attempt)
{
    bool passable = attempt->mode == INTERRUPTED ||
                    (attempt->subject->lenient && (attempt->call.flags & COUNTDOWN_PASSABLE));
    EXPECT(attempt, !attempt->fired || passable, "the failure went unnoticed");
}

static void attempt_make(struct attempt *attempt)
{
    const struct countdown_subject *subject = attempt->subject;
    struct cox_error err = {0};
    memset(object, PATTERN, subject->size);
    if (subject->prepare)
        subject->prepare();
    if (attempt->k)
        arm(subject, attempt->mode, attempt->k);
    attempt->result = subject->construct(object, subject->wordless ? NULL : &err);
    countdown->armed = false;
    attempt->fired = attempt->k && countdown->fired;
    attempt->call = countdown->call;
    attempt->site = countdown->site;
    attempt->err = err;
    if (attempt->result == 0 && subject->destroy)
        subject->destroy(object);
    if (subject->restore)
        subject->restore();
}

/* A place is met by many counts: once is enough for what takes long. */
static bool site_is_new(const void *site)
{
    for (size_t i = 0; i < site_count; i++)
        if (sites[i] == site)
            return false;
    COX_ASSERT(site_count < SITE_COUNT_MAX);
    sites[site_count++] = site;
    return true;
}

static void attempt_expect_works(const struct attempt *failed, const struct belongings *before)
{
    struct attempt again = {.subject = failed->subject, .mode = failed->mode};
    attempt_make(&again);
    EXPECT(failed, again.result == again.subject->expected,
           "the next attempt, without faults, gives %d (%s): %s", again.result,
           cox_status_text(again.result), again.err.text);
    attempt_expect_nothing_left(failed, before, "after the next attempt");
}

static void run(const struct countdown_subject *subject, enum mode mode)
{
    COX_ASSERT(subject->size <= sizeof object);
    struct attempt attempt = {.subject = subject, .mode = mode};
    struct belongings first, then;
    belongings_look(&first);
    attempt_make(&attempt); /* what is made once for the whole process is there now */
    EXPECT(&attempt, attempt.result == subject->expected, "without any fault");
    belongings_look(&then);
    EXPECT(&attempt,
           first.names == then.names && first.children == then.children &&
               memcmp(&first.mask, &then.mask, sizeof first.mask) == 0,
           "names, children or the signal mask changed");
    site_count = 0;
    int fired_count = 0;
    do {
        struct belongings before;
        attempt.k++;
        EXPECT(&attempt, attempt.k < CALL_COUNT_MAX, "it never ends");
        belongings_look(&before);
        attempt_make(&attempt);
        if (attempt.result == subject->expected)
            attempt_check_success(&attempt);
        else
            attempt_check_failure(&attempt);
        attempt_expect_nothing_left(&attempt, &before, "afterwards");
        bool new = attempt.fired &&site_is_new(attempt.site);
        if (attempt.fired && (new || !subject->costly))
            attempt_expect_works(&attempt, &before);
        if (new || !attempt.fired)
            attempt_expect_no_leak(&attempt);
        fired_count += attempt.fired;
    } while (attempt.fired);
    EXPECT(&attempt, fired_count > 0 || mode == INTERRUPTED, "no call of it was counted");
}

void countdown_try(const struct countdown_subject *subjects, size_t count, unsigned modes)
{
    for (int mode = ONCE; mode <= INTERRUPTED; mode++)
        for (size_t i = 0; modes & 1u << mode && i < count; i++)
            run(&subjects[i], (enum mode)mode);
}

/* ---- groups ---- */

const char *countdown_group(void)
{
    static char name[64];
    return countdown_name(name, "g");
}

const char *countdown_object(void)
{
    static char name[65] = "/";
    countdown_name(name + 1, "o");
    return name;
}

struct cox_geometry countdown_geometry(const struct cox_attach_mode *mode)
{
    const bool legacy = mode == &cox_attach_legacy;
    struct cox_geometry_choice choice = {.mode = mode, .depth = legacy ? 1 : 2};
    struct cox_geometry geometry;
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
        bool slots = legacy && c != COX_CHANNEL_LINK;
        choice.request_size[c] = 8192;
        choice.response_size[c] = slots ? COUNTDOWN_RANK_COUNT * COX_LEGACY_SLOT_STRIDE : 65536;
    }
    assert_ok(cox_geometry_resolve(COUNTDOWN_RANK_COUNT, &choice, &geometry, test_err()));
    return geometry;
}

struct cox_executor_options countdown_options(enum cox_attach attach, bool legacy)
{
    static const char *const scripted[] = {COX_TEST_BIN_DIR "/scripted_worker", NULL};
    struct cox_executor_options options = {
        .size = sizeof(struct cox_executor_options),
        .name = countdown_group(),
        .rank_count = COUNTDOWN_RANK_COUNT,
        .workers.command = scripted,
        .workers.environment_only = true,
        .workers.legacy = legacy,
        .spin = COX_SPIN_OFF,              /* a failure to read the processors is not an error */
        .socket.use = COX_SOCKET_REQUIRED, /* or what it fails for would be logged alone */
        .depth = 1,
        .memory.attach = attach,
        .times.start_timeout_ms = TEST_PATIENCE_MS,
        /* Legacy workers may not have attached yet, and then hear no goodbye. */
        .times.finalize_ms = legacy ? 1 : TEST_PATIENCE_MS,
    };
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
        options.memory.request_size[c] = 16384;
        options.memory.response_size[c] =
            legacy ? COUNTDOWN_RANK_COUNT * COX_LEGACY_SLOT_STRIDE : UINT64_C(131072);
    }
    return options;
}

pid_t countdown_child(void (*say)(void *ret), void *ret_said, size_t size)
{
    int told[2];
    COX_ASSERT(pipe(told) == 0);
    const pid_t pid = fork();
    COX_ASSERT(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        say(ret_said);
        COX_ASSERT(write(told[1], ret_said, size) == (ssize_t)size);
        for (;;)
            pause();
    }
    COX_ASSERT(read(told[0], ret_said, size) == (ssize_t)size);
    close(told[0]);
    close(told[1]);
    return pid;
}

void countdown_environment_shrink(void)
{
    char path[4096];
    snprintf(path, sizeof path, "%s", getenv("PATH"));
    clearenv();
    setenv("PATH", path, 1);
    setenv("ASAN_OPTIONS", "detect_leaks=0", 1);
}
