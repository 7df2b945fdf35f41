/* Both ends of a control connection, and the engine loop of all clients, with each of their calls
 * failing in turn. */
#include "channel/socket/control_socket.h"
#include "coordinator/server/control_server.h"
#include "engine/batching/prompt_queue.h"
#include "program/client/client.h"
#include "proto/control.pb-c.h"
#include "countdown.h"
#include "testing.h"

static char runtime[64];

/* ---- the coordinator's end ---- */

static int service_new(void *object, struct cox_error *err)
{
    static const struct cox_control_options options = {.model = "/a/model"};
    return cox_control_server_new(&options, object, err);
}

DESTROY(service_free, cox_control_server_free(*(struct cox_control_server **)object))

static int prompt_queue_start(void *object, struct cox_error *err)
{
    static const struct cox_prompt_queue_options options = {
        .engine_loop = {.block_count = 16, .block_size = 4, .position_count_max = 64}};
    return cox_prompt_queue_start(NULL, &options, object, err); /* looked at for the first prompt */
}

DESTROY(prompt_queue_free, cox_prompt_queue_free(*(struct cox_prompt_queue **)object))

static struct cox_prompt_queue *queue;
static int wake_fd = -1;

CONSTRUCT(client_new, cox_prompt_queue_client_new(queue, wake_fd, object))
DESTROY(client_free, cox_prompt_queue_client_free(*(struct cox_prompt_queue_client **)object))

/* ---- the client's end, at a group of another process ---- */

static struct test_helper helper;

static int command_hook(void *context, const struct cox_control_client *client, int fd,
                        struct cox_error *err)
{
    (void)client;
    return cox_control_server_take(context, fd, err);
}

static int serve(const char *where)
{
    const struct cox_control_options none = {.model = NULL};
    struct cox_control_server *service;
    struct cox_control_socket *control_socket;
    char byte = 'x';
    setenv("XDG_RUNTIME_DIR", where, 1);
    if (cox_control_server_new(&none, &service, NULL))
        return 1;
    const struct cox_control_socket_hooks hooks = {.context = service, .command = command_hook};
    const struct cox_control_socket_options options = {.name = "other"};
    if (cox_control_socket_open(&options, &hooks, &control_socket, NULL) ||
        write(STDOUT_FILENO, &byte, 1) != 1)
        return 1;
    while (read(STDIN_FILENO, &byte, 1) > 0)
        continue;
    cox_control_socket_close(control_socket);
    cox_control_server_free(service);
    return 0;
}

static int asked(const char *name, void *object, struct cox_error *err)
{
    struct cox_client client = COX_CLIENT_NONE;
    CoxswainControl__StopRequest stop = COXSWAIN_CONTROL__STOP_REQUEST__INIT;
    CoxswainControl__ControlRequest request = COXSWAIN_CONTROL__CONTROL_REQUEST__INIT;
    CoxswainControl__ControlReply *reply;
    uint64_t deadline_ns = cox_deadline_after_ms(TEST_PATIENCE_MS);
    request.request_case = COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_STOP;
    request.stop = &stop;
    int r = cox_client_open(&client, name, deadline_ns, err);
    if (r == 0)
        r = cox_client_ask(&client, &request, deadline_ns, &reply, err);
    if (r == 0)
        *(int *)object = (int)reply->reply_case;
    cox_client_close(&client);
    return r;
}

CONSTRUCT(ask_named, asked("other", object, err))
CONSTRUCT(ask_only, asked(NULL, object, err))

/* What an arena without memory comes to. */
static const int too_large[] = {COX_TOO_LARGE, 0};

static int questions_begin(void **state)
{
    char byte;
    (void)state;
    char place[COX_SOCKET_PATH_SIZE];
    setenv("XDG_RUNTIME_DIR", runtime, 1); /* the library chose another one */
    /* A single place, where every failure is one of the query. */
    snprintf(place, sizeof place, "%s/coxswain", runtime);
    setenv("COXSWAIN_RUNTIME_DIR", place, 1);
    helper = test_helper_start("serve", runtime);
    return read(helper.out, &byte, 1) == 1 ? 0 : -1;
}

static int questions_end(void **state)
{
    (void)state;
    return test_helper_wait(&helper);
}

COUNTDOWN_TEST(b15_b19_a_service_is_made_whole_or_not_at_all, FAIL_ONE | FAIL_REST,
               SUBJECT(service_new, MAKES(struct cox_control_server *, service_free)),
               SUBJECT(prompt_queue_start, MAKES(struct cox_prompt_queue *, prompt_queue_free)))

TEST(b15_a_client_that_finds_no_memory_leaves_none)
{
    wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    assert_ok(prompt_queue_start(&queue, test_err()));
    COUNTDOWN(FAIL_ONE | FAIL_REST,
              SUBJECT(client_new, MAKES(struct cox_prompt_queue_client *, client_free),
                      .wordless = true));
    queue = cox_prompt_queue_free(queue);
    cox_close_fd(&wake_fd);
}

TEST_WITH(b15_b19_b47_a_query_leaks_nothing_and_reports_the_first_failure, questions_begin,
          questions_end)
{
    COUNTDOWN(EACH_MODE,
              NAMED_SUBJECT("client_open, ask", ask_named, .size = sizeof(int), .codes = too_large,
                            .word = "too large"),
              NAMED_SUBJECT("client_open of the only group", ask_only, .size = sizeof(int),
                            .codes = too_large, .word = "too large"));
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "serve") == 0)
        return serve(argv[2]);
    snprintf(runtime, sizeof runtime, "/tmp/countdown_%d", (int)getpid());
    mkdir(runtime, 0700);
    int r = test_run(NULL, NULL);
    char path[100];
    snprintf(path, sizeof path, "%s/coxswain", runtime);
    rmdir(path);
    rmdir(runtime);
    return r;
}
