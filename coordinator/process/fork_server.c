#include "fork_server.h"

#include "channel/base/base_internal.h"
#include "channel/base/peer.h"
#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/socket/socket.h"

#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* Forking takes milliseconds; a server that has not answered by then is stopped or stuck. */
#define PATIENCE_MS 10000

/* As _internal/fork_server.py packs and unpacks them. */
struct request_message {
    uint32_t version;
    uint32_t rank;
    /* behind those that every request has */
    uint32_t fd_count;
};
#define REQUEST_VERSION 1
/* answers, working directory, environment, standard output and error */
#define REQUEST_FD_COUNT 5

enum answer_kind {
    ANSWER_REFUSED = 0, /* text says why */
    ANSWER_BORN = 1,    /* the worker exists, and is about to lose its parent */
    ANSWER_READY = 2,
};
struct answer {
    int32_t kind;
    int32_t pid;
    int32_t parent;
    char text[500];
};

/* The subreaper flag is the whole process's. */
static pthread_mutex_t ask_lock = PTHREAD_MUTEX_INITIALIZER;

/* Writes the environment into a memfd, each variable with its NUL. */
static int environment_fd(char *const *environment, int *ret_fd)
{
    _cox_cleanup_(cox_close_fd) int fd = memfd_create("coxswain_environment", MFD_CLOEXEC);
    if (fd < 0)
        return -errno;
    int r = cox_fd_raise(&fd);
    for (size_t i = 0; r == 0 && environment[i]; i++) {
        size_t size = strlen(environment[i]) + 1, done = 0;
        while (r == 0 && done < size) {
            ssize_t written = write(fd, environment[i] + done, size - done);
            if (written >= 0)
                done += (size_t)written;
            else if (errno != EINTR)
                r = -errno;
        }
    }
    if (r == 0)
        *ret_fd = cox_steal_fd(&fd);
    return r;
}

static int request_send(const struct cox_fork_request *request, int answer_fd, uint64_t deadline_ns)
{
    _cox_cleanup_(cox_close_fd) int variables_fd = -1;
    _cox_cleanup_(cox_close_fd) int folder_fd = open(".", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (folder_fd < 0)
        return -errno;
    int r = environment_fd(request->environment, &variables_fd);
    if (r)
        return r;
    int fds[REQUEST_FD_COUNT + COX_FORK_SERVER_FD_COUNT_MAX] = {
        answer_fd, folder_fd, variables_fd, request->stream_fds[0], request->stream_fds[1]};
    COX_ASSERT(request->fd_count <= COX_FORK_SERVER_FD_COUNT_MAX);
    for (uint32_t i = 0; i < request->fd_count; i++)
        fds[REQUEST_FD_COUNT + i] = request->fds[i];
    const struct request_message message = {
        .version = REQUEST_VERSION, .rank = request->rank, .fd_count = request->fd_count};
    r = cox_socket_send(request->server_fd, &message, sizeof message, fds,
                        REQUEST_FD_COUNT + request->fd_count, deadline_ns);
    cox_fault_point(COX_FAULT_LAUNCH_ASKED);
    return r;
}

static bool is_child(int pidfd)
{
    siginfo_t info;
    return waitid(P_PIDFD, (id_t)pidfd, &info, WEXITED | WNOHANG | WNOWAIT) == 0;
}

/* Reaps a process that this one has inherited; of others nothing is done. kill: it may live. */
static void orphan_reap(pid_t pid, bool kill)
{
    _cox_cleanup_(cox_close_fd) int pidfd = pid > 1 ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;
    if (pidfd < 0 || !is_child(pidfd))
        return;
    if (kill)
        syscall(SYS_pidfd_send_signal, pidfd, SIGKILL, NULL, 0);
    siginfo_t info;
    while (waitid(P_PIDFD, (id_t)pidfd, &info, kill ? WEXITED : WEXITED | WNOHANG) < 0 &&
           errno == EINTR)
        ;
    cox_fault_point(COX_FAULT_LAUNCH_UNDONE);
}

/* Opens the worker, which must be a child of this process, and has it run. */
static int worker_open(int answer_fd, pid_t pid, bool mark, int *ret_pidfd, struct cox_error *err)
{
    _cox_cleanup_(cox_close_fd) int pidfd = pid > 1 ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;
    if (pidfd < 0 || !is_child(pidfd))
        return cox_fail(err, COX_CORRUPT, "it names pid %d, which is no child of this process",
                        pid);
    int r = cox_fd_raise(&pidfd);
    if (r == 0 && mark)
        r = cox_peer_lower_mark(pid); /* as the exec of a rank sets it */
    if (r)
        return cox_fail(err, r, "%s", cox_status_text(r));
    cox_fault_point(COX_FAULT_LAUNCH_ADOPTED);
    r = cox_socket_send(answer_fd, "", 1, NULL, 0, 0);
    if (r)
        return cox_fail(err, r, "the process that it forked has ended");
    *ret_pidfd = cox_steal_fd(&pidfd);
    return 0;
}

/* Hears answers until the worker is ready. ret_born: what is to be undone after a failure. */
static int answers_hear(int answer_fd, uint64_t deadline_ns, struct answer *ret_born,
                        struct answer *ret_ready, struct cox_error *err)
{
    for (;;) {
        struct answer answer;
        int r = cox_socket_receive(answer_fd, &answer, sizeof answer, NULL, 0, NULL, deadline_ns);
        if (r == COX_TIMEOUT)
            return cox_fail(err, r, "it did not answer within %d s", PATIENCE_MS / 1000);
        if (r)
            return cox_fail(err, r, "it has ended");
        answer.text[sizeof answer.text - 1] = '\0';
        if (answer.kind == ANSWER_REFUSED)
            return cox_fail(err, COX_DENIED, "%s", answer.text);
        if (answer.kind != ANSWER_BORN && answer.kind != ANSWER_READY)
            return cox_fail(err, COX_CORRUPT, "it answers in another version of the protocol");
        *(answer.kind == ANSWER_BORN ? ret_born : ret_ready) = answer;
        if (answer.kind == ANSWER_READY)
            return 0;
    }
}

/* As the subreaper. */
static int server_ask(const struct cox_fork_request *request, pid_t *ret_pid, int *ret_pidfd,
                      struct cox_error *err)
{
    int pair[2];
    int r = cox_socket_pair(pair);
    if (r)
        return cox_fail(err, r, "%s", cox_status_text(r));
    _cox_cleanup_(cox_close_fd) int answer_fd = pair[0];
    const uint64_t deadline_ns = cox_deadline_after_ms(PATIENCE_MS);
    struct answer born = {0}, ready = {0};
    r = request_send(request, pair[1], deadline_ns);
    cox_close_fd(&pair[1]);
    if (r)
        cox_fail(err, r, "it cannot be asked: %s", cox_status_text(r));
    else
        r = answers_hear(answer_fd, deadline_ns, &born, &ready, err);
    if (r == 0)
        r = worker_open(answer_fd, ready.pid, request->mark, ret_pidfd, err);
    if (r == 0) {
        *ret_pid = ready.pid;
        /* Its end is what made the worker ready. The server reaps it, unless it is dead. */
        orphan_reap(ready.parent, false);
        return 0;
    }
    cox_close_fd(&answer_fd); /* a worker that waits for GO ends */
    orphan_reap(born.pid, true);
    orphan_reap(born.parent, true);
    if (r != COX_DENIED)
        shutdown(request->server_fd, SHUT_RDWR);
    return r;
}

int cox_fork_server_ask(const struct cox_fork_request *request, pid_t *ret_pid, int *ret_pidfd,
                        struct cox_error *err)
{
    pthread_mutex_lock(&ask_lock);
    int before = 0;
    int r = prctl(PR_GET_CHILD_SUBREAPER, &before) == 0 &&
                    (before || prctl(PR_SET_CHILD_SUBREAPER, 1) == 0)
                ? 0
                : -errno;
    if (r)
        cox_fail(err, r, "this process cannot inherit its workers: %s", cox_status_text(r));
    else
        r = server_ask(request, ret_pid, ret_pidfd, err);
    if (!before)
        prctl(PR_SET_CHILD_SUBREAPER, 0);
    pthread_mutex_unlock(&ask_lock);
    cox_fault_point(COX_FAULT_LAUNCH_FORKED);
    return r;
}
