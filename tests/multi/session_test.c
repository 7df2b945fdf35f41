/*
 * A worker's session with its group, once the handshake is over: the memory it was given, the
 * frames and the slots in it, handles sent through them. The program is its own worker.
 */
#include "channel/base/peer.h"
#include "testing.h"

#include <coxswain/handle.h>
#include <coxswain/worker.h>

#define REGION_SIZE ((size_t)4 << 20)

/* ---- the worker ---- */

static struct cox_exporter *exporter;
static struct cox_importer *importer;
static uint8_t *own_region;
static uint32_t own_rank;

/* fds whose target starts with text, without the memory of the rank group, which stays open: each
 * init has a part. */
static int count_fds(const char *text)
{
    int count = 0;
    DIR *dir = opendir("/proc/self/fd");
    for (struct dirent *entry; dir && (entry = readdir(dir)) != NULL;) {
        char path[64], target[256];
        snprintf(path, sizeof path, "/proc/self/fd/%.20s", entry->d_name);
        ssize_t length = readlink(path, target, sizeof target - 1);
        if (length < 0)
            continue;
        target[length] = '\0';
        count += strncmp(target, text, strlen(text)) == 0 && !strstr(target, "_group");
    }
    if (dir)
        closedir(dir);
    return count;
}

static uint64_t region_sum(const uint8_t *bytes)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < REGION_SIZE; i += sizeof sum) {
        uint64_t word;
        memcpy(&word, bytes + i, sizeof word);
        sum = sum * 31 + word;
    }
    return sum;
}

/* A region of this rank's own, whose handle is the reply. */
static int reply_handle(uint8_t *reply, size_t *ret_reply_size, struct cox_error *err)
{
    struct cox_handle handle;
    _cox_cleanup_(cox_close_fd) int fd = memfd_create("region", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)REGION_SIZE) < 0)
        return cox_fail(err, -errno, "memory");
    own_region = mmap(NULL, REGION_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (own_region == MAP_FAILED)
        return cox_fail(err, -errno, "mapping");
    for (size_t i = 0; i < REGION_SIZE; i++)
        own_region[i] = (uint8_t)(i * (own_rank + 3) >> 4);
    int r = cox_exporter_export(exporter, fd, 0, 0, &handle, err);
    memcpy(reply, &handle, sizeof handle);
    *ret_reply_size = sizeof handle;
    return r;
}

/* The handles of all, one behind the other: the reply is the sum of each region as this rank sees
 * it. */
static int reply_sums(const uint8_t *handles, size_t count, uint8_t *reply, size_t *ret_reply_size,
                      struct cox_error *err)
{
    const struct cox_import *imports[COX_RANK_COUNT_MAX];
    size_t opened = 0;
    int r = 0;
    for (size_t i = 0; r == 0 && i < count; i++) {
        struct cox_handle handle;
        memcpy(&handle, handles + i * sizeof handle, sizeof handle);
        r = cox_importer_open(importer, &handle, COX_IMPORT_READ, &imports[i], err);
        opened += r == 0;
    }
    for (size_t i = 0; r == 0 && i < count; i++) { /* all are mapped at a time */
        uint64_t sum = region_sum(imports[i]->base);
        memcpy(reply + i * sizeof sum, &sum, sizeof sum);
    }
    while (opened > 0)
        cox_importer_close(importer, imports[--opened]);
    *ret_reply_size = count * sizeof(uint64_t);
    return r;
}

static int on_opaque(void *context, const uint8_t *request, size_t request_size, uint8_t *reply,
                     size_t reply_capacity, size_t *ret_reply_size, struct cox_error *err)
{
    (void)context;
    switch (request_size ? request[0] : 0) {
    case 'e':
        return reply_handle(reply, ret_reply_size, err);
    case 'i':
        return reply_sums(request + 1, (request_size - 1) / COX_HANDLE_SIZE, reply, ret_reply_size,
                          err);
    case 'm':
        *ret_reply_size = (size_t)snprintf((char *)reply, reply_capacity, "%d",
                                           count_fds("/memfd:") + count_fds("/dev/shm/") -
                                               /* for readers outside: multi/stacks */
                                               count_fds("/memfd:coxswain-stacks"));
        return 0;
    default:
        *ret_reply_size = 0;
        return 0;
    }
}

static int worker_main(int argc, char **argv)
{
    static const struct cox_worker_callbacks callbacks = {
        .size = sizeof(struct cox_worker_callbacks), .opaque = on_opaque};
    struct cox_worker_options options = COX_WORKER_OPTIONS_INIT;
    struct cox_worker *worker = NULL;
    int r = cox_worker_options_parse(&options, &argc, argv, test_err());
    if (r == 0)
        r = cox_worker_new(&options, &callbacks, NULL, &worker, test_err());
    if (r == 0) {
        own_rank = cox_worker_rank(worker);
        r = cox_exporter_new(NULL, &exporter, test_err());
    }
    if (r == 0)
        r = cox_importer_new(NULL, &importer, test_err());
    if (r == 0)
        r = cox_worker_run(worker, test_err());
    if (r)
        fprintf(stderr, "%s\n", test_error.text);
    cox_importer_free(importer);
    cox_exporter_free(exporter);
    cox_worker_free(worker);
    return r != 0;
}

/* ---- the tests ---- */

static struct test_group *start(uint32_t rank_count)
{
    return test_group_start(rank_count, START_WITH(.workers.command = test_own_command));
}

TEST(a13_fds_are_closed_once_their_memory_is_mapped)
{
    OWN_GROUP *g = start(4);
    OWN_COMPLETION c = {0};
    assert_int_equal(test_call(g, &c, "m"), 0);
    for (uint32_t rank = 0; rank < 4; rank++)
        assert_string_equal(c.ranks[rank].bytes, "0");
}

/* Nor does the coordinator keep what other processes of the user could open through /proc. */
TEST(b16_no_other_process_keeps_an_fd_of_a_ranks_memory)
{
    OWN_GROUP *g = start(4);
    test_await_socket(g);
    assert_int_equal(count_fds("/memfd:cox_rank"), 0);
    /* Nor of a rank's next incarnation. */
    test_kill_rank(g, 1);
    test_restart_rank(g, 1);
    test_await_socket(g);
    assert_int_equal(count_fds("/memfd:cox_rank"), 0);
}

GROUP_TEST(a10_m2_a_group_of_64, 64)
{
    for (int i = 0; i < 20; i++)
        test_expect_echo(g, i % 2 ? "one for all" : "and all");
}

TEST(l22_handles_of_all_ranks_go_through_the_channel)
{
    for (uint32_t n = 1; n <= 8; n *= 2) {
        OWN_GROUP *g = start(n);
        OWN_COMPLETION exported = {0}, summed = {0};
        uint8_t request[1 + 8 * COX_HANDLE_SIZE] = {'i'};
        assert_int_equal(test_call(g, &exported, "e"), 0);
        for (uint32_t rank = 0; rank < n; rank++) {
            assert_int_equal(exported.ranks[rank].size, COX_HANDLE_SIZE);
            memcpy(request + 1 + rank * COX_HANDLE_SIZE, exported.ranks[rank].bytes,
                   COX_HANDLE_SIZE);
        }
        assert_int_equal(
            test_call_bytes(g, &summed, &test_all, request, 1 + (size_t)n * COX_HANDLE_SIZE), 0);
        for (uint32_t owner = 0; owner < n; owner++) {
            uint8_t *expected = malloc(REGION_SIZE);
            assert_non_null(expected);
            for (size_t i = 0; i < REGION_SIZE; i++)
                expected[i] = (uint8_t)(i * (owner + 3) >> 4);
            uint64_t sum = region_sum(expected);
            free(expected);
            for (uint32_t rank = 0; rank < n; rank++)
                assert_memory_equal(summed.ranks[rank].bytes + owner * sizeof sum, &sum,
                                    sizeof sum);
        }
    }
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "worker") == 0)
        return worker_main(argc, argv);
    return test_run(NULL, NULL);
}
