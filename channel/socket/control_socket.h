/*
 * control_socket: the unix socket of a live group, for workers and commands, and the handshake on
 * it.
 *
 * A client connects, sends one hello frame of exactly 1024 bytes and nothing else, and gets one
 * message: a byte 1, a hello reply and the fds for this client; or a byte 0, a code (u8, enum
 * cox_status), a length (u8) and a reason in UTF-8. The connection of a refused client is closed.
 * Any other connection stays open: its end is the end of the client, or of the coordinator.
 *
 * The hello frame, little-endian; all other bytes are zero:
 *
 *   0   version u64             the newest version that this client supports
 *   8   role u32                enum cox_hello_role
 *   12  rank u32                of a worker; COX_HELLO_RANK_ANY: any free one
 *   16  flags u64               none is defined: all zero
 *   24  rank_count u32          of a worker, its world size; 0: that of the group
 *   28  fd_count_max u32        fds it can take at once, 1 to 128
 *   32  incarnation u32          of a worker; 0: as the coordinator decides
 *   36  reserved u32
 *   40  request_size_min u64    bytes a request frame must hold; 0: any
 *   48  response_size_min u64   bytes a reply slot must hold; 0: any
 *   56  start u64               start time of its process (peer.h); 0: not given
 *   64  reserved, zero, to 1024: later versions add fields here
 *
 * The hello reply, 127 bytes after the byte 1:
 *
 *   0   version u64             of the protocol from here on
 *   8   attach u32              enum cox_attach
 *   12  rank u32
 *   16  rank_count u32
 *   20  incarnation u32
 *   24  group_incarnation u32
 *   28  fd_count u32
 *   32  reserved, zero
 *
 * The fds of a worker, attach named: the 28 of fd_bundle.h, in its order (and the rank group's).
 * Sealed: request memory (read-only), memory of the rank, wake words, its words and its values in
 * the rank group (sealed.h).
 *
 * Files: `<runtime directory>/<name>.sock` (a long name is shortened, with a hash). The runtime
 *   directory is $COXSWAIN_RUNTIME_DIR, or $XDG_RUNTIME_DIR/coxswain, or /tmp/coxswain-<uid> where
 *   neither is set; clients look in more places (cox_runtime_dir_search). A runtime directory that
 *   has another owner, or lets others in, is refused; its mode is 0700.
 * Threads: open starts one, which calls the hooks; open and close on one thread.
 * Ownership: see the hooks; a session's fds are the caller's.
 * Blocks: connect until its deadline, in all. The control socket's thread never waits for a client:
 *   a slow one is dropped at its deadline, and delays no other. close waits at most
 *   COX_CLOSER_END_MS (closer.h) for fds that clients sent and whose close hangs (SO_LINGER, FUSE);
 *   the control socket's thread never does. While COX_CLOSER_WAITING_MAX of them wait, no client is
 *   accepted.
 * If the process dies: the socket file stays, and refuses connections. The next start under any
 *   name in that runtime directory, and `coxswain clean`, remove it.
 */
#ifndef COX_CHANNEL_CONTROL_SOCKET_H
#define COX_CHANNEL_CONTROL_SOCKET_H

#include <coxswain/base.h>

#include <sys/types.h>

#define COX_HELLO_VERSION UINT64_C(1)
#define COX_HELLO_SIZE 1024
#define COX_HELLO_RANK_ANY UINT32_MAX
#define COX_HELLO_FD_COUNT_MAX 32
#define COX_HELLO_REASON_MAX 255
#define COX_SOCKET_PATH_SIZE 4096

enum cox_hello_role {
    COX_HELLO_WORKER = 1,
    COX_HELLO_COMMAND = 2,  /* status, stop, ...; the control protocol follows */
    COX_HELLO_FD_STORE = 3, /* fds behind by-value handles: fd_store.h */
};

struct cox_hello {
    /* 0: the present one */
    uint64_t version;
    enum cox_hello_role role;
    uint32_t rank;
    uint64_t flags;
    uint32_t rank_count;
    /* 0: COX_HELLO_FD_COUNT_MAX */
    uint32_t fd_count_max;
    uint32_t incarnation;
    uint64_t request_size_min;
    uint64_t response_size_min;
    uint64_t start;
    /* Not sent: root also connects to a socket of another user. Only for a path that an operator
     * has given: in a place that others can write, such a socket may be anybody's. */
    bool other_users;
};

struct cox_hello_reply {
    uint64_t version;
    enum cox_attach attach;
    uint32_t rank;
    uint32_t rank_count;
    uint32_t incarnation;
    uint32_t group_incarnation;
};

/* Write and read the frame; a worker's fields are written for workers only. parse: the bytes are
 * untrusted input; *ret_hello never has 0 for fd_count_max.
 * Returns
 *   0
 *   COX_VERSION: err has both versions
 *   COX_INVALID: a role, count, size, flag or reserved byte is out of range; err says which ("world
 *     size; count=129: expected 1 to 128, or 0 for whatever the group has")
 */
void cox_hello_format(const struct cox_hello *hello, uint8_t frame[COX_HELLO_SIZE]);
int cox_hello_parse(const uint8_t frame[COX_HELLO_SIZE], struct cox_hello *ret_hello,
                    struct cox_error *err);

/* ---- the coordinator's side ---- */

/* A client that has connected. */
struct cox_control_client {
    /* of this connection; unique */
    uint64_t id;
    /* by SO_PEERCRED; 0: not visible from here */
    pid_t pid;
    uid_t uid;
    struct cox_hello hello;
};

struct cox_control_socket_reply {
    /* the control socket sets version */
    struct cox_hello_reply hello_reply;
    int fds[COX_HELLO_FD_COUNT_MAX];
    /* lent; the coordinator sends them before it does anything else */
    uint32_t fd_count;
    /* bit i: the control socket owns fds[i], and closes it in any case */
    uint64_t given;
};

/* All are called on the control socket's thread. None may block, or close the control socket. Each
 * may be NULL: such clients are refused. A refused client gets the hook's result as its own
 * (cox_control_socket_connect), if that is an enum cox_status. */
struct cox_control_socket_hooks {
    void *context;
    /* Called for every client with a valid frame; NULL: accepts all. Not 0: refuses it with the
     * text of err. */
    int (*admit)(void *context, const struct cox_control_client *client, struct cox_error *err);
    /* Fills the reply. Not 0: refuses the worker with the text of err. A worker that does not take
     * as many fds is refused, and reported as gone. */
    int (*worker)(void *context, const struct cox_control_client *client,
                  struct cox_control_socket_reply *reply, struct cox_error *err);
    /* An accepted worker has closed its connection, or died, or sent bytes, which it must not. Also
     * called if the hello reply could not be sent. Once for each worker for which `worker` returned
     * 0, unless the control socket is closed first. */
    void (*worker_gone)(void *context, const struct cox_control_client *client);
    /* A command has connected; fd, a blocking stream, becomes the hook's. Not 0: refuses it, and fd
     * stays the control socket's. It is accepted when the hook returns: bytes that are written
     * before the client has sent a request may overtake the hello reply. */
    int (*command)(void *context, const struct cox_control_client *client, int fd,
                   struct cox_error *err);
};

struct cox_control_socket_options {
    /* of the group; lent */
    const char *name;
    /* NULL: the default one, see above */
    const char *runtime_dir;
    /* time in which a client must send its frame; 0: 1,000 */
    uint64_t hello_ms;
    /* Connections at a time, without commands that were handed over; 0: 512. Beyond that the oldest
     * client with an incomplete hello is dropped for the new one; without such a client the new one
     * is refused. The same happens when this process has no fd left. At most five eighths are for
     * fd owners. */
    uint32_t client_max;
    /* fds kept for handles; 0: a quarter of RLIMIT_NOFILE. One fd owner may have seven eighths of
     * them. */
    uint32_t fd_entry_max;
    struct cox_log log;
};

struct cox_control_socket;

/* Removes the sockets of dead coordinators in the runtime directory, listens, and starts the
 * thread. On failure nothing is left but the runtime directory.
 * Returns
 *   0
 *   COX_TAKEN: a live coordinator listens under this name, err has its pid
 *   COX_DENIED: the runtime directory has another owner, lets others in or is not one, or something
 *     else has the socket's name; err says what to do
 *   COX_NOT_FOUND: the parent of the runtime directory does not exist
 *   COX_BUSY: another start holds the runtime directory's lock for too long, or the owner of the
 *     name was killed and does not end
 *   COX_INVALID: the name
 *   COX_TOO_LARGE: the path
 *   -errno
 */
int cox_control_socket_open(const struct cox_control_socket_options *options,
                            const struct cox_control_socket_hooks *hooks,
                            struct cox_control_socket **ret_socket, struct cox_error *err);
/* Removes the socket's file ahead of close, for a process that is about to exit. Not while another
 * thread closes. */
void cox_control_socket_unname(struct cox_control_socket *control_socket);
/* Resources that clients hold here, and their limits. */
struct cox_control_socket_counts {
    /* connections, about 1.5 KiB each */
    uint32_t clients, client_max;
    /* of them */
    uint32_t fd_owners, fd_owner_max;
    /* stored fds, of all owners */
    uint32_t fd_entries, fd_entry_max;
    /* fds that wait to be closed: closer.h */
    uint32_t closing, closing_max;
    /* of these, whose close hangs */
    uint32_t hanging;
};
/* A recent snapshot. Any thread, until close. */
void cox_control_socket_counts(const struct cox_control_socket *control_socket,
                               struct cox_control_socket_counts *ret_counts);
/* Closes every connection (no hook is called for them), removes the socket, joins the thread.
 * NULL-safe, returns NULL. */
struct cox_control_socket *cox_control_socket_close(struct cox_control_socket *control_socket);
/* Path of the socket; lent until close. */
const char *cox_control_socket_path(const struct cox_control_socket *control_socket);

/* Removes sockets in the runtime directory (NULL: the default one) on which no process listens.
 * *ret_count: how many. Returns 0, also without a runtime directory; COX_DENIED; COX_BUSY; -errno.
 */
int cox_control_socket_sweep(const char *runtime_dir, uint32_t *ret_count, struct cox_error *err);

/* ---- the client's side ---- */

struct cox_control_connection {
    /* the connection; closing it ends the client's part in the group */
    int fd;
    struct cox_hello_reply hello_reply;
    int fds[COX_HELLO_FD_COUNT_MAX];
    uint32_t fd_count;
};

/* Path of a group's control socket: in the first directory of the search (cox_runtime_dir_search)
 * where a process listens under that name; else where there is such a file; else in the default
 * one. buffer has COX_SOCKET_PATH_SIZE bytes. Returns 0; COX_INVALID: the name, or the environment;
 * COX_TOO_LARGE. */
int cox_control_socket_find(const char *name, char *buffer, struct cox_error *err);
/* The directories in which find looks, for errors: "A, B, C". Longer text is cut. */
void cox_control_socket_places(char *buffer, size_t buffer_size);
/* Connects, checks that the other side is this user's (or root's), sends the hello, and waits for
 * the reply, in all until deadline_ns. A client whose hello came too late for the control socket
 * (hello_ms) connects again, three times in all. On failure nothing is open.
 * Returns
 *   0
 *   COX_NOT_FOUND: no such control socket
 *   COX_CLOSED: no process listens there any more, or the control socket was closed before it
 *     replied
 *   COX_TIMEOUT
 *   COX_DENIED: another user's, or not a socket
 *   COX_CORRUPT: the reply is invalid, or the connection ended within it
 *   COX_INVALID: the path
 *   -errno
 *   or, if refused, the code of the reason (COX_VERSION, COX_TAKEN, COX_FULL, ...), COX_REJECTED
 *   for an unknown one; err has the text
 */
int cox_control_socket_connect(const char *path, const struct cox_hello *hello,
                               uint64_t deadline_ns, struct cox_control_connection *ret_session,
                               struct cox_error *err);
void cox_control_connection_close(
    struct cox_control_connection *session); /* idempotent on a closed one */

#endif
