#include "process.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "measure.h"

#define START_TIMEOUT_MS 60000
#define QUIT_TIMEOUT_MS 10000
/* Of one whose time is over. */
#define LATE_QUIT_TIMEOUT_MS 1000
/* A spinning process is on a processor, or waiting for one, at nearly every sample. */
#define SPIN_LOOKS 5
#define SPIN_LOOK_NS 5000000

static bool fail(struct process *process, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static bool fail(struct process *process, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(process->text, sizeof process->text, format, arguments);
    va_end(arguments);
    process->state = PROCESS_FAILED;
    return false;
}

void process_give_up(struct process *process)
{
    fail(process, PROCESS_OVER);
    process->state = PROCESS_LATE;
}

/* ---- ctrl-C ---- */

static atomic_bool stopped;

static void on_stop(int signal)
{
    (void)signal;
    /* relaxed: nothing else is read by who sees it */
    atomic_store_explicit(&stopped, true, memory_order_relaxed);
}

void process_catch_stop(void)
{
    const struct sigaction action = {.sa_handler = on_stop, .sa_flags = (int)SA_RESETHAND};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

bool process_stopped(void)
{
    return atomic_load_explicit(&stopped, memory_order_relaxed);
}

/* ---- its pipes ---- */

static uint64_t deadline_after(int timeout_ms)
{
    return measure_now_ns() + (uint64_t)timeout_ms * UINT64_C(1000000);
}

static bool read_all(struct process *process, void *bytes, size_t size, uint64_t timeout_ns)
{
    uint8_t *at = bytes;
    while (size > 0) {
        const bool is_cut = process_stopped() || process->until_ns < timeout_ns;
        const uint64_t deadline_ns = process_stopped() ? 0
                                     : is_cut          ? process->until_ns
                                                       : timeout_ns;
        const uint64_t now_ns = measure_now_ns();
        struct pollfd poll_fd = {.fd = process->out_fd, .events = POLLIN};
        int ready = now_ns < deadline_ns
                        ? poll(&poll_fd, 1, (int)((deadline_ns - now_ns) / 1000000 + 1))
                        : 0;
        if (ready < 0 && errno == EINTR)
            continue;
        if (ready == 0) {
            fail(process, "no answer in time");
            if (is_cut)
                process_give_up(process);
            return false;
        }
        ssize_t got = ready < 0 ? -1 : read(process->out_fd, at, size);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return fail(process, "it has ended");
        at += got;
        size -= (size_t)got;
    }
    return true;
}

/* A byte at a time: behind the line there may be samples. */
static bool read_line(struct process *process, char *line, size_t size, uint64_t deadline_ns)
{
    size_t length = 0;
    do {
        if (!read_all(process, line + length, 1, deadline_ns))
            return false;
    } while (line[length] != '\n' && ++length < size - 1);
    line[length] = '\0';
    return true;
}

static bool answer_is(struct process *process, const char *expected, int timeout_ms)
{
    char line[sizeof process->text];
    if (!read_line(process, line, sizeof line, deadline_after(timeout_ms)))
        return false;
    if (strcmp(line, expected) == 0)
        return true;
    fail(process, "%s",
         strncmp(line, "error ", 6) == 0  ? line + 6
         : strncmp(line, "skip ", 5) == 0 ? line + 5
                                          : line);
    if (strncmp(line, "skip ", 5) == 0)
        process->state = PROCESS_SKIPPED;
    return false;
}

static bool say(struct process *process, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static bool say(struct process *process, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int written = vdprintf(process->in_fd, format, arguments);
    va_end(arguments);
    return written > 0 || fail(process, "it has ended");
}

/* ---- start and end ---- */

static void exec_child(const char *const *argv, enum placement placement, pid_t parent, int in_fd,
                       int out_fd)
{
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 || getppid() != parent ||
        placement_apply(placement) < 0 || dup2(in_fd, STDIN_FILENO) < 0 ||
        dup2(out_fd, STDOUT_FILENO) < 0)
        _exit(126);
    signal(SIGPIPE, SIG_DFL);
    execv(argv[0], (char *const *)(uintptr_t)argv);
    _exit(127);
}

void process_start(const char *const *argv, enum placement placement, uint64_t until_ns,
                   struct process *process)
{
    int in[2] = {-1, -1}, out[2] = {-1, -1};
    *process =
        (struct process){.in_fd = -1, .out_fd = -1, .placement = placement, .until_ns = until_ns};
    if (access(argv[0], X_OK) < 0) {
        process->state = PROCESS_SKIPPED;
        snprintf(process->text, sizeof process->text, "not built");
        return;
    }
    if (pipe2(in, O_CLOEXEC) < 0 || pipe2(out, O_CLOEXEC) < 0) {
        fail(process, "pipe: %s", strerror(errno));
        return;
    }
    const pid_t conductor = getpid();
    process->pid = fork();
    if (process->pid == 0)
        exec_child(argv, placement, conductor, in[0], out[1]);
    close(in[0]);
    close(out[1]);
    process->in_fd = in[1];
    process->out_fd = out[0];
    if (process->pid < 0) {
        process->pid = 0;
        fail(process, "fork: %s", strerror(errno));
    }
}

void process_again(const char *const *words, enum placement placement, uint64_t until_ns,
                   struct process *home, struct process *process)
{
    char line[512] = "again";
    *process = *home;
    *home = (struct process){.in_fd = -1, .out_fd = -1};
    process->home = home;
    process->placement = placement;
    process->until_ns = until_ns;
    process->spinners.count = 0;
    process->quits = false;
    process->text[0] = '\0';
    for (size_t i = 0; words[i]; i++) {
        const size_t length = strlen(line);
        snprintf(line + length, sizeof line - length, " %s", words[i]);
    }
    procfs_tree(process->pid, &process->tree);
    procfs_threads(&process->tree, false,
                   placement == PLACEMENT_FREE ? placement_anywhere : placement_lowest);
    say(process, "%s\n", line);
}

void process_await(struct process *process, bool spins_idle)
{
    if (process->state != PROCESS_READY)
        return;
    if (!answer_is(process, "ready", START_TIMEOUT_MS)) {
        if (process->home && process->state == PROCESS_SKIPPED) /* nor will it for another row */
            memcpy(process->home->text, process->text, sizeof process->text);
        process_free(process);
        return;
    }
    procfs_tree(process->pid, &process->tree);
    if (process->placement == PLACEMENT_APART)
        procfs_threads(&process->tree, true, placement_separate);
    process->processors = procfs_processors(&process->tree);
    for (int i = 0; spins_idle && i < SPIN_LOOKS; i++) {
        measure_sleep_until(measure_now_ns() + SPIN_LOOK_NS);
        procfs_add_running(&process->tree, &process->spinners);
    }
    process_pause(process);
}

static bool reap(struct process *process, int timeout_ms)
{
    const uint64_t deadline_ns = deadline_after(timeout_ms);
    for (;;) {
        pid_t pid = waitpid(process->pid, NULL, WNOHANG);
        if (pid != 0 && !(pid < 0 && errno == EINTR))
            return true;
        if (measure_now_ns() >= deadline_ns)
            return false;
        usleep(1000);
    }
}

void process_quit(struct process *process)
{
    process_resume(process);
    if (process->quits || process->pid <= 0)
        return;
    process->quits = true;
    if (process->home && process->state == PROCESS_READY && say(process, "end\n"))
        return;
    close(process->in_fd); /* the end of its input, which a line may not have reached */
    process->in_fd = -1;
}

/* Whether it has ended its row, and waits for another one where it came from. */
static bool goes_home(struct process *process)
{
    struct process *home = process->home;
    if (!home || home->pid > 0 || process->state != PROCESS_READY || process->in_fd < 0 ||
        !answer_is(process, "done 0", QUIT_TIMEOUT_MS))
        return false;
    *home = *process;
    home->home = NULL;
    home->quits = false;
    process->pid = 0;
    process->in_fd = process->out_fd = -1;
    return true;
}

void process_free(struct process *process)
{
    process_quit(process);
    if (process->pid > 0 && !goes_home(process)) {
        if (process->in_fd >= 0)
            close(process->in_fd);
        process->in_fd = -1;
        const bool late = process->state == PROCESS_LATE || measure_now_ns() >= process->until_ns;
        const int patience_ms = process_stopped() ? 0
                                : late            ? LATE_QUIT_TIMEOUT_MS
                                                  : QUIT_TIMEOUT_MS;
        if (process->state == PROCESS_FAILED || !reap(process, patience_ms)) {
            procfs_tree(process->pid, &process->tree);
            procfs_end(&process->tree);
        }
        process->pid = 0;
    }
    if (process->in_fd >= 0)
        close(process->in_fd);
    if (process->out_fd >= 0)
        close(process->out_fd);
    process->in_fd = process->out_fd = -1;
}

void process_pause(struct process *process)
{
    if (process->spinners.count && process->state == PROCESS_READY && !process->stopped) {
        procfs_signal(&process->spinners, SIGSTOP);
        process->stopped = true;
    }
}

void process_resume(struct process *process)
{
    if (process->stopped)
        procfs_signal(&process->spinners, SIGCONT);
    process->stopped = false;
}

/* ---- rounds ---- */

static bool take_samples(struct process *process, uint64_t *samples_ns, size_t count,
                         int timeout_ms)
{
    char expected[32];
    snprintf(expected, sizeof expected, "done %zu", count);
    return answer_is(process, expected, timeout_ms) &&
           read_all(process, samples_ns, count * sizeof *samples_ns, deadline_after(timeout_ms));
}

bool process_slice(struct process *process, uint64_t *samples_ns, size_t count, int timeout_ms)
{
    return say(process, "slice %zu\n", count) &&
           take_samples(process, samples_ns, count, timeout_ms);
}

bool process_rate(struct process *process, uint64_t *samples_ns, size_t count, uint64_t period_ns)
{
    return say(process, "rate %zu %" PRIu64 "\n", count, period_ns) &&
           take_samples(process, samples_ns, count,
                        (int)(count * period_ns / 1000000) * 4 + START_TIMEOUT_MS);
}

bool process_idle(struct process *process, uint32_t ms)
{
    return say(process, "idle %" PRIu32 "\n", ms) &&
           answer_is(process, "done 0", (int)ms + START_TIMEOUT_MS);
}

bool process_allocations(struct process *process, uint64_t *ret_count)
{
    char line[sizeof process->text];
    if (!say(process, "allocations\n") ||
        !read_line(process, line, sizeof line, deadline_after(START_TIMEOUT_MS)))
        return false;
    return sscanf(line, "done %" SCNu64, ret_count) == 1 || fail(process, "%s", line);
}
