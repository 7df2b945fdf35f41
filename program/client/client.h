/*
 * client: a command's end of a control connection to a running group (proto/control.proto).
 *
 * Threads: one at a time.
 * Ownership: what a reply points to is lent until the next call on the same client.
 * Blocks: open and ask until their deadline.
 * Bytes: replies are untrusted input; invalid ones are COX_CORRUPT. The texts of a reply are safe
 *   to print: see cox_client_clean_text.
 * If the process dies: the kernel closes the connection, and the group cancels its requests.
 */
#ifndef COX_PROGRAM_CLIENT_H
#define COX_PROGRAM_CLIENT_H

#include <coxswain/base.h>

#include <protobuf-c/protobuf-c.h>
#include "proto/wire.h"
#include "coordinator/server/stream.h"
#include "health.h"

struct CoxswainControl__ControlRequest;
struct CoxswainControl__ControlReply;
struct CoxswainControl__StatusReply;

#define COX_CLIENT_GROUP_SIZE 256

struct cox_watch;

struct cox_client {
    struct cox_stream stream;
    struct cox_arena arena;
    /* its name, or else the path of its socket */
    char group[COX_CLIENT_GROUP_SIZE];
    /* Called while ask waits for a reply, when a check of watch is due; its result is ignored.
     * NULL: no checks. */
    int (*check)(struct cox_watch *watch, struct cox_error *err);
    struct cox_watch *watch;
};

#define COX_CLIENT_NONE                                                                            \
    {                                                                                              \
        .stream = {.fd = -1 }                                                                      \
    }

/* Takes a connection that was accepted already. */
void cox_client_init(struct cox_client *client, int fd);
void cox_client_close(struct cox_client *client); /* idempotent, a COX_CLIENT_NONE is fine */

/* Connects to a control socket whose path an operator has given; root, also to that of another
 * user. Returns what cox_control_socket_connect returns. */
int cox_client_open_path(struct cox_client *client, const char *path, uint64_t deadline_ns,
                         struct cox_error *err);
/* By the group's name. NULL: of the only live group in the directories of
 * cox_runtime_dir_search: COX_NOT_FOUND: there is none;
 * COX_INVALID: there are several, err lists them. */
int cox_client_open(struct cox_client *client, const char *name, uint64_t deadline_ns,
                    struct cox_error *err);

/* A group of this user that is alive. client is connected, and may be taken (COX_CLIENT_NONE is
 * left then); or it is not, failure says why, and it has the group alone. A result other than 0
 * ends cox_client_find, which returns it. */
typedef int (*cox_client_found_fn)(void *context, struct cox_client *client,
                                   const struct cox_error *failure, struct cox_error *err);
/* Calls found for each group in the directories of cox_runtime_dir_search. Returns 0, also where
 * there is none; what found returns; -errno; COX_INVALID, COX_TOO_LARGE: a directory's path. */
int cox_client_find(cox_client_found_fn found, void *context, uint64_t deadline_ns,
                    struct cox_error *err);

/* Sends a request and waits for one reply. Returns 0; COX_CLOSED: the group is gone; COX_TIMEOUT;
 * COX_CORRUPT; -ENOMEM; -errno; or the error that the group replies with. */
int cox_client_ask(struct cox_client *client, const struct CoxswainControl__ControlRequest *request,
                   uint64_t deadline_ns, struct CoxswainControl__ControlReply **ret_reply,
                   struct cox_error *err);
/* The next reply, if it has come. Returns 0; COX_EMPTY: fill the stream first; COX_CORRUPT;
 * -ENOMEM. */
int cox_client_next(struct cox_client *client, struct CoxswainControl__ControlReply **ret_reply,
                    struct cox_error *err);
/* As ask, of a request with this body, for one kind of reply. *ret_body: the reply's, lent until
 * the next request. COX_CORRUPT: it is another one. */
int cox_client_expect(struct cox_client *client, int request_case, const ProtobufCMessage *body,
                      int reply_case, uint64_t deadline_ns, const ProtobufCMessage **ret_body,
                      struct cox_error *err);
#define COX_REQUEST(name) COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_##name
#define COX_REPLY(name) COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_##name
int cox_client_status(struct cox_client *client, uint64_t deadline_ns,
                      struct CoxswainControl__StatusReply **ret_status, struct cox_error *err);

/* Watches a group that owes replies and sends nothing. Prompts may wait as long as an operator
 * pauses the group; but a coordinator that is stopped or stuck does not even reply to a status
 * request. */
struct cox_watch {
    /* of the group, or the path of its socket */
    const char *name;
    /* Gives up after so long without a reply; 0: never. */
    uint64_t timeout_ms;
    /* the last reply, and the last status request */
    uint64_t heard_ns, asked_ns;
    /* failed status requests in a row */
    uint32_t misses;
    /* why the group cannot work, by its last status; "": it can */
    char trouble[COX_HEALTH_SIZE];
};
/* The group replies, or owes none. */
void cox_client_watch_heard(struct cox_watch *watch);
/* Milliseconds until the next check is due, at least 1. */
int cox_client_watch_ms(const struct cox_watch *watch);
/* To be called when poll has waited for that long. If a check is due, 1 s after the last reply and
 * then every second (in testing builds COXSWAIN_TEST_WATCH_MS overrides it), sends the group a
 * status request over a second connection, for 5 s at most.
 * Returns
 *   0: it replies, or the failures in a row are still few
 *   COX_TIMEOUT: it failed several times in a row, or the watch's timeout has passed
 */
int cox_client_watch(struct cox_watch *watch, struct cox_error *err);

/* Converts the error of a reply into a cox_error. Never 0. */
struct CoxswainControl__Error;
int cox_client_error(const struct CoxswainControl__Error *reply_error, struct cox_error *err);

/* Makes the text of another process safe to print: bytes that are no printable UTF-8 become '?';
 * newlines stay. */
void cox_client_clean_text(char *text);

#endif
