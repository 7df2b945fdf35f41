/* coxswain postmortem: a recording in words. */
#include "channel/base/idioms.h"
#include "channel/shm/geometry.h"
#include "coordinator/recording/recording.h"
#include "program/cli/group_options.h"
#include "program/trace/story.h"
#include "recording_command.h"

#include <stdlib.h>
#include <string.h>

#define LAST_DEFAULT 3

struct postmortem_choice {
    const char *file;
    /* in place of it */
    const char *name, *folder;
    /* 0: default */
    uint64_t last;
    bool json;
};

static int words(void *context, int count, char *const *list, struct cox_error *err)
{
    struct postmortem_choice *choice = context;
    if (count > 1)
        return cox_fail(err, COX_INVALID, "one recording at a time: '%.64s' is another", list[1]);
    /* "": a shell's "$(ls -t ...)" that has found no recording yet. */
    choice->file = count && list[0][0] ? list[0] : NULL;
    if (!choice->folder)
        choice->folder = getenv("COXSWAIN_CRASH_DIR");
    if (!choice->file == !choice->name)
        return cox_fail(err, COX_INVALID,
                        "of what? A FILE that a coordinator has written, or the --name of a group");
    if (choice->name && (!choice->folder || !choice->folder[0]))
        return cox_fail(err, COX_INVALID,
                        "--name: where did the group record? Give the --crash-dir that it was "
                        "started with, or set COXSWAIN_CRASH_DIR");
    return 0;
}

static int run(void *context)
{
    const struct postmortem_choice *choice = context;
    _cox_cleanup_(cox_recording_freep) struct CoxswainRecording__Recording *recording = NULL;
    _cox_cleanup_(cox_story_freep) struct cox_story *story = NULL;
    const struct cox_story_range all = {0};
    struct cox_error err = {0};
    int r = choice->file ? cox_recording_read(choice->file, &recording, &err)
                         : cox_recording_of_rings(choice->folder, choice->name, &recording, &err);
    if (r == COX_NOT_FOUND && choice->name) {
        err = (struct cox_error){0};
        cox_fail(&err, r,
                 "the group '%s' has no recorders in %s: they are removed at a clean stop; what "
                 "failed before is in %s/%s.*.crash",
                 choice->name, choice->folder, choice->folder, choice->name);
    }
    if (r == 0)
        r = cox_story_new(recording, &all, &story, &err);
    if (r) {
        cox_client_clean_text(err.text);
        const int exit_status = cox_exit_with(&err);
        /* A file that is invalid is no failure of a worker. */
        return exit_status == COX_EXIT_WORKER ? COX_EXIT_FAILED : exit_status;
    }
    if (choice->json) {
        json_t *root = cox_story_json(story);
        json_dumpf(root, stdout, JSON_COMPACT);
        putchar('\n');
        json_decref(root);
    } else {
        cox_story_print(story, choice->last ? choice->last : LAST_DEFAULT, stdout);
    }
    return COX_EXIT_OK;
}

static const struct cox_option options[] = {
    {"name", "NAME",
     "of the recorders that a group left when its coordinator died, or that it still writes",
     COX_NAME(struct postmortem_choice, name)},
    {"crash-dir", "DIR",
     "where that group records, as in coxswain run (default: $COXSWAIN_CRASH_DIR)",
     COX_TEXT(struct postmortem_choice, folder)},
    {"last", "N", "requests of each channel in the timeline (default 3)",
     COX_NUMBER(struct postmortem_choice, last, 1, 1000)},
    {"json", NULL, "print one JSON object, as coxswain trace --json does",
     COX_FLAG(struct postmortem_choice, json)},
    {0},
};
static const struct cox_option_group postmortem_options = {.title = "The recording:",
                                                           .options = options};

const struct cox_command cox_command_postmortem = {
    .name = "postmortem",
    .summary = "tell what a group did before it failed",
    .arguments = "[FILE]",
    .text = "Tells in words what FILE has, which a coordinator has written to its --crash-dir "
            "after a death, a timeout, a divergence or a failed start: the cause, what each rank "
            "was doing, which request was under way, the last lines of dead ranks, and a timeline. "
            "With --name, what a group recorded whose coordinator has died as well. `coxswain "
            "trace FILE` makes a trace of the same.",
    .examples = "  coxswain postmortem crashes/mine.20260101T030000.000000000.death.crash\n"
                "  coxswain postmortem --name mine --crash-dir crashes\n",
    .choice_size = sizeof(struct postmortem_choice),
    .groups = {{&postmortem_options, 0}},
    .words = words,
    .run = run,
};
