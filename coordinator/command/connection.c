#include "connection.h"

#include "channel/shm/geometry.h"

int cox_connection_take(struct cox_connection *target, int option, char *const *argv,
                        struct cox_error *err)
{
    struct cox_group_choice other;
    switch (option) {
    case COX_OPTION_NAME:
        target->name = optarg;
        return cox_name_check(optarg, err);
    case COX_OPTION_DOOR:
        target->door = optarg;
        return 0;
    case COX_OPTION_TIMEOUT:
        return cox_parse_seconds("--timeout", optarg, &target->timeout_ms, err);
    default: /* what getopt_long did not understand */
        return cox_group_choice_take(&other, option, optarg, argv, err);
    }
}

int cox_connection_check(const struct cox_connection *target, struct cox_error *err)
{
    return target->name && target->door
               ? cox_fail(err, COX_INVALID, "a group has either a --name or a --door")
               : 0;
}

int cox_connection_open(const struct cox_connection *target, struct cox_client *client,
                        uint64_t deadline_ns, struct cox_error *err)
{
    return target->door ? cox_client_open_path(client, target->door, deadline_ns, err)
                        : cox_client_open(client, target->name, deadline_ns, err);
}
