/* Workers that are started by hand log on at the control socket of a group that waits for them. */
#include "channel/attach/sealed/futex_gate.h"
#include "channel/base/peer.h"
#include "channel/shm/fd_bundle.h"
#include "channel/attach/sealed/sealed.h"
#include "channel/shm/state.h"
#include "channel/socket/control_socket.h"
#include "coordinator/executor/executor_internal.h"
#include "hand.h"

#include <sys/inotify.h>

extern char **environ;

/* ---- a group that waits, on a thread of its own ---- */

static void group_wait_long(struct hand *waiting, uint32_t rank_count, enum cox_attach attach,
                            uint64_t finalize_ms)
{
    *waiting =
        (struct hand){.options = {.times.finalize_ms = finalize_ms, .times.term_ms = finalize_ms}};
    hand_open(waiting, rank_count, attach);
}

static void group_wait_for(struct hand *waiting, uint32_t rank_count, enum cox_attach attach)
{
    group_wait_long(waiting, rank_count, attach, TEST_PATIENCE_MS);
}

/* ---- workers by hand ---- */

static const char *const ranks[] = {"0", "1", "2", "3"};

/* The group ends, and with its goodbye the workers. */
static void group_end(struct hand *waiting, const pid_t *pids, int count)
{
    test_group_free(waiting->group);
    for (int i = 0; i < count; i++)
        assert_int_equal(hand_worker_end(pids[i]), 0);
}

/* A worker with these options is refused, with these words. */
static void expect_turned_away(const struct hand *waiting, const char *options, const char *words)
{
    char command[512], text[2048];
    snprintf(command, sizeof command, "%s --socket %s %s 2>&1", test_worker_program(),
             waiting->control_socket, options);
    FILE *output = popen(command, "re");
    assert_non_null(output);
    text[fread(text, 1, sizeof text - 1, output)] = '\0';
    assert_int_equal(WEXITSTATUS(pclose(output)), 1);
    assert_contains(text, words);
}

/* It has mapped the group's memory: the hello reply is behind it. */
static bool is_attached(pid_t pid)
{
    char path[64], line[512];
    bool attached = false;
    snprintf(path, sizeof path, "/proc/%d/maps", pid);
    FILE *maps = fopen(path, "re");
    assert_non_null(maps);
    while (fgets(line, sizeof line, maps))
        attached |= strstr(line, "memfd:cox_") || strstr(line, "_control");
    fclose(maps);
    return attached;
}

/* The next process comes after this one, which has attached. */
static pid_t worker_attach(const struct hand *waiting, const char *rank, const char *rank_count)
{
    pid_t pid = hand_worker_of(waiting, rank, rank_count);
    AWAIT(is_attached(pid));
    return pid;
}

ATTACH_TEST(a14_workers_started_by_hand_log_on_in_any_order)
{
    static const char *const asked[] = {"3", NULL, "1", NULL};
    static const uint32_t expected[] = {3, 0, 1, 2};
    struct hand waiting;
    pid_t pids[4];
    group_wait_for(&waiting, 4, attach);
    for (int i = 0; i < 4; i++) {
        const char *rank_count = i % 2 ? "4" : NULL;
        pids[i] = i < 3 ? worker_attach(&waiting, asked[i], rank_count)
                        : hand_worker_of(&waiting, asked[i], rank_count);
    }
    hand_complete(&waiting);
    for (int i = 0; i < 4; i++)
        assert_int_equal(test_pid(waiting.group, expected[i]), pids[i]);
    test_expect_echo(waiting.group, "by hand");
    group_end(&waiting, pids, 4);
}

/* Their eventfds come with the hello reply. */
ATTACH_TEST(p4_workers_started_by_hand_notify_a_host_that_polls)
{
    struct hand waiting = {.options = {.collect = true}};
    pid_t pids[2];
    int fd = -1;
    hand_open(&waiting, 2, attach);
    for (int i = 0; i < 2; i++)
        pids[i] = hand_worker(&waiting, ranks[i]);
    hand_complete(&waiting);
    struct cox_executor *executor = test_group_executor(waiting.group);
    assert_ok(cox_executor_fd(executor, COX_CHANNEL_EXECUTE, &fd, test_err()));
    test_expect_echo(waiting.group, "told");
    /* A rank notifies after its reply, which may be gathered before. */
    struct pollfd notified[2] = {{.fd = executor->notify_fds[0], .events = POLLIN},
                                 {.fd = executor->notify_fds[1], .events = POLLIN}};
    assert_true(poll(notified, 2, TEST_PATIENCE_MS) >= 1);
    group_end(&waiting, pids, 2);
}

ATTACH_TEST(a4_a5_one_too_many_or_another_world_gets_the_reason)
{
    struct hand waiting;
    pid_t pids[2];
    char expected[128];
    group_wait_for(&waiting, 2, attach);
    expect_turned_away(&waiting, "--local_rank 0 --local_world_size 3", "world size 3");
    expect_turned_away(&waiting, "--local_rank 0 --local_world_size 3", "2 ranks");
    expect_turned_away(&waiting, "--local_rank 2", "rank 2");
    pids[0] = worker_attach(&waiting, "1", NULL);
    snprintf(expected, sizeof expected, "is process %d already", pids[0]);
    expect_turned_away(&waiting, "--local_rank 1 --local_world_size 2", expected);
    pids[1] = worker_attach(&waiting, NULL, "2");
    expect_turned_away(&waiting, "", "all 2 ranks");
    hand_complete(&waiting);
    test_expect_echo(waiting.group, "two of five");
    /* Nor afterwards. */
    expect_turned_away(&waiting, "", "all 2 ranks");
    test_expect_echo(waiting.group, "still two");
    group_end(&waiting, pids, 2);
}

/* ---- deaths and the end ---- */

ATTACH_TEST(a24_a_worker_that_dies_while_the_group_waits_is_named)
{
    struct hand waiting;
    pid_t pid, survivor;
    char expected[64];
    group_wait_for(&waiting, 3, attach);
    survivor = worker_attach(&waiting, "2", NULL);
    pid = worker_attach(&waiting, "1", NULL);
    assert_int_equal(kill(pid, SIGKILL), 0);
    pthread_join(waiting.thread, NULL);
    assert_int_equal(waiting.result, COX_PEER_DEAD);
    snprintf(expected, sizeof expected, "rank 1 (pid %d) is dead", pid);
    assert_contains(waiting.err.text, expected);
    assert_int_equal(hand_worker_end(pid), 128 + SIGKILL);
    /* The group is no more, and so are its ranks: by its goodbye, or by a signal. */
    hand_worker_end(survivor);
}

static _Atomic bool given_up;

static bool is_given_up(void *context)
{
    (void)context;
    return atomic_load(&given_up);
}

ATTACH_TEST(a24_a_start_that_is_given_up_waits_for_no_worker)
{
    struct hand waiting = {.options = {.hooks.cancelled = is_given_up,
                                       .times.start_timeout_ms = 10 * TEST_PATIENCE_MS}};
    atomic_store(&given_up, false);
    hand_open(&waiting, 2, attach);
    atomic_store(&given_up, true);
    pthread_join(waiting.thread, NULL);
    assert_int_equal(waiting.result, COX_CLOSED);
    assert_string_equal(waiting.err.text, "cancelled while the workers were starting");
}

ATTACH_TEST(a24_a_worker_that_dies_later_is_named)
{
    struct hand waiting;
    pid_t pids[2];
    char expected[64];
    group_wait_for(&waiting, 2, attach);
    for (int i = 0; i < 2; i++)
        pids[i] = hand_worker(&waiting, ranks[i]);
    hand_complete(&waiting);
    assert_int_equal(test_call_how(waiting.group, NULL, &test_all, "only 1 kill 9"), COX_PEER_DEAD);
    snprintf(expected, sizeof expected, "rank 1 (pid %d) is dead", pids[1]);
    assert_contains(test_error_text(waiting.group), expected);
    test_await_death(waiting.group, 1);
    assert_contains(test_death_text(waiting.group, 1), expected);
    const struct test_how first = {.gather = COX_GATHER_ALL, .ranks = 1};
    assert_int_equal(test_call_how(waiting.group, NULL, &first, "echo alone"), 0);
    test_group_free(waiting.group);
    assert_int_equal(hand_worker_end(pids[0]), 0);
    assert_int_equal(hand_worker_end(pids[1]), 128 + SIGKILL);
}

static void await_taken(const struct hand *waiting, uint32_t rank, uint64_t sequence)
{
    const struct cox_control *control = &test_group_executor(waiting->group)->control;
    AWAIT(cox_state_taken(cox_state_line(control, rank, COX_CHANNEL_EXECUTE)) >= sequence);
}

/* Other processes in its process group are not ours. */
ATTACH_TEST(a24_stop_ends_the_workers_and_no_other_process)
{
    struct hand waiting;
    pid_t pids[3];
    pid_t beside;
    char *const sleeper[] = {"sleep", "1000", NULL};
    posix_spawnattr_t attributes;
    group_wait_long(&waiting, 3, attach, 2000);
    for (int i = 0; i < 3; i++)
        pids[i] = hand_worker(&waiting, ranks[i]);
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
    posix_spawnattr_setpgroup(&attributes, pids[2]);
    assert_int_equal(posix_spawnp(&beside, "sleep", NULL, &attributes, sleeper, environ), 0);
    posix_spawnattr_destroy(&attributes);
    hand_complete(&waiting);
    assert_int_equal(getpgid(beside), pids[2]);
    /* One that hears the goodbye, one that needs SIGTERM, one that needs SIGKILL. */
    const struct test_how deaf = {.gather = COX_GATHER_ALL, .ranks = 4};
    const struct test_how busy = {.gather = COX_GATHER_ALL, .ranks = 6, .timeout_ms = 1};
    assert_int_equal(test_call_how(waiting.group, NULL, &deaf, "deaf"), 0);
    test_call_in_vain(waiting.group, NULL, &busy, "spin");
    /* A rank that is stopped before it has taken the request leaves it, and hears the goodbye. */
    await_taken(&waiting, 1, 2);
    await_taken(&waiting, 2, 2);
    cox_executor_stop(test_group_executor(waiting.group));
    test_group_free(waiting.group);
    assert_int_equal(hand_worker_end(pids[0]), 0);
    assert_int_equal(hand_worker_end(pids[1]), 128 + SIGTERM);
    assert_int_equal(hand_worker_end(pids[2]), 128 + SIGKILL);
    assert_int_equal(waitpid(beside, NULL, WNOHANG), 0); /* it is alive */
    kill(beside, SIGKILL);
    waitpid(beside, NULL, 0);
}

/* ---- one that logs on by itself, and lets its connection go ---- */

static int connect_main(const char *control_socket)
{
    static struct cox_sealed sealed;
    struct cox_control control;
    struct cox_control_connection session = {.fd = -1};
    struct cox_hello hello = {.role = COX_HELLO_WORKER, .rank = COX_HELLO_RANK_ANY};
    struct cox_gate gate;
    char byte;
    int r = cox_peer_start_time(getpid(), &hello.start);
    if (r == 0)
        r = cox_control_socket_connect(
            control_socket, &hello, cox_deadline_after_ms(TEST_PATIENCE_MS), &session, test_err());
    if (r == 0)
        r = cox_sealed_attach(&sealed, &control, session.hello_reply.rank, session.fds, test_err());
    if (r) {
        fprintf(stderr, "connection: %d: %s\n", r, test_error.text);
        return 1;
    }
    struct cox_layout_identity *identity = &control.ranks[session.hello_reply.rank]->identity;
    if (!cox_state_claim_identity(identity, (uint32_t)getpid(), hello.start))
        return 2;
    atomic_store(&identity->incarnation, session.hello_reply.incarnation);
    atomic_store(&identity->group_incarnation, control.group_incarnation);
    atomic_store(&identity->state, COX_IDENTITY_ATTACHED);
    cox_gate_bind(&gate, &cox_sealed_wake(&sealed, COX_CHANNEL_EXECUTE)->ranks_wakeup,
                  cox_sealed_wake(&sealed, COX_CHANNEL_EXECUTE), control.geometry.depth, false);
    cox_gate_post(&gate, session.hello_reply.rank, COX_WAKEUP_RESPONSE_CONSUME);
    if (read(STDIN_FILENO, &byte, 1) != 1)
        return 3;
    cox_close_fd(&session.fd);
    for (;;)
        pause();
}

TEST(b20_a_process_that_closes_its_connection_and_lives_on_is_killed)
{
    struct hand waiting;
    group_wait_for(&waiting, 1, COX_ATTACH_SEALED);
    struct test_helper client = test_helper_start("connection", waiting.control_socket);
    hand_complete(&waiting);
    assert_int_equal(test_pid(waiting.group, 0), client.pid);
    assert_int_equal(write(client.in, "", 1), 1);
    test_await_death(waiting.group, 0);
    assert_int_equal(test_call(waiting.group, NULL, "echo who?"), COX_PEER_DEAD);
    assert_int_equal(test_helper_wait(&client), 128 + SIGKILL);
    test_group_free(waiting.group);
}

/* ---- what a rank of a sealed group has ---- */

struct map {
    char permissions[8], what[64];
    unsigned long inode;
};

static size_t maps_of(pid_t pid, struct map *maps, size_t size)
{
    char path[64], line[512];
    size_t count = 0;
    snprintf(path, sizeof path, "/proc/%d/maps", pid);
    FILE *file = fopen(path, "re");
    assert_non_null(file);
    while (fgets(line, sizeof line, file)) {
        struct map map;
        if (!strstr(line, "/memfd:") && !strstr(line, "/dev/shm"))
            continue;
        if (strstr(line, "/memfd:coxswain-stacks")) /* for readers outside: multi/stacks */
            continue;
        assert_int_equal(
            sscanf(line, "%*s %7s %*s %*s %lu %63s", map.permissions, &map.inode, map.what), 3);
        assert_true(count < size);
        maps[count++] = map;
    }
    fclose(file);
    return count;
}

/* Inodes of files without a name, or with one in /dev/shm, that are open. */
static size_t fds_of(pid_t pid, unsigned long *inodes, size_t size)
{
    size_t count = 0;
    for (int fd = 0; fd < 1024; fd++) {
        char path[64], target[256] = "";
        struct stat st;
        snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
        if (readlink(path, target, sizeof target - 1) < 0 || stat(path, &st) < 0)
            continue;
        if (strstr(target, "/memfd:coxswain-stacks"))
            continue;
        if (strncmp(target, "/memfd:", 7) != 0 && strncmp(target, "/dev/shm", 8) != 0)
            continue;
        assert_true(count < size);
        inodes[count++] = (unsigned long)st.st_ino;
    }
    return count;
}

static const struct map *map_find(const struct map *maps, size_t count, const char *what)
{
    const struct map *found = NULL;
    for (size_t i = 0; i < count; i++)
        if (strcmp(maps[i].what, what) == 0) {
            /* Each once, but for the recorder, which is a part of the rank's memory. */
            assert_true(!found ||
                        (strcmp(what, "/memfd:cox_rank") == 0 && found->inode == maps[i].inode));
            found = found ? found : &maps[i];
        }
    return found;
}

enum { N = 4 };

static void expect_own_memory(struct test_group *group)
{
    struct map maps[N][8], own[16];
    unsigned long fds[N][16];
    size_t counts[N], fd_counts[N];
    for (uint32_t rank = 0; rank < N; rank++) {
        pid_t pid = cox_executor_pid(test_group_executor(group), rank);
        size_t count = counts[rank] = maps_of(pid, maps[rank], 8);
        fd_counts[rank] = fds_of(pid, fds[rank], 16);
        const struct map *request = map_find(maps[rank], count, "/memfd:cox_request");
        const struct map *memory = map_find(maps[rank], count, "/memfd:cox_rank");
        const struct map *words = map_find(maps[rank], count, "/memfd:cox_group");
        const struct map *values = map_find(maps[rank], count, "/memfd:cox_payload_group");
        assert_true(request && memory && words && values);
        assert_string_equal(request->permissions, "r--s");
        assert_string_equal(memory->permissions, "rw-s");
        assert_string_equal(words->permissions, "rw-s");
        assert_string_equal(values->permissions, "rw-s");
        /* And the hints, those of the channels and those of the rank group. */
        for (size_t m = 0; m < count; m++)
            assert_true(&maps[rank][m] == request || &maps[rank][m] == words ||
                        &maps[rank][m] == values || maps[rank][m].inode == memory->inode ||
                        strcmp(maps[rank][m].what, "/memfd:cox_wake") == 0);
        assert_in_range(count, 6, 7);
        /* What is mapped is not open any more, but for the hints of the group. */
        for (size_t f = 0; f < fd_counts[rank]; f++)
            for (size_t m = 0; m < count; m++)
                assert_true(fds[rank][f] != maps[rank][m].inode ||
                            strcmp(maps[rank][m].what, "/memfd:cox_wake") == 0);
        assert_true(fd_counts[rank] <= 1);
    }
    for (uint32_t rank = 0; rank < N; rank++)
        for (uint32_t other = 0; other < N; other++) {
            static const char *const own_names[] = {"/memfd:cox_rank", "/memfd:cox_group",
                                                    "/memfd:cox_payload_group"};
            for (size_t n = 0; n < sizeof own_names / sizeof own_names[0]; n++) {
                unsigned long inode = map_find(maps[other], counts[other], own_names[n])->inode;
                for (size_t m = 0; m < counts[rank]; m++)
                    assert_int_equal(maps[rank][m].inode == inode,
                                     rank == other &&
                                         strcmp(maps[rank][m].what, own_names[n]) == 0);
                for (size_t f = 0; f < fd_counts[rank]; f++)
                    assert_true(fds[rank][f] != inode);
            }
        }
    /* The coordinator: of each rank's one, and the request memory for writing. */
    size_t count = maps_of(getpid(), own, 16);
    assert_string_equal(map_find(own, count, "/memfd:cox_request")->permissions, "rw-s");
}

GROUP_TEST_WITH(p10_a_rank_of_a_sealed_group_has_its_own_memory_and_no_other_s, N,
                .memory.attach = COX_ATTACH_SEALED)
{
    test_expect_echo(g, "x");
    expect_own_memory(g);
    /* And one that came later. */
    assert_int_equal(kill(cox_executor_pid(executor, 2), SIGKILL), 0);
    test_await_death(g, 2);
    assert_ok(
        cox_executor_restart(executor, 2, cox_deadline_after_ms(TEST_PATIENCE_MS), test_err()));
    test_expect_echo(g, "y");
    expect_own_memory(g);
}

TEST(p10_a_sealed_group_has_no_name_in_dev_shm_at_any_time)
{
    char name[64];
    _Alignas(struct inotify_event) char events[65536];
    for (int named = 0; named < 2; named++) {
        struct cox_executor_options options = {
            .size = sizeof(struct cox_executor_options),
            .name = test_unique_name(name),
            .memory.attach = named ? COX_ATTACH_NAMED : COX_ATTACH_SEALED,
            /* In the environment of the tests the default may be the other. */
            .memory.keep_names = named,
        };
        size_t seen = 0;
        int fd = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
        assert_true(fd >= 0);
        assert_true(inotify_add_watch(fd, "/dev/shm", IN_CREATE | IN_MOVED_TO) >= 0);
        struct test_group *group = test_group_start(2, &options);
        test_expect_echo(group, "x");
        if (!named) {
            assert_int_equal(test_call_how(group, NULL, &test_all, "only 1 kill 9"), COX_PEER_DEAD);
            assert_ok(cox_executor_restart(test_group_executor(group), 1,
                                           cox_deadline_after_ms(TEST_PATIENCE_MS), test_err()));
            test_expect_echo(group, "y");
        }
        test_group_free(group);
        ssize_t got;
        while ((got = read(fd, events, sizeof events)) > 0)
            for (char *at = events; at < events + got;) {
                const struct inotify_event *event = (const struct inotify_event *)(void *)at;
                assert_false(event->mask & IN_Q_OVERFLOW);
                seen += event->len && strstr(event->name, name);
                at += sizeof *event + event->len;
            }
        close(fd);
        /* A named one shows that this would be seen. */
        if (named)
            assert_true(seen > 10);
        else
            assert_int_equal(seen, 0);
    }
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "connection") == 0)
        return connect_main(argv[2]);
    return test_run(NULL, NULL);
}
