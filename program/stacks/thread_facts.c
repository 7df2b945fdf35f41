#include "thread_facts.h"

#include <coxswain/base.h>

#include "channel/base/base_internal.h"
#include "channel/base/idioms.h"
#include "channel/base/peer.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>

/* System calls in which threads wait; of others the number is shown. */
static const struct {
    long number;
    const char *name;
} calls[] = {
    {SYS_read, "read"},
    {SYS_write, "write"},
    {SYS_readv, "readv"},
    {SYS_writev, "writev"},
    {SYS_pread64, "pread64"},
    {SYS_futex, "futex"},
    {SYS_ppoll, "ppoll"},
    {SYS_pselect6, "pselect6"},
    {SYS_epoll_pwait, "epoll_pwait"},
    {SYS_nanosleep, "nanosleep"},
    {SYS_clock_nanosleep, "clock_nanosleep"},
    {SYS_recvfrom, "recvfrom"},
    {SYS_recvmsg, "recvmsg"},
    {SYS_sendto, "sendto"},
    {SYS_sendmsg, "sendmsg"},
    {SYS_accept, "accept"},
    {SYS_accept4, "accept4"},
    {SYS_connect, "connect"},
    {SYS_wait4, "wait4"},
    {SYS_waitid, "waitid"},
    {SYS_ioctl, "ioctl"},
    {SYS_fsync, "fsync"},
    {SYS_openat, "openat"},
    {SYS_flock, "flock"},
    {SYS_fcntl, "fcntl"},
    {SYS_mmap, "mmap"},
    {SYS_munmap, "munmap"},
    {SYS_madvise, "madvise"},
    {SYS_sched_yield, "sched_yield"},
    {SYS_rt_sigtimedwait, "rt_sigtimedwait"},
    {SYS_rt_sigsuspend, "rt_sigsuspend"},
    {SYS_io_getevents, "io_getevents"},
    {SYS_restart_syscall, "restart_syscall"},
    {SYS_clone, "clone"},
    {SYS_exit_group, "exit_group"},
#ifdef SYS_poll
    {SYS_poll, "poll"},
    {SYS_select, "select"},
    {SYS_epoll_wait, "epoll_wait"},
    {SYS_pause, "pause"},
    {SYS_vfork, "vfork"},
#endif
};

/* Returns the length of what was read, without its newline; -errno. */
static int file_read(pid_t pid, pid_t tid, const char *name, char *text, size_t size)
{
    char path[80];
    snprintf(path, sizeof path, "/proc/%" PRId32 "/task/%" PRId32 "/%s", (int32_t)pid, (int32_t)tid,
             name);
    const ssize_t length = cox_small_file_read(path, text, size);
    if (length < 0)
        return (int)length;
    text[strcspn(text, "\n")] = '\0';
    return (int)strlen(text);
}

static uint64_t thread_run_ns(pid_t pid, pid_t tid)
{
    char text[96];
    return file_read(pid, tid, "schedstat", text, sizeof text) > 0 ? strtoull(text, NULL, 10) : 0;
}

static void thread_read_call(pid_t pid, struct cox_thread_facts *thread, int *call_error)
{
    char text[256];
    const int r = file_read(pid, thread->tid, "syscall", text, sizeof text);
    if (r < 0)
        *call_error = r;
    if (r > 0 && text[0] >= '0' && text[0] <= '9') {
        const long number = strtol(text, NULL, 10);
        snprintf(thread->call, sizeof thread->call, "system call %ld", number);
        for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++)
            if (calls[i].number == number)
                snprintf(thread->call, sizeof thread->call, "%s", calls[i].name);
    }
    if (file_read(pid, thread->tid, "wchan", text, sizeof text) > 0 && strcmp(text, "0") != 0)
        snprintf(thread->channel, sizeof thread->channel, "%.47s", text);
}

static void thread_look_again(pid_t pid, struct cox_thread_facts *thread, int *call_error)
{
    char text[512];
    if (file_read(pid, thread->tid, "stat", text, sizeof text) <= 0)
        return;
    const char *end = strrchr(text, ')');
    thread->state = end && end[1] ? end[2] : 0;
    thread->ran = thread_run_ns(pid, thread->tid) != thread->run_ns;
    if (thread->state && thread->state != 'R')
        thread_read_call(pid, thread, call_error);
}

int cox_process_facts_read(pid_t pid, struct cox_process_facts *ret_facts)
{
    char path[64];
    *ret_facts = (struct cox_process_facts){0};
    snprintf(path, sizeof path, "/proc/%" PRId32 "/task", (int32_t)pid);
    DIR *folder = opendir(path);
    if (!folder)
        return errno == ENOENT ? COX_PEER_DEAD : -errno;
    for (const struct dirent *entry; (entry = readdir(folder));) {
        const pid_t tid = (pid_t)strtol(entry->d_name, NULL, 10);
        if (tid <= 0)
            continue;
        if (ret_facts->count == COX_STACK_THREAD_MAX) {
            ret_facts->more++;
            continue;
        }
        struct cox_thread_facts *thread = &ret_facts->threads[ret_facts->count++];
        thread->tid = tid;
        file_read(pid, tid, "comm", thread->name, sizeof thread->name);
        thread->run_ns = thread_run_ns(pid, tid);
    }
    closedir(folder);
    nanosleep(&(struct timespec){.tv_nsec = COX_THREAD_LOOK_MS * (long)COX_NSEC_PER_MSEC}, NULL);
    for (uint32_t i = 0; i < ret_facts->count; i++)
        thread_look_again(pid, &ret_facts->threads[i], &ret_facts->call_error);
    return ret_facts->count ? 0 : COX_PEER_DEAD;
}

void cox_thread_facts_text(const struct cox_thread_facts *thread, char *text, size_t size)
{
    const char *said = "in an unknown state";
    switch (thread->state) {
    case 0:
        said = "ended";
        break;
    case 'R':
        said = thread->ran ? "running" : "runnable, but on no processor for 20 ms";
        break;
    case 'S':
    case 'I':
        said = cox_peer_freezes_in(thread->channel) ? "frozen by its control group"
               : thread->ran                        ? "awake now and then"
                                                    : "asleep";
        break;
    case 'D':
        said = "in the kernel (state D)";
        break;
    case 'T':
        said = "stopped by a signal";
        break;
    case 't':
        said = "stopped by a debugger";
        break;
    case 'Z':
    case 'X':
        said = "ended";
        break;
    default:
        break;
    }
    snprintf(text, size, "%s%s%s%s%s%s", said, thread->call[0] ? " in " : "", thread->call,
             thread->channel[0] ? " (" : "", thread->channel, thread->channel[0] ? ")" : "");
}
