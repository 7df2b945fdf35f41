/*
 * Ranks of the reference model that are killed and replaced while the others keep process and
 * weights: requirements P8, S3, K28. The workers are this program: the engine of coxswain-worker,
 * and a command by which a rank leaves a process behind. Each incarnation of a rank has a folder of
 * its own as its working directory, in which the model has the same name. The folder is removed
 * once the incarnation has loaded the model, so that it cannot be loaded again.
 */
#include "coordinator/executor/executor_internal.h"
#include "coordinator/executor/requests_internal.h"
#include "engine_worker.h"
#include "steps.h"

#define SHIPPED COX_TEST_SOURCE_DIR "/models/sums"
#define RANK_COUNT_MAX 8
#define PROMPT_LENGTH 6u
#define STEP_COUNT 12u
#define BLOCK_SIZE 4u
#define BLOCK_COUNT ((PROMPT_LENGTH + STEP_COUNT) / BLOCK_SIZE + 1)

/* ---- the worker ---- */

/* Writes over all that it has of the group, again and again: of a group with names the rank group's
 * memory alone, since there any process of the user can spoil the rest. */
static void scribble(bool sealed)
{
    /* Also when the test that ends it has failed; the thread that forked it has all signals
     * blocked. */
    sigset_t none;
    sigemptyset(&none);
    pthread_sigmask(SIG_SETMASK, &none, NULL);
    alarm(120);
    for (uint8_t byte = 0x5a;; byte = (uint8_t)(byte + 0x3d)) {
        char line[512], rights[8], path[256] = "";
        uint64_t begin, end;
        FILE *maps = fopen("/proc/self/maps", "re");
        while (maps && fgets(line, sizeof line, maps)) {
            if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %7s %*s %*s %*s %255s", &begin, &end, rights,
                       path) != 4 ||
                strncmp(rights, "rw-s", 4) != 0 || (!sealed && !strstr(path, "_group")))
                continue;
            memset((void *)(uintptr_t)begin, byte, end - begin);
        }
        if (maps)
            fclose(maps);
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    }
}

/* 's': leaves a process behind that scribbles from the death of this one on, and replies with its
 * pid. */
static int on_opaque(void *context, const uint8_t *request, size_t request_size, uint8_t *reply,
                     size_t reply_capacity, size_t *ret_reply_size, struct cox_error *err)
{
    (void)context, (void)reply_capacity, (void)err;
    *ret_reply_size = 0;
    if (request_size == 0 || request[0] != 's')
        return 0;
    /* Before the rank is dead, and the frame another request's. */
    const bool sealed = request_size > 1 && request[1] == 's';
    int ready[2], lives[2];
    char byte = 0;
    if (pipe2(ready, O_CLOEXEC) || pipe2(lives, O_CLOEXEC))
        return -errno;
    const pid_t pid = fork();
    if (pid == 0) {
        /* A kill of the rank's process group does not reach it. The other end closes with its
         * parent. */
        close(lives[1]);
        if (setsid() < 0 || write(ready[1], &byte, 1) != 1 || read(lives[0], &byte, 1) != 0)
            _exit(1);
        scribble(sealed);
    }
    if (pid < 0 || read(ready[0], &byte, 1) != 1)
        return -ECHILD;
    memcpy(reply, &pid, sizeof pid);
    *ret_reply_size = sizeof pid;
    return 0;
}

static int worker_main(int argc, char **argv)
{
    static const struct cox_engine_options engine_options = {
        .model_dir = "model", .block_size = BLOCK_SIZE, .block_count = 2 * BLOCK_COUNT};
    struct cox_worker_callbacks callbacks = cox_engine_callbacks;
    callbacks.opaque = on_opaque;
    return engine_worker_main(argc, argv, &engine_options, &callbacks, NULL);
}

/* ---- a group and its incarnations ---- */

struct lives {
    struct test_group *group;
    uint32_t rank_count;
    uint32_t incarnations[RANK_COUNT_MAX];
    char folder[64];
};

static void life_path(const struct lives *lives, uint32_t incarnation, const char *what, char *path,
                      size_t size)
{
    snprintf(path, size, "%s/%" PRIu32 "%s", lives->folder, incarnation, what);
}

/* Where the ranks of this incarnation start, with the model or without. */
static void life_make(const struct lives *lives, uint32_t incarnation)
{
    char path[128];
    life_path(lives, incarnation, "", path, sizeof path);
    assert_true(mkdir(path, 0700) == 0 || errno == EEXIST);
    life_path(lives, incarnation, "/model", path, sizeof path);
    assert_true(symlink(SHIPPED, path) == 0 || errno == EEXIST);
}

static void life_forget(const struct lives *lives, uint32_t incarnation)
{
    char path[128];
    life_path(lives, incarnation, "/model", path, sizeof path);
    assert_int_equal(unlink(path), 0);
}

static void lives_start(struct lives *lives, uint32_t rank_count)
{
    static char line[5000];
    static const char *command[] = {"sh", "-c", line, "worker", NULL};
    *lives = (struct lives){.rank_count = rank_count, .folder = "/tmp/cox_lives_XXXXXX"};
    assert_non_null(mkdtemp(lives->folder));
    snprintf(line, sizeof line, "cd %s/$COXSWAIN_INCARNATION && exec %s worker \"$@\"",
             lives->folder, test_program);
    for (uint32_t rank = 0; rank < rank_count; rank++)
        lives->incarnations[rank] = 1;
    life_make(lives, 1);
    lives->group = test_group_start(rank_count, START_WITH(.workers.command = command));
    test_init(lives->group);
    life_forget(lives, 1);
}

static void lives_end(struct lives *lives)
{
    char path[128];
    test_group_free(lives->group);
    for (uint32_t incarnation = 1; incarnation < 100; incarnation++) {
        life_path(lives, incarnation, "/model", path, sizeof path);
        unlink(path);
        life_path(lives, incarnation, "", path, sizeof path);
        rmdir(path);
    }
    assert_int_equal(rmdir(lives->folder), 0);
}

static pid_t pid_of(const struct lives *lives, uint32_t rank)
{
    return cox_executor_pid(test_group_executor(lives->group), rank);
}

static void restart(struct lives *lives, uint32_t rank)
{
    life_make(lives, ++lives->incarnations[rank]);
    int r =
        cox_executor_restart(test_group_executor(lives->group), rank, test_patience(), test_err());
    if (r)
        fail_msg("restart of rank %" PRIu32 ": %d: %s", rank, r, test_error.text);
}

static int replay(struct lives *lives, struct cox_error *err)
{
    *err = (struct cox_error){0};
    return cox_executor_replay_init(test_group_executor(lives->group), test_patience(), err);
}

/* Replaces dead ranks; the others may not load the model again, since it is not there. */
static void replace(struct lives *lives, uint64_t ranks)
{
    uint32_t newest = 0;
    for (uint32_t rank = 0; rank < lives->rank_count; rank++) {
        if (!(ranks >> rank & 1))
            continue;
        restart(lives, rank);
        newest = lives->incarnations[rank] > newest ? lives->incarnations[rank] : newest;
    }
    assert_ok(replay(lives, test_err()));
    for (uint32_t rank = 0; rank < lives->rank_count; rank++)
        if (ranks >> rank & 1 && lives->incarnations[rank] == newest) {
            life_forget(lives, newest);
            break;
        }
}

/* ---- a stream of steps ---- */

struct stream {
    int32_t tokens[PROMPT_LENGTH + STEP_COUNT];
    float logprobs[STEP_COUNT];
    /* steps that succeeded */
    uint32_t count;
    /* 0: the sequence has to be announced */
    uint64_t base;
};

static void stream_init(struct stream *stream)
{
    static const int32_t prompt[PROMPT_LENGTH] = {1, 5, 10, 13, 8, 11};
    *stream = (struct stream){.count = 0};
    memcpy(stream->tokens, prompt, sizeof prompt);
}

/* The next token. */
static int stream_step(struct lives *lives, struct stream *stream, struct cox_error *err)
{
    const bool announce = stream->base == 0;
    const uint32_t length = PROMPT_LENGTH + stream->count;
    int32_t blocks[BLOCK_COUNT];
    struct test_step s;
    OWN_COMPLETION c = {0};
    for (uint32_t i = 0; i < BLOCK_COUNT; i++)
        blocks[i] = (int32_t)(2 * i + 1);
    test_step_init(&s, stream->base,
                   announce ? COXSWAIN__FORWARD_TYPE__PREFILL : COXSWAIN__FORWARD_TYPE__DECODE);
    test_step_add(&s, &(struct test_row){.id = 7,
                                         .tokens = stream->tokens,
                                         .token_count = length,
                                         .position = announce ? 0 : length - 1,
                                         .announce = announce,
                                         .blocks = blocks,
                                         .block_count = BLOCK_COUNT});
    *err = (struct cox_error){0};
    int r = test_step_call(lives->group, &s, test_patience(), &c, err);
    stream->base = r ? 0 : c.sequence;
    if (r)
        return r;
    assert_true(c.token_count == 1 && c.logprob_count == 1);
    stream->tokens[length] = c.tokens[0];
    stream->logprobs[stream->count++] = c.logprobs[0];
    return 0;
}

static void stream_until(struct lives *lives, struct stream *stream, uint32_t count)
{
    while (stream->count < count)
        assert_ok(stream_step(lives, stream, test_err()));
}

/* What a group gives in which nothing dies; the same for any number of ranks. */
static const struct stream *undisturbed(void)
{
    static struct stream reference;
    struct lives lives;
    if (reference.count == 0) {
        lives_start(&lives, 1);
        stream_init(&reference);
        stream_until(&lives, &reference, STEP_COUNT);
        lives_end(&lives);
    }
    return &reference;
}

/* Bit by bit. */
static void expect_same(const struct stream *stream)
{
    const struct stream *reference = undisturbed();
    assert_int_equal(stream->count, STEP_COUNT);
    assert_memory_equal(stream->tokens, reference->tokens, sizeof stream->tokens);
    assert_memory_equal(stream->logprobs, reference->logprobs, sizeof stream->logprobs);
}

/* Kills these ranks; on return every step is refused because of it. */
static void kill_ranks(struct lives *lives, struct stream *stream, uint64_t ranks)
{
    for (uint32_t rank = 0; rank < lives->rank_count; rank++)
        if (ranks >> rank & 1)
            assert_int_equal(kill(pid_of(lives, rank), SIGKILL), 0);
    for (uint32_t rank = 0; rank < lives->rank_count; rank++)
        if (ranks >> rank & 1)
            test_await_death(lives->group, rank);
    assert_int_equal(stream_step(lives, stream, test_err()), COX_PEER_DEAD);
    assert_int_equal(cox_executor_engine_state(test_group_executor(lives->group)),
                     COX_ENGINE_ABNORMAL);
}

/* The ranks are killed behind so many steps, replaced, and the stream is the one that nothing
 * disturbed. */
static void check_replacement(uint32_t rank_count, uint64_t ranks, uint32_t after)
{
    struct lives lives;
    struct stream stream;
    pid_t pids[RANK_COUNT_MAX];
    undisturbed();
    lives_start(&lives, rank_count);
    stream_init(&stream);
    stream_until(&lives, &stream, after);
    for (uint32_t rank = 0; rank < rank_count; rank++)
        pids[rank] = pid_of(&lives, rank);
    kill_ranks(&lives, &stream, ranks);
    replace(&lives, ranks);
    assert_int_equal(cox_executor_engine_state(test_group_executor(lives.group)),
                     COX_ENGINE_NORMAL);
    stream_until(&lives, &stream, STEP_COUNT);
    expect_same(&stream);
    for (uint32_t rank = 0; rank < rank_count; rank++)
        assert_int_equal(pid_of(&lives, rank) == pids[rank], !(ranks >> rank & 1));
    lives_end(&lives);
}

TEST(p8_one_of_1_2_4_8_ranks_is_replaced_and_the_bits_are_the_same)
{
    check_replacement(1, 1, 3);
    check_replacement(2, 1, 5);
    check_replacement(2, 2, 1);
    check_replacement(4, 1, 0);
    check_replacement(4, 8, 7);
    check_replacement(8, 1 << 5, 4);
}

TEST(p8_two_ranks_at_once_are_replaced)
{
    check_replacement(4, 1 << 1 | 1 << 2, 4);
    check_replacement(8, 1 << 0 | 1 << 7, 2);
}

/* The other tests are meaningful only if the model is really out of reach. */
TEST(p8_an_init_that_is_no_replay_loads_the_model)
{
    struct lives lives;
    struct cox_init_summary summary;
    struct stream stream;
    undisturbed();
    lives_start(&lives, 2);
    stream_init(&stream);
    stream_until(&lives, &stream, 3);
    struct cox_executor *executor = test_group_executor(lives.group);
    /* The ranks' own code: it is the input that is at fault, and no rank. */
    assert_refused(cox_executor_init(executor, NULL, 0, test_patience(), &summary, test_err()),
                   COX_NOT_FOUND, "model");
    /* Nothing is left of the model, and half an engine serves no request. */
    assert_refused(stream_step(&lives, &stream, test_err()), COX_REJECTED,
                   "a step before a successful init");
    assert_int_equal(replay(&lives, test_err()), COX_REJECTED);
    life_make(&lives, 1);
    assert_ok(replay(&lives, test_err()));
    stream_until(&lives, &stream, STEP_COUNT);
    expect_same(&stream);
    lives_end(&lives);
}

/* At each of these the new process ends; the others get its death, keep what they have, and the
 * next attempt succeeds. */
TEST(p8_a_new_rank_that_dies_half_way_is_replaced_again)
{
    static const char *const plans[] = {
        "group.claimed:kill:1:1",    "group.said:kill:1:1",    "group.said:kill:1:2",
        "group.aligned:kill:1:1",    "exchange.made:kill:1:1", "group.value:kill:1:1",
        "exchange.written:kill:1:1", "reply.tagged:kill:1:1",
    };
#if !COX_TESTING
    skip();
#endif
    undisturbed();
    for (size_t i = 0; i < sizeof plans / sizeof plans[0]; i++) {
        struct lives lives;
        struct stream stream;
        setenv("COXSWAIN_FAULT", plans[i], 1);
        setenv("COXSWAIN_FAULT_INCARNATION", "2", 1);
        lives_start(&lives, 4);
        stream_init(&stream);
        stream_until(&lives, &stream, 3);
        const pid_t pid = pid_of(&lives, 0);
        kill_ranks(&lives, &stream, 1 << 1);
        restart(&lives, 1);
        int r = replay(&lives, test_err());
        if (r == 0)
            r = stream_step(&lives, &stream, test_err());
        if (r != COX_PEER_DEAD)
            fail_msg("%s: %d: %s", plans[i], r, test_error.text);
        test_await_death(lives.group, 1);
        life_forget(&lives, 2);
        replace(&lives, 1 << 1);
        stream_until(&lives, &stream, STEP_COUNT);
        expect_same(&stream);
        assert_int_equal(pid_of(&lives, 0), pid);
        lives_end(&lives);
        unsetenv("COXSWAIN_FAULT");
        unsetenv("COXSWAIN_FAULT_INCARNATION");
    }
}

/* ---- what is left of the dead ---- */

/* Bytes that the rank group's memory takes, which all ranks of a group with names share. */
static uint64_t group_bytes(void)
{
    struct stat st = {0};
    char target[256];
    DIR *dir = opendir("/proc/self/fd");
    assert_non_null(dir);
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        ssize_t length = readlinkat(dirfd(dir), entry->d_name, target, sizeof target - 1);
        target[length < 0 ? 0 : length] = '\0';
        if (strstr(target, "_group"))
            assert_int_equal(fstatat(dirfd(dir), entry->d_name, &st, 0), 0);
    }
    closedir(dir);
    assert_int_not_equal(st.st_ino, 0);
    return (uint64_t)st.st_blocks * 512;
}

/* The scribbling process fills holes again, where no process reads; in a sealed group what it can
 * write and others read are hints, of which the last byte is unused. */
static void await_scribbles(struct lives *lives, uint64_t bytes)
{
    const struct cox_executor *executor = test_group_executor(lives->group);
    const bool sealed = test_attach() == COX_ATTACH_SEALED;
    const uint64_t size =
        cox_geometry_wake_memory_size(&executor->geometry) - cox_geometry_group_hints_offset();
    const volatile uint8_t *last =
        sealed ? (uint8_t *)executor->memory->rank_group_hints + size - 1 : NULL;
    const uint8_t before = sealed ? *last : 0;
    AWAIT(!((sealed ? *last == before : group_bytes() <= bytes)));
    assert_true(sealed ? *last != before : group_bytes() > bytes);
}

TEST(p8_k28_late_writes_of_a_former_incarnation_have_no_effect)
{
    struct lives lives;
    struct stream stream;
    OWN_COMPLETION c = {0};
    undisturbed();
    lives_start(&lives, 4);
    const uint64_t bytes = test_attach() == COX_ATTACH_SEALED ? 0 : group_bytes();
    for (uint32_t victim = 0; victim < 4; victim += 3) {
        const struct test_how how = {.gather = COX_GATHER_ALL, .ranks = UINT64_C(1) << victim};
        pid_t pid = -1;
        stream_init(&stream);
        stream_until(&lives, &stream, 4);
        assert_int_equal(test_call_how(lives.group, &c, &how, "%s",
                                       test_attach() == COX_ATTACH_SEALED ? "ss" : "sn"),
                         0);
        assert_int_equal(c.ranks[victim].size, sizeof pid);
        memcpy(&pid, c.ranks[victim].bytes, sizeof pid);
        assert_true(pid > 0);
        kill_ranks(&lives, &stream, UINT64_C(1) << victim);
        replace(&lives, UINT64_C(1) << victim);
        stream_until(&lives, &stream, STEP_COUNT);
        expect_same(&stream);
        await_scribbles(&lives, bytes);
        assert_int_equal(kill(pid, SIGKILL), 0);
    }
    lives_end(&lives);
}

/* ---- nothing grows ---- */

/* Its mappings that are shared. */
static size_t count_shared(pid_t pid)
{
    return test_count_maps(pid, "rw-s") + test_count_maps(pid, "r--s");
}

/* More often than there are windows. */
TEST(p8_p7_forty_replacements_in_a_row)
{
    struct lives lives;
    struct stream stream;
    undisturbed();
    lives_start(&lives, 2);
    const pid_t survivor = pid_of(&lives, 0);
    const uint64_t bytes = group_bytes();
    size_t fds = 0, own_fds = 0, maps = 0;
    for (int k = 0; k < 40; k++) {
        stream_init(&stream);
        stream_until(&lives, &stream, (uint32_t)k % STEP_COUNT);
        kill_ranks(&lives, &stream, 1 << 1);
        replace(&lives, 1 << 1);
        stream_until(&lives, &stream, STEP_COUNT);
        expect_same(&stream);
        assert_int_equal(group_bytes(), bytes);
        if (k == 2) {
            fds = test_count_proc(survivor, "fd");
            test_await_socket(lives.group);
            own_fds = test_count_fds();
            maps = count_shared(survivor);
        }
    }
    assert_int_equal(pid_of(&lives, 0), survivor);
    assert_int_equal(test_count_proc(survivor, "fd"), fds);
    assert_int_equal(count_shared(survivor), maps);
    test_await_socket(lives.group);
    assert_int_equal(test_count_fds(), own_fds);
    lives_end(&lives);
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "worker") == 0)
        return worker_main(argc, argv);
    return test_run(NULL, NULL);
}
