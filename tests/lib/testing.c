#include "testing.h"

#include "channel/base/thread.h"
#include "channel/shm/geometry.h"
#include "channel/socket/control_socket.h"
#include "coordinator/executor/executor_internal.h"
#include "proto/executor.pb-c.h"
#include "ranks.h"

extern char **environ;

struct line {
    uint32_t rank;
    char *text;
};

struct test_group {
    struct test_group *next;
    struct cox_executor *executor;
    /* where ranks are threads */
    char prefix[COX_NAME_SIZE_MAX + 2];
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct line *lines;
    size_t line_count;
    char **faults;
    size_t fault_count;
    char *deaths[COX_RANK_COUNT_MAX];
    /* pointers, so that what was lent stays where it is */
    struct test_completion **completions;
    size_t completion_count;
    struct cox_error err;
};

struct test_pipe {
    struct test_pipe *next;
    int fd;
    char path[64];
};

static struct test_group *groups;
static char runtime_dir[64]; /* of this program; empty: not made yet */
static pid_t runtime_owner;
static struct test_pipe *pipes;

/* ---- growth without ceremony: a test without memory may end ---- */

static void *grow(void *array, size_t count, size_t item_size)
{
    if ((count & (count + 1)) != 0 && count != 0)
        return array; /* room was made up to the next power of two */
    array = realloc(array, 2 * (count + 1) * item_size);
    COX_ASSERT(array);
    return array;
}

static char *copy_text(const char *text)
{
    char *copy = strdup(text ? text : "");
    COX_ASSERT(copy);
    return copy;
}

/* ---- completions ---- */

/* As MindIE-LLM's ranks reply: a sample of one token per sequence. */
static void copy_outputs(struct test_completion *copy, const Coxswain__ExecuteModelResponse *model)
{
    copy->tokens = calloc(model->n_outputs + 1, sizeof *copy->tokens);
    copy->ids = calloc(model->n_outputs + 1, sizeof *copy->ids);
    COX_ASSERT(copy->tokens && copy->ids);
    for (size_t i = 0; i < model->n_outputs; i++) {
        if (model->outputs[i]->n_samples != 1 || model->outputs[i]->samples[0]->n_output_token != 1)
            return;
        copy->ids[i] = model->outputs[i]->samples[0]->seq_id;
        copy->tokens[i] = (int32_t)model->outputs[i]->samples[0]->output_token[0];
        copy->token_count = i + 1;
    }
}

static void copy_tokens(struct test_completion *copy, const struct cox_completion *completion)
{
    const Coxswain__ExecuteResponse *response =
        completion->payload ? completion->payload->response : NULL;
    if (!response ||
        response->result_case != COXSWAIN__EXECUTE_RESPONSE__RESULT_EXECUTE_MODEL_RESPONSE ||
        !response->execute_model_response)
        return;
    if (response->execute_model_response->n_outputs)
        copy_outputs(copy, response->execute_model_response);
    if (copy->tokens || !response->execute_model_response->step)
        return;
    const Coxswain__StepResult *step = response->execute_model_response->step;
    copy->token_count = step->n_tokens;
    copy->logprob_count = step->n_logprobs;
    copy->tokens = calloc(step->n_tokens + 1, sizeof *copy->tokens);
    copy->logprobs = calloc(step->n_logprobs + 1, sizeof *copy->logprobs);
    COX_ASSERT(copy->tokens && copy->logprobs);
    if (step->n_tokens)
        memcpy(copy->tokens, step->tokens, step->n_tokens * sizeof *copy->tokens);
    if (step->n_logprobs)
        memcpy(copy->logprobs, step->logprobs, step->n_logprobs * sizeof *copy->logprobs);
}

void test_completion_copy(struct test_completion *copy, const struct cox_completion *completion)
{
    *copy = (struct test_completion){
        .sequence = completion->sequence,
        .channel = completion->channel,
        .type = completion->type,
        .status = completion->status,
        .text = copy_text(completion->text),
        .rank_count = completion->rank_count,
        .ranks = calloc(completion->rank_count, sizeof *copy->ranks),
        .payload_rank = completion->payload ? (int)(completion->payload - completion->ranks) : -1,
        .request_context = completion->request_context,
        .submitted_ns = completion->submitted_ns,
        .published_ns = completion->published_ns,
        .completed_ns = completion->completed_ns,
    };
    COX_ASSERT(copy->ranks);
    for (uint32_t rank = 0; rank < completion->rank_count; rank++) {
        const struct cox_rank_result *from = &completion->ranks[rank];
        struct test_rank *to = &copy->ranks[rank];
        *to = (struct test_rank){
            .outcome = from->outcome,
            .code = from->code,
            .text = copy_text(from->text),
            .pid = from->pid,
            .signal = from->signal,
            .exit_status = from->exit_status,
            .taken = from->taken,
            .silent_ns = from->silent_ns,
            .has_payload = from->bytes != NULL,
            .bytes = calloc(1, from->size + 1),
            .size = from->size,
        };
        COX_ASSERT(to->bytes);
        if (from->size)
            memcpy(to->bytes, from->bytes, from->size);
    }
    copy_tokens(copy, completion);
}

void test_completion_deinit(struct test_completion *completion)
{
    for (uint32_t rank = 0; completion->ranks && rank < completion->rank_count; rank++) {
        free(completion->ranks[rank].text);
        free(completion->ranks[rank].bytes);
    }
    free(completion->ranks);
    free(completion->text);
    free(completion->tokens);
    free(completion->ids);
    free(completion->logprobs);
    *completion = (struct test_completion){0};
}

void test_handler(void *context, const struct cox_completion *completion)
{
    struct test_group *group = context;
    struct test_completion *copy = calloc(1, sizeof *copy);
    COX_ASSERT(copy);
    test_completion_copy(copy, completion);
    pthread_mutex_lock(&group->lock);
    group->completions =
        grow(group->completions, group->completion_count, sizeof(struct test_completion *));
    group->completions[group->completion_count++] = copy;
    pthread_cond_broadcast(&group->changed);
    pthread_mutex_unlock(&group->lock);
}

/* ---- hooks ---- */

static void on_line(void *context, uint32_t rank, bool is_stderr, const char *text)
{
    struct test_group *group = context;
    if (is_stderr && getenv("COX_TEST_LINES"))
        fprintf(stderr, "[rank %" PRIu32 "] %s\n", rank, text);
    pthread_mutex_lock(&group->lock);
    group->lines = grow(group->lines, group->line_count, sizeof *group->lines);
    group->lines[group->line_count++] = (struct line){rank, copy_text(text)};
    pthread_cond_broadcast(&group->changed);
    pthread_mutex_unlock(&group->lock);
}

static void on_fault(void *context, int32_t rank, const char *text)
{
    struct test_group *group = context;
    char *fault;
    COX_ASSERT(asprintf(&fault, "%" PRId32 " %s", rank, text) > 0);
    pthread_mutex_lock(&group->lock);
    group->faults = grow(group->faults, group->fault_count, sizeof *group->faults);
    group->faults[group->fault_count++] = fault;
    pthread_cond_broadcast(&group->changed);
    pthread_mutex_unlock(&group->lock);
}

static void on_death(void *context, uint32_t rank, const char *text)
{
    struct test_group *group = context;
    char *copy = copy_text(text);
    pthread_mutex_lock(&group->lock);
    free(group->deaths[rank]);
    group->deaths[rank] = copy;
    pthread_cond_broadcast(&group->changed);
    pthread_mutex_unlock(&group->lock);
}

/* With the lock held. False: patience is at its end. */
static bool group_wait(struct test_group *group, uint64_t deadline_ns)
{
    const struct timespec until = cox_deadline_timespec(deadline_ns);
    return pthread_cond_timedwait(&group->changed, &group->lock, &until) != ETIMEDOUT;
}

/* ---- groups ---- */

enum cox_attach test_attach(void)
{
    const char *text = getenv("COXSWAIN_TEST_ATTACH");
    return text && strcmp(text, "sealed") == 0 ? COX_ATTACH_SEALED : COX_ATTACH_NAMED;
}

void test_needs_names(void)
{
    if (test_attach() == COX_ATTACH_SEALED)
        skip();
}

static void runtime_dir_remove(void)
{
    if (getpid() != runtime_owner)
        return; /* a child that ended by exit */
    rmdir(test_runtime_dir());
    rmdir(runtime_dir);
}

/* Not the user's: what a test leaves there is to be seen. */
static void runtime_dir_make(void)
{
    if (runtime_dir[0])
        return;
    runtime_owner = getpid();
    snprintf(runtime_dir, sizeof runtime_dir, "/tmp/cox_sockets_XXXXXX");
    COX_ASSERT(mkdtemp(runtime_dir));
    setenv("XDG_RUNTIME_DIR", runtime_dir, 1);
    atexit(runtime_dir_remove);
}

const char *test_runtime_dir(void)
{
    static char folder[96];
    snprintf(folder, sizeof folder, "%s/coxswain", runtime_dir);
    return folder;
}

void test_sweep_sockets(uint32_t count)
{
    uint32_t swept = 0;
    assert_ok(cox_control_socket_sweep(test_runtime_dir(), &swept, test_err()));
    assert_int_equal(swept, count);
}

char test_program[4096];
const char *const test_own_command[] = {test_program, "worker", NULL};

__attribute__((constructor)) static void test_program_find(void)
{
    COX_ASSERT(readlink("/proc/self/exe", test_program, sizeof test_program - 1) > 0);
}

const char *test_worker_program(void)
{
    return COX_TEST_BIN_DIR "/scripted_worker";
}

static void group_delete(struct test_group *group)
{
    for (struct test_group **link = &groups; *link; link = &(*link)->next)
        if (*link == group) {
            *link = group->next;
            break;
        }
    for (size_t i = 0; i < group->line_count; i++)
        free(group->lines[i].text);
    for (size_t i = 0; i < group->fault_count; i++)
        free(group->faults[i]);
    for (size_t i = 0; i < COX_RANK_COUNT_MAX; i++)
        free(group->deaths[i]);
    for (size_t i = 0; i < group->completion_count; i++) {
        test_completion_deinit(group->completions[i]);
        free(group->completions[i]);
    }
    free(group->lines);
    free(group->faults);
    free(group->completions);
    pthread_cond_destroy(&group->changed);
    pthread_mutex_destroy(&group->lock);
    free(group);
}

/* In time, and under a name by which they are known. */
static void group_use_threads(struct test_group *group, struct cox_executor_options *options,
                              char name[64])
{
    if (!ranks_are_threads())
        return;
    ranks_start();
    if (!options->name)
        options->name = test_unique_name(name);
    snprintf(group->prefix, sizeof group->prefix, "/%s", options->name);
}

int test_group_try(const struct cox_executor_options *options, struct test_group **ret_group,
                   struct cox_error *err)
{
    static const char *const command[] = {COX_TEST_BIN_DIR "/scripted_worker", NULL};
    char name[64];
    struct test_group *group = calloc(1, sizeof *group);
    COX_ASSERT(group);
    pthread_mutex_init(&group->lock, NULL);
    cox_condition_init(&group->changed);
    group->next = groups;
    groups = group;
    struct cox_executor_options used = *options;
    if (!used.workers.command)
        used.workers.command = command;
    if (!used.workers.legacy && !used.memory.keep_names && !used.memory.attach)
        used.memory.attach = test_attach();
    used.hooks.context = group;
    used.hooks.line = on_line;
    used.hooks.fault = on_fault;
    used.hooks.death = on_death;
    group_use_threads(group, &used, name);
    int r = cox_executor_start(&used, &group->executor, err);
    if (r) {
        ranks_join(group->prefix);
        group_delete(group);
        return r;
    }
    *ret_group = group;
    return 0;
}

struct test_group *test_group_start(uint32_t rank_count, const struct cox_executor_options *base)
{
    struct cox_executor_options options =
        base ? *base : (struct cox_executor_options){.size = sizeof(struct cox_executor_options)};
    struct test_group *group = NULL;
    options.rank_count = rank_count;
    assert_ok(test_group_try(&options, &group, test_err()));
    return group;
}

struct test_group *test_group_free(struct test_group *group)
{
    if (group) {
        group->executor = cox_executor_free(group->executor);
        ranks_join(group->prefix);
        group_delete(group);
    }
    return NULL;
}

int test_worker_main(int argc, char **argv, struct cox_worker_options *options,
                     const struct cox_worker_callbacks *callbacks, void *context,
                     struct cox_worker **ret_worker)
{
    struct cox_worker *worker = NULL;
    int r = cox_worker_options_parse(options, &argc, argv, test_err());
    if (r == 0)
        r = cox_worker_new(options, callbacks, context, &worker, test_err());
    if (ret_worker)
        *ret_worker = worker;
    if (r == 0)
        r = cox_worker_run(worker, test_err());
    if (r)
        fprintf(stderr, "worker: %s\n", test_error.text);
    cox_worker_free(worker);
    return r != 0;
}

struct cox_executor *test_group_executor(struct test_group *group)
{
    return group->executor;
}

struct cox_channel_stats test_stats(struct cox_executor *executor, enum cox_channel_id channel)
{
    struct cox_executor_status status;
    cox_executor_read_status(executor, &status, NULL);
    return status.channels[channel].stats;
}

size_t test_request_size_max(struct cox_executor *executor, enum cox_channel_id channel)
{
    struct cox_executor_status status;
    cox_executor_read_status(executor, &status, NULL);
    return status.channels[channel].request_size_max;
}

int test_lora(struct cox_executor *executor, const struct Coxswain__LoraOperationRequest *request,
              uint64_t deadline_ns, int32_t *ret_statuses, struct cox_error *err)
{
    const uint32_t rank_count = cox_executor_rank_count(executor);
    _cox_cleanup_(cox_free_ptr) struct cox_lora_result *results =
        calloc(rank_count, sizeof *results);
    COX_ASSERT(results);
    const int r = cox_executor_lora_results(executor, request, deadline_ns, results, err);
    for (uint32_t rank = 0; rank < rank_count; rank++)
        ret_statuses[rank] = results[rank].status;
    return r;
}

static size_t count_lines(const struct test_group *group, int rank, const char *text)
{
    size_t count = 0;
    for (size_t i = 0; i < group->line_count; i++)
        count += (rank < 0 || group->lines[i].rank == (uint32_t)rank) &&
                 strncmp(group->lines[i].text, text, strlen(text)) == 0;
    return count;
}

size_t test_count_lines(struct test_group *group, int rank, const char *text)
{
    pthread_mutex_lock(&group->lock);
    size_t count = count_lines(group, rank, text);
    pthread_mutex_unlock(&group->lock);
    return count;
}

void test_await_lines(struct test_group *group, int rank, const char *text, size_t count)
{
    uint64_t deadline_ns = test_patience();
    pthread_mutex_lock(&group->lock);
    while (count_lines(group, rank, text) < count && group_wait(group, deadline_ns))
        continue;
    size_t seen = count_lines(group, rank, text);
    for (size_t i = 0; seen < count && i < group->line_count; i++)
        print_message("rank %u wrote '%s'\n", group->lines[i].rank, group->lines[i].text);
    pthread_mutex_unlock(&group->lock);
    if (seen < count)
        fail_msg("rank %d wrote '%s' %zu times, expected %zu", rank, text, seen, count);
}

void test_await_faults(struct test_group *group, size_t count)
{
    uint64_t deadline_ns = test_patience();
    pthread_mutex_lock(&group->lock);
    while (group->fault_count < count && group_wait(group, deadline_ns))
        continue;
    size_t seen = group->fault_count;
    pthread_mutex_unlock(&group->lock);
    if (seen < count)
        fail_msg("%zu faults, expected %zu", seen, count);
}

const char *test_fault(struct test_group *group, size_t i)
{
    pthread_mutex_lock(&group->lock);
    const char *text = i < group->fault_count ? group->faults[i] : "none";
    pthread_mutex_unlock(&group->lock);
    return text;
}

void test_await_death(struct test_group *group, uint32_t rank)
{
    uint64_t deadline_ns = test_patience();
    pthread_mutex_lock(&group->lock);
    while (!group->deaths[rank] && group_wait(group, deadline_ns))
        continue;
    bool dead = group->deaths[rank];
    pthread_mutex_unlock(&group->lock);
    if (!dead)
        fail_msg("rank %" PRIu32 " does not die", rank);
}

const char *test_death_text(struct test_group *group, uint32_t rank)
{
    pthread_mutex_lock(&group->lock);
    const char *text = group->deaths[rank] ? group->deaths[rank] : "alive";
    pthread_mutex_unlock(&group->lock);
    return text;
}

/* ---- requests ---- */

const struct test_how test_all = {.gather = COX_GATHER_ALL};

static void visit_copy(void *context, const struct cox_completion *completion)
{
    struct test_completion *copy = context;
    test_completion_deinit(copy);
    test_completion_copy(copy, completion);
}

static struct cox_submit_options submit_options(const struct test_how *how,
                                                struct cox_rank_set *asked)
{
    *asked = (struct cox_rank_set){{how->ranks}};
    return (struct cox_submit_options){
        .size = sizeof(struct cox_submit_options),
        .gather = how->gather,
        .report_late = how->report_late,
        .deadline_ns = cox_deadline_after_ms(how->timeout_ms ? how->timeout_ms : TEST_PATIENCE_MS),
        .asked = how->ranks ? asked : NULL,
        .request_context = how->context,
    };
}

int test_call_bytes(struct test_group *group, struct test_completion *ret_completion,
                    const struct test_how *how, const void *bytes, size_t size)
{
    struct test_completion own = {0};
    struct cox_rank_set asked;
    struct cox_submit_options options = submit_options(how, &asked);
    group->err = (struct cox_error){0};
    int r = cox_executor_call_opaque(group->executor, bytes, size, &options, visit_copy, &own,
                                     &group->err);
    if (ret_completion) {
        test_completion_deinit(ret_completion);
        *ret_completion = own;
    } else {
        test_completion_deinit(&own);
    }
    return r;
}

static int call_format(struct test_group *group, struct test_completion *ret_completion,
                       const struct test_how *how, const char *format, va_list args)
{
    char *text;
    int length = vasprintf(&text, format, args);
    COX_ASSERT(length >= 0);
    int r = test_call_bytes(group, ret_completion, how, text, (size_t)length);
    free(text);
    return r;
}

int test_call(struct test_group *group, struct test_completion *ret_completion, const char *format,
              ...)
{
    va_list args;
    va_start(args, format);
    int r = call_format(group, ret_completion, &test_all, format, args);
    va_end(args);
    return r;
}

int test_call_how(struct test_group *group, struct test_completion *ret_completion,
                  const struct test_how *how, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int r = call_format(group, ret_completion, how, format, args);
    va_end(args);
    return r;
}

void test_call_in_vain(struct test_group *group, struct test_completion *ret_completion,
                       const struct test_how *how, const char *format, ...)
{
    OWN_COMPLETION own = {0};
    struct test_completion *completion = ret_completion ? ret_completion : &own;
    do {
        va_list args;
        va_start(args, format);
        int r = call_format(group, completion, how, format, args);
        va_end(args);
        assert_int_equal(r, COX_TIMEOUT);
    } while (completion->rank_count == 0);
}

const char *test_error_text(const struct test_group *group)
{
    return group->err.text;
}

void test_expect_echo(struct test_group *group, const char *text)
{
    OWN_COMPLETION completion = {0};
    int r = test_call(group, &completion, "echo %s", text);
    if (r)
        fail_msg("echo %s: %d: %s", text, r, group->err.text);
    for (uint32_t rank = 0; rank < completion.rank_count; rank++) {
        assert_int_equal(completion.ranks[rank].outcome, COX_OUTCOME_OK);
        assert_string_equal(completion.ranks[rank].bytes, text);
    }
}

static int submit_bytes(struct test_group *group, const struct test_how *how, const void *bytes,
                        size_t size)
{
    /* Unless the test has set a handler of its own. */
    if (!atomic_load(&group->executor->collectors[COX_CHANNEL_EXECUTE].handled))
        assert_int_equal(
            cox_executor_set_handler(group->executor, COX_CHANNEL_EXECUTE, test_handler, group), 0);
    struct cox_rank_set asked;
    struct cox_submit_options options = submit_options(how, &asked);
    group->err = (struct cox_error){0};
    return cox_executor_submit_opaque(group->executor, bytes, size, &options, NULL, &group->err);
}

int test_submit(struct test_group *group, const struct test_how *how, const char *format, ...)
{
    va_list args;
    char *text;
    va_start(args, format);
    int length = vasprintf(&text, format, args);
    va_end(args);
    COX_ASSERT(length >= 0);
    int r = submit_bytes(group, how, text, (size_t)length);
    free(text);
    return r;
}

int test_submit_persist(struct test_group *group, const struct test_how *how, const char *text)
{
    uint64_t deadline_ns = test_patience();
    bool again;
    int r;
    do {
        r = submit_bytes(group, how, text, strlen(text));
        again = r == COX_FULL || r == COX_LATE || r == COX_TIMEOUT;
        if (again)
            sched_yield();
    } while (again && cox_now_ns() < deadline_ns);
    return r;
}

void test_with_longer_deadlines(bool (*in_time)(uint64_t timeout_ms))
{
    for (uint64_t timeout_ms = 200; !in_time(timeout_ms); timeout_ms *= 4)
        assert_true(timeout_ms < TEST_PATIENCE_MS);
}

const struct test_completion *test_await(struct test_group *group, size_t n)
{
    uint64_t deadline_ns = test_patience();
    pthread_mutex_lock(&group->lock);
    while (group->completion_count <= n && group_wait(group, deadline_ns))
        continue;
    size_t seen = group->completion_count;
    const struct test_completion *completion = n < seen ? group->completions[n] : NULL;
    pthread_mutex_unlock(&group->lock);
    if (!completion)
        fail_msg("%zu completions, expected %zu", seen, n + 1);
    return completion;
}

size_t test_completion_count(struct test_group *group)
{
    pthread_mutex_lock(&group->lock);
    size_t count = group->completion_count;
    pthread_mutex_unlock(&group->lock);
    return count;
}

/* ---- pipes ---- */

struct test_pipe *test_pipe_new(void)
{
    static unsigned counter;
    struct test_pipe *pipe = calloc(1, sizeof *pipe);
    COX_ASSERT(pipe);
    snprintf(pipe->path, sizeof pipe->path, "/tmp/cox_pipe_%d_%u", getpid(), counter++);
    unlink(pipe->path);
    assert_int_equal(mkfifo(pipe->path, 0600), 0);
    pipe->fd = open(pipe->path, O_RDWR | O_CLOEXEC); /* both ends: a reader's open never waits */
    assert_true(pipe->fd >= 0);
    pipe->next = pipes;
    pipes = pipe;
    return pipe;
}

const char *test_pipe_path(const struct test_pipe *pipe)
{
    return pipe->path;
}

void test_pipe_release(struct test_pipe *pipe, size_t count)
{
    for (size_t i = 0; i < count; i++)
        assert_int_equal(write(pipe->fd, "x", 1), 1);
}

static void pipes_close(void)
{
    while (pipes) {
        struct test_pipe *pipe = pipes;
        pipes = pipe->next;
        close(pipe->fd);
        unlink(pipe->path);
        free(pipe);
    }
}

/* ---- processes ---- */

struct test_helper test_helper_start(const char *mode, const char *argument)
{
    struct test_helper helper;
    int in[2], out[2];
    assert_int_equal(pipe2(in, O_CLOEXEC), 0);
    assert_int_equal(pipe2(out, O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, in[0], 0);
    posix_spawn_file_actions_adddup2(&actions, out[1], 1);
    char *const argv[] = {"helper", (char *)(uintptr_t)mode, (char *)(uintptr_t)argument, NULL};
    assert_int_equal(posix_spawn(&helper.pid, "/proc/self/exe", &actions, NULL, argv, environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    close(in[0]);
    close(out[1]);
    helper.in = in[1];
    helper.out = out[0];
    return helper;
}

int test_helper_wait(struct test_helper *helper)
{
    int status;
    close(helper->in);
    assert_int_equal(waitpid(helper->pid, &status, 0), helper->pid);
    close(helper->out);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int test_helper_run(const char *mode)
{
    struct test_helper helper = test_helper_start(mode, NULL);
    return test_helper_wait(&helper);
}

static bool thread_stopped(pid_t pid, const char *thread)
{
    char path[320], state = '?';
    snprintf(path, sizeof path, "/proc/%d/task/%s/stat", pid, thread);
    FILE *file = fopen(path, "re");
    if (!file)
        return true; /* it ended meanwhile */
    int seen = fscanf(file, "%*d (%*[^)]) %c", &state);
    fclose(file);
    return seen == 1 && state == 'T';
}

void test_needs_processes(void)
{
    if (ranks_are_threads())
        skip();
}

void test_stop_process(pid_t pid)
{
    test_needs_processes();
    char path[64];
    uint64_t deadline_ns = test_patience();
    bool stopped = false;
    assert_int_equal(kill(pid, SIGSTOP), 0);
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    while (!stopped && cox_now_ns() < deadline_ns) {
        stopped = true;
        DIR *dir = opendir(path);
        assert_non_null(dir);
        for (struct dirent *entry; (entry = readdir(dir)) != NULL;)
            stopped = stopped && (entry->d_name[0] == '.' || thread_stopped(pid, entry->d_name));
        closedir(dir);
        if (!stopped)
            sched_yield();
    }
    assert_true(stopped);
}

/* ---- what is left ---- */

/* 0 where there is no such folder. */
static size_t count_entries(const char *folder, const char *text)
{
    size_t count = 0;
    DIR *dir = opendir(folder);
    for (struct dirent *entry; dir && (entry = readdir(dir)) != NULL;)
        count += entry->d_name[0] != '.' && strstr(entry->d_name, text);
    if (dir)
        closedir(dir);
    return count;
}

size_t test_count_names(const char *text)
{
    return count_entries("/dev/shm", text);
}

const char *test_name_prefix(void)
{
    static char prefix[40];
    static pid_t owner;
    if (owner != getpid()) {
        owner = getpid();
        snprintf(prefix, sizeof prefix, "test_%d_%x_", owner, (unsigned)cox_now_ns());
    }
    return prefix;
}

const char *test_unique_name(char buffer[64])
{
    static unsigned counter;
    snprintf(buffer, 64, "%s%u", test_name_prefix(), counter++);
    return buffer;
}

size_t test_count_fds(void)
{
    return count_entries("/proc/self/fd", "");
}

size_t test_count_proc(pid_t pid, const char *what)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/%s", (int)pid, what);
    return count_entries(path, "");
}

size_t test_count_maps(pid_t pid, const char *text)
{
    char path[64], line[4352];
    size_t count = 0;
    snprintf(path, sizeof path, "/proc/%d/maps", (int)pid);
    FILE *maps = fopen(path, "re");
    assert_non_null(maps);
    while (fgets(line, sizeof line, maps))
        count += strstr(line, text) != NULL;
    fclose(maps);
    return count;
}

void test_await_socket(struct test_group *group)
{
    /* More than it reads: by what is left the kernel tells its close, which comes after the end
     * that is read first. */
    static const char nothing[COX_HELLO_SIZE + 4096];
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const char *path = cox_executor_socket(group->executor);
    const uint64_t deadline_ns = test_patience();
    struct cox_control_socket_counts counts;
    char bytes[256];
    ssize_t got;
    if (!path)
        return;
    assert_true(strlen(path) < sizeof address.sun_path);
    strcpy(address.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (const struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(send(fd, nothing, sizeof nothing, MSG_NOSIGNAL), sizeof nothing);
    /* Refused. One thread serves all, in order of arrival, and closes this connection last. */
    while ((got = read(fd, bytes, sizeof bytes)) >= 0) {
        assert_true(cox_now_ns() < deadline_ns);
        if (got == 0)
            sched_yield();
    }
    assert_int_equal(errno, ECONNRESET);
    close(fd);
    /* What others sent it another thread closes. */
    while (assert_true(cox_executor_socket_counts(group->executor, &counts)), counts.closing > 0)
        test_yield(deadline_ns);
}

static size_t count_threads(void)
{
    return count_entries("/proc/self/task", "");
}

/* Of a group of this process that has no other name. */
static bool is_own_name(const char *name)
{
    char plain[32], semaphore[32];
    snprintf(plain, sizeof plain, "%d_", getpid());
    snprintf(semaphore, sizeof semaphore, "sem.%d_", getpid());
    return strncmp(name, plain, strlen(plain)) == 0 ||
           strncmp(name, semaphore, strlen(semaphore)) == 0;
}

/* Groups of this process are called by its pid, whatever else: so other tests may run meanwhile. */
static size_t count_own_names(bool removes)
{
    size_t count = test_count_names(test_name_prefix());
    DIR *dir = opendir("/dev/shm");
    assert_non_null(dir);
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;)
        if (is_own_name(entry->d_name)) {
            count++;
            if (removes)
                unlinkat(dirfd(dir), entry->d_name, 0);
        }
    closedir(dir);
    return count;
}

/* Before the first group of this program: a killed test leaves its names, and its pid is used
 * again. */
static void names_sweep(void)
{
    static pid_t swept;
    if (swept != getpid())
        count_own_names(true);
    swept = getpid();
}

static bool has_children(void)
{
    siginfo_t info;
    return waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT | __WALL) == 0;
}

/* For what ends by itself soon; a leak stays. */
#define TEARDOWN_MS 5000

static size_t fds_before, threads_before;

static void *thread_nothing(void *argument)
{
    return argument;
}

int test_setup(void **state)
{
    (void)state;
    runtime_dir_make();
    names_sweep();
    /* A sanitizer may start a thread of its own with the first one of the program. */
    pthread_t thread;
    if (pthread_create(&thread, NULL, thread_nothing, NULL) == 0)
        pthread_join(thread, NULL);
    fds_before = test_count_fds();
    threads_before = count_threads();
    return 0;
}

int test_teardown(void **state)
{
    (void)state;
    pipes_close(); /* first: it releases blocked threads */
    while (groups)
        test_group_free(groups);
    ranks_stop();
    const uint64_t deadline_ns = cox_deadline_after_ms(TEARDOWN_MS);
    /* On a busy machine the end of a control socket leaves its last closes to detached threads. */
    size_t fds = test_count_fds(), names = count_own_names(false);
    for (; fds > fds_before && cox_now_ns() < deadline_ns; fds = test_count_fds())
        sched_yield();
    if (fds != fds_before)
        print_error("fds: %zu before the test, %zu after\n", fds_before, fds);
    if (names)
        print_error("%zu names are left in /dev/shm\n", names);
    size_t sockets = count_entries(test_runtime_dir(), "");
    if (sockets)
        print_error("%zu sockets are left in %s\n", sockets, test_runtime_dir());
    bool children = has_children();
    if (children)
        print_error("children are left\n");
    /* A joined thread may be listed for an instant longer. */
    size_t threads = count_threads();
    for (; threads > threads_before && cox_now_ns() < deadline_ns; threads = count_threads())
        sched_yield();
    if (threads > threads_before)
        print_error("threads: %zu before the test, %zu after\n", threads_before, threads);
    return fds != fds_before || names || sockets || children || threads > threads_before ? -1 : 0;
}
