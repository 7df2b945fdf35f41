#include "subject.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
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

/* Rounds of one slice, which is as many samples in memory. */
#define COUNT_MAX 10000000u

struct session {
    const struct subject_ops *ops;
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

static int parse_number(const char *text, uint64_t min, uint64_t max, uint64_t *ret_value)
{
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (errno || end == text || *end || text[0] == '-' || value < min || value > max)
        return -EINVAL;
    *ret_value = value;
    return 0;
}

static int parse_options(int argc, char **argv, struct subject_options *ret_options)
{
    static const struct option names[] = {
        {"ranks", required_argument, NULL, 'n'},
        {"bytes", required_argument, NULL, 'b'},
        {"reply-bytes", required_argument, NULL, 'r'},
        {NULL, 0, NULL, 0},
    };
    uint64_t ranks = 0, request_size = 0, reply_size = 0;
    int r = 0;
    optind = 1;
    for (int option; r == 0 && (option = getopt_long(argc, argv, "", names, NULL)) != -1;) {
        if (option == 'n')
            r = parse_number(optarg, 1, UINT32_MAX, &ranks);
        else if (option == 'b')
            r = parse_number(optarg, LOAD_SIZE_MIN, SIZE_MAX, &request_size);
        else if (option == 'r')
            r = parse_number(optarg, LOAD_SIZE_MIN, SIZE_MAX, &reply_size);
        else
            r = -EINVAL;
    }
    if (r || optind != argc || !ranks || !request_size || !reply_size)
        return -EINVAL;
    *ret_options = (struct subject_options){
        .rank_count = (uint32_t)ranks, .request_size = request_size, .reply_size = reply_size};
    return 0;
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

/* ---- the conductor's lines ---- */

/* Returns 0 after quit and at the end of the input. */
static int serve(struct session *session)
{
    char line[128];
    uint64_t count, period_ns;
    int r = 0;
    while (r == 0 && fgets(line, sizeof line, stdin)) {
        if (strcmp(line, "quit\n") == 0)
            return 0;
        if (sscanf(line, "slice %" SCNu64, &count) == 1)
            r = answer_rounds(session, count, 0);
        else if (sscanf(line, "rate %" SCNu64 " %" SCNu64, &count, &period_ns) == 2)
            r = answer_rounds(session, count, period_ns ? period_ns : 1);
        else if (strcmp(line, "allocations\n") == 0 && session->ops->allocations)
            r = say(session->out_fd, "done %" PRIu64, session->ops->allocations(session->subject));
        else if (sscanf(line, "idle %" SCNu64, &count) == 1)
            r = answer_idle(session, count);
        else
            r = say(session->out_fd, "error what is '%s'?", line) ? -EPIPE : -EINVAL;
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
    struct subject_options options;
    struct cox_error err = {0};
    if (session.out_fd < 0)
        return 1;
    signal(SIGPIPE, SIG_IGN);
    if (parse_options(argc, argv, &options)) {
        say(session.out_fd, "error expected --ranks N --bytes B --reply-bytes R");
        return 2;
    }
    session.request = malloc(options.request_size);
    if (!session.request) {
        say(session.out_fd, "error no memory for a request");
        return 1;
    }
    load_fill(session.request, options.request_size);
    int r = ops->start(&options, &session.subject, &err);
    if (r) {
        say_failure(session.out_fd, r == COX_UNSUPPORTED ? "skip" : "error", r, &err);
    } else {
        r = say(session.out_fd, "ready");
        if (r == 0)
            r = serve(&session);
        ops->stop(session.subject);
    }
    free(session.samples_ns);
    free(session.request);
    close(session.out_fd);
    return r != 0;
}
