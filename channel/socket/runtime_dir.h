/*
 * runtime_dir: the directory of control sockets: its path, its lock, the names in it, and the
 * leftovers of dead processes.
 *
 * Every access goes through an fd of the directory, so that what was checked is what is used. A
 * socket's address is /proc/self/fd/FD/FILE, which is short however long the directory's path is.
 *
 * A socket has its name only while a process listens: it is bound as COX_RUNTIME_DIR_NEW_FILE,
 * listens, and is then renamed, all under the lock. So a socket that refuses a connection is a dead
 * one.
 *
 * Private to the library.
 * Threads: any.
 * Ownership: fds are the caller's.
 * Blocks: lock, until its deadline; nothing else.
 * If the process dies: the kernel releases the lock; names stay until the next sweep.
 */
#ifndef COX_CHANNEL_RUNTIME_DIR_H
#define COX_CHANNEL_RUNTIME_DIR_H

#include "control_socket.h"

#include <sys/un.h>

/* Size of a file name in it, at most, with its terminator: what "/proc/self/fd/2147483647/" leaves
 * of an address. */
#define COX_RUNTIME_DIR_FILE_SIZE (sizeof(((struct sockaddr_un *)0)->sun_path) - 25)
/* There is only one: the process that creates it holds the lock. */
#define COX_RUNTIME_DIR_NEW_FILE "starting.new"

/* Where a group makes its socket: $COXSWAIN_RUNTIME_DIR; $XDG_RUNTIME_DIR/coxswain; or
 * /tmp/coxswain-<uid>, where the first is not set or empty, and the second not set, empty or
 * relative. Returns 0; COX_INVALID: COXSWAIN_RUNTIME_DIR is relative; COX_TOO_LARGE. */
int cox_runtime_dir_default(char buffer[COX_SOCKET_PATH_SIZE], struct cox_error *err);
/* Where clients look for the socket of a group, in this order. $COXSWAIN_RUNTIME_DIR, if it is set,
 * is the only place. Otherwise a group of the same user may have been started with another
 * environment, in a login or as a service: $XDG_RUNTIME_DIR/coxswain, /run/user/<uid>/coxswain,
 * /run/coxswain, /tmp/coxswain-<uid>. index: 0 for the first. Returns as cox_runtime_dir_default,
 * and COX_EMPTY: there are fewer. */
int cox_runtime_dir_search(uint32_t index, char buffer[COX_SOCKET_PATH_SIZE],
                           struct cox_error *err);
/* For an error about a path that this user may not enter: what to do, if the environment has chosen
 * it, as that of another user (su, runuser and sudo keep XDG_RUNTIME_DIR); else "". */
const char *cox_runtime_dir_remedy(const char *path);
/* The file of a group's control socket: NAME.sock; a name that is too long for an address is
 * shortened and has a hash of the whole. */
void cox_runtime_dir_file(const char *name, char buffer[COX_RUNTIME_DIR_FILE_SIZE]);
/* The length of the group's name in a socket's file name; 0: it is no such name. */
size_t cox_runtime_dir_name_length(const char *file);

/* Opens the runtime directory for a control socket. create: makes it if it is missing (its parent
 * must exist). A directory of this user that lets no one else in gets mode 0700, since an odd
 * umask, or a death, may have left another mode.
 * Returns
 *   0
 *   COX_NOT_FOUND
 *   COX_DENIED: another owner, access for others, a link, or not a directory
 *   -errno
 */
int cox_runtime_dir_open(const char *path, bool create, int *ret_fd, struct cox_error *err);

/* One process at a time creates or removes names. Returns 0; COX_BUSY: another process held the
 * lock until the deadline; -errno. */
int cox_runtime_dir_lock(int runtime_dir_fd, uint64_t deadline_ns, struct cox_error *err);
void cox_runtime_dir_unlock(int runtime_dir_fd);

/* For bind and connect. file is shorter than COX_RUNTIME_DIR_FILE_SIZE. */
void cox_runtime_dir_address(int runtime_dir_fd, const char *file, struct sockaddr_un *ret_address);

/* Connects to the socket of that name. Returns 0; COX_TIMEOUT: its queue was full until the
 * deadline; -errno. */
int cox_runtime_dir_connect(int runtime_dir_fd, const char *file, uint64_t deadline_ns,
                            int *ret_fd);

/* Checks that the process that listens at path, to which fd is connected, is of this user or root;
 * for root with other_users, of any. Returns 0; COX_DENIED; -errno. */
int cox_runtime_dir_check_listener(int fd, const char *path, bool other_users,
                                   struct cox_error *err);

/* Finds the process that listens there.
 * Returns
 *   0: *ret_pid may be 0, unknown
 *   COX_CLOSED: none
 *   COX_NOT_FOUND: no such file
 *   COX_DENIED: not a socket of this user
 *   -errno
 */
int cox_runtime_dir_probe(int runtime_dir_fd, const char *file, pid_t *ret_pid);

/* Under the lock: removes sockets on which no process listens. Returns 0 or -errno. */
int cox_runtime_dir_sweep(int runtime_dir_fd, uint32_t *ret_count, struct cox_error *err);

#endif
