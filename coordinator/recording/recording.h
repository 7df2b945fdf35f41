/*
 * recording: what a group did up to a moment (proto/recording.proto), and the files of a crash
 * directory (--crash-dir).
 *
 * While a group runs, the flight recorders of its processes are files there:
 *
 *   NAME.coordinator.ring    NAME.rank0.ring ...    removed at a clean stop
 *   NAME.lock                                       the same; locked while the group lives
 *
 * What remains after a failure, at most COX_CRASH_FILE_COUNT_MAX of each cause in a directory,
 * whatever the groups are called; then the oldest of that cause is removed, so that a hundred
 * starts that fail do not push out the death before them:
 *
 *   NAME.YYYYMMDDTHHMMSS.NNNNNNNNN.CAUSE.crash      UTC; CAUSE: death, timeout, divergence, start,
 *                                                   coordinator
 *
 * Threads: any; nothing here has state.
 * Ownership: see each function. Bytes of a file are untrusted input: errors, whatever they are.
 * Blocks: as the file system does.
 * If the process dies: a file that is being written has a name that begins with a dot, and is
 *   removed with the rings of that group. A crash file is complete or not there.
 */
#ifndef COX_COORDINATOR_RECORDING_H
#define COX_COORDINATOR_RECORDING_H

#include "channel/base/idioms.h"

#include <coxswain/base.h>

#include "channel/recorder/recorder_layout.h"

struct CoxswainRecording__Recording;

#define COX_CRASH_FILE_COUNT_MAX 16
/* Bytes of a recording, at most. */
#define COX_RECORDING_SIZE_MAX (UINT64_C(64) << 20)

/* Path of the file in which a rank, or COX_RECORDER_COORDINATOR, records. Returns 0; COX_TOO_LARGE:
 * the path has COX_RECORDER_PATH_SIZE bytes or more. */
int cox_recording_ring_path(const char *folder, const char *name, uint32_t rank,
                            char path[COX_RECORDER_PATH_SIZE], struct cox_error *err);
/* Creates the crash directory, mode 0700, unless it exists, and checks that files can be made
 * there. Returns 0; COX_DENIED: others can make some, too; -errno. */
int cox_recording_folder_make(const char *folder, struct cox_error *err);
/* Locks a name in this directory: of two groups of a name one records there, and one process reads
 * what a dead group has left. The lock ends with the process. *ret_fd: for cox_recording_unlock.
 * Returns 0; COX_TAKEN: a live group has it; COX_TOO_LARGE; -errno. */
int cox_recording_lock(const char *folder, const char *name, int *ret_fd, struct cox_error *err);
/* Removes the lock and its file. *fd becomes -1; -1: nothing is done. */
void cox_recording_unlock(const char *folder, const char *name, int *fd);
/* Calls left for the name of each group whose lock file is there, live or not. The name may be
 * anything that a file is called. */
void cox_recording_each_name(const char *folder, void (*left)(void *context, const char *name),
                             void *context);
/* Removes the rings of a group, and what it has written in part. */
void cox_recording_rings_remove(const char *folder, const char *name);

/* Allocates a recording without ranks, of this moment. The strings are copied. NULL: no memory. */
struct CoxswainRecording__Recording *cox_recording_new(const char *name, const char *cause,
                                                       const char *text, uint32_t rank_count);
/* NULL-safe, returns NULL. */
struct CoxswainRecording__Recording *cox_recording_free(
    struct CoxswainRecording__Recording *recording);
COX_DEFINE_FREEP(struct CoxswainRecording__Recording, cox_recording_free);

/* The rings of a group whose coordinator has died, or is alive.
 * Returns
 *   0
 *   COX_NOT_FOUND: there are none
 *   COX_CORRUPT, COX_VERSION: those of the coordinator are no rings; a rank's are left out
 *   -errno
 */
int cox_recording_of_rings(const char *folder, const char *name,
                           struct CoxswainRecording__Recording **ret_recording,
                           struct cox_error *err);

/* Packs a recording as a file. The caller frees *ret_bytes. Returns 0; COX_TOO_LARGE; -ENOMEM. */
int cox_recording_pack(const struct CoxswainRecording__Recording *recording, uint8_t **ret_bytes,
                       size_t *ret_size);
/* Reads a recording from bytes, or a file. Returns 0; COX_NOT_FOUND; COX_CORRUPT; COX_TOO_LARGE;
 * -errno. */
int cox_recording_unpack(const uint8_t *bytes, size_t size,
                         struct CoxswainRecording__Recording **ret_recording,
                         struct cox_error *err);
int cox_recording_read(const char *path, struct CoxswainRecording__Recording **ret_recording,
                       struct cox_error *err);
/* Writes a packed recording as a crash file of the group, and removes the oldest ones of this cause
 * beyond the limit. path, of COX_RECORDER_PATH_SIZE bytes, gets its path. Returns 0; COX_NO_SPACE;
 * COX_TOO_LARGE; -errno. On failure nothing is left. */
int cox_recording_write(const char *folder, const char *name, const char *cause,
                        const uint8_t *bytes, size_t size, char path[COX_RECORDER_PATH_SIZE],
                        struct cox_error *err);

#endif
