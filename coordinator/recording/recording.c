#include "recording.h"

#include "channel/base/idioms.h"
#include "channel/base/peer.h"
#include "channel/recorder/recorder.h"
#include "proto/recording.pb-c.h"

#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAGIC "COXREC1\n"
#define MAGIC_SIZE 8
#define CRASH_SUFFIX ".crash"
#define RING_SUFFIX ".ring"
#define LOCK_SUFFIX ".lock"
#define PARTIAL_PREFIX ".partial."
/* of ".YYYYMMDDTHHMMSS.NNNNNNNNN" */
#define DATE_SIZE 26

typedef CoxswainRecording__Recording recording;

/* ---- paths ---- */

static int path_format(char path[COX_RECORDER_PATH_SIZE], struct cox_error *err, const char *folder,
                       const char *file)
{
    int size = snprintf(path, COX_RECORDER_PATH_SIZE, "%s/%s", folder, file);
    return size < COX_RECORDER_PATH_SIZE
               ? 0
               : cox_fail(err, COX_TOO_LARGE,
                          "the path of a file in the crash directory has %d bytes: at most %d are "
                          "allowed, choose a shorter directory",
                          size, COX_RECORDER_PATH_SIZE - 1);
}

int cox_recording_ring_path(const char *folder, const char *name, uint32_t rank,
                            char path[COX_RECORDER_PATH_SIZE], struct cox_error *err)
{
    char file[256];
    if (rank == COX_RECORDER_COORDINATOR)
        snprintf(file, sizeof file, "%s.coordinator" RING_SUFFIX, name);
    else
        snprintf(file, sizeof file, "%s.rank%" PRIu32 RING_SUFFIX, name, rank);
    return path_format(path, err, folder, file);
}

int cox_recording_folder_make(const char *folder, struct cox_error *err)
{
    struct stat st;
    if (mkdir(folder, 0700) < 0 && errno != EEXIST)
        return cox_fail(err, -errno, "the crash directory %s cannot be created: %s", folder,
                        cox_status_text(-errno));
    int r = stat(folder, &st) < 0 ? -errno : S_ISDIR(st.st_mode) ? 0 : -ENOTDIR;
    if (r == 0 && ((st.st_uid != geteuid() && st.st_uid != 0) || st.st_mode & (S_IWGRP | S_IWOTH)))
        return cox_fail(
            err, COX_DENIED,
            "the crash directory %s belongs to user %jd and has mode 0%o: others could put "
            "files there; name one of this user that nobody else may write to, or one "
            "that is made then",
            folder, (intmax_t)st.st_uid, (unsigned)(st.st_mode & 07777));
    if (r == 0 && access(folder, W_OK | X_OK) < 0)
        r = -errno;
    return r ? cox_fail(err, r,
                        "the crash directory %s cannot be written: %s; name one with --crash-dir "
                        "in which this user may create files",
                        folder, cox_status_text(r))
             : 0;
}

/* ---- the names of a directory ---- */

static int lock_path(const char *folder, const char *name, char path[COX_RECORDER_PATH_SIZE],
                     struct cox_error *err)
{
    char file[256];
    snprintf(file, sizeof file, "%s" LOCK_SUFFIX, name);
    return path_format(path, err, folder, file);
}

int cox_recording_lock(const char *folder, const char *name, int *ret_fd, struct cox_error *err)
{
    char path[COX_RECORDER_PATH_SIZE];
    struct stat locked, named;
    int r = lock_path(folder, name, path, err);
    if (r)
        return r;
    for (;;) {
        /* The lock must not outlive this process in a child. */
        cox_unforked_hold();
        _cox_cleanup_(cox_unforked_close) int fd =
            open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
        r = cox_unforked_release(&fd);
        if (r == 0 && fstat(fd, &locked) < 0)
            r = -errno;
        if (r)
            return cox_fail(err, r, "%s: %s", path, cox_status_text(r));
        if (flock(fd, LOCK_EX | LOCK_NB) < 0)
            return errno == EWOULDBLOCK
                       ? cox_fail(err, COX_TAKEN,
                                  "a live group '%s' records in %s: choose another name, or "
                                  "another crash directory",
                                  name, folder)
                       : cox_fail(err, -errno, "%s: %s", path, cox_status_text(-errno));
        /* A group that ended meanwhile has removed the file. */
        if (lstat(path, &named) == 0 && named.st_ino == locked.st_ino &&
            named.st_dev == locked.st_dev) {
            *ret_fd = cox_steal_fd(&fd);
            return 0;
        }
    }
}

void cox_recording_unlock(const char *folder, const char *name, int *fd)
{
    char path[COX_RECORDER_PATH_SIZE];
    if (*fd >= 0 && lock_path(folder, name, path, NULL) == 0)
        unlink(path);
    cox_unforked_close(fd);
}

static bool has_suffix(const char *file, const char *suffix)
{
    const size_t size = strlen(file), suffix_size = strlen(suffix);
    return size > suffix_size && strcmp(file + size - suffix_size, suffix) == 0;
}

void cox_recording_each_name(const char *folder, void (*left)(void *context, const char *name),
                             void *context)
{
    struct dirent **entries;
    int count = scandir(folder, &entries, NULL, alphasort);
    for (int i = 0; i < count; i++) {
        char *file = entries[i]->d_name;
        if (has_suffix(file, LOCK_SUFFIX)) {
            file[strlen(file) - strlen(LOCK_SUFFIX)] = '\0';
            left(context, file);
        }
        free(entries[i]);
    }
    if (count >= 0)
        free(entries);
}

/* The date in the name of a crash file; NULL: it is none. Names have dots, too. */
static const char *date_of(const char *file)
{
    const char *cause = NULL;
    const size_t size = strlen(file);
    if (has_suffix(file, CRASH_SUFFIX))
        cause = memrchr(file, '.', size - strlen(CRASH_SUFFIX));
    const char *date = cause && cause - file > DATE_SIZE ? cause - DATE_SIZE : NULL;
    return date && date[0] == '.' && date[9] == 'T' && date[16] == '.' ? date : NULL;
}

void cox_recording_rings_remove(const char *folder, const char *name)
{
    char path[COX_RECORDER_PATH_SIZE], partial[256];
    struct dirent **entries;
    for (uint32_t rank = 0; rank < COX_RANK_COUNT_MAX; rank++)
        if (cox_recording_ring_path(folder, name, rank, path, NULL) == 0)
            unlink(path);
    if (cox_recording_ring_path(folder, name, COX_RECORDER_COORDINATOR, path, NULL) == 0)
        unlink(path);
    const int size = snprintf(partial, sizeof partial, PARTIAL_PREFIX "%s", name);
    int count = scandir(folder, &entries, NULL, NULL);
    for (int i = 0; i < count; i++) {
        const char *file = entries[i]->d_name;
        if (strncmp(file, partial, (size_t)size) == 0 && date_of(file) == file + size &&
            path_format(path, NULL, folder, file) == 0)
            unlink(path);
        free(entries[i]);
    }
    if (count >= 0)
        free(entries);
}

/* ---- the message ---- */

static void stamp(recording *message)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    COX_SET(message, realtime_ns, (uint64_t)now.tv_sec * COX_NSEC_PER_SEC + (uint64_t)now.tv_nsec);
    COX_SET(message, monotonic_ns, cox_now_ns());
}

recording *cox_recording_new(const char *name, const char *cause, const char *text,
                             uint32_t rank_count)
{
    recording *message = calloc(1, sizeof *message);
    if (!message)
        return NULL;
    coxswain_recording__recording__init(message);
    message->name = strdup(name);
    message->cause = strdup(cause);
    message->text = strdup(text ? text : "");
    message->version = strdup(cox_version());
    COX_SET(message, rank_count, rank_count);
    stamp(message);
    message->ranks = calloc(rank_count ? rank_count : 1, sizeof(void *));
    bool whole =
        message->name && message->cause && message->text && message->version && message->ranks;
    for (uint32_t rank = 0; whole && rank < rank_count; rank++) {
        CoxswainRecording__Rank *made = calloc(1, sizeof *made);
        whole = made != NULL;
        if (!made)
            break;
        coxswain_recording__rank__init(made);
        COX_SET(made, rank, rank);
        message->ranks[message->n_ranks++] = made;
    }
    return whole ? message : cox_recording_free(message);
}

recording *cox_recording_free(recording *message)
{
    if (message)
        coxswain_recording__recording__free_unpacked(message, NULL);
    return NULL;
}

/* ---- rings ---- */

/* A copy of the ring in this file, as a field. Returns 0; COX_NOT_FOUND; COX_CORRUPT; COX_VERSION;
 * -errno. */
static int ring_read(const char *path, uint32_t rank, ProtobufCBinaryData *ret_copy,
                     struct cox_record_head *ret_head, struct cox_error *err)
{
    const bool coordinator = rank == COX_RECORDER_COORDINATOR;
    const uint64_t size = cox_recorder_area_size(coordinator);
    struct stat st;
    _cox_cleanup_(cox_close_fd) int fd = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return cox_fail(err, errno == ENOENT ? COX_NOT_FOUND : -errno, "%s: %s", path,
                        cox_status_text(-errno));
    if (fstat(fd, &st) < 0)
        return cox_fail(err, -errno, "%s: %s", path, cox_status_text(-errno));
    if (st.st_uid != geteuid() && geteuid() != 0)
        return cox_fail(err, COX_DENIED, "%s belongs to user %jd", path, (intmax_t)st.st_uid);
    if (!S_ISREG(st.st_mode) || (uint64_t)st.st_size < size)
        return cox_fail(err, COX_CORRUPT, "%s is no recorder: expected a file of %" PRIu64 " bytes",
                        path, size);
    /* Read, not mapped: a file that another process truncates meanwhile is an error then, and no
     * SIGBUS. The page cache is the memory that the processes write. */
    uint8_t *bytes = malloc(2 * size), *copy = malloc(size);
    int r = bytes && copy ? 0 : cox_fail(err, -ENOMEM, "no memory for %s", path);
    for (int time = 0; r == 0 && time < 2; time++) { /* see cox_recorder_copy */
        ssize_t done = pread(fd, bytes + time * (ptrdiff_t)size, size, 0);
        if (done < 0)
            r = cox_fail(err, -errno, "%s: %s", path, cox_status_text(-errno));
        else if ((uint64_t)done < size)
            r = cox_fail(err, COX_CORRUPT, "%s has shrunk", path);
    }
    bool is_coordinator = false;
    if (r == 0) {
        cox_recorder_copy(bytes, bytes + size, coordinator, copy);
        r = cox_recorder_check(copy, size, &is_coordinator, ret_head, err);
    }
    if (r == 0 && (is_coordinator != coordinator || ret_head->rank != rank))
        r = cox_fail(err, COX_CORRUPT, "%s is the recorder of another process", path);
    free(bytes);
    if (r) {
        free(copy);
        return r;
    }
    *ret_copy = (ProtobufCBinaryData){.len = size, .data = copy};
    return 0;
}

int cox_recording_of_rings(const char *folder, const char *name, recording **ret_recording,
                           struct cox_error *err)
{
    char path[COX_RECORDER_PATH_SIZE];
    struct cox_record_head head;
    ProtobufCBinaryData own = {0}, copies[COX_RANK_COUNT_MAX] = {{0}};
    struct cox_record_head heads[COX_RANK_COUNT_MAX];
    uint32_t rank_count = 0;
    int r = cox_recording_ring_path(folder, name, COX_RECORDER_COORDINATOR, path, err);
    if (r == 0)
        r = ring_read(path, COX_RECORDER_COORDINATOR, &own, &head, err);
    if (r)
        return r;
    for (uint32_t rank = 0; rank < COX_RANK_COUNT_MAX; rank++) {
        struct cox_error why = {0};
        cox_recording_ring_path(folder, name, rank, path, NULL);
        if (ring_read(path, rank, &copies[rank], &heads[rank], &why))
            continue; /* one that records in memory has none */
        if (heads[rank].group_incarnation != head.group_incarnation) { /* of an earlier group */
            free(copies[rank].data);
            copies[rank] = (ProtobufCBinaryData){0};
            continue;
        }
        rank_count = rank + 1;
    }
    recording *message = cox_recording_new(name, "coordinator", "", rank_count);
    if (!message) {
        free(own.data);
        for (uint32_t rank = 0; rank < rank_count; rank++)
            free(copies[rank].data);
        return cox_fail(err, -ENOMEM, "no memory for a recording of %" PRIu32 " ranks", rank_count);
    }
    COX_SET(message, pid, (int64_t)head.pid);
    COX_SET(message, recorder, own);
    for (uint32_t rank = 0; rank < rank_count; rank++) {
        CoxswainRecording__Rank *to = message->ranks[rank];
        to->has_recorder = to->has_pid = to->has_incarnation = copies[rank].data != NULL;
        to->recorder = copies[rank];
        to->pid = copies[rank].data ? (int64_t)heads[rank].pid : 0;
        to->incarnation = copies[rank].data ? heads[rank].incarnation : 0;
    }
    *ret_recording = message;
    return 0;
}

/* ---- files ---- */

int cox_recording_pack(const recording *message, uint8_t **ret_bytes, size_t *ret_size)
{
    const size_t size = coxswain_recording__recording__get_packed_size(message);
    if (size > COX_RECORDING_SIZE_MAX - MAGIC_SIZE)
        return COX_TOO_LARGE;
    uint8_t *bytes = malloc(MAGIC_SIZE + size);
    if (!bytes)
        return -ENOMEM;
    memcpy(bytes, MAGIC, MAGIC_SIZE);
    coxswain_recording__recording__pack(message, bytes + MAGIC_SIZE);
    *ret_bytes = bytes;
    *ret_size = MAGIC_SIZE + size;
    return 0;
}

int cox_recording_unpack(const uint8_t *bytes, size_t size, recording **ret_recording,
                         struct cox_error *err)
{
    if (size > COX_RECORDING_SIZE_MAX)
        return cox_fail(err, COX_TOO_LARGE, "a recording of %zu bytes: at most %" PRIu64, size,
                        COX_RECORDING_SIZE_MAX);
    if (size < MAGIC_SIZE || memcmp(bytes, MAGIC, MAGIC_SIZE) != 0)
        return cox_fail(err, COX_CORRUPT,
                        "these bytes are no recording: expected a file that a coordinator has "
                        "written to its --crash-dir (NAME.*" CRASH_SUFFIX ")");
    recording *message =
        coxswain_recording__recording__unpack(NULL, size - MAGIC_SIZE, bytes + MAGIC_SIZE);
    if (!message)
        return cox_fail(err, COX_CORRUPT, "the recording is cut off, or was changed");
    *ret_recording = message;
    return 0;
}

int cox_recording_read(const char *path, recording **ret_recording, struct cox_error *err)
{
    struct stat st;
    _cox_cleanup_(cox_close_fd) int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return cox_fail(err, errno == ENOENT ? COX_NOT_FOUND : -errno, "%s: %s", path,
                        cox_status_text(-errno));
    if (fstat(fd, &st) < 0)
        return cox_fail(err, -errno, "%s: %s", path, cox_status_text(-errno));
    if (!S_ISREG(st.st_mode) || (uint64_t)st.st_size > COX_RECORDING_SIZE_MAX)
        return cox_fail(err, COX_CORRUPT,
                        "%s is no recording: expected a file of at most %" PRIu64 " bytes", path,
                        COX_RECORDING_SIZE_MAX);
    const size_t size = (size_t)st.st_size;
    uint8_t *bytes = malloc(size + 1);
    ssize_t done = bytes ? pread(fd, bytes, size, 0) : -1;
    struct cox_error why = {0};
    int r = !bytes     ? cox_fail(err, -ENOMEM, "no memory for %s", path)
            : done < 0 ? cox_fail(err, -errno, "%s: %s", path, cox_status_text(-errno))
                       : cox_recording_unpack(bytes, (size_t)done, ret_recording, &why);
    free(bytes);
    return r && why.code ? cox_fail(err, r, "%s: %s", path, why.text) : r;
}

static int is_crash_file(const struct dirent *entry)
{
    return entry->d_name[0] != '.' && date_of(entry->d_name);
}

static int by_date(const struct dirent **a, const struct dirent **b)
{
    return strncmp(date_of((*a)->d_name), date_of((*b)->d_name), DATE_SIZE);
}

/* Removes the oldest crash files of a cause beyond `keep`. */
static void files_prune(const char *folder, const char *cause, size_t keep)
{
    char suffix[64], path[COX_RECORDER_PATH_SIZE];
    struct dirent **entries;
    snprintf(suffix, sizeof suffix, ".%s" CRASH_SUFFIX, cause);
    int count = scandir(folder, &entries, is_crash_file, by_date);
    size_t files = 0;
    for (int i = 0; i < count; i++)
        files += has_suffix(entries[i]->d_name, suffix);
    for (int i = 0; i < count; i++) {
        if (has_suffix(entries[i]->d_name, suffix) && files > keep) {
            files--;
            if (path_format(path, NULL, folder, entries[i]->d_name) == 0)
                unlink(path);
        }
        free(entries[i]);
    }
    if (count >= 0)
        free(entries);
}

static int file_fill(int fd, const uint8_t *bytes, size_t size)
{
    for (size_t done = 0; done < size;) {
        ssize_t n = write(fd, bytes + done, size - done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 ? errno : EIO;
        done += (size_t)n;
    }
    return fsync(fd) < 0 ? errno : 0;
}

int cox_recording_write(const char *folder, const char *name, const char *cause,
                        const uint8_t *bytes, size_t size, char path[COX_RECORDER_PATH_SIZE],
                        struct cox_error *err)
{
    char file[256], partial[COX_RECORDER_PATH_SIZE], date[32];
    struct timespec now;
    struct tm utc;
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    strftime(date, sizeof date, "%Y%m%dT%H%M%S", &utc);
    snprintf(file, sizeof file, PARTIAL_PREFIX "%s.%s.%09ld.%s" CRASH_SUFFIX, name, date,
             now.tv_nsec, cause);
    int r = path_format(partial, err, folder, file);
    if (r == 0)
        r = path_format(path, err, folder, file + strlen(PARTIAL_PREFIX));
    if (r)
        return r;
    files_prune(folder, cause, COX_CRASH_FILE_COUNT_MAX - 1);
    _cox_cleanup_(cox_close_fd) int fd =
        open(partial, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    r = fd < 0 ? errno : file_fill(fd, bytes, size);
    if (r == 0 && rename(partial, path) < 0)
        r = errno;
    if (r == 0)
        return 0;
    if (fd >= 0)
        unlink(partial);
    return cox_fail(err, r == ENOSPC || r == EDQUOT ? COX_NO_SPACE : -r,
                    "the crash file %s of %zu bytes cannot be written: %s", path, size,
                    cox_status_text(-r));
}
