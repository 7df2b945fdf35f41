/*
 * handle: an fd as 64 plain bytes, which survive memcpy, a file, a protobuf field, shared memory;
 * whoever gets them can open the same object in another process.
 *
 * The bytes are laid out in handle_format.h.
 *
 * Opening takes the fd out of the exporter with pidfd_getfd, and then checks that it is the object
 * that was meant. Where the kernel has no such call, or does not allow it (Yama, seccomp, an
 * exporter that is not dumpable), the fd is fetched at a control socket, if the exporter left it
 * there (fd_store.h) and the importer knows that control socket. Which way it goes is found out
 * anew at every open.
 *
 * What the check cannot see: devices opened twice, and kernel objects like eventfds, have one inode
 * for all, and some file systems give the number of a removed file to the next one. After a put,
 * another such object under the same fd number is taken for the old one; exporters make that rare
 * by giving numbers in turn. Before the put it cannot happen.
 *
 * A handle is a name, no right: who writes its bytes chooses which fd of which process the importer
 * takes, as far as the kernel lets the importer (root: any). Take handles from those only who may
 * choose. And the exporter may truncate the object later, unless a seal (F_SEAL_SHRINK) forbids it:
 * then the importer gets SIGBUS where it touches what is gone. The size is checked at open alone.
 *
 * Threads: an exporter and an importer may be used by any threads. The plain functions too.
 * Ownership: an exporter dups what it is given. An opened fd is the caller's.
 * Blocks: only at a control socket, until the deadline.
 * If the exporter dies: its handles cannot be opened any more (COX_PEER_DEAD); what was opened
 *   before stays valid. If the importer dies: nothing is left.
 */
#ifndef COX_CHANNEL_HANDLE_H
#define COX_CHANNEL_HANDLE_H

#include "../base/base.h"
#include "../base/handle_format.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What the bytes say, checked. */
struct cox_handle_info {
    enum cox_handle_kind kind;
    uint32_t pid;
    uint64_t start;
    uint64_t system;
    uint32_t fd;
    uint32_t dev;
    uint64_t ino;
    uint64_t size;
    uint64_t offset;
    uint32_t generation;
};

/* Bytes are a stranger's.
 * Returns
 *   0
 *   COX_CORRUPT: magic, crc, kind or numbers make no sense
 *   COX_VERSION
 */
COX_PUBLIC int cox_handle_parse(const struct cox_handle *handle, struct cox_handle_info *ret_info,
                                struct cox_error *err);

/* ---- which ways work here ---- */

struct cox_handle_probe {
    /* the kernel has it and allows it for processes of this user */
    bool pidfd_getfd;
    /* why not, -errno; 0 */
    int pidfd_error;
    /* the control socket given replies */
    bool control_socket;
    /* why not; 0 */
    int socket_error;
    /* kernel.yama.ptrace_scope; -1: there is none */
    int yama;
    /* others may look into this process */
    bool dumpable;
};
#ifdef COX_INTERNAL
/* Tries them: pidfd_getfd on a child of its own making, the control socket by connecting
 * (socket_path NULL: not tried). Where yama is 1 a child is what a process may look into; any other
 * one has to consent, whatever pidfd_getfd says here. Returns 0 or -errno. */
int cox_handle_query(const char *socket_path, uint64_t deadline_ns,
                     struct cox_handle_probe *ret_ways);
#endif

/* Consent: who may take fds out of this process where Yama restricts that to ancestors. Nothing of
 * the kind is ever set unless asked for. */
enum cox_handle_consent {
    COX_CONSENT_NONE = 0, /* leaves the process as it is */
    COX_CONSENT_PROCESS,  /* PR_SET_PTRACER of one process and its descendants */
    COX_CONSENT_ANY,      /* PR_SET_PTRACER_ANY: every process of this user, debuggers included */
};
#ifdef COX_INTERNAL
/* Holds until the process ends or consents to something else.
 * Returns
 *   0
 *   COX_UNSUPPORTED: no Yama, so that there is nothing to consent to
 *   COX_INVALID: pid is none, or no such consent
 *   -errno (-EINVAL: there is no such process)
 */
int cox_handle_consent(enum cox_handle_consent consent, int32_t pid);
#endif

/* ---- exporter ---- */

struct cox_exporter;

struct cox_exporter_options {
    /* set by COX_EXPORTER_OPTIONS_INIT (base.h) */
    size_t size;
    /* what is exported is left there as well; NULL: nowhere */
    const char *socket_path;
    enum cox_handle_consent consent;
    int32_t consent_pid;
    /* for each connection to the control socket; 0: 1,000 */
    uint64_t deadline_ms;
};
#define COX_EXPORTER_OPTIONS_INIT COX_OPTIONS_INIT(struct cox_exporter_options)

/* options NULL: all zero.
 * Returns
 *   0: also where there is no Yama to consent to
 *   COX_INVALID: the options
 *   what the control socket or the consent returns
 *   COX_UNSUPPORTED: /proc shows another pid namespace
 *   -errno
 */
COX_PUBLIC int cox_exporter_new(const struct cox_exporter_options *options,
                                struct cox_exporter **ret_exporter, struct cox_error *err);
/* Puts everything that is still exported. NULL-safe, returns NULL. In the child of a fork it only
 * lets go of memory and fds. */
COX_PUBLIC struct cox_exporter *cox_exporter_free(struct cox_exporter *exporter);
/* Exports fd: a duplicate of it stays open until put. The bytes meant are [offset, offset + size);
 * size 0: to the end of the object (memory), or nothing to map.
 * Returns
 *   0
 *   COX_INVALID: fd is none, or the range is not in the object
 *   COX_FULL: the control socket keeps no more
 *   what the control socket returns (COX_CLOSED: it is gone, for good: make a new exporter)
 *   COX_STATE: in the child of a fork
 *   -errno
 */
COX_PUBLIC int cox_exporter_export(struct cox_exporter *exporter, int fd, uint64_t offset,
                                   uint64_t size, struct cox_handle *ret_handle,
                                   struct cox_error *err);
#ifdef COX_INTERNAL
/* One more put is needed until it is gone.
 * Returns
 *   0
 *   COX_NOT_FOUND: not one of its handles
 *   COX_STATE
 */
int cox_exporter_share(struct cox_exporter *exporter, const struct cox_handle *handle);
#endif
/* After the last put nobody can open it any more; who has, keeps it. A control socket that does not
 * confirm that is left, and forgets all that was left there. Returns
 *   0
 *   COX_NOT_FOUND
 *   COX_STATE
 */
COX_PUBLIC int cox_exporter_put(struct cox_exporter *exporter, const struct cox_handle *handle);

/* ---- importer ---- */

/* Opens once, without an importer.
 * Returns
 *   0
 *   COX_CORRUPT: the bytes
 *   COX_VERSION: the bytes
 *   COX_NOT_FOUND: made on another machine, boot, or in another pid or time namespace
 *     ("unreachable", found before any call on the pid), or the fd is closed, or is another object
 *     by now
 *   COX_PEER_DEAD: the exporter is gone, or its pid is another process's by now
 *   COX_DENIED: not allowed (another user, Yama, seccomp) and no control socket helped
 *   COX_UNSUPPORTED: the kernel has no pidfd_getfd and no control socket helped
 *   COX_TIMEOUT
 *   -errno
 */
COX_PUBLIC int cox_handle_open(const struct cox_handle *handle, const char *socket_path,
                               uint64_t deadline_ns, int *ret_fd, struct cox_error *err);

struct cox_importer;

struct cox_importer_options {
    /* set by COX_IMPORTER_OPTIONS_INIT (base.h) */
    size_t size;
    /* NULL: pidfd_getfd only */
    const char *socket_path;
    /* for a connection to the control socket; 0: 1,000 */
    uint64_t deadline_ms;
    /* exporters whose pidfd is kept; 0: 64 */
    uint32_t cache_max;
    /* 0: the place of a later field */
    uint32_t reserved;
};
#define COX_IMPORTER_OPTIONS_INIT COX_OPTIONS_INIT(struct cox_importer_options)

/* What is open, once per handle however often it was opened; read-only for the caller. */
struct cox_import {
    /* lent until close */
    int fd;
    /* of what is meant, offset already added; NULL: not mapped */
    const void *base;
    uint64_t size;
    bool writable;
};

enum cox_import_flags {
    COX_IMPORT_FD = 0,    /* no mapping */
    COX_IMPORT_READ = 1,  /* mapped for reading */
    COX_IMPORT_WRITE = 2, /* mapped for reading and writing; with READ or without is the same */
};

/* options NULL: all zero.
 * Returns
 *   0
 *   COX_INVALID: the options
 *   -ENOMEM
 */
COX_PUBLIC int cox_importer_new(const struct cox_importer_options *options,
                                struct cox_importer **ret_importer, struct cox_error *err);
/* Closes everything. NULL-safe, returns NULL. */
COX_PUBLIC struct cox_importer *cox_importer_free(struct cox_importer *importer);
/* Opens, or counts one more use of what is open under the same 64 bytes and flags. A cached one is
 * never given for a handle that differs in any byte, nor once its exporter is dead (then
 * COX_PEER_DEAD, though what was opened before stays valid until closed). After a put, who has it
 * open may open it again.
 * Returns
 *   as cox_handle_open
 *   COX_INVALID: a mapping of what is not memory
 *   COX_DENIED: also, the fd, or a seal, does not allow this mapping
 */
COX_PUBLIC int cox_importer_open(struct cox_importer *importer, const struct cox_handle *handle,
                                 enum cox_import_flags flags, const struct cox_import **ret_import,
                                 struct cox_error *err);
/* One use less; the last one unmaps and closes (no fd stays open for what nobody uses). */
COX_PUBLIC void cox_importer_close(struct cox_importer *importer, const struct cox_import *import);

#ifdef __cplusplus
}
#endif

#endif
