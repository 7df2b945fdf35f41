#include "client.h"

#include "channel/base/idioms.h"
#include "channel/shm/geometry.h"
#include "channel/text/text.h"
#include "channel/socket/control_socket.h"
#include "channel/socket/runtime_dir.h"
#include "proto/control.pb-c.h"
#include "proto/wire.h"

#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define REPLY_ARENA_MAX ((size_t)96 << 20)
#define LISTED_SIZE 600
#define LISTED_MS 1000
#define PLACES_SIZE 600
#define WATCH_MS 1000
/* A status request may take so many times the period. */
#define WATCH_ASK_PERIODS 5
#define WATCH_MISSES 4

typedef CoxswainControl__ControlRequest control_request;
typedef CoxswainControl__ControlReply control_reply;

/* ---- connections ---- */

void cox_client_init(struct cox_client *client, int fd)
{
    *client = (struct cox_client)COX_CLIENT_NONE;
    cox_stream_init(&client->stream, fd);
}

void cox_client_close(struct cox_client *client)
{
    cox_stream_deinit(&client->stream);
    cox_arena_deinit(&client->arena);
}

static int path_open(struct cox_client *client, const char *path, bool other_users,
                     uint64_t deadline_ns, struct cox_error *err)
{
    const struct cox_hello hello = {.role = COX_HELLO_COMMAND, .other_users = other_users};
    struct cox_control_connection session;
    int r = cox_control_socket_connect(path, &hello, deadline_ns, &session, err);
    if (r)
        return r;
    cox_client_init(client, cox_steal_fd(&session.fd));
    snprintf(client->group, sizeof client->group, "%s", path);
    cox_control_connection_close(&session);
    return 0;
}

int cox_client_open_path(struct cox_client *client, const char *path, uint64_t deadline_ns,
                         struct cox_error *err)
{
    return path_open(client, path, true, deadline_ns, err);
}

/* The group whose control socket this entry is. False: it is none. */
static bool group_of(const char *entry, char *name, size_t name_size)
{
    const size_t length = cox_runtime_dir_name_length(entry);
    if (length == 0 || length >= name_size || entry[0] == '.') /* no group has such a name */
        return false;
    snprintf(name, name_size, "%.*s", (int)length, entry);
    return true;
}

struct walk {
    cox_client_found_fn found;
    void *context;
    uint64_t deadline_ns;
    struct cox_error *err;
};

static int socket_try(const struct walk *walk, const char *runtime_dir, const char *entry,
                      const char *name)
{
    _cox_cleanup_(cox_client_close) struct cox_client client = COX_CLIENT_NONE;
    char path[COX_SOCKET_PATH_SIZE + 256];
    struct cox_error failure = {0};
    snprintf(path, sizeof path, "%s/%s", runtime_dir, entry);
    int r = path_open(&client, path, false, walk->deadline_ns, &failure);
    if (r == COX_CLOSED || r == COX_NOT_FOUND) /* a dead group's leftover */
        return 0;
    /* The socket of a long name has only a part of it (cox_control_socket_find), which is then no
     * valid name. */
    snprintf(client.group, sizeof client.group, "%.*s", COX_CLIENT_GROUP_SIZE - 1,
             cox_name_check(name, NULL) ? path : name);
    return walk->found(walk->context, &client, r ? &failure : NULL, walk->err);
}

static int sockets_try(const struct walk *walk, const char *runtime_dir, DIR *stream)
{
    for (;;) {
        errno = 0;
        const struct dirent *entry = readdir(stream);
        if (!entry)
            return errno
                       ? cox_fail(walk->err, -errno, "%s: %s", runtime_dir, cox_status_text(-errno))
                       : 0;
        char name[256];
        if (!group_of(entry->d_name, name, sizeof name))
            continue;
        int r = socket_try(walk, runtime_dir, entry->d_name, name);
        if (r)
            return r;
    }
}

/* The live groups in one directory of the search. One that is not there, or not this user's, has
 * none. */
static int place_try(const struct walk *walk, const char *place)
{
    struct stat info;
    if (lstat(place, &info) < 0 || info.st_uid != geteuid())
        return 0;
    DIR *stream = opendir(place);
    if (!stream)
        return errno == ENOENT || errno == ENOTDIR
                   ? 0
                   : cox_fail(walk->err, -errno, "%s: %s", place, cox_status_text(-errno));
    int r = sockets_try(walk, place, stream);
    closedir(stream);
    return r;
}

int cox_client_find(cox_client_found_fn found, void *context, uint64_t deadline_ns,
                    struct cox_error *err)
{
    const struct walk walk = {found, context, deadline_ns, err};
    char place[COX_SOCKET_PATH_SIZE];
    int r = 0;
    for (uint32_t i = 0; r == 0; i++) {
        r = cox_runtime_dir_search(i, place, err);
        if (r == 0)
            r = place_try(&walk, place);
    }
    return r == COX_EMPTY ? 0 : r;
}

/* ---- which group ---- */

struct listed {
    /* of the last one; NULL: none is kept */
    struct cox_client *client;
    uint32_t count;
    char names[LISTED_SIZE];
};

static int listed_add(void *context, struct cox_client *client, const struct cox_error *failure,
                      struct cox_error *err)
{
    struct listed *listed = context;
    if (failure)
        return cox_fail(err, failure->code, "the group '%s': %.800s", client->group, failure->text);
    const size_t used = strlen(listed->names);
    int size =
        snprintf(listed->names + used, sizeof listed->names - used, "%s%s%s", used ? ", " : "",
                 strchr(client->group, '/') ? "--socket " : "", client->group);
    if (size < 0 || (size_t)size >= sizeof listed->names - used)
        listed->names[used] = '\0'; /* whole names only */
    listed->count++;
    if (listed->client) {
        cox_client_close(listed->client);
        *listed->client = *client;
        *client = (struct cox_client)COX_CLIENT_NONE;
    }
    return 0;
}

static int open_only(struct cox_client *client, uint64_t deadline_ns, struct cox_error *err)
{
    struct listed listed = {.client = client};
    char places[PLACES_SIZE];
    int r = cox_client_find(listed_add, &listed, deadline_ns, err);
    cox_control_socket_places(places, sizeof places);
    if (!r && listed.count == 0)
        r = cox_fail(err, COX_NOT_FOUND,
                     "no group of this user is alive (root reaches that of another user with "
                     "--socket); looked for control sockets in %s",
                     places);
    if (!r && listed.count > 1)
        r = cox_fail(err, COX_INVALID, "%" PRIu32 " groups are alive: say which with --name: %s",
                     listed.count, listed.names);
    if (r)
        cox_client_close(client);
    return r;
}

/* Of a name that no group has. */
static int name_fail(const char *name, struct cox_error *err)
{
    struct listed listed = {0};
    char places[PLACES_SIZE];
    /* A help, for which nothing waits long. */
    cox_client_find(listed_add, &listed, cox_deadline_after_ms(LISTED_MS), NULL);
    cox_control_socket_places(places, sizeof places);
    return cox_fail(
        err, COX_NOT_FOUND,
        "no group '%s' is alive%s%s%s: no process of this user listens under that name in %s", name,
        listed.count ? " (alive: " : "", listed.names, listed.count ? ")" : "", places);
}

int cox_client_open(struct cox_client *client, const char *name, uint64_t deadline_ns,
                    struct cox_error *err)
{
    char path[COX_SOCKET_PATH_SIZE];
    if (!name)
        return open_only(client, deadline_ns, err);
    struct cox_error error = {0};
    int r = cox_control_socket_find(name, path, err);
    if (r)
        return r;
    r = path_open(client, path, false, deadline_ns, &error);
    if (r == COX_NOT_FOUND || r == COX_CLOSED)
        return name_fail(name, err);
    if (r)
        return cox_fail(err, r, "the group '%s': %.800s", name, error.text);
    snprintf(client->group, sizeof client->group, "%s", name);
    return 0;
}

/* ---- text ---- */

void cox_client_clean_text(char *text)
{
    while (*text) {
        uint32_t code;
        size_t size = cox_text_character(text, &code);
        if (size == 0 || (cox_text_is_control(code) && code != '\n' && code != '\t'))
            memset(text, '?', size = size ? size : 1);
        text += size;
    }
}

static void field_clean(const ProtobufCFieldDescriptor *field, uint8_t *message);

/* Every text of a message and of its nested messages. */
static void message_clean(ProtobufCMessage *message)
{
    for (unsigned i = 0; i < message->descriptor->n_fields; i++)
        field_clean(&message->descriptor->fields[i], (uint8_t *)message);
}

static void field_clean(const ProtobufCFieldDescriptor *field, uint8_t *message)
{
    bool is_text = field->type == PROTOBUF_C_TYPE_STRING;
    bool is_list = field->label == PROTOBUF_C_LABEL_REPEATED;
    bool is_other = (field->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) != 0 &&
                    *(uint32_t *)(void *)(message + field->quantifier_offset) != field->id;
    if ((!is_text && field->type != PROTOBUF_C_TYPE_MESSAGE) || is_other)
        return;
    size_t count = is_list ? *(size_t *)(void *)(message + field->quantifier_offset) : 1;
    void **items = is_list ? *(void ***)(void *)(message + field->offset)
                           : (void **)(void *)(message + field->offset);
    for (size_t i = 0; i < count; i++)
        if (items[i] && is_text)
            cox_client_clean_text(items[i]);
        else if (items[i])
            message_clean(items[i]);
}

/* ---- times of a watch ---- */

static uint64_t watch_period_ms(void)
{
#if COX_TESTING
    const char *text = getenv("COXSWAIN_TEST_WATCH_MS");
    if (text)
        return (uint64_t)atoi(text);
#endif
    return WATCH_MS;
}

void cox_client_watch_heard(struct cox_watch *watch)
{
    watch->heard_ns = cox_now_ns();
    watch->misses = 0;
}

static uint64_t watch_due_ns(const struct cox_watch *watch)
{
    uint64_t last_ns = watch->asked_ns > watch->heard_ns ? watch->asked_ns : watch->heard_ns;
    return last_ns + watch_period_ms() * COX_NSEC_PER_MSEC;
}

static uint64_t watch_timeout_ns(const struct cox_watch *watch)
{
    return watch->timeout_ms ? watch->heard_ns + watch->timeout_ms * COX_NSEC_PER_MSEC
                             : COX_DEADLINE_NEVER;
}

int cox_client_watch_ms(const struct cox_watch *watch)
{
    uint64_t now_ns = cox_now_ns();
    uint64_t due_ns = cox_deadline_min(watch_due_ns(watch), watch_timeout_ns(watch));
    return due_ns > now_ns ? (int)((due_ns - now_ns) / COX_NSEC_PER_MSEC) + 1 : 1;
}

/* ---- requests ---- */

int cox_client_error(const struct CoxswainControl__Error *reply_error, struct cox_error *err)
{
    /* An unknown code counts as a failure. */
    int code = reply_error->code < COX_STATUS_COUNT && reply_error->code != 0 ? reply_error->code
                                                                              : COX_REJECTED;
    char text[sizeof err->text];
    snprintf(text, sizeof text, "%s", reply_error->text ? reply_error->text : "");
    cox_text_trim(text);
    cox_client_clean_text(text);
    return cox_fail(err, code, "%s", text[0] ? text : cox_status_text(code));
}

int cox_client_next(struct cox_client *client, struct CoxswainControl__ControlReply **ret_reply,
                    struct cox_error *err)
{
    const uint8_t *bytes;
    size_t size;
    int r = cox_stream_next(&client->stream, &bytes, &size);
    if (r == COX_EMPTY)
        return r;
    cox_arena_deinit(&client->arena);
    if (!r)
        r = cox_arena_init(&client->arena, 0, REPLY_ARENA_MAX);
    if (!r)
        r = cox_wire_control_reply_unpack(&client->arena, bytes, size, ret_reply);
    if (r)
        return cox_fail(err, r, "the group's reply is not valid: %s", cox_status_text(r));
    message_clean(&(*ret_reply)->base);
    return 0;
}

static int reply_await(struct cox_client *client, uint64_t deadline_ns, control_reply **ret_reply,
                       struct cox_error *err)
{
    bool heard = true;
    for (;;) {
        int r = heard ? cox_stream_flush(&client->stream) : 0;
        if (r == COX_CLOSED) { /* a group that no longer reads may still have sent its reason */
            heard = false;
            r = 0;
        }
        if (!r)
            r = cox_client_next(client, ret_reply, err);
        if (r != COX_EMPTY)
            return r < 0 ? cox_fail(err, r, "the connection to the group: %s", cox_status_text(r))
                         : r;
        uint64_t now = cox_now_ns();
        if (now >= deadline_ns)
            return cox_fail(err, COX_TIMEOUT, "the group's coordinator does not reply");
        struct pollfd fd = {.fd = client->stream.fd, .events = POLLIN};
        if (heard && cox_stream_pending(&client->stream))
            fd.events |= POLLOUT;
        uint64_t left_ms = (deadline_ns - now) / COX_NSEC_PER_MSEC + 1;
        uint64_t check_ms = client->check ? (uint64_t)cox_client_watch_ms(client->watch) : 60000;
        int count = poll(&fd, 1, (int)(left_ms < check_ms ? left_ms : check_ms));
        if (count < 0 && errno != EINTR)
            return cox_fail(err, -errno, "poll: %s", cox_status_text(-errno));
        if (count == 0 && client->check)
            client->check(client->watch, NULL);
        if (count > 0 && (fd.revents & ~POLLOUT))
            r = cox_stream_fill(&client->stream);
        if (r == COX_CLOSED)
            return cox_fail(err, r, "the group '%s' has ended, its coordinator is gone",
                            client->group);
        if (r != COX_EMPTY && r)
            return cox_fail(err, r, "the connection to the group: %s", cox_status_text(r));
    }
}

int cox_client_ask(struct cox_client *client, const struct CoxswainControl__ControlRequest *request,
                   uint64_t deadline_ns, struct CoxswainControl__ControlReply **ret_reply,
                   struct cox_error *err)
{
    int r = cox_stream_put(&client->stream, &request->base);
    if (r)
        return cox_fail(err, r, "the request: %s", cox_status_text(r));
    control_reply *reply;
    r = reply_await(client, deadline_ns, &reply, err);
    if (r)
        return r;
    if (reply->reply_case == COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_ERROR)
        return cox_client_error(reply->error, err);
    *ret_reply = reply;
    return 0;
}

int cox_client_expect(struct cox_client *client, int request_case, const ProtobufCMessage *body,
                      int reply_case, uint64_t deadline_ns, const ProtobufCMessage **ret_body,
                      struct cox_error *err)
{
    control_request request = COXSWAIN_CONTROL__CONTROL_REQUEST__INIT;
    control_reply *reply = NULL;
    request.request_case = (CoxswainControl__ControlRequest__RequestCase)request_case;
    /* All bodies are pointers in one union. */
    request.status = (CoxswainControl__StatusRequest *)(uintptr_t)body;
    int r = cox_client_ask(client, &request, deadline_ns, &reply, err);
    if (r)
        return r;
    if ((int)reply->reply_case != reply_case)
        return cox_fail(err, COX_CORRUPT, "the group's reply is not one to this request");
    *ret_body = &reply->status->base;
    return 0;
}

int cox_client_status(struct cox_client *client, uint64_t deadline_ns,
                      struct CoxswainControl__StatusReply **ret_status, struct cox_error *err)
{
    const CoxswainControl__StatusRequest status = COXSWAIN_CONTROL__STATUS_REQUEST__INIT;
    const ProtobufCMessage *reply = NULL;
    int r = cox_client_expect(client, COX_REQUEST(STATUS), &status.base, COX_REPLY(STATUS),
                              deadline_ns, &reply, err);
    if (!r)
        *ret_status = (struct CoxswainControl__StatusReply *)(uintptr_t)reply;
    return r;
}

/* ---- the watch ---- */

/* trouble stays as it was if the group does not reply. */
static int watch_ask(struct cox_watch *watch)
{
    _cox_cleanup_(cox_client_close) struct cox_client client = COX_CLIENT_NONE;
    CoxswainControl__StatusReply *status;
    struct cox_error error = {0};
    uint64_t deadline_ns = cox_deadline_min(
        cox_deadline_after_ms(WATCH_ASK_PERIODS * watch_period_ms()), watch_timeout_ns(watch));
    int r = strchr(watch->name, '/')
                ? cox_client_open_path(&client, watch->name, deadline_ns, &error)
                : cox_client_open(&client, watch->name, deadline_ns, &error);
    if (!r)
        r = cox_client_status(&client, deadline_ns, &status, &error);
    if (!r)
        cox_health_check(status, watch->trouble);
    return r;
}

int cox_client_watch(struct cox_watch *watch, struct cox_error *err)
{
    if (cox_now_ns() >= watch_due_ns(watch)) {
        /* If the group ends, the connection that is waited on ends too. */
        watch->misses = watch_ask(watch) == COX_TIMEOUT ? watch->misses + 1 : 0;
        watch->asked_ns = cox_now_ns();
    }
    if (cox_now_ns() >= watch_timeout_ns(watch))
        return cox_fail(err, COX_TIMEOUT, "the group '%s' has not replied for %g s: %s",
                        watch->name, (double)watch->timeout_ms / 1000,
                        watch->trouble[0] ? watch->trouble
                        : watch->misses   ? "its coordinator is stopped, or stuck"
                                          : "its ranks compute");
    return watch->misses < WATCH_MISSES
               ? 0
               : cox_fail(
                     err, COX_TIMEOUT,
                     "the coordinator of the group '%s' lives and does not reply: it is stopped, or stuck; what was printed is right",
                     watch->name);
}
