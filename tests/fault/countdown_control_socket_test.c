/* A control socket, a connection at one, and fds left there, with each of their calls failing in
 * turn.
 */
#include "channel/handle/fd_store.h"
#include "channel/handle/handle_internal.h"
#include "channel/socket/control_socket.h"
#include "channel/socket/socket.h"
#include "countdown.h"
#include "testing.h"

static char runtime_dir[64];
static char path[100]; /* of the helper's control socket */

static struct cox_control_socket_options options_of(const char *name)
{
    return (struct cox_control_socket_options){
        .name = name, .runtime_dir = runtime_dir, .client_max = 4};
}

/* Only what is there before may be there. */
static void expect_files(size_t wanted)
{
    DIR *dir = opendir(runtime_dir);
    size_t count = 0;
    for (struct dirent *e; dir && (e = readdir(dir));)
        count += e->d_name[0] != '.';
    if (dir)
        closedir(dir);
    assert_int_equal(count, wanted);
}

static void leave_a_dead_socket(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s/dead.sock", runtime_dir);
    unlink(address.sun_path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(fd, (const struct sockaddr *)&address, sizeof address), 0);
    close(fd);
}

/* ---- the control socket ---- */

static int socket_open(void *object, struct cox_error *err)
{
    static const struct cox_control_socket_hooks none = {.context = NULL};
    struct cox_control_socket_options options = options_of("own");
    return cox_control_socket_open(&options, &none, object, err);
}

DESTROY(socket_close, cox_control_socket_close(*(struct cox_control_socket **)object))

static void without_runtime_dir(void)
{
    rmdir(runtime_dir);
}

static void with_closed_runtime_dir(void)
{
    rmdir(runtime_dir);
    assert_int_equal(mkdir(runtime_dir, 0), 0);
}

static void with_dead_socket(void)
{
    mkdir(runtime_dir, 0700);
    leave_a_dead_socket();
}

/* Whether it was swept is another's test. */
static void dead_socket_away(void)
{
    char dead[100];
    snprintf(dead, sizeof dead, "%s/dead.sock", runtime_dir);
    unlink(dead);
    expect_files(0);
}

static void nothing_left(void)
{
    expect_files(0);
}

CONSTRUCT(socket_sweep, cox_control_socket_sweep(runtime_dir, object, err))

/* ---- a name of one's own ---- */

static char named[100];

static void with_runtime_dir(void)
{
    mkdir(runtime_dir, 0700);
    snprintf(named, sizeof named, "%s/named", runtime_dir);
}

CONSTRUCT(name_listen, cox_socket_listen(named, object, err))

static void name_drop(void *object)
{
    close(*(int *)object);
    assert_int_equal(cox_socket_unlink(named, NULL), 0);
}

static int listening = -1;

static void with_listener(void)
{
    with_runtime_dir();
    assert_int_equal(cox_socket_listen(named, &listening, NULL), 0);
}

static void without_listener(void)
{
    cox_close_fd(&listening);
    assert_int_equal(cox_socket_unlink(named, NULL), 0);
    expect_files(0);
}

CONSTRUCT(name_connect,
          cox_socket_connect(named, cox_deadline_after_ms(TEST_PATIENCE_MS), object, err))
DESTROY(connection_close, close(*(int *)object))

/* ---- connections, at a control socket of another process ---- */

static struct test_helper helper;

static int worker_hook(void *context, const struct cox_control_client *client,
                       struct cox_control_socket_reply *reply, struct cox_error *err)
{
    (void)client;
    (void)err;
    reply->hello_reply.rank_count = 2;
    for (reply->fd_count = 0; reply->fd_count < 8; reply->fd_count++)
        reply->fds[reply->fd_count] = *(int *)context;
    return 0;
}

static int serve(const char *where)
{
    int file = memfd_create("test", MFD_CLOEXEC);
    struct cox_control_socket_hooks hooks = {.context = &file, .worker = worker_hook};
    struct cox_control_socket_options options = options_of("other");
    struct cox_control_socket *control_socket;
    char byte = 'x';
    snprintf(runtime_dir, sizeof runtime_dir, "%s", where);
    if (file < 0 || cox_control_socket_open(&options, &hooks, &control_socket, NULL) ||
        write(STDOUT_FILENO, &byte, 1) != 1)
        return 1;
    while (read(STDIN_FILENO, &byte, 1) > 0)
        continue;
    cox_control_socket_close(control_socket);
    return 0;
}

static int connection(void *object, struct cox_error *err)
{
    struct cox_hello hello = {.role = COX_HELLO_WORKER, .rank = COX_HELLO_RANK_ANY};
    return cox_control_socket_connect(path, &hello, cox_deadline_after_ms(TEST_PATIENCE_MS), object,
                                      err);
}

static void connect_end(void *object)
{
    struct cox_control_connection *session = object;
    assert_int_equal(session->fd_count, 8);
    cox_control_connection_close(session);
}

static struct cox_handle handle_of(int fd)
{
    struct cox_handle handle = {{0, 0, 0, COX_HANDLE_MEMORY}};
    struct stat st;
    assert_int_equal(fstat(fd, &st), 0);
    for (int i = 0; i < 8; i++) {
        handle.bytes[4 + i % 4] = (uint8_t)((uint32_t)getpid() >> (8 * (i % 4)));
        handle.bytes[28 + i % 4] = (uint8_t)((uint32_t)st.st_dev >> (8 * (i % 4)));
        handle.bytes[32 + i] = (uint8_t)((uint64_t)st.st_ino >> (8 * i));
    }
    return handle;
}

static int own_file = -1;
static struct cox_handle own_handle;

/* Leaves a file, and fetches it. */
static int exchange(void *object, struct cox_error *err)
{
    uint64_t deadline_ns = cox_deadline_after_ms(TEST_PATIENCE_MS);
    struct cox_fd_store fd_store = {.fd = -1};
    int fd = -1;
    int r = cox_fd_store_connect(&fd_store, path, deadline_ns, err);
    if (r == 0)
        r = cox_fd_store_put(&fd_store, &own_handle, own_file, deadline_ns, err);
    if (r == 0)
        r = cox_fd_store_get(&fd_store, &own_handle, deadline_ns, &fd, err);
    if (r == 0)
        *(int *)object = fd;
    cox_fd_store_close(&fd_store);
    return r;
}

static void exchange_end(void *object)
{
    struct stat st, own;
    assert_int_equal(fstat(*(int *)object, &st) | fstat(own_file, &own), 0);
    assert_int_equal(st.st_ino, own.st_ino);
    close(*(int *)object);
}

DESTROY(fd_end, close(*(int *)object))

static int exporter_new(void *object, struct cox_error *err)
{
    const struct cox_exporter_options options = {.size = sizeof(struct cox_exporter_options),
                                                 .socket_path = path,
                                                 .deadline_ms = TEST_PATIENCE_MS};
    return cox_exporter_new(&options, object, err);
}

DESTROY(exporter_free, cox_exporter_free(*(struct cox_exporter **)object))

static struct cox_exporter *exporter;
static struct cox_handle exported;

static void exporter_prepare(void)
{
    assert_int_equal(exporter_new(&exporter, NULL), 0);
    assert_int_equal(cox_exporter_export(exporter, own_file, 0, 0, &exported, NULL), 0);
}

/* No memory, which would be opened by /proc whatever the control socket says. */
static void exporter_prepare_other(void)
{
    int fd = eventfd(0, EFD_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(exporter_new(&exporter, NULL), 0);
    assert_int_equal(cox_exporter_export(exporter, fd, 0, 0, &exported, NULL), 0);
    close(fd);
}

static void exporter_restore(void)
{
    exporter = cox_exporter_free(exporter);
}

/* As if pidfd_getfd were denied. */
static int open_denied(void *object, struct cox_error *err)
{
    struct cox_handle_info info;
    enum cox_handle_way way;
    assert_int_equal(cox_handle_parse(&exported, &info, NULL), 0);
    return cox_handle_open_denied(&exported, &info, path, cox_deadline_after_ms(TEST_PATIENCE_MS),
                                  -EPERM, object, &way, err);
}

static int open_by_proc(void *object, struct cox_error *err)
{
    struct cox_handle_info info;
    assert_int_equal(cox_handle_parse(&exported, &info, NULL), 0);
    return cox_handle_open_proc(&info, object, err);
}

/* Each time with an exporter of its own: a connection that has failed is left for good. */
struct export
{
    struct cox_exporter *exporter;
    struct cox_handle handle;
};

static int export_once(void *object, struct cox_error *err)
{
    struct export export = {.exporter = NULL};
    int r = exporter_new(&export.exporter, err);
    if (r == 0)
        r = cox_exporter_export(export.exporter, own_file, 0, 0, &export.handle, err);
    if (r)
        cox_exporter_free(export.exporter);
    else
        memcpy(object, &export, sizeof export);
    return r;
}

static void export_end(void *object)
{
    struct export *export = object;
    assert_int_equal(cox_exporter_put(export->exporter, &export->handle), 0);
    cox_exporter_free(export->exporter);
}

CONSTRUCT(pair, cox_socket_pair(object))

static void pair_close(void *object)
{
    close(((int *)object)[0]);
    close(((int *)object)[1]);
}

static int connections_begin(void **state)
{
    char byte;
    helper = test_helper_start("serve", runtime_dir);
    assert_int_equal(read(helper.out, &byte, 1), 1);
    snprintf(path, sizeof path, "%s/other.sock", runtime_dir);
    own_file = memfd_create("test", MFD_CLOEXEC);
    assert_int_equal(ftruncate(own_file, 100), 0);
    own_handle = handle_of(own_file);
    (void)state;
    return 0;
}

static int connections_end(void **state)
{
    (void)state;
    cox_close_fd(&own_file);
    return test_helper_wait(&helper);
}

COUNTDOWN_TEST(b4_b15_b19_b47_no_socket_stays_when_any_call_fails, EACH_MODE,
               SUBJECT(name_listen, MAKES(int, name_drop), AROUND(with_runtime_dir, nothing_left)),
               SUBJECT(name_connect, MAKES(int, connection_close),
                       AROUND(with_listener, without_listener)),
               SUBJECT(socket_open, MAKES(struct cox_control_socket *, socket_close),
                       AROUND(without_runtime_dir, nothing_left), .lenient = true),
               NAMED_SUBJECT("socket_open, mode", socket_open,
                             MAKES(struct cox_control_socket *, socket_close),
                             AROUND(with_closed_runtime_dir, nothing_left), .lenient = true),
               NAMED_SUBJECT("socket_open, sweep", socket_open,
                             MAKES(struct cox_control_socket *, socket_close),
                             AROUND(with_dead_socket, dead_socket_away), .lenient = true),
               SUBJECT(socket_sweep, AROUND(with_dead_socket, dead_socket_away),
                       .size = sizeof(uint32_t)))

TEST_WITH(b15_b19_b47_no_connection_leaks_when_any_call_fails, connections_begin, connections_end)
{
    COUNTDOWN(
        EACH_MODE, SUBJECT(connection, MAKES(struct cox_control_connection, connect_end)),
        NAMED_SUBJECT("fd store", exchange, MAKES(int, exchange_end)),
        NAMED_SUBJECT("exporter_new with a control socket", exporter_new,
                      MAKES(struct cox_exporter *, exporter_free)),
        /* The number that is its turn may be too high. */
        NAMED_SUBJECT("exporter_export at the control socket", export_once,
                      MAKES(struct export, export_end), .lenient = true),
        SUBJECT(open_denied, MAKES(int, fd_end), AROUND(exporter_prepare_other, exporter_restore)),
        SUBJECT(open_by_proc, MAKES(int, exchange_end), AROUND(exporter_prepare, exporter_restore)),
        SUBJECT(pair, MAKES(int[2], pair_close), .wordless = true));
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "serve") == 0)
        return serve(argv[2]);
    snprintf(runtime_dir, sizeof runtime_dir, "/tmp/countdown_%d", (int)getpid());
    int r = test_run(NULL, NULL);
    rmdir(runtime_dir);
    return r;
}
