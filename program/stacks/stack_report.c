#include "stack_report.h"

#include "channel/base/idioms.h"
#include "program/cli/command.h"
#include "flight_recorder.h"
#include "python_frames.h"
#include "thread_facts.h"
#include "tracer.h"
#include "unwind.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* How long the rank has for its frames where no tracer stops it. */
#define ASK_MS 200
#define SUMMARY_SIZE 320
/* Of the thread that serves requests, if it has a name. */
#define SERVING_NAME "cox-execute"

struct report {
    pid_t pid;
    /* of this process: when it began, and how long it has waited for a processor until then */
    uint64_t begin_ns, begin_waited_ns;
    /* its time, and that with what it has waited since, at most */
    uint64_t budget_ns, limit_ns;
    /* the thread that serves requests */
    pid_t serving;
    /* a signal has stopped it */
    bool held;
    struct cox_process_facts facts;
    struct cox_rank_connection connection;
    int connection_error;
    struct cox_stack_copy *copy;
    struct cox_python_frames python;
    struct cox_unwind unwind;
    bool unwinds;
    struct cox_error unwind_error;
    /* frames of the rank were copied while it ran */
    bool unstopped_frames;
    uint32_t left_out;
};

/* ---- time ---- */

/* How long this process has waited for a processor; 0 where the kernel does not say. */
static uint64_t waited_ns(void)
{
    char text[96] = "";
    char *end;
    _cox_cleanup_(cox_close_fd) int fd = open("/proc/self/schedstat", O_RDONLY | O_CLOEXEC);
    const ssize_t size = fd >= 0 ? read(fd, text, sizeof text - 1) : 0;
    text[size > 0 ? size : 0] = '\0';
    strtoull(text, &end, 10);
    return strtoull(end, NULL, 10);
}

/* On a busy machine a person waits longer, as far as the coordinator does. */
static bool time_is_up(const struct report *report)
{
    const uint64_t now = cox_now_ns(), taken_ns = now - report->begin_ns;
    if (taken_ns < report->budget_ns)
        return false;
    return taken_ns >= report->limit_ns ||
           taken_ns - (waited_ns() - report->begin_waited_ns) >= report->budget_ns;
}

/* ---- take ---- */

/* Not by asking Yama alone: there are other reasons for and against. */
static bool may_trace(pid_t pid)
{
    char path[32];
    snprintf(path, sizeof path, "/proc/%" PRId32 "/mem", (int32_t)pid);
    _cox_cleanup_(cox_close_fd) int fd = open(path, O_RDONLY | O_CLOEXEC);
    return fd >= 0;
}

/* Where the kernel lets no tracer in, the rank copies its stacks by itself, while it runs. */
static void take_from_rank(struct report *report)
{
    report->unstopped_frames =
        cox_rank_connection_ask(&report->connection, COX_STACK_FRAMES | COX_STACK_COPIES,
                                cox_deadline_after_ms(ASK_MS), report->copy) == 0;
}

static void find_serving(struct report *report)
{
    report->serving = report->pid;
    for (uint32_t i = 0; i < report->facts.count; i++)
        if (strcmp(report->facts.threads[i].name, SERVING_NAME) == 0)
            report->serving = report->facts.threads[i].tid;
}

/* What is known first, in case that the time is up before there is more. */
static void facts_summary_print(struct report *report)
{
    char state[160] = "";
    find_serving(report);
    for (uint32_t i = 0; i < report->facts.count; i++)
        if (report->facts.threads[i].tid == report->serving)
            cox_thread_facts_text(&report->facts.threads[i], state, sizeof state);
    printf("summary: %s, %s\n", report->serving == report->pid ? "main thread" : SERVING_NAME,
           state);
    fflush(stdout);
}

/* Of its own, unlike anything that the doorbell says. 0: it has none. */
static pid_t find_writer(const struct report *report)
{
    for (uint32_t i = 0; i < report->facts.count; i++)
        if (strcmp(report->facts.threads[i].name, COX_STACK_THREAD_NAME) == 0)
            return report->facts.threads[i].tid;
    return 0;
}

static int rank_connect(struct report *report)
{
    return report->connection_error = cox_rank_connection_open(&report->connection, report->pid,
                                                               cox_deadline_after_ms(ASK_MS));
}

static int take(struct report *report)
{
    int r = cox_process_facts_read(report->pid, &report->facts);
    if (r)
        return r;
    facts_summary_print(report);
    /* Only its tracer lets a stopped process come. */
    const bool held = report->held = report->facts.threads[0].state == 'T';
    if (!held && rank_connect(report) == 0 && !may_trace(report->pid))
        cox_rank_connection_ask(&report->connection, COX_STACK_CONSENT,
                                cox_deadline_after_ms(ASK_MS), report->copy);
    r = cox_tracer_copy(&report->connection, report->pid, find_writer(report), held, report->copy);
    if (r)
        return r;
    bool known = false;
    for (uint32_t i = 0; i < report->copy->count; i++)
        known |= report->copy->threads[i].known != 0;
    /* On a busy machine the rank's thread may not have run while the others were stopped, and the
     * tracer may have left half of its reply. */
    if (!held && !report->connection_error && !atomic_load(&report->copy->frames)) {
        cox_rank_connection_close(&report->connection);
        rank_connect(report);
    }
    if (!known)
        take_from_rank(report);
    else if (!atomic_load(&report->copy->frames))
        cox_rank_connection_ask(&report->connection, COX_STACK_FRAMES,
                                cox_deadline_after_ms(ASK_MS), report->copy);
    if (atomic_load(&report->copy->frames))
        cox_python_frames_parse(report->copy->text, &report->python);
    return 0;
}

/* ---- what there is of a thread ---- */

static const struct cox_stack_thread *copy_of(const struct report *report, pid_t tid)
{
    for (uint32_t i = 0; i < report->copy->count; i++)
        if (report->copy->threads[i].tid == tid)
            return &report->copy->threads[i];
    return NULL;
}

static const struct cox_python_thread *python_of(const struct report *report, pid_t tid)
{
    const struct cox_stack_thread *copied = copy_of(report, tid);
    if (copied && copied->self)
        return cox_python_frames_of(&report->python, copied->self);
    /* CPython lists the thread that came first last. */
    return tid == report->pid && report->python.count && !report->python.cut
               ? &report->python.threads[report->python.count - 1]
               : NULL;
}

static void frame_text(const struct cox_unwind_frame *frame, char *text, size_t size)
{
    char where[120] = "";
    if (frame->file[0])
        snprintf(where, sizeof where, "%s:%d", frame->file, frame->line);
    else if (frame->object[0] && frame->function[0])
        snprintf(where, sizeof where, "%s", frame->object);
    if (frame->function[0])
        snprintf(text, size, "%s (%s)", frame->function, where);
    else if (frame->object[0])
        snprintf(text, size, "%s + 0x%" PRIx64, frame->object, frame->offset);
    else
        snprintf(text, size, "code in no file");
}

/* The innermost frame, and the first one that is not of the C library. */
static void summary_native(const struct cox_unwind_frame *frames, uint32_t count, char *text,
                           size_t size)
{
    char inner[224], caller[224];
    uint32_t i = 1;
    frame_text(&frames[0], inner, sizeof inner);
    while (i < count && frames[i].of_system)
        i++;
    if (i < count)
        frame_text(&frames[i], caller, sizeof caller);
    snprintf(text, size, "%s%s%s", inner, i < count ? " called from " : "",
             i < count ? caller : "");
}

static void summary_print(const struct report *report, const struct cox_unwind_frame *frames,
                          uint32_t count)
{
    const struct cox_python_thread *python = python_of(report, report->serving);
    const struct cox_thread_facts *facts = NULL;
    char text[2 * SUMMARY_SIZE] = "", inner[200], caller[200] = "", state[160] = "";
    for (uint32_t i = 0; i < report->facts.count; i++)
        if (report->facts.threads[i].tid == report->serving)
            facts = &report->facts.threads[i];
    if (facts)
        cox_thread_facts_text(facts, state, sizeof state);
    if (python && cox_python_frame_text(python, 0, inner, sizeof inner)) {
        const bool called = cox_python_frame_text(python, 1, caller, sizeof caller);
        snprintf(text, sizeof text, "%s%s%s", inner, called ? " called from " : "", caller);
    } else if (count) {
        summary_native(frames, count, text, sizeof text);
    }
    /* Where a thread sleeps is in its frames; that it sleeps goes without saying. */
    const bool tells = facts && (facts->state != 'S' || !text[0]);
    printf("summary: %s%s%s%s%s\n",
           report->serving == report->pid ? (python ? "MainThread" : "main thread") : facts->name,
           text[0] ? " in " : "", text, tells ? ", " : "", tells ? state : "");
    fflush(stdout);
}

/* ---- print ---- */

static void native_print(const struct cox_unwind_frame *frames, uint32_t count, bool cut)
{
    printf("  native:\n");
    for (uint32_t i = 0; i < count; i++) {
        const struct cox_unwind_frame *frame = &frames[i];
        char text[256];
        uint32_t again = 0;
        while (i + 1 < count && frames[i + 1].offset == frame->offset &&
               strcmp(frames[i + 1].object, frame->object) == 0)
            again++, i++;
        frame_text(frame, text, sizeof text);
        printf("    %s", text);
        if (frame->function[0] && frame->object[0])
            printf(" [%s + 0x%" PRIx64 "]", frame->object, frame->offset);
        if (again)
            printf(", %" PRIu32 " times more", again);
        putchar('\n');
    }
    if (cut)
        printf("    ... frames further out are cut\n");
}

/* A thread of the library that waits for work is in one line. */
static bool is_idle(const struct cox_unwind_frame *frames, uint32_t count)
{
    static const char *const waits[] = {"semaphores_wait", "futexes_wait", "guard_main",
                                        "worker_watch"};
    for (uint32_t i = 0; i < count && i < 3; i++)
        for (size_t k = 0; k < sizeof waits / sizeof waits[0]; k++)
            if (strcmp(frames[i].function, waits[k]) == 0)
                return true;
    return false;
}

static void thread_print(struct report *report, const struct cox_thread_facts *facts)
{
    static struct cox_unwind_frame frames[COX_UNWIND_FRAME_MAX];
    const struct cox_python_thread *python = python_of(report, facts->tid);
    const struct cox_stack_thread *copied = copy_of(report, facts->tid);
    char state[160];
    cox_thread_facts_text(facts, state, sizeof state);
    printf("thread %" PRId32 " \"%s\"%s: %s\n", (int32_t)facts->tid, facts->name,
           facts->tid == report->pid ? " (the main thread)" : "", state);
    if (python)
        printf("  Python, most recent call first:\n%.*s", (int)python->size, python->frames);
    if (report->unwinds && copied && copied->known && !time_is_up(report)) {
        const uint32_t count = cox_unwind_thread(&report->unwind, copied, frames);
        if (!python && is_idle(frames, count) && facts->tid != report->serving)
            printf("  a thread of Coxswain that waits for work\n");
        else
            native_print(frames, count, report->unwind.cut);
    } else if (report->unwinds && copied && copied->known) {
        report->left_out++;
    }
    fflush(stdout);
}

static const char *unstopped_reason(const struct report *report)
{
    uint32_t held = 0;
    for (uint32_t i = 0; i < report->facts.count; i++)
        held += report->facts.threads[i].state == 'D';
    if (held >= report->copy->unstopped)
        return "they wait in the kernel so that nothing wakes them (state D)";
    return held ? "some wait in the kernel (state D), others got no processor"
                : "they got no processor: the machine is busy";
}

static const char *frames_missing(const struct report *report)
{
    switch (report->connection_error) {
    case 0:
    case COX_TIMEOUT:
        return "the rank's own thread did not write them in time";
    case COX_NOT_FOUND:
        return "the process has no thread for them: it is no worker of this release, or does not "
               "know which process its coordinator is";
    case COX_UNSUPPORTED:
        return "a rank gives them to its coordinator alone, and this helper has no socket of it";
    default:
        return cox_status_text(report->connection_error);
    }
}

static void missing_print(const struct report *report)
{
    const struct cox_stack_copy *copy = report->copy;
    if (copy->refused)
        printf("not there: ptrace was refused (%s): %s\n", strerror(copy->refused),
               report->unstopped_frames
                   ? "the rank copied its stacks itself, while it ran; of threads that were on a "
                     "processor nothing is known"
                   : "no native frames (docs/operations.md)");
    if (copy->unstopped)
        printf("not there: %" PRIu32 " threads did not stop within 15 ms: %s\n", copy->unstopped,
               unstopped_reason(report));
    if (!report->unwinds && report->unwind_error.code)
        printf("not there: %s\n", report->unwind_error.text);
    if (report->left_out)
        printf("not there: native frames of %" PRIu32
               " threads: the time was up after %.1f s, %.1f s of them without a processor\n",
               report->left_out, (double)(cox_now_ns() - report->begin_ns) / 1e9,
               (double)(waited_ns() - report->begin_waited_ns) / 1e9);
    if (report->facts.more)
        printf("not there: %" PRIu32 " threads beyond %d\n", report->facts.more,
               COX_STACK_THREAD_MAX);
    if (report->python.cut)
        printf("not there: Python frames of threads beyond 100\n");
    if (!atomic_load(&copy->frames))
        printf("not there: frames of an interpreter: %s\n", frames_missing(report));
    if (report->facts.call_error)
        printf("not there: system calls: %s\n", cox_status_text(report->facts.call_error));
}

static void head_print(const struct report *report)
{
    const uint64_t stopped = atomic_load(&report->copy->stopped_ns);
    const uint64_t continued = atomic_load(&report->copy->continued_ns);
    printf("process %" PRId32 ": %" PRIu32 " threads, %" PRIu32 " with Python frames",
           (int32_t)report->pid, report->facts.count + report->facts.more, report->python.count);
    if (stopped)
        printf("; stopped for %.1f ms",
               continued > stopped ? (double)(continued - stopped) / 1e6 : (double)COX_TRACER_MS);
    putchar('\n');
}

static uint64_t real_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * COX_NSEC_PER_SEC + (uint64_t)now.tv_nsec;
}

/* Before symbols are read, which takes longer: which rank is missing is what a person wants first.
 * A rank that a signal has stopped cannot say it. */
static void torch_print(struct report *report)
{
    enum cox_stack_torch torch = COX_STACK_TORCH_NONE;
    char *dump = NULL;
    if (!atomic_load(&report->copy->frames) || report->held)
        return;
    const int r = cox_rank_connection_ask_torch(
        &report->connection, cox_deadline_after_ms(COX_STACK_TORCH_MS + ASK_MS), &torch, &dump);
    if (r == 0 && torch == COX_STACK_TORCH_THERE)
        cox_flight_recorder_print(dump, real_ns(), stdout);
    else if (r == COX_TIMEOUT || torch == COX_STACK_TORCH_SILENT)
        printf("not there: PyTorch's flight recorder did not answer: a thread that hangs may hold "
               "its lock\n");
    else if (torch == COX_STACK_TORCH_TOO_LARGE)
        printf("not there: PyTorch's flight recorder: its dump has more than %d MiB\n",
               (int)(COX_STACK_TORCH_MAX >> 20));
    free(dump);
    fflush(stdout);
}

static void report_print(struct report *report)
{
    static struct cox_unwind_frame frames[COX_UNWIND_FRAME_MAX];
    uint32_t count = 0;
    const bool early = python_of(report, report->serving) != NULL;
    if (early)
        summary_print(report, NULL, 0);
    head_print(report);
    torch_print(report);
    const int r =
        cox_unwind_open(&report->unwind, report->pid, report->copy, &report->unwind_error);
    report->unwinds = r == 0;
    const struct cox_stack_thread *copied = copy_of(report, report->serving);
    if (!early && report->unwinds && copied)
        count = cox_unwind_thread(&report->unwind, copied, frames);
    if (!early)
        summary_print(report, frames, count);
    for (uint32_t i = 0; i < report->facts.count; i++)
        if (report->facts.threads[i].tid == report->serving)
            thread_print(report, &report->facts.threads[i]);
    for (uint32_t i = 0; i < report->facts.count; i++)
        if (report->facts.threads[i].tid != report->serving)
            thread_print(report, &report->facts.threads[i]);
    missing_print(report);
    cox_unwind_close(&report->unwind);
}

int cox_stack_report_main(int count, char *const *words)
{
    struct report *report = calloc(1, sizeof *report);
    if (!report || count < 2)
        return COX_EXIT_USAGE;
    report->copy = cox_stack_copy_new();
    report->connection.fd = -1;
    report->pid = (pid_t)strtol(words[0], NULL, 10);
    report->begin_ns = cox_now_ns();
    report->begin_waited_ns = waited_ns();
    report->budget_ns = strtoull(words[1], NULL, 10) * COX_NSEC_PER_MSEC;
    report->limit_ns =
        count > 2 ? strtoull(words[2], NULL, 10) * COX_NSEC_PER_MSEC : report->budget_ns;
    const int r = report->copy ? take(report) : -ENOMEM;
    if (r == 0)
        report_print(report);
    else if (r == COX_PEER_DEAD)
        printf("summary: there is no such process in this PID namespace\n");
    else
        printf("summary: nothing can be read of it: %s\n", cox_status_text(r));
    cox_stack_copy_free(report->copy);
    cox_rank_connection_close(&report->connection);
    free(report);
    return r ? COX_EXIT_FAILED : COX_EXIT_OK;
}
