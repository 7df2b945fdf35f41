/*
 * control socket: where workers and commands come in: a unix socket of a live group, and the
 * handshake on it.
 *
 * A client connects, sends one hello frame of exactly 1024 bytes and nothing else, and gets one
 * message back: a byte 1, a hello reply and all fds that are meant for it; or a byte 0, a code (u8,
 * enum cox_status), a length (u8) and a reason in UTF-8. A refused client's connection is closed;
 * another one's stays open for life: its end is the end of the client, or of the coordinator.
 *
 * The hello frame, little-endian, what is not named is zero:
 *
 *   0   version u64             the newest this client speaks
 *   8   role u32                enum cox_hello_role
 *   12  rank u32                a worker's; COX_HELLO_RANK_ANY: whichever is free
 *   16  flags u64               none is defined: all zero
 *   24  rank_count u32          a worker's world size; 0: whatever the group has
 *   28  fd_count_max u32        fds it can take at once, 1 to 128
 *   32  generation u32          a worker's; 0: whatever the coordinator says
 *   36  reserved u32
 *   40  request_size_min u64    bytes a request frame must hold; 0: any
 *   48  response_size_min u64   bytes a reply slot must hold; 0: any
 *   56  start u64               start time of its process (peer.h); 0: not told
 *   64  reserved, zero, to 1024: later versions add fields here
 *
 * The hello reply, 127 bytes behind the byte 1:
 *
 *   0   version u64             that is spoken from here on
 *   8   attach u32              enum cox_attach
 *   12  rank u32
 *   16  rank_count u32
 *   20  generation u32
 *   24  epoch u32
 *   28  fd_count u32
 *   32  reserved, zero
 *
 * fds of a worker, attach named: the 28 of fd_bundle.h, in its order (and the rank group's);
 * sealed: request memory (read-only), memory of the rank, wake words, its words and its values in
 * the rank group (sealed.h).
 *
 * Files: `<runtime directory>/<name>.sock` (a long name is shortened, with a hash), and for one
 *   release `<name>.door`, a hard link to it, in
 *   $XDG_RUNTIME_DIR/coxswain, or /tmp/coxswain-<uid> where that variable is not set; the runtime
 *   directory has mode 0700 and this owner, or is refused.
 * Threads: open starts one, which calls the hooks; open and close from one thread.
 * Ownership: see the hooks; a session's fds are the caller's.
 * Blocks: connect until its deadline, all of it together; the control socket's thread for nobody: a
 *   client that is slow is dropped when its deadline has passed, and delays no other one. close
 *   waits COX_CLOSER_END_MS (closer.h) at most for fds that clients sent and whose close hangs
 *   (SO_LINGER, FUSE); the control socket's thread never does. While COX_CLOSER_WAITING_MAX of them
 *   wait, nobody is let in.
 * If the process dies: the socket file stays, and refuses connections; the next start under any
 *   name in that runtime directory, and `coxswain clean`, remove it.
 */
#ifndef COX_CHANNEL_CONTROL_SOCKET_H
#define COX_CHANNEL_CONTROL_SOCKET_H

#include "channel/base/base.h"

#include <sys/types.h>

#define COX_HELLO_VERSION UINT64_C(1)
#define COX_HELLO_SIZE 1024
#define COX_HELLO_RANK_ANY UINT32_MAX
#define COX_HELLO_FD_COUNT_MAX 32
#define COX_HELLO_REASON_MAX 255
#define COX_SOCKET_PATH_SIZE 4096

enum cox_hello_role {
    COX_HELLO_WORKER = 1,
    COX_HELLO_COMMAND = 2,  /* status, stop, ...: what follows is the control protocol's */
    COX_HELLO_FD_STORE = 3, /* fds behind by-value handles: fd_store.h */
};

struct cox_hello {
    /* 0: this one's */
    uint64_t version;
    enum cox_hello_role role;
    uint32_t rank;
    uint64_t flags;
    uint32_t rank_count;
    /* 0: COX_HELLO_FD_COUNT_MAX */
    uint32_t fd_count_max;
    uint32_t generation;
    uint64_t request_size_min;
    uint64_t response_size_min;
    uint64_t start;
};

struct cox_hello_reply {
    uint64_t version;
    enum cox_attach attach;
    uint32_t rank;
    uint32_t rank_count;
    uint32_t generation;
    uint32_t epoch;
};

/* Writes and reads the frame; what is a worker's is not written for others. parse: bytes are a
 * stranger's, *ret_hello has no 0 for fd_count_max. Returns 0; COX_VERSION, with both versions in
 * err; COX_INVALID: a role, count, size, flag or reserved byte that cannot be, in words ("world
 * size; count=129: expected 1 to 128, or 0 for whatever the group has"). */
void cox_hello_format(const struct cox_hello *hello, uint8_t frame[COX_HELLO_SIZE]);
int cox_hello_parse(const uint8_t frame[COX_HELLO_SIZE], struct cox_hello *ret_hello,
                    struct cox_error *err);

/* ---- the coordinator's side ---- */

/* Who has come. */
struct cox_control_client {
    /* of this connection, never used twice */
    uint64_t id;
    /* by SO_PEERCRED; 0: cannot be seen from here */
    pid_t pid;
    uid_t uid;
    struct cox_hello hello;
};

struct cox_control_socket_reply {
    /* version is filled by the control socket */
    struct cox_hello_reply hello_reply;
    int fds[COX_HELLO_FD_COUNT_MAX];
    /* lent: the coordinator sends them before it does anything else */
    uint32_t fd_count;
    /* bit i: fds[i] is the control socket's, and closed whatever becomes of the client */
    uint64_t given;
};

/* All on the control socket's thread; none may block, or close the control socket. Each may be
 * NULL: such clients are refused. What is refused gets what the hook returned as its own result
 * (cox_control_socket_connect) when that is an enum cox_status. */
struct cox_control_socket_hooks {
    void *context;
    /* The veto, for every client whose frame is in order; NULL: nobody is refused. Not 0: it is
     * told err's text. */
    int (*admit)(void *context, const struct cox_control_client *client, struct cox_error *err);
    /* Fills the reply. Not 0: it is told err's text. A worker that does not take as many fds is
     * refused, and gone. */
    int (*worker)(void *context, const struct cox_control_client *client,
                  struct cox_control_socket_reply *reply, struct cox_error *err);
    /* A worker that was accepted has closed its connection, or died, or sent something (it is not
     * to). Also called when the hello reply could not be sent. Once for each whose `worker`
     * returned 0, unless the control socket is closed first. */
    void (*worker_gone)(void *context, const struct cox_control_client *client);
    /* A command: fd, a blocking stream, is given. Not 0: it is refused, fd is the control socket's.
     * It is accepted when the hook returns: what is written before the client has asked something
     * may overtake the hello reply. */
    int (*command)(void *context, const struct cox_control_client *client, int fd,
                   struct cox_error *err);
};

struct cox_control_socket_options {
    /* of the group; lent */
    const char *name;
    /* NULL: as said above */
    const char *runtime_dir;
    /* how long a client may take for its frame; 0: 1,000 */
    uint64_t hello_ms;
    /* connections at a time, but for commands that were given away; 0: 512. When there are as many,
     * the oldest whose hello is not complete goes for the new one; if there is none, the new one is
     * refused. The same where this process has no fd left. Five eighths are for fd owners at most
     */
    uint32_t client_max;
    /* fds kept for handles; 0: a quarter of RLIMIT_NOFILE. One fd owner may have seven eighths of
     * them */
    uint32_t fd_entry_max;
    struct cox_log log;
};

struct cox_control_socket;

/* Removes what dead coordinators left in the runtime directory, listens, and starts the thread.
 * Returns 0; COX_TAKEN: a live coordinator listens under this name, err has its pid; COX_DENIED:
 * the runtime directory has another owner, lets others in or is none, or something else has the
 * socket's name, err says what to do; COX_NOT_FOUND: where the runtime directory is to be made
 * there is nothing; COX_BUSY: another start holds the runtime directory's lock for too long, or who
 * has the name was killed and does not end; COX_INVALID, COX_TOO_LARGE: name, path; -errno. Nothing
 * is left unless 0, but for the runtime directory. */
int cox_control_socket_open(const struct cox_control_socket_options *options,
                            const struct cox_control_socket_hooks *hooks,
                            struct cox_control_socket **ret_socket, struct cox_error *err);
/* Removes the socket, which close does otherwise; for a process that is about to end. Not while
 * another thread closes. */
void cox_control_socket_unname(struct cox_control_socket *control_socket);
/* What clients have caused to be kept here, and how much of it there can be. */
struct cox_control_socket_counts {
    /* connections, about 1.5 KiB each */
    uint32_t clients, client_max;
    /* of them */
    uint32_t fd_owners, fd_owner_max;
    /* fds that are kept, of all */
    uint32_t fd_entries, fd_entry_max;
    /* fds that wait to be closed: closer.h */
    uint32_t closing, closing_max;
    /* of them, whose close hangs */
    uint32_t hanging;
};
/* Of a moment ago. From any thread, until close. */
void cox_control_socket_counts(const struct cox_control_socket *control_socket,
                               struct cox_control_socket_counts *ret_counts);
/* Closes every connection (no hook is called for them), removes the socket, joins the thread.
 * NULL-safe, returns NULL. */
struct cox_control_socket *cox_control_socket_close(struct cox_control_socket *control_socket);
/* Of the socket; lent until close. */
const char *cox_control_socket_path(const struct cox_control_socket *control_socket);

/* Removes sockets in the runtime directory (NULL: the default one) that nobody listens on.
 * *ret_count: how many. Returns 0; COX_DENIED; COX_BUSY; -errno. No runtime directory is 0. */
int cox_control_socket_sweep(const char *runtime_dir, uint32_t *ret_count, struct cox_error *err);

/* ---- the client's side ---- */

struct cox_control_connection {
    /* the connection; closing it is leaving */
    int fd;
    struct cox_hello_reply hello_reply;
    int fds[COX_HELLO_FD_COUNT_MAX];
    uint32_t fd_count;
};

/* Where the control socket of a group is; the file need not exist. buffer has COX_SOCKET_PATH_SIZE
 * bytes. Returns 0; COX_INVALID: the name; COX_TOO_LARGE. */
int cox_control_socket_find(const char *name, char *buffer, struct cox_error *err);
/* Connects, checks that the other side is this user's (or root's), logs on, and waits for the
 * reply; all of it until deadline_ns. Returns 0; COX_NOT_FOUND: no such control socket;
 * COX_CLOSED: nobody listens there any more, or the control socket was closed before it replied;
 * COX_TIMEOUT; COX_DENIED: another user's, or no socket; COX_CORRUPT: the reply makes no sense, or
 * the connection ended within it; COX_INVALID: the path; -errno; or, refused: what the control
 * socket gives as the reason's code (COX_VERSION, COX_TAKEN, COX_FULL, ...), COX_REJECTED where
 * that is none. err has the text. Nothing is open unless 0. */
int cox_control_socket_connect(const char *path, const struct cox_hello *hello,
                               uint64_t deadline_ns, struct cox_control_connection *ret_session,
                               struct cox_error *err);
void cox_control_connection_close(
    struct cox_control_connection *session); /* idempotent on a closed one */

#endif
