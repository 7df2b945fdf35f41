#include "ranks.h"

#include "channel/base/idioms.h"
#include "channel/base/peer.h"
#include "channel/base/thread.h"
#include "channel/shm/fd_bundle.h"
#include "channel/shm/region.h"
#include "channel/socket/socket.h"
#include "worker/loop/worker_internal.h"
#include "script_take.h"
#include "testing.h"

/* What a relay hands over: standard output and error, then the memory of the group that it has
 * inherited. */
#define HELLO_FD_COUNT 2
#define HELLO_FD_COUNT_MAX (HELLO_FD_COUNT + COX_FD_BUNDLE_COUNT)
/* Above what tests open, and below their limit. */
#define MEMORY_FD_FIRST 256
#define MEMORY_FD_END 1000

struct rank {
    struct rank *next;
    struct ranks_hello hello;
    struct script_host host;
    int err_fd;
    pthread_t thread;
    /* under lock; NULL before and after it exists */
    struct cox_worker *worker;
    /* under lock: the group is gone */
    bool released;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t released = PTHREAD_COND_INITIALIZER;
static struct rank *ranks; /* under lock */
static int listen_fd = -1, stop_fd = -1;
static pthread_t greeter;

bool ranks_are_threads(void)
{
    const char *how = getenv("COX_TEST_RANKS");
    return how && strcmp(how, "threads") == 0;
}

static socklen_t ranks_address(struct sockaddr_un *address, pid_t pid)
{
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    /* The first byte stays zero: a name that is no file. */
    int length = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "cox_ranks_%jd",
                          (intmax_t)pid);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

/* ---- what the relay says ---- */

int ranks_connect(pid_t parent_pid, const struct ranks_hello *hello)
{
    const uint32_t memory_count = hello->options.fd_count;
    int fds[HELLO_FD_COUNT_MAX] = {STDOUT_FILENO, STDERR_FILENO};
    COX_ASSERT(memory_count <= COX_FD_BUNDLE_COUNT);
    for (uint32_t i = 0; i < memory_count; i++)
        fds[HELLO_FD_COUNT + i] = hello->options.fd_first + (int)i;
    struct sockaddr_un address;
    socklen_t length = ranks_address(&address, parent_pid);
    _cox_cleanup_(cox_close_fd) int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (const struct sockaddr *)&address, length) < 0)
        return -errno;
    int r = cox_socket_send(fd, hello, sizeof *hello, fds, HELLO_FD_COUNT + memory_count,
                            cox_deadline_after_ms(TEST_PATIENCE_MS));
    return r ? (r < 0 ? r : -EPIPE) : cox_steal_fd(&fd);
}

/* Moves fds to numbers in a row, as a process inherits them. Only the greeter makes numbers that
 * high, and no number again soon. Returns the first one. */
static int fds_in_a_row(const int *fds, uint32_t count)
{
    static int next = MEMORY_FD_FIRST;
    int first = next;
    for (int fd = first; fd < first + (int)count; fd++) {
        if (fd >= MEMORY_FD_END)
            fd = first = MEMORY_FD_FIRST;
        if (fcntl(fd, F_GETFD) >= 0)
            first = fd + 1;
    }
    next = first + (int)count;
    for (uint32_t i = 0; i < count; i++) {
        COX_ASSERT(dup3(fds[i], first + (int)i, O_CLOEXEC) >= 0);
        close(fds[i]);
    }
    return first;
}

/* False: it died before it said anything. */
static bool rank_greet(struct rank *rank, int fd)
{
    int fds[HELLO_FD_COUNT_MAX];
    uint32_t count = 0;
    struct cox_worker_options *options = &rank->hello.options;
    if (cox_socket_receive(fd, &rank->hello, sizeof rank->hello, fds, HELLO_FD_COUNT_MAX, &count,
                           cox_deadline_after_ms(TEST_PATIENCE_MS)))
        return false;
    COX_ASSERT(count == HELLO_FD_COUNT + options->fd_count);
    options->fd_first = fds_in_a_row(fds + HELLO_FD_COUNT, options->fd_count);
    rank->host.pid = rank->hello.pid;
    rank->host.relay_fd = fd;
    rank->host.out_fd = fds[0];
    rank->err_fd = fds[1];
    return true;
}

/* ---- one rank ---- */

static void rank_park(void *context)
{
    struct rank *rank = context;
    pthread_mutex_lock(&lock);
    while (!rank->released)
        pthread_cond_wait(&released, &lock);
    pthread_mutex_unlock(&lock);
}

/* With a worker, ranks_join can stop it. */
static void rank_set_worker(struct rank *rank, struct cox_worker *worker)
{
    pthread_mutex_lock(&lock);
    rank->worker = worker;
    if (worker && rank->released)
        cox_worker_stop(worker);
    pthread_mutex_unlock(&lock);
}

static int rank_serve(struct rank *rank, struct script *script, struct cox_error *err)
{
    struct cox_worker_identity self = {.pid = rank->hello.pid};
    struct cox_worker *worker = NULL;
    int r = cox_peer_start_time(self.pid, &self.start);
    if (r)
        return cox_fail(err, r, "its relay: %s", cox_status_text(r));
    /* Its control socket is closed while it may still be parked: that must not end the whole
     * program. */
    rank->hello.options.on_orphan = COX_ORPHAN_RETURN;
    rank->hello.options.notify_fd = 0; /* the number of an fd of the relay */
    r = cox_worker_new_as(&self, &rank->hello.options, script_callbacks(rank->hello.mode), script,
                          &worker, err);
    if (r)
        return r;
    script_set_worker(script, worker);
    rank_set_worker(rank, worker);
    r = script_run(script, rank->hello.mode, worker, rank->host.out_fd, err);
    rank_set_worker(rank, NULL);
    cox_worker_free(worker);
    return r;
}

static void *rank_main(void *argument)
{
    struct rank *rank = argument;
    struct cox_error err = {0};
    struct script *script = script_new(&rank->hello.options, &rank->host);
    int r = rank_serve(rank, script, &err);
    script_free(script);
    /* A process that is refused leaves them to its end. */
    for (uint32_t i = 0; r && i < rank->hello.options.fd_count; i++)
        close(rank->hello.options.fd_first + (int)i);
    if (r)
        dprintf(rank->err_fd, "rank %" PRIu32 ": %s\n", rank->hello.options.rank, err.text);
    cox_close_fd(&rank->host.out_fd);
    cox_close_fd(&rank->err_fd);
    const struct script_order leave = {.what = SCRIPT_EXIT, .value = r != 0};
    send(rank->host.relay_fd, &leave, sizeof leave, MSG_NOSIGNAL);
    return NULL;
}

static void rank_new(int fd)
{
    struct rank *rank = calloc(1, sizeof *rank);
    COX_ASSERT(rank);
    rank->host =
        (struct script_host){.out_fd = -1, .relay_fd = -1, .park = rank_park, .context = rank};
    if (!rank_greet(rank, fd)) {
        close(fd);
        free(rank);
        return;
    }
    pthread_mutex_lock(&lock);
    rank->next = ranks;
    ranks = rank;
    COX_ASSERT(cox_thread_start(&rank->thread, rank_main, rank) == 0);
    pthread_mutex_unlock(&lock);
}

/* ---- all of them ---- */

/* Without it, which is outside of the testing build, ThreadSanitizer sees less. */
static void ranks_share_mappings(bool share)
{
#if COX_TESTING
    cox_region_share_mappings(share);
#else
    (void)share;
#endif
}

static void *greeter_main(void *argument)
{
    (void)argument;
    for (;;) {
        struct pollfd fds[2] = {{.fd = listen_fd, .events = POLLIN},
                                {.fd = stop_fd, .events = POLLIN}};
        poll(fds, 2, -1);
        if (fds[1].revents)
            return NULL;
        int fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC);
        if (fd >= 0)
            rank_new(fd);
    }
}

void ranks_start(void)
{
    if (listen_fd >= 0)
        return;
    struct sockaddr_un address;
    socklen_t length = ranks_address(&address, getpid());
    ranks_share_mappings(true);
    stop_fd = eventfd(0, EFD_CLOEXEC);
    listen_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    COX_ASSERT(stop_fd >= 0 && listen_fd >= 0);
    COX_ASSERT(bind(listen_fd, (const struct sockaddr *)&address, length) == 0);
    COX_ASSERT(listen(listen_fd, COX_RANK_COUNT_MAX) == 0);
    COX_ASSERT(cox_thread_start(&greeter, greeter_main, NULL) == 0);
}

/* A group that was refused its name has the prefix of a live one. */
static bool rank_is_of(const struct rank *rank, const char *prefix)
{
    struct pollfd relay = {.fd = rank->host.relay_fd};
    return strcmp(rank->hello.options.prefix, prefix) == 0 && poll(&relay, 1, 0) > 0 &&
           relay.revents & POLLHUP;
}

/* prefix NULL: any. Taken off the list. */
static struct rank *ranks_take(const char *prefix)
{
    struct rank *rank = NULL;
    pthread_mutex_lock(&lock);
    for (struct rank **link = &ranks; *link; link = &(*link)->next) {
        if (prefix && !rank_is_of(*link, prefix))
            continue;
        rank = *link;
        *link = rank->next;
        rank->released = true;
        pthread_cond_broadcast(&released);
        if (rank->worker)
            cox_worker_stop(rank->worker);
        break;
    }
    pthread_mutex_unlock(&lock);
    return rank;
}

void ranks_join(const char *prefix)
{
    for (struct rank *rank; (rank = ranks_take(prefix)) != NULL; free(rank)) {
        pthread_join(rank->thread, NULL);
        cox_close_fd(&rank->host.relay_fd);
    }
}

void ranks_stop(void)
{
    if (listen_fd < 0)
        return;
    const uint64_t one = 1;
    COX_ASSERT(write(stop_fd, &one, sizeof one) == (ssize_t)sizeof one);
    pthread_join(greeter, NULL);
    ranks_join(NULL);
    cox_close_fd(&stop_fd);
    cox_close_fd(&listen_fd);
    ranks_share_mappings(false);
}
