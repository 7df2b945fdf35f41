/* The memory of a sealed group: what a rank is given, what it can do to it, and what it refuses. */
#include "channel/base/futex.h"
#include "channel/shm/channel.h"
#include "channel/shm/reply.h"
#include "channel/shm/request.h"
#include "channel/attach/sealed/sealed.h"
#include "channel/shm/state.h"
#include "channel_fixture.h"

#include <linux/falloc.h>
#include <sys/sendfile.h>
#include <sys/uio.h>

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#define PAGE 4096
#define HUGE (2 << 20)
#define RANK_COUNT 3

static struct cox_sealed sealed;
static struct cox_control control;

static struct cox_geometry geometry_make(uint64_t request_size, uint64_t response_size)
{
    struct cox_geometry_choice choice = {.depth = 2, .mode = &cox_attach_sealed};
    struct cox_geometry geometry;
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
        choice.request_size[c] = request_size;
        choice.response_size[c] = response_size;
    }
    assert_int_equal(cox_geometry_resolve(RANK_COUNT, &choice, &geometry, NULL), 0);
    return geometry;
}

static void created(bool huge_pages)
{
    struct cox_geometry geometry = geometry_make(8192, 24576);
    assert_ok(cox_sealed_create(&sealed, &control, &geometry, huge_pages, test_err()));
}

/* Mappings of memory without a name. */
static size_t map_count(void)
{
    return test_mapping_count("memfd:") + test_mapping_count("anon_hugepage");
}

static void gone(void)
{
    cox_sealed_close(&sealed);
    cox_sealed_close(&sealed);
    cox_control_close(&control);
    cox_control_close(&control);
    assert_int_equal(map_count(), 0);
}

static int setup(void **state)
{
    leak_setup(state);
    created(false);
    return 0;
}

static int teardown(void **state)
{
    gone();
    return leak_teardown(state);
}

/* A test over the memory of a group. */
#define SEALED_TEST(name) TEST_WITH(name, setup, teardown)

static ino_t inode(int fd)
{
    struct stat st;
    assert_int_equal(fstat(fd, &st), 0);
    return st.st_ino;
}

/* ---- what a rank does to it ---- */

static int given[COX_SEALED_FD_COUNT]; /* to the rank of a child */

/* True: it did not work. */
#define REFUSED(call) CHECK((errno = 0, (intptr_t)(call) == -1))

static bool can_mmap(int fd, uint64_t size, int protection)
{
    return mmap(NULL, size, protection, MAP_SHARED, fd, 0) != MAP_FAILED;
}

static uint64_t size_of(int fd)
{
    struct stat st;
    CHECK(fstat(fd, &st) == 0);
    return (uint64_t)st.st_size;
}

/* No process can change the size. */
static void refuse_sizes(int fd)
{
    off_t size = (off_t)size_of(fd), page = size % HUGE ? PAGE : HUGE;
    REFUSED(ftruncate(fd, 0));
    REFUSED(ftruncate(fd, size - page));
    REFUSED(ftruncate(fd, size + page));
    REFUSED(fallocate(fd, 0, size, page));
    REFUSED(fallocate(fd, FALLOC_FL_COLLAPSE_RANGE, 0, page));
    REFUSED(fallocate(fd, FALLOC_FL_INSERT_RANGE, 0, page));
    REFUSED(test_reopen(fd, O_RDWR | O_TRUNC));
    REFUSED(test_reopen(fd, O_WRONLY | O_TRUNC));
    CHECK(size_of(fd) == (uint64_t)size);
}

static void refuse_seals(int fd)
{
    static const int seals[] = {F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE,
                                F_SEAL_FUTURE_WRITE};
    int before = fcntl(fd, F_GET_SEALS);
    CHECK(before >= 0);
    REFUSED(fcntl(fd, F_ADD_SEALS, 0));
    for (size_t i = 0; i < sizeof seals / sizeof seals[0]; i++)
        REFUSED(fcntl(fd, F_ADD_SEALS, seals[i]));
    CHECK(fcntl(fd, F_GET_SEALS) == before);
}

/* Every call that writes through an fd. */
static void refuse_writes(int fd)
{
    char bytes[64];
    struct iovec part = {bytes, sizeof bytes};
    off_t offset = 0;
    int pipes[2], other = memfd_create("other", MFD_CLOEXEC);
    memset(bytes, 0x77, sizeof bytes);
    CHECK(other >= 0 && write(other, bytes, sizeof bytes) == (ssize_t)sizeof bytes);
    CHECK(pipe2(pipes, O_CLOEXEC | O_NONBLOCK) == 0 && write(pipes[1], bytes, sizeof bytes) > 0);
    REFUSED(write(fd, bytes, sizeof bytes));
    REFUSED(pwrite(fd, bytes, sizeof bytes, 640));
    REFUSED(pwritev(fd, &part, 1, 0));
    REFUSED(splice(pipes[0], NULL, fd, &offset, sizeof bytes, SPLICE_F_NONBLOCK));
    offset = 0;
    REFUSED(sendfile(fd, other, &offset, sizeof bytes));
    off_t from = 0, to = 0;
    REFUSED(copy_file_range(other, &from, fd, &to, sizeof bytes, 0));
    REFUSED(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                      size_of(fd) % HUGE ? PAGE : HUGE));
    REFUSED(fallocate(fd, FALLOC_FL_ZERO_RANGE, 0, PAGE));
    REFUSED(fallocate(fd, FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE, 0, PAGE));
    close(other);
    close(pipes[0]);
    close(pipes[1]);
}

/* Every call that makes a mapping writable, or writes through one that is not. */
static void refuse_mapping(void *map, uint64_t size)
{
    char byte = 0x77;
    struct iovec own = {&byte, 1}, there = {map, 1};
    int mem = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
    CHECK(mem >= 0);
    REFUSED(mprotect(map, size, PROT_READ | PROT_WRITE));
    REFUSED(mprotect(map, size, PROT_WRITE));
    REFUSED(madvise(map, size, MADV_REMOVE));
    REFUSED(pwrite(mem, &byte, 1, (off_t)(uintptr_t)map));
    REFUSED(process_vm_writev(getpid(), &own, 1, &there, 1, 0));
    close(mem);
    /* Moved, and with its pages in another order, it is what it was. */
    void *moved = mremap(map, size, size, MREMAP_MAYMOVE);
    CHECK(moved == map);
    if (syscall(SYS_remap_file_pages, map, (size_t)PAGE, 0, 0L, 0) == 0)
        REFUSED(mprotect(map, size, PROT_READ | PROT_WRITE));
    void *copy = mremap(map, 0, size, MREMAP_MAYMOVE); /* a second one of the same pages */
    if (copy != MAP_FAILED)
        REFUSED(mprotect(copy, size, PROT_READ | PROT_WRITE));
}

static void refuse_name(int fd)
{
    char path[64], name[600];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    snprintf(name, sizeof name, SHM "%s", test_object("named"));
    REFUSED(linkat(AT_FDCWD, path, AT_FDCWD, name, AT_SYMLINK_FOLLOW));
    REFUSED(linkat(fd, "", AT_FDCWD, name, AT_EMPTY_PATH));
}

static void refuse_changes(int fd, uint64_t size)
{
    refuse_writes(fd);
    refuse_sizes(fd);
    refuse_seals(fd);
    refuse_name(fd);
    CHECK(!can_mmap(fd, size, PROT_WRITE));
    CHECK(!can_mmap(fd, size, PROT_READ | PROT_WRITE));
}

static void attack_requests(void *context)
{
    static struct cox_sealed own;
    static struct cox_control seen;
    int fd = given[COX_SEALED_REQUEST];
    (void)context;
    /* What a forked child has and a worker has not. */
    cox_control_close(&control);
    cox_sealed_close(&sealed);
    CHECK(cox_sealed_attach(&own, &seen, 1, given, NULL) == 0);
    uint64_t size = seen.region.size;
    CHECK((fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY);
    refuse_changes(fd, size);
    fcntl(fd, F_SETFL, O_RDWR); /* says that it worked */
    refuse_writes(fd);
    refuse_mapping(seen.region.base, size);
    for (int flags = O_WRONLY; flags <= O_RDWR; flags++) {
        int again = test_reopen(fd, flags);
        if (again < 0)
            continue; /* as good */
        refuse_changes(again, size);
        void *map = mmap(NULL, size, PROT_READ, MAP_SHARED, again, 0);
        if (map != MAP_FAILED)
            refuse_mapping(map, size);
        /* A copy of its own is its own. */
        char *private = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE, again, 0);
        if (private != MAP_FAILED)
            memset(private, 0x77, PAGE);
        close(again);
    }
}

static void requests_stay(bool huge_pages)
{
    created(huge_pages);
    uint64_t size = control.region.size;
    uint8_t *before = malloc(size);
    assert_non_null(before);
    memset((uint8_t *)control.region.base + PAGE, 0x5a, PAGE);
    memcpy(before, control.region.base, size);
    cox_sealed_hand_out(&sealed, 1, given);
    for (int f = 0; f < COX_SEALED_FD_COUNT; f++)
        given[f] = dup(given[f]); /* the child closes what is the coordinator's */
    child_run(attack_requests, NULL);
    assert_memory_equal(control.region.base, before, size);
    for (int f = 0; f < COX_SEALED_FD_COUNT; f++)
        close(given[f]);
    /* The creator continues to write. */
    memset((uint8_t *)control.region.base + PAGE, 0xa5, PAGE);
    free(before);
    gone();
}

LEAK_TEST(b16_p10_a_rank_cannot_write_the_request_memory)
{
    requests_stay(false);
}

/* Memory that a rank may write has a fixed size, too, so that no process that has mapped it gets
 * SIGBUS. */
static void attack_own(void *context)
{
    (void)context;
    for (int f = COX_SEALED_RANK; f <= COX_SEALED_WAKE; f++) {
        refuse_sizes(given[f]);
        refuse_seals(given[f]);
        refuse_name(given[f]);
        CHECK(fallocate(given[f], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                        (off_t)size_of(given[f])) == 0);
    }
}

static uint64_t sum_of(const struct cox_region *region)
{
    const volatile uint8_t *bytes = region->base;
    uint64_t sum = 0;
    for (uint64_t i = 0; i < region->size; i++)
        sum += bytes[i];
    return sum;
}

LEAK_TEST(b16_p10_holes_in_a_rank_s_own_memory_are_zeros_to_the_others)
{
    created(true); /* huge pages, if there are any, are not where a rank can punch */
    memset(sealed.ranks[1].base, 1, sealed.ranks[1].size);
    memset(sealed.ranks[2].base, 1, sealed.ranks[2].size);
    cox_sealed_hand_out(&sealed, 1, given);
    child_run(attack_own, NULL);
    assert_int_equal(sum_of(&sealed.ranks[1]), 0);
    assert_int_equal(sum_of(&sealed.wake), 0);
    assert_int_equal(sum_of(&sealed.ranks[2]), sealed.ranks[2].size);
    /* And is allocated again at the first write. */
    memset(sealed.ranks[1].base, 1, sealed.ranks[1].size);
    assert_int_equal(sum_of(&sealed.ranks[1]), sealed.ranks[1].size);
    gone();
}

SEALED_TEST(p10_a_rank_is_given_nothing_of_another_s)
{
    int fds[RANK_COUNT][COX_SEALED_FD_COUNT];
    for (uint32_t rank = 0; rank < RANK_COUNT; rank++)
        cox_sealed_hand_out(&sealed, rank, fds[rank]);
    for (uint32_t rank = 0; rank < RANK_COUNT; rank++)
        for (uint32_t other = 0; other < RANK_COUNT; other++)
            for (int f = 0; f < COX_SEALED_FD_COUNT; f++)
                for (int g = 0; g < COX_SEALED_FD_COUNT; g++)
                    assert_int_equal(inode(fds[rank][f]) == inode(fds[other][g]),
                                     f == g && (f == COX_SEALED_REQUEST || f == COX_SEALED_WAKE ||
                                                rank == other));
}

SEALED_TEST(nothing_has_a_name)
{
    int fds[COX_SEALED_FD_COUNT];
    struct stat st;
    assert_int_equal(shm_count(NULL), 0);
    for (uint32_t rank = 0; rank < RANK_COUNT; rank++) {
        cox_sealed_hand_out(&sealed, rank, fds);
        for (int f = 0; f < COX_SEALED_FD_COUNT; f++) {
            assert_int_equal(fstat(fds[f], &st), 0);
            assert_int_equal(st.st_nlink, 0);
            assert_int_equal(st.st_mode & 07777, 0600);
            assert_int_equal(fcntl(fds[f], F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
        }
    }
}

/* ---- attaching ---- */

static struct cox_sealed own;
static struct cox_control seen;

static int attach(uint32_t rank, struct cox_error *err)
{
    return cox_sealed_attach(&own, &seen, rank, given, err);
}

/* Refused, in words that have `part`, and nothing is left. */
static void refused(uint32_t rank, int code, const char *part)
{
    size_t maps = map_count();
    int fds = fd_count();
    assert_refused(attach(rank, test_err()), code, part);
    assert_int_equal(map_count(), maps);
    assert_int_equal(fd_count(), fds);
    assert_null(seen.region.base);
}

static void accepted(uint32_t rank)
{
    assert_ok(attach(rank, test_err()));
    cox_sealed_close(&own);
    cox_control_close(&seen);
}

/* What is to be attached again has other memory of the rank group. */
static void fresh(uint32_t rank)
{
    assert_int_equal(cox_sealed_renew_rank(&sealed, &control.geometry, rank, NULL), 0);
    cox_sealed_hand_out(&sealed, rank, given);
}

static const unsigned all_seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE;

/* Bytes as they are in `region`, `cut` fewer, with the seals given. */
static int forged(const struct cox_region *region, uint64_t cut, unsigned seals)
{
    uint64_t size = region->size - cut;
    int fd = memfd_create("forged", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_true(fd >= 0);
    assert_int_equal(fchmod(fd, 0600), 0);
    assert_int_equal(write(fd, region->base, size), size);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, (int)seals), 0);
    return fd;
}

static const struct cox_region *region_of(enum cox_sealed_fd which)
{
    static uint8_t bytes[64 << 10]; /* not checked here */
    static struct cox_region words = {.base = bytes}, values = {.base = bytes};
    words.size = cox_geometry_group_words_size();
    values.size = cox_geometry_group_payload_size();
    assert_true(words.size <= sizeof bytes && values.size <= sizeof bytes);
    return which == COX_SEALED_REQUEST ? &control.region
           : which == COX_SEALED_RANK  ? &sealed.ranks[1]
           : which == COX_SEALED_WAKE  ? &sealed.wake
           : which == COX_SEALED_GROUP ? &words
                                       : &values;
}

SEALED_TEST(b16_attach_refuses_memory_that_could_change_its_size)
{
    static const char *const words[] = {"request memory", "memory of the rank", "wake memory",
                                        "group memory", "group memory"};
    static const unsigned bits[] = {F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE};
    cox_sealed_hand_out(&sealed, 1, given);
    accepted(1);
    for (int f = 0; f < COX_SEALED_FD_COUNT; f++) {
        fresh(1);
        /* A forged one with every seal would do: what follows is about the seals. */
        given[f] = forged(region_of((enum cox_sealed_fd)f), 0,
                          f == COX_SEALED_REQUEST ? all_seals : F_SEAL_SHRINK | F_SEAL_GROW);
        accepted(1);
        close(given[f]);
        fresh(1);
        int whole = given[f];
        for (size_t b = 0; b < (f == COX_SEALED_REQUEST ? 3 : 2); b++) {
            given[f] = forged(region_of((enum cox_sealed_fd)f), 0,
                              f == COX_SEALED_REQUEST ? all_seals & ~bits[b]
                                                      : (F_SEAL_SHRINK | F_SEAL_GROW) & ~bits[b]);
            refused(1, COX_DENIED, words[f]);
            close(given[f]);
        }
        /* No memory at all. */
        given[f] = open("/dev/null", O_RDWR | O_CLOEXEC);
        refused(1, COX_DENIED, words[f]);
        close(given[f]);
        char path[] = "/tmp/cox_sealed_XXXXXX";
        given[f] = mkstemp(path);
        refused(1, COX_DENIED, words[f]);
        close(given[f]);
        unlink(path);
        given[f] = -1;
        refused(1, -EBADF, words[f]);
        given[f] = whole;
    }
}

SEALED_TEST(b16_attach_refuses_memory_of_another_size)
{
    cox_sealed_hand_out(&sealed, 1, given);
    for (int f = 0; f < COX_SEALED_FD_COUNT; f++) {
        int whole = given[f];
        unsigned seals = f == COX_SEALED_REQUEST ? all_seals : F_SEAL_SHRINK | F_SEAL_GROW;
        uint64_t size = region_of((enum cox_sealed_fd)f)->size;
        const uint64_t cuts[] = {1, PAGE, size - 1, size};
        for (size_t i = 0; i < sizeof cuts / sizeof cuts[0]; i++) {
            given[f] = forged(region_of((enum cox_sealed_fd)f), cuts[i], seals);
            refused(1, COX_CORRUPT, "bytes");
            close(given[f]);
        }
        given[f] = whole;
    }
    /* Another's memory in the wrong place. */
    int swapped = given[COX_SEALED_REQUEST];
    given[COX_SEALED_REQUEST] = given[COX_SEALED_RANK];
    refused(1, COX_DENIED, "request memory");
    given[COX_SEALED_REQUEST] = swapped;
    accepted(1);
}

struct change {
    size_t offset;
    uint32_t value;
    int code;
    const char *part;
};

SEALED_TEST(a4_attach_refuses_another_header)
{
    const struct change changes[] = {
        {offsetof(struct cox_layout_header, magic), 0, COX_CORRUPT, "magic"},
        {offsetof(struct cox_layout_header, version), COX_LAYOUT_VERSION + 1, COX_VERSION,
         "version 2"},
        {offsetof(struct cox_layout_header, abi), 0x04030201, COX_VERSION, "byte order"},
        {offsetof(struct cox_layout_header, size), 4096, COX_CORRUPT, "bytes"},
        {offsetof(struct cox_layout_header, rank_count), 0, COX_CORRUPT, "ranks"},
        {offsetof(struct cox_layout_header, rank_count), 1u << 31, COX_CORRUPT, "ranks"},
        {offsetof(struct cox_layout_header, depth), COX_DEPTH_MAX + 1, COX_CORRUPT, "depth"},
        {offsetof(struct cox_layout_header, depth), 0, COX_CORRUPT, "depth"},
        {offsetof(struct cox_layout_header, flags), 0, COX_CORRUPT, ""},
        {offsetof(struct cox_layout_header, flags), COX_LAYOUT_SEALED | COX_LAYOUT_LEGACY,
         COX_CORRUPT, "named attach"},
        {offsetof(struct cox_layout_header, channels), 1u << 30, COX_CORRUPT, ""},
        {offsetof(struct cox_layout_header, channels) + 8, 64, COX_CORRUPT, "response region"},
        {offsetof(struct cox_layout_header, channels) + 16, 64, COX_CORRUPT, ""},
        {offsetof(struct cox_layout_header, channels) + 24, 4160, COX_CORRUPT, ""},
    };
    cox_sealed_hand_out(&sealed, 1, given);
    int whole = given[COX_SEALED_REQUEST];
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
        uint8_t *at = (uint8_t *)control.region.base + changes[i].offset;
        uint32_t before;
        memcpy(&before, at, sizeof before);
        memcpy(at, &changes[i].value, sizeof before);
        given[COX_SEALED_REQUEST] = forged(&control.region, 0, all_seals);
        memcpy(at, &before, sizeof before);
        refused(1, changes[i].code, changes[i].part);
        close(given[COX_SEALED_REQUEST]);
    }
    given[COX_SEALED_REQUEST] = whole;
    refused(RANK_COUNT, COX_INVALID, "rank 3 of a group of 3");
    refused(UINT32_MAX, COX_INVALID, "of a group of 3");
    accepted(RANK_COUNT - 1);
}

static void change_modes(void *context)
{
    (void)context;
    for (int f = 0; f < COX_SEALED_FD_COUNT; f++)
        CHECK(fchmod(given[f], f % 2 ? 0 : 0644) == 0);
}

SEALED_TEST(p10_a_rank_that_changes_modes_keeps_no_other_out)
{
    cox_sealed_hand_out(&sealed, 0, given);
    child_run(change_modes, NULL);
    for (uint32_t rank = 0; rank < RANK_COUNT; rank++) {
        cox_sealed_hand_out(&sealed, rank, given);
        accepted(rank);
    }
}

/* ---- both sides ---- */

struct ghost {
    /* pipes */
    int begin[2], end[2];
};

/* The others cannot write what a rank writes in the rank group: neither its receivers, nor the
 * coordinator, nor another part of the rank. */
static void attack_group(int fd, uint64_t size)
{
    refuse_changes(fd, size);
    for (int flags = O_WRONLY; flags <= O_RDWR; flags++) {
        int again = test_reopen(fd, flags);
        if (again < 0)
            continue; /* as good */
        refuse_writes(again);
        refuse_sizes(again);
        CHECK(!can_mmap(again, size, PROT_WRITE));
        close(again);
    }
    void *map = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
    CHECK(map != MAP_FAILED);
    refuse_mapping(map, size);
}

static void write_group(void *context)
{
    static const char text[] = "mine";
    struct ghost *ghost = context;
    cox_control_close(&control);
    CHECK(attach(1, NULL) == 0);
    for (int i = 0; i < COX_ATTACH_MEMBER_FD_COUNT; i++) {
        memcpy(own.group[i].base, text, sizeof text);
        attack_group(given[COX_SEALED_GROUP + i], own.group[i].size);
        /* Not even a hole by a process that may write. */
        REFUSED(madvise(own.group[i].base, own.group[i].size, MADV_REMOVE));
        CHECK(memcmp(own.group[i].base, text, sizeof text) == 0);
    }
    tell(ghost->begin[1]);
    CHECK(heard(ghost->end[0]));
    for (int i = 0; i < COX_ATTACH_MEMBER_FD_COUNT; i++)
        CHECK(memcmp(own.group[i].base, text, sizeof text) == 0);
}

static void attack_another_s_group(void *context)
{
    (void)context;
    cox_control_close(&control);
    cox_sealed_close(&sealed);
    for (int i = 0; i < COX_ATTACH_MEMBER_FD_COUNT; i++)
        attack_group(given[COX_SEALED_GROUP + i], size_of(given[COX_SEALED_GROUP + i]));
}

SEALED_TEST(b16_p10_no_rank_writes_another_ranks_words_in_the_rank_group)
{
    struct ghost ghost;
    cox_sealed_hand_out(&sealed, 1, given);
    for (int i = 0; i < COX_ATTACH_MEMBER_FD_COUNT; i++) {
        uint64_t size = size_of(given[COX_SEALED_GROUP + i]);
        /* Before its rank has it, it is given to no other process. */
        assert_int_equal(cox_sealed_check_group(given[COX_SEALED_GROUP + i], size, "it", NULL),
                         COX_DENIED);
    }
    assert_int_equal(pipe2(ghost.begin, O_CLOEXEC) | pipe2(ghost.end, O_CLOEXEC), 0);
    pid_t pid = child_start(write_group, &ghost);
    cox_close_fd(&ghost.begin[1]); /* one that fails is heard to end */
    assert_true(heard(ghost.begin[0]));
    for (int i = 0; i < COX_SEALED_FD_COUNT; i++)
        given[i] = dup(given[i]); /* the child closes what is the coordinator's */
    for (int i = 0; i < COX_ATTACH_MEMBER_FD_COUNT; i++) {
        int fd = given[COX_SEALED_GROUP + i];
        assert_int_equal(cox_sealed_check_group(fd, size_of(fd), "it", NULL), 0);
        assert_int_equal(cox_sealed_check_group(fd, size_of(fd) + PAGE, "it", NULL), COX_CORRUPT);
    }
    child_run(attack_another_s_group, NULL);
    tell(ghost.end[1]);
    child_join(pid);
    for (int i = 0; i < COX_SEALED_FD_COUNT; i++)
        close(given[i]);
    for (int i = 0; i < 2; i++) {
        cox_close_fd(&ghost.begin[i]);
        cox_close_fd(&ghost.end[i]);
    }
}

static void serve_rank(void *context)
{
    const uint32_t rank = *(const uint32_t *)context;
    cox_control_close(&control);
    CHECK(attach(rank, NULL) == 0);
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
        struct cox_channel channel = {0};
        struct cox_request request;
        size_t capacity;
        cox_channel_bind(&channel, &own, &seen, (enum cox_channel_id)c, false);
        CHECK(cox_request_read(&channel, 1, rank, &request) == 0);
        uint8_t *slot = cox_reply_slot(&channel, rank, 1, false, &capacity);
        CHECK(capacity >= request.size);
        memcpy(slot, request.bytes, request.size);
        slot[0] = (uint8_t)('0' + rank);
        struct cox_layout_rank_line *line = cox_state_line(&seen, rank, channel.id);
        cox_state_set_incarnation(line, seen.group_incarnation, 1);
        cox_reply_commit(&channel, rank, 1, request.size, false);
        cox_state_set_done(line, 1);
        cox_channel_close(&channel);
    }
    cox_sealed_close(&own);
    cox_control_close(&seen);
}

SEALED_TEST(a14_a18_requests_and_replies_pass_without_a_socket)
{
    struct cox_channel channels[COX_TWO_WAY_COUNT];
    const struct cox_rank_set everybody = {{7}};
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
        char text[32];
        size_t capacity;
        cox_channel_bind(&channels[c], &sealed, &control, (enum cox_channel_id)c, true);
        snprintf(text, sizeof text, "?%s", cox_channel_name((enum cox_channel_id)c));
        memcpy(cox_request_frame(&channels[c], 1, &capacity), text, strlen(text));
        cox_request_publish(&channels[c], 1, 7, strlen(text), &everybody);
    }
    for (uint32_t rank = 0; rank < RANK_COUNT; rank++) {
        cox_sealed_hand_out(&sealed, rank, given);
        child_run(serve_rank, &rank);
    }
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
        for (uint32_t rank = 0; rank < RANK_COUNT; rank++) {
            char bytes[64], expected[32];
            size_t length;
            bool failed;
            assert_int_equal(cox_state_done(cox_state_line(&control, rank, (enum cox_channel_id)c)),
                             1);
            assert_ok(cox_reply_fetch(&channels[c], rank, 1, false, 1, bytes, sizeof bytes, &length,
                                      &failed, test_err()));
            bytes[length] = '\0';
            snprintf(expected, sizeof expected, "%" PRIu32 "%s", rank,
                     cox_channel_name((enum cox_channel_id)c));
            assert_string_equal(bytes, expected);
        }
        cox_channel_close(&channels[c]);
    }
}

/* ---- the next incarnation of a rank ---- */

static void haunt(void *context)
{
    struct ghost *ghost = context;
    CHECK(attach(1, NULL) == 0);
    tell(ghost->begin[1]);
    CHECK(heard(ghost->end[0]));
    memset(own.ranks[1].base, 0x66, own.ranks[1].size);
    CHECK(pwrite(given[COX_SEALED_RANK], "ghost", 5, 0) == 5);
}

SEALED_TEST(p8_p10_what_the_last_process_of_a_rank_writes_lands_nowhere)
{
    struct ghost ghost;
    cox_sealed_hand_out(&sealed, 1, given);
    assert_int_equal(pipe2(ghost.begin, O_CLOEXEC) | pipe2(ghost.end, O_CLOEXEC), 0);
    /* A copy: with the number alone the child would have that of the next incarnation. */
    pid_t pid = child_start(haunt, &ghost);
    cox_close_fd(&ghost.begin[1]); /* one that fails is heard to end */
    assert_true(heard(ghost.begin[0]));
    memset(sealed.ranks[1].base, 0x11, sealed.ranks[1].size);
    ino_t before = inode(sealed.rank_fds[1]);
    void *base = sealed.ranks[1].base;
    int number = sealed.rank_fds[1], fds = fd_count();
    assert_int_equal(cox_sealed_renew_rank(&sealed, &control.geometry, 1, NULL), 0);
    assert_ptr_equal(sealed.ranks[1].base, base);
    assert_ptr_equal(control.ranks[1], base);
    assert_int_equal(sealed.rank_fds[1], number);
    assert_int_equal(fcntl(number, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    assert_int_equal(fd_count(), fds);
    assert_int_not_equal(inode(sealed.rank_fds[1]), before);
    assert_int_equal(sum_of(&sealed.ranks[1]), 0);
    tell(ghost.end[1]);
    child_join(pid);
    assert_int_equal(sum_of(&sealed.ranks[1]), 0);
    /* The next one gets what the coordinator sees. */
    cox_sealed_hand_out(&sealed, 1, given);
    assert_int_equal(attach(1, NULL), 0);
    memset(own.ranks[1].base, 2, own.ranks[1].size);
    assert_int_equal(sum_of(&sealed.ranks[1]), 2 * sealed.ranks[1].size);
    cox_sealed_close(&own);
    cox_control_close(&seen);
    for (int i = 0; i < 2; i++) {
        cox_close_fd(&ghost.begin[i]);
        cox_close_fd(&ghost.end[i]);
    }
}

/* Sizes that are whole huge pages do not make it one. */
LEAK_TEST(p8_a_rank_is_renewed_whatever_its_size)
{
    struct cox_geometry geometry = {0};
    /* Its block, 8 slots of each size and the error slot make 4 MiB. */
    for (uint64_t stride = 64 << 10; stride < 1 << 20; stride += 64) {
        geometry = geometry_make(8192, stride * 2 * RANK_COUNT);
        if (cox_geometry_rank_memory_size(&geometry) % HUGE == 0)
            break;
    }
    assert_int_equal(cox_geometry_rank_memory_size(&geometry) % HUGE, 0);
    assert_int_equal(cox_sealed_create(&sealed, &control, &geometry, true, NULL), 0);
    for (int i = 0; i < 3; i++) {
        memset(sealed.ranks[2].base, 1, sealed.ranks[2].size);
        assert_int_equal(cox_sealed_renew_rank(&sealed, &geometry, 2, NULL), 0);
        assert_int_equal(sum_of(&sealed.ranks[2]), 0);
    }
    gone();
}

/* ---- sizes, lines, pages ---- */

LEAK_TEST(a20_sizes_are_whole_pages)
{
    for (uint64_t request = 1024; request < 20000; request += 4999) {
        struct cox_geometry geometry = geometry_make(request, 12289 + request);
        assert_int_equal(cox_geometry_request_memory_size(&geometry) % PAGE, 0);
        assert_int_equal(cox_geometry_rank_memory_size(&geometry) % PAGE, 0);
        assert_int_equal(cox_geometry_group_size(&geometry) % PAGE, 0);
        for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
            uint64_t at = cox_geometry_request_offset(&geometry, (enum cox_channel_id)c);
            uint64_t next = cox_geometry_request_offset(&geometry, (enum cox_channel_id)(c + 1));
            assert_int_equal(at % PAGE, 0);
            assert_true(next >= at + geometry.channels[c].request_size);
        }
        /* The slots of a rank lie apart, in their order, and within its memory. */
        uint64_t end = sizeof(struct cox_layout_rank);
        for (int c = 0; c < COX_CHANNEL_COUNT; c++)
            for (uint64_t s = 0; s < (c == COX_CHANNEL_ERROR ? 1 : geometry.depth); s++) {
                uint64_t at = cox_geometry_slot_offset(&geometry, (enum cox_channel_id)c, 1, s);
                assert_true(at >= end && at % 64 == 0);
                end = at + geometry.channels[c].slot_stride;
            }
        assert_true(end <= cox_geometry_rank_memory_size(&geometry));
    }
}

/* Words of different writers, and words slept on, have a line each; the request memory has none
 * that a rank writes. */
SEALED_TEST(b12_no_two_words_that_are_written_apart_share_a_line)
{
    uintptr_t lines[512];
    size_t count = 0;
    const struct cox_layout_reports *reports = cox_sealed_reports(&control);
    lines[count++] = (uintptr_t)&control.layout->abort;
    for (int c = 0; c < COX_CHANNEL_COUNT; c++) {
        const struct cox_layout_wake_channel *wake =
            cox_sealed_wake(&sealed, (enum cox_channel_id)c);
        lines[count++] = (uintptr_t)&wake->wakeup;
        lines[count++] = (uintptr_t)&wake->ranks_wakeup;
        for (int h = 0; h < COX_DEPTH_MAX; h++)
            lines[count++] = (uintptr_t)&wake->hints[h];
        for (uint32_t rank = 0; rank < RANK_COUNT; rank++)
            lines[count++] = (uintptr_t)cox_state_line(&control, rank, (enum cox_channel_id)c);
        if (c < COX_TWO_WAY_COUNT) {
            lines[count++] = (uintptr_t)cox_state_channel(&control, (enum cox_channel_id)c);
        }
    }
    lines[count++] = (uintptr_t)reports->fetched;
    for (uint32_t rank = 0; rank < RANK_COUNT; rank++)
        lines[count++] = (uintptr_t)&control.ranks[rank]->identity;
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(lines[i] % COX_LINE_SIZE, 0);
        for (size_t j = 0; j < i; j++)
            assert_int_not_equal(lines[i], lines[j]);
    }
    assert_true((uintptr_t)(reports + 1) - (uintptr_t)control.region.base <= COX_SEALED_HEAD);
}

static long huge_pages(const char *what)
{
    char path[128];
    long count = -1;
    snprintf(path, sizeof path, "/sys/kernel/mm/hugepages/hugepages-2048kB/%s", what);
    FILE *file = fopen(path, "re");
    if (!file)
        return -1;
    if (fscanf(file, "%ld", &count) != 1)
        count = -1;
    fclose(file);
    return count;
}

static bool reserve_huge_pages(long count)
{
    FILE *file = fopen("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "we");
    bool written = file && fprintf(file, "%ld", count) > 0;
    return file && fclose(file) == 0 && written;
}

static long block_size(int fd)
{
    struct stat st;
    assert_int_equal(fstat(fd, &st), 0);
    return (long)st.st_blksize;
}

LEAK_TEST(a19_without_huge_pages_normal_ones_do)
{
    created(true);
    /* Whatever this machine has: it works, and the ranks' own are never huge. */
    cox_sealed_hand_out(&sealed, 1, given);
    accepted(1);
    if (huge_pages("free_hugepages") == 0)
        assert_int_equal(block_size(sealed.request_fd), PAGE);
    for (uint32_t rank = 0; rank < RANK_COUNT; rank++)
        assert_int_equal(block_size(sealed.rank_fds[rank]), PAGE);
    gone();
}

static long huge_before = -1; /* how many this machine keeps */

/* Also after a failure. */
static int huge_teardown(void **state)
{
    long before = huge_before;
    huge_before = -1;
    return (before >= 0 && !reserve_huge_pages(before)) | leak_teardown(state);
}

TEST_WITH(a19_b16_huge_pages_are_used_where_no_rank_can_punch_holes, leak_setup, huge_teardown)
{
    huge_before = huge_pages("nr_hugepages");
    if (huge_before < 0 || !reserve_huge_pages(huge_before + 2)) {
        huge_before = -1;
        skip();
        return;
    }
    bool there = huge_pages("free_hugepages") > 0;
    created(true);
    long size = block_size(sealed.request_fd);
    uint64_t bytes = control.region.size;
    for (uint32_t rank = 0; rank < RANK_COUNT; rank++)
        assert_int_equal(block_size(sealed.rank_fds[rank]), PAGE);
    cox_sealed_hand_out(&sealed, 2, given);
    accepted(2);
    gone();
    if (size == HUGE)
        requests_stay(true);
    if (!there && size != HUGE) { /* another process has taken them, or none could be made */
        skip();
        return;
    }
    assert_int_equal(size, HUGE);
    assert_int_equal(bytes, HUGE);
}

/* ---- the error channel's slots ---- */

static void await_number(void *context)
{
    const uint64_t number = *(const uint64_t *)context;
    CHECK(attach(1, NULL) == 0);
    CHECK(cox_sealed_await_heard(&seen, 1, number, cox_deadline_after_ms(60000)) == 0);
}

SEALED_TEST(a27_a_slot_is_its_rank_s_again_once_its_report_was_taken_out)
{
    cox_sealed_hand_out(&sealed, 1, given);
    /* The first finds it free; numbers go round in 32 bits. */
    static const uint64_t numbers[] = {
        1, 2, 3, UINT32_MAX, UINT64_C(1) << 32, (UINT64_C(1) << 32) + 1, (UINT64_C(1) << 40) + 7};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        const uint64_t number = numbers[i];
        if (number > 1) {
            cox_sealed_set_heard(&control, 1, number - 2);
            cox_sealed_set_heard(&control, 0, number); /* another's */
            assert_int_equal(cox_sealed_await_heard(&control, 1, number, cox_deadline_after_ms(1)),
                             COX_TIMEOUT);
            fresh(1);
            pid_t pid = child_start(await_number, (void *)(uintptr_t)&numbers[i]);
            child_asleep(pid);
            cox_sealed_set_heard(&control, 1, number - 1);
            child_join(pid);
        }
        assert_int_equal(cox_sealed_await_heard(&control, 1, number, 0), 0);
    }
}
