/*
 * forks: ranks as forked processes of the test, each running one function. With
 * COX_TEST_RANKS=threads in the environment they are threads of the test, on one mapping, so that
 * ThreadSanitizer sees all sides; then no rank can be killed. Processes and threads: everything on
 * the test's thread; the function in its own process, whose only thread it starts on. It ends by
 * returning, or by FORK_CHECK, never by a cmocka assertion. Ownership: struct forks is the
 * caller's. Blocks: wait until the processes have ended; one that hangs is ended by SIGALRM. If the
 * test dies: the kernel kills the processes.
 */
#ifndef COX_TESTS_LIB_FORKS_H
#define COX_TESTS_LIB_FORKS_H

#include <coxswain/base.h>

#include <pthread.h>
#include <sys/types.h>

#define FORKS_MAX 128

struct forks_self {
    uint32_t rank, rank_count;
    /* as given to start; memory of forks_share is the same in all */
    void *context;
    /* no other test has it; starts with "test_" */
    const char *name;
};
typedef void (*forks_fn)(const struct forks_self *self);

struct forks {
    uint32_t count;
    pid_t pids[FORKS_MAX];
    pthread_t threads[FORKS_MAX];
    char name[64];
};

/* Memory of all processes, zero; until the test's process ends. */
void *forks_share(size_t size);
void forks_start(struct forks *forks, uint32_t count, forks_fn fn, void *context);
/* One more process as this rank, of the same name. */
void forks_add(struct forks *forks, uint32_t rank, uint32_t rank_count, forks_fn fn, void *context);
/* One process has ended. Returns its exit status, or 128 + signal. */
int forks_end(struct forks *forks, uint32_t index);
/* All end, and with 0: otherwise the test fails. */
void forks_wait(struct forks *forks);
/* All of that. */
void forks_run(uint32_t count, forks_fn fn, void *context);

#define FORK_CHECK(condition, ...)                                                                 \
    ((condition) ? (void)0 : forks_failed(self, #condition, __FILE__, __LINE__, __VA_ARGS__))
/* Unless the call, which got test_err(), returns 0. */
#define FORK_OK(call) forks_expect_ok(self, call, #call, __FILE__, __LINE__)
void forks_expect_ok(const struct forks_self *self, int r, const char *call, const char *file,
                     int line);
void forks_failed(const struct forks_self *self, const char *condition, const char *file, int line,
                  const char *format, ...) __attribute__((format(printf, 5, 6), noreturn));

#endif
