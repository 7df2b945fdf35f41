#include "script_take.h"

#include "channel/base/idioms.h"
#include "proto/executor.pb-c.h"
#include "tests/lib/posix.h"

#include <coxswain/worker.h>

#define KEPT_MAX 32
#define TEXT_SIZE 256
/* For replies that do not fit their slot. */
#define BUFFER_SIZE (4u << 20)

struct kept {
    uint64_t sequence;
    char text[TEXT_SIZE];
};

/* Of a request that was replied to. */
struct copy {
    uint8_t *bytes;
    size_t size;
    uint8_t letter;
};

struct take {
    struct script *script;
    struct cox_worker *worker;
    /* what the requests are obeyed by */
    const struct cox_worker_callbacks *obey;
    int out_fd;
    uint8_t *buffer;
    struct kept kept[KEPT_MAX];
    uint32_t kept_count;
    struct copy copies[KEPT_MAX];
    uint32_t copy_count;
    /* what came of the last `twice` */
    char told[sizeof((struct cox_error *)0)->text + 16];
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* requests that were taken and obeyed; under lock, as the rest */
    uint64_t obeyed_count;
    bool ended;
    /* when the replies of `later` are due */
    uint64_t late_at;
    pthread_t late;
    bool has_late;
};

bool script_takes(const char *mode)
{
    return strcmp(mode, "takes") == 0 || (!mode[0] && getenv("COX_TEST_TAKES"));
}

static void must(int r, const struct cox_error *err)
{
    if (r == 0)
        return;
    fprintf(stderr, "script_take: %d %s\n", r, err->text);
    abort();
}

static void reply_text(struct take *take, uint64_t sequence, const char *text)
{
    struct cox_error err = {0};
    must(cox_worker_reply(take->worker, sequence, text, strlen(text), &err), &err);
}

/* ---- what is kept ---- */

static void keep(struct take *take, uint64_t sequence, const char *text)
{
    struct kept *kept = &take->kept[take->kept_count++];
    kept->sequence = sequence;
    snprintf(kept->text, sizeof kept->text, "%s", text);
}

static void release_reverse(struct take *take)
{
    for (uint32_t i = take->kept_count; i > 0; i--)
        reply_text(take, take->kept[i - 1].sequence, take->kept[i - 1].text);
}

static void release_forward(struct take *take)
{
    for (uint32_t i = 0; i < take->kept_count; i++)
        reply_text(take, take->kept[i].sequence, take->kept[i].text);
}

static void *late_main(void *argument)
{
    struct take *take = argument;
    pthread_mutex_lock(&take->lock);
    while (take->obeyed_count < take->late_at && !take->ended)
        pthread_cond_wait(&take->changed, &take->lock);
    const bool ended = take->ended;
    pthread_mutex_unlock(&take->lock);
    if (!ended)
        release_forward(take);
    take->kept_count = 0;
    return NULL;
}

static void command_release(struct take *take, uint64_t sequence, const char *order)
{
    char count[16];
    snprintf(count, sizeof count, "%" PRIu32, take->kept_count);
    if (strcmp(order, "later") == 0) {
        keep(take, sequence, count);
        pthread_mutex_lock(&take->lock);
        take->late_at = take->obeyed_count + 2; /* this command, and the one behind it */
        pthread_mutex_unlock(&take->lock);
        must(-pthread_create(&take->late, NULL, late_main, take), &(struct cox_error){0});
        take->has_late = true;
        return;
    }
    if (strcmp(order, "first") == 0)
        reply_text(take, sequence, count);
    if (strcmp(order, "forward") == 0)
        release_forward(take);
    else
        release_reverse(take);
    if (strcmp(order, "first") != 0)
        reply_text(take, sequence, count);
    take->kept_count = 0;
}

/* ---- check ---- */

struct poker {
    struct take *take;
    pthread_t target;
    _Atomic bool done;
    int r;
};

/* Looks until the other one is inside, and wakes it. */
static void *wake_main(void *argument)
{
    struct poker *poker = argument;
    struct cox_worker *worker = poker->take->worker;
    struct cox_worker_request request;
    do
        poker->r = cox_worker_next(worker, COX_CHANNEL_EXECUTE, 0, &request, NULL);
    while (poker->r == COX_TIMEOUT);
    cox_worker_wake(worker, COX_CHANNEL_EXECUTE);
    return NULL;
}

static void *signal_main(void *argument)
{
    struct poker *poker = argument;
    while (!atomic_load(&poker->done)) {
        pthread_kill(poker->target, SIGUSR1);
        /* The pace: one that comes just before the wait does not end it, so they go on. */
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    return NULL;
}

static void on_signal(int number)
{
    (void)number;
}

/* The code with which a next without a deadline ends, while the other thread does what it can. */
static int next_beside(struct take *take, void *(*beside)(void *), int *ret_r)
{
    struct poker poker = {.take = take, .target = pthread_self()};
    struct cox_worker_request request;
    pthread_t thread;
    must(-pthread_create(&thread, NULL, beside, &poker), &(struct cox_error){0});
    int r = cox_worker_next(take->worker, COX_CHANNEL_EXECUTE, COX_DEADLINE_NEVER, &request, NULL);
    /* Where it got in first, this one was refused. */
    while (beside == wake_main && r == COX_BUSY)
        r = cox_worker_next(take->worker, COX_CHANNEL_EXECUTE, COX_DEADLINE_NEVER, &request, NULL);
    atomic_store(&poker.done, true);
    pthread_join(thread, NULL);
    if (ret_r)
        *ret_r = poker.r;
    return r;
}

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition))                                                                          \
            return "not so: " #condition;                                                          \
    } while (0)

static const char *check_replies(struct take *take, uint64_t own)
{
    struct cox_worker *worker = take->worker;
    struct cox_error err = {0};
    struct cox_init_result result;
    cox_init_result_init(&result);
    EXPECT(cox_worker_reply(worker, own + 1, "x", 1, &err) == COX_STATE);
    EXPECT(strstr(err.text, "was not taken"));
    EXPECT(cox_worker_reply(worker, 0, "x", 1, &err) == COX_STATE);
    EXPECT(cox_worker_reply_error(worker, own + 1, COX_REJECTED, "x", NULL, 0, &err) == COX_STATE);
    EXPECT(cox_worker_reply_error(worker, own, 0, "x", NULL, 0, &err) == COX_INVALID);
    EXPECT(cox_worker_reply_step(worker, own, NULL, NULL, 0, &err) == COX_INVALID);
    EXPECT(strstr(err.text, "an opaque request"));
    EXPECT(cox_worker_reply_init(worker, own, &result, &err) == COX_INVALID);
    return NULL;
}

static const char *check(struct take *take, uint64_t own)
{
    struct cox_worker *worker = take->worker;
    struct cox_worker_request request;
    struct cox_error err = {0};
    sigset_t set;
    int other, r;
    EXPECT(cox_worker_start(worker, 0, &err) == COX_BUSY);
    EXPECT(cox_worker_next(worker, COX_CHANNEL_LINK, 0, &request, &err) == COX_STATE);
    EXPECT(cox_worker_next(worker, COX_CHANNEL_ERROR, 0, &request, &err) == COX_INVALID);
    EXPECT(cox_worker_next(worker, COX_CHANNEL_EXECUTE, 0, &request, &err) == COX_TIMEOUT);
    const uint64_t soon = cox_deadline_after_ms(2);
    EXPECT(cox_worker_next(worker, COX_CHANNEL_EXECUTE, soon, &request, &err) == COX_TIMEOUT);
    EXPECT(cox_now_ns() >= soon);
    cox_worker_wake(worker, COX_CHANNEL_EXECUTE);
    r = cox_worker_next(worker, COX_CHANNEL_EXECUTE, COX_DEADLINE_NEVER, &request, &err);
    EXPECT(r == COX_EMPTY);
    EXPECT(cox_worker_next(worker, COX_CHANNEL_EXECUTE, 0, &request, &err) == COX_TIMEOUT);
    r = next_beside(take, wake_main, &other);
    EXPECT(r == COX_EMPTY);
    EXPECT(other == COX_BUSY);
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    pthread_sigmask(SIG_UNBLOCK, &set, NULL);
    sigaction(SIGUSR1, &(struct sigaction){.sa_handler = on_signal}, NULL);
    EXPECT(next_beside(take, signal_main, NULL) == -EINTR);
    return check_replies(take, own);
}

/* ---- copies ---- */

/* "copy LETTER..." of a frame, or out of line: then the copy is kept, and all earlier ones are what
 * they were. */
static const char *check_copy(struct take *take, const struct cox_worker_request *request)
{
    struct cox_worker_request other = *request;
    struct cox_error err = {0};
    void *bytes = NULL;
    other.sequence++;
    EXPECT(cox_worker_copy_request(take->worker, &other, &bytes, &err) == COX_STATE);
    EXPECT(strstr(err.text, "was not taken"));
    const int r = cox_worker_copy_request(take->worker, request, &bytes, &err);
    if (r == COX_EMPTY) {
        EXPECT(!bytes && strstr(err.text, "lies in its frame"));
        return "in its frame";
    }
    must(r, &err);
    struct copy *copy = &take->copies[take->copy_count++];
    *copy = (struct copy){bytes, request->size, request->bytes[5]};
    EXPECT(memcmp(bytes, request->bytes, request->size) == 0);
    copy->bytes[0] = '!';
    EXPECT(request->bytes[0] == 'c');
    EXPECT(cox_worker_complete_copy(bytes) == 0);
    for (uint32_t i = 0; i < take->copy_count; i++) {
        copy = &take->copies[i];
        EXPECT(copy->bytes[0] == '!');
        for (size_t at = 5; at < copy->size; at++)
            EXPECT(copy->bytes[at] == copy->letter);
    }
    return NULL;
}

/* ---- the loop ---- */

static void command_cancelled(struct take *take, uint64_t sequence)
{
    if (!cox_worker_cancelled(take->worker, COX_CHANNEL_EXECUTE, sequence))
        dprintf(take->out_fd, "alive\n");
    /* By contract nothing wakes a thread that asks. */
    while (!cox_worker_cancelled(take->worker, COX_CHANNEL_EXECUTE, sequence))
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    reply_text(take, sequence, "too late");
    dprintf(take->out_fd, "cancelled\n");
}

static void command_twice(struct take *take, uint64_t sequence, const char *text)
{
    struct cox_error err = {0};
    reply_text(take, sequence, text);
    const int r = cox_worker_reply(take->worker, sequence, text, strlen(text), &err);
    snprintf(take->told, sizeof take->told, "%d %s", r, err.text);
}

/* True: the command is one of this file's. */
static bool obey_here(struct take *take, const struct cox_worker_request *request)
{
    char text[TEXT_SIZE], verb[16] = "";
    int used = 0;
    const size_t length = request->size < sizeof text - 1 ? request->size : sizeof text - 1;
    memcpy(text, request->bytes, length);
    text[length] = '\0';
    sscanf(text, "%15s%n", verb, &used);
    const char *rest = text + used + (text[used] == ' ');
    if (strcmp(verb, "keep") == 0)
        keep(take, request->sequence, rest);
    else if (strcmp(verb, "release") == 0)
        command_release(take, request->sequence, rest);
    else if (strcmp(verb, "twice") == 0)
        command_twice(take, request->sequence, rest);
    else if (strcmp(verb, "told") == 0)
        reply_text(take, request->sequence, take->told);
    else if (strcmp(verb, "cancelled") == 0)
        command_cancelled(take, request->sequence);
    else if (strcmp(verb, "leave") == 0)
        cox_worker_stop(take->worker);
    else if (strcmp(verb, "wake") == 0) {
        cox_worker_wake(take->worker, COX_CHANNEL_LINK); /* which is not taken */
        reply_text(take, request->sequence, "ok");
    } else if (strcmp(verb, "check") == 0) {
        const char *wrong = check(take, request->sequence);
        reply_text(take, request->sequence, wrong ? wrong : "ok");
    } else if (strcmp(verb, "copy") == 0) {
        const char *wrong = check_copy(take, request);
        reply_text(take, request->sequence, wrong ? wrong : "ok");
    } else
        return false;
    return true;
}

static void obey_opaque(struct take *take, const struct cox_worker_request *request)
{
    struct cox_error why = {0}, err = {0};
    /* What is long comes from elsewhere, and goes out of line where it does not fit the slot. */
    const bool long_reply = request->size > 5 && memcmp(request->bytes, "size ", 5) == 0;
    uint8_t *place = long_reply ? take->buffer : request->reply;
    const size_t room = long_reply ? BUFFER_SIZE : request->reply_capacity;
    size_t size = 0;
    int r =
        take->obey->opaque(take->script, request->bytes, request->size, place, room, &size, &why);
    if (r == 0 && size > room)
        r = cox_fail(&why, COX_TOO_LARGE,
                     "the reply has %zu bytes, there is room for %zu: cox_worker_reply_grow makes "
                     "more",
                     size, room);
    if (r)
        must(cox_worker_reply_error(take->worker, request->sequence, r, why.text, NULL, 0, &err),
             &err);
    else
        must(cox_worker_reply(take->worker, request->sequence, place, size, &err), &err);
}

static void obey_typed(struct take *take, const struct cox_worker_request *request)
{
    struct cox_error why = {0}, err = {0};
    struct cox_init_result result;
    struct cox_worker *worker = take->worker;
    struct cox_worker_request other;
    must(cox_worker_next(worker, COX_CHANNEL_EXECUTE, 0, &other, NULL) == COX_BUSY ? 0 : COX_STATE,
         &why);
    cox_init_result_init(&result);
    int r = request->batch
                ? take->obey->execute(take->script, request->batch, request->outputs, &why)
                : take->obey->init(take->script, request->init, &result, &why);
    if (r)
        must(cox_worker_reply_error(worker, request->sequence, r, why.text, NULL, 0, &err), &err);
    else if (!request->batch) {
        r = cox_worker_reply_init(worker, request->sequence, &result, &err);
        if (r == COX_TOO_LARGE) /* it is lent still */
            r = cox_worker_reply_error(worker, request->sequence, r, err.text, NULL, 0, NULL);
        must(r, &err);
    } else
        must(cox_worker_reply_step(worker, request->sequence, NULL, NULL, request->batch->row_count,
                                   &err),
             &err);
}

static int take_loop(struct take *take, struct cox_error *err)
{
    struct cox_worker_request request;
    int r;
    while ((r = cox_worker_next(take->worker, COX_CHANNEL_EXECUTE, COX_DEADLINE_NEVER, &request,
                                err)) == 0 ||
           r == -EINTR) {
        if (r == -EINTR)
            continue;
        if (request.type != COX_TYPE_OPAQUE)
            obey_typed(take, &request);
        else if (!obey_here(take, &request))
            obey_opaque(take, &request);
        pthread_mutex_lock(&take->lock);
        take->obeyed_count++;
        pthread_cond_broadcast(&take->changed);
        pthread_mutex_unlock(&take->lock);
    }
    dprintf(take->out_fd, "next: %d %s\n", r, err->text);
    pthread_mutex_lock(&take->lock);
    take->ended = true;
    pthread_cond_broadcast(&take->changed);
    pthread_mutex_unlock(&take->lock);
    if (take->has_late)
        pthread_join(take->late, NULL);
    return r == COX_CLOSED || r == COX_PEER_DEAD ? 0 : r;
}

int script_run(struct script *script, const char *mode, struct cox_worker *worker, int out_fd,
               struct cox_error *err)
{
    if (!script_takes(mode))
        return cox_worker_run(worker, err);
    struct take *take = calloc(1, sizeof *take);
    COX_ASSERT(take);
    take->script = script;
    take->worker = worker;
    take->obey = script_callbacks("obey");
    take->out_fd = out_fd;
    take->buffer = malloc(BUFFER_SIZE);
    COX_ASSERT(take->buffer);
    pthread_mutex_init(&take->lock, NULL);
    pthread_cond_init(&take->changed, NULL);
    int r = cox_worker_start(worker, COX_WORKER_TAKES(COX_CHANNEL_EXECUTE), err);
    if (r == 0)
        r = take_loop(take, err);
    if (r == 0)
        r = cox_worker_join(worker, err);
    for (uint32_t i = 0; i < take->copy_count; i++)
        cox_worker_free_copy(take->copies[i].bytes);
    pthread_cond_destroy(&take->changed);
    pthread_mutex_destroy(&take->lock);
    free(take->buffer);
    free(take);
    return r;
}
