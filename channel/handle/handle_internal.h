/*
 * handle_internal: the steps of opening a by-value handle, shared by exporter, importer and the
 * handle command. handle.h has the contract.
 *
 * Threads: any; nothing is kept.
 * Ownership: opened fds are the caller's.
 * Blocks: only at a control socket, until the deadline.
 * If the process dies: nothing is left.
 */
#ifndef COX_CHANNEL_HANDLE_INTERNAL_H
#define COX_CHANNEL_HANDLE_INTERNAL_H

#include "channel/base/peer.h"

#include <coxswain/handle.h>

#include <sys/stat.h>

/* CRC-32C (Castagnoli): polynomial 0x1edc6f41, reflected; the checksum of "123456789" is
 * 0xe3069283. */
uint32_t cox_handle_crc(const void *bytes, size_t size);
/* Formats the 64 bytes, with their checksum. */
void cox_handle_format(const struct cox_handle_info *info, struct cox_handle *ret_handle);

/* A hash of this machine's boot id and this process's pid and time namespaces. Returns 0 or -errno.
 */
int cox_handle_system(uint64_t *ret_system, struct cox_error *err);

/* The identity of this process as a handle contains it. */
struct cox_handle_self {
    pid_t pid;
    uint64_t start;
    uint64_t system;
};
/* Returns 0; COX_UNSUPPORTED: /proc shows another pid namespace; -errno. */
int cox_handle_self_load(struct cox_handle_self *ret_self, struct cox_error *err);

enum cox_handle_kind cox_handle_kind_of(const struct stat *st);
/* As in a handle: the kernel's device numbers have 32 bits. */
static inline uint32_t cox_handle_device_of(const struct stat *st)
{
    return (uint32_t)st->st_dev;
}

/* ---- opening, step by step ---- */

enum cox_handle_way {
    COX_HANDLE_BY_DUP, /* exported by this process */
    COX_HANDLE_BY_PIDFD,
    COX_HANDLE_BY_SOCKET,
    COX_HANDLE_BY_PROC,
};

/* Returns 0 if the handle was made on this system, else COX_NOT_FOUND. Does not check the pid. */
int cox_handle_reachable(const struct cox_handle_info *info, uint64_t system,
                         struct cox_error *err);
/* True for results of functions below (without an error text) after which another way may still
 * succeed: the kernel lacks the call, or a policy denies it. */
static inline bool cox_handle_way_closed(int r)
{
    return r == -ENOSYS || r == -EPERM || r == -EACCES;
}
/* Returns COX_PEER_DEAD, with a text. */
int cox_handle_fail_dead(const struct cox_handle_info *info, struct cox_error *err);
/* Checks in /proc whether the exporter lives.
 * Returns
 *   0: it lives
 *   COX_PEER_DEAD
 *   COX_CORRUPT
 *   -errno: unknown (-EACCES, -EPERM: /proc hides the process)
 */
int cox_handle_check_exporter(const struct cox_handle_info *info);
/* Opens the exporter's pidfd. Returns 0; COX_PEER_DEAD; -errno. */
int cox_handle_open_exporter(const struct cox_handle_info *info, struct cox_peer *ret_peer,
                             struct cox_error *err);
/* Takes the fd from the exporter. Returns 0; COX_NOT_FOUND; COX_PEER_DEAD; -errno. */
int cox_handle_open_pidfd(const struct cox_handle_info *info, const struct cox_peer *peer,
                          int *ret_fd, struct cox_error *err);
/* For a handle that this process has exported. Returns 0; COX_NOT_FOUND; -errno. */
int cox_handle_open_own(const struct cox_handle_info *info, int *ret_fd, struct cox_error *err);
/* Memory only: opens by /proc what the exporter has open, with the access mode of its fd. Yama does
 * not deny that, and no control socket is needed. Returns 0; COX_NOT_FOUND; COX_PEER_DEAD; -errno.
 */
int cox_handle_open_proc(const struct cox_handle_info *info, int *ret_fd, struct cox_error *err);
/* The other ways, after pidfd_getfd failed with this -errno: the control socket (socket_path NULL:
 * there is none), then /proc. Returns 0; COX_PEER_DEAD; COX_DENIED; COX_UNSUPPORTED; COX_TIMEOUT;
 * COX_NOT_FOUND; -errno. */
int cox_handle_open_denied(const struct cox_handle *handle, const struct cox_handle_info *info,
                           const char *socket_path, uint64_t deadline_ns, int closed, int *ret_fd,
                           enum cox_handle_way *ret_way, struct cox_error *err);
/* As cox_handle_open; *ret_way says how the fd was obtained. */
int cox_handle_open_way(const struct cox_handle *handle, const char *socket_path,
                        uint64_t deadline_ns, int *ret_fd, enum cox_handle_way *ret_way,
                        struct cox_error *err);

/* ---- handle_probe.c ---- */

/* kernel.yama.ptrace_scope; -1: no Yama, or unknown. */
int cox_handle_yama(void);
/* Fills in why the kernel may have denied access, as far as /proc shows, and what to do. */
void cox_handle_explain_denied(pid_t exporter, char *text, size_t text_size);

struct cox_handle_probe {
    /* the kernel has pidfd_getfd and allows it between processes of this user */
    bool pidfd_getfd;
    /* -errno if it does not, else 0 */
    int pidfd_error;
    /* the given control socket replies */
    bool control_socket;
    /* the reason if it does not, else 0 */
    int socket_error;
    /* kernel.yama.ptrace_scope; -1: the kernel has no Yama */
    int yama;
    /* other processes of the user may access this one (dumpable) */
    bool dumpable;
};
/* Tries both ways: pidfd_getfd on a temporary child process, and a connection to the control socket
 * (socket_path NULL: not tried). If yama is 1, success with the child does not mean that other
 * processes can be opened: one that is not a descendant needs a ptrace policy that allows it.
 * Returns 0 or -errno. */
int cox_handle_query(const char *socket_path, uint64_t deadline_ns,
                     struct cox_handle_probe *ret_ways);

/* Lasts until the process ends or sets another policy.
 * Returns
 *   0
 *   COX_UNSUPPORTED: the kernel has no Yama, so none is needed
 *   COX_INVALID: no process id, or no such policy
 *   -errno; -EINVAL: there is no such process
 */
int cox_ptrace_policy_set(enum cox_ptrace_policy policy, int32_t pid);

/* Shares a handle between two users: it then needs one more put.
 * Returns
 *   0
 *   COX_NOT_FOUND: not one of its handles
 *   COX_STATE
 */
int cox_exporter_share(struct cox_exporter *exporter, const struct cox_handle *handle);

#endif
