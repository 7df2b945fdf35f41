/*
 * handle_internal: the steps of opening a by-value handle, and what exporter, importer and the tool
 * share of it beyond its contract (handle.h).
 *
 * Threads: any; nothing is kept.
 * Ownership: opened fds are the caller's.
 * Blocks: only at a control socket, until the deadline.
 * If the process dies: nothing is left.
 */
#ifndef COX_CHANNEL_HANDLE_INTERNAL_H
#define COX_CHANNEL_HANDLE_INTERNAL_H

#include "handle.h"
#include "channel/base/peer.h"

#include <sys/stat.h>

/* CRC-32C (Castagnoli): polynomial 0x1edc6f41, reflected; of "123456789" it is 0xe3069283. */
uint32_t cox_handle_crc(const void *bytes, size_t size);
/* The bytes, crc included. */
void cox_handle_format(const struct cox_handle_info *info, struct cox_handle *ret_handle);

/* This machine's boot and this process's pid and time namespaces, hashed. Returns 0, -errno. */
int cox_handle_system(uint64_t *ret_system, struct cox_error *err);

/* This process, as a handle tells it. */
struct cox_handle_self {
    pid_t pid;
    uint64_t start;
    uint64_t system;
};
/* Returns 0; COX_UNSUPPORTED: /proc shows another pid namespace; -errno. */
int cox_handle_self_load(struct cox_handle_self *ret_self, struct cox_error *err);

enum cox_handle_kind cox_handle_kind_of(const struct stat *st);
/* As it is in a handle: what the kernel tells has 32 bits. */
static inline uint32_t cox_handle_device_of(const struct stat *st)
{
    return (uint32_t)st->st_dev;
}

/* ---- opening, step by step ---- */

enum cox_handle_way {
    COX_HANDLE_BY_DUP, /* exported by this very process */
    COX_HANDLE_BY_PIDFD,
    COX_HANDLE_BY_SOCKET,
};

/* Made on this system: otherwise COX_NOT_FOUND. Nothing is asked about the pid. */
int cox_handle_reachable(const struct cox_handle_info *info, uint64_t system,
                         struct cox_error *err);
/* True for what the two functions below return, without a text, when this way is closed and the
 * control socket may help: the kernel lacks the call, or somebody does not allow it. */
static inline bool cox_handle_way_closed(int r)
{
    return r == -ENOSYS || r == -EPERM || r == -EACCES;
}
/* COX_PEER_DEAD, in words. */
int cox_handle_fail_dead(const struct cox_handle_info *info, struct cox_error *err);
/* Whether the exporter lives, as /proc tells. Returns 0: it does; COX_PEER_DEAD; COX_CORRUPT;
 * -errno: that cannot be told (-EACCES, -EPERM: /proc hides it). */
int cox_handle_check_exporter(const struct cox_handle_info *info);
/* The exporter. Returns 0; COX_PEER_DEAD; -errno. */
int cox_handle_open_exporter(const struct cox_handle_info *info, struct cox_peer *ret_peer,
                             struct cox_error *err);
/* Takes the fd out of it. Returns 0; COX_NOT_FOUND; COX_PEER_DEAD; -errno. */
int cox_handle_open_pidfd(const struct cox_handle_info *info, const struct cox_peer *peer,
                          int *ret_fd, struct cox_error *err);
/* pid and start of the handle are this process's. Returns 0; COX_NOT_FOUND; -errno. */
int cox_handle_open_own(const struct cox_handle_info *info, int *ret_fd, struct cox_error *err);
/* After the way of pidfds was closed with this -errno; socket_path NULL: there is none. Returns 0;
 * COX_PEER_DEAD; COX_DENIED; COX_UNSUPPORTED; COX_TIMEOUT; COX_NOT_FOUND; -errno. */
int cox_handle_open_socket(const struct cox_handle *handle, const struct cox_handle_info *info,
                           const char *socket_path, uint64_t deadline_ns, int closed, int *ret_fd,
                           struct cox_error *err);
/* cox_handle_open, that tells the way. */
int cox_handle_open_way(const struct cox_handle *handle, const char *socket_path,
                        uint64_t deadline_ns, int *ret_fd, enum cox_handle_way *ret_way,
                        struct cox_error *err);

/* ---- handle_probe.c ---- */

/* kernel.yama.ptrace_scope; -1: there is no Yama, or it cannot be told. */
int cox_handle_yama(void);
/* Why the kernel may have said no, as far as /proc tells, and what to do. */
void cox_handle_explain_denied(pid_t exporter, char *text, size_t text_size);

#endif
