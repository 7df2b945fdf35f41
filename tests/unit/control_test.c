#include "channel/attach/named/names.h"
#include "channel/attach/named/named_channel.h"
#include "channel/base/fault.h"
#include "channel/recorder/recorder_layout.h"
#include "channel/shm/channel.h"
#include "channel/shm/control.h"
#include "channel/shm/region.h"
#include "tests/lib/rights.h"
#include "channel_fixture.h"

#include <sys/file.h>

#define GROUP test_name("g")

static const char *control_path(void)
{
    static char path[COX_OBJECT_NAME_SIZE + 16];
    char object[COX_OBJECT_NAME_SIZE];
    snprintf(path, sizeof path, SHM "%s", cox_name_control(object, GROUP));
    return path;
}

static struct cox_geometry geometry_of(uint32_t rank_count)
{
    struct cox_geometry_choice choice = {.depth = 2};
    struct cox_geometry geometry;
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
        choice.request_size[c] = 8192;
        choice.response_size[c] = 65536;
    }
    assert_int_equal(cox_geometry_resolve(rank_count, &choice, &geometry, NULL), 0);
    return geometry;
}

static int create(struct cox_control *control, uint32_t rank_count, struct cox_error *err)
{
    struct cox_geometry geometry = geometry_of(rank_count);
    return cox_control_create(control, GROUP, &geometry, err);
}

static struct cox_control created(uint32_t rank_count)
{
    struct cox_control control = COX_CONTROL_NONE;
    assert_ok(create(&control, rank_count, test_err()));
    return control;
}

static void gone(struct cox_control *control)
{
    assert_int_equal(cox_control_unlink_names(GROUP, &control->geometry, 0), 1);
    assert_int_equal(cox_control_unlink_names(GROUP, &control->geometry, 0), 0);
    cox_control_close(control);
    assert_int_equal(control->lock_fd, -1);
    cox_control_close(control);
}

LEAK_TEST(what_was_created_is_what_is_attached)
{
    for (uint32_t ranks = 1; ranks <= COX_RANK_COUNT_MAX; ranks += 127) {
        struct cox_control own = created(ranks), other = COX_CONTROL_NONE;
        struct stat st;
        assert_int_equal(stat(control_path(), &st), 0);
        assert_int_equal(st.st_mode & 07777, 0600);
        assert_int_equal(st.st_nlink, 1);
        assert_int_equal(st.st_size, cox_geometry_control_object_size(&own.geometry));
        assert_true((uint64_t)st.st_size >=
                    cox_layout_control_size(ranks) + ranks * cox_recorder_area_size(false));
        assert_true(st.st_blocks * 512 >= st.st_size);
        assert_int_equal(cox_control_attach(&other, GROUP, NULL), 0);
        assert_memory_equal(&other.geometry, &own.geometry, sizeof own.geometry);
        assert_int_equal(other.group_incarnation, own.group_incarnation);
        assert_int_not_equal(own.group_incarnation, 0);
        assert_int_equal(other.lock_fd, -1);
        assert_int_equal(other.layout->header.coordinator_pid, getpid());
        /* Nothing but the header is set. */
        const uint8_t *bytes = (const uint8_t *)own.layout;
        for (uint64_t i = 512; i < own.region.size; i++)
            assert_int_equal(bytes[i], 0);
        atomic_store(&own.layout->abort.word, 7);
        assert_int_equal(atomic_load(&other.layout->abort.word), 7);
        cox_control_close(&other);
        gone(&own);
    }
}

LEAK_TEST(every_group_of_a_name_has_another_instance)
{
    uint32_t incarnations[50];
    for (int i = 0; i < 50; i++) {
        struct cox_control own = created(1);
        incarnations[i] = own.group_incarnation;
        for (int before = 0; before < i; before++)
            assert_int_not_equal(incarnations[before], own.group_incarnation);
        gone(&own);
    }
}

/* ---- attach ---- */

LEAK_TEST(attaching_to_nothing_is_not_found)
{
    struct cox_control control = COX_CONTROL_NONE;
    assert_refused(cox_control_attach(&control, GROUP, test_err()), COX_NOT_FOUND, "_control");
    assert_null(control.layout);
}

static int attach_and_close(struct cox_error *err)
{
    struct cox_control control = COX_CONTROL_NONE;
    int r = cox_control_attach(&control, GROUP, err);
    assert_int_equal(control.layout != NULL, r == 0);
    cox_control_close(&control);
    return r;
}

/* Accepted means: the same group, or sizes that only the slack behind the last frame or slot can
 * explain; those regions are then found too small. */
static void check_flipped(const struct cox_control *own, size_t offset)
{
    struct cox_control other = COX_CONTROL_NONE;
    struct cox_error err = {0};
    int r = cox_control_attach(&other, GROUP, &err);
    if (r) {
        assert_null(other.layout);
        assert_true(r == COX_CORRUPT || r == COX_VERSION);
        assert_int_equal(err.code, r);
        assert_true(err.text[0]);
        return;
    }
    if (memcmp(&other.geometry, &own->geometry, sizeof other.geometry) != 0) {
        /* Then the group's own memory is too small, or too large for what its ranks say of it. */
        bool changed = other.geometry.mirrored != own->geometry.mirrored;
        assert_int_equal(other.geometry.rank_count, own->geometry.rank_count);
        assert_int_equal(other.geometry.depth, own->geometry.depth);
        assert_ptr_equal(other.geometry.mode, own->geometry.mode);
        for (int c = 0; c < COX_CHANNEL_COUNT; c++) {
            const struct cox_layout_channel *a = &other.geometry.channels[c],
                                            *b = &own->geometry.channels[c];
            struct cox_channel channel;
            assert_true(a->frame_size == b->frame_size && a->slot_stride == b->slot_stride);
            assert_true(a->request_size >= b->request_size && a->response_size >= b->response_size);
            if (a->request_size == b->request_size && a->response_size == b->response_size)
                continue;
            changed = true;
            assert_int_equal(
                cox_channel_attach(&channel, GROUP, &other, (enum cox_channel_id)c, 0, NULL),
                COX_CORRUPT);
        }
        assert_true(changed);
    }
    /* The group_incarnation is the one thing given out that attach cannot check. */
    assert_true(offset / 8 == offsetof(struct cox_layout_header, group_incarnation) / 8 ||
                other.group_incarnation == own->group_incarnation);
    cox_control_close(&other);
}

LEAK_TEST(p10_any_byte_of_the_header_flipped_is_an_error_or_harmless)
{
    struct cox_control own = created(3);
    struct cox_channel channels[COX_CHANNEL_COUNT];
    for (int c = 0; c < COX_CHANNEL_COUNT; c++)
        assert_int_equal(
            cox_channel_create(&channels[c], GROUP, &own, (enum cox_channel_id)c, NULL), 0);
    uint8_t *bytes = (uint8_t *)own.layout;
    for (size_t offset = 0; offset < 512 + 128; offset++) {
        uint8_t good = bytes[offset];
        for (unsigned change = 1; change < 512; change *= 2) {
            bytes[offset] = good ^ (uint8_t)(change == 256 ? 0xff : change);
            check_flipped(&own, offset);
        }
        for (unsigned value = 0; value < 256; value += 51) {
            bytes[offset] = (uint8_t)value;
            check_flipped(&own, offset);
        }
        /* What everything depends on never passes. */
        bytes[offset] = good ^ 1;
        if (offset < 32)
            assert_int_equal(attach_and_close(NULL),
                             offset >= 8 && offset < 16 ? COX_VERSION : COX_CORRUPT);
        bytes[offset] = good;
    }
    assert_int_equal(attach_and_close(NULL), 0);
    /* Any 8 bytes at once, with numbers that overflow. */
    uint64_t random = 99;
    for (int i = 0; i < 4000; i++) {
        uint8_t kept[8];
        size_t offset = (size_t)(random_next(&random) % (224 / 8)) * 8;
        uint64_t value = random_next(&random) >> (random_next(&random) % 64);
        if (i % 3 == 0)
            value = UINT64_MAX - value % 4096;
        memcpy(kept, bytes + offset, 8);
        memcpy(bytes + offset, &value, 8);
        check_flipped(&own, offset);
        memcpy(bytes + offset, kept, 8);
    }
    for (int c = 0; c < COX_CHANNEL_COUNT; c++)
        cox_channel_close(&channels[c]);
    assert_int_equal(cox_control_unlink_names(GROUP, &own.geometry, COX_CHANNEL_COUNT),
                     4 * 2 + 1 + 4 * 4 * 3 + 2 + 1);
    cox_control_close(&own);
}

LEAK_TEST(another_version_names_both)
{
    struct cox_control own = created(1);
    own.layout->header.version = 77;
    assert_refused(attach_and_close(test_err()), COX_VERSION, "version 77");
    assert_contains(test_error.text, "speaks 1");
    gone(&own);
}

LEAK_TEST(p10_truncated_files_are_corrupt)
{
    struct cox_control own = created(2);
    off_t full = (off_t)own.region.size;
    cox_control_close(&own); /* a mapping would see SIGBUS */
    /* Every size of the words; of the recorders behind them one in a thousand. */
    const off_t head = (off_t)cox_layout_control_size(2);
    for (off_t size = full; size >= 0; size -= size > head + 1009 ? 1009 : 1) {
        assert_int_equal(truncate(control_path(), size), 0);
        assert_int_equal(attach_and_close(NULL), size == full ? 0 : COX_CORRUPT);
    }
    assert_int_equal(unlink(control_path()), 0);
}

struct watch {
    int go[2], seen[2];
    int rounds;
};

/* Polls for the name. Whatever it sees is not there, or whole. */
static void watch_for_the_name(void *context)
{
    struct watch *watch = context;
    for (int i = 0; i < watch->rounds; i++) {
        struct cox_control control = COX_CONTROL_NONE;
        struct cox_error err = {0};
        int r;
        tell(watch->seen[1]);
        uint64_t deadline = cox_deadline_after_ms(300000);
        while ((r = cox_control_attach(&control, GROUP, &err)) == COX_NOT_FOUND) {
            err = (struct cox_error){0};
            CHECK(cox_now_ns() < deadline);
        }
        if (r)
            fprintf(stderr, "%s\n", err.text);
        CHECK(r == 0);
        CHECK(control.geometry.rank_count == 128);
        cox_control_close(&control);
        tell(watch->seen[1]);
        CHECK(heard(watch->go[0])); /* it is gone again */
    }
}

LEAK_TEST(a_name_that_appears_is_complete)
{
    struct watch watch = {.rounds = 100}; /* of 128 ranks, whose memory is reserved each time */
    test_pipe(watch.go);
    test_pipe(watch.seen);
    pid_t pid = child_start(watch_for_the_name, &watch);
    test_close(watch.seen[1]);
    for (int i = 0; i < watch.rounds; i++) {
        assert_true(heard(watch.seen[0]));
        struct cox_control own = created(128);
        bool seen = heard(watch.seen[0]);
        gone(&own);
        assert_true(seen);
        tell(watch.go[1]);
    }
    child_join(pid);
}

/* ---- the holder of the name ---- */

static void hold_the_name(void *context)
{
    int *fds = context;
    struct cox_control own = COX_CONTROL_NONE;
    CHECK(create(&own, 2, NULL) == 0);
    tell(fds[1]);
    pause();
}

LEAK_TEST(a_live_group_keeps_its_name)
{
    struct cox_control control = COX_CONTROL_NONE;
    int fds[2];
    char expected[64];
    struct stat before, after;
    test_pipe(fds);
    pid_t pid = child_start(hold_the_name, fds);
    assert_true(heard(fds[0]));
    assert_int_equal(stat(control_path(), &before), 0);
    for (int i = 0; i < 3; i++) {
        snprintf(expected, sizeof expected, "process %d:", (int)pid);
        assert_refused(create(&control, 1, test_err()), COX_TAKEN, expected);
        assert_contains(test_error.text, GROUP);
        assert_null(control.layout);
    }
    assert_int_equal(stat(control_path(), &after), 0);
    assert_true(before.st_ino == after.st_ino);
    assert_int_equal(attach_and_close(NULL), 0);
    child_kill(pid);
    control = created(1); /* the lock died with it */
    gone(&control);
}

struct family {
    int fds[2];
    /* as an exact copy, of which the library does not hear */
    bool copied;
};

static void hold_the_name_and_fork(void *context)
{
    const struct family *family = context;
    struct cox_control own = COX_CONTROL_NONE;
    CHECK(create(&own, 2, NULL) == 0);
    pid_t pid = family->copied ? _Fork() : fork();
    if (pid == 0)
        for (;;)
            pause();
    CHECK(write(family->fds[1], &pid, sizeof pid) == sizeof pid);
    pause();
}

LEAK_TEST(b4_a_name_dies_with_its_process_and_not_with_its_children)
{
    for (int copied = 0; copied < 2; copied++) {
        struct family family = {.copied = copied};
        struct cox_control control = COX_CONTROL_NONE;
        char expected[64];
        pid_t pid;
        test_pipe(family.fds);
        pid_t parent = child_start(hold_the_name_and_fork, &family);
        assert_int_equal(read(family.fds[0], &pid, sizeof pid), sizeof pid);
        child_kill(parent);
        if (copied) {
            snprintf(expected, sizeof expected, "but process %d holds its lock", (int)pid);
            assert_refused(create(&control, 1, test_err()), COX_BUSY, expected);
            kill(pid, SIGKILL);
        }
        control = created(1);
        gone(&control);
        kill(pid, SIGKILL);
    }
}

LEAK_TEST(a_process_does_not_take_its_own_name_twice)
{
    struct cox_control own = created(1), second = COX_CONTROL_NONE;
    struct cox_geometry geometry = geometry_of(1);
    assert_int_equal(cox_control_create(&second, GROUP, &geometry, NULL), COX_TAKEN);
    assert_int_equal(cox_control_create(&second, test_name("h"), &geometry, NULL),
                     0); /* another is fine */
    assert_int_equal(cox_control_unlink_names(test_name("h"), &geometry, 0), 1);
    cox_control_close(&second);
    gone(&own);
}

struct crash {
    uint32_t rank_count;
    /* NULL: after everything was made */
    const char *fault;
    int channels;
};

static void create_and_die(void *context)
{
    const struct crash *crash = context;
    static struct cox_control control = COX_CONTROL_NONE;
    static struct cox_channel channels[COX_CHANNEL_COUNT];
    if (crash->fault)
        cox_fault_arm(crash->fault);
    CHECK(create(&control, crash->rank_count, NULL) == 0);
    for (int c = 0; c < crash->channels; c++)
        CHECK(cox_channel_create(&channels[c], GROUP, &control, (enum cox_channel_id)c, NULL) == 0);
    if (crash->fault)
        cox_control_unlink_names(GROUP, &control.geometry, crash->channels);
    else
        kill(getpid(), SIGKILL);
}

static void dies_and_is_swept(struct crash *crash, int left)
{
    int status = child_status(child_start(create_and_die, crash));
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    if (left >= 0)
        assert_int_equal(shm_count(NULL), left);
    struct cox_control own = created(2);
    assert_int_equal(shm_count(NULL), 1);
    assert_int_equal(own.layout->header.coordinator_pid, getpid());
    assert_int_equal(attach_and_close(NULL), 0);
    gone(&own);
}

LEAK_TEST(b4_leftovers_of_a_killed_creator_are_swept)
{
    for (int channels = 0; channels <= COX_CHANNEL_COUNT; channels++) {
        /* Another number of ranks than the next group has: the leftovers' own geometry counts. */
        struct crash crash = {.rank_count = 5, .channels = channels};
        int two_way = channels < COX_TWO_WAY_COUNT ? channels : COX_TWO_WAY_COUNT;
        dies_and_is_swept(&crash,
                          1 + two_way * (2 + 4 * 5) + (channels > COX_TWO_WAY_COUNT ? 1 + 2 : 0));
    }
}

LEAK_TEST(b4_leftovers_of_a_creator_killed_anywhere_are_swept)
{
    static const char *const points[] = {
        "control.linked:kill",
        "region.named:kill",
        "region.created:kill",
        "channel.created:kill",
        "channel.created:kill:coordinator:3",
        "control.unlink:kill",
        "semaphore.linked:kill:coordinator:30",
    };
#if !COX_TESTING
    skip();
#endif
    for (size_t i = 0; i < sizeof points / sizeof points[0]; i++) {
        struct crash crash = {.rank_count = 3, .fault = points[i], .channels = COX_CHANNEL_COUNT};
        dies_and_is_swept(&crash, -1);
    }
    /* Before it has its name there is nothing to sweep. */
    struct crash crash = {.rank_count = 3, .fault = "control.filled:kill"};
    dies_and_is_swept(&crash, 0);
}

/* What a version says of itself behind the head of its header is its own affair. */
LEAK_TEST(b4_leftovers_of_another_version_are_swept)
{
    struct cox_control old = created(3);
    struct cox_channel channel;
    for (int c = 0; c < COX_CHANNEL_COUNT; c++) {
        assert_int_equal(cox_channel_create(&channel, GROUP, &old, (enum cox_channel_id)c, NULL),
                         0);
        cox_channel_close(&channel);
    }
    int names = shm_count(NULL);
    assert_int_equal(names, 1 + 4 * (2 + 4 * 3) + 1 + 2);
    struct cox_layout_header *header = &old.layout->header;
    header->version = 77;
    header->depth = 0xdddd;
    memset(header->channels, 0xcc, sizeof header->channels);
    /* It lives. */
    uint32_t count = 0;
    assert_refused(cox_control_sweep(GROUP, &count, test_err()), COX_TAKEN,
                   "live group of process");
    assert_int_equal(shm_count(NULL), names);
    /* It is dead. */
    cox_control_close(&old);
    struct cox_control own = created(1);
    assert_int_equal(shm_count(NULL), 1);
    gone(&own);
}

/* Also by another version, and though another start under the name has other names. */
LEAK_TEST(b4_p7_leftovers_with_a_serial_are_swept)
{
    for (uint32_t version = COX_LAYOUT_VERSION; version < COX_LAYOUT_VERSION + 2; version++) {
        const struct cox_geometry_choice choice = {.mode = &cox_attach_legacy};
        struct cox_geometry geometry;
        struct cox_control old;
        struct cox_channel channel;
        char objects[COX_NAME_SIZE_MAX + 1];
        uint32_t count = 0;
        assert_int_equal(cox_geometry_resolve(2, &choice, &geometry, NULL), 0);
        if (cox_control_check_space(&geometry, NULL) == COX_NO_SPACE) {
            print_message("skipped: /dev/shm has no room for two legacy ranks\n");
            skip();
        }
        geometry.serial = cox_control_fresh();
        assert_int_not_equal(geometry.serial, cox_control_fresh());
        assert_int_equal(cox_control_create(&old, GROUP, &geometry, NULL), 0);
        cox_name_objects(objects, GROUP, &geometry);
        for (int c = 0; c < COX_CHANNEL_COUNT; c++) {
            assert_int_equal(
                cox_channel_create(&channel, objects, &old, (enum cox_channel_id)c, NULL), 0);
            cox_channel_close(&channel);
        }
        uint32_t names = (uint32_t)shm_count(NULL);
        assert_int_equal(names, cox_geometry_account(&geometry).name_count);
        old.layout->header.version = version;
        assert_int_equal(cox_control_sweep(GROUP, &count, NULL), COX_TAKEN);
        cox_control_close(&old);
        assert_int_equal(cox_control_sweep(GROUP, &count, NULL), 0);
        assert_int_equal(count, names);
        assert_int_equal(shm_count(NULL), 0);
    }
}

LEAK_TEST(a_neighbour_s_names_are_not_swept)
{
    struct crash crash = {.rank_count = 1, .channels = 1};
    struct cox_geometry geometry = geometry_of(1);
    struct cox_control neighbour = COX_CONTROL_NONE;
    struct cox_channel channel;
    char longer[64];
    snprintf(longer, sizeof longer, "%s_execute", GROUP);
    assert_int_equal(cox_control_create(&neighbour, longer, &geometry, NULL), 0);
    assert_int_equal(cox_channel_create(&channel, longer, &neighbour, COX_CHANNEL_EXECUTE, NULL),
                     0);
    int before = shm_count(NULL);
    child_status(child_start(create_and_die, &crash));
    struct cox_control own = created(1);
    assert_int_equal(shm_count(NULL), before + 1);
    gone(&own);
    cox_channel_close(&channel);
    assert_int_equal(cox_control_unlink_names(longer, &geometry, 1), before);
    cox_control_close(&neighbour);
}

/* For root the sticky bit of /dev/shm is none. */
LEAK_TEST(b44_what_another_user_has_under_such_a_name_is_not_swept)
{
    struct cox_control dead = created(2);
    char object[COX_OBJECT_NAME_SIZE], paths[4][COX_OBJECT_NAME_SIZE + 32];
    if (!test_can_switch_user()) {
        gone(&dead);
        skip();
    }
    cox_name_request(object, GROUP, COX_CHANNEL_LINK);
    snprintf(paths[0], sizeof paths[0], SHM "%s", object);
    cox_name_response(object, GROUP, COX_CHANNEL_ERROR);
    snprintf(paths[1], sizeof paths[1], SHM "%s", object);
    cox_name_wakeup(object, GROUP, COX_CHANNEL_EXECUTE, COX_WAKEUP_REQUEST_CONSUME, 1);
    snprintf(paths[2], sizeof paths[2], SHM "/sem.%s", object + 1);
    /* The link is looked at, not what it leads to. */
    cox_name_response(object, GROUP, COX_CHANNEL_LINK);
    snprintf(paths[3], sizeof paths[3], SHM "%s", object);
    for (int i = 0; i < 3; i++) {
        int fd = open(paths[i], O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        assert_true(fd >= 0);
        assert_int_equal(fchown(fd, 65534, (gid_t)-1), 0);
        close(fd);
    }
    assert_int_equal(symlink("/dev/null", paths[3]), 0);
    assert_int_equal(lchown(paths[3], 65534, (gid_t)-1), 0);
    cox_control_close(&dead);
    uint32_t count = 0;
    assert_int_equal(cox_control_sweep(GROUP, &count, NULL), 0);
    assert_int_equal(count, 1); /* the control region itself */
    for (int i = 0; i < 4; i++)
        assert_int_equal(unlink(paths[i]), 0);
}

/* ---- races ---- */

struct racer {
    int go[2], result[2], end[2];
};

static void race(void *context)
{
    struct racer *racer = context;
    while (heard(racer->go[0])) {
        struct cox_control control = COX_CONTROL_NONE;
        struct cox_error err = {0};
        int r = create(&control, 2, &err);
        char reply = r == 0 ? 'w' : r == COX_TAKEN ? 'l' : '?';
        if (reply == '?')
            fprintf(stderr, "%d %s\n", r, err.text);
        CHECK(write(racer->result[1], &reply, 1) == 1);
        CHECK(heard(racer->end[0]));
        if (r == 0) {
            struct cox_control again = COX_CONTROL_NONE;
            CHECK(cox_control_attach(&again, GROUP, NULL) == 0); /* the name is the winner's */
            CHECK(again.group_incarnation == control.group_incarnation);
            cox_control_close(&again);
            CHECK(cox_control_unlink_names(GROUP, &control.geometry, 0) == 1);
            cox_control_close(&control);
        }
        CHECK(write(racer->result[1], &reply, 1) == 1);
    }
}

LEAK_TEST(b54_of_two_that_create_at_once_one_wins)
{
    enum { RACERS = 2, ROUNDS = 400 };
    struct racer racers[RACERS];
    pid_t pids[RACERS];
    unsigned wins[RACERS] = {0};
    for (int i = 0; i < RACERS; i++) {
        test_pipe(racers[i].go);
        test_pipe(racers[i].result);
        test_pipe(racers[i].end);
    }
    for (int i = 0; i < RACERS; i++)
        pids[i] = child_start(race, &racers[i]);
    for (int round = 0; round < ROUNDS; round++) {
        int winners = 0;
        char reply;
        if (round % 2) { /* every other time there is something to sweep first */
            struct cox_control dead = created(3);
            cox_control_close(&dead);
        }
        for (int i = 0; i < RACERS; i++)
            tell(racers[(i + round) % RACERS].go[1]);
        for (int i = 0; i < RACERS; i++) {
            assert_int_equal(read(racers[i].result[0], &reply, 1), 1);
            assert_true(reply == 'w' || reply == 'l');
            winners += reply == 'w';
            wins[i] += reply == 'w';
        }
        assert_int_equal(winners, 1);
        for (int i = 0; i < RACERS; i++)
            tell(racers[i].end[1]);
        for (int i = 0; i < RACERS; i++)
            assert_int_equal(read(racers[i].result[0], &reply, 1), 1);
        assert_int_equal(shm_count(NULL), 0);
    }
    for (int i = 0; i < RACERS; i++) /* none holds another's write end: forked with all of them */
        child_kill(pids[i]);
}

static void create_late(void *context)
{
    struct cox_control control = COX_CONTROL_NONE;
    (void)context;
    cox_fault_arm("control.sweep:stop");
    CHECK(create(&control, 2, NULL) == COX_TAKEN);
}

/* A process that was stopped with the leftovers open gets their lock later, when the name is
 * another group's. */
LEAK_TEST(b54_a_late_sweeper_spares_the_next_group)
{
    int status;
    struct stat before, after;
#if !COX_TESTING
    skip();
#endif
    struct cox_control dead = created(3);
    cox_control_close(&dead);
    pid_t pid = child_start(create_late, NULL);
    assert_int_equal(waitpid(pid, &status, WUNTRACED), pid);
    assert_true(WIFSTOPPED(status));
    struct cox_control own = created(1);
    assert_int_equal(stat(control_path(), &before), 0);
    kill(pid, SIGCONT);
    child_join(pid);
    assert_int_equal(stat(control_path(), &after), 0);
    assert_true(before.st_ino == after.st_ino);
    gone(&own);
}

static void create_without_standard_fds(void *context)
{
    static const char line[] = "a line of the host's log, longer than any counter";
    struct cox_control control = COX_CONTROL_NONE, other = COX_CONTROL_NONE;
    int fds = *(const int *)context;
    for (int fd = 0; fd < 3; fd++)
        if (fds & 1 << fd)
            close(fd);
    int r = create(&control, 2, NULL);
    for (int fd = 0; fd < 3; fd++)
        if (fds & 1 << fd && write(fd, line, sizeof line) >= 0)
            _exit(98);
    if (r || control.lock_fd < 3 || fcntl(control.lock_fd, F_GETFD) != FD_CLOEXEC)
        _exit(97);
    /* The lock went with it. */
    if (create(&other, 2, NULL) != COX_TAKEN)
        _exit(96);
    if (cox_control_attach(&other, GROUP, NULL))
        _exit(95);
    cox_control_close(&other);
    if (cox_control_unlink_names(GROUP, &control.geometry, 0) != 1)
        _exit(94);
}

LEAK_TEST(b15_a_host_without_standard_fds_does_not_log_into_the_truth)
{
    for (int fds = 1; fds < 8; fds++)
        child_run(create_without_standard_fds, &fds);
}

/* ---- what is none of ours ---- */

static void stays_in_the_way(int expected, const char *text)
{
    struct cox_control control = COX_CONTROL_NONE;
    struct stat before, after;
    assert_int_equal(lstat(control_path(), &before), 0);
    int fds = fd_count();
    assert_refused(create(&control, 1, test_err()), expected, text);
    assert_null(control.layout);
    assert_int_equal(fd_count(), fds);
    assert_int_equal(lstat(control_path(), &after), 0);
    assert_true(before.st_ino == after.st_ino && before.st_size == after.st_size);
    assert_true(before.st_mode == after.st_mode);
    assert_int_equal(shm_count(NULL), 1);
}

static void put(const void *bytes, size_t size, mode_t mode)
{
    int fd = open(control_path(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, bytes, size), size);
    assert_int_equal(fchmod(fd, mode), 0);
    close(fd);
}

LEAK_TEST(b54_files_of_others_are_not_touched)
{
    static char junk[10000];
    struct cox_control own = created(1);
    size_t size = (size_t)own.region.size;
    char *copy = test_own(malloc(size), free);
    memcpy(copy, own.layout, size);
    gone(&own);
    memset(junk, 'j', sizeof junk);

    const struct {
        const char *bytes;
        size_t size;
        mode_t mode;
        const char *text;
    } strangers[] = {
        {junk, sizeof junk, 0600, "magic"},
        {junk, 0, 0600, "empty"},
        {junk, 100, 0600, "100 bytes"},
        {copy, size, 0644, "mode 0644"}, /* others could write it */
        {copy, size - 1, 0600, "bytes"},
    };
    for (size_t i = 0; i < sizeof strangers / sizeof strangers[0]; i++) {
        put(strangers[i].bytes, strangers[i].size, strangers[i].mode);
        stays_in_the_way(COX_DENIED, strangers[i].text);
        unlink(control_path());
    }
    /* Another version, and nothing to tell its names by: the advice removes nothing. */
    static const struct {
        size_t offset;
        char value;
    } wild[] = {{24, 0}, {24, (char)129}, {27, 1}, {12, 5}};
    for (size_t i = 0; i < sizeof wild / sizeof wild[0]; i++) {
        char advice[128], good = copy[wild[i].offset];
        copy[8] = 9;
        copy[wild[i].offset] = wild[i].value;
        put(copy, size, 0600);
        stays_in_the_way(COX_DENIED, "version 9");
        snprintf(advice, sizeof advice, "choose another name than '%s', or clean up with", GROUP);
        stays_in_the_way(COX_DENIED, advice);
        unlink(control_path());
        copy[wild[i].offset] = good;
        copy[8] = COX_LAYOUT_VERSION;
    }
    if (test_can_switch_user()) {
        put(copy, size, 0600);
        assert_int_equal(chown(control_path(), 65534, (gid_t)-1), 0);
        stays_in_the_way(COX_DENIED, "user 65534");
        unlink(control_path());
    }
    assert_int_equal(symlink("/etc/hostname", control_path()), 0);
    stays_in_the_way(COX_DENIED, "in the way");
    unlink(control_path());
    assert_int_equal(mkdir(control_path(), 0700), 0);
    stays_in_the_way(COX_DENIED, "in the way");
    rmdir(control_path());
    assert_int_equal(mkfifo(control_path(), 0600), 0);
    stays_in_the_way(COX_DENIED, "not a regular file");
    unlink(control_path());
    put(copy, size, 0600); /* and this one is indistinguishable from what a dead group left */
    own = created(1);
    gone(&own);
}

static void create_in_a_full_tmpfs(void *context)
{
    struct cox_geometry geometry = geometry_of(128);
    struct cox_control control = COX_CONTROL_NONE;
    struct cox_error err = {0};
    char number[32];
    (void)context;
    CHECK(private_shm("16k"));
    int fds = fd_count();
    CHECK(cox_control_create(&control, GROUP, &geometry, &err) == COX_NO_SPACE);
    snprintf(number, sizeof number, " %" PRIu64 " ", cox_geometry_control_object_size(&geometry));
    CHECK(strstr(err.text, number) && strstr(err.text, " 16384 "));
    CHECK(shm_count("g") == 0 && fd_count() == fds && !control.layout);
}

LEAK_TEST(a_full_tmpfs_is_no_space_with_both_numbers)
{
    if (!private_shm_possible())
        skip();
    child_run(create_in_a_full_tmpfs, NULL);
}

/* All names of a group, as the executor makes them. */
static int create_group(const struct cox_geometry *geometry)
{
    static struct cox_control control = COX_CONTROL_NONE;
    struct cox_channel channel;
    int r = cox_control_create(&control, GROUP, geometry, NULL);
    for (int c = 0; r == 0 && c < COX_CHANNEL_COUNT; c++)
        r = cox_channel_create(&channel, GROUP, &control, (enum cox_channel_id)c, NULL);
    struct cox_region group;
    char object[COX_OBJECT_NAME_SIZE];
    return r ? r
             : cox_region_create(&group, cox_name_group(object, GROUP),
                                 cox_geometry_group_size(geometry), NULL);
}

struct tmpfs {
    const char *size;
    /* 0: as many as wanted */
    uint64_t files;
    bool fits;
};

static void create_in_tmpfs(void *context)
{
    const struct tmpfs *tmpfs = context;
    struct cox_geometry geometry = geometry_of(3);
    struct cox_error err = {0};
    char options[64], number[32];
    /* The root of the file system is a file, too. */
    snprintf(options, sizeof options, "%s,nr_inodes=%" PRIu64, tmpfs->size,
             tmpfs->files ? tmpfs->files + 1 : 0);
    CHECK(private_shm(options));
    int r = cox_control_check_space(&geometry, &err);
    if (tmpfs->fits) {
        CHECK(r == 0);
        CHECK(create_group(&geometry) == 0);
        CHECK((uint64_t)shm_count(NULL) == cox_geometry_account(&geometry).name_count);
        return;
    }
    CHECK(r == COX_NO_SPACE && err.code == r);
    snprintf(number, sizeof number, " %" PRIu64 " files ",
             cox_geometry_account(&geometry).name_count);
    CHECK(strstr(err.text, number));
    snprintf(number, sizeof number, " %" PRIu64 " more ", tmpfs->files);
    CHECK(strstr(err.text, number) && strstr(err.text, "nr_inodes="));
    CHECK(create_group(&geometry) != 0); /* it was no false alarm */
}

LEAK_TEST(p6_files_are_counted_before_the_start)
{
    struct cox_geometry geometry = geometry_of(3);
    uint64_t files = cox_geometry_account(&geometry).name_count;
    if (!private_shm_possible())
        skip();
    struct tmpfs cases[] = {
        {"64m", files, true}, {"64m", files - 1, false}, {"64m", 1, false}, {"64m", 0, true},
        {"0", 0, true}, /* a tmpfs without a limit is not full */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        child_run(create_in_tmpfs, &cases[i]);
}

static void create_under_a_file_limit(void *context)
{
    uint64_t short_of = *(const uint64_t *)context;
    struct cox_geometry geometry = geometry_of(3);
    uint64_t size = cox_geometry_account(&geometry).region_size_max;
    struct cox_error err = {0};
    char number[32];
    CHECK(setrlimit(RLIMIT_FSIZE, &(struct rlimit){size - short_of, RLIM_INFINITY}) == 0);
    int r = cox_control_check_space(&geometry, &err);
    if (short_of == 0) {
        CHECK(r == 0);
        CHECK(create_group(&geometry) == 0); /* and no signal */
        CHECK(cox_control_unlink_names(GROUP, &geometry, COX_CONTROL_PART_COUNT) > 40);
        return;
    }
    CHECK(r == COX_NO_SPACE && strstr(err.text, "ulimit -f"));
    snprintf(number, sizeof number, " %" PRIu64 " ", size);
    CHECK(strstr(err.text, number));
    snprintf(number, sizeof number, " %" PRIu64 " ", size - short_of);
    CHECK(strstr(err.text, number));
    /* Creating a region without checking before gets the same error. */
    struct cox_region region = {0};
    err = (struct cox_error){0};
    CHECK(cox_region_create(&region, test_object("f"), size, &err) == COX_NO_SPACE);
    CHECK(strstr(err.text, "ulimit -f") && !region.base);
}

LEAK_TEST(p6_a_limit_on_files_is_an_error_and_no_signal)
{
    for (uint64_t short_of = 0; short_of < 2; short_of++)
        child_run(create_under_a_file_limit, &short_of);
}

LEAK_TEST(channels_leave_nothing_behind_when_one_name_is_taken)
{
    struct cox_control own = created(2);
    struct cox_channel channel;
    char object[COX_OBJECT_NAME_SIZE], path[COX_OBJECT_NAME_SIZE + 32];
    for (int i = 0; i < 3; i++) {
        if (i == 0)
            cox_name_request(object, GROUP, COX_CHANNEL_LINK);
        else if (i == 1)
            cox_name_response(object, GROUP, COX_CHANNEL_LINK);
        else
            cox_name_wakeup(object, GROUP, COX_CHANNEL_LINK, COX_WAKEUP_RESPONSE_CONSUME, 1);
        snprintf(path, sizeof path, SHM "/%s%s", i == 2 ? "sem." : "", object + 1);
        int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        assert_true(fd >= 0);
        close(fd);
        int fds = fd_count();
        assert_int_equal(cox_channel_create(&channel, GROUP, &own, COX_CHANNEL_LINK, NULL),
                         COX_TAKEN);
        assert_int_equal(fd_count(), fds);
        assert_int_equal(shm_count(NULL), 2); /* the control region and what was in the way */
        assert_int_equal(unlink(path), 0);
    }
    gone(&own);
}
