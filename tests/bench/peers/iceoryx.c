/* bench-iceoryx: Eclipse iceoryx: the request is published to all workers, which publish their
 * replies to one subscriber of the coordinator; all wait with a WaitSet. Chunks are loaned, so the
 * only copy is the request into its chunk, once for all workers. Its broker, RouDi, is started for
 * this run, without monitoring processes (no heartbeat). Names of iceoryx are global: only one run
 * at a time, and none beside another RouDi. A guard process removes what killed processes leave. */
#include "channel/base/base_internal.h"
#include "tests/bench/load.h"
#include "tests/bench/subject.h"
#include "answers.h"
#include "leftovers.h"
#include "workers.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>
#include <iceoryx_binding_c/log.h>
#include <iceoryx_binding_c/publisher.h>
#include <iceoryx_binding_c/runtime.h>
#include <iceoryx_binding_c/subscriber.h>
#include <iceoryx_binding_c/types.h>
#include <iceoryx_binding_c/wait_set.h>

#define ROUDI_LOCK "/tmp/iox-unique-roudi.lock"
#define SERVICE "coxswain-bench"
/* A request's number from here on is a greeting, which is only echoed. */
#define GREETING_FIRST (UINT64_MAX / 2)
#define GREETING_COUNT 200
#define GREETING_MS 20
/* A publisher keeps its last chunk; the next one is filled while it does. */
#define REQUEST_CHUNKS 4
#define REPLY_CHUNKS(rank_count) (256 + 8 * (rank_count))
#define REPLY_QUEUE 256
/* Of the request's bytes, and room to align them. */
#define CHUNK_SIZE(size) (((size) + 64 + 63) / 64 * 64)

struct names {
    uint32_t rank_count;
    pid_t pid;
    /* in /dev/shm, by the user's group */
    char segment[80];
    char config[64];
};

struct side {
    iox_pub_storage_t publisher_storage;
    iox_sub_storage_t subscriber_storage;
    iox_ws_storage_t set_storage;
    iox_pub_t publisher;
    iox_sub_t subscriber;
    iox_ws_t set;
};

struct system {
    struct subject_options options;
    struct workers workers;
    struct names names;
    struct side side;
    /* the name that only one can have; the guard has it as long as there is something to remove */
    int taken_fd;
    int guard_fd;
    pid_t guard_pid;
    pid_t roudi_pid;
    /* what it prints; open as long as it is there */
    int roudi_fd;
};

/* ---- both sides ---- */

/* rank_count: the coordinator's. */
static void runtime_name(const struct names *names, uint32_t rank, char *ret_name, size_t size)
{
    snprintf(ret_name, size, "coxswain-bench-%d-%u", (int)names->pid, rank);
}

static bool side_init(struct side *side, const struct names *names, uint32_t rank, const char *out,
                      const char *in)
{
    char name[64];
    iox_pub_options_t pub_options;
    iox_sub_options_t sub_options;
    runtime_name(names, rank, name, sizeof name);
    iox_set_loglevel(Iceoryx_LogLevel_Fatal);
    iox_runtime_init(name);
    iox_pub_options_init(&pub_options);
    iox_sub_options_init(&sub_options);
    sub_options.queueCapacity = REPLY_QUEUE;
    side->set = iox_ws_init(&side->set_storage);
    side->subscriber = iox_sub_init(&side->subscriber_storage, SERVICE, "all", in, &sub_options);
    side->publisher = iox_pub_init(&side->publisher_storage, SERVICE, "all", out, &pub_options);
    return side->set && side->subscriber && side->publisher &&
           iox_ws_attach_subscriber_state(side->set, side->subscriber, SubscriberState_HAS_DATA, 1,
                                          NULL) == WaitSetResult_SUCCESS;
}

/* Waits for one; it is to be released. Returns NULL when the time is over, which is never for 0. */
static const uint8_t *take(struct side *side, uint64_t patience_ns)
{
    const uint64_t deadline_ns =
        patience_ns ? cox_deadline_after_ns(patience_ns) : COX_DEADLINE_NEVER;
    for (;;) {
        const void *bytes;
        iox_notification_info_t notification;
        uint64_t missed;
        if (iox_sub_take_chunk(side->subscriber, &bytes) == ChunkReceiveResult_SUCCESS)
            return bytes;
        if (!patience_ns) {
            iox_ws_wait(side->set, &notification, 1, &missed);
            continue;
        }
        const uint64_t now_ns = cox_now_ns();
        if (now_ns >= deadline_ns)
            return NULL;
        iox_ws_timed_wait(side->set, cox_deadline_timespec(deadline_ns - now_ns), &notification, 1,
                          &missed);
    }
}

static void *loan(struct side *side, size_t size)
{
    void *bytes;
    return iox_pub_loan_chunk(side->publisher, &bytes, (uint32_t)size) == AllocationResult_SUCCESS
               ? bytes
               : NULL;
}

static const char *worker_main(const void *context, uint32_t rank)
{
    const struct system *system = context;
    struct side side;
    struct load load;
    if (load_init(&load, system->options.request_size, system->options.reply_size) ||
        !side_init(&side, &system->names, rank, "replies", "requests"))
        return "no way into iceoryx";
    for (;;) {
        const uint8_t *request = take(&side, 0);
        uint8_t *reply = loan(&side, load.reply_size);
        uint64_t round;
        if (!reply)
            return "no chunk for a reply";
        memcpy(&round, request, sizeof round);
        if (round >= GREETING_FIRST)
            load_reply(&load, round, rank, reply);
        else
            load_answer(&load, request, rank, reply);
        iox_sub_release_chunk(side.subscriber, request);
        iox_pub_publish_chunk(side.publisher, reply);
    }
}

/* ---- RouDi ---- */

static void remove_names(const void *context)
{
    static const char *const fixed[] = {"/dev/shm/iceoryx_mgmt", ROUDI_LOCK, "/tmp/roudi",
                                        "/tmp/roudi.lock"};
    const struct names *names = context;
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++)
        unlink(fixed[i]);
    unlink(names->segment);
    unlink(names->config);
    for (uint32_t rank = 0; rank <= names->rank_count; rank++) {
        char name[64], path[80];
        runtime_name(names, rank, name, sizeof name);
        snprintf(path, sizeof path, "/tmp/%s", name);
        unlink(path);
        snprintf(path, sizeof path, "/tmp/%s.lock", name);
        unlink(path);
    }
}

/* Checks that no other measurement of iceoryx and no other RouDi runs. Returns 0, COX_UNSUPPORTED
 * or another error. */
static int take_names(struct system *system, struct cox_error *err)
{
    static const char taken[] = "coxswain-bench-iceoryx";
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path + 1, taken, sizeof taken - 1);
    const socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + sizeof taken);
    system->taken_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (system->taken_fd < 0 || bind(system->taken_fd, (struct sockaddr *)&address, size) < 0)
        return cox_fail(err, errno == EADDRINUSE ? COX_UNSUPPORTED : -errno,
                        "another subject with iceoryx, whose names are global: %s",
                        strerror(errno));
    const int lock_fd = open(ROUDI_LOCK, O_RDWR | O_CLOEXEC);
    if (lock_fd < 0)
        return errno == ENOENT
                   ? 0
                   : cox_fail(err, COX_UNSUPPORTED, "%s: %s", ROUDI_LOCK, strerror(errno));
    const int r = flock(lock_fd, LOCK_EX | LOCK_NB);
    close(lock_fd);
    return r == 0 ? 0 : cox_fail(err, COX_UNSUPPORTED, "a RouDi that is not ours runs already");
}

static int write_config(const struct system *system, struct cox_error *err)
{
    const size_t request_size = CHUNK_SIZE(system->options.request_size);
    const size_t reply_size = CHUNK_SIZE(system->options.reply_size);
    const uint32_t reply_count = REPLY_CHUNKS(system->options.rank_count);
    FILE *file = fopen(system->names.config, "wxe");
    if (!file)
        return cox_fail(err, -errno, "%s: %s", system->names.config, strerror(errno));
    fprintf(file, "[general]\nversion = 1\n[[segment]]\n");
    /* In the order of their sizes. Small requests come from the replies' pool. */
    fprintf(file, "[[segment.mempool]]\nsize = %zu\ncount = %u\n", reply_size,
            reply_count + REQUEST_CHUNKS);
    if (request_size > reply_size)
        fprintf(file, "[[segment.mempool]]\nsize = %zu\ncount = %u\n", request_size,
                REQUEST_CHUNKS);
    return fclose(file) == 0
               ? 0
               : cox_fail(err, -errno, "%s: %s", system->names.config, strerror(errno));
}

static int roudi_start(struct system *system, struct cox_error *err)
{
    int fds[2];
    const pid_t coordinator = getpid();
    if (pipe2(fds, O_CLOEXEC) < 0)
        return cox_fail(err, -errno, "pipe: %s", strerror(errno));
    system->roudi_pid = fork();
    if (system->roudi_pid == 0) {
        if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 || getppid() != coordinator)
            _exit(1);
        dup2(fds[1], STDOUT_FILENO);
        dup2(fds[1], STDERR_FILENO);
        execl(BENCH_ROUDI, "iox-roudi", "-m", "off", "-l", "fatal", "-c", system->names.config,
              (char *)NULL);
        _exit(1);
    }
    close(fds[1]);
    system->roudi_fd = fds[0];
    if (system->roudi_pid < 0)
        return cox_fail(err, -errno, "fork: %s", strerror(errno));
    char text[4096] = "";
    for (size_t used = 0;;) {
        ssize_t n = read(fds[0], text + used, sizeof text - 1 - used);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return cox_fail(err, COX_UNSUPPORTED, "RouDi does not run here: %.500s", text);
        used += (size_t)n;
        text[used] = '\0';
        if (strstr(text, "ready for clients"))
            return 0;
    }
}

/* ---- the coordinator ---- */

static void system_stop(void *subject)
{
    struct system *system = subject;
    workers_stop(&system->workers);
    /* With SIGTERM it would signal every registered process, and wait for them. */
    if (system->roudi_pid > 0) {
        kill(system->roudi_pid, SIGKILL);
        waitpid(system->roudi_pid, NULL, 0);
    }
    if (system->guard_pid > 0) {
        close(system->guard_fd);
        waitpid(system->guard_pid, NULL, 0);
    }
    if (system->roudi_fd >= 0)
        close(system->roudi_fd);
    if (system->taken_fd >= 0)
        close(system->taken_fd);
    free(system);
}

/* All processes discover each other through RouDi, which takes time; until then greetings, or their
 * echoes, are lost. Greets until all have replied to the same greeting: then no reply to an older
 * one is in flight. */
static int greet(struct system *system, struct cox_error *err)
{
    uint32_t answered = 0;
    for (uint64_t i = 0; i < GREETING_COUNT; i++) {
        const uint64_t greeting = GREETING_FIRST + i;
        uint8_t *request = loan(&system->side, LOAD_SIZE_MIN);
        if (!request)
            return cox_fail(err, -ENOBUFS, "no chunk for a greeting");
        load_number(request, greeting);
        iox_pub_publish_chunk(system->side.publisher, request);
        const uint8_t *reply;
        answered = 0;
        while (answered < system->options.rank_count &&
               (reply = take(&system->side, (i + 1) * GREETING_MS * COX_NSEC_PER_MSEC))) {
            uint64_t echo;
            memcpy(&echo, reply, sizeof echo);
            iox_sub_release_chunk(system->side.subscriber, reply);
            answered += echo == greeting;
        }
        if (answered == system->options.rank_count)
            return 0;
    }
    return cox_fail(err, COX_TIMEOUT, "%u of %u workers answered", answered,
                    system->options.rank_count);
}

static int system_open(struct system *system, struct cox_error *err)
{
    int r = take_names(system, err);
    if (r == 0)
        r = leftovers_guard(remove_names, &system->names, &system->guard_fd, &system->guard_pid,
                            err);
    if (r == 0)
        r = write_config(system, err);
    if (r == 0)
        r = roudi_start(system, err);
    if (r == 0)
        r = workers_start(&system->workers, system->options.rank_count, worker_main, system, err);
    workers_go(&system->workers);
    if (r == 0 && !side_init(&system->side, &system->names, system->options.rank_count, "requests",
                             "replies"))
        r = cox_fail(err, -EIO, "no way into iceoryx");
    return r ? r : greet(system, err);
}

static int system_start(const struct subject_options *options, void **ret_subject,
                        struct cox_error *err)
{
    struct system *system = calloc(1, sizeof *system);
    if (!system)
        return cox_fail(err, -ENOMEM, "no memory");
    *system = (struct system){.options = *options, .taken_fd = -1, .guard_fd = -1, .roudi_fd = -1};
    system->names = (struct names){.rank_count = options->rank_count, .pid = getpid()};
    const struct group *group = getgrgid(getegid());
    snprintf(system->names.segment, sizeof system->names.segment, "/dev/shm/%s",
             group ? group->gr_name : "");
    snprintf(system->names.config, sizeof system->names.config, "/tmp/coxswain-bench-%d.toml",
             getpid());
    int r =
        options->request_size <= UINT32_MAX / 2 && options->reply_size <= UINT32_MAX / 2 && group
            ? system_open(system, err)
            : cox_fail(err, COX_UNSUPPORTED,
                       "chunks have 32-bit sizes, and segments are named by the group");
    if (r) {
        system_stop(system);
        return r;
    }
    *ret_subject = system;
    return 0;
}

static int system_round(void *subject, uint8_t *request, uint64_t round, struct cox_error *err)
{
    struct system *system = subject;
    struct answers answers;
    uint8_t *chunk = loan(&system->side, system->options.request_size);
    if (!chunk)
        return cox_fail(err, -ENOBUFS, "no chunk for a request");
    memcpy(chunk, request, system->options.request_size);
    iox_pub_publish_chunk(system->side.publisher, chunk);
    answers_init(&answers, &system->options, round);
    while (answers.left > 0) {
        const uint8_t *reply = take(&system->side, 0);
        int r = answers_take(&answers, reply, system->options.reply_size, err);
        iox_sub_release_chunk(system->side.subscriber, reply);
        if (r)
            return r;
    }
    return 0;
}

int main(int argc, char **argv)
{
    static const struct subject_ops ops = {
        .start = system_start, .round = system_round, .stop = system_stop};
    /* Not exit: iceoryx would say good-bye to a RouDi that is gone. */
    _exit(subject_main(argc, argv, &ops));
}
