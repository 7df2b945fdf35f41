/*
 * socket_file: the socket on which a coordinator listens, and its file in the runtime directory:
 * `<runtime directory>/<name>.sock`.
 *
 * Where another process removes the file, or the directory (a logout, a cleaner of /tmp), both are
 * made anew a second later, with another socket, and every second again until that succeeds.
 *
 * Private to the library.
 * Threads: one at a time; remove from any, but not together with close.
 * Ownership: the object owns its fds; listen_fd and watch_fd are there to be polled.
 * Blocks: open, until the lock of the runtime directory is free; nothing else, but for that remove
 *   waits a second at most.
 * If the process dies: the file stays, and refuses connections: no child of fork has the socket.
 *   The next start under any name in that directory, and `coxswain clean`, remove it.
 */
#ifndef COX_CHANNEL_SOCKET_FILE_H
#define COX_CHANNEL_SOCKET_FILE_H

#include <pthread.h>

#include "channel/shm/geometry.h"
#include "closer.h"
#include "runtime_dir.h"

/* Connections that wait to be accepted; the kernel takes net.core.somaxconn if that is less. */
#define COX_SOCKET_BACKLOG 4096

struct cox_socket_file {
    /* lent */
    struct cox_closer *closer;
    const struct cox_log *log;
    /* of the group */
    char name[COX_NAME_SIZE_MAX + 1];
    char path[COX_SOCKET_PATH_SIZE];
    char file[COX_RUNTIME_DIR_FILE_SIZE];
    int listen_fd;
    /* readable when the file may have been removed; -1: there is no inotify to be had */
    int watch_fd;
    /* when it is checked that the file is there; 0: not before the next event */
    uint64_t check_ns;
    /* the last attempt to make it anew has failed, which is logged once */
    bool lost;
    /* protects what follows */
    pthread_mutex_t lock;
    int runtime_dir_fd;
    bool named;
    dev_t device;
    ino_t inode;
};

/* Nothing is open; close may follow. */
void cox_socket_file_init(struct cox_socket_file *file, struct cox_closer *closer,
                          const struct cox_log *log);
/* Removes the sockets of dead coordinators in the runtime directory, and listens. On failure close
 * has to follow. Returns as cox_control_socket_open. */
int cox_socket_file_open(struct cox_socket_file *file, const char *name, const char *runtime_dir,
                         struct cox_error *err);
/* watch_fd is readable. */
void cox_socket_file_changed(struct cox_socket_file *file);
/* Makes the file anew if it is gone, when it is time to check. Returns when it is again. */
uint64_t cox_socket_file_turn(struct cox_socket_file *file);
/* Removes the file, while the socket listens still: afterwards another start may take the name.
 * Idempotent. */
void cox_socket_file_remove(struct cox_socket_file *file);
void cox_socket_file_close(struct cox_socket_file *file);

#endif
