/* hot_path: the rounds whose instructions (hot_path.py) and system calls (system_calls.py) are
 * counted. A coordinator and its workers, all of them this program: WARM_UP rounds and then ROUNDS
 * of opaque requests, the same of decode steps. Each request is submitted from the handler of the
 * one before, as in the benchmark. "hot_path named|sealed": for instructions. The handler waits
 * until all ranks have replied before it returns: so the response thread never blocks, and how
 * often it checks does not depend on scheduling. Code outside the hot path is in functions of its
 * own: hot_path_await waits; hot_path_mark is called where a part of the count begins or ends, in
 * each process. "hot_path named|sealed RANKS": for system calls. Only the channel waits. Where a
 * part begins or ends, the coordinator calls getppid, reads the clock, and calls getppid again.
 * HOT_PATH_NO_RECORDER: without flight recorders. HOT_PATH_ROUNDS: so many rounds in place of
 * ROUNDS; then the time of one is printed. HOT_PATH_COUNT: a command that the last rank's process
 * executes, before its own. */
#include <errno.h>
#include <sched.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "channel/shm/state.h"
#include "coordinator/executor/executor_internal.h"
#include "proto/executor.pb-c.h"
#include <coxswain/worker.h>

#define RANK_COUNT 8 /* the default */
#define RANK_COUNT_MAX 64
#define ROW_COUNT 16
#define PAYLOAD_SIZE 64
#define WARM_UP 32
#define ROUNDS 64 /* as in the two programs that run this one */
#define PATIENCE_MS 60000

void hot_path_mark(void);
void hot_path_await(struct cox_executor *executor, uint64_t sequence);

__attribute__((noinline)) void hot_path_mark(void)
{
    __asm__ volatile("" ::: "memory");
}

/* ---- a worker ---- */

/* Of each kind of request so many: a mark before the first that is counted, and one behind the
 * last. */
static uint32_t round_count = ROUNDS;

static bool count_round(uint32_t *rounds)
{
    bool marks = *rounds == WARM_UP || *rounds == WARM_UP + round_count;
    if (marks)
        hot_path_mark();
    ++*rounds;
    return marks;
}

struct worker_rounds {
    uint32_t opaque, steps;
};

static int worker_opaque(void *context, const uint8_t *request, size_t request_size, uint8_t *reply,
                         size_t reply_capacity, size_t *ret_reply_size, struct cox_error *err)
{
    struct worker_rounds *rounds = context;
    (void)request_size, (void)reply_capacity, (void)err;
    count_round(&rounds->opaque);
    memcpy(reply, request, PAYLOAD_SIZE);
    *ret_reply_size = PAYLOAD_SIZE;
    return 0;
}

static int worker_execute(void *context, const struct cox_batch *batch,
                          struct cox_batch_output *outputs, struct cox_error *err)
{
    struct worker_rounds *rounds = context;
    (void)err;
    count_round(&rounds->steps);
    for (uint32_t i = 0; i < batch->row_count; i++)
        outputs[i].token = (int32_t)(batch->rows[i].position % 100);
    return 0;
}

static int worker_main(int argc, char **argv)
{
    static const struct cox_worker_callbacks callbacks = {.size =
                                                              sizeof(struct cox_worker_callbacks),
                                                          .opaque = worker_opaque,
                                                          .execute = worker_execute};
    struct cox_worker_options options = COX_WORKER_OPTIONS_INIT;
    struct worker_rounds rounds = {0};
    struct cox_worker *worker = NULL;
    struct cox_error err = {0};
    int r = cox_worker_options_parse(&options, &argc, argv, &err);
    if (r == 0)
        r = cox_worker_new(&options, &callbacks, &rounds, &worker, &err);
    if (r == 0)
        r = cox_worker_run(worker, &err);
    if (r)
        fprintf(stderr, "hot_path: rank %u: %s\n", options.rank, err.text);
    cox_worker_free(worker);
    return r != 0;
}

/* The last rank of the group runs under the command that counts. */
static void become_counted(char **argv)
{
    const char *rank = getenv("COXSWAIN_RANK");
    char *command = getenv("HOT_PATH_COUNT");
    if (!command || !rank || atoi(rank) != RANK_COUNT - 1)
        return;
    char *counted[64];
    int count = 0;
    for (char *word = strtok(command, " "); word && count < 16; word = strtok(NULL, " "))
        counted[count++] = word;
    for (int i = 0; argv[i] && count < 63; i++)
        counted[count++] = argv[i];
    counted[count] = NULL;
    unsetenv("HOT_PATH_COUNT");
    execvp(counted[0], counted);
    fprintf(stderr, "hot_path: %s: %s\n", counted[0], strerror(errno));
    _exit(1);
}

/* ---- the coordinator ---- */

struct path {
    struct cox_executor *executor;
    /* hot_path_await, in the handler */
    bool awaits;
    int (*submit)(struct path *path, uint64_t *ret_sequence);
    /* rounds, of this kind of request */
    uint32_t ended;
    uint64_t began_ns;
    uint64_t base_sequence;
    int failure;
    struct cox_error err;
    sem_t done;
    /* The step, unpacked. */
    Coxswain__StepSequence sequences[ROW_COUNT];
    Coxswain__StepSequence *pointers[ROW_COUNT];
    uint32_t slots[ROW_COUNT], positions[ROW_COUNT];
};

__attribute__((noinline)) void hot_path_await(struct cox_executor *executor, uint64_t sequence)
{
    const struct cox_control *control = &executor->control;
    for (uint32_t rank = 0; rank < executor->geometry.rank_count; rank++)
        while (cox_state_done(cox_state_line(control, rank, COX_CHANNEL_EXECUTE)) < sequence &&
               !cox_supervisor_dead(executor->supervisor, rank, NULL))
            sched_yield();
}

static int submit_opaque(struct path *path, uint64_t *ret_sequence)
{
    static const uint8_t payload[PAYLOAD_SIZE];
    const struct cox_submit_options options = {.size = sizeof(struct cox_submit_options),
                                               .gather = COX_GATHER_ALL,
                                               .deadline_ns = cox_deadline_after_ms(PATIENCE_MS)};
    return cox_executor_submit_opaque(path->executor, payload, sizeof payload, &options,
                                      ret_sequence, &path->err);
}

/* A decode step of ROW_COUNT sequences; the first one, on base 0, announces them. */
static int submit_step(struct path *path, uint64_t *ret_sequence)
{
    int32_t prompt[1] = {1}, block[1] = {0};
    Coxswain__StepBlockTable table = COXSWAIN__STEP_BLOCK_TABLE__INIT;
    Coxswain__StepBlockTable *tables[1] = {&table};
    table.n_blocks = 1;
    table.blocks = block;
    for (uint32_t i = 0; i < ROW_COUNT; i++) {
        if (path->ended == 0) {
            coxswain__step_sequence__init(&path->sequences[i]);
            path->sequences[i].has_seq_id = path->sequences[i].has_slot = 1;
            path->sequences[i].seq_id = 100 + i;
            path->sequences[i].slot = i;
            path->sequences[i].n_tokens = path->sequences[i].n_tables = 1;
            path->sequences[i].tokens = prompt;
            path->sequences[i].tables = tables;
            path->pointers[i] = &path->sequences[i];
            path->slots[i] = i;
        }
        path->positions[i] = path->ended;
    }
    Coxswain__StepDelta delta = COXSWAIN__STEP_DELTA__INIT;
    delta.has_base_sequence = 1;
    delta.base_sequence = path->base_sequence;
    delta.n_announced = path->ended == 0 ? ROW_COUNT : 0;
    delta.announced = path->pointers;
    delta.n_row_slot = delta.n_row_position = ROW_COUNT;
    delta.row_slot = path->slots;
    delta.row_position = path->positions;
    Coxswain__ExecuteModelRequest model = COXSWAIN__EXECUTE_MODEL_REQUEST__INIT;
    model.has_forward_type = 1;
    model.forward_type = COXSWAIN__FORWARD_TYPE__DECODE;
    model.step = &delta;
    Coxswain__ExecuteRequest request = COXSWAIN__EXECUTE_REQUEST__INIT;
    request.has_execute_type = 1;
    request.execute_type = COXSWAIN__EXECUTE_TYPE__MODEL_INFER;
    request.request_case = COXSWAIN__EXECUTE_REQUEST__REQUEST_EXECUTE_MODEL_REQUEST;
    request.execute_model_request = &model;
    const struct cox_submit_options options = {.size = sizeof(struct cox_submit_options),
                                               .gather = COX_GATHER_RANK0,
                                               .deadline_ns = cox_deadline_after_ms(PATIENCE_MS)};
    return cox_executor_submit(path->executor, &request, &options, ret_sequence, &path->err);
}

/* If the clock is seen between the two, reading it takes a system call on this machine. */
static void mark_for_strace(void)
{
    getppid();
    cox_now_ns();
    getppid();
}

static int path_next(struct path *path)
{
    uint64_t sequence;
    int r = path->submit(path, &sequence);
    if (r)
        return r;
    if (path->awaits)
        hot_path_await(path->executor, sequence);
    return 0;
}

static void path_completed(void *context, const struct cox_completion *completion)
{
    struct path *path = context;
    if (completion->status)
        path->failure = cox_fail(&path->err, completion->status, "%s", completion->text);
    path->base_sequence = completion->sequence;
    if (count_round(&path->ended) && !path->awaits)
        mark_for_strace();
    if (path->ended == WARM_UP)
        path->began_ns = cox_now_ns();
    if (path->failure == 0 && path->ended <= WARM_UP + round_count) {
        path->failure = path_next(path);
        if (path->failure == 0)
            return;
    }
    sem_post(&path->done);
}

static int run_path(struct path *path, int (*submit)(struct path *, uint64_t *))
{
    uint64_t sequence;
    path->submit = submit;
    path->ended = 0;
    path->base_sequence = 0;
    int r = submit(path, &sequence);
    if (r)
        return r;
    while (sem_wait(&path->done) < 0 && errno == EINTR)
        continue;
    if (path->failure == 0 && round_count != ROUNDS)
        printf("%s %.0f ns\n", submit == submit_step ? "step" : "opaque",
               (double)(cox_now_ns() - path->began_ns) / (round_count + 1));
    return path->failure;
}

int main(int argc, char **argv)
{
    const char *rounds = getenv("HOT_PATH_ROUNDS");
    round_count = rounds ? (uint32_t)atoi(rounds) : ROUNDS;
    if (getenv("COXSWAIN_PREFIX")) {
        become_counted(argv);
        return worker_main(argc, argv);
    }
    bool sealed = argc > 1 && strcmp(argv[1], "sealed") == 0;
    int rank_count = argc == 3 ? atoi(argv[2]) : RANK_COUNT;
    if (argc < 2 || argc > 3 || (!sealed && strcmp(argv[1], "named") != 0) || rank_count < 1 ||
        rank_count > RANK_COUNT_MAX) {
        fprintf(stderr, "usage: %s named|sealed [RANKS]\n", argv[0]);
        return 2;
    }
    const char *const command[] = {argv[0], NULL};
    const struct cox_executor_options options = {
        .size = sizeof(struct cox_executor_options),
        .rank_count = (uint32_t)rank_count,
        .workers.command = command,
        .memory.attach = sealed ? COX_ATTACH_SEALED : COX_ATTACH_NAMED,
        .recorder.use = getenv("HOT_PATH_NO_RECORDER") ? COX_RECORDER_NONE : COX_RECORDER_ALWAYS,
    };
    static struct path path;
    path.awaits = argc == 2;
    sem_init(&path.done, 0, 0);
    int r = cox_executor_start(&options, &path.executor, &path.err);
    if (r == 0)
        r = cox_executor_set_handler(path.executor, COX_CHANNEL_EXECUTE, path_completed, &path);
    if (r == 0)
        r = run_path(&path, submit_opaque);
    if (r == 0)
        r = run_path(&path, submit_step);
    if (r)
        fprintf(stderr, "hot_path: %s\n", path.err.text[0] ? path.err.text : cox_status_text(r));
    cox_executor_free(path.executor);
    return r != 0;
}
