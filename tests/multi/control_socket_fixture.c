#include "control_socket_fixture.h"

struct host host;
int host_fds[COX_HELLO_FD_COUNT_MAX];
struct cox_control_socket *control_socket;
char runtime_dir[64];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

void host_lock(void)
{
    pthread_mutex_lock(&lock);
}

void host_unlock(void)
{
    pthread_mutex_unlock(&lock);
}

/* ---- hooks ---- */

static void count(uint32_t *counter)
{
    pthread_mutex_lock(&lock);
    (*counter)++;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static int host_admit(void *context, const struct cox_control_client *client, struct cox_error *err)
{
    (void)context;
    pthread_mutex_lock(&lock);
    host.last = *client;
    int r = host.refuse ? cox_fail(err, host.refuse, "%s", host.reason) : 0;
    pthread_mutex_unlock(&lock);
    count(&host.admitted);
    return r;
}

static int host_worker(void *context, const struct cox_control_client *client,
                       struct cox_control_socket_reply *reply, struct cox_error *err)
{
    (void)context;
    const struct cox_hello *hello = &client->hello;
    pthread_mutex_lock(&lock);
    uint32_t rank =
        hello->rank == COX_HELLO_RANK_ANY ? host.workers % host.rank_count : hello->rank;
    bool fits = hello->rank_count == 0 || hello->rank_count == host.rank_count;
    if (fits) {
        reply->hello_reply = (struct cox_hello_reply){.attach = COX_ATTACH_SEALED,
                                                      .rank = rank,
                                                      .rank_count = host.rank_count,
                                                      .incarnation = 1,
                                                      .group_incarnation = 77};
        memcpy(reply->fds, host_fds, sizeof host_fds);
        reply->fd_count = host.fd_count;
    }
    pthread_mutex_unlock(&lock);
    if (!fits)
        return cox_fail(err, COX_DIVERGED, "the group has %u ranks, not %u", host.rank_count,
                        hello->rank_count);
    count(&host.workers);
    return 0;
}

static void host_worker_gone(void *context, const struct cox_control_client *client)
{
    (void)context;
    pthread_mutex_lock(&lock);
    if (host.gone < COX_RANK_COUNT_MAX)
        host.gone_id[host.gone] = client->id;
    host.last = *client;
    pthread_mutex_unlock(&lock);
    count(&host.gone);
}

/* Says back what it hears, until the other side closes; on a thread that blocks on the stream. */
static void *echo_main(void *argument)
{
    int fd = (int)(intptr_t)argument;
    char bytes[64];
    ssize_t size;
    while ((size = read(fd, bytes, sizeof bytes)) > 0)
        if (write(fd, bytes, (size_t)size) != size)
            break;
    close(fd);
    count(&host.commands);
    return NULL;
}

static int host_command(void *context, const struct cox_control_client *client, int fd,
                        struct cox_error *err)
{
    pthread_t thread;
    (void)context;
    (void)client;
    host_lock();
    int r = host.refuse_command;
    host_unlock();
    if (r)
        return cox_fail(err, r, "not now");
    if (fcntl(fd, F_GETFL) & O_NONBLOCK)
        return cox_fail(err, COX_STATE, "it does not block");
    if (pthread_create(&thread, NULL, echo_main, (void *)(intptr_t)fd))
        return cox_fail(err, -EAGAIN, "no thread");
    pthread_detach(thread);
    HOST(host.echoes++);
    return 0;
}

const struct cox_control_socket_hooks host_hooks = {.admit = host_admit,
                                                    .worker = host_worker,
                                                    .worker_gone = host_worker_gone,
                                                    .command = host_command};

static void host_log(void *context, int level, const char *text)
{
    (void)context;
    (void)level;
    pthread_mutex_lock(&lock);
    size_t used = strlen(host.log);
    snprintf(host.log + used, sizeof host.log - used, "%s\n", text);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* ---- what they saw ---- */

struct cox_control_client last_client(void)
{
    struct cox_control_client client;
    HOST(client = host.last);
    return client;
}

uint32_t read_count(const uint32_t *counter)
{
    pthread_mutex_lock(&lock);
    uint32_t value = *counter;
    pthread_mutex_unlock(&lock);
    return value;
}

static bool wait_changed(const struct timespec *until)
{
    return pthread_cond_timedwait(&changed, &lock, until) == 0;
}

static struct timespec in_a_minute(void)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 60;
    return until;
}

void await_count(const uint32_t *counter, uint32_t wanted)
{
    struct timespec until = in_a_minute();
    pthread_mutex_lock(&lock);
    while (*counter < wanted && wait_changed(&until))
        continue;
    uint32_t value = *counter;
    pthread_mutex_unlock(&lock);
    assert_true(value >= wanted);
}

bool in_log(const char *text)
{
    pthread_mutex_lock(&lock);
    const bool found = strstr(host.log, text);
    pthread_mutex_unlock(&lock);
    return found;
}

void await_log(const char *text)
{
    struct timespec until = in_a_minute();
    pthread_mutex_lock(&lock);
    while (!strstr(host.log, text) && wait_changed(&until))
        continue;
    bool found = strstr(host.log, text);
    pthread_mutex_unlock(&lock);
    if (!found)
        fail_msg("'%s' is not in the log:\n%s", text, host.log);
}

void await_fds(int wanted)
{
    uint64_t deadline_ns = PATIENCE;
    int count;
    /* Counted once a round: a killed client's connection may be accepted after a right count. */
    while ((count = fd_count()) != wanted && cox_now_ns() < deadline_ns)
        sched_yield();
    assert_int_equal(count, wanted);
}

int runtime_dir_count(void)
{
    DIR *dir = opendir(runtime_dir);
    int entries = 0;
    if (!dir)
        return 0;
    for (struct dirent *e; (e = readdir(dir));)
        entries += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    closedir(dir);
    return entries;
}

/* ---- the control socket ---- */

int socket_setup(void **state)
{
    static int number;
    snprintf(runtime_dir, sizeof runtime_dir, "/tmp/coxt%d_%d", (int)getpid(), number++);
    memset(&host, 0, sizeof host);
    host.rank_count = 4;
    host.fd_count = 4;
    for (uint32_t i = 0; i < COX_HELLO_FD_COUNT_MAX; i++) {
        host_fds[i] = memfd_create("test", MFD_CLOEXEC);
        assert_true(host_fds[i] >= 0);
        assert_int_equal(pwrite(host_fds[i], &i, sizeof i, 0), sizeof i);
    }
    return leak_setup(state);
}

int open_setup(void **state)
{
    int r = socket_setup(state);
    socket_start(NULL);
    return r;
}

int socket_teardown(void **state)
{
    char command[128];
    socket_stop();
    await_count(&host.commands, host.echoes); /* each closes its fd when it hears of the end */
    int r = leak_teardown(state);
    for (uint32_t i = 0; i < COX_HELLO_FD_COUNT_MAX; i++)
        close(host_fds[i]);
    snprintf(command, sizeof command, "rm -rf %s", runtime_dir);
    return r ? r : system(command);
}

struct cox_control_socket_options host_options(const char *name)
{
    return (struct cox_control_socket_options){
        .name = name, .runtime_dir = runtime_dir, .hello_ms = 60000, .log = {.fn = host_log}};
}

void socket_start(const struct cox_control_socket_options *options)
{
    struct cox_control_socket_options own = host_options("test");
    assert_null(control_socket);
    assert_ok(cox_control_socket_open(options ? options : &own, &host_hooks, &control_socket,
                                      test_err()));
}

void socket_stop(void)
{
    control_socket = cox_control_socket_close(control_socket);
}

/* ---- clients ---- */

struct client {
    void (*fn)(void *context);
    void *context;
};

static void client_main(void *context)
{
    const struct client *client = context;
    /* The control socket's, and ends of other connections, which would not end with the test's. */
    for (int fd = 3; fd < 1024; fd++) {
        struct stat st;
        if (fstat(fd, &st) == 0 && S_ISSOCK(st.st_mode))
            close(fd);
    }
    client->fn(client->context);
}

pid_t client_start(void (*fn)(void *context), void *context)
{
    struct client client = {fn, context};
    return child_start(client_main, &client);
}

void client_run(void (*fn)(void *context), void *context)
{
    child_join(client_start(fn, context));
}

struct cox_hello worker_hello(void)
{
    return (struct cox_hello){.role = COX_HELLO_WORKER, .rank = COX_HELLO_RANK_ANY};
}

int connect_as(enum cox_hello_role role, struct cox_control_connection *ret_session)
{
    const struct cox_hello hello = {.role = role,
                                    .rank = role == COX_HELLO_WORKER ? COX_HELLO_RANK_ANY : 0};
    return cox_control_socket_connect(cox_control_socket_path(control_socket), &hello, PATIENCE,
                                      ret_session, test_err());
}

int raw_connect(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, (const struct sockaddr *)&address, sizeof address) < 0)
        cox_close_fd(&fd);
    return fd;
}

int raw_client(void)
{
    return raw_connect(cox_control_socket_path(control_socket));
}

int raw_reply(int fd, char *text)
{
    uint8_t head[3], rest[COX_HELLO_SIZE];
    int fds[COX_HELLO_FD_COUNT_MAX];
    uint32_t fd_count = 0;
    int r = cox_socket_receive(fd, head, 1, fds, COX_HELLO_FD_COUNT_MAX, &fd_count, PATIENCE);
    for (uint32_t i = 0; r == 0 && i < fd_count; i++)
        close(fds[i]);
    if (r)
        return -r;
    if (head[0] == 1)
        return cox_socket_receive(fd, rest, 127, NULL, 0, NULL, PATIENCE);
    r = cox_socket_receive(fd, head + 1, 2, NULL, 0, NULL, PATIENCE);
    if (r == 0 && head[2])
        r = cox_socket_receive(fd, rest, head[2], NULL, 0, NULL, PATIENCE);
    if (r)
        return -r;
    if (text) {
        memcpy(text, rest, head[2]);
        text[head[2]] = '\0';
    }
    return head[1];
}

void raw_refused(int fd, int code, const char *text)
{
    char said[256];
    assert_int_equal(raw_reply(fd, said), code);
    assert_contains(said, text);
    close(fd);
}

bool fd_says(int fd, uint32_t number)
{
    uint32_t value;
    return pread(fd, &value, sizeof value, 0) == sizeof value && value == number;
}
