/* coxswain trace: what a group did in its last seconds, for Perfetto or as JSON. */
#include "channel/base/idioms.h"
#include "coordinator/recording/recording.h"
#include "program/cli/console.h"
#include "program/cli/group_options.h"
#include "program/trace/story.h"
#include "recording_command.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define TIMEOUT_MS 10000

struct trace_choice {
    struct cox_connection connection;
    /* a recording; NULL: of a running group */
    const char *recording;
    /* NULL: none */
    const char *output;
    struct cox_story_range range;
};

static int take_seconds(void *member, const char *value, struct cox_error *err)
{
    uint64_t ms = 0, *seconds_ns = member;
    int r = cox_parse_seconds("--seconds", value, &ms, err);
    *seconds_ns = ms * COX_NSEC_PER_MSEC;
    return r;
}

static int check(const void *context, struct cox_error *err)
{
    const struct trace_choice *choice = context;
    if (!choice->output && !choice->connection.json)
        return cox_fail(err, COX_INVALID,
                        "where to? -o FILE for Perfetto, or --json for a summary on standard "
                        "output");
    if (choice->range.seconds_ns && choice->range.last)
        return cox_fail(err, COX_INVALID, "--seconds or --last: choose one");
    return 0;
}

/* A word that is neither a path nor a file that is there is the name of a group. */
static int words(void *context, int count, char *const *list, struct cox_error *err)
{
    struct trace_choice *choice = context;
    const char *word = count ? list[0] : "";
    if (!strchr(word, '/') && !strstr(word, ".crash") && (!count || access(word, F_OK) < 0))
        return cox_connection_words(&choice->connection, count, list, err);
    if (count > 1)
        return cox_fail(err, COX_INVALID, "one recording at a time: '%.64s' is another", list[1]);
    if (choice->connection.name || choice->connection.control_socket)
        return cox_fail(err, COX_INVALID, "a recording, or the --name of a running group");
    choice->recording = word;
    return 0;
}

static int trace_write(const struct cox_story *story, const char *path, struct cox_error *err)
{
    FILE *file = strcmp(path, "-") == 0 ? stdout : fopen(path, "we");
    if (!file)
        return cox_fail(err, -errno, "%s: %s", path, cox_status_text(-errno));
    struct stat written, named;
    /* Not a device or pipe, nor what a link leads to. */
    const bool removable = fstat(fileno(file), &written) == 0 && S_ISREG(written.st_mode) &&
                           lstat(path, &named) == 0 && named.st_dev == written.st_dev &&
                           named.st_ino == written.st_ino;
    int r = cox_story_write_trace(story, file);
    if (file != stdout && fclose(file) != 0 && !r)
        r = -errno;
    if (r && file != stdout && removable)
        unlink(path);
    return r ? cox_fail(err, r, "%s cannot be written: %s", path, cox_status_text(r)) : 0;
}

static int run(void *context)
{
    struct trace_choice *choice = context;
    _cox_cleanup_(cox_recording_freep) struct CoxswainRecording__Recording *recording = NULL;
    _cox_cleanup_(cox_story_freep) struct cox_story *story = NULL;
    struct cox_error err = {0};
    const uint64_t timeout_ms =
        choice->connection.timeout_ms ? choice->connection.timeout_ms : TIMEOUT_MS;
    int r = choice->recording
                ? cox_recording_read(choice->recording, &recording, &err)
                : cox_recording_ask(&choice->connection, cox_deadline_after_ms(timeout_ms),
                                    &recording, &err);
    if (r == 0)
        r = cox_story_new(recording, &choice->range, &story, &err);
    if (r == 0 && choice->output)
        r = trace_write(story, choice->output, &err);
    if (r) {
        cox_client_clean_text(err.text);
        const int exit_status = cox_exit_with(&err);
        /* A file that is invalid is no failure of a worker. */
        return choice->recording && exit_status == COX_EXIT_WORKER ? COX_EXIT_FAILED : exit_status;
    }
    if (choice->connection.json) {
        json_t *root = cox_story_json(story);
        json_dumpf(root, stdout, JSON_COMPACT);
        putchar('\n');
        json_decref(root);
    }
    if (story->problems[0]) {
        cox_client_clean_text(story->problems);
        cox_console_say("not all is in it: %s", story->problems);
    }
    return COX_EXIT_OK;
}

static const struct cox_option options[] = {
    {"output", "FILE",
     "write a trace for Perfetto (ui.perfetto.dev) to FILE; -: to standard output", .letter = 'o',
     COX_TEXT(struct trace_choice, output)},
    {"seconds", "SEC", "only what began so long ago at most",
     COX_TAKE(struct trace_choice, range.seconds_ns, take_seconds)},
    {"last", "N", "only the last N requests, and what happened meanwhile",
     COX_NUMBER(struct trace_choice, range.last, 1, UINT32_MAX)},
    {0},
};
static const struct cox_option_group trace_options = {
    .title = "The trace:", .options = options, .check = check};

const struct cox_command cox_command_trace = {
    .name = "trace",
    .summary = "write what a group did in its last seconds",
    .arguments = "[NAME]\n[FILE]",
    .text =
        "Copies the flight recorders of a running group, or those in FILE, which a coordinator "
        "has written to its --crash-dir, and writes a trace for Perfetto: a process per rank, "
        "a thread per channel, an arrow from each submit to the ranks' execution, reply and "
        "handler. With --json, a summary: for each request which rank was last, and in which "
        "phase. No worker is asked, so it also works when all of them are stuck. A node that does "
        "not answer is named, and the others are shown.",
    .examples = "  coxswain trace mine -o mine.pftrace\n"
                "  coxswain trace mine --last 100 --json\n"
                "  coxswain trace mine.20260101T030000.000000000.death.crash -o crash.pftrace\n",
    .choice_size = sizeof(struct trace_choice),
    .groups = {{&trace_options, 0},
               {&cox_connection_options, offsetof(struct trace_choice, connection)}},
    .words = words,
    .run = run,
};
