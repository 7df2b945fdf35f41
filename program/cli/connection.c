#include "connection.h"

#include "channel/shm/geometry.h"
#include "console.h"
#include "group_options.h"

#include <string.h>

static int check(const void *choice, struct cox_error *err)
{
    const struct cox_connection *connection = choice;
    return connection->name && connection->control_socket
               ? cox_fail(err, COX_INVALID, "a group has either a --name or a --socket")
               : 0;
}

static const struct cox_option options[] = {
    {"name", "NAME",
     "name of the group, as NAME behind all arguments (default: the only one that is alive)",
     COX_NAME(struct cox_connection, name)},
    {"socket", "PATH",
     "the same by its control socket, as `coxswain run` prints it; root may name that of another "
     "user's group",
     COX_TEXT(struct cox_connection, control_socket)},
    {"timeout", "SEC", "give up after this time", COX_SECONDS(struct cox_connection, timeout_ms)},
    {"json", NULL, "print the reply as one JSON object", COX_FLAG(struct cox_connection, json)},
    {0},
};

const struct cox_option_group cox_connection_options = {
    .title = "The group:", .options = options, .check = check};

int cox_connection_words(void *choice, int count, char *const *words, struct cox_error *err)
{
    struct cox_connection *connection = choice;
    if (count == 0)
        return 0;
    if (count > 1)
        return cox_fail(err, COX_INVALID, "'%.64s' is not expected here", words[1]);
    if (connection->name || connection->control_socket)
        return cox_fail(err, COX_INVALID, "'%.64s' is not expected here: --%s says which group",
                        words[0], connection->name ? "name" : "socket");
    connection->name = words[0];
    return cox_name_check(words[0], err);
}

int cox_connection_open(const struct cox_connection *connection, struct cox_client *client,
                        uint64_t deadline_ns, struct cox_error *err)
{
    return connection->control_socket
               ? cox_client_open_path(client, connection->control_socket, deadline_ns, err)
               : cox_client_open(client, connection->name, deadline_ns, err);
}

int cox_connection_watch(struct cox_watch *watch, struct cox_error *err)
{
    char before[sizeof watch->trouble];
    memcpy(before, watch->trouble, sizeof before);
    int r = cox_client_watch(watch, err);
    if (!r && watch->trouble[0] && strcmp(before, watch->trouble) != 0)
        cox_console_say("waiting for the group '%s': %s", watch->name, watch->trouble);
    else if (!r && before[0] && !watch->trouble[0])
        cox_console_say("the group '%s' goes on", watch->name);
    return r;
}
