#include "holder.h"

#include "held.h"

#include "channel/base/idioms.h"
#include "channel/socket/closer.h"
#include "channel/socket/socket.h"
#include "channel/socket/socket_file.h"

#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>

#define IDLE_MS 10000
/* Each has one fd, and weights that it puts another one. */
#define CONNECTION_MAX 4096
/* Between attempts where this process has no fd left. */
#define ACCEPT_MS 100

enum { POLL_SIGNAL, POLL_LISTEN, POLL_WATCH, POLL_FIXED };

struct connection {
    /* first, so that a user is its connection */
    struct cox_weights_user user;
    int fd;
    /* that has come with what was received; -1: none */
    int sent_fd;
    uint32_t received;
    uint8_t request[COX_WEIGHTS_REQUEST_SIZE];
};

struct holder {
    struct cox_held held;
    struct cox_socket_file file;
    struct cox_closer *closer;
    int signal_fd;
    struct connection **connections;
    struct pollfd *polls;
    uint32_t count;
    /* no fd was left for a connection: until then none is accepted */
    uint64_t accept_ns;
};

/* ---- answers ---- */

static uint64_t number_at(const uint8_t *bytes, uint32_t size)
{
    uint64_t number = 0;
    for (uint32_t i = size; i-- > 0;)
        number = number << 8 | bytes[i];
    return number;
}

/* A client that does not read its answers is not waited for: its connection ends. */
static void send_answer(const struct connection *c, int status, uint32_t memory, int fd,
                        uint64_t count)
{
    uint8_t bytes[COX_WEIGHTS_ANSWER_SIZE] = {0};
    const uint32_t code = (uint32_t)(status < 0 ? COX_NO_SPACE : status);
    for (uint32_t i = 0; i < 8; i++) {
        bytes[i] = (uint8_t)(i < 4 ? code >> 8 * i : memory >> 8 * (i - 4));
        bytes[8 + i] = (uint8_t)(count >> 8 * i);
    }
    if (cox_socket_send(c->fd, bytes, sizeof bytes, &fd, fd >= 0, 0))
        shutdown(c->fd, SHUT_RDWR); /* its end is seen in the next turn */
}

static void answer(void *context, struct cox_weights_user *user, int status,
                   const struct cox_weights_image *image)
{
    (void)context;
    send_answer((const struct connection *)user, status, image->memory, image->fd, image->bytes);
}

static void close_image(void *context, int *fd)
{
    const struct holder *holder = context;
    cox_closer_give(holder->closer, fd);
}

/* Memory with the list; it is read by mapping or pread. Returns 0 or -errno. */
static int list_open(const struct cox_held *held, int *ret_fd)
{
    json_t *list = cox_held_list(held);
    char *text = list ? json_dumps(list, JSON_COMPACT) : NULL;
    _cox_cleanup_(cox_close_fd) int fd = memfd_create("cox_weights_list", MFD_CLOEXEC);
    json_decref(list);
    int r = text ? 0 : -ENOMEM;
    if (r == 0 && fd < 0)
        r = -errno;
    if (r == 0 && write(fd, text, strlen(text)) != (ssize_t)strlen(text))
        r = -ENOSPC;
    free(text);
    if (r == 0)
        *ret_fd = cox_steal_fd(&fd);
    return r;
}

static void serve_list(const struct holder *holder, const struct connection *c)
{
    _cox_cleanup_(cox_close_fd) int fd = -1;
    int r = list_open(&holder->held, &fd);
    send_answer(c, r, 0, fd, holder->held.count);
}

struct request {
    enum cox_weights_op op;
    uint64_t keep_ms;
    /* of a put; its fd is the connection's */
    struct cox_weights_image image;
    char key[COX_WEIGHTS_KEY_SIZE + 1];
};

/* False: the bytes are no request. */
static bool request_parse(const struct connection *c, struct request *ret_request)
{
    const uint8_t *bytes = c->request;
    struct request *request = ret_request;
    request->op = (enum cox_weights_op)number_at(bytes, 4);
    request->keep_ms = number_at(bytes + 8, 8);
    request->image =
        (struct cox_weights_image){.memory = (enum cox_weights_memory)number_at(bytes + 4, 4),
                                   .fd = c->sent_fd,
                                   .bytes = number_at(bytes + 16, 8)};
    memcpy(request->key, bytes + 32, COX_WEIGHTS_KEY_SIZE);
    request->key[COX_WEIGHTS_KEY_SIZE] = '\0';
    const bool is_put = request->op == COX_WEIGHTS_PUT;
    const bool is_device = is_put && request->image.memory == COX_WEIGHTS_CUDA;
    bool right = is_device || (request->image.memory == 0 && request->image.bytes == 0);
    right = right && number_at(bytes + 24, 8) == 0;
    for (size_t i = strlen(request->key); i < COX_WEIGHTS_KEY_SIZE; i++)
        right = right && request->key[i] == '\0';
    const bool needs_key = is_put || request->op == COX_WEIGHTS_GET;
    return right && (request->key[0] || !needs_key) && is_put == (c->sent_fd >= 0);
}

/* Serves the request that c has. */
static void serve(struct holder *holder, struct connection *c)
{
    struct cox_weights_image image = {.fd = -1};
    struct request request;
    int r = COX_INVALID;
    if (request_parse(c, &request))
        switch (request.op) {
        case COX_WEIGHTS_GET:
            r = cox_held_get(&holder->held, &c->user, request.key, request.keep_ms, &image);
            if (r == COX_BUSY)
                return;
            break;
        case COX_WEIGHTS_PUT:
            r = cox_held_put(&holder->held, &c->user, request.key, request.keep_ms, &request.image);
            c->sent_fd = request.image.fd;
            image.memory = request.image.memory;
            image.bytes = request.image.bytes;
            break;
        case COX_WEIGHTS_DROP:
            image.bytes = cox_held_drop(&holder->held, request.key);
            r = 0;
            break;
        case COX_WEIGHTS_LIST:
            serve_list(holder, c);
            return;
        }
    answer(NULL, &c->user, r, &image);
}

/* ---- connections ---- */

static void connection_close(struct holder *holder, uint32_t index)
{
    struct connection *c = holder->connections[index];
    cox_held_leave(&holder->held, &c->user);
    cox_closer_give(holder->closer, &c->sent_fd);
    cox_closer_hang_up(holder->closer, &c->fd);
    holder->connections[index] = holder->connections[--holder->count];
    free(c);
}

static void connection_add(struct holder *holder)
{
    struct cox_socket_peer peer;
    _cox_cleanup_(cox_close_fd) int fd = -1;
    if (cox_socket_accept(holder->file.listen_fd, 0, &fd)) {
        holder->accept_ns = cox_deadline_after_ms(ACCEPT_MS);
        return;
    }
    if (holder->count == CONNECTION_MAX || cox_socket_read_peer(fd, &peer) ||
        (peer.uid != geteuid() && peer.uid != 0))
        return;
    struct connection *c = calloc(1, sizeof *c);
    if (!c)
        return;
    c->fd = cox_steal_fd(&fd);
    c->sent_fd = -1;
    holder->connections[holder->count++] = c;
}

/* Returns 0, or that the connection is to be closed. */
static int connection_read(struct holder *holder, struct connection *c)
{
    size_t size = 0;
    int fd = -1;
    int r = cox_closer_receive(c->fd, c->request + c->received, sizeof c->request - c->received,
                               &size, &fd);
    if (r == COX_EMPTY)
        return 0;
    if (fd >= 0 && c->sent_fd < 0)
        c->sent_fd = cox_steal_fd(&fd);
    cox_closer_give(holder->closer, &fd);
    if (r || size == 0)
        return COX_CLOSED;
    c->received += (uint32_t)size;
    if (c->received < sizeof c->request)
        return 0;
    c->received = 0;
    /* One that waits for an answer may not ask for more. */
    const bool is_early = c->user.waits;
    if (!is_early)
        serve(holder, c);
    cox_closer_give(holder->closer, &c->sent_fd);
    return is_early ? COX_CLOSED : 0;
}

/* ---- run ---- */

static int poll_once(struct holder *holder, uint64_t deadline_ns)
{
    const uint64_t now_ns = cox_now_ns();
    holder->polls[POLL_SIGNAL] = (struct pollfd){holder->signal_fd, POLLIN, 0};
    const bool accepts = now_ns >= holder->accept_ns;
    holder->polls[POLL_LISTEN] = (struct pollfd){accepts ? holder->file.listen_fd : -1, POLLIN, 0};
    if (!accepts)
        deadline_ns = cox_deadline_min(deadline_ns, holder->accept_ns);
    holder->polls[POLL_WATCH] = (struct pollfd){holder->file.watch_fd, POLLIN, 0};
    for (uint32_t i = 0; i < holder->count; i++)
        holder->polls[POLL_FIXED + i] = (struct pollfd){holder->connections[i]->fd, POLLIN, 0};
    uint64_t wait_ms = 60000;
    if (deadline_ns <= now_ns)
        wait_ms = 0;
    else if (deadline_ns - now_ns < wait_ms * COX_NSEC_PER_MSEC)
        wait_ms = (deadline_ns - now_ns) / COX_NSEC_PER_MSEC + 1;
    const int ready = poll(holder->polls, POLL_FIXED + holder->count, (int)wait_ms);
    return ready < 0 && errno != EINTR ? -errno : 0;
}

/* From the last to the first: one that is closed is replaced by the last. */
static void serve_all(struct holder *holder)
{
    for (uint32_t i = holder->count; i-- > 0;)
        if (holder->polls[POLL_FIXED + i].revents &&
            connection_read(holder, holder->connections[i]))
            connection_close(holder, i);
    if (holder->polls[POLL_WATCH].revents)
        cox_socket_file_changed(&holder->file);
    if (holder->polls[POLL_LISTEN].revents)
        connection_add(holder);
}

static int serve_until_end(struct holder *holder, bool stay)
{
    uint64_t idle_ns = cox_deadline_after_ms(IDLE_MS);
    for (;;) {
        uint64_t deadline_ns = cox_held_turn(&holder->held);
        deadline_ns = cox_deadline_min(deadline_ns, cox_socket_file_turn(&holder->file));
        deadline_ns = cox_deadline_min(deadline_ns, cox_closer_turn(holder->closer));
        if (stay || holder->held.count > 0 || holder->count > 0)
            idle_ns = cox_deadline_after_ms(IDLE_MS);
        else if (cox_now_ns() >= idle_ns)
            return 0;
        else
            deadline_ns = cox_deadline_min(deadline_ns, idle_ns);
        int r = poll_once(holder, deadline_ns);
        if (r || holder->polls[POLL_SIGNAL].revents)
            return r;
        serve_all(holder);
    }
}

static int signals_open(int *ret_fd)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGHUP);
    sigprocmask(SIG_BLOCK, &set, NULL);
    *ret_fd = signalfd(-1, &set, SFD_CLOEXEC);
    return *ret_fd < 0 ? -errno : 0;
}

static int holder_open(struct holder *holder, struct cox_error *err)
{
    static const struct cox_log no_log;
    char runtime_dir[COX_SOCKET_PATH_SIZE];
    struct rlimit limit;
    int r = cox_runtime_dir_default(runtime_dir, err);
    if (r)
        return r;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
    holder->connections = calloc(CONNECTION_MAX, sizeof *holder->connections);
    holder->polls = calloc(POLL_FIXED + CONNECTION_MAX, sizeof *holder->polls);
    r = holder->connections && holder->polls ? cox_closer_new(&holder->closer) : -ENOMEM;
    if (r == 0)
        r = signals_open(&holder->signal_fd);
    if (r)
        return cox_fail(err, r, "the holder of weights: %s", cox_status_text(r));
    cox_socket_file_init(&holder->file, holder->closer, &no_log);
    return cox_socket_file_open(&holder->file, COX_WEIGHTS_NAME, runtime_dir, err);
}

static void holder_close(struct holder *holder)
{
    while (holder->count > 0)
        connection_close(holder, holder->count - 1);
    cox_held_deinit(&holder->held);
    if (holder->file.closer)
        cox_socket_file_close(&holder->file);
    cox_closer_free(holder->closer);
    cox_close_fd(&holder->signal_fd);
    free(holder->connections);
    free(holder->polls);
}

int cox_holder_run(bool stay, const struct cox_notify *notify, struct cox_error *err)
{
    struct holder holder = {.held = {.answer = answer, .close = close_image, .context = &holder},
                            .signal_fd = -1};
    int r = holder_open(&holder, err);
    if (r == 0) {
        cox_notify_send(notify, "READY=1");
        r = serve_until_end(&holder, stay);
        if (r)
            cox_fail(err, r, "the holder of weights: %s", cox_status_text(r));
    }
    holder_close(&holder);
    return r;
}
