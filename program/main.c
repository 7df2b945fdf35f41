/* coxswain: the coordinator of a group of worker processes, as commands. */
#include "channel/base/thread.h"
#include "program/cli/console.h"
#include "program/client/nearest.h"
#include "program/engine/engine_command.h"
#include "program/stacks/stack_report.h"
#include "process_one.h"
#include "tables.h"

#include <fcntl.h>
#include <signal.h>
#include <string.h>

/* At the end: time to write the rest to a standard error that is read slowly or not at all. */
#define FLUSH_MS 2000

#define GROUP_SIZE_MAX 8

/* In the order of the help; a group ends with NULL. */
static const struct {
    const char *title;
    const struct cox_command *commands[GROUP_SIZE_MAX];
} groups[] = {
    {"Prompts:", {&cox_command_generate, &cox_command_eval}},
    {"A group that stays:",
     {&cox_command_run, &cox_command_list, &cox_command_status, &cox_command_top,
      &cox_command_metrics, &cox_command_recover, &cox_command_stop}},
    {"What a group does, and did:",
     {&cox_command_stacks, &cox_command_trace, &cox_command_postmortem}},
    {"What a running group computes with:", {&cox_command_lora, &cox_command_reload}},
    {"Several machines:", {&cox_command_node}},
    {"Prefill and decode:",
     {&cox_command_role, &cox_command_link, &cox_command_unlink, &cox_command_link_status,
      &cox_command_pull_kv}},
    {"This machine:",
     {&cox_command_doctor, &cox_command_layout, &cox_command_clean, &cox_command_weights,
      &cox_command_handle}},
};
#define GROUP_COUNT (sizeof groups / sizeof groups[0])

static const struct cox_command *command_find(const char *name)
{
    for (size_t i = 0; i < GROUP_COUNT; i++)
        for (size_t k = 0; k < GROUP_SIZE_MAX && groups[i].commands[k]; k++)
            if (!strcmp(name, groups[i].commands[k]->name))
                return groups[i].commands[k];
    return NULL;
}

static int no_command(const char *name)
{
    struct cox_nearest nearest = {.typed = name};
    for (size_t i = 0; i < GROUP_COUNT; i++)
        for (size_t k = 0; k < GROUP_SIZE_MAX && groups[i].commands[k]; k++)
            cox_nearest_try(&nearest, groups[i].commands[k]->name);
    if (nearest.best)
        cox_console_say("'%.64s' is no command: did you mean '%s'? (coxswain --help lists them)",
                        name, nearest.best);
    else
        cox_console_say("'%.64s' is no command (coxswain --help lists them)", name);
    return COX_EXIT_USAGE;
}

static int tables_main(const char *name, int count, char *const *words)
{
    const struct cox_command *list[GROUP_COUNT * GROUP_SIZE_MAX];
    struct cox_commands tables = {list, 0};
    for (size_t i = 0; i < GROUP_COUNT; i++)
        for (size_t k = 0; k < GROUP_SIZE_MAX && groups[i].commands[k]; k++)
            list[tables.count++] = groups[i].commands[k];
    if (!strcmp(name, "__tables"))
        return cox_exit_flushed(cox_tables_json(&tables));
    cox_tables_complete(&tables, count, words);
    return cox_exit_flushed(COX_EXIT_OK);
}

static void help(FILE *file)
{
    fprintf(file, "Usage: coxswain COMMAND [OPTION]...\n"
                  "       coxswain help [COMMAND] | --version\n"
                  "\n"
                  "Drives the worker processes of a multi-process inference engine on this\n"
                  "machine.\n");
    for (size_t i = 0; i < GROUP_COUNT; i++) {
        fprintf(file, "\n%s\n", groups[i].title);
        for (size_t k = 0; k < GROUP_SIZE_MAX && groups[i].commands[k]; k++)
            fprintf(file, "  %-11s %s\n", groups[i].commands[k]->name,
                    groups[i].commands[k]->summary);
    }
    fprintf(file,
            "\n"
            "Examples:\n"
            "  coxswain generate -n 4 \"27+58=\"      start 4 workers for one prompt\n"
            "  coxswain run -n 4 --name mine         keep 4 workers until Ctrl-C\n"
            "  coxswain generate --name mine         type prompts for them\n"
            "  coxswain status --name mine --watch   see what they do\n"
            "\n"
            "Environment:\n"
            "  COXSWAIN_RUNTIME_DIR  the directory of control sockets; commands look in it\n"
            "                        alone. Else in $XDG_RUNTIME_DIR/coxswain,\n"
            "                        /run/user/UID/coxswain, /run/coxswain and\n"
            "                        /tmp/coxswain-UID, in this order\n"
            "  COXSWAIN_WORKER       the worker program, as --worker\n"
            "  COXSWAIN_CRASH_DIR    the directory of --crash-dir\n"
            "  COXSWAIN_STACKS       off: when a request meets its deadline, ranks differ or\n"
            "                        are stuck at the end, it is not looked where they stand\n"
            "\n"
            "coxswain help COMMAND tells the options of a command.\n");
    cox_exit_help(file);
}

/* A standard descriptor that is closed would be given to the next file opened, and output written
 * into that. Closed ones get /dev/null opened for the other direction, so that their use is still
 * an error. */
static int standard_keep(void)
{
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY) != fd)
            return -1;
    return 0;
}

int main(int argc, char **argv)
{
    struct cox_error err = {0};
    if (standard_keep())
        return COX_EXIT_FAILED;
    if (cox_thread_check_stack(&err)) {
        cox_console_say("%s", err.text);
        return COX_EXIT_FAILED;
    }
    /* If the reader is gone, the write fails with a text, and the process does not die silently. */
    signal(SIGPIPE, SIG_IGN);
    const char *name = argc > 1 ? argv[1] : "";
    const struct cox_command *command = command_find(name);
    if (command) {
        int r = cox_process_one();
        if (r) {
            cox_console_say("as process 1, a process for the command cannot be made: %s",
                            cox_status_text(r));
            return COX_EXIT_FAILED;
        }
        int exit_status = cox_command_main(command, argc - 1, argv + 1);
        cox_console_flush(cox_deadline_after_ms(FLUSH_MS));
        return exit_status;
    }
    if (!strcmp(name, "help") && argc > 2 && (command = command_find(argv[2]))) {
        char *const words[] = {argv[2], (char[]){"--help"}, NULL};
        return cox_command_main(command, 2, (char **)(uintptr_t)words);
    }
    if (!strcmp(name, "help") && argc > 2)
        name = argv[2];
    else if (!strcmp(name, "--help") || !strcmp(name, "-h") || !strcmp(name, "help")) {
        help(stdout);
        return cox_exit_flushed(COX_EXIT_OK);
    }
    if (!strcmp(name, "--version")) {
        cox_version_print();
        return cox_exit_flushed(COX_EXIT_OK);
    }
    /* For the shells' completion and the man pages; in no list. */
    if (!strcmp(name, "__complete") || !strcmp(name, "__tables"))
        return tables_main(name, argc - 2, argv + 2);
    if (!strcmp(name, "__stacks"))
        return cox_stack_report_main(argc - 2, argv + 2);
    if (argc > 1)
        return no_command(name);
    help(stderr);
    return COX_EXIT_USAGE;
}
