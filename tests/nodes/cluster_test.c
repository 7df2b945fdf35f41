/* The NATS connection (nodes/cluster.h), without TLS, with a nats-server of this test. */
#include "nodes/cluster.h"
#include "tests/lib/test.h"

#define PATIENCE_MS 30000
#define FRAME_SIZE ((size_t)200 << 10)
/* More than the buffers of a socket hold. */
#define FRAME_COUNT 200

static char folder[32], url[64];
static pid_t server = -1;
static _Atomic uint32_t lost;

static const char *program(void)
{
    static const char *const paths[] = {"/usr/sbin/nats-server", "/usr/bin/nats-server",
                                        "/usr/local/bin/nats-server"};
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++)
        if (access(paths[i], X_OK) == 0)
            return paths[i];
    return NULL;
}

/* {"nats": ["nats://127.0.0.1:41234"]} in a file of the server's. */
static bool ports_read(void)
{
    char path[128], text[512];
    snprintf(path, sizeof path, "%s/nats-server_%d.ports", folder, (int)server);
    FILE *file = fopen(path, "re");
    if (!file)
        return false;
    text[fread(text, 1, sizeof text - 1, file)] = '\0';
    fclose(file);
    const char *from = strstr(text, "nats://");
    return from && sscanf(from, "%63[^\"]\"", url) == 1;
}

static int server_start(void **state)
{
    const uint64_t deadline_ns = cox_deadline_after_ms(PATIENCE_MS);
    (void)state;
    snprintf(folder, sizeof folder, "/tmp/cox-cluster-XXXXXX");
    assert_non_null(mkdtemp(folder));
    server = fork();
    assert_true(server >= 0);
    if (server == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        execl(program(), "nats-server", "-a", "127.0.0.1", "-p", "-1", "--ports_file_dir", folder,
              "-l", "/dev/null", (char *)NULL);
        _exit(127);
    }
    while (!ports_read() && cox_now_ns() < deadline_ns)
        sched_yield();
    return url[0] ? 0 : -1;
}

static int server_stop(void **state)
{
    char command[64];
    (void)state;
    kill(server, SIGKILL);
    waitpid(server, NULL, 0);
    snprintf(command, sizeof command, "rm -r %s", folder);
    return system(command);
}

static void on_frame(void *context, const char *node, const uint8_t *bytes, size_t size)
{
    (void)context, (void)node, (void)bytes, (void)size;
}

static void on_connection(void *context, bool connected, const char *text)
{
    (void)context, (void)text;
    if (!connected)
        atomic_fetch_add(&lost, 1);
}

PLAIN_TEST(a_server_that_takes_nothing_is_lost)
{
    const struct cox_cluster_options options = {
        .access = {.url = url, .insecure_loopback = true},
        .group = "big",
        .node = "a",
        .timeout_ms = PATIENCE_MS,
        .on_frame = on_frame,
        .on_connection = on_connection,
    };
    struct cox_cluster *cluster = NULL;
    struct cox_error err = {0};
    if (cox_cluster_open(&options, &cluster, &err))
        fail_msg("%s", err.text);
    assert_int_equal(kill(server, SIGSTOP), 0);
    for (int i = 0; i < FRAME_COUNT; i++) {
        uint8_t *bytes = calloc(1, FRAME_SIZE);
        assert_non_null(bytes);
        cox_cluster_send(cluster, NULL, bytes, FRAME_SIZE);
    }
    const uint64_t deadline_ns = cox_deadline_after_ms(PATIENCE_MS);
    while (!atomic_load(&lost) && cox_now_ns() < deadline_ns)
        sched_yield();
    const bool found = atomic_load(&lost);
    kill(server, SIGCONT);
    cox_cluster_close(cluster);
    assert_true(found);
}

int main(void)
{
    return program() ? test_run(server_start, server_stop) : 77;
}
