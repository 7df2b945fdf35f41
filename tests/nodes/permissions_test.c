/* What the NATS server of packaging/nats lets the lead and the nodes of a group do, and what not.
 *
 *   permissions_test URL DIR OTHER IMPOSTOR
 *
 * URL is a server with the configuration that coxswain-certificates wrote to DIR, which has the
 * nodes a, b and `expired`, whose certificate is no longer valid. OTHER was made by the same script
 * with a CA of its own, and has a node b. IMPOSTOR is a server that has the certificate of node b.
 * permissions.sh starts all this.
 *
 * A test that expects a refusal has its opposite beside it: the same client, or the same subject
 * used by whom it belongs to, so that a server that refuses everything fails, too.
 */

#include "tests/lib/test.h"

#include <nats/nats.h>

#define DISCONNECT "$SYS.ACCOUNT.COX.DISCONNECT"
#define SETTINGS "$SYS.REQ.SERVER.PING.VARZ"
/* The name that coxswain-certificates gives to servers, whatever their address. */
#define SERVER_NAME "coxswain-nats"
#define WAIT_MS 2000

static const char *program;
static const char *server_url;
static const char *own_dir;
static const char *other_dir;
static const char *impostor_url;

/* ---- clients ---- */

struct client {
    const char *url;
    const char *ca_dir;
    /* NULL: no certificate. */
    const char *key_dir;
    const char *name;
};

/* What is expected to fail fails asynchronously: without a handler, libnats prints it. */
static void ignore_error(natsConnection *nc, natsSubscription *sub, natsStatus status, void *arg)
{
    (void)nc;
    (void)sub;
    (void)status;
    (void)arg;
}

static natsStatus client_connect(const struct client *client, natsConnection **ret_nc)
{
    natsOptions *options = NULL;
    natsStatus status;
    char ca[4096], certificate[4096], key[4096], inbox[256];

    snprintf(ca, sizeof(ca), "%s/ca.pem", client->ca_dir);
    snprintf(inbox, sizeof(inbox), "_INBOX.%s", client->name);
    assert_int_equal(natsOptions_Create(&options), NATS_OK);
    assert_int_equal(natsOptions_SetURL(options, client->url), NATS_OK);
    assert_int_equal(natsOptions_SetName(options, client->name), NATS_OK);
    assert_int_equal(natsOptions_SetTimeout(options, WAIT_MS), NATS_OK);
    assert_int_equal(natsOptions_SetAllowReconnect(options, false), NATS_OK);
    assert_int_equal(natsOptions_SetErrorHandler(options, ignore_error, NULL), NATS_OK);
    assert_int_equal(natsOptions_SetCustomInboxPrefix(options, inbox), NATS_OK);
    assert_int_equal(natsOptions_SetSecure(options, true), NATS_OK);
    assert_int_equal(natsOptions_LoadCATrustedCertificates(options, ca), NATS_OK);
    assert_int_equal(natsOptions_SetExpectedHostname(options, SERVER_NAME), NATS_OK);
    if (client->key_dir) {
        snprintf(certificate, sizeof(certificate), "%s/%s.pem", client->key_dir, client->name);
        snprintf(key, sizeof(key), "%s/%s-key.pem", client->key_dir, client->name);
        assert_int_equal(natsOptions_LoadCertificatesChain(options, certificate, key), NATS_OK);
    }
    status = natsConnection_Connect(ret_nc, options);
    natsOptions_Destroy(options);
    return status;
}

TEST_OWNED(natsConnection_Destroy)
TEST_OWNED(natsSubscription_Destroy)

/* The test's own. */
static natsConnection *connect_as(const char *name)
{
    struct client client = {server_url, own_dir, own_dir, name};
    natsConnection *nc = NULL;
    natsStatus status = client_connect(&client, &nc);

    if (status != NATS_OK)
        fail_msg("%s is refused: %s", name, natsStatus_GetText(status));
    return test_own(nc, natsConnection_Destroy_owned);
}

/* The server has handled all that was sent before, and its errors about that have arrived. */
static void flush(natsConnection *nc)
{
    assert_int_equal(natsConnection_FlushTimeout(nc, WAIT_MS), NATS_OK);
}

static natsSubscription *subscribe(natsConnection *nc, const char *subject)
{
    natsSubscription *sub = NULL;

    assert_int_equal(natsConnection_SubscribeSync(&sub, nc, subject), NATS_OK);
    flush(nc);
    return test_own(sub, natsSubscription_Destroy_owned);
}

/* ---- who may use which subject ---- */

enum verb { PUBLISH, SUBSCRIBE, QUEUE_SUBSCRIBE };

/* A connection of its own for each: the last error is of nothing else. */
static bool permitted(const char *name, enum verb verb, const char *subject)
{
    natsConnection *nc = connect_as(name);
    natsSubscription *sub = NULL;
    const char *text = NULL;
    natsStatus status, last;

    if (verb == PUBLISH)
        status = natsConnection_PublishString(nc, subject, "forged");
    else if (verb == SUBSCRIBE)
        status = natsConnection_SubscribeSync(&sub, nc, subject);
    else
        status = natsConnection_QueueSubscribeSync(&sub, nc, subject, "queue");
    assert_int_equal(status, NATS_OK);
    flush(nc);
    last = natsConnection_GetLastError(nc, &text);
    if (last != NATS_OK && (last != NATS_NOT_PERMITTED || !strstr(text, subject)))
        fail_msg("%s, %s: %s %s", name, subject, natsStatus_GetText(last), text);
    natsSubscription_Destroy(sub);
    test_release(nc);
    return last == NATS_OK;
}

static void expect(bool allowed, const char *name, enum verb verb, const char *subject)
{
    static const char *const verbs[] = {"publish", "subscribe to", "subscribe in a queue to"};

    if (permitted(name, verb, subject) != allowed)
        fail_msg("%s %s %s %s", name, allowed ? "cannot" : "can", verbs[verb], subject);
}

PLAIN_TEST(permits_what_is_needed)
{
    expect(true, "node-b", PUBLISH, "cox.g.from.b");
    expect(true, "node-b", PUBLISH, "cox.h.from.b");
    expect(true, "node-b", PUBLISH, SETTINGS);
    expect(true, "node-b", SUBSCRIBE, "cox.g.to.b");
    expect(true, "node-b", SUBSCRIBE, "cox.*.to.b");
    expect(true, "node-b", SUBSCRIBE, "cox.g.all");
    expect(true, "node-b", SUBSCRIBE, "_INBOX.node-b.x");
    expect(true, "node-a", PUBLISH, "cox.g.from.a");
    expect(true, "node-a", SUBSCRIBE, "cox.g.to.a");
    expect(true, "lead", PUBLISH, "cox.g.to.a");
    expect(true, "lead", PUBLISH, "cox.g.to.b");
    expect(true, "lead", PUBLISH, "cox.g.all");
    expect(true, "lead", PUBLISH, SETTINGS);
    expect(true, "lead", SUBSCRIBE, "cox.g.from.a");
    expect(true, "lead", SUBSCRIBE, "cox.*.from.*");
    expect(true, "lead", SUBSCRIBE, "_INBOX.lead.x");
    expect(true, "lead", SUBSCRIBE, DISCONNECT);
}

PLAIN_TEST(forbids_a_node_to_publish_anything_else)
{
    static const char *const subjects[] = {
        "cox.g.from.a",
        "cox.g.to.b",
        "cox.g.to.a",
        "cox.g.all",
        "cox.g.from.b.c",
        "cox.from.b",
        "other",
        /* A forged reply, and a forged death. */
        "_INBOX.lead.x",
        "_INBOX.node-a.x",
        "_INBOX.node-b.x",
        DISCONNECT,
        /* Other questions that the server answers in its system account. */
        "$SYS.REQ.SERVER.PING.CONNZ",
        "$SYS.REQ.SERVER.PING.STATSZ",
        "$SYS.REQ.ACCOUNT.COX.CONNZ",
        "$SYS.REQ.CLAIMS.UPDATE",
    };

    for (size_t i = 0; i < sizeof(subjects) / sizeof(subjects[0]); i++)
        expect(false, "node-b", PUBLISH, subjects[i]);
}

PLAIN_TEST(forbids_a_node_to_read_anything_else)
{
    static const char *const subjects[] = {
        "cox.g.to.a",
        "cox.*.to.a",
        "cox.*.to.*",
        "cox.g.to.*",
        "cox.*.from.*",
        "cox.g.from.a",
        "cox.g.from.b",
        "cox.>",
        "*.*.*.*",
        ">",
        "other",
        "_INBOX.>",
        "_INBOX.lead.>",
        "_INBOX.node-a.>",
        DISCONNECT,
        "$SYS.>",
        "$SYS.REQ.SERVER.*.VARZ",
        SETTINGS,
    };

    for (size_t i = 0; i < sizeof(subjects) / sizeof(subjects[0]); i++) {
        expect(false, "node-b", SUBSCRIBE, subjects[i]);
        expect(false, "node-b", QUEUE_SUBSCRIBE, subjects[i]);
    }
}

PLAIN_TEST(forbids_the_lead_what_is_a_nodes)
{
    expect(false, "lead", PUBLISH, "cox.g.from.a");
    expect(false, "lead", PUBLISH, "_INBOX.node-a.x");
    expect(false, "lead", PUBLISH, DISCONNECT);
    expect(false, "lead", SUBSCRIBE, "cox.g.to.a");
    expect(false, "lead", SUBSCRIBE, "_INBOX.node-a.>");
    expect(false, "lead", SUBSCRIBE, "cox.>");
    expect(false, "lead", SUBSCRIBE, "$SYS.>");
    expect(false, "lead", SUBSCRIBE, ">");
}

static void expect_message(natsSubscription *sub, const char *subject, const char *text)
{
    natsMsg *msg = NULL;

    assert_int_equal(natsSubscription_NextMsg(&msg, sub, WAIT_MS), NATS_OK);
    assert_string_equal(natsMsg_GetSubject(msg), subject);
    assert_int_equal(natsMsg_GetDataLength(msg), strlen(text));
    assert_memory_equal(natsMsg_GetData(msg), text, strlen(text));
    natsMsg_Destroy(msg);
}

/* The server's word is one thing, what arrives is another. What is forged is sent first, and would
 * arrive first. */
PLAIN_TEST(delivers_only_what_is_permitted)
{
    natsConnection *lead = connect_as("lead");
    natsConnection *a = connect_as("node-a");
    natsConnection *b = connect_as("node-b");
    natsSubscription *from = subscribe(lead, "cox.*.from.*");
    natsSubscription *to_a = subscribe(a, "cox.*.to.a");
    natsSubscription *to_b = subscribe(b, "cox.*.to.b");
    uint64_t waiting = 0;

    assert_int_equal(natsConnection_PublishString(b, "cox.g.from.a", "forged"), NATS_OK);
    assert_int_equal(natsConnection_PublishString(b, "cox.g.to.a", "forged"), NATS_OK);
    assert_int_equal(natsConnection_PublishString(b, "cox.g.to.b", "forged"), NATS_OK);
    flush(b);
    assert_int_equal(natsConnection_PublishString(a, "cox.g.from.a", "reply"), NATS_OK);
    expect_message(from, "cox.g.from.a", "reply");
    assert_int_equal(natsConnection_PublishString(lead, "cox.g.to.b", "request"), NATS_OK);
    expect_message(to_b, "cox.g.to.b", "request");
    assert_int_equal(natsConnection_PublishString(lead, "cox.g.to.a", "request"), NATS_OK);
    expect_message(to_a, "cox.g.to.a", "request");
    flush(b);
    assert_int_equal(natsSubscription_QueuedMsgs(to_b, &waiting), NATS_OK);
    assert_int_equal(waiting, 0);
}

/* ---- who gets in at all ---- */

static void refuse(const char *what, const struct client *client)
{
    natsConnection *nc = NULL;
    natsStatus status = client_connect(client, &nc);

    if (status == NATS_OK) {
        natsConnection_Destroy(nc);
        fail_msg("%s is let in", what);
    }
    print_message("  %s: %s\n", what, natsStatus_GetText(status));
    /* A server that does not run, or does not reply, refuses nobody. */
    assert_int_not_equal(status, NATS_NO_SERVER);
    assert_int_not_equal(status, NATS_TIMEOUT);
    test_release(connect_as("node-b"));
}

PLAIN_TEST(refuses_clients)
{
    refuse("no certificate", &(struct client){server_url, own_dir, NULL, "node-b"});
    refuse("another CA", &(struct client){server_url, own_dir, other_dir, "node-b"});
    refuse("an expired one", &(struct client){server_url, own_dir, own_dir, "node-expired"});
    refuse("no user's", &(struct client){server_url, own_dir, own_dir, "server"});
}

PLAIN_TEST(clients_refuse_servers)
{
    refuse("a server of another CA", &(struct client){server_url, other_dir, own_dir, "node-b"});
    refuse("a node as server", &(struct client){impostor_url, own_dir, own_dir, "node-b"});
}

/* ---- what the server tells ---- */

/* The text after "NAME": in the object that follows "OBJECT":. The server writes no spaces. */
static const char *field(const char *json, const char *object, const char *name)
{
    char label[128];
    const char *at;

    snprintf(label, sizeof(label), "\"%s\":{", object);
    at = strstr(json, label);
    snprintf(label, sizeof(label), "\"%s\":", name);
    at = at ? strstr(at, label) : NULL;
    if (!at)
        fail_msg("no %s.%s in %s", object, name, json);
    return at ? at + strlen(label) : "";
}

static int64_t number(const char *json, const char *object, const char *name)
{
    return strtoll(field(json, object, name), NULL, 10);
}

static bool text_is(const char *json, const char *object, const char *name, const char *text)
{
    const char *at = field(json, object, name);

    return at[0] == '"' && strncmp(at + 1, text, strlen(text)) == 0 && at[1 + strlen(text)] == '"';
}

/* A copy that ends with a zero byte, the test's own. */
static char *message_text(natsMsg *msg)
{
    size_t size = (size_t)natsMsg_GetDataLength(msg);
    char *text = test_own(malloc(size + 1), free);

    memcpy(text, natsMsg_GetData(msg), size);
    text[size] = 0;
    return text;
}

static void read_settings(const char *name)
{
    natsConnection *nc = connect_as(name);
    char id[256], subject[512];

    assert_int_equal(natsConnection_GetConnectedServerId(nc, id, sizeof(id)), NATS_OK);
    snprintf(subject, sizeof(subject), "$SYS.REQ.SERVER.%s.VARZ", id);
    for (int direct = 0; direct < 2; direct++) {
        natsMsg *msg = NULL;
        char *json;

        assert_int_equal(
            natsConnection_RequestString(&msg, nc, direct ? subject : SETTINGS, "", WAIT_MS),
            NATS_OK);
        json = message_text(msg);
        assert_true(text_is(json, "server", "id", id));
        assert_true(text_is(json, "data", "server_id", id));
        assert_int_equal(number(json, "data", "ping_interval"), 100 * 1000 * 1000);
        assert_int_equal(number(json, "data", "ping_max"), 2);
        assert_int_equal(number(json, "data", "write_deadline"), 1000 * 1000 * 1000);
        assert_int_equal(number(json, "data", "max_payload"), 1024 * 1024);
        assert_int_equal(strncmp(field(json, "data", "tls_verify"), "true,", 5), 0);
        natsMsg_Destroy(msg);
    }
}

PLAIN_TEST(tells_its_settings)
{
    read_settings("lead");
    read_settings("node-a");
    read_settings("node-b");
}

/* A process that is connected as node b until a signal ends it. */
struct holder {
    pid_t pid;
    char server_id[128];
    uint64_t client_id;
};

static _Noreturn void hold(void)
{
    natsConnection *nc = connect_as("node-b");
    uint64_t client_id = 0;
    char id[128];

    assert_int_equal(natsConnection_GetConnectedServerId(nc, id, sizeof(id)), NATS_OK);
    assert_int_equal(natsConnection_GetClientID(nc, &client_id), NATS_OK);
    printf("%s %" PRIu64 "\n", id, client_id);
    fflush(stdout);
    for (;;)
        pause();
}

/* Another program and not only another process: libnats has threads here. */
static void holder_start(struct holder *holder)
{
    int fds[2];
    FILE *output;

    assert_int_equal(pipe(fds), 0);
    holder->pid = fork();
    assert_int_not_equal(holder->pid, -1);
    if (holder->pid == 0) {
        /* A test that fails leaves it to this. */
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(fds[1], STDOUT_FILENO);
        close(fds[0]);
        close(fds[1]);
        execl(program, program, "--hold", server_url, own_dir, (char *)NULL);
        _exit(127);
    }
    close(fds[1]);
    output = fdopen(fds[0], "r");
    assert_non_null(output);
    assert_int_equal(fscanf(output, "%127s %" SCNu64, holder->server_id, &holder->client_id), 2);
    fclose(output);
}

static double now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

/* Waits until the server reports the end of that connection, and returns when. Reports of others,
 * whose user may be the same, are skipped. The reason is "Client Closed" or, if the dead process
 * has left bytes unread, "Read Error"; "Stale Connection" if it does not reply to pings. */
static double wait_disconnect(natsSubscription *sub, const struct holder *holder, bool stale)
{
    for (;;) {
        natsMsg *msg = NULL;
        natsStatus status = natsSubscription_NextMsg(&msg, sub, WAIT_MS);
        double now = now_ms();
        char *json;
        bool match;

        if (status != NATS_OK)
            fail_msg("no report of client %" PRIu64 " of %s: %s", holder->client_id,
                     holder->server_id, natsStatus_GetText(status));
        json = message_text(msg);
        natsMsg_Destroy(msg);
        match = text_is(json, "server", "id", holder->server_id) &&
                (uint64_t)number(json, "client", "id") == holder->client_id;
        if (match) {
            assert_true(text_is(json, "client", "user", "CN=node-b"));
            assert_true(text_is(json, "client", "acc", "COX"));
            if (text_is(json, "received", "reason", "Stale Connection") != stale)
                fail_msg("the reason is wrong: %s", json);
        }
        if (match)
            return now;
    }
}

static int compare(const void *left, const void *right)
{
    double l = *(const double *)left, r = *(const double *)right;

    return (l > r) - (l < r);
}

/* Other connections of the same user come and go meanwhile. */
PLAIN_TEST(reports_a_process_that_ends)
{
    natsConnection *lead = connect_as("lead");
    natsSubscription *sub = subscribe(lead, DISCONNECT);
    double took[20];
    int n = (int)(sizeof(took) / sizeof(took[0]));

    for (int i = 0; i < n; i++) {
        struct holder holder;
        double start;

        holder_start(&holder);
        test_release(connect_as("node-b"));
        start = now_ms();
        assert_int_equal(kill(holder.pid, SIGKILL), 0);
        took[i] = wait_disconnect(sub, &holder, false) - start;
        assert_int_equal(waitpid(holder.pid, NULL, 0), holder.pid);
    }
    qsort(took, (size_t)n, sizeof(took[0]), compare);
    print_message("  killed, reported after %.1f ms (median), %.1f ms (longest of %d)\n",
                  took[n / 2], took[n - 1], n);
    assert_true(took[n - 1] < 1000);
}

/* Nothing but the server's short ping interval can find this. */
PLAIN_TEST(reports_a_process_that_is_stopped)
{
    natsConnection *lead = connect_as("lead");
    natsSubscription *sub = subscribe(lead, DISCONNECT);
    struct holder holder;
    double start, took;

    holder_start(&holder);
    start = now_ms();
    assert_int_equal(kill(holder.pid, SIGSTOP), 0);
    took = wait_disconnect(sub, &holder, true) - start;
    print_message("  stopped, reported after %.0f ms\n", took);
    assert_int_equal(kill(holder.pid, SIGKILL), 0);
    assert_int_equal(waitpid(holder.pid, NULL, 0), holder.pid);
    assert_true(took < 1000);
}

int main(int argc, char **argv)
{
    int r;

    program = argv[0];
    if (argc == 4 && strcmp(argv[1], "--hold") == 0) {
        server_url = argv[2];
        own_dir = argv[3];
        hold();
    }
    if (argc != 5) {
        fprintf(stderr, "usage: %s URL DIR OTHER IMPOSTOR\n", program);
        return 2;
    }
    server_url = argv[1];
    own_dir = argv[2];
    other_dir = argv[3];
    impostor_url = argv[4];
    r = test_run(NULL, NULL);
    nats_CloseAndWait(WAIT_MS);
    return r;
}
