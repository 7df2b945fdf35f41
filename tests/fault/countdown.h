/*
 * countdown: constructors whose k-th call of the system fails, for k = 1, 2, 3... until they
 * succeed.
 *
 * The linker sends every call that the libraries make to malloc, open, clone and so on
 * (countdown_symbols.txt) through countdown_wraps.c. While a constructor runs the calls are
 * counted; one of them fails, and with it, if the mode says so, all that follow. Then nothing may
 * be left, the error is that of the first failure, and the same constructor works.
 *
 * Threads and processes: run from the test's thread. The count is in shared memory: calls of the
 *   library's threads, and of a child between fork and exec, count too.
 * Ownership: a subject is the caller's; what it constructs is destroyed by it.
 * Blocks: as the constructors do.
 */
#ifndef COX_TESTS_FAULT_COUNTDOWN_H
#define COX_TESTS_FAULT_COUNTDOWN_H

#include "channel/shm/geometry.h"

#include <coxswain/executor.h>

/* ---- one constructor ---- */

struct countdown_subject {
    /* in the text of a failed test */
    const char *name;
    /* What is constructed, at most 256 KiB; 0: nothing. Untouched after a failure unless
     * `in_place`. */
    size_t size;
    /* the object is in the caller's memory, a failed init may have written there */
    bool in_place;
    /* err is NULL where wordless. */
    int (*construct)(void *object, struct cox_error *err);
    void (*destroy)(void *object);
    /* Around each attempt, without faults: what it needs, and away with it. */
    void (*prepare)(void);
    void (*restore)(void);
    /* what it returns without any fault */
    int expected;
    /* positive codes that a fault may give, ended by 0 */
    const int *codes;
    /* a failure's text may explain itself with this, beside the error's own text */
    const char *word;
    /* the constructor has no err */
    bool wordless;
    /* some faults may go unnoticed: those that the wraps mark as passable */
    bool lenient;
    /* what other libraries call is not counted: another subject has it */
    bool own_only;
    /* it is tried without faults once per place that failed, not after each fault */
    bool costly;
};

/* A row of a table of subjects; what it makes, what is around it, and other members follow. */
#define SUBJECT(function, ...)                                                                     \
    {                                                                                              \
        .name = #function, .construct = function, __VA_ARGS__                                      \
    }
#define NAMED_SUBJECT(text, function, ...)                                                         \
    {                                                                                              \
        .name = text, .construct = function, __VA_ARGS__                                           \
    }
#define MAKES(type, function) .size = sizeof(type), .destroy = function
#define AROUND(before, after) .prepare = before, .restore = after

/* Functions of a subject that are one expression of `object` and `err`. */
#define CONSTRUCT(function, ...)                                                                   \
    static int function(__attribute__((unused)) void *object,                                      \
                        __attribute__((unused)) struct cox_error *err)                             \
    {                                                                                              \
        return __VA_ARGS__;                                                                        \
    }
#define DESTROY(function, ...)                                                                     \
    static void function(void *object)                                                             \
    {                                                                                              \
        __VA_ARGS__;                                                                               \
    }

enum countdown_modes {
    FAIL_ONE = 1,  /* the k-th call fails */
    FAIL_REST = 2, /* and all after it, otherwise */
    INTERRUPT = 4, /* the k-th wait: EINTR */
    EACH_MODE = FAIL_ONE | FAIL_REST | INTERRUPT,
};
/* Each subject in each of the modes. Fails the test with the subject's name, the mode, k, and the
 * call that failed. */
void countdown_try(const struct countdown_subject *subjects, size_t count, unsigned modes);
#define COUNTDOWN(modes, ...)                                                                      \
    do {                                                                                           \
        static const struct countdown_subject tried[] = {__VA_ARGS__};                             \
        countdown_try(tried, sizeof tried / sizeof *tried, modes);                                 \
    } while (0)
/* A test of nothing else. */
#define COUNTDOWN_TEST(name, modes, ...)                                                           \
    TEST(name)                                                                                     \
    {                                                                                              \
        COUNTDOWN(modes, __VA_ARGS__);                                                             \
    }

/* Names of this process's groups in /dev/shm start with this; `which` in the name's end. */
const char *countdown_name(char buffer[64], const char *which);
/* Of a group, and of an object of its own; of all subjects that need one. */
const char *countdown_group(void);
const char *countdown_object(void);
#define COUNTDOWN_RANK_COUNT 2
/* Of a group of COUNTDOWN_RANK_COUNT. Small: what is reserved is written to. */
struct cox_geometry countdown_geometry(const struct cox_attach_mode *mode);
/* Of a group of scripted workers: what fails in it is an error. */
struct cox_executor_options countdown_options(enum cox_attach attach, bool legacy);
/* A child that says `size` bytes by this function, and then lives until this process ends. Returns
 * its pid. */
pid_t countdown_child(void (*say)(void *ret), void *ret_said, size_t size);
/* Every variable is two allocations for every process. */
void countdown_environment_shrink(void);

/* ---- for countdown_wraps.c ---- */

enum countdown_flag {
    COUNTDOWN_INTERRUPTIBLE = 1, /* EINTR is a thing that happens */
    COUNTDOWN_PASSABLE = 2,      /* for a lenient subject: it works without */
    COUNTDOWN_ONCE = 4,          /* never works again: the retries must end */
    COUNTDOWN_FOREIGN = 8,       /* made by another library */
};

struct countdown_call {
    const char *name;
    /* 0: EINTR is all that can happen */
    int error;
    /* a positive code that stands for this error, 0: none */
    int status;
    unsigned flags;
};

/* What follows the first failure fails with this: no other code uses it. */
#define COUNTDOWN_LATER EREMOTEIO

/* Counts. True: this call must fail, errno says how. site: the caller's address. */
bool countdown_fails(const struct countdown_call *call, const void *site);
/* After a call that takes something back: it worked and, while a constructor is tried, says that it
 * did not. Returns 0, or -1 with errno. */
int countdown_took_back(void);
/* One more or one fewer block of memory, or thread to join, in our hands. */
void countdown_block(int difference);

/* Called at every poll that is not to fail, on the thread that polls. */
extern void (*countdown_at_poll)(void);

/* The wraps for code that needs function pointers. */
void *countdown_malloc(size_t size);
void countdown_free(void *memory);

#endif
