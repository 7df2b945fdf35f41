/* fds through the rank group, by handles and by sockets; every rank a process. */
#include "channel/base/fault.h"
#include "channel/base/peer.h"
#include "channel/handle/handle_internal.h"
#include "channel/socket/socket.h"
#include "tests/lib/rights.h"
#include "worker/group/group_private.h"
#include "rank_group.h"

#include <grp.h>
#include <sys/mount.h>

/* How pidfd_getfd replies in a rank. */
struct way {
    /* 0: as it does */
    int error;
    /* bits: in which */
    uint32_t ranks;
    /* 0: as it is; and a plain user */
    uint32_t file_limit;
    /* pidfd_open replies so as well */
    bool no_pidfds;
};

static const struct way by_handles = {.error = 0};
static const struct way by_sockets = {EPERM, .ranks = UINT32_MAX};
static const struct way by_old_kernel = {ENOSYS, .ranks = UINT32_MAX};
static const struct way denied_to_one = {EPERM, .ranks = 4};
static const struct way by_start_time = {ENOSYS, .ranks = UINT32_MAX, .no_pidfds = true};
static const struct way by_seccomp = {EPERM, .ranks = UINT32_MAX, .no_pidfds = true};
static const struct way without_to_one = {ENOSYS, .ranks = 2, .no_pidfds = true};

static void way_take(const struct forks_self *self, const struct way *way)
{
    if (way->file_limit) {
        const struct rlimit limit = {way->file_limit, way->file_limit};
        FORK_CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0, "limit");
        if (test_can_switch_user())
            FORK_CHECK(setgroups(0, NULL) == 0 && setgid(65534) == 0 && setuid(65534) == 0, "user");
        /* After a change of user, no other process may inspect it. */
        FORK_CHECK(prctl(PR_SET_DUMPABLE, way->error == 0) == 0, "dumpable");
    }
    if (!way->error || !(way->ranks >> (self->rank % 32) & 1))
        return;
    rank_group_deny(self, SYS_pidfd_getfd, SECCOMP_RET_ERRNO | (uint32_t)way->error);
    if (way->no_pidfds)
        rank_group_deny(self, SYS_pidfd_open, SECCOMP_RET_ERRNO | (uint32_t)way->error);
}

/* A file that says whose it is. */
static int own_file(const struct forks_self *self, uint32_t salt)
{
    uint32_t words[2] = {self->rank, salt};
    int fd = memfd_create("own", MFD_CLOEXEC);
    FORK_CHECK(fd >= 0 && pwrite(fd, words, sizeof words, 0) == (ssize_t)sizeof words, "memfd");
    return fd;
}

static void check_file(const struct forks_self *self, int fd, uint32_t rank, uint32_t salt)
{
    uint32_t words[2] = {0};
    FORK_CHECK(fd > 2, "fd %d", fd);
    FORK_CHECK(fcntl(fd, F_GETFD) == FD_CLOEXEC, "close-on-exec");
    FORK_CHECK(pread(fd, words, sizeof words, 0) == (ssize_t)sizeof words, "pread");
    FORK_CHECK(words[0] == rank && words[1] == salt,
               "the file of rank %" PRIu32 ", %" PRIu32 ", not of %" PRIu32 ", %" PRIu32, words[0],
               words[1], rank, salt);
}

static void gather_main(const struct forks_self *self)
{
    way_take(self, self->context);
    struct cox_group *group = rank_group_join(self);
    size_t before = test_count_fds();
    uint32_t rounds = self->rank_count > 16 ? 3 : 30;
    for (uint32_t i = 0; i < rounds; i++) {
        int fds[FORKS_MAX], fd = own_file(self, i);
        bool consume = i % 2;
        FORK_OK(cox_group_gather_fds(group, fd, consume ? COX_GROUP_FD_CONSUME : COX_GROUP_FD_KEEP,
                                     fds, rank_group_patience(), test_err()));
        FORK_CHECK(fds[self->rank] == -1, "own entry");
        for (uint32_t rank = 0; rank < self->rank_count; rank++) {
            if (rank == self->rank)
                continue;
            check_file(self, fds[rank], rank, i);
            close(fds[rank]);
        }
        if (!consume)
            FORK_CHECK(close(fd) == 0, "kept");
        FORK_CHECK(test_count_fds() == before, "%zu fds, now %zu", before, test_count_fds());
    }
    rank_group_leave(self, group);
}

TEST(k10_k11_k15_k16_an_fd_of_each)
{
    static const uint32_t worlds[] = {1, 2, 4, 8, 64};
    for (size_t i = 0; i < 5; i++)
        forks_run(worlds[i], gather_main, (void *)(uintptr_t)&by_handles);
}

TEST(k10_b27_an_fd_of_each_by_sockets)
{
    static const uint32_t worlds[] = {1, 2, 4, 8, 32};
    for (size_t i = 0; i < 5; i++)
        forks_run(worlds[i], gather_main, (void *)(uintptr_t)&by_sockets);
    forks_run(3, gather_main, (void *)(uintptr_t)&by_old_kernel);
    forks_run(4, gather_main, (void *)(uintptr_t)&denied_to_one);
}

TEST(k10_b27_an_fd_of_each_where_there_are_no_pidfds)
{
    forks_run(1, gather_main, (void *)(uintptr_t)&by_start_time);
    forks_run(3, gather_main, (void *)(uintptr_t)&by_start_time);
    forks_run(8, gather_main, (void *)(uintptr_t)&by_seccomp);
    forks_run(4, gather_main, (void *)(uintptr_t)&without_to_one);
}

TEST(k10_k25_b11_largest_world_and_usual_limits)
{
    static const struct way plain = {.file_limit = 1024},
                            plain_sockets = {EPERM, UINT32_MAX, .file_limit = 1024};
    forks_run(COX_RANK_COUNT_MAX, gather_main, (void *)(uintptr_t)&plain);
    forks_run(COX_RANK_COUNT_MAX, gather_main, (void *)(uintptr_t)&plain_sockets);
}

/* ---- from one ---- */

static void broadcast_main(const struct forks_self *self)
{
    way_take(self, self->context);
    struct cox_group *group = rank_group_join(self);
    size_t before = test_count_fds();
    for (uint32_t source = 0; source < self->rank_count; source++) {
        bool gives = source == self->rank;
        int got = -7, fd = gives ? own_file(self, 9) : -1;
        FORK_OK(cox_group_broadcast_fd(group, source, fd, COX_GROUP_FD_CONSUME,
                                       gives && source % 2 ? NULL : &got, rank_group_patience(),
                                       test_err()));
        if (!gives) {
            check_file(self, got, source, 9);
            close(got);
        }
        FORK_CHECK(test_count_fds() == before, "%zu fds, now %zu", before, test_count_fds());
    }
    rank_group_leave(self, group);
}

TEST(k13_from_any_source)
{
    static const uint32_t worlds[] = {1, 2, 5};
    for (size_t i = 0; i < 3; i++) {
        forks_run(worlds[i], broadcast_main, (void *)(uintptr_t)&by_handles);
        forks_run(worlds[i], broadcast_main, (void *)(uintptr_t)&by_sockets);
    }
}

static void subgroup_main(const struct forks_self *self)
{
    way_take(self, self->context);
    struct cox_group *group = rank_group_join(self), *part = NULL;
    struct cox_rank_set members = {{self->rank % 2 ? 0xaa : 0x55}};
    int fds[4], fd = own_file(self, 1), got = -1;
    FORK_CHECK(cox_group_subgroup(group, "part", &members, &part, NULL) == 0, "subgroup");
    FORK_OK(
        cox_group_gather_fds(part, fd, COX_GROUP_FD_KEEP, fds, rank_group_patience(), test_err()));
    for (uint32_t place = 0; place < 4; place++) {
        if (place != self->rank / 2)
            check_file(self, fds[place], 2 * place + self->rank % 2, 1);
        cox_close_fd(&fds[place]);
    }
    bool gives = self->rank / 2 == 3;
    FORK_OK(cox_group_broadcast_fd(part, 3, gives ? fd : -1, COX_GROUP_FD_KEEP, &got,
                                   rank_group_patience(), test_err()));
    if (!gives)
        check_file(self, got, 6 + self->rank % 2, 1);
    rank_group_leave(self, group);
}

TEST(k6_k10_in_subgroups)
{
    forks_run(8, subgroup_main, (void *)(uintptr_t)&by_handles);
    forks_run(8, subgroup_main, (void *)(uintptr_t)&by_sockets);
}

/* ---- what is refused ---- */

RANKS_TEST(k12_k14_b8_refused_before_it_blocks, 3, NULL)
{
    struct cox_group *group = rank_group_join(self);
    int fds[3] = {-5, -5, -5}, fd = own_file(self, 0), closed = dup(fd);
    close(closed);
    bool first = self->rank == 0;
    FORK_CHECK(cox_group_gather_fds(group, fd, COX_GROUP_FD_CONSUME, NULL, 0, NULL) == COX_INVALID,
               "no place");
    FORK_CHECK(cox_group_gather_fds(group, -1, COX_GROUP_FD_CONSUME, fds, 0, NULL) == COX_INVALID,
               "no fd");
    FORK_CHECK(cox_group_gather_fds(group, closed, COX_GROUP_FD_KEEP, fds, 0, NULL) == COX_INVALID,
               "closed");
    FORK_CHECK(cox_group_broadcast_fd(group, 3, fd, COX_GROUP_FD_KEEP, fds, 0, NULL) == COX_INVALID,
               "source");
    FORK_CHECK(cox_group_broadcast_fd(group, 0, first ? -1 : fd, COX_GROUP_FD_KEEP, fds, 0, NULL) ==
                   COX_INVALID,
               "a source without, or a receiver with one");
    if (!first)
        FORK_CHECK(cox_group_broadcast_fd(group, 0, -1, COX_GROUP_FD_KEEP, NULL, 0, NULL) ==
                       COX_INVALID,
                   "no place");
    FORK_CHECK(fds[0] == -5 && fcntl(fd, F_GETFD) >= 0, "nothing happened");
    /* Different sources. */
    int r = cox_group_broadcast_fd(group, first ? 0 : 1, self->rank < 2 ? fd : -1,
                                   COX_GROUP_FD_CONSUME, fds, rank_group_patience(), NULL);
    FORK_CHECK(r == COX_CORRUPT || r == COX_ABORTED, "%d", r);
    FORK_CHECK(fds[0] == -5 && fcntl(fd, F_GETFD) >= 0, "after a failure it is the caller's");
    FORK_CHECK(cox_group_align(group, 1) == 0, "align");
    rank_group_barrier(self, group);
    rank_group_leave(self, group);
}

struct room {
    const struct way *way;
    /* fds that the rank has left */
    uint32_t free;
    bool broadcasts;
};

/* The fds of rank 2, of which so many are left free. */
struct hoard {
    struct rlimit old;
    int fds[64];
    size_t count;
};

static void hoard_take(const struct forks_self *self, struct hoard *hoard, int fd, uint32_t left)
{
    hoard->count = 0;
    if (self->rank != 2)
        return;
    getrlimit(RLIMIT_NOFILE, &hoard->old);
    const struct rlimit less = {64, hoard->old.rlim_max};
    setrlimit(RLIMIT_NOFILE, &less);
    while (hoard->count < 64 && (hoard->fds[hoard->count] = dup(fd)) >= 0)
        hoard->count++;
    for (uint32_t i = 0; i < left; i++)
        close(hoard->fds[--hoard->count]);
}

static void hoard_give(const struct forks_self *self, struct hoard *hoard)
{
    if (self->rank != 2)
        return;
    while (hoard->count)
        close(hoard->fds[--hoard->count]);
    setrlimit(RLIMIT_NOFILE, &hoard->old);
}

/* One rank's fd table is full: it gets the error, the others have their fds, and all stay in step.
 */
static void full_main(const struct forks_self *self)
{
    const struct room *room = self->context;
    way_take(self, room->way);
    struct cox_group *group = rank_group_join(self);
    int fds[4] = {-5, -5, -5, -5}, fd = own_file(self, 5);
    size_t before = test_count_fds();
    struct hoard hoard;
    hoard_take(self, &hoard, fd, room->free);
    int r = cox_group_gather_fds(group, fd, COX_GROUP_FD_CONSUME, fds, rank_group_patience(),
                                 test_err());
    if (self->rank == 2) {
        FORK_CHECK(r == -EMFILE && test_error.code == r, "%d %s", r, test_error.text);
        FORK_CHECK(fds[0] == -5 && fcntl(fd, F_GETFD) >= 0, "after a failure it is the caller's");
        hoard_give(self, &hoard);
        FORK_CHECK(test_count_fds() == before, "%zu fds, now %zu", before, test_count_fds());
    } else {
        FORK_CHECK(r == 0, "%d %s", r, test_error.text);
        check_file(self, fds[2], 2, 5);
    }
    rank_group_barrier(self, group);
    rank_group_leave(self, group);
}

TEST(b8_b15_only_the_rank_without_room_gets_the_error)
{
    if (!test_can_take_fds())
        skip();
    for (uint32_t room = 0; room < 3; room++)
        forks_run(4, full_main, &(struct room){&by_handles, room, false});
}

/* The same by sockets, when it has no fd for a socket to send or listen with: all get the reason,
 * in step. */
static void no_socket_main(const struct forks_self *self)
{
    const struct room *room = self->context;
    way_take(self, room->way);
    struct cox_group *group = rank_group_join(self);
    int fds[4] = {-5, -5, -5, -5}, fd = own_file(self, 6);
    size_t before = test_count_fds();
    struct hoard hoard;
    hoard_take(self, &hoard, fd, room->free);
    int r = room->broadcasts
                ? cox_group_broadcast_fd(group, 2, self->rank == 2 ? fd : -1, COX_GROUP_FD_CONSUME,
                                         fds, rank_group_patience(), test_err())
                : cox_group_gather_fds(group, fd, COX_GROUP_FD_CONSUME, fds, rank_group_patience(),
                                       test_err());
    hoard_give(self, &hoard);
    FORK_CHECK(r == -EMFILE && test_error.code == r, "%d %s", r, test_error.text);
    FORK_CHECK(self->rank == 2 || strstr(test_error.text, "rank 2 has not given its fd"), "%s",
               test_error.text);
    FORK_CHECK(fds[0] == -5 && fcntl(fd, F_GETFD) >= 0, "after a failure it is the caller's");
    FORK_CHECK(test_count_fds() == before, "%zu fds, now %zu", before, test_count_fds());
    rank_group_barrier(self, group); /* in step */
    r = cox_group_gather_fds(group, fd, COX_GROUP_FD_KEEP, fds, rank_group_patience(), test_err());
    FORK_CHECK(r == 0, "with room again: %d %s", r, test_error.text);
    for (uint32_t rank = 0; rank < 4; rank++) {
        if (rank != self->rank)
            check_file(self, fds[rank], rank, 6);
        cox_close_fd(&fds[rank]);
    }
    rank_group_leave(self, group);
}

TEST(b8_b15_b18_a_rank_without_a_socket_delays_no_other)
{
    struct room rooms[] = {{&by_sockets, 0, false},    {&by_sockets, 1, false},
                           {&by_sockets, 0, true},     {&by_sockets, 1, true},
                           {&denied_to_one, 1, false}, {&by_seccomp, 1, false}};
    for (size_t i = 0; i < sizeof rooms / sizeof rooms[0]; i++)
        forks_run(4, no_socket_main, &rooms[i]);
}

/* As in a service of systemd with ProcSubset=pid. */
static bool proc_has_processes_alone(void)
{
    return unshare(CLONE_NEWNS) == 0 && mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
           mount("proc", "/proc", "proc", 0, "subset=pid") == 0 && access("/proc/sys", F_OK) < 0;
}

/* The content of a handle cannot be read there: that affects operations that need one. */
static void no_handles_main(const struct forks_self *self)
{
    _Atomic bool *possible = self->context;
    if (!proc_has_processes_alone())
        return;
    atomic_store(possible, true);
    struct cox_group *group = rank_group_join(self);
    int fds[2] = {-5, -5}, fd = own_file(self, 1);
    uint32_t values[2] = {7, 7};
    int r = cox_group_gather_fds(group, fd, COX_GROUP_FD_CONSUME, fds, rank_group_patience(),
                                 test_err());
    FORK_CHECK(r == -ENOENT && test_error.code == r && strstr(test_error.text, "/proc"), "%d %s", r,
               test_error.text);
    FORK_CHECK(fds[0] == -5 && close(fd) == 0, "after a failure it is the caller's");
    rank_group_barrier(self, group); /* in step */
    r = cox_group_gather(group, &self->rank, sizeof self->rank, values, rank_group_patience(),
                         test_err());
    FORK_CHECK(r == 0 && values[0] == 0 && values[1] == 1, "%d %s", r, test_error.text);
    rank_group_leave(self, group);
}

TEST(k10_b8_a_proc_that_shows_processes_only_costs_only_fds)
{
    test_needs_processes();
    _Atomic bool *possible = forks_share(sizeof *possible);
    atomic_store(possible, false);
    forks_run(2, no_handles_main, (void *)(uintptr_t)possible);
    const bool was = atomic_load(possible);
    munmap((void *)(uintptr_t)possible, sizeof *possible);
    if (!was)
        skip();
}

/* ---- strangers ---- */

struct hunt {
    _Atomic uint32_t done;
    _Atomic uint64_t exchange;
};

/* At every abstract address of this machine that the kernel has chosen: "@", five digits. */
static void each_address(const struct forks_self *self,
                         void (*visit)(const struct forks_self *self, const char *five))
{
    char line[512];
    FILE *file = fopen("/proc/net/unix", "re");
    FORK_CHECK(file, "/proc/net/unix");
    while (fgets(line, sizeof line, file)) {
        const char *at = strchr(line, '@');
        if (at && strlen(at) == 7) /* and the newline */
            visit(self, at + 1);
    }
    fclose(file);
}

/* *ret_r is what connect returns. */
static int connection_to(const struct forks_self *self, const char *five, int *ret_r)
{
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    memcpy(to.sun_path + 1, five, 5);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    FORK_CHECK(fd >= 0, "socket");
    *ret_r = connect(fd, (const struct sockaddr *)&to, sizeof to.sun_family + 6);
    return fd;
}

static uint32_t reached;

/* As a member says it in this exchange: handles, opened, addresses, received. */
static void give_unasked(const struct forks_self *self, const char *five)
{
    static uint64_t tried;
    static int gift = -1;
    const struct hunt *hunt = self->context;
    const uint64_t tag[2] = {3 + 4 * atomic_load(&hunt->exchange), tried++ % 3};
    int r, fd = connection_to(self, five, &r);
    if (gift < 0)
        gift = memfd_create("gift", MFD_CLOEXEC);
    if (r == 0)
        reached += cox_socket_send(fd, tag, sizeof tag, &gift, 1, cox_now_ns()) == 0;
    close(fd);
}

/* A process that is no member sends fds to every abstract address of this machine. */
static void stranger_main(const struct forks_self *self)
{
    const struct hunt *hunt = self->context;
    while (atomic_load(&hunt->done) < 3)
        each_address(self, give_unasked);
    FORK_CHECK(reached > 0, "it met nobody");
}

static void hunted_main(const struct forks_self *self)
{
    struct hunt *hunt = self->context;
    struct forks_self three = *self;
    three.rank_count = 3;
    way_take(self, &by_sockets);
    struct cox_group *group = rank_group_join(&three);
    for (uint64_t i = 0; i < 500; i++) {
        int fds[3], fd = own_file(self, (uint32_t)i);
        if (self->rank == 0)
            atomic_store(&hunt->exchange, i);
        FORK_OK(cox_group_gather_fds(group, fd, COX_GROUP_FD_CONSUME, fds, rank_group_patience(),
                                     test_err()));
        for (uint32_t rank = 0; rank < 3; rank++) {
            if (rank != self->rank)
                check_file(self, fds[rank], rank, (uint32_t)i);
            cox_close_fd(&fds[rank]);
        }
    }
    rank_group_leave(self, group);
    atomic_fetch_add(&hunt->done, 1);
}

TEST(b28_b9_b7_strangers_are_refused)
{
    struct forks forks;
    struct hunt *hunt = forks_share(sizeof *hunt);
    forks_start(&forks, 3, hunted_main, hunt);
    forks_add(&forks, 3, 4, stranger_main, hunt);
    forks_wait(&forks);
}

/* ---- an odd member ---- */

/* As group_sockets.c says them. */
struct odd_address {
    uint32_t size;
    char bytes[28];
};
struct odd_tag {
    uint64_t round;
    uint32_t rank, reserved;
};
#define ODD_MEMBER 1

enum oddity {
    /* of no process, of others, of another exchange, without an fd, with two, half of one; the
     * right one last */
    ODD_TAGS,
    ODD_OBJECT, /* the right tag, with another object than it said */
    ODD_SILENT, /* nothing, and no word why */
    ODD_WORDS,  /* nothing, and no errno either */
    ODDITY_COUNT
};

static void odd_send(const struct forks_self *self, const struct odd_address *address,
                     const void *bytes, size_t size, const int *fds, uint32_t fd_count, bool owing)
{
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    FORK_CHECK(address->size > 0 && address->size <= sizeof address->bytes, "an address");
    memcpy(to.sun_path, address->bytes, address->size);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    FORK_CHECK(connect(fd, (const struct sockaddr *)&to,
                       (socklen_t)offsetof(struct sockaddr_un, sun_path) + address->size) == 0,
               "connect");
    int r = cox_socket_send(fd, bytes, size, fds, fd_count, rank_group_patience());
    /* A client that owes nothing is closed silently, maybe before it has sent anything. */
    FORK_CHECK(r == 0 || (r == COX_CLOSED && !owing), "send: %d", r);
    close(fd);
}

/* One exchange, said by hand; gives `right`. */
static void odd_exchange(const struct forks_self *self, struct cox_group *group, enum oddity oddity,
                         int right)
{
    struct cox_group_exchange exchange = {.group = group,
                                          .operation = COX_GROUP_GATHER_FDS,
                                          .source = COX_GROUP_ALL,
                                          .fd = right,
                                          .deadline_ns = rank_group_patience()};
    struct stat st;
    FORK_CHECK(fstat(right, &st) == 0, "fstat");
    const struct cox_handle_info info = {.kind = COX_HANDLE_MEMORY,
                                         .pid = (uint32_t)getpid(),
                                         .start = group->base->start,
                                         .system = group->base->system,
                                         .fd = (uint32_t)right,
                                         .dev = cox_handle_device_of(&st),
                                         .ino = st.st_ino,
                                         .size = (uint64_t)st.st_size};
    struct cox_handle own, handles[3];
    struct odd_address none = {.size = 0}, addresses[3];
    uint32_t by_socket = 0x55, hows[3];
    int32_t words = oddity == ODD_WORDS ? INT32_MIN : 0, unsent[3];
    cox_handle_format(&info, &own);
    int r = cox_group_stage(&exchange, COX_GROUP_STAGE_HANDLES, &own, sizeof own, handles, NULL);
    if (r == 0)
        r = cox_group_stage(&exchange, COX_GROUP_STAGE_OPENED, &by_socket, sizeof by_socket, hows,
                            NULL);
    if (r == 0)
        r = cox_group_stage(&exchange, COX_GROUP_STAGE_ADDRESSES, &none, sizeof none, addresses,
                            NULL);
    FORK_CHECK(r == 0, "%d", r);
    const uint64_t round = cox_group_arrived(cox_group_present(group->base), group->index);
    int gifts[2] = {own_file(self, 666), own_file(self, 667)};
#if COX_TESTING
    /* Rank 2 has sent nothing yet: what is said in its name is of one that owes. */
    pid_t other = group->base->peers[2].pid;
    AWAIT(!(oddity == ODD_TAGS && !cox_peer_stopped(other)));
#endif
    for (uint32_t rank = 0; rank < 3 && oddity <= ODD_OBJECT; rank++) {
        const struct odd_address *to = &addresses[rank];
        const struct odd_tag fine = {round, self->rank, 0};
        const struct odd_tag odd[] = {
            {round, 0, 0},
            {round, 2, 0},
            {round, 3, 0},
            {round, 63, 0},
            {round, 128, 0},
            {round, 200, 0},
            {round, UINT32_MAX, 0},
            {round, UINT32_MAX / 2, 0},
            {round + 1, self->rank, 0},
            {round - 1, self->rank, 0},
            {0, self->rank, 0},
            {~round, self->rank, 0},
        };
        if (rank == self->rank)
            continue;
        for (size_t i = 0; oddity == ODD_TAGS && i < sizeof odd / sizeof odd[0]; i++)
            odd_send(self, to, &odd[i], sizeof odd[i], gifts, 1, true);
        if (oddity == ODD_TAGS) {
            odd_send(self, to, &fine, sizeof fine, NULL, 0, true);
            odd_send(self, to, &fine, sizeof fine, gifts, 2, true);
            odd_send(self, to, &fine, sizeof fine - 1, gifts, 1, true);
        }
        odd_send(self, to, &fine, sizeof fine, oddity == ODD_TAGS ? &right : gifts, 1, true);
        odd_send(self, to, &fine, sizeof fine, gifts, 1, false); /* once more */
    }
    close(gifts[0]);
    close(gifts[1]);
#if COX_TESTING
    if (oddity == ODD_TAGS)
        FORK_CHECK(kill(other, SIGCONT) == 0, "SIGCONT");
#endif
    r = cox_group_stage(&exchange, COX_GROUP_STAGE_RECEIVED, &words, sizeof words, unsent, NULL);
    FORK_CHECK(r == 0, "%d", r);
}

RANKS_TEST(k15_b7_b14_an_odd_member_gives_nothing_but_its_own, 3, NULL)
{
    struct cox_group *group = rank_group_join(self);
    size_t before = test_count_fds();
#if COX_TESTING
    cox_fault_arm("group.done:stop:2:3"); /* with the round of the addresses */
#endif
    for (enum oddity oddity = ODD_TAGS; oddity < ODDITY_COUNT; oddity++) {
        int fds[3] = {-5, -5, -5}, fd = own_file(self, oddity);
        if (self->rank == ODD_MEMBER) {
            odd_exchange(self, group, oddity, fd);
        } else {
            int r = cox_group_gather_fds(group, fd, COX_GROUP_FD_KEEP, fds, rank_group_patience(),
                                         test_err());
            FORK_CHECK(r == (oddity == ODD_TAGS ? 0 : COX_CORRUPT), "%d: %d %s", oddity, r,
                       test_error.text);
            FORK_CHECK(r == 0 || strstr(test_error.text, "rank 1 "), "%s", test_error.text);
            for (uint32_t rank = 0; r == 0 && rank < 3; rank++)
                if (rank != self->rank)
                    check_file(self, fds[rank], rank, oddity);
            FORK_CHECK(r == 0 || fds[0] == -5, "unless it succeeds");
            for (uint32_t rank = 0; r == 0 && rank < 3; rank++)
                cox_close_fd(&fds[rank]);
        }
        close(fd);
        FORK_CHECK(test_count_fds() == before, "%zu fds, now %zu", before, test_count_fds());
        rank_group_barrier(self, group); /* in step */
    }
    rank_group_leave(self, group);
}

#if COX_TESTING
struct flood {
    _Atomic pid_t pids[3];
};

/* Fills the queue at an address with connections that are closed already. */
static void queue_fill(const struct forks_self *self, const char *five)
{
    for (int r = 0; r == 0;)
        close(connection_to(self, five, &r));
}

static void flooder_main(const struct forks_self *self)
{
    struct flood *flood = self->context;
    for (int i = 0; i < 3; i++)
        AWAIT(atomic_load(&flood->pids[i]) && cox_peer_stopped(atomic_load(&flood->pids[i])));
    each_address(self, queue_fill);
    for (int i = 0; i < 3; i++)
        FORK_CHECK(kill(atomic_load(&flood->pids[i]), SIGCONT) == 0, "SIGCONT");
}

static void flooded_main(const struct forks_self *self)
{
    struct flood *flood = self->context;
    struct forks_self three = *self;
    char text[64];
    three.rank_count = 3;
    way_take(self, &by_sockets);
    struct cox_group *group = rank_group_join(&three);
    int fds[3], fd = own_file(self, 5);
    cox_fault_rank((int)self->rank);
    snprintf(text, sizeof text, "group.bound:stop:%" PRIu32 ":1", self->rank);
    cox_fault_arm(text);
    atomic_store(&flood->pids[self->rank], getpid());
    FORK_OK(cox_group_gather_fds(group, fd, COX_GROUP_FD_CONSUME, fds, rank_group_patience(),
                                 test_err()));
    for (uint32_t rank = 0; rank < 3; rank++) {
        if (rank != self->rank)
            check_file(self, fds[rank], rank, 5);
        cox_close_fd(&fds[rank]);
    }
    rank_group_leave(self, group);
}

/* Every rank sends before it has looked at its own queue, and none finds a place in the next one's.
 */
TEST(b28_queues_full_of_strangers)
{
    struct forks forks;
    struct flood *flood = forks_share(sizeof *flood);
    forks_start(&forks, 3, flooded_main, flood);
    forks_add(&forks, 3, 4, flooder_main, flood);
    forks_wait(&forks);
}
#endif

/* ---- the user's scenario ---- */

/* As a kernel library sets up the memory of its devices: 64-byte handles by value, then memory by
 * fds, then one multicast object of rank 0, with a barrier before and after it is bound. */
static void devices_main(const struct forks_self *self)
{
    way_take(self, self->context);
    struct cox_group *group = rank_group_join(self);
    uint8_t handle[64], handles[8 * 64];
    memset(handle, (int)(0x40 + self->rank), sizeof handle);
    FORK_OK(
        cox_group_gather(group, handle, sizeof handle, handles, rank_group_patience(), test_err()));
    for (uint32_t rank = 0; rank < 8; rank++)
        FORK_CHECK(handles[64 * rank] == 0x40 + rank && handles[64 * rank + 63] == 0x40 + rank,
                   "handle");
    int memory = memfd_create("vmm", MFD_CLOEXEC), fds[8], multicast = -1;
    FORK_CHECK(ftruncate(memory, 4096) == 0, "size");
    uint32_t *own = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    FORK_OK(cox_group_gather_fds(group, memory, COX_GROUP_FD_CONSUME, fds, rank_group_patience(),
                                 test_err()));
    uint32_t *maps[8];
    for (uint32_t rank = 0; rank < 8; rank++) {
        maps[rank] = rank == self->rank
                         ? own
                         : mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fds[rank], 0);
        FORK_CHECK(maps[rank] != MAP_FAILED, "map");
        cox_close_fd(&fds[rank]);
        maps[rank][self->rank] = 1000 + self->rank;
    }
    int object = self->rank == 0 ? memfd_create("multicast", MFD_CLOEXEC) : -1;
    if (self->rank == 0)
        FORK_CHECK(ftruncate(object, 4096) == 0, "size");
    rank_group_barrier(self, group);
    for (uint32_t rank = 0; rank < 8; rank++)
        FORK_CHECK(own[rank] == 1000 + rank, "%" PRIu32 " in the place of %" PRIu32, own[rank],
                   rank);
    FORK_OK(cox_group_broadcast_fd(group, 0, object, COX_GROUP_FD_KEEP, &multicast,
                                   rank_group_patience(), test_err()));
    uint32_t *all = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED,
                         self->rank == 0 ? object : multicast, 0);
    FORK_CHECK(all != MAP_FAILED, "map");
    all[self->rank] = 7;
    rank_group_barrier(self, group);
    for (uint32_t rank = 0; rank < 8; rank++)
        FORK_CHECK(all[rank] == 7, "multicast");
    rank_group_leave(self, group);
}

TEST(k27_the_memory_of_devices)
{
    forks_run(8, devices_main, (void *)(uintptr_t)&by_handles);
    forks_run(8, devices_main, (void *)(uintptr_t)&by_sockets);
}
