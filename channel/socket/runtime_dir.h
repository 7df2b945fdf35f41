/*
 * runtime_dir: the directory of control sockets: its path, its lock, the names in it, and what
 * dead processes left there.
 *
 * Everything goes by an fd of the folder: what was checked is what is used, and a socket's address
 * is /proc/self/fd/FD/FILE, which is short however long the runtime directory's path is.
 *
 * A socket has its name only while somebody listens: it is bound as COX_RUNTIME_DIR_NEW_FILE,
 * listens, and is then renamed, all of it under the lock. So a socket that refuses a connection is
 * a dead one.
 *
 * Private to the library.
 * Threads: any.
 * Ownership: fds are the caller's.
 * Blocks: lock until its deadline; the rest for nobody.
 * If the process dies: the kernel lets go of the lock; names stay until the next sweep.
 */
#ifndef COX_CHANNEL_RUNTIME_DIR_H
#define COX_CHANNEL_RUNTIME_DIR_H

#include "control_socket.h"

#include <sys/un.h>

/* A file in it, at most, with its end: what an address has left behind "/proc/self/fd/2147483647/".
 */
#define COX_RUNTIME_DIR_FILE_SIZE (sizeof(((struct sockaddr_un *)0)->sun_path) - 25)
/* There is only one: who makes one holds the lock. */
#define COX_RUNTIME_DIR_NEW_FILE "starting.new"

/* $XDG_RUNTIME_DIR/coxswain, or /tmp/coxswain-<uid> where that is not set, empty, or relative.
 * Returns 0 or COX_TOO_LARGE. */
int cox_runtime_dir_default(char buffer[COX_SOCKET_PATH_SIZE], struct cox_error *err);
/* How the file of a control socket ends. The second is a hard link to it, for clients of releases
 * before 0.2, which know no other name. */
#define COX_RUNTIME_DIR_SOCKET_END ".sock"
#define COX_RUNTIME_DIR_OLD_END ".door"

/* The file of a group's control socket: NAME.sock; a name that is too long for an address is
 * shortened and has a hash of the whole. */
void cox_runtime_dir_file(const char *name, char buffer[COX_RUNTIME_DIR_FILE_SIZE]);
/* The other name of a socket's file: that of old clients. False: file does not end as one does. */
bool cox_runtime_dir_old_file(const char *file, char buffer[COX_RUNTIME_DIR_FILE_SIZE]);
/* The length of the group's name in the name of a socket's file, either one; 0: it is none. */
size_t cox_runtime_dir_name_length(const char *file);

/* Opens the runtime directory, for a control socket; create: makes it where it is not there (its
 * parent has to be). One of this user that lets nobody else in gets mode 0700 (an odd umask, or
 * death, may have left another). Returns 0; COX_NOT_FOUND; COX_DENIED: another owner, others may
 * look into it, a link, no runtime directory; -errno. */
int cox_runtime_dir_open(const char *path, bool create, int *ret_fd, struct cox_error *err);

/* One process at a time makes or removes names. Returns 0; COX_BUSY: another one had it until the
 * deadline; -errno. */
int cox_runtime_dir_lock(int runtime_dir_fd, uint64_t deadline_ns, struct cox_error *err);
void cox_runtime_dir_unlock(int runtime_dir_fd);

/* For bind and connect. file has to be shorter than COX_RUNTIME_DIR_FILE_SIZE. */
void cox_runtime_dir_address(int runtime_dir_fd, const char *file, struct sockaddr_un *ret_address);

/* Connects to the socket of that name. Returns 0; COX_TIMEOUT: no place was free until the
 * deadline; -errno. */
int cox_runtime_dir_connect(int runtime_dir_fd, const char *file, uint64_t deadline_ns,
                            int *ret_fd);

/* Whoever listens at path, where fd is connected to, is of this user or root. Returns 0;
 * COX_DENIED; -errno. */
int cox_runtime_dir_check_listener(int fd, const char *path, struct cox_error *err);

/* Who listens there. Returns 0, *ret_pid may be 0 (not known); COX_CLOSED: nobody; COX_NOT_FOUND:
 * no such file; COX_DENIED: no socket of this user; -errno. */
int cox_runtime_dir_probe(int runtime_dir_fd, const char *file, pid_t *ret_pid);

/* Under the lock: removes sockets that nobody listens on. Returns 0 or -errno. */
int cox_runtime_dir_sweep(int runtime_dir_fd, uint32_t *ret_count, struct cox_error *err);

#endif
