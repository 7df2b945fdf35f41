/* Deaths of the host's processes, told without the GIL: a thread polls a pidfd and a pipe of each. */
#include "native.h"

#include "channel/base/thread.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define LINE_COUNT 6
#define LINE_SIZE 300
/* What is read at once: it fits into half a pipe, so that it is passed on without a wait. */
#define CHUNK_SIZE 16384
/* For the first bytes that find no room. */
#define PATIENCE_MS 1000
#define INTERVAL_MS 10
/* 128 ranks, each with a fork server, and others; a pidfd and a pipe of each. */
#define CHILD_MAX 512
#define TEXT_SIZE (LINE_COUNT * (LINE_SIZE + 1) + 256)

struct coxpy_child {
    atomic_int refs;
    /* of the watch, under its lock */
    struct coxpy_child *next;
    bool forgotten, told, fetched;
    char name[48];
    pid_t pid;
    int pidfd;
    /* the thread's own; -1: none, or the process has closed it */
    int error_fd;
    atomic_bool expected;
    /* protects what follows */
    pthread_mutex_t lock;
    bool ended;
    int signal, code;
    /* line number i is lines[i % LINE_COUNT] */
    uint64_t line_count;
    char lines[LINE_COUNT][LINE_SIZE + 1];
    size_t begun;
};

struct coxpy_watch {
    int out_fd, wake_fd;
    pthread_t thread;
    /* the thread's own: out_fd had no room */
    bool full;
    /* protects what follows, and its fields of children */
    pthread_mutex_t lock;
    pthread_cond_t news;
    struct coxpy_child *children;
    uint32_t child_count;
    bool woken, quiet, over;
};

/* ---- a child ---- */

void coxpy_child_unref(struct coxpy_child *child)
{
    if (!child || atomic_fetch_sub(&child->refs, 1) > 1)
        return;
    close(child->pidfd);
    if (child->error_fd >= 0)
        close(child->error_fd);
    pthread_mutex_destroy(&child->lock);
    free(child);
}

void coxpy_child_expect(struct coxpy_child *child)
{
    atomic_store(&child->expected, true);
}

void coxpy_child_kill(struct coxpy_child *child)
{
    syscall(SYS_pidfd_send_signal, child->pidfd, SIGKILL, NULL, 0);
}

/* Under its lock. */
static bool look_for_end(struct coxpy_child *child)
{
    siginfo_t info = {0};
    if (child->ended)
        return true;
    if (waitid((idtype_t)P_PIDFD, (id_t)child->pidfd, &info, WEXITED | WNOHANG | WNOWAIT) < 0) {
        child->ended = errno == ECHILD;
        child->signal = child->code = -1;
    } else if (info.si_pid) {
        const bool exited = info.si_code == CLD_EXITED;
        child->ended = true;
        child->signal = exited ? 0 : info.si_status;
        child->code = exited ? info.si_status : 0;
    }
    return child->ended;
}

bool coxpy_child_end(struct coxpy_child *child, int *ret_signal, int *ret_code)
{
    pthread_mutex_lock(&child->lock);
    const bool ended = look_for_end(child);
    *ret_signal = child->signal;
    *ret_code = child->code;
    pthread_mutex_unlock(&child->lock);
    return ended;
}

static const char *line_of(const struct coxpy_child *child, uint64_t number)
{
    return child->lines[number % LINE_COUNT];
}

/* Appends, as far as there is room. */
static void append(char *text, size_t size, size_t *length, const char *more)
{
    const size_t left = size - *length - 1, count = strlen(more);
    const size_t fits = count < left ? count : left;
    memcpy(text + *length, more, fits);
    *length += fits;
    text[*length] = '\0';
}

size_t coxpy_child_text(struct coxpy_child *child, bool details, char *text, size_t size)
{
    char part[160];
    size_t length = 0;
    pthread_mutex_lock(&child->lock);
    const bool ended = look_for_end(child);
    append(text, size, &length, child->name);
    if (details) {
        snprintf(part, sizeof part, " (pid %d)", (int)child->pid);
        append(text, size, &length, part);
    }
    const char *words = child->signal > 0 ? sigdescr_np(child->signal) : NULL;
    if (child->signal > 0)
        snprintf(part, sizeof part, " was killed by signal %d (%s)", child->signal,
                 words ? words : "unknown");
    else if (ended && child->signal == 0)
        snprintf(part, sizeof part, " exited with status %d", child->code);
    else
        snprintf(part, sizeof part, " has ended");
    append(text, size, &length, part);
    const uint64_t first = child->line_count < LINE_COUNT ? 0 : child->line_count - LINE_COUNT;
    for (uint64_t i = first; details && i < child->line_count; i++) {
        append(text, size, &length, i == first ? "; its last lines: " : "\n");
        append(text, size, &length, line_of(child, i));
    }
    pthread_mutex_unlock(&child->lock);
    return length;
}

/* Keeps the lines in what a child has written: without spaces at both ends, of one that was written
 * over (\r) the last part, each cut at LINE_SIZE. Empty ones are left out. */
static void keep_lines(struct coxpy_child *child, const char *bytes, size_t size)
{
    pthread_mutex_lock(&child->lock);
    for (size_t i = 0; i < size; i++) {
        char *line = child->lines[child->line_count % LINE_COUNT];
        if (bytes[i] == '\n') {
            while (child->begun && strchr(" \t", line[child->begun - 1]))
                child->begun--;
            line[child->begun] = '\0';
            child->line_count += child->begun > 0;
            child->begun = 0;
        } else if (bytes[i] == '\r') {
            if (i + 1 < size && bytes[i + 1] != '\n')
                child->begun = 0;
        } else if (child->begun < LINE_SIZE && bytes[i] &&
                   (child->begun || !strchr(" \t", bytes[i]))) {
            line[child->begun++] = bytes[i];
        }
    }
    pthread_mutex_unlock(&child->lock);
}

/* ---- the thread ---- */

/* A pipe has room while it is half empty: other processes write to it, too. */
static bool has_room(int fd)
{
    struct pollfd poll_fd = {.fd = fd, .events = POLLOUT};
    struct stat info;
    int waiting, capacity;
    if (poll(&poll_fd, 1, 0) != 1)
        return false;
    if (fstat(fd, &info) < 0 || !S_ISFIFO(info.st_mode))
        return true;
    capacity = fcntl(fd, F_GETPIPE_SZ);
    return ioctl(fd, FIONREAD, &waiting) < 0 || capacity < 0 || waiting <= capacity / 2;
}

static void pass_on(struct coxpy_watch *watch, const char *bytes, size_t size)
{
    int left_ms = watch->full ? 0 : PATIENCE_MS;
    while (!has_room(watch->out_fd)) {
        watch->full = left_ms <= 0;
        if (watch->full)
            return;
        nanosleep(&(struct timespec){.tv_nsec = INTERVAL_MS * 1000000L}, NULL);
        left_ms -= INTERVAL_MS;
    }
    watch->full = false;
    while (write(watch->out_fd, bytes, size) < 0 && errno == EINTR)
        ;
}

/* Returns whether there may be more. */
static bool take_bytes(struct coxpy_watch *watch, struct coxpy_child *child)
{
    char bytes[CHUNK_SIZE];
    const ssize_t size = child->error_fd < 0 ? 0 : read(child->error_fd, bytes, sizeof bytes);
    if (size < 0)
        return errno == EINTR;
    if (size == 0) {
        if (child->error_fd >= 0)
            close(child->error_fd);
        child->error_fd = -1;
        return false;
    }
    keep_lines(child, bytes, (size_t)size);
    pass_on(watch, bytes, (size_t)size);
    return true;
}

static void write_death(struct coxpy_watch *watch, struct coxpy_child *child)
{
    char text[TEXT_SIZE + 64];
    int signal, code;
    const time_t now = time(NULL);
    struct tm local;
    coxpy_child_end(child, &signal, &code);
    if (atomic_load(&child->expected) || (signal == 0 && code == 0))
        return;
    localtime_r(&now, &local);
    size_t size = strftime(text, 64, "[%F %T] Coxswain: ", &local);
    size += coxpy_child_text(child, true, text + size, TEXT_SIZE);
    text[size++] = '\n';
    pass_on(watch, text, size);
}

static void take_death(struct coxpy_watch *watch, struct coxpy_child *child)
{
    /* It writes no more: a pipe's worth at most. What it has inherited may go on. */
    for (int i = 0; i < 8 && take_bytes(watch, child); i++)
        ;
    pthread_mutex_lock(&watch->lock);
    const bool quiet = watch->quiet || child->forgotten;
    pthread_mutex_unlock(&watch->lock);
    if (!quiet)
        write_death(watch, child);
    pthread_mutex_lock(&watch->lock);
    child->told = true;
    pthread_cond_signal(&watch->news);
    pthread_mutex_unlock(&watch->lock);
}

/* Unlinks the children that were forgotten, and lists the others. Only this thread unlinks, so what it
 * lists stays. Returns how many. */
static uint32_t list_children(struct coxpy_watch *watch, struct coxpy_child **list)
{
    uint32_t count = 0;
    pthread_mutex_lock(&watch->lock);
    for (struct coxpy_child **at = &watch->children; *at;) {
        struct coxpy_child *child = *at;
        if (child->forgotten) {
            *at = child->next;
            watch->child_count--;
            coxpy_child_unref(child);
        } else {
            if (!child->told)
                list[count++] = child;
            at = &child->next;
        }
    }
    pthread_mutex_unlock(&watch->lock);
    return count;
}

static void turn(struct coxpy_watch *watch)
{
    struct coxpy_child *list[CHILD_MAX];
    struct pollfd fds[2 * CHILD_MAX + 1];
    uint64_t count_of_wakes;
    bool wrote = false;
    const uint32_t count = list_children(watch, list);
    for (uint32_t i = 0; i < count; i++) {
        fds[2 * i] = (struct pollfd){.fd = list[i]->pidfd, .events = POLLIN};
        fds[2 * i + 1] = (struct pollfd){.fd = list[i]->error_fd, .events = POLLIN};
    }
    fds[2 * count] = (struct pollfd){.fd = watch->wake_fd, .events = POLLIN};
    if (poll(fds, 2 * count + 1, -1) < 0)
        return;
    if (fds[2 * count].revents && read(watch->wake_fd, &count_of_wakes, sizeof count_of_wakes) < 0)
        return;
    for (uint32_t i = 0; i < count; i++)
        if (fds[2 * i].revents)
            take_death(watch, list[i]);
    for (uint32_t i = 0; i < count; i++)
        if (fds[2 * i + 1].revents && !fds[2 * i].revents)
            wrote |= take_bytes(watch, list[i]);
    if (wrote)
        coxpy_watch_wake(watch);
}

static bool is_over(struct coxpy_watch *watch)
{
    pthread_mutex_lock(&watch->lock);
    const bool over = watch->over;
    pthread_mutex_unlock(&watch->lock);
    return over;
}

static void *thread_main(void *context)
{
    struct coxpy_watch *watch = context;
    tzset();
    while (!is_over(watch))
        turn(watch);
    return NULL;
}

/* ---- the host's side ---- */

int coxpy_watch_new(int out_fd, struct coxpy_watch **ret_watch)
{
    struct coxpy_watch *watch = calloc(1, sizeof *watch);
    if (!watch)
        return -ENOMEM;
    watch->out_fd = out_fd;
    watch->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (watch->wake_fd < 0) {
        const int error = -errno;
        free(watch);
        return error;
    }
    pthread_mutex_init(&watch->lock, NULL);
    cox_condition_init(&watch->news);
    const int r = cox_thread_start(&watch->thread, thread_main, watch);
    if (r) {
        close(watch->wake_fd);
        pthread_cond_destroy(&watch->news);
        pthread_mutex_destroy(&watch->lock);
        free(watch);
        return r;
    }
    *ret_watch = watch;
    return 0;
}

static void wake_thread(struct coxpy_watch *watch)
{
    const uint64_t one = 1;
    /* A full counter wakes it as well. */
    (void)!write(watch->wake_fd, &one, sizeof one);
}

struct coxpy_watch *coxpy_watch_free(struct coxpy_watch *watch)
{
    if (!watch)
        return NULL;
    pthread_mutex_lock(&watch->lock);
    watch->over = true;
    pthread_mutex_unlock(&watch->lock);
    wake_thread(watch);
    pthread_join(watch->thread, NULL);
    while (watch->children) {
        struct coxpy_child *child = watch->children;
        watch->children = child->next;
        coxpy_child_unref(child);
    }
    close(watch->wake_fd);
    pthread_cond_destroy(&watch->news);
    pthread_mutex_destroy(&watch->lock);
    free(watch);
    return NULL;
}

int coxpy_watch_add(struct coxpy_watch *watch, const char *name, int64_t pid, int error_fd,
                    struct coxpy_child **ret_child)
{
    struct coxpy_child *child = calloc(1, sizeof *child);
    if (!child)
        return -ENOMEM;
    child->pidfd = (int)syscall(SYS_pidfd_open, (pid_t)pid, 0);
    if (child->pidfd < 0) {
        const int r = -errno;
        free(child);
        return r;
    }
    pthread_mutex_init(&child->lock, NULL);
    snprintf(child->name, sizeof child->name, "%s", name);
    child->pid = (pid_t)pid;
    child->error_fd = error_fd;
    atomic_store(&child->refs, 2);
    pthread_mutex_lock(&watch->lock);
    const bool fits = watch->child_count < CHILD_MAX;
    if (fits) {
        child->next = watch->children;
        watch->children = child;
        watch->child_count++;
    }
    pthread_mutex_unlock(&watch->lock);
    if (!fits) {
        child->error_fd = -1;
        atomic_store(&child->refs, 1);
        coxpy_child_unref(child);
        return -ENFILE;
    }
    wake_thread(watch);
    *ret_child = child;
    return 0;
}

void coxpy_watch_forget(struct coxpy_watch *watch, struct coxpy_child *child)
{
    pthread_mutex_lock(&watch->lock);
    child->forgotten = true;
    pthread_mutex_unlock(&watch->lock);
    wake_thread(watch);
}

void coxpy_watch_quiet(struct coxpy_watch *watch)
{
    pthread_mutex_lock(&watch->lock);
    watch->quiet = true;
    pthread_mutex_unlock(&watch->lock);
}

void coxpy_watch_wake(struct coxpy_watch *watch)
{
    pthread_mutex_lock(&watch->lock);
    watch->woken = true;
    pthread_cond_signal(&watch->news);
    pthread_mutex_unlock(&watch->lock);
}

const struct coxpy_child *coxpy_watch_next(struct coxpy_watch *watch, uint64_t deadline_ns)
{
    const struct timespec until = cox_deadline_timespec(deadline_ns);
    struct coxpy_child *child;
    int e = 0;
    pthread_mutex_lock(&watch->lock);
    for (;;) {
        child = watch->children;
        while (child && (!child->told || child->fetched || child->forgotten))
            child = child->next;
        if (child || watch->woken || e == ETIMEDOUT)
            break;
        e = pthread_cond_timedwait(&watch->news, &watch->lock, &until);
    }
    if (child)
        child->fetched = true;
    else
        watch->woken = false;
    pthread_mutex_unlock(&watch->lock);
    return child;
}
