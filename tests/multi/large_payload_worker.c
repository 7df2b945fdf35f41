/*
 * large_payload_worker: the worker of large_payload_test.c. An opaque request is a line of words,
 * and whatever bytes come behind it:
 *
 *   sum                 a digest of the whole request
 *   where               what /proc/self/maps says of the memory that the request lies in:
 *                       "PERMISSIONS INODE NAME"
 *   size N [DIGEST]     N bytes (large_payload_bytes.h), behind a digest of the request if there is
 *   a second
 *                       word
 *   grow N M            asks for room for N bytes, and replies M
 *   again N M           asks for N bytes, then for M, and replies M
 *   hold PATH           a digest; reads a byte from a named pipe; tells whether the digest is still
 *                       the same
 *   late PATH N         the same, and then N bytes
 *   die                 is killed where it reads the request
 *   half N              is killed when half of N bytes are written
 *   limit N             asks for N bytes where no file may be as large, tells what it gets, and its
 *                       limit is as before
 *   forge HOW           replies behind the library's back
 *   only R LINE         rank R obeys, the others reply with a digest
 *
 * An init has a value "blob" in its configuration, of which the reply has a digest, and "answer",
 * how many letters it is to have.
 */
#include "channel/base/peer.h"
#include "channel/handle/handle_internal.h"
#include "channel/shm/reply.h"
#include "proto/executor.pb-c.h"
#include "proto/large_payload_ref.h"
#include "proto/wire.h"
#include "worker/loop/worker_internal.h"
#include "large_payload_bytes.h"
#include "tests/lib/posix.h"

struct call {
    const uint8_t *request;
    size_t size;
    uint8_t *reply;
    size_t capacity;
    size_t *ret_size;
    struct cox_error *err;
};

static struct cox_worker *worker;
static struct cox_worker_options options = COX_WORKER_OPTIONS_INIT;

static int reply_text(const struct call *c, const char *text)
{
    *c->ret_size = strlen(text);
    memcpy(c->reply, text, *c->ret_size);
    return 0;
}

static int reply_digest(const struct call *c, const char *words)
{
    char text[32];
    (void)words;
    snprintf(text, sizeof text, "%016" PRIx64, payload_digest(c->request, c->size));
    return reply_text(c, text);
}

static int reply_where(const struct call *c, const char *words)
{
    (void)words;
    char line[512], reply[512] = "nowhere";
    FILE *maps = fopen("/proc/self/maps", "re");
    while (maps && fgets(line, sizeof line, maps)) {
        uintptr_t begin, end, at = (uintptr_t)c->request;
        char permissions[8], name[256] = "";
        uint64_t inode;
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %7s %*s %*s %" SCNu64 " %255[^\n]", &begin,
                   &end, permissions, &inode, name) >= 4 &&
            begin <= at && at < end)
            snprintf(reply, sizeof reply, "%s %" PRIu64 " %s", permissions, inode, name);
    }
    if (maps)
        fclose(maps);
    return reply_text(c, reply);
}

/* Room for so many bytes, wherever. */
static int room(const struct call *c, size_t size, uint8_t **ret_reply)
{
    *ret_reply = c->reply;
    return size > c->capacity ? cox_worker_reply_grow(worker, size, ret_reply, c->err) : 0;
}

static int reply_size(const struct call *c, const char *words)
{
    size_t size = 0;
    char second[16] = "";
    uint8_t *reply;
    sscanf(words, "size %zu %15s", &size, second);
    size_t head = second[0] ? sizeof(uint64_t) : 0;
    int r = room(c, head + size, &reply);
    if (r)
        return r;
    uint64_t digest = payload_digest(c->request, c->size);
    memcpy(reply, &digest, head);
    payload_fill(reply + head, size, options.rank);
    *c->ret_size = head + size;
    return 0;
}

static int reply_grow(const struct call *c, const char *words)
{
    size_t first = 0, second = 0;
    uint8_t *reply;
    sscanf(words, "%*s %zu %zu", &first, &second);
    int r = cox_worker_reply_grow(worker, first, &reply, c->err);
    if (r == 0)
        memset(reply, 0xee, first);
    if (r == 0 && words[0] == 'a')
        r = cox_worker_reply_grow(worker, second, &reply, c->err);
    if (r)
        return r;
    payload_fill(reply, second, options.rank);
    *c->ret_size = second;
    return 0;
}

static void await_pipe(const char *path)
{
    char byte;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = read(fd, &byte, 1);
    (void)got;
    close(fd);
}

static int reply_late(const struct call *c, const char *words)
{
    char path[256] = "";
    size_t size = 0;
    uint64_t before = payload_digest(c->request, c->size);
    sscanf(words, "%*s %255s %zu", path, &size);
    printf("holds\n");
    fflush(stdout);
    await_pipe(path);
    if (payload_digest(c->request, c->size) != before)
        return reply_text(c, "changed");
    if (size == 0)
        return reply_text(c, "same");
    uint8_t *reply;
    int r = room(c, size, &reply);
    if (r)
        return r;
    payload_fill(reply, size, options.rank);
    *c->ret_size = size;
    return 0;
}

static int reply_half(const struct call *c, const char *words)
{
    size_t size = 0;
    uint8_t *reply;
    sscanf(words, "half %zu", &size);
    int r = room(c, size, &reply);
    if (r)
        return r;
    payload_fill(reply, size / 2, options.rank);
    raise(SIGKILL);
    return 0;
}

static int reply_limit(const struct call *c, const char *words)
{
    struct rlimit usual, low = {.rlim_cur = 1 << 20};
    size_t size = 0;
    uint8_t *reply;
    char text[32];
    sscanf(words, "limit %zu", &size);
    getrlimit(RLIMIT_FSIZE, &usual);
    low.rlim_max = usual.rlim_max;
    setrlimit(RLIMIT_FSIZE, &low);
    struct cox_error why = {0};
    int r = cox_worker_reply_grow(worker, size, &reply, &why);
    setrlimit(RLIMIT_FSIZE, &usual);
    snprintf(text, sizeof text, "%d", r);
    return reply_text(c, text);
}

static int reply_death(const struct call *c, const char *words)
{
    (void)c, (void)words;
    return raise(SIGKILL);
}

/* ---- lies ---- */

static int make_memfd(size_t size, unsigned seals)
{
    int fd = memfd_create("forged", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0 || ftruncate(fd, (off_t)size) < 0 || (seals && fcntl(fd, F_ADD_SEALS, seals) < 0))
        abort();
    return fd;
}

/* What HOW falsifies in the handle. Returns false: nothing. */
static bool forge_handle(const char *how, struct cox_large_payload_ref *ref)
{
    struct cox_handle_info info;
    if (cox_handle_parse(&ref->handle, &info, NULL))
        abort();
    if (strcmp(how, "pid") == 0) {
        info.pid = (uint32_t)getppid();
        cox_peer_start_time(getppid(), &info.start);
    } else if (strcmp(how, "start") == 0) {
        info.start++;
    } else if (strcmp(how, "offset") == 0) {
        info.offset = 4096;
        info.size -= 4096;
    } else if (strcmp(how, "system") == 0) {
        info.system ^= 1;
    } else if (strcmp(how, "fd") == 0) {
        info.fd = 4000;
    } else if (strcmp(how, "beyond") == 0) {
        info.size *= 4;
        ref->size *= 3;
    } else {
        return false;
    }
    cox_handle_format(&info, &ref->handle);
    return true;
}

/* In place of the memory: another object, and the size that is said of it; 0: that of the memory.
 */
static const struct {
    const char *how, *path; /* NULL: a memfd */
    int flags;              /* or its seals */
    size_t size;
    uint64_t said;
} objects[] = {
    {"unsealed", NULL, 0, 1 << 20, 0},
    {"shrinks", NULL, F_SEAL_GROW, 1 << 20, 0},
    {"file", "/proc/self/exe", O_RDONLY, 0, 0},
    {"device", "/dev/zero", O_RDWR, 0, 0},
    {"large", NULL, F_SEAL_SHRINK | F_SEAL_GROW, 1 << 26, 1 << 26},
    {"holes", NULL, F_SEAL_SHRINK | F_SEAL_GROW, 1 << 20, 1 << 20}, /* not forged: not written */
};

static bool forge_object(const char *how, struct cox_large_payload_ref *ref)
{
    static struct cox_exporter *exporter;
    for (size_t i = 0; i < sizeof objects / sizeof *objects; i++) {
        if (strcmp(how, objects[i].how) != 0)
            continue;
        int fd = objects[i].path ? open(objects[i].path, objects[i].flags | O_CLOEXEC)
                                 : make_memfd(objects[i].size, (unsigned)objects[i].flags);
        if ((!exporter && cox_exporter_new(NULL, &exporter, NULL)) ||
            cox_exporter_export(exporter, fd, 0, 0, &ref->handle, NULL))
            abort();
        ref->size = objects[i].said ? objects[i].said : ref->size;
        return true;
    }
    return false;
}

/* Falsifies the reference as HOW says. Returns how many bytes of the handle are given. */
static size_t forge(const char *how, struct cox_large_payload_ref *ref)
{
    if (forge_object(how, ref) || forge_handle(how, ref))
        return sizeof ref->handle.bytes;
    if (strcmp(how, "garbage") == 0)
        memset(ref->handle.bytes, 0x5a, sizeof ref->handle.bytes);
    else if (strcmp(how, "crc") == 0)
        ref->handle.bytes[63] ^= 1;
    else if (strcmp(how, "size") == 0)
        ref->size = UINT64_C(1) << 40;
    else if (strcmp(how, "all") == 0)
        ref->size = UINT64_MAX;
    else if (strcmp(how, "zero") == 0)
        ref->size = 0;
    else if (strcmp(how, "short") == 0)
        return sizeof ref->handle.bytes - 1;
    else if (strcmp(how, "none") == 0)
        return 0;
    else if (strcmp(how, "nonsense") != 0)
        abort();
    return sizeof ref->handle.bytes;
}

/* Then waits until the coordinator has looked: what the library sends afterwards is not seen. */
static int reply_forged(const struct call *c, const char *words)
{
    char how[16] = "";
    sscanf(words, "forge %15s", how);
    struct cox_channel_thread *thread = &worker->threads[COX_CHANNEL_EXECUTE];
    const struct cox_layout_channel_state *shared =
        cox_state_channel(&worker->control, COX_CHANNEL_EXECUTE);
    const uint64_t sequence = thread->taken;
    uint8_t *large;
    int r = cox_channel_thread_reserve_payload(thread, sequence, 1 << 20, &large, c->err);
    if (r)
        return r;
    memset(large, 0xff, 1 << 20);
    struct cox_large_payload_ref ref = cox_channel_thread_refer_payload(thread, sequence, 1 << 20);
    const size_t told = forge(how, &ref);
    Coxswain__LargePayloadRef reference;
    Coxswain__ExecuteResponse response = COXSWAIN__EXECUTE_RESPONSE__INIT;
    cox_large_payload_ref_fill(&reference, &ref);
    reference.handle.len = told;
    reference.has_handle = told > 0;
    response.large_payload = &reference;
    size_t capacity, length;
    uint8_t *slot = cox_reply_slot(&thread->channel, options.rank, sequence, false, &capacity);
    if (cox_wire_response_pack(&response, slot, capacity, &length))
        abort();
    cox_reply_commit(&thread->channel, options.rank, sequence, length, true);
    cox_state_set_done(thread->line, sequence);
    cox_gate_reply(&thread->channel.gate, options.rank, sequence, false);
    while (cox_state_ended(shared) < sequence && !cox_state_aborted(&worker->control))
        sched_yield();
    return reply_text(c, "forged");
}

/* ---- callbacks ---- */

static const struct {
    const char *word;
    int (*reply)(const struct call *c, const char *words);
} commands[] = {{"sum", reply_digest},    {"where", reply_where}, {"size ", reply_size},
                {"grow ", reply_grow},    {"again ", reply_grow}, {"hold ", reply_late},
                {"late ", reply_late},    {"half ", reply_half},  {"limit ", reply_limit},
                {"forge ", reply_forged}, {"die", reply_death}};

static int obey(const struct call *c, const char *words)
{
    if (strncmp(words, "only ", 5) == 0) {
        char *next;
        unsigned long rank = strtoul(words + 5, &next, 10);
        return rank == options.rank ? obey(c, next + 1) : reply_digest(c, words);
    }
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        if (strncmp(words, commands[i].word, strlen(commands[i].word)) == 0)
            return commands[i].reply(c, words);
    return cox_fail(c->err, COX_INVALID, "no command '%s'", words);
}

static int on_opaque(void *context, const uint8_t *request, size_t request_size, uint8_t *reply,
                     size_t reply_capacity, size_t *ret_reply_size, struct cox_error *err)
{
    (void)context;
    const struct call call = {request, request_size, reply, reply_capacity, ret_reply_size, err};
    char words[512] = "";
    for (size_t i = 0; i < request_size && i < sizeof words - 1 && request[i] != '\n'; i++)
        words[i] = (char)request[i];
    return obey(&call, words);
}

static int on_init(void *context, const struct cox_init_request *request,
                   struct cox_init_result *result, struct cox_error *err)
{
    (void)context;
    static char *text;
    const char *blob = cox_init_request_get(request, "blob");
    const char *count = cox_init_request_get(request, "answer");
    size_t size = count ? strtoull(count, NULL, 10) : 0;
    free(text);
    text = malloc(size + 1);
    if (!text)
        return cox_fail(err, -ENOMEM, "no memory for a reply");
    memset(text, 'a' + (int)options.rank, size);
    text[size] = '\0';
    result->early_stopping_ids = size ? text : NULL;
    result->npu_block_count = 1;
    result->max_position_embeddings = blob ? (int64_t)(payload_digest(blob, strlen(blob)) >> 1) : 0;
    return 0;
}

int main(int argc, char **argv)
{
    static const struct cox_worker_callbacks callbacks = {
        .size = sizeof(struct cox_worker_callbacks), .init = on_init, .opaque = on_opaque};
    struct cox_error err = {0};
    int r = cox_worker_options_parse(&options, &argc, argv, &err);
    if (r == 0 && argc > 1 && strcmp(argv[1], "nofdstore") == 0)
        options.fd_store[0] = '\0';
    if (r == 0)
        r = cox_worker_new(&options, &callbacks, NULL, &worker, &err);
    if (r == 0)
        r = cox_worker_run(worker, &err);
    cox_worker_free(worker);
    if (r)
        fprintf(stderr, "rank %" PRIu32 ": %s\n", options.rank, err.text);
    return r != 0;
}
