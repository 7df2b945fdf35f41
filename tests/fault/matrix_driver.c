#include "channel/attach/named/names.h"
#include "channel/attach/named/named_channel.h"
#include "channel/base/fault.h"
#include "channel/base/peer.h"
#include "channel/base/thread.h"
#include "channel/memory/large_payload.h"
#include "channel/shm/channel.h"
#include "channel/socket/control_socket.h"
#include "proto/executor.pb-c.h"
#include "matrix.h"
#include "steps.h"
#include "testing.h"

#if COX_TESTING

#define TYPE(name) COXSWAIN__EXECUTE_TYPE__##name
/* Times that an operation is tried in spite of a machine that is slower than BRIEF_MS. */
#define SLOW_MAX 20

/* What came of one request. */
struct record {
    bool done;
    int status;
    char outcomes[MATRIX_RANK_COUNT][8];
    char text[800];
    uint64_t sequence;
    int32_t token;
};

struct driver {
    const char *name;
    enum matrix_mode mode;
    int rank;
    uint64_t brief_ms;
    struct cox_executor *executor;
    struct cox_rank_set asked;
    /* the rank was found dead, or late and continued */
    bool felt;
    int slow_count;
    struct record record;
    /* Of steps: one sequence of tokens. */
    /* 0: announce it */
    uint64_t base;
    int32_t tokens[16];
    uint32_t token_count;
    /* Of the handler and the fault hook. */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct record flights[MATRIX_FLIGHT_COUNT];
    /* submitted and not yet completed */
    int flight_count;
    bool heard[MATRIX_RANK_COUNT];
};

struct operation {
    const char *name;
    int (*call)(struct driver *d, const struct operation *operation, struct cox_error *err);
    /* of opaque requests */
    const char *text;
    /* of others */
    int type;
};

static const struct cox_fault_counts *counts;

static void journal(const char *name, int status, const struct record *record, const char *text)
{
    static const char none[MATRIX_RANK_COUNT][8] = {"-", "-", "-"};
    const char(*outcomes)[8] = record && record->done ? record->outcomes : none;
    /* At once: hooks write lines on their own threads. */
    printf("%s %d %s %s %s | %s\n", name, status, outcomes[0], outcomes[1], outcomes[2], text);
    fflush(stdout);
}

static void record_fill(struct record *record, const struct cox_completion *completion)
{
    static const char *const words[] = {"-", "ok", "error", "dead", "late"};
    record->done = true;
    record->status = completion->status;
    record->sequence = completion->sequence;
    snprintf(record->text, sizeof record->text, "%s", completion->text ? completion->text : "");
    for (uint32_t rank = 0; rank < MATRIX_RANK_COUNT; rank++) {
        const struct cox_rank_result *result = &completion->ranks[rank];
        char number[8] = "";
        if (result->outcome == COX_OUTCOME_DEAD)
            snprintf(number, sizeof number, "%d", result->signal % 100);
        snprintf(record->outcomes[rank], sizeof record->outcomes[rank], "%s%.2s",
                 words[result->outcome], number);
    }
    const Coxswain__ExecuteResponse *response =
        completion->payload ? completion->payload->response : NULL;
    if (response && response->execute_model_response && response->execute_model_response->step &&
        response->execute_model_response->step->n_tokens)
        record->token = response->execute_model_response->step->tokens[0];
}

static void visit(void *context, const struct cox_completion *completion)
{
    record_fill(context, completion);
}

static uint64_t deadline(const struct driver *d)
{
    return cox_deadline_after_ms(d->mode == MATRIX_STOP && !d->felt ? d->brief_ms
                                                                    : TEST_PATIENCE_MS);
}

/* ---- when an operation fails ---- */

/* Not before it is stopped: the signal to go on would get lost. */
static void driver_continue(struct driver *d)
{
    pid_t pid = cox_executor_pid(d->executor, (uint32_t)d->rank);
    AWAIT(cox_peer_stopped(pid));
    kill(pid, SIGCONT);
    printf("# rank %d goes on\n", d->rank);
}

/* True: the operation is to be done again. */
static bool driver_again(struct driver *d, int status)
{
    if (d->felt || (status != COX_PEER_DEAD && status != COX_TIMEOUT))
        return false;
    d->base = 0;
    if (d->mode == MATRIX_KILL && status == COX_PEER_DEAD) {
        d->asked.words[0] &= ~(UINT64_C(1) << d->rank);
        return d->felt = true;
    }
    if (d->mode != MATRIX_STOP || status != COX_TIMEOUT || !atomic_load(&counts->struck))
        return false;
    driver_continue(d);
    return d->felt = true;
}

/* True: it ended at its deadline although nothing has happened yet, and is to be done again. */
static bool driver_slow(struct driver *d, const char *name, int status)
{
    if (d->mode != MATRIX_STOP || d->felt || status != COX_TIMEOUT || atomic_load(&counts->struck))
        return false;
    printf("%s: %s\n", d->slow_count < SLOW_MAX ? "# slow" : MATRIX_TOO_SLOW, name);
    if (d->slow_count++ >= SLOW_MAX)
        return false;
    d->base = 0;
    return true;
}

/* ---- requests ---- */

static struct cox_submit_options how(const struct driver *d, enum cox_gather gather)
{
    return (struct cox_submit_options){.size = sizeof(struct cox_submit_options),
                                       .gather = gather,
                                       .deadline_ns = deadline(d),
                                       .asked = &d->asked};
}

static int call_opaque(struct driver *d, const struct operation *operation, struct cox_error *err)
{
    const char *text = operation->text;
    const struct cox_submit_options options = how(d, COX_GATHER_ALL);
    return cox_executor_call_opaque(d->executor, text, strlen(text), &options, visit, &d->record,
                                    err);
}

static int call_first(struct driver *d, const struct operation *operation, struct cox_error *err)
{
    const struct cox_rank_set all = d->asked;
    d->asked.words[0] &= ~all.words[0] + 1; /* the lowest */
    int r = call_opaque(d, operation, err);
    d->asked = all;
    return r;
}

/* Neither the request nor the replies fit; of one of them the block is too large to be kept. */
static int call_large_payload(struct driver *d, const struct operation *operation,
                              struct cox_error *err)
{
    const size_t large = COX_LARGE_PAYLOAD_KEEP_SIZE + (64 << 10), small = 20000;
    const bool sends = operation->type;
    const size_t size = sends ? large : small;
    char *text = malloc(size);
    if (!text)
        return cox_fail(err, -ENOMEM, "no memory for a request");
    memset(text, 'x', size);
    int length = snprintf(text, size, "size %zu", sends ? small : large);
    text[length] = ' ';
    const struct cox_submit_options options = how(d, COX_GATHER_ALL);
    int r = cox_executor_call_opaque(d->executor, text, size, &options, visit, &d->record, err);
    free(text);
    return r;
}

static int call_type(struct driver *d, const struct operation *operation, struct cox_error *err)
{
    Coxswain__ExecuteRequest request = COXSWAIN__EXECUTE_REQUEST__INIT;
    Coxswain__PDLinkRequest link = COXSWAIN__PDLINK_REQUEST__INIT;
    Coxswain__PullKVRequest pull = COXSWAIN__PULL_KVREQUEST__INIT;
    const int type = operation->type;
    request.has_execute_type = 1;
    request.execute_type = (Coxswain__ExecuteType)type;
    if (type == TYPE(PD_LINK)) {
        request.request_case = COXSWAIN__EXECUTE_REQUEST__REQUEST_PD_LINK_REQUEST;
        request.pd_link_request = &link;
    } else if (type == TYPE(KV_TRANSFER)) {
        request.request_case = COXSWAIN__EXECUTE_REQUEST__REQUEST_PULL_KV_REQUEST;
        request.pull_kv_request = &pull;
    }
    const struct cox_submit_options options =
        how(d, type == TYPE(PD_LINK) ? COX_GATHER_NONE : COX_GATHER_ALL);
    return cox_executor_call(d->executor, &request, &options, visit, &d->record, err);
}

/* One step of one sequence, which is announced unless the ranks have its base. */
static int call_step(struct driver *d, const struct operation *operation, struct cox_error *err)
{
    (void)operation;
    static const int32_t block = 3;
    const bool announce = d->base == 0;
    struct test_step s;
    test_step_init(&s, d->base,
                   announce ? COXSWAIN__FORWARD_TYPE__PREFILL : COXSWAIN__FORWARD_TYPE__DECODE);
    test_step_add(&s, &(struct test_row){.id = 1000,
                                         .slot = 1,
                                         .tokens = d->tokens,
                                         .token_count = d->token_count,
                                         .position = announce ? 0 : d->token_count - 1,
                                         .announce = announce,
                                         .blocks = &block,
                                         .block_count = 1});
    const struct cox_submit_options options = how(d, COX_GATHER_RANK0);
    int r = cox_executor_call(d->executor, &s.request, &options, visit, &d->record, err);
    d->base = r == 0 ? d->record.sequence : 0;
    if (r == 0)
        d->tokens[d->token_count++] = d->record.token;
    return r;
}

/* On a base that no rank has; the next one announces. */
static int call_step_stale(struct driver *d, const struct operation *operation,
                           struct cox_error *err)
{
    d->base = UINT64_C(1) << 40;
    return call_step(d, operation, err);
}

/* Each asked rank has been heard on the error channel. */
static int await_heard(struct driver *d, const struct operation *operation, struct cox_error *err)
{
    (void)operation;
    const struct timespec until = cox_deadline_timespec(cox_deadline_after_ms(TEST_PATIENCE_MS));
    int e = 0;
    pthread_mutex_lock(&d->lock);
    for (uint32_t rank = 0; rank < MATRIX_RANK_COUNT && e == 0; rank++)
        while (cox_rank_set_has(&d->asked, rank) && !d->heard[rank] && e == 0)
            e = pthread_cond_timedwait(&d->changed, &d->lock, &until);
    pthread_mutex_unlock(&d->lock);
    return e ? cox_fail(err, COX_STATE, "a rank's report does not arrive") : 0;
}

/* ---- several in flight ---- */

static void flight_end(struct driver *d, size_t i)
{
    pthread_mutex_lock(&d->lock);
    d->flight_count--;
    d->flights[i].done = true;
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->lock);
}

static struct driver *the_driver; /* of the handler, whose context is the flight */

static void on_completion(void *context, const struct cox_completion *completion)
{
    (void)context;
    struct record *record = completion->request_context;
    record_fill(record, completion);
    flight_end(the_driver, (size_t)(record - the_driver->flights));
}

static int flight_submit(struct driver *d, size_t i, struct cox_error *err)
{
    struct cox_submit_options options = how(d, COX_GATHER_ALL);
    options.request_context = &d->flights[i];
    int r;
    pthread_mutex_lock(&d->lock);
    d->flight_count++;
    pthread_mutex_unlock(&d->lock);
    do {
        err->code = 0;
        r = cox_executor_submit_opaque(d->executor, "echo flight", 11, &options, NULL, err);
        if (r == COX_FULL || r == COX_LATE)
            nanosleep(&(struct timespec){.tv_nsec = COX_NSEC_PER_MSEC}, NULL);
    } while ((r == COX_FULL || r == COX_LATE) && cox_now_ns() < options.deadline_ns);
    if (r)
        flight_end(d, i);
    return r == COX_FULL || r == COX_LATE ? COX_TIMEOUT : r;
}

/* True: they are to be done again. */
static bool flights_do(struct driver *d)
{
    int worst = 0;
    memset(d->flights, 0, sizeof d->flights);
    int refused[MATRIX_FLIGHT_COUNT], statuses[MATRIX_FLIGHT_COUNT];
    struct cox_error errs[MATRIX_FLIGHT_COUNT] = {0};
    for (size_t i = 0; i < MATRIX_FLIGHT_COUNT; i++)
        refused[i] = flight_submit(d, i, &errs[i]);
    const struct timespec until = cox_deadline_timespec(cox_deadline_after_ms(TEST_PATIENCE_MS));
    int e = 0;
    pthread_mutex_lock(&d->lock);
    while (d->flight_count > 0 && e == 0)
        e = pthread_cond_timedwait(&d->changed, &d->lock, &until);
    pthread_mutex_unlock(&d->lock);
    for (size_t i = 0; i < MATRIX_FLIGHT_COUNT; i++) {
        statuses[i] = refused[i] ? refused[i] : d->flights[i].done ? d->flights[i].status : -1;
        worst = worst ? worst : statuses[i];
    }
    if (driver_slow(d, "flights", worst))
        return true;
    for (size_t i = 0; i < MATRIX_FLIGHT_COUNT; i++) {
        char name[16];
        snprintf(name, sizeof name, "flight%zu", i);
        journal(name, statuses[i], refused[i] ? NULL : &d->flights[i],
                refused[i] ? errs[i].text : d->flights[i].text);
    }
    return driver_again(d, worst);
}

/* ---- the scenario ---- */

static const struct operation operations[] = {
    {"init", call_type, NULL, TYPE(MODEL_INIT)},
    {"echo", call_opaque, "echo all", 0},
    {"large-payload-answer", call_large_payload, NULL, 0},
    {"large-payload-request", call_large_payload, NULL, 1},
    {"first", call_first, "echo one", 0}, /* the others pass it by */
    {"announce", call_step, NULL, 0},
    {"delta", call_step, NULL, 0},
    {"stale", call_step_stale, NULL, 0}, /* a step that fails */
    {"again", call_step, NULL, 0},
    {"link", call_type, NULL, TYPE(PD_LINK)}, /* not replied to */
    {"links", call_type, NULL, TYPE(PD_LINK_STATUS_QUERY)},
    {"pull", call_type, NULL, TYPE(KV_TRANSFER)},
    {"clear", call_type, NULL, TYPE(CLEAR_COMMAND_EXEC)},
    {"fault", call_opaque, "fault word", 0},
    {"heard", await_heard, NULL, 0},
    {"fail", call_opaque, "fail 5 no", 0},
};

static void operation_do(struct driver *d, const struct operation *operation)
{
    for (;;) {
        d->record = (struct record){0};
        int r = operation->call(d, operation, test_err());
        if (driver_slow(d, operation->name, r))
            continue;
        journal(operation->name, r, &d->record, test_error.text);
        if (!driver_again(d, r))
            return;
    }
}

static void on_fault(void *context, int32_t rank, const char *text)
{
    struct driver *d = context;
    printf("# rank %" PRId32 " reports: %s\n", rank, text);
    if (rank < 0 || strcmp(text, "word") != 0)
        return;
    pthread_mutex_lock(&d->lock);
    d->heard[rank] = true;
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->lock);
}

static void on_death(void *context, uint32_t rank, const char *text)
{
    (void)context;
    (void)rank;
    printf("# %s\n", text);
}

static void on_line(void *context, uint32_t rank, bool is_stderr, const char *text)
{
    (void)context;
    if (is_stderr)
        printf("# rank %" PRIu32 ": %s\n", rank, text);
}

static struct cox_executor_options options_of(struct driver *d)
{
    static const char *const command[] = {COX_TEST_BIN_DIR "/scripted_worker", NULL};
    struct cox_executor_options options = {
        .size = sizeof(struct cox_executor_options),
        .name = d->name,
        .rank_count = MATRIX_RANK_COUNT,
        .workers.command = command,
        .depth = MATRIX_FLIGHT_COUNT,
        .memory.attach = test_attach(),
        .times.start_timeout_ms = d->mode == MATRIX_STOP ? d->brief_ms : TEST_PATIENCE_MS,
        .times.finalize_ms = d->mode == MATRIX_STOP ? d->brief_ms : TEST_PATIENCE_MS,
        .times.term_ms = d->mode == MATRIX_STOP ? d->brief_ms : TEST_PATIENCE_MS,
        .hooks.context = d,
        .hooks.line = on_line,
        .hooks.fault = on_fault,
        .hooks.death = on_death,
    };
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
        options.memory.request_size[c] = 64 << 10;
        options.memory.response_size[c] = 192 << 10;
    }
    return options;
}

static void group_run(struct driver *d)
{
    const struct cox_executor_options options = options_of(d);
    int r = cox_executor_start(&options, &d->executor, test_err());
    journal("start", r, NULL, test_error.text);
    if (r)
        return;
    for (uint32_t rank = 0; rank < MATRIX_RANK_COUNT; rank++)
        printf("# rank %" PRIu32 " is %d\n", rank, cox_executor_pid(d->executor, rank));
    cox_executor_set_handler(d->executor, COX_CHANNEL_EXECUTE, on_completion, NULL);
    for (size_t i = 0; i < sizeof operations / sizeof operations[0]; i++)
        operation_do(d, &operations[i]);
    while (flights_do(d))
        continue;
    const struct operation last = {"last", call_opaque, "echo last", 0};
    operation_do(d, &last);
    uint32_t signalled = cox_executor_stop(d->executor);
    journal("stop", (int)signalled, NULL, "");
    d->executor = cox_executor_free(d->executor);
}

/* A group of its own, in which a rank dies and is started again. Only the coordinator's steps are
 * struck and counted here: ranks know of no plan. */
static void restart_run(const struct driver *d)
{
    unsetenv("COXSWAIN_FAULT");
    unsetenv("COXSWAIN_FAULT_COUNTS");
    matrix_renew_drive(d->name, TEST_PATIENCE_MS, "restart-");
}

/* The same name again, as a user would. */
static void second_run(struct driver *d)
{
    unsetenv("COXSWAIN_FAULT");
    unsetenv("COXSWAIN_FAULT_COUNTS");
    cox_fault_arm(NULL);
    d->mode = MATRIX_PLAIN;
    d->felt = false;
    d->asked = cox_rank_set_first(MATRIX_RANK_COUNT);
    const struct cox_executor_options options = options_of(d);
    int r = cox_executor_start(&options, &d->executor, test_err());
    journal("second-start", r, NULL, test_error.text);
    if (r)
        return;
    const struct operation echo = {"second-echo", call_opaque, "echo again", 0};
    operation_do(d, &echo);
    journal("second-stop", (int)cox_executor_stop(d->executor), NULL, "");
    d->executor = cox_executor_free(d->executor);
}

/* Opening a control socket removes those of dead groups, whatever their names. */
static void other_open(struct driver *d)
{
    char name[COX_NAME_SIZE_MAX + 1];
    snprintf(name, sizeof name, "%sother", d->name);
    const struct cox_control_socket_options options = {.name = name};
    const struct cox_control_socket_hooks hooks = {.context = d};
    struct cox_control_socket *control_socket = NULL;
    int r = cox_control_socket_open(&options, &hooks, &control_socket, test_err());
    uint32_t count = matrix_sockets_count(NULL);
    journal("other", r ? r : (int)count - 1, NULL, r ? test_error.text : "sockets beside its own");
    cox_control_socket_close(control_socket);
}

/* What a coordinator leaves that was killed while it made the group: the start sweeps it. */
static void leftovers_make(const char *name)
{
    pid_t pid = fork();
    if (pid == 0) {
        unsetenv("COXSWAIN_FAULT");
        unsetenv("COXSWAIN_FAULT_COUNTS");
        struct cox_control control = COX_CONTROL_NONE;
        struct cox_channel channel;
        struct cox_geometry geometry;
        struct cox_geometry_choice choice = {.depth = MATRIX_FLIGHT_COUNT};
        for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
            choice.request_size[c] = choice.response_size[c] = 64 << 10;
        const struct cox_control_socket_options options = {.name = name};
        const struct cox_control_socket_hooks hooks = {.context = NULL};
        struct cox_control_socket *control_socket = NULL;
        if (cox_control_socket_open(&options, &hooks, &control_socket, test_err()) ||
            cox_geometry_resolve(MATRIX_RANK_COUNT, &choice, &geometry, test_err()) ||
            cox_control_create(&control, name, &geometry, test_err()) ||
            cox_channel_create(&channel, name, &control, COX_CHANNEL_LINK, test_err()))
            journal("leftovers", test_error.code, NULL, test_error.text);
        raise(SIGKILL);
    }
    waitpid(pid, NULL, 0);
}

static int count_fds(void)
{
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (folder && readdir(folder))
        count++;
    if (folder)
        closedir(folder);
    return count;
}

static void counts_map(void)
{
    const char *path = getenv("COXSWAIN_FAULT_COUNTS");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *map = mmap(NULL, sizeof *counts, PROT_READ, MAP_SHARED, fd, 0);
    counts = map == MAP_FAILED ? NULL : map;
    close(fd);
}

static void *thread_nothing(void *argument)
{
    return argument;
}

int matrix_driver(int argc, char **argv)
{
    static struct driver d = {.lock = PTHREAD_MUTEX_INITIALIZER, .tokens = {5, 6, 7}};
    if (argc < 6)
        return 2;
    d.name = argv[2];
    d.mode = (enum matrix_mode)argv[3][0];
    d.rank = atoi(argv[4]);
    d.brief_ms = strtoull(argv[5], NULL, 10);
    d.asked = cox_rank_set_first(MATRIX_RANK_COUNT);
    d.token_count = 3;
    the_driver = &d;
    cox_condition_init(&d.changed);
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* ends with the test, when that is aborted */
    if (d.mode == MATRIX_RENEW)
        return matrix_renew_drive(d.name, d.brief_ms, "");
    counts_map();
    const bool after = d.mode == MATRIX_AFTER || d.mode == MATRIX_OTHER;
    if (!after)
        leftovers_make(d.name);
    pthread_t thread; /* a sanitizer may keep something for the first one */
    if (pthread_create(&thread, NULL, thread_nothing, NULL) == 0)
        pthread_join(thread, NULL);
    const enum matrix_mode mode = d.mode;
    int fds = count_fds();
    if (!after) {
        group_run(&d);
        if (mode == MATRIX_LEARN || mode == MATRIX_PLAIN)
            restart_run(&d);
        journal("names", (int)test_count_names(d.name), NULL, "are left");
        journal("sockets", (int)matrix_sockets_count(NULL), NULL, "are left");
    }
    if (mode == MATRIX_OTHER)
        other_open(&d);
    if (mode != MATRIX_LEARN)
        second_run(&d);
    journal("fds", count_fds() - fds, NULL, "more than before");
    journal("end", 0, NULL, "");
    return 0;
}

#endif
