#include "workers.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

static _Noreturn void worker_process(workers_main_fn main_fn, const void *context, uint32_t rank,
                                     pid_t coordinator, const int go[2])
{
    char byte;
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 || getppid() != coordinator)
        _exit(1);
    close(go[1]);
    while (read(go[0], &byte, 1) < 0 && errno == EINTR)
        continue;
    close(go[0]);
    const char *text = main_fn(context, rank);
    if (getppid() != coordinator)
        _exit(1);
    fprintf(stderr, "worker %u: %s\n", rank, text);
    /* Then no process waits for a reply that will not come. */
    kill(coordinator, SIGTERM);
    _exit(1);
}

int workers_start(struct workers *workers, uint32_t count, workers_main_fn main_fn,
                  const void *context, struct cox_error *err)
{
    if (count > COX_RANK_COUNT_MAX)
        return cox_fail(err, COX_UNSUPPORTED, "%u workers; at most %u", count, COX_RANK_COUNT_MAX);
    int go[2];
    *workers = (struct workers){.pids = calloc(count, sizeof *workers->pids), .go_fd = -1};
    if (!workers->pids)
        return cox_fail(err, -ENOMEM, "no memory for %u process ids", count);
    if (pipe2(go, O_CLOEXEC) < 0) {
        int r = cox_fail(err, -errno, "pipe: %s", strerror(errno));
        workers_stop(workers);
        return r;
    }
    workers->go_fd = go[1];
    const pid_t coordinator = getpid();
    while (workers->started < count) {
        pid_t pid = fork();
        if (pid == 0)
            worker_process(main_fn, context, workers->started, coordinator, go);
        if (pid < 0) {
            int r =
                cox_fail(err, -errno, "fork of worker %u: %s", workers->started, strerror(errno));
            close(go[0]);
            workers_stop(workers);
            return r;
        }
        workers->pids[workers->started++] = pid;
    }
    close(go[0]);
    return 0;
}

void workers_go(struct workers *workers)
{
    if (workers->pids && workers->go_fd >= 0)
        close(workers->go_fd);
    workers->go_fd = -1;
}

void workers_stop(struct workers *workers)
{
    for (uint32_t rank = 0; rank < workers->started; rank++)
        kill(workers->pids[rank], SIGKILL);
    for (uint32_t rank = 0; rank < workers->started; rank++)
        while (waitpid(workers->pids[rank], NULL, 0) < 0 && errno == EINTR)
            continue;
    workers_go(workers);
    free(workers->pids);
    *workers = (struct workers){.go_fd = -1};
}
