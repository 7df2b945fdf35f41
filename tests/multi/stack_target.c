/* A process whose stacks are read (stacks_test.py): stack_target WHAT [NUMBER]. It has the memory
 * of a rank for that, and prints a line when it is where it shall be. */
#include "channel/base/idioms.h"
#include "worker/loop/stack_writer.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

/* Not inlined, and no call of theirs is a jump: each is a frame. */
#define FRAME __attribute__((noinline))

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static volatile unsigned long turns;

static void ready(void)
{
    puts("ready");
    fflush(stdout);
}

FRAME static void loop_forever(void)
{
    ready();
    for (;;)
        turns++;
}

static void *lock_and_end(void *unused)
{
    pthread_mutex_lock(&lock);
    return unused;
}

FRAME static void wait_for_the_dead(void)
{
    pthread_t thread;
    pthread_create(&thread, NULL, lock_and_end, NULL);
    pthread_join(thread, NULL);
    ready();
    pthread_mutex_lock(&lock);
    turns++;
}

FRAME static void sleep_in_the_kernel(void)
{
    uint64_t count;
    const int fd = eventfd(0, EFD_CLOEXEC);
    ready();
    while (read(fd, &count, sizeof count) != sizeof count)
        turns++;
}

FRAME static long recurse(long depth)
{
    if (depth == 0) {
        sleep_in_the_kernel();
        return 0;
    }
    return recurse(depth - 1) + (long)turns;
}

static void *one_of_many(void *unused)
{
    for (;;)
        pause();
    return unused;
}

FRAME static void with_threads(long count)
{
    for (long i = 0; i < count; i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, one_of_many, NULL))
            exit(1);
    }
    sleep_in_the_kernel();
}

/* State D, as a thread has that waits for its vfork child. */
FRAME static void uninterruptible(void)
{
    const pid_t child = vfork();
    if (child == 0) {
        const char text[] = "ready\n";
        const ssize_t written = write(1, text, sizeof text - 1);
        (void)written;
        for (;;)
            pause();
    }
}

static void write_frames(void *context, int fd)
{
    const ssize_t written = write(fd, context, strlen(context));
    (void)written;
}

int main(int argc, char **argv)
{
    struct cox_stack_writer writer;
    const char *what = argc > 1 ? argv[1] : "";
    const long number = argc > 2 ? strtol(argv[2], NULL, 10) : 0;
    static char frames[200];
    snprintf(frames, sizeof frames,
             "Thread 0x%lx (most recent call first):\n  File \"/srv/inner.py\", line 7 in inner\n"
             "  File \"/srv/outer.py\", line 9 in outer\n",
             (unsigned long)pthread_self());
    if (cox_stack_writer_start(&writer, getppid(),
                               strcmp(what, "frames") == 0 ? write_frames : NULL, frames, NULL))
        return 1;
    if (strcmp(what, "loop") == 0)
        loop_forever();
    else if (strcmp(what, "lock") == 0)
        wait_for_the_dead();
    else if (strcmp(what, "recurse") == 0)
        recurse(number);
    else if (strcmp(what, "threads") == 0)
        with_threads(number);
    else if (strcmp(what, "uninterruptible") == 0)
        uninterruptible();
    else
        sleep_in_the_kernel();
    return 0;
}
