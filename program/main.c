/* coxswain: the coordinator of a group of worker processes, as commands. */
#include "coordinator/cli/console.h"
#include "engine/command/engine_command.h"

#include <fcntl.h>
#include <signal.h>
#include <string.h>

/* At the end: time to write the rest to a standard error that is read slowly or not at all. */
#define FLUSH_MS 2000

static const struct cox_command *const commands[] = {
    &cox_command_generate, &cox_command_eval,        &cox_command_run,     &cox_command_status,
    &cox_command_recover,  &cox_command_lora,        &cox_command_role,    &cox_command_link,
    &cox_command_unlink,   &cox_command_link_status, &cox_command_pull_kv, &cox_command_weights,
    &cox_command_stop,     &cox_command_layout,      &cox_command_clean,   &cox_command_doctor,
    &cox_command_handle,   &cox_command_metrics,
};

static void help(FILE *file)
{
    fprintf(file,
            "Usage: coxswain COMMAND [OPTION]...\n"
            "       coxswain --help | --version\n"
            "\n"
            "Drives the worker processes of a multi-process inference engine on this machine.\n"
            "\n");
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++)
        fprintf(file, "  %-11s %s\n", commands[i]->name, commands[i]->summary);
    fprintf(file, "\ncoxswain COMMAND --help tells the options of a command.\n");
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
    if (standard_keep())
        return COX_EXIT_FAILED;
    /* If the reader is gone, the write fails with a text, and the process does not die silently. */
    signal(SIGPIPE, SIG_IGN);
    const char *name = argc > 1 ? argv[1] : "";
    if (!strcmp(name, "--help") || !strcmp(name, "-h") || !strcmp(name, "help")) {
        help(stdout);
        return cox_exit_flushed(COX_EXIT_OK);
    }
    if (!strcmp(name, "--version")) {
        printf("coxswain %s\n", cox_version());
        return cox_exit_flushed(COX_EXIT_OK);
    }
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++)
        if (!strcmp(name, commands[i]->name)) {
            int exit_status = cox_command_main(commands[i], argc - 1, argv + 1);
            cox_console_flush(cox_deadline_after_ms(FLUSH_MS));
            return exit_status;
        }
    if (argc > 1)
        cox_console_say("'%.64s' is no command (coxswain --help lists them)", name);
    else
        help(stderr);
    return COX_EXIT_USAGE;
}
