#include "script.h"

#include "channel/attach/named/names.h"
#include "channel/base/base_internal.h"
#include "channel/base/hash.h"
#include "channel/base/idioms.h"
#include "channel/base/semaphore.h"
#include "channel/base/tsan.h"
#include "channel/shm/control.h"
#include "channel/shm/reply.h"
#include "channel/shm/state.h"
#include "proto/executor.pb-c.h"
#include "script_take.h"
#include "token_hash.h"
#include "tests/lib/posix.h"

#include <coxswain/group.h>

#include <endian.h>

#define PATH_SIZE 256
#define TEXT_SIZE 16384

struct text {
    size_t used;
    char bytes[TEXT_SIZE];
};

enum step_trick {
    STEP_FAIL,
    STEP_DIVERGE,
    STEP_BLOCK,
    STEP_ABORT,
    STEP_YIELD,
    STEP_SPIN,
    STEP_READ,
    STEP_DIGEST,
    STEP_TRICK_COUNT
};

struct recovery {
    bool block;
    int result;
    /* or the path */
    char text[PATH_SIZE];
};

enum recovery_name { PAUSE, PAUSE_NET, CLEAR, REINIT, START, RECOVERY_COUNT };
static const char *const recovery_names[RECOVERY_COUNT] = {"pause", "pause_net", "clear", "reinit",
                                                           "start"};

struct script {
    struct cox_worker_options options;
    const struct script_host *host;
    struct cox_worker *worker;
    /* Of the execute channel's thread. */
    uint64_t served_count;
    uint64_t step_count;
    /* 0: never */
    uint64_t step_at[STEP_TRICK_COUNT];
    char step_path[PATH_SIZE];
    struct text batch;
    uintptr_t rows_at, blocks_at;
    /* Kept, and grown: a callback that is left in the middle of a command frees nothing, and seldom
     * allocates. */
    char *words, *part;
    size_t words_size;
    /* Of several channels. */
    pthread_mutex_t lock;
    struct text log, links, pulls;
    struct recovery recoveries[RECOVERY_COUNT];
    char pull_path[PATH_SIZE];
    bool pull_spins;
    uint64_t grace_ms;
    uint32_t link_count;
};

static void text_add(struct text *text, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static void text_add(struct text *text, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int length = vsnprintf(text->bytes + text->used, TEXT_SIZE - text->used, format, args);
    va_end(args);
    text->used += (size_t)length;
    if (text->used >= TEXT_SIZE)
        text->used = TEXT_SIZE - 1;
}

/* ---- the process that the rank is, or that stands for it ---- */

static bool host_is_gone(const struct script_host *host)
{
    struct pollfd relay = {.fd = host->relay_fd};
    return poll(&relay, 1, 0) > 0 && relay.revents & POLLHUP;
}

/* A rank whose process is dead does nothing more that others could see. */
static void host_leave_if_gone(const struct script_host *host)
{
    if (host_is_gone(host))
        host->park(host->context);
}

void script_perform(const struct script_order *order)
{
    if (order->what == SCRIPT_EXIT)
        _exit(order->value);
    if (order->what == SCRIPT_KILL)
        kill(getpid(), order->value);
    if (order->what == SCRIPT_STOP)
        raise(SIGSTOP);
    if (order->what == SCRIPT_DEAF)
        signal(SIGTERM, SIG_IGN);
}

/* Returns once it is done. */
static void host_order(const struct script_host *host, enum script_verb what, int value)
{
    const struct script_order order = {.what = what, .value = value};
    char done;
    cox_tsan_may_die();
    if (host->relay_fd < 0)
        script_perform(&order);
    else if (send(host->relay_fd, &order, sizeof order, MSG_NOSIGNAL) < 0 ||
             recv(host->relay_fd, &done, 1, 0) <= 0)
        host->park(host->context);
}

/* The test holds the pipe open for writing; when the test is gone, there is an end to read. */
static void block_on(const struct script_host *host, const char *path)
{
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    dprintf(host->out_fd, "blocked\n");
    cox_tsan_may_die();
    struct pollfd fds[2] = {{.fd = fd, .events = POLLIN}, {.fd = host->relay_fd}};
    char byte;
    /* Others may be faster to read what made the pipe readable. */
    while (fd >= 0 && read(fd, &byte, 1) < 0 && !(fds[1].revents & POLLHUP))
        poll(fds, 2, -1);
    if (fd >= 0)
        close(fd);
    host_leave_if_gone(host);
}

/* ---- opaque commands ---- */

struct command {
    struct script *script;
    const uint8_t *request;
    size_t request_size;
    uint8_t *reply;
    size_t capacity;
    size_t *ret_size;
    struct cox_error *err;
};

static int reply(const struct command *c, const void *bytes, size_t size)
{
    memcpy(c->reply, bytes, size < c->capacity ? size : c->capacity);
    *c->ret_size = size;
    return 0;
}

static int reply_text(const struct command *c, const char *text)
{
    return reply(c, text, strlen(text));
}

/* More than fits the slot is asked for. */
static int command_size(const struct command *c, const char *rest)
{
    size_t size = strtoull(rest, NULL, 10);
    uint8_t *reply = c->reply;
    int r = size > c->capacity ? cox_worker_reply_grow(c->script->worker, size, &reply, c->err) : 0;
    if (r)
        return r;
    for (size_t i = 0; i < size; i++)
        reply[i] = (uint8_t)(7 * i + c->script->options.rank);
    *c->ret_size = size;
    return 0;
}

static uint64_t digest(const uint8_t *bytes, size_t size)
{
    return cox_hash_bytes(COX_HASH_START, bytes, size);
}

static int command_sum(const struct command *c)
{
    char text[32];
    snprintf(text, sizeof text, "%016" PRIx64, digest(c->request, c->request_size));
    return reply_text(c, text);
}

/* The frame is lent until the callback returns: it must not be written meanwhile. */
static int command_hold(const struct command *c, const char *rest)
{
    char path[PATH_SIZE] = "";
    sscanf(rest, "%255s", path);
    uint64_t before = digest(c->request, c->request_size);
    block_on(c->script->host, path);
    return reply_text(c, before == digest(c->request, c->request_size) ? "same" : "changed");
}

/* Replies without the library, then waits until the coordinator has looked: what the library sends
 * afterwards comes too late to be seen. */
static int command_raw(const struct command *c, const char *rest)
{
    uint32_t length = 0, rank = c->script->options.rank;
    char how[16] = "";
    sscanf(rest, "%" SCNu32 " %15s", &length, how);
    struct cox_control control = COX_CONTROL_NONE;
    int r = cox_control_attach(&control, c->script->options.prefix + 1, c->err);
    if (r)
        return r;
    char object[COX_OBJECT_NAME_SIZE];
    struct cox_semaphore wakeup = {0};
    r = cox_semaphore_attach(&wakeup,
                             cox_name_wakeup(object, c->script->options.prefix + 1,
                                             COX_CHANNEL_EXECUTE, COX_WAKEUP_RESPONSE_CONSUME,
                                             rank),
                             c->err);
    if (r == 0) {
        struct cox_layout_rank_line *line = cox_state_line(&control, rank, COX_CHANNEL_EXECUTE);
        const struct cox_layout_channel_state *shared =
            cox_state_channel(&control, COX_CHANNEL_EXECUTE);
        uint64_t sequence = cox_state_taken(line);
        uint32_t prefix = htole32(length);
        memset(c->reply, 0xff, 64);
        memcpy(c->reply - COX_PREFIX_SIZE, &prefix, sizeof prefix);
        cox_state_set_tag(line, control.geometry.depth,
                          strcmp(how, "other") == 0 ? sequence + control.geometry.depth : sequence,
                          strcmp(how, "failed") == 0);
        cox_state_set_done(line, sequence);
        cox_semaphore_post(&wakeup);
        while (cox_state_ended(shared) < sequence && !cox_state_aborted(&control))
            sched_yield();
    }
    cox_semaphore_detach(&wakeup);
    cox_control_close(&control);
    return r ? r : reply_text(c, "raw");
}

static int command_faults(const struct command *c, const char *rest)
{
    unsigned long count = strtoul(rest, NULL, 10);
    const char *text = strchr(rest, ' ');
    dprintf(c->script->host->out_fd, "reports\n");
    for (unsigned long i = 0; i < count; i++) {
        int r = cox_worker_report_fault(c->script->worker, text ? text + 1 : "",
                                        cox_deadline_after_ms(20000));
        if (r)
            return cox_fail(c->err, r, "report_fault: %s", cox_status_text(r));
    }
    return reply_text(c, "reported");
}

static int command_step(const struct command *c, const char *rest)
{
    static const char *const tricks[STEP_TRICK_COUNT] = {"fail",  "diverge", "block", "abort",
                                                         "yield", "spin",    "read",  "digest"};
    char trick[16] = "", path[PATH_SIZE] = "";
    uint64_t k = 0;
    sscanf(rest, "%15s %" SCNu64 " %255[^\n]", trick, &k, path);
    for (int i = 0; i < STEP_TRICK_COUNT; i++) {
        if (strcmp(trick, tricks[i]) != 0)
            continue;
        c->script->step_at[i] = c->script->step_count + k;
        memcpy(c->script->step_path, path, sizeof path);
        return reply_text(c, "armed");
    }
    return cox_fail(c->err, COX_INVALID, "no trick '%s'", trick);
}

static int command_recover(const struct command *c, const char *rest)
{
    char name[16] = "", what[16] = "";
    int used = 0;
    sscanf(rest, "%15s %15s %n", name, what, &used);
    for (int i = 0; i < RECOVERY_COUNT; i++) {
        if (strcmp(name, recovery_names[i]) != 0)
            continue;
        struct recovery recovery = {.block = strcmp(what, "block") == 0, .result = atoi(what)};
        snprintf(recovery.text, sizeof recovery.text, "%s", rest + used);
        pthread_mutex_lock(&c->script->lock);
        c->script->recoveries[i] = recovery;
        pthread_mutex_unlock(&c->script->lock);
        return reply_text(c, "armed");
    }
    return cox_fail(c->err, COX_INVALID, "no recovery command '%s'", name);
}

static int command_pull(const struct command *c, const char *rest)
{
    pthread_mutex_lock(&c->script->lock);
    sscanf(rest, "block %255s", c->script->pull_path);
    c->script->pull_spins = strcmp(rest, "spin") == 0;
    pthread_mutex_unlock(&c->script->lock);
    return reply_text(c, "armed");
}

static int command_tell(const struct command *c, const char *rest)
{
    struct script *script = c->script;
    if (strcmp(rest, "batch") == 0)
        return reply(c, script->batch.bytes, script->batch.used);
    if (strcmp(rest, "at") == 0) {
        char text[64];
        snprintf(text, sizeof text, "%" PRIxPTR " %" PRIxPTR, script->rows_at, script->blocks_at);
        return reply_text(c, text);
    }
    const struct text *text = strcmp(rest, "links") == 0   ? &script->links
                              : strcmp(rest, "pulls") == 0 ? &script->pulls
                                                           : &script->log;
    pthread_mutex_lock(&script->lock);
    reply(c, text->bytes, text->used);
    pthread_mutex_unlock(&script->lock);
    return 0;
}

static int command_fail(const struct command *c, const char *rest)
{
    char *text;
    int code = (int)strtol(rest, &text, 10);
    return cox_fail(c->err, code, "%s", *text == ' ' ? text + 1 : text);
}

/* A signal to the process may be taken by another thread: this one must not reply before that. */
/* Until the other end, which another rank holds, is closed. */
static int command_lose(const struct command *c, const char *rest)
{
    char path[PATH_SIZE] = "", byte;
    int words = 0;
    sscanf(rest, "%255s %n", path, &words);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    while (fd >= 0 && read(fd, &byte, 1) != 0)
        continue;
    return cox_fail(c->err, 7, "%s", rest + words);
}

/* Holds the other end, and dies. */
static int command_drop(const struct command *c, const char *rest)
{
    int fd = open(rest, O_WRONLY | O_CLOEXEC);
    host_order(c->script->host, SCRIPT_KILL, SIGKILL);
    return fd;
}

static void spin(const struct script_host *host)
{
    dprintf(host->out_fd, "spin\n");
    cox_tsan_may_die();
    while (!host_is_gone(host))
        sched_yield();
    host->park(host->context);
}

/* Until a signal comes, or the rank is gone. */
static int read_nothing(const struct script_host *host, struct cox_error *err)
{
    int fds[2];
    char byte;
    if (pipe2(fds, O_CLOEXEC) < 0)
        return cox_fail(err, -errno, "no pipe");
    dprintf(host->out_fd, "reads\n");
    cox_tsan_may_die();
    ssize_t got = read(fds[0], &byte, 1);
    int r = got < 0 ? -errno : 0;
    close(fds[0]);
    close(fds[1]);
    return cox_fail(err, r, "the read ended: %s", cox_status_text(r));
}

static void command_end(const struct script_host *host, const char *verb, const char *rest)
{
    host_order(host, strcmp(verb, "exit") == 0 ? SCRIPT_EXIT : SCRIPT_KILL, atoi(rest));
    dprintf(host->out_fd, "%s\n", verb);
    cox_tsan_may_die();
    while (!host_is_gone(host))
        poll(&(struct pollfd){.fd = host->relay_fd}, 1, -1);
    host->park(host->context);
}

static int command_busy(const struct command *c, const char *rest)
{
    const uint64_t end_ns = cox_deadline_after_ns(strtoull(rest, NULL, 10) * 1000);
    while (cox_now_ns() < end_ns)
        ;
    return reply_text(c, "done");
}

static int obey(const struct command *c, const char *text);

static int obey_each(const struct command *c, const char *text)
{
    for (uint32_t rank = 0; rank < c->script->options.rank && strchr(text, '|'); rank++)
        text = strchr(text, '|') + 1;
    free(c->script->part);
    c->script->part = strndup(text, strcspn(text, "|"));
    if (!c->script->part)
        return cox_fail(c->err, -ENOMEM, "no memory for a command");
    struct command part = *c;
    part.request_size = strlen(c->script->part);
    return obey(&part, c->script->part);
}

static int obey(const struct command *c, const char *text)
{
    char verb[16] = "";
    int used = 0;
    /* Before scanf: a callback that is left inside scanf would leave the C library's stream locked.
     */
    if (strncmp(text, "busy ", 5) == 0)
        return command_busy(c, text + 5);
    sscanf(text, "%15s%n", verb, &used);
    const char *rest = text + used + (text[used] == ' ');
    if (strcmp(verb, "only") == 0) {
        char *next;
        unsigned long rank = strtoul(rest, &next, 10);
        return rank == c->script->options.rank ? obey(c, next + 1)
                                               : reply(c, c->request, c->request_size);
    }
    if (strcmp(verb, "each") == 0)
        return obey_each(c, rest);
    if (strcmp(verb, "echo") == 0)
        return reply(c, rest, c->request_size - (size_t)(rest - text));
    if (strcmp(verb, "sum") == 0)
        return command_sum(c);
    if (strcmp(verb, "size") == 0)
        return command_size(c, rest);
    if (strcmp(verb, "fail") == 0)
        return command_fail(c, rest);
    if (strcmp(verb, "lie") == 0) {
        *c->ret_size = strtoull(rest, NULL, 10);
        return 0;
    }
    if (strcmp(verb, "raw") == 0)
        return command_raw(c, rest);
    if (strcmp(verb, "block") == 0) {
        block_on(c->script->host, rest);
        return reply_text(c, "released");
    }
    if (strcmp(verb, "hold") == 0)
        return command_hold(c, rest);
    if (strcmp(verb, "faults") == 0)
        return command_faults(c, rest);
    if (strcmp(verb, "fault") == 0) {
        int r = cox_worker_report_fault(c->script->worker, rest, cox_deadline_after_ms(20000));
        return r ? cox_fail(c->err, r, "report_fault") : reply_text(c, "reported");
    }
    if (strcmp(verb, "step") == 0)
        return command_step(c, rest);
    if (strcmp(verb, "recover") == 0)
        return command_recover(c, rest);
    if (strcmp(verb, "pull") == 0)
        return command_pull(c, rest);
    if (strcmp(verb, "tell") == 0)
        return command_tell(c, rest);
    if (strcmp(verb, "deaf") == 0) {
        host_order(c->script->host, SCRIPT_DEAF, 0);
        return reply_text(c, "deaf");
    }
    if (strcmp(verb, "pid") == 0) {
        char pid[16];
        snprintf(pid, sizeof pid, "%d", c->script->host->pid);
        return reply_text(c, pid);
    }
    if (strcmp(verb, "lose") == 0)
        return command_lose(c, rest);
    if (strcmp(verb, "drop") == 0)
        return command_drop(c, rest);
    if (strcmp(verb, "served") == 0) {
        char count[24];
        snprintf(count, sizeof count, "%" PRIu64, c->script->served_count);
        return reply_text(c, count);
    }
    if (strcmp(verb, "stop") == 0) {
        host_order(c->script->host, SCRIPT_STOP, 0);
        return reply_text(c, "stopped");
    }
    if (strcmp(verb, "read") == 0)
        return read_nothing(c->script->host, c->err);
    if (strcmp(verb, "grace") == 0) {
        pthread_mutex_lock(&c->script->lock);
        c->script->grace_ms = strtoull(rest, NULL, 10);
        pthread_mutex_unlock(&c->script->lock);
        return reply_text(c, "armed");
    }
    if (strcmp(verb, "spin") == 0)
        spin(c->script->host);
    if (strcmp(verb, "exit") == 0 || strcmp(verb, "kill") == 0)
        command_end(c->script->host, verb, rest);
    return cox_fail(c->err, COX_INVALID, "no command '%s'", verb);
}

static int on_opaque(void *context, const uint8_t *request, size_t request_size, uint8_t *reply,
                     size_t reply_capacity, size_t *ret_reply_size, struct cox_error *err)
{
    const struct command command = {
        .script = context,
        .request = request,
        .request_size = request_size,
        .reply = reply,
        .capacity = reply_capacity,
        .ret_size = ret_reply_size,
        .err = err,
    };
    /* Words of a command are short; what follows them may be long and is read in place. */
    struct script *script = context;
    if (script->words_size <= request_size) {
        free(script->words);
        script->words = malloc(request_size + 1);
        script->words_size = script->words ? request_size + 1 : 0;
    }
    char *text = script->words;
    if (!text)
        return cox_fail(err, -ENOMEM, "no memory for a command");
    memcpy(text, request, request_size);
    text[request_size] = '\0';
    script->served_count++;
    int r = obey(&command, text);
    host_leave_if_gone(command.script->host);
    return r;
}

/* ---- init ---- */

static int64_t init_number(const struct cox_init_request *request, const char *key, int64_t other)
{
    const char *value = cox_init_request_get(request, key);
    return value ? strtoll(value, NULL, 10) : other;
}

/* Capacities fall and rise with the rank, so that the smallest of one sits at the last rank, of
 * another at the first. */
static int on_init(void *context, const struct cox_init_request *request,
                   struct cox_init_result *result, struct cox_error *err)
{
    struct script *script = context;
    int64_t rank = script->options.rank;
    if (init_number(request, "fail", -1) == rank)
        return cox_fail(err, 77, "no weights on rank %" PRId64, rank);
    const char *path = cox_init_request_get(request, "block");
    if (path)
        block_on(script->host, path);
    if (init_number(request, "spin", -1) == rank)
        spin(script->host);
    if (init_number(request, "yield", -1) == rank) {
        dprintf(script->host->out_fd, "yields\n");
        while (!cox_worker_cancelled(script->worker, COX_CHANNEL_EXECUTE, request->sequence))
            sched_yield();
        return cox_fail(err, COX_ABORTED, "left an init");
    }
    const bool replayed = request->replayed;
    if (cox_init_request_get(request, "tell")) {
        dprintf(script->host->out_fd, "init incarnation %" PRIu64 " at %" PRIu64 "%s\n",
                request->group->incarnation, request->group->fd_offset, replayed ? " again" : "");
    }
    const char *model = cox_init_request_get(request, "model");
    if (model && strcmp(model, "endless") == 0) {
        dprintf(script->host->out_fd, "loading\n");
        script->host->park(script->host->context);
    }
    result->cpu_block_count = init_number(request, "cpu", 100) + rank;
    if (replayed && init_number(request, "odd_again", -1) == rank)
        result->cpu_block_count -= 50;
    result->npu_block_count = init_number(request, "npu", 1000) - rank;
    result->max_position_embeddings = init_number(request, "positions", 4096) + (rank % 2 ? -1 : 1);
    result->mem_pool_id = rank;
    result->start_thinking_id = init_number(request, "start_thinking", -1);
    result->stop_thinking_id = init_number(request, "stop_thinking", -1);
    result->early_stopping_ids = cox_init_request_get(request, "early");
    result->kv_cache_count = (uint32_t)init_number(request, "caches", 2);
    if (init_number(request, "odd_caches", -1) == rank)
        result->kv_cache_count++;
    for (uint32_t i = 0; i < result->kv_cache_count && i < COX_KV_CACHE_DESC_COUNT_MAX; i++)
        result->kv_caches[i] = (struct cox_kv_cache_desc){
            .block_count = (int32_t)(500 + 100 * i - 10 * (uint32_t)rank),
            .block_size = init_number(request, "odd_block_size", -1) == rank ? 17 : 16,
            .compression_ratio = i + 1,
            .cache_type = (int32_t)i,
        };
    if (init_number(request, "odd_thinking", -1) == rank)
        result->start_thinking_id++;
    return 0;
}

/* ---- steps ---- */

static void tell_pairs(struct text *text, const char *name, const struct cox_block_pair *pairs,
                       uint32_t count)
{
    text_add(text, " %s=", name);
    for (uint32_t i = 0; i < count; i++)
        text_add(text, "%s%d>%d", i ? "," : "", pairs[i].from, pairs[i].to);
}

static void tell_batch(struct text *text, const struct cox_batch *batch)
{
    text->used = 0;
    text_add(text, "type=%d tables=%u", (int)batch->forward_type, batch->table_count);
    tell_pairs(text, "in", batch->swap_in, batch->swap_in_count);
    tell_pairs(text, "out", batch->swap_out, batch->swap_out_count);
    tell_pairs(text, "copy", batch->copy, batch->copy_count);
    text_add(text, " finished=");
    for (uint32_t i = 0; i < batch->finished_count; i++)
        text_add(text, "%s%u", i ? "," : "", batch->finished_slots[i]);
    for (uint32_t r = 0; r < batch->row_count; r++) {
        const struct cox_batch_row *row = &batch->rows[r];
        text_add(text, "; id=%" PRId64 " slot=%u at=%u+%u emit=%d tokens=", row->id, row->slot,
                 row->position, row->token_count, row->emit);
        for (uint32_t i = 0; i < row->position + row->token_count; i++)
            text_add(text, "%s%d", i ? "," : "", row->tokens[i]);
        for (uint32_t t = 0; t < batch->table_count; t++) {
            text_add(text, " t%u=", t);
            for (uint32_t i = 0; i < row->tables[t].count; i++)
                text_add(text, "%s%d", i ? "," : "", row->tables[t].blocks[i]);
        }
    }
}

/* A token is a function of all tokens before it, so a recomputation gives the same. */
static int on_execute(void *context, const struct cox_batch *batch,
                      struct cox_batch_output *outputs, struct cox_error *err)
{
    struct script *script = context;
    uint64_t step = ++script->step_count;
    tell_batch(&script->batch, batch);
    if (batch->row_count) {
        script->rows_at = (uintptr_t)batch->rows;
        script->blocks_at = (uintptr_t)batch->rows[0].tables[0].blocks;
    }
    for (uint32_t r = 0; r < batch->row_count; r++) {
        const struct cox_batch_row *row = &batch->rows[r];
        outputs[r].token =
            row->emit
                ? (int32_t)(test_token_hash(row->tokens, row->position + row->token_count) % 50000)
                : -1;
        outputs[r].logprob = -(float)r;
    }
    if (step == script->step_at[STEP_BLOCK] || step == script->step_at[STEP_ABORT])
        block_on(script->host, script->step_path);
    if (step == script->step_at[STEP_ABORT]) {
        bool aborted = cox_batch_cancelled(batch);
        dprintf(script->host->out_fd, "the step is %s\n", aborted ? "void" : "alive");
        if (aborted)
            return cox_fail(err, COX_ABORTED, "left a void step");
    }
    if (step == script->step_at[STEP_SPIN])
        spin(script->host);
    if (step == script->step_at[STEP_READ])
        return read_nothing(script->host, err);
    if (step == script->step_at[STEP_YIELD]) {
        dprintf(script->host->out_fd, "yields\n");
        while (!cox_batch_cancelled(batch))
            sched_yield();
        return cox_fail(err, COX_ABORTED, "left a step");
    }
    if (step == script->step_at[STEP_FAIL])
        return cox_fail(err, 55, "step %" PRIu64 " fails as told", step);
    if (step == script->step_at[STEP_DIVERGE] && batch->row_count)
        outputs[0].token++;
    if (step == script->step_at[STEP_DIGEST])
        cox_worker_set_digest(script->worker, (enum cox_digest)(script->step_path[0] - '0'),
                              strtoull(script->step_path + 2, NULL, 10));
    return 0;
}

static void on_cleanup(void *context, const uint32_t *slots, uint32_t count)
{
    struct script *script = context;
    pthread_mutex_lock(&script->lock);
    for (uint32_t i = 0; i < count; i++)
        text_add(&script->log, "cleanup %u;", slots[i]);
    pthread_mutex_unlock(&script->lock);
}

/* ---- link, LoRA, pull ---- */

static void on_link(void *context, const Coxswain__PDLinkRequest *request)
{
    struct script *script = context;
    pthread_mutex_lock(&script->lock);
    script->link_count++;
    for (size_t i = 0; i < request->n_pd_link_info; i++) {
        const Coxswain__PDLinkRequest__PDLinkInfo *info = request->pd_link_info[i];
        text_add(&script->links, "role=%d change=%d link=%zu unlink=%zu;", (int)info->pd_role,
                 info->change_role, info->n_link_info, info->n_unlink_info);
    }
    pthread_mutex_unlock(&script->lock);
}

/* The lists differ by rank: what every rank has linked, what one rank has not yet, what failed on
 * one. */
static int on_link_status(void *context, struct cox_arena *arena,
                          Coxswain__PDLinkStatusResponse *response, struct cox_error *err)
{
    struct script *script = context;
    uint32_t rank = script->options.rank, last = script->options.rank_count - 1;
    char **success = cox_arena_alloc(arena, 8 * sizeof *success);
    char **running = cox_arena_alloc(arena, 8 * sizeof *running);
    char **waiting = cox_arena_alloc(arena, 8 * sizeof *waiting);
    Coxswain__PDLinkStatusResponse__FailedLinkInfo *failure =
        cox_arena_alloc(arena, sizeof *failure);
    Coxswain__PDLinkStatusResponse__FailedLinkInfo **failed =
        cox_arena_alloc(arena, sizeof(Coxswain__PDLinkStatusResponse__FailedLinkInfo *));
    char *count = cox_arena_alloc(arena, 32);
    if (!success || !running || !waiting || !failure || !failed || !count)
        return cox_fail(err, -ENOMEM, "no memory");
    response->success_link_info = success;
    response->running_link_info = running;
    response->waiting_link_info = waiting;
    response->failed_link_info = failed;
    pthread_mutex_lock(&script->lock);
    snprintf(count, 32, "linked %u", script->link_count);
    pthread_mutex_unlock(&script->lock);
    success[response->n_success_link_info++] = count;
    waiting[response->n_waiting_link_info++] = cox_arena_strdup(arena, "waits");
    if (rank == last) {
        running[response->n_running_link_info++] = cox_arena_strdup(arena, "slow");
        coxswain__pdlink_status_response__failed_link_info__init(failure);
        failure->cluster_id = cox_arena_strdup(arena, "broken");
        failure->has_pd_error_code = 1;
        failure->pd_error_code = COXSWAIN__PDERROR_CODE__PD_LINK_ERROR;
        failed[response->n_failed_link_info++] = failure;
    } else {
        success[response->n_success_link_info++] = cox_arena_strdup(arena, "slow");
        success[response->n_success_link_info++] = cox_arena_strdup(arena, "broken");
        success[response->n_success_link_info++] = cox_arena_strdup(arena, "unknown to the last");
    }
    return 0;
}

/* lora_name: "status S", or "rank R status S" where the others succeed, or "fail". */
static int on_lora(void *context, const Coxswain__LoraOperationRequest *request,
                   struct cox_arena *arena, Coxswain__LoraOperationResponse *response,
                   struct cox_error *err)
{
    struct script *script = context;
    (void)arena;
    const char *name = request->lora_name ? request->lora_name : "";
    unsigned rank, status = 0;
    if (strcmp(name, "fail") == 0)
        return cox_fail(err, 66, "no room for the adapter");
    if (sscanf(name, "rank %u status %u", &rank, &status) == 2)
        status = rank == script->options.rank ? status : 0;
    else
        sscanf(name, "status %u", &status);
    response->lora_op_status = (Coxswain__LoraOperationStatus)status;
    pthread_mutex_lock(&script->lock);
    text_add(&script->log, "lora %d %s %s;", (int)request->lora_op_type, name,
             request->lora_path ? request->lora_path : "");
    pthread_mutex_unlock(&script->lock);
    return 0;
}

static void tell_tables(struct text *text, const ProtobufCBinaryData *tables, size_t count)
{
    for (size_t t = 0; t < count; t++) {
        text_add(text, " [");
        for (int64_t i = 0; i < cox_wire_int64_count(tables[t].len); i++)
            text_add(text, "%s%" PRId64, i ? "," : "",
                     cox_wire_int64_get(tables[t].data, (size_t)i));
        text_add(text, "]");
    }
}

/* Request ids: "bad..." fails, "bad@R..." on rank R only, "mute@R..." is not mentioned by rank R.
 */
static int on_pull_kv(void *context, const Coxswain__PullKVRequest *request,
                      struct cox_arena *arena, Coxswain__PullKVResponse *response,
                      struct cox_error *err)
{
    struct script *script = context;
    pthread_mutex_lock(&script->lock);
    char path[PATH_SIZE];
    memcpy(path, script->pull_path, sizeof path);
    script->pull_path[0] = '\0';
    const bool spins = script->pull_spins;
    script->pull_spins = false;
    script->pulls.used = 0;
    for (size_t i = 0; i < request->n_pull_kv_infos; i++) {
        const Coxswain__PullKVRequest__PullKVInfo *info = request->pull_kv_infos[i];
        text_add(&script->pulls, "from %s:", info->cluster_id ? info->cluster_id : "");
        tell_tables(&script->pulls, info->src_block_tables, info->n_src_block_tables);
        text_add(&script->pulls, " to");
        tell_tables(&script->pulls, info->dst_block_tables, info->n_dst_block_tables);
        text_add(&script->pulls, ";");
    }
    pthread_mutex_unlock(&script->lock);
    if (path[0])
        block_on(script->host, path);
    if (spins)
        spin(script->host);
    size_t count = request->n_pull_kv_infos;
    Coxswain__PullKVResponse__PullKVResult *results =
        cox_arena_alloc(arena, (count + 1) * sizeof *results);
    Coxswain__PullKVResponse__PullKVResult **pointers =
        cox_arena_alloc(arena, (count + 1) * sizeof(Coxswain__PullKVResponse__PullKVResult *));
    if (!results || !pointers)
        return cox_fail(err, -ENOMEM, "no memory");
    response->pull_kv_results = pointers;
    for (size_t i = 0; i < count; i++) {
        const Coxswain__SequenceGroupMetadata *metadata =
            request->pull_kv_infos[i]->seq_group_metadata;
        char *id = metadata && metadata->request_id ? metadata->request_id : (char *)(uintptr_t) "";
        unsigned rank = script->options.rank;
        sscanf(id, "%*[a-z]@%u", &rank);
        bool meant = rank == script->options.rank;
        if (meant && strncmp(id, "mute", 4) == 0)
            continue;
        Coxswain__PullKVResponse__PullKVResult *result = &results[i];
        coxswain__pull_kvresponse__pull_kvresult__init(result);
        result->request_id = id;
        result->has_pd_error_code = 1;
        result->pd_error_code = meant && strncmp(id, "bad", 3) == 0
                                    ? COXSWAIN__PDERROR_CODE__PD_PULL_KV_ERROR
                                    : COXSWAIN__PDERROR_CODE__SUCCESS;
        pointers[response->n_pull_kv_results++] = result;
    }
    return 0;
}

/* ---- recovery ---- */

static int recover(struct script *script, enum recovery_name name, struct cox_error *err)
{
    pthread_mutex_lock(&script->lock);
    text_add(&script->log, "%s;", recovery_names[name]);
    struct recovery recovery = script->recoveries[name];
    script->recoveries[name] = (struct recovery){0};
    pthread_mutex_unlock(&script->lock);
    if (recovery.block)
        block_on(script->host, recovery.text);
    else if (recovery.result)
        return cox_fail(err, recovery.result, "%s", recovery.text);
    return 0;
}

static int on_pause(void *context, struct cox_error *err)
{
    return recover(context, PAUSE, err);
}

static int on_pause_net(void *context, struct cox_error *err)
{
    return recover(context, PAUSE_NET, err);
}

static int on_clear(void *context, struct cox_error *err)
{
    return recover(context, CLEAR, err);
}

static int on_reinit(void *context, struct cox_error *err)
{
    return recover(context, REINIT, err);
}

static int on_start(void *context, struct cox_error *err)
{
    return recover(context, START, err);
}

/* The same, and what the names say. */

static int script_pause(struct script *script, struct cox_error *err)
{
    pthread_mutex_lock(&script->lock);
    const uint64_t grace_ms = script->grace_ms;
    pthread_mutex_unlock(&script->lock);
    return cox_worker_pause(script->worker, grace_ms, err);
}

static int on_real_pause(void *context, struct cox_error *err)
{
    int r = recover(context, PAUSE, err);
    return r ? r : script_pause(context, err);
}

static int on_real_pause_net(void *context, struct cox_error *err)
{
    int r = recover(context, PAUSE_NET, err);
    return r ? r : script_pause(context, err);
}

static int on_real_start(void *context, struct cox_error *err)
{
    struct script *script = context;
    int r = recover(script, START, err);
    if (r == 0)
        cox_worker_resume(script->worker);
    return r;
}

static void on_finalize(void *context)
{
    const struct script *script = context;
    dprintf(script->host->out_fd, "finalized\n");
}

/* ---- a rank from start to end ---- */

#define COMMON_CALLBACKS                                                                           \
    .size = sizeof(struct cox_worker_callbacks), .init = on_init, .execute = on_execute,           \
    .opaque = on_opaque, OTHER_CALLBACKS
#define OTHER_CALLBACKS                                                                            \
    .cleanup = on_cleanup, .link = on_link, .link_status = on_link_status, .lora = on_lora,        \
    .pull_kv = on_pull_kv, .clear = on_clear, .reinit = on_reinit, .finalize = on_finalize
static const struct cox_worker_callbacks callbacks = {
    COMMON_CALLBACKS,
    .pause = on_pause,
    .pause_net = on_pause_net,
    .start = on_start,
};
static const struct cox_worker_callbacks pausing_callbacks = {
    COMMON_CALLBACKS,
    .pause = on_real_pause,
    .pause_net = on_real_pause_net,
    .start = on_real_start,
};
static const struct cox_worker_callbacks taking_callbacks = {
    .size = sizeof(struct cox_worker_callbacks),
    OTHER_CALLBACKS,
    .pause = on_pause,
    .pause_net = on_pause_net,
    .start = on_start,
};
static const struct cox_worker_callbacks no_callbacks = COX_WORKER_CALLBACKS_INIT;

const struct cox_worker_callbacks *script_callbacks(const char *mode)
{
    if (strcmp(mode, "obey") == 0)
        return &callbacks;
    if (script_takes(mode))
        return &taking_callbacks;
    if (strcmp(mode, "pauses") == 0 || strcmp(mode, "leaves") == 0)
        return &pausing_callbacks;
    return strcmp(mode, "mute") == 0 ? &no_callbacks : &callbacks;
}

struct script *script_new(const struct cox_worker_options *options, const struct script_host *host)
{
    struct script *script = calloc(1, sizeof *script);
    COX_ASSERT(script);
    script->options = *options;
    script->host = host;
    pthread_mutex_init(&script->lock, NULL);
    return script;
}

struct script *script_free(struct script *script)
{
    pthread_mutex_destroy(&script->lock);
    free(script->words);
    free(script->part);
    free(script);
    return NULL;
}

void script_set_worker(struct script *script, struct cox_worker *worker)
{
    script->worker = worker;
}
