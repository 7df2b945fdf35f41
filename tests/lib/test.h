/*
 * test: a test states itself where it is defined, and the program runs all of them.
 *
 * Processes and threads: tests register before main, and run on its thread, in the order of the
 *   file. A program with a main of its own (helper processes, arguments) calls test_run.
 * Ownership: entries are static; nothing is allocated before test_run. What a test owns is released
 *   after it.
 * Blocks: as the tests do. If the process dies: nothing is left but what its tests had.
 */
#ifndef COX_TESTS_LIB_TEST_H
#define COX_TESTS_LIB_TEST_H

#include "channel/base/idioms.h"
#include "tests/lib/posix.h"

#include <coxswain/base.h>

#include <setjmp.h>

#include <cmocka.h>

struct test_entry {
    struct CMUnitTest test;
    const char *file;
    int line;
    struct test_entry *next;
};

/* Defines a test; its body follows. setup and teardown (may be NULL) run before and after it, and
 * pass it `state`. Fixtures have a macro of their own, which names them: LEAK_TEST. */
#define TEST_WITH(name, setup, teardown)                                                           \
    static void name(void **state);                                                                \
    __attribute__((constructor)) static void name##_register(void)                                 \
    {                                                                                              \
        static struct test_entry entry = {                                                         \
            {#name, name, setup, teardown, NULL}, __FILE__, __LINE__, NULL};                       \
        test_register(&entry);                                                                     \
    }                                                                                              \
    static void name(__attribute__((unused)) void **state)

/* Without a fixture. */
#define PLAIN_TEST(name) TEST_WITH(name, NULL, NULL)

void test_register(struct test_entry *entry);

/* Runs the program's tests; setup and teardown (may be NULL) once around all. Returns what main
 * returns: how many failed; 77, a skip, where the build has none of them. */
int test_run(CMFixtureFunction setup, CMFixtureFunction teardown);

/* A fixture that defines it has it called first by the main that programs without one get. That
 * main takes a name as its argument and runs that test alone; `*` stands for any text. */
void test_begin(void) __attribute__((weak));

/* Skips the test where the machine does not have what it needs. */
void test_needs(bool condition);

/* Fails the test unless `part` is in the text. */
void assert_contains(const char *text, const char *part);

/* ---- calls that return a code and an error ---- */

/* What the thread's last call said that was given test_err(). */
extern _Thread_local struct cox_error test_error;
/* For a call's error: test_error, emptied. */
struct cox_error *test_err(void);
/* assert_ok(cox_pool_create(&options, &pool, test_err())): the call returns 0. */
#define assert_ok(call) test_check_ok(call, #call, __FILE__, __LINE__)
/* The call returns this code, the error has it too, and `part` is in its text. */
#define assert_refused(call, code, part)                                                           \
    test_check_refused(call, code, part, #call, __FILE__, __LINE__)
void test_check_ok(int r, const char *call, const char *file, int line);
void test_check_refused(int r, int code, const char *part, const char *call, const char *file,
                        int line);

/* ---- waiting ---- */

/* Yields until the condition holds; after AWAIT_S, which is what no sane run takes, fails the test,
 * or ends the process where that is not the test's thread. */
#define AWAIT(condition)                                                                           \
    for (struct timespec await_since = test_await_since(); !(condition);)                          \
    test_await_more(&await_since, #condition, __FILE__, __LINE__)
#define AWAIT_S 100
struct timespec test_await_since(void);
void test_await_more(const struct timespec *since, const char *condition, const char *file,
                     int line);

/* Until the child is stopped by a signal; fails the test if it ends. */
void test_await_stopped(pid_t child);
/* Kills a child of any state and reaps it. */
void test_kill_child(pid_t child);

/* ---- what the kernel has of this process ---- */

/* Names in a folder, as /proc/self/fd, that have both parts and do not begin with a dot. */
int test_entry_count(const char *folder, const char *part, const char *other);
/* Its mappings with this in their line. */
size_t test_mapping_count(const char *part);
/* Another fd of what this one is of, close-on-exec, as /proc gives it to the user; -1: errno. */
int test_reopen(int fd, int flags);
/* A TCP socket whose last close takes an hour, unless lingering is switched off: *ret_peer, the
 * caller's too, reads nothing. An exit does not linger. */
int test_lingering_socket(int *ret_peer);

/* ---- what a test owns ---- */

/* Has release called with the object when the test has passed, and before its teardown: the last
 * owned first. A test that fails leaves its objects, which may be in use. Returns object. */
void *test_own(void *object, void (*release)(void *object));
/* Releases an owned object now. */
void test_release(void *object);
/* The same of an fd, which is closed. Returns fd, which is not negative: asserted. */
int test_own_fd(int fd);
/* Closes an owned fd now. */
void test_close(int fd);
/* Both ends of a pipe or of a stream socket pair, owned, close-on-exec. */
void test_pipe(int ends[2]);
void test_socketpair(int ends[2]);

/* The path of an empty folder, owned: it is removed with all that is in it then. */
const char *test_folder(void);

/* A thread, which the test joins. */
pthread_t test_thread(void *(*thread_main)(void *context), void *context);
/* The release function fn_owned, for test_own, of a function fn that takes a struct pointer. */
#define TEST_OWNED(fn)                                                                             \
    static void fn##_owned(void *object)                                                           \
    {                                                                                              \
        fn(object);                                                                                \
    }

#endif
