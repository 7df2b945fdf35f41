/*
 * handle: an fd as 64 plain bytes, which may be copied to a file, a protobuf field or shared
 * memory. A process that gets the bytes can open the same object.
 *
 * Opening copies the fd from the exporter with pidfd_getfd, and checks that it is the exported one.
 * Where the kernel lacks or denies that (Yama, seccomp, an exporter that is not dumpable), it is
 * fetched from a control socket, if the exporter stored it there and the importer has its path; or
 * memory is opened by /proc, with the access of the exporter's fd. Each open tries all ways again.
 *
 * The check has limits. Devices opened twice, and kernel objects like eventfds, share one inode,
 * and some file systems reuse the inode number of a removed file. After a put, the check cannot
 * distinguish such an object under the same fd number from the old one. Exporters make that rare:
 * they do not reuse an fd number at once. Before the put it cannot happen.
 *
 * A handle is a name, not a permission. Its bytes select which fd of which process the importer
 * copies, within the importer's own permissions (root: any fd). Accept handles only from processes
 * that may make that choice. The exporter may truncate the object later unless a seal
 * (F_SEAL_SHRINK) forbids it; the importer then gets SIGBUS on the missing part. The size is
 * checked at open only.
 *
 * Threads: any, for exporters, importers and the plain functions.
 * Ownership: an exporter duplicates what it is given. An opened fd is the caller's.
 * Blocks: only at a control socket, until the deadline.
 * If the exporter dies: its handles can no longer be opened (COX_PEER_DEAD). What was opened before
 *   stays valid.
 * If the importer dies: nothing is left.
 */
#ifndef COX_HANDLE_H
#define COX_HANDLE_H

#include <coxswain/base.h>

#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

#define COX_HANDLE_SIZE 64

/* Plain bytes; they may be copied in any way. */
struct cox_handle {
    uint8_t bytes[COX_HANDLE_SIZE];
};

enum cox_handle_kind {
    COX_HANDLE_MEMORY = 1, /* a memfd or another file that can be mapped */
    COX_HANDLE_OTHER = 2,  /* a socket, a pipe, an eventfd, a device, ... */
};

/* The fields of a handle, checked. */
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
    uint32_t serial;
};

/* Reads the bytes, which are untrusted input.
 * Returns
 *   0
 *   COX_CORRUPT: magic, checksum, kind or numbers are invalid
 *   COX_VERSION
 */
COX_PUBLIC int cox_handle_parse(const struct cox_handle *handle, struct cox_handle_info *ret_info,
                                struct cox_error *err);

/* Ptrace policy: which other processes may copy fds from this one, if Yama restricts that to
 * ancestors. The library sets it only if the caller asks for it. */
enum cox_ptrace_policy {
    COX_PTRACE_NONE = 0, /* changes nothing */
    COX_PTRACE_PROCESS,  /* PR_SET_PTRACER of one process and its descendants */
    COX_PTRACE_ANY,      /* PR_SET_PTRACER_ANY: every process of this user, debuggers included */
};

/* ---- exporter ---- */

struct cox_exporter;

struct cox_exporter_options {
    /* set by COX_EXPORTER_OPTIONS_INIT (base.h) */
    size_t size;
    /* control socket at which exported fds are stored too; NULL: none */
    const char *socket_path;
    enum cox_ptrace_policy ptrace_policy;
    /* of COX_PTRACE_PROCESS */
    int32_t ptrace_pid;
    /* for each connection to the control socket; 0: 1,000 */
    uint64_t deadline_ms;
};
#define COX_EXPORTER_OPTIONS_INIT COX_OPTIONS_INIT(struct cox_exporter_options)

/* options NULL: all zero.
 * Returns
 *   0: also if no ptrace policy is needed, because the kernel has no Yama
 *   COX_INVALID: the options
 *   what the connection to the control socket returns
 *   COX_UNSUPPORTED: /proc shows another pid namespace
 *   -errno
 */
COX_PUBLIC int cox_exporter_new(const struct cox_exporter_options *options,
                                struct cox_exporter **ret_exporter, struct cox_error *err);
/* Puts all handles that are still exported. NULL-safe, returns NULL. In the child of a fork it only
 * releases memory and fds. */
COX_PUBLIC struct cox_exporter *cox_exporter_free(struct cox_exporter *exporter);
/* Exports fd: a duplicate of it stays open until put. The handle is for the bytes [offset, offset +
 * size). size 0: to the end of the object if it is memory, else nothing to map.
 * Returns
 *   0
 *   COX_INVALID: not an fd, or the range is not in the object
 *   COX_FULL: the control socket stores no more
 *   what the control socket returns; COX_CLOSED: the connection has ended, make a new exporter
 *   COX_STATE: in the child of a fork
 *   -errno
 */
COX_PUBLIC int cox_exporter_export(struct cox_exporter *exporter, int fd, uint64_t offset,
                                   uint64_t size, struct cox_handle *ret_handle,
                                   struct cox_error *err);
/* After the last put the handle can no longer be opened; fds that were opened stay valid. If the
 * control socket does not confirm the removal, the exporter disconnects, which removes all fds that
 * it stored there.
 * Returns
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
 *   COX_NOT_FOUND: made on another machine or boot, or in another pid or time namespace
 *     ("unreachable", detected before any call on the pid); or the exporter has closed the fd, or
 *     reused its number for another object
 *   COX_PEER_DEAD: the exporter is dead, or another process has its pid now
 *   COX_DENIED: not allowed (another user, Yama, seccomp), and no other way helped
 *   COX_UNSUPPORTED: the kernel has no pidfd_getfd, and no other way helped
 *   COX_TIMEOUT
 *   -errno
 */
COX_PUBLIC int cox_handle_open(const struct cox_handle *handle, const char *socket_path,
                               uint64_t deadline_ns, int *ret_fd, struct cox_error *err);

struct cox_importer;

struct cox_importer_options {
    /* set by COX_IMPORTER_OPTIONS_INIT (base.h) */
    size_t size;
    /* NULL: none */
    const char *socket_path;
    /* for each connection to the control socket; 0: 1,000 */
    uint64_t deadline_ms;
    /* number of exporters whose pidfd is kept open; 0: 64 */
    uint32_t cache_max;
    /* 0; reserved for a later field */
    uint32_t reserved;
};
#define COX_IMPORTER_OPTIONS_INIT COX_OPTIONS_INIT(struct cox_importer_options)

/* An open handle. There is one per handle and flags, however often these were opened. Read-only for
 * the caller. */
struct cox_import {
    /* lent until close */
    int fd;
    /* start of the exported range, in this process; NULL: not mapped */
    const void *base;
    uint64_t size;
    bool writable;
};

enum cox_import_flags {
    COX_IMPORT_FD = 0,    /* no mapping */
    COX_IMPORT_READ = 1,  /* mapped for reading */
    COX_IMPORT_WRITE = 2, /* mapped for reading and writing, with or without COX_IMPORT_READ */
};

/* options NULL: all zero.
 * Returns
 *   0
 *   COX_INVALID: the options
 *   -ENOMEM
 */
COX_PUBLIC int cox_importer_new(const struct cox_importer_options *options,
                                struct cox_importer **ret_importer, struct cox_error *err);
/* Closes everything that is open. NULL-safe, returns NULL. */
COX_PUBLIC struct cox_importer *cox_importer_free(struct cox_importer *importer);
/* Opens the handle, or counts one more use of an open import with the same 64 bytes and flags. A
 * handle that differs in any byte is never served from the cache. Nor is one whose exporter is dead
 * (COX_PEER_DEAD); imports opened before stay valid until closed. A handle that is still open here
 * can be opened again even after its put.
 * Returns
 *   as cox_handle_open
 *   COX_INVALID: the flags ask for a mapping, and the object is not memory
 *   COX_DENIED: also if the fd, or a seal, does not allow the mapping
 */
COX_PUBLIC int cox_importer_open(struct cox_importer *importer, const struct cox_handle *handle,
                                 enum cox_import_flags flags, const struct cox_import **ret_import,
                                 struct cox_error *err);
/* Ends one use of the import; the last one unmaps and closes. */
COX_PUBLIC void cox_importer_close(struct cox_importer *importer, const struct cox_import *import);

/*
 * ==== peer: the identity of a process (pid and start time), and whether it is alive.
 *
 * The kernel reuses pids; pid and start time together are unique for this boot. A pidfd never
 * refers to another process.
 *
 * Threads: reads on any thread; open and close on one.
 * Ownership: the caller owns struct cox_peer and its pidfd.
 * Blocks: nothing.
 * If the process dies: nothing is left.
 */

struct cox_peer {
    pid_t pid;
    /* /proc/<pid>/stat field 22: clock ticks since boot */
    uint64_t start;
    /* readable once the process is dead; -1: none */
    int pidfd;
};

#define COX_PEER_NONE                                                                              \
    {                                                                                              \
        .pid = 0, .start = 0, .pidfd = -1                                                          \
    }

/* Opens the process with this pid and start time. start 0: whichever process has the pid now.
 * Returns
 *   0
 *   COX_PEER_DEAD: no process has the pid, or another one has it now
 *   -errno; -EACCES: a process has the pid, and /proc hides its start time
 */
COX_PUBLIC int cox_peer_open(pid_t pid, uint64_t start, struct cox_peer *ret_peer);
/* Idempotent. */
COX_PUBLIC void cox_peer_close(struct cox_peer *peer);
/* False once the process is dead, reaped or not, and for COX_PEER_NONE. True if the kernel cannot
 * tell. */
COX_PUBLIC bool cox_peer_alive(const struct cox_peer *peer);

/*
 * ==== region: one shared memory object, mapped.
 *
 * Usable without a group.
 *
 * Threads: one at a time per struct. Access to the mapped bytes follows the rules of their layout.
 * Ownership: the caller owns struct cox_region; detach unmaps it.
 * Blocks: nothing.
 * If the process dies: the kernel frees the object with its last fd and mapping.
 */

struct cox_region {
    /* page aligned; NULL: detached */
    void *base;
    uint64_t size;
};

enum cox_region_access {
    COX_REGION_READ,
    COX_REGION_WRITE,
    /* for reading, and only what no process can change any more: an image that is sealed */
    COX_REGION_SEALED,
};

/* Maps the whole object behind fd, which stays the caller's, and must have at least size_min bytes.
 * name is used in err only; the object need not have one.
 * Returns
 *   0
 *   COX_DENIED: another owner, mode or type, a second hard link, or no seal; err says which
 *   COX_CORRUPT: too small
 *   -errno
 */
COX_PUBLIC int cox_region_attach_fd(struct cox_region *region, int fd, const char *name,
                                    uint64_t size_min, enum cox_region_access access,
                                    struct cox_error *err);
COX_PUBLIC void cox_region_detach(struct cox_region *region); /* idempotent */

/* Creates an object without a name: a memfd, mode 0600, every byte reserved and zero, mapped for
 * writing. seals: F_SEAL_ bits, added after mapping. huge: use huge pages if any are free; the size
 * is then rounded up. label is used in err only. The caller owns *ret_fd, which is open for reading
 * and writing.
 * Returns
 *   0
 *   COX_NO_SPACE
 *   -errno
 */
COX_PUBLIC int cox_region_create_unnamed(struct cox_region *region, const char *label,
                                         uint64_t size, unsigned seals, bool huge, int *ret_fd,
                                         struct cox_error *err);

/*
 * ==== image: memory without a name that its creator fills and then seals. Afterwards no process
 * can change it, not even the creator.
 *
 * Usable without a group.
 *
 * Threads: one at a time per struct.
 * Ownership: the caller owns struct cox_region and the fd; cox_region_detach unmaps it.
 * Blocks: nothing.
 * If the process dies: the kernel frees an image with its last fd and mapping.
 */

/* Creates an image. Every byte is zero, and its memory is reserved. Only this mapping can write it;
 * the child of a fork does not get it.
 * Returns
 *   0
 *   COX_INVALID: 0 bytes
 *   COX_NO_SPACE: err has the needed and the free size
 *   -errno
 */
COX_PUBLIC int cox_region_create_image(struct cox_region *region, const char *label, uint64_t size,
                                       int *ret_fd, struct cox_error *err);
/* Unmaps it, also on failure; replaces *fd by an fd that is open for reading only.
 * Blocks: up to 2 s, while something has it mapped for writing or the kernel uses its pages.
 * Returns
 *   0
 *   COX_BUSY: after 2 s it is still so
 *   -errno
 */
COX_PUBLIC int cox_region_seal_image(struct cox_region *region, const char *label, int *fd,
                                     struct cox_error *err);

#ifdef __cplusplus
}
#endif

#endif
