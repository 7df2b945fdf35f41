#include "channel/base/thread.h"
#include "channel/socket/closer.h"
#include "channel/socket/socket.h"
#include "channel_fixture.h"

/* What becomes of a thread that the closer wants. */
static enum chance { STARTS, BEGINS_LATE, CANNOT_BE_MADE } threads;
static sem_t late;

struct begun {
    void *(*main)(void *argument);
    void *argument;
};

static void *begin_late(void *argument)
{
    struct begun begun = *(struct begun *)argument;
    free(argument);
    while (sem_wait(&late))
        continue;
    return begun.main(begun.argument);
}

int __real_pthread_create(pthread_t *ret_thread, const pthread_attr_t *attributes,
                          void *(*main)(void *argument), void *argument);
int __wrap_pthread_create(pthread_t *ret_thread, const pthread_attr_t *attributes,
                          void *(*main)(void *argument), void *argument);
int __wrap_pthread_create(pthread_t *ret_thread, const pthread_attr_t *attributes,
                          void *(*main)(void *argument), void *argument)
{
    if (threads == CANNOT_BE_MADE)
        return EAGAIN;
    if (threads == STARTS)
        return __real_pthread_create(ret_thread, attributes, main, argument);
    struct begun *begun = malloc(sizeof *begun);
    assert_non_null(begun);
    *begun = (struct begun){main, argument};
    return __real_pthread_create(ret_thread, attributes, begin_late, begun);
}

static int thread_count(void)
{
    return test_entry_count("/proc/self/task", "", "");
}

/* A file, and a connection in whose queue another one lies. */
static void give_some(struct cox_closer *closer)
{
    int pair[2], file[2];
    assert_int_equal(pipe(file), 0);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    assert_int_equal(cox_socket_send(pair[0], "x", 1, &file[1], 1, 0), 0);
    cox_close_fd(&pair[0]);
    cox_close_fd(&file[1]);
    cox_closer_give(closer, &file[0]);
    cox_closer_hang_up(closer, &pair[1]);
    assert_int_equal(file[0], -1);
    assert_int_equal(pair[1], -1);
}

static void given_and_freed(enum chance how)
{
    struct cox_closer *closer;
    threads = how;
    assert_int_equal(cox_closer_new(&closer), 0);
    give_some(closer);
    assert_null(cox_closer_free(closer));
}

LEAK_TEST(all_is_closed_when_it_is_freed)
{
    const int fds = fd_count();
    given_and_freed(STARTS);
    assert_int_equal(fd_count(), fds);
}

LEAK_TEST(without_a_thread_free_closes_all_itself)
{
    const int fds = fd_count();
    given_and_freed(CANNOT_BE_MADE);
    assert_int_equal(fd_count(), fds);
}

LEAK_TEST(a_thread_that_begins_after_the_end_closes_all)
{
    const int fds = fd_count(), before = thread_count();
    assert_int_equal(sem_init(&late, 0, 0), 0);
    given_and_freed(BEGINS_LATE); /* which does not wait for it */
    assert_int_equal(sem_post(&late), 0);
    AWAIT(thread_count() == before);
    assert_int_equal(fd_count(), fds);
    sem_destroy(&late);
}

LEAK_TEST(no_socket_in_a_queue_lingers)
{
    struct cox_closer *closer;
    int pair[2], peers[3];
    threads = STARTS;
    assert_int_equal(cox_closer_new(&closer), 0);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    for (int i = 0; i < 3; i++) {
        int fd = test_lingering_socket(&peers[i]);
        assert_int_equal(cox_socket_send(pair[0], "x", 1, &fd, 1, 0), 0);
        close(fd);
    }
    cox_close_fd(&pair[0]);
    cox_closer_hang_up(closer, &pair[1]);
    AWAIT(cox_closer_counts(closer).waiting == 0);
    for (int i = 0; i < 3; i++)
        close(peers[i]);
    assert_null(cox_closer_free(closer));
}
