/*
 * channel_fixture: what the tests of channel/ share: names of their own, children, impostors, and a
 * look at what a test left behind.
 *
 * Children end with _exit and use CHECK; the test itself uses cmocka's assertions.
 */
#ifndef COX_TESTS_UNIT_CHANNEL_FIXTURE_H
#define COX_TESTS_UNIT_CHANNEL_FIXTURE_H

#include "tests/lib/test.h"

#define SHM "/dev/shm"

/* For children, where a cmocka assertion would run the rest of the tests a second time. */
#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: not so: %s (%s)\n", __FILE__, __LINE__, #condition,            \
                    strerror(errno));                                                              \
            _exit(99);                                                                             \
        }                                                                                          \
    } while (0)

#define LEAK_TEST(name) TEST_WITH(name, leak_setup, leak_teardown)

/* Before and after every test: no fd more, no child more, no file of this program in /dev/shm. */
int leak_setup(void **state);
int leak_teardown(void **state);

/* Files in /dev/shm whose name holds `part` (NULL: any). Where /dev/shm is shared with other
 * programs, only files that this program made. */
int shm_count(const char *part);
int fd_count(void);
struct cox_control_socket;
/* The same, once the control socket has closed what it was sent: it has threads for that, whatever
 * it replied before. */
int fd_count_at(const struct cox_control_socket *control_socket);

/* "coxt<pid>_<time>_<what>", static storage of one slot per call, four slots. */
const char *test_name(const char *what);
/* The same with a slash before it. */
const char *test_object(const char *what);

/* Runs fn in a child. Returns its pid. */
pid_t child_start(void (*fn)(void *context), void *context);
/* Reaps it; returns the wait status. */
int child_status(pid_t pid);
/* The same; true: SIGKILL has ended it, as a fault plan does. Asserts that else it ended with 0. */
bool child_struck(pid_t pid);
/* Kills and reaps it. */
void child_kill(pid_t pid);
/* Asserts that it ended with 0. */
void child_join(pid_t pid);
/* Runs fn in a child and asserts that SIGABRT ended it. */
void child_aborts(void (*fn)(void *context), void *context);
/* Runs fn in a child and asserts that it ended with 0. */
void child_run(void (*fn)(void *context), void *context);
/* Returns once the process sleeps in futex(2). */
void child_asleep(pid_t pid);

/* Runs fn in a child whose monotonic clock is ahead of the calendar: read as CLOCK_REALTIME, a
 * deadline would be decades away. Skips the test where that is not permitted. */
void child_run_in_another_time(void (*fn)(void *context), void *context);
/* This process gets SIGALRM, without SA_RESTART, so often from now on; 0: no more. Skips the test
 * under ThreadSanitizer, which holds handlers back until a call that it knows. */
void storm_begin(void (*handler)(int number), uint32_t period_us);
void storm_end(void);

/* One byte through a pipe. */
void tell(int fd);
bool heard(int fd); /* blocks; false: end of file, or a minute passed */

/* In a child: a /dev/shm of its own with `size` (as in mount -o size=), in a user namespace where
 * the right to mount is missing. False: not permitted. */
bool private_shm(const char *size);
bool private_shm_possible(void);
/* In a child of root: a /proc of its own that shows other users only their own processes, and of
 * these only dumpable ones. False: not permitted. */
bool proc_hide(void);

/* Puts one thing after the other under path that looks like the object but must not be taken for
 * it, and asserts that attach returns COX_DENIED with a text that tells. make creates a good one at
 * path; unlink(path) removes it. flags: O_RDONLY or O_RDWR, as attach opens it. */
void refuses_impostors(const char *path, int flags, void (*make)(void),
                       int (*attach)(struct cox_error *err));

/* Seeded xorshift. */
uint64_t random_next(uint64_t *state);

#endif
