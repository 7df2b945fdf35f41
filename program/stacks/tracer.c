#include "tracer.h"

#include <coxswain/base.h>

#include "channel/base/idioms.h"

#include <dirent.h>
#include <elf.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <time.h>

/* Of the time of a stop: for threads to stop, and until the rank must have written its frames. */
#define STOP_MS 15
#define FRAMES_MS 35
#define MAIN_STACK_SIZE (UINT32_C(256) << 10)
#define STACK_SIZE (UINT32_C(64) << 10)

struct traced {
    bool seized, stopped, gone;
    /* that the thread was about to get, and gets when it goes on */
    int signal;
};

/* ---- registers ---- */

#if defined __x86_64__
static bool registers_read(pid_t tid, struct cox_stack_thread *thread)
{
    struct user_regs_struct r;
    struct iovec view = {&r, sizeof r};
    if (ptrace(PTRACE_GETREGSET, tid, (void *)NT_PRSTATUS, &view) < 0)
        return false;
    const uint64_t dwarf[] = {r.rax, r.rdx, r.rcx, r.rbx, r.rsi, r.rdi, r.rbp, r.rsp, r.r8,
                              r.r9,  r.r10, r.r11, r.r12, r.r13, r.r14, r.r15, r.rip};
    memcpy(thread->registers, dwarf, sizeof dwarf);
    thread->pc = r.rip;
    thread->sp = r.rsp;
    thread->self = r.fs_base;
    return true;
}
#elif defined __aarch64__
static bool registers_read(pid_t tid, struct cox_stack_thread *thread)
{
    struct user_regs_struct r;
    struct iovec view = {&r, sizeof r};
    if (ptrace(PTRACE_GETREGSET, tid, (void *)NT_PRSTATUS, &view) < 0)
        return false;
    memcpy(thread->registers, r.regs, sizeof r.regs);
    thread->registers[31] = thread->sp = r.sp;
    thread->pc = r.pc;
    return true;
}
#else
static bool registers_read(pid_t tid, struct cox_stack_thread *thread)
{
    (void)tid;
    (void)thread;
    return false;
}
#endif

static void stack_read(pid_t pid, struct cox_stack_copy *copy, struct cox_stack_thread *thread)
{
    const uint32_t want = thread->tid == pid ? MAIN_STACK_SIZE : STACK_SIZE;
    if (copy->pool_used + want > COX_STACK_COPY_POOL_SIZE)
        return;
    struct iovec to = {copy->pool + copy->pool_used, want};
    struct iovec from = {(void *)(uintptr_t)thread->sp, want};
    ssize_t size = process_vm_readv(pid, &to, 1, &from, 1, 0);
    thread->at = copy->pool_used;
    thread->size = size > 0 ? (uint32_t)size : 0;
    copy->pool_used += thread->size;
}

/* ---- in the child ---- */

static void threads_list(pid_t pid, pid_t except, struct cox_stack_copy *copy)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%" PRId32 "/task", (int32_t)pid);
    DIR *folder = opendir(path);
    for (const struct dirent *entry; folder && (entry = readdir(folder));) {
        const int32_t tid = (int32_t)strtol(entry->d_name, NULL, 10);
        if (tid > 0 && tid != except && copy->count < COX_STACK_THREAD_MAX)
            copy->threads[copy->count++] = (struct cox_stack_thread){.tid = tid};
    }
    if (folder)
        closedir(folder);
}

static void threads_wait(struct cox_stack_copy *copy, struct traced *traced, uint64_t deadline_ns)
{
    uint32_t left = 0;
    for (uint32_t i = 0; i < copy->count; i++)
        left += traced[i].seized;
    while (left && cox_now_ns() < deadline_ns) {
        int status;
        const pid_t tid = waitpid(-1, &status, __WALL | WNOHANG);
        if (tid < 0 && errno != EINTR)
            break;
        if (tid <= 0) {
            nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
            continue;
        }
        for (uint32_t i = 0; i < copy->count; i++) {
            if (copy->threads[i].tid != tid || traced[i].stopped || traced[i].gone)
                continue;
            traced[i].gone = !WIFSTOPPED(status);
            traced[i].stopped = WIFSTOPPED(status);
            traced[i].signal = WIFSTOPPED(status) && status >> 16 == 0 ? WSTOPSIG(status) : 0;
            left--;
        }
    }
    copy->unstopped = left;
}

static void threads_let_go(struct cox_stack_copy *copy, const struct traced *traced)
{
    for (uint32_t i = 0; i < copy->count; i++)
        if (traced[i].stopped)
            ptrace(PTRACE_DETACH, copy->threads[i].tid, NULL, (void *)(intptr_t)traced[i].signal);
    atomic_store(&copy->continued_ns, cox_now_ns());
}

/* The thread that writes the frames, of a process that a signal has stopped. It stops again when
 * this process ends. */
static void writer_continue(pid_t tid)
{
    int status;
    const uint64_t deadline_ns = cox_deadline_after_ms(STOP_MS);
    /* Being stopped already, it traps at once; an interrupt would make it trap again. */
    if (ptrace(PTRACE_SEIZE, tid, NULL, NULL) < 0)
        return;
    while (waitpid(tid, &status, __WALL | WNOHANG) == 0 && cox_now_ns() < deadline_ns)
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    ptrace(PTRACE_CONT, tid, NULL, NULL);
}

/* A process that a signal has stopped comes only now that its thread goes on. */
static void frames_ask(struct cox_rank_connection *connection, pid_t pid, pid_t writer, bool held,
                       uint64_t deadline_ns, struct cox_stack_copy *copy)
{
    if (held && writer) {
        writer_continue(writer);
        cox_rank_connection_open(connection, pid, deadline_ns);
    }
    cox_rank_connection_ask(connection, COX_STACK_FRAMES, deadline_ns, copy);
}

static void child_trace(struct cox_rank_connection *connection, pid_t pid, pid_t writer, bool held,
                        struct cox_stack_copy *copy)
{
    struct traced traced[COX_STACK_THREAD_MAX] = {{0}};
    uint32_t seized = 0;
    threads_list(pid, writer, copy);
    for (uint32_t i = 0; i < copy->count; i++) {
        traced[i].seized = ptrace(PTRACE_SEIZE, copy->threads[i].tid, NULL, NULL) == 0;
        seized += traced[i].seized;
        if (!traced[i].seized && errno != ESRCH && !copy->refused)
            copy->refused = errno;
    }
    if (!seized)
        return;
    const uint64_t begin_ns = cox_now_ns();
    atomic_store(&copy->stopped_ns, begin_ns);
    for (uint32_t i = 0; i < copy->count; i++)
        if (traced[i].seized)
            ptrace(PTRACE_INTERRUPT, copy->threads[i].tid, NULL, NULL);
    threads_wait(copy, traced, begin_ns + STOP_MS * COX_NSEC_PER_MSEC);
    for (uint32_t i = 0; i < copy->count; i++) {
        struct cox_stack_thread *thread = &copy->threads[i];
        if (traced[i].stopped && registers_read(thread->tid, thread)) {
            thread->known = 2;
            stack_read(pid, copy, thread);
        }
    }
    frames_ask(connection, pid, writer, held, begin_ns + FRAMES_MS * COX_NSEC_PER_MSEC, copy);
    threads_let_go(copy, traced);
}

/* ---- the parent ---- */

/* The number of a thread; the kernel lists them so, but need not. */
static int by_number(const void *a, const void *b)
{
    const struct cox_stack_thread *one = a, *other = b;
    return (one->tid > other->tid) - (one->tid < other->tid);
}

/* The coordinator ends this process by SIGTERM, which is blocked here: the child is reaped first,
 * which would be left to whoever adopts orphans. */
static void child_watch(pid_t child, const sigset_t *term, const struct cox_stack_copy *copy)
{
    const uint64_t patience_ns = cox_deadline_after_ms(1000);
    for (;;) {
        int status;
        const pid_t r = waitpid(child, &status, WNOHANG);
        if (r == child || (r < 0 && errno != EINTR))
            return;
        const uint64_t stopped_ns = atomic_load(&copy->stopped_ns), now = cox_now_ns();
        if ((stopped_ns && !atomic_load(&copy->continued_ns) &&
             now > stopped_ns + COX_TRACER_MS * COX_NSEC_PER_MSEC) ||
            now > patience_ns)
            kill(child, SIGKILL);
        if (sigtimedwait(term, NULL, &(struct timespec){.tv_nsec = 500000}) == SIGTERM) {
            kill(child, SIGKILL);
            waitpid(child, &status, 0);
            _exit(128 + SIGTERM);
        }
    }
}

int cox_tracer_copy(struct cox_rank_connection *connection, pid_t pid, pid_t writer, bool held,
                    struct cox_stack_copy *copy)
{
    sigset_t term, before;
    sigemptyset(&term);
    sigaddset(&term, SIGTERM);
    sigprocmask(SIG_BLOCK, &term, &before);
    const pid_t self = getpid(), child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        /* Where that is permitted: the rank stands still while this process waits for a processor.
         */
        setpriority(PRIO_PROCESS, 0, -20);
        if (getppid() == self)
            child_trace(connection, pid, writer, held, copy);
        _exit(0);
    }
    const int r = child < 0 ? -errno : 0;
    if (r == 0)
        child_watch(child, &term, copy);
    sigprocmask(SIG_SETMASK, &before, NULL);
    if (r)
        return r;
    if (copy->count > COX_STACK_THREAD_MAX)
        copy->count = 0;
    qsort(copy->threads, copy->count, sizeof copy->threads[0], by_number);
    return 0;
}

struct cox_stack_copy *cox_stack_copy_new(void)
{
    void *base = mmap(NULL, sizeof(struct cox_stack_copy), PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return base == MAP_FAILED ? NULL : base;
}

struct cox_stack_copy *cox_stack_copy_free(struct cox_stack_copy *copy)
{
    if (copy)
        munmap(copy, sizeof *copy);
    return NULL;
}
