#include "peer.h"

#include "base_internal.h"
#include "idioms.h"

#include <ctype.h>
#include <dirent.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* PF_EXITING of include/linux/sched.h. */
#define PROCESS_EXITING 0x4u

/* With hidepid, /proc does not show live processes of other users, or processes that are not
 * dumpable. */
static int peer_missing(pid_t pid)
{
    return pid <= 0 || (kill(pid, 0) < 0 && errno == ESRCH) ? COX_PEER_DEAD : -EACCES;
}

/* Reads a file of a process, or of a thread, below its directory in /proc. Returns 0 or -errno. */
static int peer_read_path(const char *directory, const char *file, char *text, size_t text_size)
{
    char path[384];
    snprintf(path, sizeof path, "%s/%s", directory, file);
    const ssize_t length = cox_small_file_read(path, text, text_size);
    return length < 0 ? (int)length : 0;
}

static int peer_read(pid_t pid, const char *file, char *text, size_t text_size)
{
    char directory[32];
    snprintf(directory, sizeof directory, "/proc/%jd", (intmax_t)pid);
    const int r = peer_read_path(directory, file, text, text_size);
    return r == -ENOENT ? peer_missing(pid) : r == -ESRCH ? COX_PEER_DEAD : r;
}

/* Reads /proc/<pid>/stat; *ret_field points into text at the parenthesis that ends the second
 * field. */
static int peer_read_stat(pid_t pid, char *text, size_t text_size, const char **ret_field)
{
    int r = peer_read(pid, "stat", text, text_size);
    if (r)
        return r;
    /* The second field is the program's name in parentheses and may hold anything, parentheses too.
     */
    *ret_field = strrchr(text, ')');
    return *ret_field ? 0 : COX_CORRUPT;
}

/* A field of /proc/<pid>/stat behind the second, by its number in proc(5). */
static int peer_read_number(pid_t pid, int wanted, uint64_t *ret_number)
{
    char text[1024];
    const char *field;
    int r = peer_read_stat(pid, text, sizeof text, &field);
    if (r)
        return r;
    for (int number = 2; field && number < wanted; number++)
        field = strchr(field + 1, ' ');
    uint64_t value;
    if (!field || sscanf(field, " %" SCNu64, &value) != 1)
        return COX_CORRUPT;
    *ret_number = value;
    return 0;
}

int cox_peer_start_time(pid_t pid, uint64_t *ret_start)
{
    return peer_read_number(pid, 22, ret_start);
}

int cox_peer_thread_count(pid_t pid, uint64_t *ret_count)
{
    return peer_read_number(pid, 20, ret_count);
}

/* Returns 0: it lives; COX_PEER_DEAD; -errno. */
static int peer_check(int pidfd)
{
    struct pollfd p = {.fd = pidfd, .events = POLLIN};
    int r;
    do
        r = poll(&p, 1, 0);
    while (r < 0 && errno == EINTR);
    if (r < 0)
        return -errno;
    return r > 0 ? COX_PEER_DEAD : 0;
}

int cox_peer_open(pid_t pid, uint64_t start, struct cox_peer *ret_peer)
{
    _cox_cleanup_(cox_close_fd) int pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (pidfd < 0) /* EPERM: a seccomp filter */
        return errno == ESRCH ? COX_PEER_DEAD : -errno;
    uint64_t seen;
    int r = cox_fd_raise(&pidfd);
    if (r == 0)
        r = cox_peer_start_time(pid, &seen);
    /* A dead process is reported even if /proc hides it. */
    if (r < 0 && peer_check(pidfd) == COX_PEER_DEAD)
        return COX_PEER_DEAD;
    if (r)
        return r;
    if (start && seen != start)
        return COX_PEER_DEAD;
    /* The pidfd was opened first: while it is not readable, what /proc showed belongs to the same
     * process. */
    r = peer_check(pidfd);
    if (r)
        return r;
    *ret_peer = (struct cox_peer){.pid = pid, .start = seen, .pidfd = cox_steal_fd(&pidfd)};
    return 0;
}

void cox_peer_close(struct cox_peer *peer)
{
    cox_close_fd(&peer->pidfd);
}

bool cox_peer_alive(const struct cox_peer *peer)
{
    return peer->pidfd >= 0 && peer_check(peer->pidfd) != COX_PEER_DEAD;
}

/* A stopped process that a tracer lets go (coxswain stacks does) runs until it has stopped again;
 * its parent, which this process has to be, is told all the while that it is stopped. */
static bool child_is_stopped(pid_t pid)
{
    siginfo_t info = {0};
    return waitid(P_PID, (id_t)pid, &info, WSTOPPED | WNOHANG | WNOWAIT) == 0 && info.si_pid == pid;
}

/* A child of this process, or of one of its children. */
static bool is_of_this_process(pid_t pid)
{
    uint64_t parent = (uint64_t)pid;
    for (int i = 0; i < 2; i++)
        if (peer_read_number((pid_t)parent, 4, &parent) || parent == (uint64_t)getpid())
            return true; /* or it has ended meanwhile, and traces nobody */
    return false;
}

/* Of a thread in state t; path: its directory in /proc. A helper that this process has started
 * reads the stack of a rank (coordinator/stacks): a child of that helper traces each thread, and
 * lets it go on in a moment. That holds up nobody. If the rank is stopped besides, child_is_stopped
 * says so, for which this process has to be its parent. */
static bool tracer_holds(pid_t pid, const char *path)
{
    char text[8192];
    siginfo_t info;
    int tracer;
    if (waitid(P_PID, (id_t)pid, &info, WEXITED | WSTOPPED | WNOHANG | WNOWAIT) < 0)
        return true;
    const int r = peer_read_path(path, "status", text, sizeof text);
    const char *line = r ? NULL : strstr(text, "\nTracerPid:");
    if (!line || sscanf(line, "\nTracerPid: %d", &tracer) != 1)
        return true;
    return tracer && !is_of_this_process(tracer);
}

bool cox_peer_stopped(pid_t pid)
{
    char text[1024], path[32];
    const char *field;
    if (peer_read_stat(pid, text, sizeof text, &field) || strlen(field) < 3)
        return false;
    snprintf(path, sizeof path, "/proc/%d", (int)pid);
    return field[2] == 'T' || (field[2] == 't' && tracer_holds(pid, path)) || child_is_stopped(pid);
}

bool cox_peer_freezes_in(const char *function)
{
    return strstr(function, "refrigerator") || strcmp(function, "do_freezer_trap") == 0 ||
           strcmp(function, "get_signal") == 0;
}

#define STOPPED "stopped by a signal"

/* path: the directory of a thread in /proc. Returns '?' if it has ended. */
static char thread_state(const char *path)
{
    char text[1024];
    const char *field = peer_read_path(path, "stat", text, sizeof text) ? NULL : strrchr(text, ')');
    return field && strlen(field) > 2 ? field[2] : '?';
}

/* What holds a thread in state D or S; text becomes empty: nothing does. */
static void thread_read_hold(const char *path, char state, char text[COX_PEER_HOLD_SIZE])
{
    char function[64] = "";
    text[0] = '\0';
    if (peer_read_path(path, "wchan", function, sizeof function))
        function[0] = '\0';
    const bool known = function[0] && strcmp(function, "0") != 0;
    if (cox_peer_freezes_in(function))
        snprintf(text, COX_PEER_HOLD_SIZE, "frozen by its control group");
    else if (state == 'D')
        snprintf(text, COX_PEER_HOLD_SIZE, "in the kernel (state D%s%s)", known ? ", " : "",
                 known ? function : "");
}

void cox_peer_read_hold(pid_t pid, char text[COX_PEER_HOLD_SIZE])
{
    char path[320];
    text[0] = '\0';
    snprintf(path, sizeof path, "/proc/%d/task", (int)pid);
    const bool stopped = child_is_stopped(pid);
    DIR *list = stopped ? NULL : opendir(path);
    bool asleep = false;
    for (const struct dirent *entry; list && (entry = readdir(list));) {
        if (!isdigit((unsigned char)entry->d_name[0]))
            continue;
        snprintf(path, sizeof path, "/proc/%d/task/%s", (int)pid, entry->d_name);
        const char state = thread_state(path);
        /* A signal stops all threads, of which another one may be in the kernel until then. */
        if (state == 'T' || (state == 't' && tracer_holds(pid, path))) {
            snprintf(text, COX_PEER_HOLD_SIZE, STOPPED);
            break;
        }
        /* A control group freezes all threads: one that sleeps tells of the others. */
        if (!text[0] && (state == 'D' || (state == 'S' && !asleep)))
            thread_read_hold(path, state, text);
        asleep = asleep || state == 'S';
    }
    if (list)
        closedir(list);
    if (stopped)
        snprintf(text, COX_PEER_HOLD_SIZE, STOPPED);
}

/* Killed, and has not run since: the kernel keeps the signal pending for the whole process until
 * the end. */
static int peer_is_killed(pid_t pid, bool *ret_killed)
{
    char text[8192];
    unsigned long long pending;
    int r = peer_read(pid, "status", text, sizeof text);
    if (r)
        return r;
    const char *line = strstr(text, "\nShdPnd:");
    if (!line || sscanf(line, "\nShdPnd: %llx", &pending) != 1)
        return COX_CORRUPT;
    *ret_killed = pending >> (SIGKILL - 1) & 1;
    return 0;
}

int cox_peer_check_exiting(pid_t pid, bool *ret_exiting)
{
    char text[1024];
    const char *field;
    unsigned flags;
    int r = peer_read_stat(pid, text, sizeof text, &field);
    if (r)
        return r;
    char state = strlen(field) < 3 ? '?' : field[2];
    /* proc(5): field 9, 7 after the name's. */
    for (int number = 2; field && number < 9; number++)
        field = strchr(field + 1, ' ');
    if (!field || sscanf(field, " %u", &flags) != 1)
        return COX_CORRUPT;
    *ret_exiting = state == 'Z' || state == 'X' || (flags & PROCESS_EXITING);
    return *ret_exiting ? 0 : peer_is_killed(pid, ret_exiting);
}

bool cox_peer_exiting(pid_t pid)
{
    bool exiting = false;
    return cox_peer_check_exiting(pid, &exiting) == COX_PEER_DEAD || exiting;
}

bool cox_peer_dumps_core(pid_t pid, int *ret_signal)
{
    char text[8192];
    if (peer_read(pid, "status", text, sizeof text) || !strstr(text, "\nCoreDumping:\t1\n"))
        return false;
    uint64_t status;
    /* In the form of waitpid; the kernel sets it before it writes the core. */
    *ret_signal = peer_read_number(pid, 52, &status) ? 0 : (int)(status & 0x7f);
    return true;
}

int cox_peer_cpu_time(pid_t pid, uint64_t *ret_ns)
{
    clockid_t clock;
    struct timespec time;
    if (pid <= 0) /* 0 would be this process */
        return COX_PEER_DEAD;
    int e = clock_getcpuclockid(pid, &clock);
    /* EINVAL: the process existed when the clock was looked up. */
    if (e == 0 && clock_gettime(clock, &time) < 0)
        e = errno == EINVAL ? ESRCH : errno;
    if (e)
        return e == ESRCH ? COX_PEER_DEAD : -e;
    *ret_ns = (uint64_t)time.tv_sec * COX_NSEC_PER_SEC + (uint64_t)time.tv_nsec;
    return 0;
}

int cox_peer_resident(pid_t pid, uint64_t *ret_bytes)
{
    char text[128];
    uint64_t pages;
    const int r = peer_read(pid, "statm", text, sizeof text);
    if (r)
        return r;
    if (sscanf(text, "%*u %" SCNu64, &pages) != 1)
        return -EIO;
    *ret_bytes = pages * (uint64_t)sysconf(_SC_PAGESIZE);
    return 0;
}

bool cox_peer_descends(pid_t pid, pid_t ancestor)
{
    /* A chain of wrappers is short; the bound covers pids that are reused meanwhile. The
     * coordinator of a container may be its process 1. */
    for (int step = 0; step < 64 && pid > 0; step++) {
        if (pid == ancestor)
            return true;
        char text[1024];
        const char *field;
        int parent;
        if (peer_read_stat(pid, text, sizeof text, &field) || strlen(field) < 3 ||
            sscanf(field + 3, "%d", &parent) != 1)
            return false;
        pid = parent;
    }
    return false;
}

uint64_t cox_peer_own_mark(void)
{
    struct rlimit limit = {0};
    getrlimit(RLIMIT_LOCKS, &limit);
    return limit.rlim_max;
}

bool cox_peer_can_mark(void)
{
    struct rlimit limit;
    return getrlimit(RLIMIT_LOCKS, &limit) == 0 && limit.rlim_max > 0 &&
           setrlimit(RLIMIT_LOCKS, &limit) == 0;
}

int cox_peer_read_mark(pid_t pid, uint64_t *ret_mark)
{
    char text[4096], word[32];
    int r = peer_read(pid, "limits", text, sizeof text);
    if (r)
        return r;
    const char *line = strstr(text, "\nMax file locks ");
    if (!line || sscanf(line, "\nMax file locks %*s %31s", word) != 1)
        return COX_CORRUPT;
    *ret_mark = strcmp(word, "unlimited") == 0 ? UINT64_MAX : strtoull(word, NULL, 10);
    return 0;
}

int cox_peer_lower_mark(pid_t pid)
{
    uint64_t has;
    const uint64_t own = cox_peer_own_mark(), mark = own > 0 ? own - 1 : 0;
    const uint64_t limit[2] = {mark, mark}; /* struct rlimit64 */
    int r = cox_peer_read_mark(pid, &has);
    if (r || has <= mark)
        return r;
    return syscall(SYS_prlimit64, pid, RLIMIT_LOCKS, limit, NULL) == 0 ? 0
           : errno == ESRCH                                            ? COX_PEER_DEAD
                                                                       : -errno;
}

void cox_peer_read_program(pid_t pid, char text[COX_PEER_PROGRAM_SIZE])
{
    char name[64];
    snprintf(text, COX_PEER_PROGRAM_SIZE, "?");
    if (peer_read(pid, "comm", name, sizeof name))
        return;
    name[strcspn(name, "\n")] = '\0';
    for (char *c = name; *c; c++)
        *c = *c >= ' ' && *c <= '~' ? *c : '?';
    snprintf(text, COX_PEER_PROGRAM_SIZE, "%.15s", name);
}

static bool peer_holds(pid_t pid, dev_t device, ino_t inode)
{
    char path[64];
    struct stat st;
    bool holds = false;
    snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    DIR *list = opendir(path);
    for (const struct dirent *entry; !holds && list && (entry = readdir(list));)
        holds = isdigit((unsigned char)entry->d_name[0]) &&
                fstatat(dirfd(list), entry->d_name, &st, 0) == 0 && st.st_dev == device &&
                st.st_ino == inode;
    if (list)
        closedir(list);
    return holds;
}

pid_t cox_peer_find_holder(dev_t device, ino_t inode)
{
    pid_t found = 0;
    DIR *list = opendir("/proc");
    for (const struct dirent *entry; !found && list && (entry = readdir(list));) {
        const pid_t pid = (pid_t)atoi(entry->d_name); /* 0: of another name */
        if (pid > 0 && pid != getpid() && peer_holds(pid, device, inode))
            found = pid;
    }
    if (list)
        closedir(list);
    return found;
}

/* ---- fds that children of fork do not keep ---- */

/* Held while such an fd is made, and while a thread forks. */
static pthread_mutex_t unforked_lock = PTHREAD_MUTEX_INITIALIZER;
static int unforked[COX_UNFORKED_MAX];
static uint32_t unforked_count;

static void unforked_end_child(void)
{
    while (unforked_count > 0)
        close(unforked[--unforked_count]);
    pthread_mutex_unlock(&unforked_lock);
}

static void unforked_end_parent(void)
{
    pthread_mutex_unlock(&unforked_lock);
}

static void unforked_start(void)
{
    pthread_atfork(cox_unforked_hold, unforked_end_parent, unforked_end_child);
}

void cox_unforked_hold(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, unforked_start);
    pthread_mutex_lock(&unforked_lock);
}

int cox_unforked_release(int *fd)
{
    int r = *fd < 0 ? -errno : cox_fd_raise(fd);
    if (r)
        cox_close_fd(fd);
    else if (unforked_count < COX_UNFORKED_MAX)
        unforked[unforked_count++] = *fd;
    pthread_mutex_unlock(&unforked_lock);
    return r;
}

void cox_unforked_remove(int fd)
{
    cox_unforked_hold();
    for (uint32_t i = 0; i < unforked_count; i++)
        if (unforked[i] == fd)
            unforked[i] = unforked[--unforked_count];
    pthread_mutex_unlock(&unforked_lock);
}

void cox_unforked_close(int *fd)
{
    cox_unforked_remove(*fd);
    cox_close_fd(fd);
}
