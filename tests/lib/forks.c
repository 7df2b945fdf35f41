#include "forks.h"

#include "channel/base/fault.h"
#include "channel/shm/region.h"
#include "ranks.h"
#include "testing.h"

/* What no sane run takes, under a sanitizer on a busy machine neither. */
#define HANG_S 100

void *forks_share(size_t size)
{
    void *map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    COX_ASSERT(map != MAP_FAILED);
    return map;
}

void forks_failed(const struct forks_self *self, const char *condition, const char *file, int line,
                  const char *format, ...)
{
    char text[1200];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fprintf(stderr, "%s:%d: rank %" PRIu32 " of %" PRIu32 ": not true: %s: %s\n", file, line,
            self->rank, self->rank_count, condition, text);
    _exit(1);
}

void forks_expect_ok(const struct forks_self *self, int r, const char *call, const char *file,
                     int line)
{
    if (r)
        forks_failed(self, call, file, line, "%d %s", r, test_error.text);
}

struct thread {
    struct forks_self self;
    forks_fn fn;
};

static void *thread_main(void *argument)
{
    struct thread *thread = argument;
    thread->fn(&thread->self);
    free(thread);
    return NULL;
}

static void thread_add(struct forks *forks, const struct forks_self *self, forks_fn fn)
{
#if COX_TESTING
    cox_region_share_mappings(true);
#endif
    struct thread *thread = malloc(sizeof *thread);
    COX_ASSERT(thread);
    *thread = (struct thread){*self, fn};
    COX_ASSERT(pthread_create(&forks->threads[forks->count], NULL, thread_main, thread) == 0);
    forks->pids[forks->count++] = getpid();
}

void forks_add(struct forks *forks, uint32_t rank, uint32_t rank_count, forks_fn fn, void *context)
{
    const struct forks_self self = {
        .rank = rank, .rank_count = rank_count, .context = context, .name = forks->name};
    COX_ASSERT(forks->count < FORKS_MAX);
    if (ranks_are_threads()) {
        thread_add(forks, &self, fn);
        return;
    }
    pid_t parent = getpid();
    fflush(NULL);
    pid_t pid = fork();
    COX_ASSERT(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(1);
        /* cmocka's would go on with the next test, here. */
        static const int crashes[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGSYS};
        for (size_t i = 0; i < sizeof crashes / sizeof crashes[0]; i++)
            signal(crashes[i], SIG_DFL);
        signal(SIGALRM, SIG_DFL);
        alarm(HANG_S);
        cox_fault_rank((int)rank);
        fn(&self);
        fflush(NULL);
        _exit(0);
    }
    forks->pids[forks->count++] = pid;
}

void forks_start(struct forks *forks, uint32_t count, forks_fn fn, void *context)
{
    forks->count = 0;
    test_unique_name(forks->name);
    for (uint32_t rank = 0; rank < count; rank++)
        forks_add(forks, rank, count, fn, context);
}

int forks_end(struct forks *forks, uint32_t index)
{
    int status = 0;
    pid_t pid = forks->pids[index];
    COX_ASSERT(pid > 0);
    forks->pids[index] = 0;
    if (pid == getpid())
        return pthread_join(forks->threads[index], NULL);
    while (waitpid(pid, &status, 0) < 0)
        COX_ASSERT(errno == EINTR);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

void forks_wait(struct forks *forks)
{
    bool failed = false;
    for (uint32_t i = 0; i < forks->count; i++) {
        int status = forks->pids[i] ? forks_end(forks, i) : 0;
        if (status)
            print_message("process %" PRIu32 " ended with %d\n", i, status);
        failed = failed || status;
    }
    if (failed)
        fail_msg("not every rank was content");
}

void forks_run(uint32_t count, forks_fn fn, void *context)
{
    struct forks forks;
    forks_start(&forks, count, fn, context);
    forks_wait(&forks);
}
