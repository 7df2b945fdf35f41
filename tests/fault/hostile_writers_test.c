/* hostile_writers: another process writes over all the memory of a group, again and
 * again. See hostile_fixture.h for what must hold. */
#include "steps.h"
#include "hostile_fixture.h"
#include "meddler.h"

/* ---- many requests in flight ---- */

/* Until something completed, or a moment has passed. */
static void load_wait(struct load *load, uint64_t until_ns)
{
    const struct timespec until = {(time_t)(until_ns / COX_NSEC_PER_SEC),
                                   (long)(until_ns % COX_NSEC_PER_SEC)};
    pthread_mutex_lock(&load->lock);
    pthread_cond_timedwait(&load->changed, &load->lock, &until);
    pthread_mutex_unlock(&load->lock);
}

static void call_typed(struct test_group *group, const Coxswain__ExecuteRequest *request)
{
    const struct cox_submit_options options = {.size = sizeof(struct cox_submit_options),
                                               .gather = COX_GATHER_ALL,
                                               .deadline_ns = cox_deadline_after_ms(DEADLINE_MS)};
    int r =
        cox_executor_call(test_group_executor(group), request, &options, NULL, NULL, test_err());
    if (!punctual_note(&requests, options.deadline_ns))
        fail_msg("a call of type %d ended too late: %d %s", (int)request->execute_type, r,
                 test_error.text);
    if (r < 0 || (r && !test_error.text[0]))
        fail_msg("a call of type %d ended with %d: %s", (int)request->execute_type, r,
                 test_error.text);
}

/* Requests that are unpacked on both sides: a step that announces one sequence, an init, and other
 * channels. */
static void call_messages(struct test_group *group, unsigned which)
{
    static const Coxswain__ExecuteType types[] = {
        COXSWAIN__EXECUTE_TYPE__MODEL_INFER,          COXSWAIN__EXECUTE_TYPE__MODEL_INIT,
        COXSWAIN__EXECUTE_TYPE__PD_LINK_STATUS_QUERY, COXSWAIN__EXECUTE_TYPE__PAUSE_COMMAND_EXEC,
        COXSWAIN__EXECUTE_TYPE__KV_TRANSFER,
    };
    static const int32_t tokens[] = {1, 2, 3}, blocks[] = {0};
    const Coxswain__ExecuteType type = types[which % (sizeof types / sizeof types[0])];
    struct test_step step;
    test_step_init(&step, 0, COXSWAIN__FORWARD_TYPE__PREFILL);
    test_step_add(&step, &(struct test_row){.id = 7,
                                            .tokens = tokens,
                                            .token_count = 3,
                                            .announce = true,
                                            .blocks = blocks,
                                            .block_count = 1});
    Coxswain__ExecuteRequest request = COXSWAIN__EXECUTE_REQUEST__INIT;
    request.has_execute_type = 1;
    request.execute_type = type;
    if (type == COXSWAIN__EXECUTE_TYPE__MODEL_INFER)
        request = step.request;
    call_typed(group, &request);
}

/* Requests until the time is up or a rank is dead; then every one has ended, once, and was judged.
 */
static void load_run(struct test_group *group, struct load *load, uint64_t time_ms)
{
    uint64_t end_ns = cox_deadline_after_ms(time_ms);
    assert_ok(cox_executor_set_handler(test_group_executor(group), COX_CHANNEL_EXECUTE,
                                       on_completion, NULL));
    for (unsigned i = 0; cox_now_ns() < end_ns && load->submitted < IN_FLIGHT_MAX; i++) {
        if (i % 16 == 15)
            call_messages(group, i / 16);
        int r = load_submit(group, load);
        if (r == COX_PEER_DEAD)
            break;
        if (r)
            load_wait(load, cox_deadline_after_ms(2));
    }
    load_await_count(load, load->submitted);
    pthread_mutex_lock(&load->lock);
    size_t completed = load->completed, late = load->late, twice = load->twice;
    size_t foreign = load->foreign, odd = load->odd;
    pthread_mutex_unlock(&load->lock);
    if (completed != load->submitted || late || twice || foreign || odd)
        fail_msg(
            "of %zu requests %zu completed, %zu too late, %zu more than once, %zu with the reply of another, %zu with an odd status (%s)",
            load->submitted, completed, late, twice, foreign, odd, load->text);
}

/* ---- seeds ---- */

static void next_group_works(uint32_t rank_count, const char *name)
{
    struct test_group *group = group_start(rank_count, name);
    expect_own(group);
    expect_own(group);
    group_end(group);
}

static void print_load(const char *who, uint32_t rank_count, uint64_t seed, const struct load *load)
{
    print_message("%s, %" PRIu32 " ranks, seed %" PRIu64
                  ": %zu requests: %zu good, %zu failed, %zu with bytes written over\n",
                  who, rank_count, seed, load->submitted, load->good, load->failed, load->spoilt);
}

static void stranger_seed(uint32_t rank_count, uint64_t seed)
{
    static struct load load;
    char name[64], argument[96];
    struct test_group *group = group_start(rank_count, test_unique_name(name));
    expect_own(group);
    snprintf(argument, sizeof argument, "%" PRIu64 ":%s", seed, name);
    struct test_helper meddler = test_helper_start("meddle", argument);
    char ready;
    assert_int_equal(read(meddler.out, &ready, 1), 1);
    load_init(&load);
    load_run(group, &load, SEED_MS);
    assert_int_equal(test_helper_wait(&meddler), 0);
    print_load("a stranger", rank_count, seed, &load);
    /* A meddler that overwrote only payloads has harmed only requests in flight. */
    if (!(meddler_temper(seed).targets & MEDDLE_CONTROL) && !group_works(group))
        fail_msg("payloads were written over, and the group does not work any more");
    group_end(group);
    load_deinit(&load);
    next_group_works(rank_count, name);
}

/* Every temper meets both sizes. */
static uint32_t seed_ranks(uint64_t seed)
{
    return (seed + seed / 8) % 2 ? 2 : 4;
}

/* A rank reaches no more. */
TEST(p10_a_process_that_overwrites_everything_harms_no_group)
{
    for (uint64_t seed = 0; seed < 16; seed++)
        stranger_seed(seed_ranks(seed), seed);
}

/* The stranger is there before the group is, and begins while ranks attach. */
static void early_seed(uint32_t rank_count, uint64_t seed)
{
    char name[64], argument[96];
    struct test_group *group = NULL;
    snprintf(argument, sizeof argument, "%" PRIu64 ":%s", seed, test_unique_name(name));
    struct test_helper meddler = test_helper_start("meddle_early", argument);
    char ready;
    assert_int_equal(read(meddler.out, &ready, 1), 1);
    const struct cox_executor_options options = {
        .size = sizeof(struct cox_executor_options),
        .name = name,
        .rank_count = rank_count,
        .workers.command = test_own_command,
        .memory.keep_names = true,
        .times.start_timeout_ms = START_MS,
        .times.finalize_ms = FINALIZE_MS,
        .times.term_ms = TERM_MS,
    };
    uint64_t begin_ns = cox_now_ns();
    int r = test_group_try(&options, &group, test_err());
    if (!punctual_note(&starts, begin_ns + START_MS * COX_NSEC_PER_MSEC))
        fail_msg("start took %" PRIu64 " ms", (cox_now_ns() - begin_ns) / COX_NSEC_PER_MSEC);
    print_message("a stranger at the start, %" PRIu32 " ranks, seed %" PRIu64 ": %s\n", rank_count,
                  seed, r ? test_error.text : "started");
    if (r < 0 || r >= COX_STATUS_COUNT || strstr(test_error.text, CHECKED_CRASH) ||
        strstr(test_error.text, "signal"))
        fail_msg("start: %d: %s", r, test_error.text);
    if (r == 0) {
        group_works(group); /* or not; it ends in time */
        group_end(group);
    }
    assert_int_equal(test_helper_wait(&meddler), 0);
    next_group_works(rank_count, name);
}

TEST(p10_a_process_that_writes_while_ranks_attach_harms_no_group)
{
    for (uint64_t seed = 0; seed < 16; seed++)
        early_seed(seed_ranks(seed), seed);
}

/* ---- semaphores ---- */

/* Requests under deadlines while another process writes all kinds of garbage over all semaphores of
 * the group; kind: see semaphores_main. */
static void semaphores_seed(uint32_t rank_count, unsigned kind)
{
    static struct load load;
    char name[64], argument[96];
    struct test_group *group = group_start(rank_count, test_unique_name(name));
    expect_own(group);
    snprintf(argument, sizeof argument, "%u:%s", kind, name);
    struct test_helper meddler = test_helper_start("semaphores", argument);
    char ready;
    assert_int_equal(read(meddler.out, &ready, 1), 1);
    load_init(&load);
    load_run(group, &load, SEED_MS);
    print_load("garbage in semaphores", rank_count, kind, &load);
    if (kind % 2)
        assert_int_equal(test_helper_wait(&meddler), 0);
    /* What it left there does no harm. */
    if (kind % 2 && !group_works(group))
        fail_msg("semaphores were written over, and the group does not work any more");
    group_end(group); /* with the even ones while it still writes */
    if (kind % 2 == 0)
        assert_int_equal(test_helper_wait(&meddler), 0);
    load_deinit(&load);
    next_group_works(rank_count, name);
}

TEST(g2a_garbage_in_semaphores_ends_no_process)
{
    for (unsigned kind = 0; kind < 10; kind++)
        semaphores_seed(kind % 4 < 2 ? 2 : 4, kind);
}

/* ---- programs ---- */

#define SEMAPHORE_COUNT_MAX 256

static bool input_ended(void)
{
    struct pollfd end = {.fd = STDIN_FILENO, .events = POLLIN};
    return poll(&end, 1, 0) != 0;
}

struct semaphores {
    uint8_t *bytes[SEMAPHORE_COUNT_MAX];
    size_t count;
};

static int semaphores_map(struct semaphores *semaphores, const char *name)
{
    char prefix[128], path[600];
    snprintf(prefix, sizeof prefix, "sem.%s_", name);
    DIR *folder = opendir("/dev/shm");
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        if (strncmp(entry->d_name, prefix, strlen(prefix)) != 0 ||
            semaphores->count == SEMAPHORE_COUNT_MAX)
            continue;
        snprintf(path, sizeof path, "/dev/shm/%s", entry->d_name);
        int fd = open(path, O_RDWR | O_CLOEXEC);
        void *map = fd < 0 ? MAP_FAILED
                           : mmap(NULL, sizeof(sem_t), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (map != MAP_FAILED)
            semaphores->bytes[semaphores->count++] = map;
        close(fd);
    }
    if (folder)
        closedir(folder);
    return semaphores->count > 0 ? 0 : -1;
}

/* One semaphore: 0 and 1 zeros, 2 and 3 all ones, 4 and 5 random, 6 and 7 one random byte, 8 and 9
 * only the word in which glibc stores whether it is shared. */
static void semaphore_spoil(uint8_t *bytes, unsigned kind, uint64_t *random)
{
    uint8_t garbage[sizeof(sem_t)];
    for (size_t i = 0; i < sizeof garbage; i++) {
        *random = *random * UINT64_C(6364136223846793005) + 1442695040888963407;
        garbage[i] = kind / 2 == 0 ? 0 : kind / 2 == 1 ? 0xff : (uint8_t)(*random >> 56);
    }
    if (kind / 2 == 3)
        bytes[garbage[0] % sizeof garbage] = garbage[1];
    else if (kind / 2 == 4)
        memcpy(bytes + 8, garbage, 4);
    else
        memcpy(bytes, garbage, sizeof garbage);
}

/* Writes until its standard input ends. argument: "KIND:NAME". */
static int semaphores_main(const char *argument)
{
    static struct semaphores semaphores;
    char *name;
    unsigned kind = (unsigned)strtoul(argument, &name, 10);
    uint64_t random = kind + 1;
    if (semaphores_map(&semaphores, name + 1) || write(STDOUT_FILENO, "", 1) != 1)
        return 1;
    while (!input_ended())
        for (size_t i = 0; i < semaphores.count; i++)
            semaphore_spoil(semaphores.bytes[i], kind, &random);
    return 0;
}

/* Writes until its standard input ends. argument: "SEED:NAME". early: the group is still to come.
 */
static int meddle_main(const char *argument, bool early)
{
    struct meddler meddler;
    char *name;
    uint64_t seed = strtoull(argument, &name, 10);
    if (early && write(STDOUT_FILENO, "", 1) != 1)
        return 1;
    int r;
    do {
        r = meddler_attach(&meddler, name + 1, seed, test_err());
        if (r && early && input_ended())
            return 0;
        if (r && !early)
            fprintf(stderr, "meddler: %s\n", test_error.text);
    } while (r && early);
    if (r || (!early && write(STDOUT_FILENO, "", 1) != 1))
        return 1;
    meddler_run(&meddler, STDIN_FILENO);
    meddler_detach(&meddler);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "worker") == 0)
        return checked_worker_main(argc, argv);
    if (argc > 2 && strcmp(argv[1], "semaphores") == 0)
        return semaphores_main(argv[2]);
    if (argc > 2 && strncmp(argv[1], "meddle", 6) == 0)
        return meddle_main(argv[2], strcmp(argv[1], "meddle_early") == 0);
    const int failed = test_run(NULL, NULL);
    const int late = punctual_check(&requests) + punctual_check(&starts) + punctual_check(&stops);
    return failed ? failed : late;
}
