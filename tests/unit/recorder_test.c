/* The flight recorder: what is recorded is read, also of a writer that is killed or never stops.
 * Bytes of any kind are refused or read, never trusted. */
#include "channel/recorder/recorder.h"
#include "coordinator/recording/recording.h"
#include "proto/recording.pb-c.h"
#include "tests/lib/test.h"

#include <sys/ptrace.h>

#define EXECUTE COX_CHANNEL_EXECUTE
#define STEPS 5000

static uint64_t area_size(void)
{
    return cox_recorder_area_size(false);
}

/* Memory as a group has it, the test's own, with the rank's area at this offset. */
static int memory_make(uint64_t offset, uint32_t rank, const char *path)
{
    int fd = test_own_fd(memfd_create("recorder", MFD_CLOEXEC));
    assert_int_equal(ftruncate(fd, (off_t)(offset + area_size())), 0);
    uint8_t *base = mmap(NULL, offset + area_size(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_true(base != MAP_FAILED);
    cox_recorder_area_init(base + offset, rank, 7, path, COX_RECORDER_NS);
    munmap(base, offset + area_size());
    return fd;
}

/* Made by rank_recorder: the recorder of rank 0 in memory of its own, and room for a copy of it. */
static struct cox_recorder *recorder;
static int memory_fd;
static uint8_t *copy;

TEST_OWNED(cox_recorder_unref)

/* Its ring of execute. */
static struct cox_recorder_requests rank_recorder(void)
{
    memory_fd = memory_make(0, 0, NULL);
    copy = test_own(malloc(cox_recorder_area_size(true)), free);
    recorder = NULL;
    assert_int_equal(cox_recorder_attach(memory_fd, 0, 0, 1, 1, &recorder), 0);
    test_own(recorder, cox_recorder_unref_owned);
    return cox_recorder_requests(recorder, EXECUTE);
}

/* The coordinator's. */
static struct cox_recorder_submits coordinator_recorder(void)
{
    copy = test_own(malloc(cox_recorder_area_size(true)), free);
    recorder = NULL;
    assert_ok(cox_recorder_new_coordinator(NULL, 7, COX_RECORDER_NS, &recorder, test_err()));
    test_own(recorder, cox_recorder_unref_owned);
    return cox_recorder_submits(recorder, EXECUTE);
}

/* The record of the ring of execute, as it is now. */
static struct cox_record read_record(bool coordinator, uint32_t at)
{
    struct cox_record read;
    cox_recorder_copy(recorder->area, recorder->area, coordinator, copy);
    assert_true(cox_recorder_read(copy, coordinator, EXECUTE, at, &read));
    return read;
}

/* A record whose words all follow from its number: a mixture of two is seen. */
static void record(const struct cox_recorder_requests *ring, uint64_t sequence)
{
    cox_recorder_take_at(ring, sequence, cox_recorder_request_word((uint32_t)sequence, sequence),
                         10 * sequence);
    cox_recorder_begin_at(ring, sequence, 10 * sequence + 1);
    cox_recorder_end_at(ring, sequence, 10 * sequence + 2);
    cox_recorder_reply_at(ring, sequence, cox_recorder_result_word((int)(sequence % 100), sequence),
                          10 * sequence + 3);
}

/* Times that are there follow from the number; those that are missing are the last ones. */
static void check_record(const struct cox_record *record)
{
    const uint64_t sequence = record->sequence;
    const uint64_t times[] = {record->taken_ns, record->begin_ns, record->end_ns, record->reply_ns};
    bool ended = false;
    for (uint64_t i = 0; i < 4; i++) {
        ended = ended || times[i] == 0;
        if (times[i] != (ended ? 0 : 10 * sequence + i))
            fail_msg("record %ju: time %ju is %ju", (uintmax_t)sequence, (uintmax_t)i,
                     (uintmax_t)times[i]);
    }
    assert_int_equal(record->type, (uint32_t)sequence);
    assert_int_equal(record->size, sequence);
    if (record->reply_ns) {
        assert_int_equal(record->status, sequence % 100);
        assert_int_equal(record->reply_size, sequence);
    }
}

static uint32_t check_copy(const void *bytes, uint64_t *ret_newest)
{
    struct cox_record_head head;
    bool coordinator = true;
    uint32_t count = 0;
    assert_int_equal(cox_recorder_check(bytes, area_size(), &coordinator, &head, NULL), 0);
    assert_false(coordinator);
    *ret_newest = 0;
    for (uint32_t i = 0; i < cox_recorder_capacity(EXECUTE); i++) {
        struct cox_record read;
        if (!cox_recorder_read(bytes, false, EXECUTE, i, &read))
            continue;
        check_record(&read);
        count++;
        *ret_newest = read.sequence > *ret_newest ? read.sequence : *ret_newest;
    }
    return count;
}

PLAIN_TEST(the_last_steps_are_read)
{
    struct cox_recorder *own = NULL;
    uint8_t *bytes = test_own(malloc(area_size()), free);
    int fd = memory_make(4096, 3, NULL);
    assert_int_equal(cox_recorder_attach(fd, 4096, 3, 2, 99, &own), 0);
    const struct cox_recorder_requests ring = cox_recorder_requests(own, EXECUTE);
    for (uint64_t sequence = 1; sequence <= STEPS; sequence++)
        record(&ring, sequence);
    assert_int_equal(cox_recorder_copy(own->area, own->area, false, bytes), 0);
    uint64_t newest;
    assert_true(check_copy(bytes, &newest) >= 1024);
    assert_int_equal(newest, STEPS);
    struct cox_record_head head;
    bool coordinator;
    assert_int_equal(cox_recorder_check(bytes, area_size(), &coordinator, &head, NULL), 0);
    assert_int_equal(head.rank, 3);
    assert_int_equal(head.incarnation, 2);
    assert_int_equal(head.pid, getpid());
    assert_int_equal(head.start, 99);
    cox_recorder_unref(own);
}

PLAIN_TEST(memory_without_a_recorder_is_none)
{
    struct cox_recorder *own = NULL;
    int fd = memory_make(0, 3, NULL);
    /* of another rank; behind the end, as where a coordinator records nothing; all zero */
    assert_int_equal(cox_recorder_attach(fd, 0, 2, 1, 1, &own), COX_NOT_FOUND);
    assert_int_equal(cox_recorder_attach(fd, 4096, 3, 1, 1, &own), COX_NOT_FOUND);
    int zero = test_own_fd(memfd_create("zero", MFD_CLOEXEC));
    assert_int_equal(ftruncate(zero, (off_t)area_size()), 0);
    assert_int_equal(cox_recorder_attach(zero, 0, 0, 1, 1, &own), COX_NOT_FOUND);
    assert_null(own);
    const struct cox_recorder_requests none = cox_recorder_requests(NULL, EXECUTE);
    assert_null(none.records);
    cox_recorder_begin(&none, 1, 1);
    cox_recorder_end(&none, 1, 1);
}

/* ---- a writer that does not stop ---- */

static _Atomic bool stopping;

static void *write_on(void *argument)
{
    const struct cox_recorder_requests *ring = argument;
    for (uint64_t sequence = 1; !atomic_load(&stopping); sequence++)
        record(ring, sequence);
    return NULL;
}

PLAIN_TEST(m18_a_reader_never_sees_a_mixture)
{
    struct cox_recorder_requests ring = rank_recorder();
    atomic_store(&stopping, false);
    pthread_t thread = test_thread(write_on, &ring);
    uint64_t before = 0;
    for (int i = 0; i < 200; i++) {
        uint64_t newest;
        cox_recorder_copy(recorder->area, recorder->area, false, copy);
        check_copy(copy, &newest);
        assert_true(newest >= before); /* the writer goes on */
        before = newest;
    }
    atomic_store(&stopping, true);
    pthread_join(thread, NULL);
}

PLAIN_TEST(m18_what_a_killed_writer_left_is_read)
{
    uint8_t *bytes = test_own(malloc(area_size()), free);
    for (int i = 0; i < 40; i++) {
        int fd = memory_make(0, 0, NULL);
        int ready[2];
        test_pipe(ready);
        pid_t child = fork();
        if (child == 0) {
            struct cox_recorder *own = NULL;
            if (cox_recorder_attach(fd, 0, 0, 1, 1, &own))
                _exit(1);
            const struct cox_recorder_requests ring = cox_recorder_requests(own, EXECUTE);
            for (uint64_t sequence = 1;; sequence++) {
                record(&ring, sequence);
                if (sequence == 1 && write(ready[1], "", 1) != 1)
                    _exit(1);
            }
        }
        char byte;
        assert_int_equal(read(ready[0], &byte, 1), 1);
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        uint8_t *area = mmap(NULL, area_size(), PROT_READ, MAP_SHARED, fd, 0);
        assert_true(area != MAP_FAILED);
        assert_int_equal(cox_recorder_area_pid(area), child);
        cox_recorder_copy(area, area, false, bytes);
        uint64_t newest;
        assert_true(check_copy(bytes, &newest) >= 1);
        munmap(area, area_size());
    }
}

/* The writer is stopped after every instruction, as if it had been killed there. */
PLAIN_TEST(m18_a_writer_is_read_after_every_instruction)
{
    const uint64_t sequences[] = {5, 5 + cox_recorder_capacity(EXECUTE)}; /* in one place */
    uint8_t *bytes = test_own(malloc(area_size()), free);
    int fd = memory_make(0, 0, NULL);
    pid_t child = fork();
    if (child == 0) {
        struct cox_recorder *own = NULL;
        if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) < 0)
            _exit(77);
        if (cox_recorder_attach(fd, 0, 0, 1, 1, &own))
            _exit(1);
        const struct cox_recorder_requests ring = cox_recorder_requests(own, EXECUTE);
        raise(SIGSTOP);
        record(&ring, sequences[0]);
        record(&ring, sequences[1]);
        raise(SIGSTOP);
        _exit(0);
    }
    int status, steps = 0;
    uint64_t newest = 0, before = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
        skip();
    assert_true(WIFSTOPPED(status));
    uint8_t *area = mmap(NULL, area_size(), PROT_READ, MAP_SHARED, fd, 0);
    assert_true(area != MAP_FAILED);
    do {
        assert_int_equal(ptrace(PTRACE_SINGLESTEP, child, NULL, NULL), 0);
        assert_int_equal(waitpid(child, &status, 0), child);
        cox_recorder_copy(area, area, false, bytes);
        check_copy(bytes, &newest);
        assert_true(newest == 0 || newest == sequences[0] || newest == sequences[1]);
        assert_true(newest == 0 || newest >= before);
        before = newest ? newest : before;
        steps++;
    } while (WIFSTOPPED(status) && WSTOPSIG(status) == SIGTRAP);
    assert_true(WIFSTOPPED(status) && WSTOPSIG(status) == SIGSTOP); /* the second one */
    assert_int_equal(newest, sequences[1]);
    assert_true(steps > 50);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    munmap(area, area_size());
}

/* ---- what an earlier request has left ---- */

PLAIN_TEST(m18_a_record_shows_nothing_of_the_request_before)
{
    const uint64_t later = 5 + cox_recorder_capacity(EXECUTE);
    const struct cox_recorder_requests ring = rank_recorder();
    record(&ring, 5);
    /* The words of request 5 are still there behind those of the later one. */
    cox_recorder_take_at(&ring, later, cox_recorder_request_word(2, 7), 10 * later);
    struct cox_record read = read_record(false, 5);
    assert_int_equal(read.sequence, later);
    assert_int_equal(read.taken_ns, 10 * later);
    assert_true(!read.begin_ns && !read.end_ns && !read.reply_ns);
    assert_true(!read.group_count && !read.status && !read.reply_size);
    cox_recorder_begin_at(&ring, later, 10 * later); /* in the same tick */
    read = read_record(false, 5);
    assert_true(read.begin_ns == 10 * later && !read.end_ns && !read.reply_ns);
}

PLAIN_TEST(m18_the_coordinator_shows_nothing_of_the_request_before)
{
    const uint64_t later = 9 + cox_recorder_capacity(EXECUTE), asked[2] = {1, 0};
    const struct cox_recorder_submits ring = coordinator_recorder();
    struct cox_recorder_published published = {
        .submitted = 1, .packing = 2, .published = 3, .asked = asked};
    cox_recorder_publish(&ring, 9, &published);
    cox_recorder_woken_at(&ring, 9, 4);
    cox_recorder_gathered_at(&ring, 9, cox_recorder_result_word(3, 88), 5);
    cox_recorder_handled_at(&ring, 9, 6);
    published.submitted = published.packing = published.published = 7;
    cox_recorder_publish(&ring, later, &published);
    struct cox_record read = read_record(true, 9);
    assert_true(read.sequence == later && read.published_ns == 7);
    assert_true(!read.woken_ns && !read.gathered_ns && !read.handled_ns);
    assert_true(!read.status && !read.reply_size);
}

/* ---- ticks ---- */

static struct cox_recorder *ticking_recorder(void)
{
    struct cox_recorder *own = NULL;
    int fd = memory_make(0, 0, NULL);
    uint8_t *base = mmap(NULL, area_size(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_true(base != MAP_FAILED);
    cox_recorder_area_init(base, 0, 7, NULL, COX_RECORDER_TICKS);
    munmap(base, area_size());
    assert_int_equal(cox_recorder_attach(fd, 0, 0, 1, 1, &own), 0);
    return own;
}

#define MARGIN_NS 1000000 /* far more than the conversion is off */

PLAIN_TEST(m18_ticks_are_read_as_the_time_they_were)
{
    if (cox_recorder_clock_find() != COX_RECORDER_TICKS)
        skip();
    struct cox_recorder *own = ticking_recorder();
    const struct cox_recorder_requests ring = cox_recorder_requests(own, EXECUTE);
    uint8_t *bytes = test_own(malloc(area_size()), free);
    assert_true(ring.plain);
    for (uint64_t sequence = 1; sequence <= 100; sequence++) {
        struct cox_record read;
        const uint64_t before = cox_now_ns();
        cox_recorder_take(&ring, sequence, cox_recorder_request_word(1, 3));
        cox_recorder_begin(&ring, sequence, 1); /* the caller's own clock is not used */
        if (sequence % 2) {
            cox_recorder_end(&ring, sequence, 1);
            cox_recorder_reply(&ring, sequence, cox_recorder_result_word(0, 4));
        }
        const uint64_t after = cox_now_ns();
        cox_recorder_copy(own->area, own->area, false, bytes);
        assert_true(cox_recorder_read(bytes, false, EXECUTE, (uint32_t)sequence, &read));
        assert_in_range(read.taken_ns, before - MARGIN_NS, after + MARGIN_NS);
        assert_in_range(read.begin_ns, read.taken_ns, after + MARGIN_NS);
        assert_int_equal(read.end_ns != 0 && read.reply_ns != 0, sequence % 2);
        if (sequence % 2) {
            assert_in_range(read.end_ns, read.begin_ns, after + MARGIN_NS);
            assert_in_range(read.reply_ns, read.end_ns, after + MARGIN_NS);
        }
    }
    cox_recorder_unref(own);
}

/* Words of any kind in the head and the records: the copy has some times. */
PLAIN_TEST(m18_hostile_ticks_are_converted_to_something)
{
    const uint64_t odd[] = {0, 1, UINT64_C(1) << 62, UINT64_C(1) << 63, UINT64_MAX};
    const size_t count = sizeof odd / sizeof odd[0];
    uint8_t *area = test_own(aligned_alloc(64, area_size()), free);
    uint8_t *bytes = test_own(malloc(area_size()), free);
    memset(area, 0, area_size());
    struct cox_recorder_layout_head *head = (void *)area;
    cox_recorder_area_init(area, 0, 7, NULL, COX_RECORDER_TICKS);
    struct cox_recorder_layout_request *records =
        (void *)(area + cox_recorder_ring_offset(false, EXECUTE));
    for (size_t i = 0; i < count * count * count; i++) {
        struct cox_record read;
        head->ticks = odd[i % count];
        head->ns = odd[i / count % count];
        atomic_store(&records[1].index, 1);
        atomic_store(&records[1].taken_ns, odd[i / count / count]);
        atomic_store(&records[1].reply_ns, UINT64_MAX - i);
        cox_recorder_copy(area, area, false, bytes);
        assert_true(cox_recorder_read(bytes, false, EXECUTE, 1, &read));
        assert_true(read.taken_ns <= UINT64_C(1) << 62 && read.reply_ns <= UINT64_C(1) << 62);
    }
}

/* ---- operations of the rank group ---- */

PLAIN_TEST(operations_are_added_to_their_step)
{
    struct cox_record_operation operation;
    const struct cox_recorder_requests ring = rank_recorder();
    const struct cox_recorder_operation begun = {
        .kind = 2, .slot = 1, .round = 5, .size = 100, .epoch = 8};
    cox_recorder_take_at(&ring, 1, cox_recorder_request_word(1, 0), 10);
    for (uint64_t i = 0; i < 3; i++) {
        uint64_t number = cox_recorder_operation_begin(recorder, &begun, 100);
        assert_int_equal(number, i + 1);
        cox_recorder_operation_arrived(recorder, number, 100, 107);
        cox_recorder_operation_end(recorder, number, 0, 110);
    }
    cox_recorder_group(recorder, &ring, 1, 0, 0);
    cox_recorder_end_at(&ring, 1, 120);
    struct cox_record read = read_record(false, 1);
    assert_int_equal(read.group_count, 3);
    assert_int_equal(read.group_wait_ns, 21);
    assert_true(cox_recorder_read_operation(copy, 2, &operation));
    assert_int_equal(operation.number, 2);
    assert_int_equal(operation.kind, 2);
    assert_int_equal(operation.slot, 1);
    assert_int_equal(operation.size, 100);
    assert_int_equal(operation.arrived_ns - operation.begin_ns, 7);
    assert_int_equal(operation.end_ns, 110);
    assert_false(cox_recorder_read_operation(copy, 4, &operation));
    /* A wait of 78 hours and more is cut, and is no operation more. */
    cox_recorder_operation_arrived(recorder, 3, 0, UINT64_C(1) << 48);
    cox_recorder_group(recorder, &ring, 1, 1, 0);
    read = read_record(false, 1);
    assert_int_equal(read.group_count, 2);
    assert_int_equal(read.group_wait_ns, 21);
}

/* ---- another clock ---- */

PLAIN_TEST(times_move_to_another_clock)
{
    struct cox_record read;
    struct cox_record_operation operation;
    uint8_t *before = test_own(malloc(area_size()), free);
    const struct cox_recorder_requests ring = rank_recorder(),
                                       other =
                                           cox_recorder_requests(recorder, COX_CHANNEL_TRANSFER);
    const struct cox_recorder_operation begun = {.kind = 1, .round = 5, .size = 100, .epoch = 8};
    record(&ring, 1000);
    cox_recorder_take_at(&ring, 1001, cox_recorder_request_word(1, 2), 20); /* not executed yet */
    record(&other, 3);
    const uint64_t number = cox_recorder_operation_begin(recorder, &begun, 10001);
    cox_recorder_operation_arrived(recorder, number, 10001, 10002);
    cox_recorder_group(recorder, &ring, 1000, 0, 0);
    cox_recorder_copy(recorder->area, recorder->area, false, copy);
    memcpy(before, copy, area_size());
    cox_recorder_shift(copy, 500);
    assert_true(cox_recorder_read(copy, false, EXECUTE, 1000, &read));
    assert_true(read.taken_ns == 10500 && read.begin_ns == 10501 && read.end_ns == 10502 &&
                read.reply_ns == 10503);
    assert_true(read.type == 1000 && read.size == 1000 && read.status == 0 &&
                read.group_wait_ns == 1);
    assert_true(cox_recorder_read(copy, false, EXECUTE, 1001, &read));
    assert_true(read.taken_ns == 520 && !read.begin_ns && !read.end_ns && !read.reply_ns);
    assert_true(cox_recorder_read(copy, false, COX_CHANNEL_TRANSFER, 3, &read));
    assert_int_equal(read.reply_ns, 533);
    assert_true(cox_recorder_read_operation(copy, (uint32_t)number, &operation));
    assert_true(operation.begin_ns == 10501 && operation.arrived_ns == 10502 && !operation.end_ns);
    assert_true(operation.round == 5 && operation.epoch == 8 && operation.size == 100);
    cox_recorder_shift(copy, -500);
    assert_memory_equal(copy, before, area_size());
    /* Times before the other machine was started, and those that nobody has written. */
    cox_recorder_shift(copy, -25);
    assert_true(cox_recorder_read(copy, false, EXECUTE, 1001, &read));
    assert_int_equal(read.taken_ns, 1);
    cox_recorder_shift(copy, INT64_MIN);
    cox_recorder_shift(copy, INT64_MAX);
    cox_recorder_shift(copy, INT64_MAX);
    assert_true(cox_recorder_read(copy, false, EXECUTE, 1001, &read));
    assert_int_equal(read.taken_ns, UINT64_MAX);
}

/* ---- the coordinator's ---- */

PLAIN_TEST(the_coordinator_records_in_its_own_memory)
{
    const uint64_t asked[2] = {5, 1};
    const struct cox_recorder_submits ring = coordinator_recorder();
    const struct cox_recorder_published published = {
        .submitted = 1,
        .packing = 2,
        .published = 3,
        .request = cox_recorder_request_word(1, 77),
        .asked = asked,
    };
    cox_recorder_publish(&ring, 9, &published);
    cox_recorder_woken_at(&ring, 9, 4);
    cox_recorder_gathered_at(&ring, 9, cox_recorder_result_word(-ENOMEM, 88), 5);
    cox_recorder_handled_at(&ring, 9, 6);
    struct cox_record read = read_record(true, 9);
    assert_int_equal(read.sequence, 9);
    assert_int_equal(read.submitted_ns, 1);
    assert_int_equal(read.packing_ns, 2);
    assert_int_equal(read.published_ns, 3);
    assert_int_equal(read.woken_ns, 4);
    assert_int_equal(read.gathered_ns, 5);
    assert_int_equal(read.handled_ns, 6);
    assert_int_equal(read.type, 1);
    assert_int_equal(read.size, 77);
    assert_int_equal(read.status, -ENOMEM);
    assert_int_equal(read.reply_size, 88);
    assert_memory_equal(read.asked, asked, sizeof asked);
}

/* ---- hostile bytes ---- */

PLAIN_TEST(m18_bytes_of_any_kind_are_refused_or_read)
{
    uint8_t *bytes = test_own(calloc(1, area_size()), free);
    struct cox_record_head head;
    struct cox_error err = {0};
    bool coordinator;
    assert_refused(cox_recorder_check(bytes, area_size(), &coordinator, &head, test_err()),
                   COX_CORRUPT, "magic");
    err = (struct cox_error){0};
    assert_int_equal(cox_recorder_check(bytes, 10, &coordinator, &head, &err), COX_CORRUPT);
    uint64_t seed = 1;
    for (int round = 0; round < 50; round++) {
        for (uint64_t i = 0; i < area_size(); i++) {
            seed = seed * UINT64_C(6364136223846793005) + 1442695040888963407;
            bytes[i] = (uint8_t)(seed >> 56);
        }
        cox_recorder_area_init(bytes, (uint32_t)round, 1, NULL, COX_RECORDER_NS);
        if (round % 3 == 1)
            memset(bytes + 12, 0xff, 3); /* a rank that there cannot be */
        err = (struct cox_error){0};
        const int r = cox_recorder_check(bytes, area_size(), &coordinator, &head, &err);
        assert_int_equal(r, round % 3 == 1 ? COX_CORRUPT : 0);
        for (int ring = 0; ring < COX_TWO_WAY_COUNT; ring++)
            for (uint32_t i = 0; i < cox_recorder_capacity(ring); i++) {
                struct cox_record read;
                if (cox_recorder_read(bytes, false, ring, i, &read))
                    assert_int_equal(read.sequence % cox_recorder_capacity(ring), i);
            }
        for (uint32_t i = 0; i < COX_RECORDER_OPERATION_COUNT; i++) {
            struct cox_record_operation read;
            cox_recorder_read_operation(bytes, i, &read);
        }
    }
}

/* ---- files ---- */

PLAIN_TEST(a_rank_records_in_the_file_that_it_is_told)
{
    const char *folder = test_folder();
    char path[COX_RECORDER_PATH_SIZE];
    struct cox_recorder *own = NULL;
    int file_fd = -1;
    assert_ok(cox_recording_ring_path(folder, "g", 0, path, test_err()));
    assert_ok(cox_recorder_file_create(path, 0, 7, &file_fd, test_err()));
    int fd = memory_make(0, 0, path);
    assert_int_equal(cox_recorder_attach(fd, 0, 0, 1, 1, &own), 0);
    struct cox_recorder_requests ring = cox_recorder_requests(own, COX_CHANNEL_EXECUTE);
    record(&ring, 5);
    cox_recorder_operation_begin(own, &(struct cox_recorder_operation){.kind = 1, .size = 9}, 100);
    /* The file has what the memory has. */
    uint8_t *file = test_own(malloc(area_size()), free);
    assert_int_equal(pread(file_fd, file, area_size(), 0), area_size());
    assert_int_equal(cox_recorder_area_pid(file), getpid());
    const size_t at = sizeof(struct cox_recorder_layout_head);
    assert_memory_equal(file + at, own->area + at, area_size() - at);
    /* Another process truncates it: what comes next is missing there, and no process is harmed. */
    assert_int_equal(ftruncate(file_fd, 0), 0);
    record(&ring, 6);
    cox_recorder_unref(own);
    /* A file that is none: the memory is used. */
    assert_int_equal(truncate(path, 100), 0);
    assert_int_equal(cox_recorder_attach(fd, 0, 0, 1, 1, &own), 0);
    uint8_t *memory = mmap(NULL, area_size(), PROT_READ, MAP_SHARED, fd, 0);
    assert_int_equal(cox_recorder_area_pid(memory), getpid());
    munmap(memory, area_size());
    cox_recorder_unref(own);
    close(file_fd);
}

PLAIN_TEST(crash_files_are_bounded_and_whole)
{
    const char *folder = test_folder();
    _cox_cleanup_(cox_recording_freep) CoxswainRecording__Recording *made =
        cox_recording_new("g", "death", "rank 1 died", 2);
    struct cox_error err = {0};
    char path[COX_RECORDER_PATH_SIZE], cause[COX_RECORDER_PATH_SIZE];
    char first[4][COX_RECORDER_PATH_SIZE];
    uint8_t *bytes;
    size_t size;
    assert_non_null(made);
    assert_int_equal(cox_recording_pack(made, &bytes, &size), 0);
    /* The one of another cause stays, whatever comes after it. */
    assert_int_equal(cox_recording_write(folder, "g", "death", bytes, size, cause, &err), 0);
    for (int i = 0; i < COX_CRASH_FILE_COUNT_MAX + 3; i++) {
        char name[16];
        snprintf(name, sizeof name, "%c%d", 'z' - i, i); /* the oldest by time, not by name */
        assert_int_equal(cox_recording_write(folder, name, "start", bytes, size, path, &err), 0);
        if (i < 4)
            strcpy(first[i], path);
    }
    for (int i = 0; i < 3; i++)
        assert_int_equal(access(first[i], F_OK), -1);
    assert_int_equal(access(first[3], F_OK), 0);
    assert_int_equal(access(cause, F_OK), 0);
    CoxswainRecording__Recording *read = NULL;
    assert_int_equal(cox_recording_read(path, &read, &err), 0);
    assert_string_equal(read->text, "rank 1 died");
    cox_recording_free(read);
    /* Cut off anywhere, or with another byte: an error, or another recording. */
    for (size_t cut = 0; cut < size; cut++) {
        err = (struct cox_error){0};
        read = NULL;
        int r = cox_recording_unpack(bytes, cut, &read, &err);
        assert_true(r == 0 || (r == COX_CORRUPT && err.text[0]));
        cox_recording_free(read);
        bytes[cut] ^= 0x55;
        read = NULL;
        if (cox_recording_unpack(bytes, size, &read, NULL) == 0)
            cox_recording_free(read);
        bytes[cut] ^= 0x55;
    }
    free(bytes);
    assert_refused(
        cox_recording_write("/proc/none", "g", "death", (const uint8_t *)"x", 1, path, test_err()),
        -ENOENT, "/proc/none");
    assert_int_equal(cox_recording_of_rings(folder, "none", &read, &err), COX_NOT_FOUND);
}

/* ---- what a dead group has left ---- */

static const char *ring_path(const char *folder, uint32_t rank)
{
    static char path[COX_RECORDER_PATH_SIZE];
    assert_int_equal(cox_recording_ring_path(folder, "g", rank, path, NULL), 0);
    return path;
}

/* The file of one rank, with the recorder of another one, or of another group. */
static void ring_make(const char *folder, uint32_t file, uint32_t rank, uint32_t group_incarnation)
{
    int fd = -1;
    assert_ok(cox_recorder_file_create(ring_path(folder, file), rank, group_incarnation, &fd,
                                       test_err()));
    close(fd);
}

PLAIN_TEST(m18_rings_of_others_are_left_out)
{
    const char *folder = test_folder();
    _cox_cleanup_(cox_recording_freep) CoxswainRecording__Recording *read = NULL;
    struct cox_recorder *own = NULL;
    assert_ok(cox_recorder_new_coordinator(ring_path(folder, COX_RECORDER_COORDINATOR), 7,
                                           COX_RECORDER_NS, &own, test_err()));
    cox_recorder_unref(own);
    ring_make(folder, 0, 0, 7);
    ring_make(folder, 1, 1, 6); /* of the group before */
    ring_make(folder, 2, 2, 7);
    ring_make(folder, 3, 2, 7); /* of another rank */
    assert_ok(cox_recording_of_rings(folder, "g", &read, test_err()));
    assert_int_equal(read->n_ranks, 3);
    assert_true(read->ranks[0]->has_recorder && !read->ranks[1]->has_recorder &&
                read->ranks[2]->has_recorder);

    ring_make(folder, COX_RECORDER_COORDINATOR, 0, 7);
    CoxswainRecording__Recording *none = NULL;
    assert_int_equal(cox_recording_of_rings(folder, "g", &none, test_err()), COX_CORRUPT);
    assert_null(none);
    cox_recording_rings_remove(folder, "g");
    assert_int_equal(access(ring_path(folder, 2), F_OK), -1);
}

PLAIN_TEST(m18_a_name_is_locked_once)
{
    const char *folder = test_folder();
    char missing[COX_RECORDER_PATH_SIZE];
    int first = -1, second = -1;
    assert_ok(cox_recording_lock(folder, "g", &first, test_err()));
    assert_refused(cox_recording_lock(folder, "g", &second, test_err()), COX_TAKEN, "a live group");
    cox_recording_unlock(folder, "g", &first);
    assert_ok(cox_recording_lock(folder, "g", &first, test_err()));
    cox_recording_unlock(folder, "g", &first);
    snprintf(missing, sizeof missing, "%s/none", folder);
    assert_refused(cox_recording_lock(missing, "g", &second, test_err()), -ENOENT, "none/");
    assert_int_equal(second, -1);
}
