/*
 * doctor_checks: tries the kernel features that a group needs, before a start.
 *
 * A version number does not suffice: distributions backport features, and the seccomp profile of a
 * container removes them. So each probe performs the operation as the library does, in small.
 *
 * Unless stated otherwise, each function returns 0: it works; -ENOSYS: the kernel is too old, or a
 * filter pretends so; another -errno.
 *
 * Threads: one at a time; those that fork must run before the process has threads.
 * Blocks: until the children that a probe forks have ended, which is at once.
 * If the process dies: the children end with it. Only between two calls of cox_doctor_unnamed_file
 *   can a name be left, /dev/shm/<pid>_doctor, and of cox_doctor_runtime_dir, <pid>.doctor in
 *   that folder.
 */
#ifndef COX_PROGRAM_DOCTOR_CHECKS_H
#define COX_PROGRAM_DOCTOR_CHECKS_H

#include <coxswain/base.h>

/* An unnamed file in /dev/shm that gets a name later: so regions appear only when complete. */
int cox_doctor_unnamed_file(void);
/* A memfd with the seals of a region without a name: afterwards no process can map it for writing,
 * and all can for reading. */
int cox_doctor_seals(void);
/* A futex wait on a read-only mapping: how ranks of sealed groups wait. */
int cox_doctor_futex_read_only(void);
/* SO_PEERCRED: which process may connect to a control socket. */
int cox_doctor_socket_peer(void);
/* Where the sockets of groups are, or would be: path (of COX_SOCKET_PATH_SIZE bytes) is filled
 * unless COX_TOO_LARGE is returned. Makes only a socket there, and removes it. Returns as
 * cox_control_socket_open for the folder; err has what is wrong and what to do. */
int cox_doctor_runtime_dir(char *path, struct cox_error *err);
/* A process that is created with its pidfd (CLONE_PIDFD) and reaped by it (P_PIDFD): how workers
 * start and end. */
int cox_doctor_child_pidfd(void);
/* A pidfd of a process that is not a child: how a worker watches its coordinator. */
int cox_doctor_pidfd_open(void);
int cox_doctor_close_range(void);
int cox_doctor_futex_waitv(void);

enum cox_doctor_whose {
    COX_PROBE_CHILD,   /* of a process by its parent: of a worker by its coordinator */
    COX_PROBE_SIBLING, /* of a process by another child of its parent: between workers */
};
/* An fd of another process, by its number. */
int cox_doctor_pidfd_getfd(enum cox_doctor_whose whose);

/* Processors that this process may run on, however many the machine has. Returns 0 or -errno. */
int cox_doctor_processors(uint32_t *ret_count);
/* Bytes that new processes can have without swapping. Returns 0 or -errno. */
int cox_doctor_memory(uint64_t *ret_bytes);

#endif
