#include "subject.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "load.h"
#include "options.h"

/* Rounds of one slice, which is as many samples in memory. */
#define COUNT_MAX 10000000u
/* Of a command line. */
#define WORDS_MAX 24

struct session {
    const struct subject_ops *ops;
    /* NULL: none, after an end */
    void *subject;
    uint8_t *request;
    uint64_t *samples_ns;
    size_t sample_room;
    /* through all slices */
    uint64_t rounds;
    /* the conductor's alone */
    int out_fd;
};

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * COX_NSEC_PER_SEC + (uint64_t)now.tv_nsec;
}

static int write_all(int fd, const void *bytes, size_t size)
{
    const uint8_t *at = bytes;
    while (size > 0) {
        ssize_t written = write(fd, at, size);
        if (written < 0 && errno == EINTR)
            continue;
        if (written < 0)
            return -errno;
        at += written;
        size -= (size_t)written;
    }
    return 0;
}

static int say(int fd, const char *format, ...) __attribute__((format(printf, 2, 3)));
static int say(int fd, const char *format, ...)
{
    char line[1024];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line - 1, format, arguments);
    va_end(arguments);
    if (length >= (int)sizeof line - 1)
        length = (int)sizeof line - 2;
    for (int i = 0; i < length; i++)
        if (line[i] == '\n')
            line[i] = ' ';
    line[length] = '\n';
    return write_all(fd, line, (size_t)length + 1);
}

static int say_failure(int fd, const char *word, int r, const struct cox_error *err)
{
    say(fd, "%s %s", word, err->text[0] ? err->text : cox_status_text(r));
    return r;
}

/* ---- options ---- */

static const char usage_text[] =
    "usage: SUBJECT [WORD...] --ranks N --bytes B --reply-bytes R [--world M]\n";

static bool parse_options(int argc, char **argv, struct subject_options *ret_options)
{
    size_t ranks = 0, world = 0;
    struct subject_options options = {0};
    const struct option_spec specs[] = {
        {.name = "ranks", .number = &ranks, .min = 1, .max = UINT32_MAX},
        {.name = "world", .number = &world, .min = 1, .max = UINT32_MAX},
        {.name = "bytes", .number = &options.request_size, .min = LOAD_SIZE_MIN, .max = SIZE_MAX},
        {.name = "reply-bytes",
         .number = &options.reply_size,
         .min = LOAD_SIZE_MIN,
         .max = SIZE_MAX},
        {.name = NULL},
    };
    if (options_parse(argc, argv, specs, usage_text) >= 0 || !ranks || !options.request_size ||
        !options.reply_size)
        return false;
    options.rank_count = (uint32_t)ranks;
    options.world = (uint32_t)(world > ranks ? world : ranks);
    *ret_options = options;
    return true;
}

/* ---- rounds ---- */

static int samples_reserve(struct session *session, size_t count)
{
    if (count <= session->sample_room)
        return 0;
    uint64_t *samples_ns = realloc(session->samples_ns, count * sizeof *samples_ns);
    if (!samples_ns)
        return -ENOMEM;
    memset(samples_ns, 0xff, count * sizeof *samples_ns); /* no page fault inside of a slice */
    session->samples_ns = samples_ns;
    session->sample_room = count;
    return 0;
}

static int run_rounds(struct session *session, uint64_t *samples_ns, size_t count,
                      struct cox_error *err)
{
    const struct subject_ops *ops = session->ops;
    if (ops->run)
        return ops->run(session->subject, session->request, samples_ns, count, err);
    int r = 0;
    for (size_t i = 0; r == 0 && i < count; i++) {
        const uint64_t round = ++session->rounds;
        load_number(session->request, round);
        const uint64_t begin_ns = now_ns();
        r = ops->round(session->subject, session->request, round, err);
        samples_ns[i] = now_ns() - begin_ns;
    }
    return r;
}

/* Every round at its time, also after one that was late: the rate is kept on average. */
static int run_at_rate(struct session *session, size_t count, uint64_t period_ns,
                       struct cox_error *err)
{
    uint64_t at_ns = now_ns();
    int r = 0;
    for (size_t i = 0; r == 0 && i < count; i++) {
        at_ns += period_ns;
        const struct timespec at = {.tv_sec = (time_t)(at_ns / COX_NSEC_PER_SEC),
                                    .tv_nsec = (long)(at_ns % COX_NSEC_PER_SEC)};
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL) == EINTR)
            continue;
        r = run_rounds(session, &session->samples_ns[i], 1, err);
    }
    return r;
}

static int answer_rounds(struct session *session, size_t count, uint64_t period_ns)
{
    struct cox_error err = {0};
    int r = count == 0 || count > COUNT_MAX ? -EINVAL : samples_reserve(session, count);
    if (r == 0)
        r = period_ns ? run_at_rate(session, count, period_ns, &err)
                      : run_rounds(session, session->samples_ns, count, &err);
    if (r)
        return say_failure(session->out_fd, "error", r, &err);
    r = say(session->out_fd, "done %zu", count);
    if (r == 0)
        r = write_all(session->out_fd, session->samples_ns, count * sizeof *session->samples_ns);
    return r;
}

static int answer_idle(struct session *session, uint64_t ms)
{
    const struct timespec time = {.tv_sec = (time_t)(ms / 1000),
                                  .tv_nsec = (long)(ms % 1000 * 1000000)};
    nanosleep(&time, NULL);
    return say(session->out_fd, "done 0");
}

/* ---- a row ---- */

static void row_stop(struct session *session)
{
    if (session->subject)
        session->ops->stop(session->subject);
    session->subject = NULL;
    free(session->request);
    session->request = NULL;
}

/* Says ready, or why not. */
static int row_start(struct session *session, int argc, char **argv)
{
    struct subject_options options;
    struct cox_error err = {0};
    int r = 0;
    if (!parse_options(argc, argv, &options))
        r = cox_fail(&err, -EINVAL, "expected --ranks N --bytes B --reply-bytes R");
    else if (!(session->request = malloc(options.request_size)))
        r = cox_fail(&err, -ENOMEM, "no memory for a request");
    if (r == 0) {
        load_fill(session->request, options.request_size);
        r = session->ops->start(&options, &session->subject, &err);
    }
    if (r)
        return say_failure(session->out_fd, r == COX_UNSUPPORTED ? "skip" : "error", r, &err);
    return say(session->out_fd, "ready");
}

/* ---- the conductor's lines ---- */

static int row_again(struct session *session, char *words)
{
    char *argv[WORDS_MAX + 1] = {NULL};
    int argc = 0;
    words[strcspn(words, "\n")] = '\0';
    for (char *word; argc < WORDS_MAX && (word = strsep(&words, " ")) != NULL;)
        argv[argc++] = word;
    return row_start(session, argc, argv);
}

static int row_end(struct session *session)
{
    row_stop(session);
    return say(session->out_fd, "done 0");
}

static int answer(struct session *session, const char *line)
{
    uint64_t count, period_ns;
    if (sscanf(line, "slice %" SCNu64, &count) == 1)
        return answer_rounds(session, count, 0);
    if (sscanf(line, "rate %" SCNu64 " %" SCNu64, &count, &period_ns) == 2)
        return answer_rounds(session, count, period_ns ? period_ns : 1);
    if (strcmp(line, "allocations\n") == 0 && session->ops->allocations)
        return say(session->out_fd, "done %" PRIu64, session->ops->allocations(session->subject));
    if (sscanf(line, "idle %" SCNu64, &count) == 1)
        return answer_idle(session, count);
    return say(session->out_fd, "error what is '%s'?", line) ? -EPIPE : -EINVAL;
}

/* Returns 0 after quit and at the end of the input. */
static int serve(struct session *session)
{
    char line[512];
    int r = 0;
    while (r == 0 && fgets(line, sizeof line, stdin)) {
        if (strcmp(line, "quit\n") == 0)
            return 0;
        if (strcmp(line, "end\n") == 0)
            r = row_end(session);
        else if (strncmp(line, "again ", 6) == 0)
            r = session->subject ? -EINVAL : row_again(session, line);
        else
            r = session->subject ? answer(session, line) : -EINVAL;
    }
    return r;
}

/* What a library prints goes to stderr: a line of its own among ours would end the measurement. */
static int take_stdout(void)
{
    int fd = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3);
    if (fd >= 0 && dup2(STDERR_FILENO, STDOUT_FILENO) < 0)
        return -1;
    return fd;
}

int subject_main(int argc, char **argv, const struct subject_ops *ops)
{
    struct session session = {.ops = ops, .out_fd = take_stdout()};
    if (session.out_fd < 0)
        return 1;
    signal(SIGPIPE, SIG_IGN);
    int r = row_start(&session, argc, argv);
    if (r == 0)
        r = serve(&session);
    row_stop(&session);
    free(session.samples_ns);
    close(session.out_fd);
    return r != 0;
}
