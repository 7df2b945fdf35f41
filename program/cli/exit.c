#include "command.h"

#include "console.h"

#include <string.h>
#include <unistd.h>

void cox_exit_help(FILE *file)
{
    fprintf(file,
            "\nExit status: 0 ok; 1 failure; 2 wrong usage or input; 3 a worker died, failed or\n"
            "did not reply; 4 of status: degraded; 128 + N ended by signal N (130: Ctrl-C).\n");
}

int cox_exit_of(int status)
{
    switch (status) {
    case COX_INVALID:
    case COX_NOT_FOUND:
        return COX_EXIT_USAGE;
    case COX_PEER_DEAD:
    case COX_EXEC_FAILED:
    case COX_TIMEOUT:
    case COX_LATE:
    case COX_REJECTED:
    case COX_STALE:
    case COX_ABORTED:
    case COX_DIVERGED:
    case COX_CORRUPT:
        return COX_EXIT_WORKER;
    default:
        return COX_EXIT_FAILED;
    }
}

int cox_exit_with(const struct cox_error *err)
{
    /* Errors of a start say how many files it needs. */
    bool advise = err->code == -EMFILE && !strstr(err->text, "ulimit");
    cox_console_log(3, "%s%s", err->text,
                    advise ? " (this process may have no more files open: ulimit -n)" : "");
    return cox_exit_of(err->code);
}

int cox_exit_interrupted(int signal_number)
{
    cox_console_say("ended by signal %d (%s)", signal_number, strsignal(signal_number));
    return COX_EXIT_SIGNAL + signal_number;
}

int cox_exit_usage(const char *command, const struct cox_error *err)
{
    cox_console_log(3, "%s: %s (coxswain %s --help tells more)", command, err->text, command);
    return COX_EXIT_USAGE;
}

int cox_exit_flushed(int exit_status)
{
    bool failed = ferror(stdout) != 0;
    errno = 0;
    if (fclose(stdout) || failed) {
        cox_console_log(3, "cannot write to standard output%s%s", errno ? ": " : "",
                        errno ? cox_status_text(-errno) : "");
        return exit_status ? exit_status : COX_EXIT_FAILED;
    }
    return exit_status;
}
