#include "recorder.h"

#include "channel/base/base_internal.h"
#include "channel/base/idioms.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define WORDS(type) (sizeof(struct type) / sizeof(uint64_t))

static uint64_t record_size(bool coordinator)
{
    return coordinator ? sizeof(struct cox_recorder_layout_submit)
                       : sizeof(struct cox_recorder_layout_request);
}

static int ring_count(bool coordinator)
{
    return coordinator ? COX_RECORDER_GROUP : COX_RECORDER_RING_COUNT;
}

/* ---- the clock of requests ---- */

#define CLOCK_PATH "/sys/devices/system/clocksource/clocksource0/current_clocksource"

enum cox_recorder_clock cox_recorder_clock_find(void)
{
#ifdef __x86_64__
    static const char counter[] = "tsc\n";
    char name[sizeof counter - 1];
    _cox_cleanup_(cox_close_fd) int fd = open(CLOCK_PATH, O_RDONLY | O_CLOEXEC);
    if (fd >= 0 && read(fd, name, sizeof name) == (ssize_t)sizeof name &&
        memcmp(name, counter, sizeof name) == 0)
        return COX_RECORDER_TICKS;
#endif
    return COX_RECORDER_NS;
}

struct clocks {
    uint64_t ticks, ns;
};

/* Both clocks at one time: of some tries the one that took the shortest. */
static struct clocks clocks_read(void)
{
    struct clocks clocks = {0};
    uint64_t shortest = UINT64_MAX;
    for (int i = 0; i < 5; i++) {
        const uint64_t before = cox_recorder_ticks(), ns = cox_now_ns(),
                       took = cox_recorder_ticks() - before;
        if (took < shortest) {
            clocks = (struct clocks){.ticks = before + took / 2, .ns = ns};
            shortest = took;
        }
    }
    return clocks;
}

/* ---- areas ---- */

static struct cox_recorder_layout_head head_make(uint32_t rank, uint32_t group_incarnation,
                                                 const char *path)
{
    struct cox_recorder_layout_head head = {
        .magic = COX_RECORDER_MAGIC,
        .version = COX_RECORDER_VERSION,
        .rank = rank,
        .size = cox_recorder_area_size(rank == COX_RECORDER_COORDINATOR),
        .group_incarnation = group_incarnation,
    };
    if (path)
        memcpy(head.path, path, strnlen(path, sizeof head.path - 1));
    return head;
}

void cox_recorder_area_init(void *area, uint32_t rank, uint32_t group_incarnation, const char *path,
                            enum cox_recorder_clock clock)
{
    struct cox_recorder_layout_head head = head_make(rank, group_incarnation, path);
    if (clock == COX_RECORDER_TICKS && !(path && path[0])) {
        const struct clocks now = clocks_read();
        head.clock = clock;
        head.ticks = now.ticks;
        head.ns = now.ns;
    }
    if (cox_recorder_area_pid(area)) /* else it is zero: pages that no process uses stay free */
        memset((uint8_t *)area + sizeof head, 0, head.size - sizeof head);
    memcpy(area, &head, sizeof head); /* no process uses the area at this time */
}

static int file_create(const char *path, uint64_t size, int *ret_fd, struct cox_error *err)
{
    if (unlink(path) < 0 && errno != ENOENT)
        return cox_fail(err, -errno, "the recorder's file %s cannot be replaced: %s", path,
                        cox_status_text(-errno));
    _cox_cleanup_(cox_close_fd) int fd =
        open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    int r = fd < 0 ? -errno : cox_fd_raise(&fd);
    if (r)
        return cox_fail(err, r, "the recorder's file %s cannot be created: %s", path,
                        cox_status_text(r));
    /* Reserved now: a record that found no space would be missing. */
    r = posix_fallocate(fd, 0, (off_t)size);
    if (r) {
        unlink(path);
        return cox_fail(err, r == ENOSPC || r == EDQUOT ? COX_NO_SPACE : -r,
                        "the recorder's file %s needs %" PRIu64 " bytes: %s", path, size,
                        cox_status_text(-r));
    }
    *ret_fd = cox_steal_fd(&fd);
    return 0;
}

int cox_recorder_file_create(const char *path, uint32_t rank, uint32_t group_incarnation,
                             int *ret_fd, struct cox_error *err)
{
    const struct cox_recorder_layout_head head = head_make(rank, group_incarnation, NULL);
    _cox_cleanup_(cox_close_fd) int fd = -1;
    int r = file_create(path, cox_recorder_area_size(rank == COX_RECORDER_COORDINATOR), &fd, err);
    if (r)
        return r;
    const ssize_t size = pwrite(fd, &head, sizeof head, 0);
    if (size != (ssize_t)sizeof head) {
        r = size < 0 ? -errno : -EIO;
        unlink(path);
        return cox_fail(err, r, "the recorder's file %s cannot be written: %s", path,
                        cox_status_text(r));
    }
    *ret_fd = cox_steal_fd(&fd);
    return 0;
}

/* ---- handles ---- */

static bool area_is_valid(const void *area, uint32_t rank)
{
    const struct cox_recorder_layout_head *head = area;
    /* acquire: partner is cox_recorder_area_init. */
    return atomic_load_explicit(&head->magic, memory_order_acquire) == COX_RECORDER_MAGIC &&
           head->version == COX_RECORDER_VERSION && head->rank == rank;
}

/* The file of the area, if the coordinator made it for this rank. -1: there is none. */
static int file_open(const char *path, uint32_t rank)
{
    struct cox_recorder_layout_head head;
    struct stat st;
    _cox_cleanup_(cox_close_fd) int fd = open(path, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 || cox_fd_raise(&fd) || fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) ||
        st.st_uid != geteuid() || pread(fd, &head, sizeof head, 0) != (ssize_t)sizeof head ||
        !area_is_valid(&head, rank))
        return -1;
    return cox_steal_fd(&fd);
}

void cox_recorder_write(const struct cox_recorder *recorder, const void *record, size_t size)
{
    /* Other threads may store words of it meanwhile, each with a write of its own to follow. As a
     * system call: ThreadSanitizer takes pwrite for loads that are not atomic. */
    const long written = syscall(SYS_pwrite64, recorder->file_fd, record, size,
                                 (off_t)((const uint8_t *)record - recorder->area));
    (void)written;
}

/* Takes the area, a mapping, and the file. */
static int recorder_new(uint8_t *area, uint64_t size, int file_fd, uint32_t incarnation,
                        uint64_t start, struct cox_recorder **ret_recorder)
{
    struct cox_recorder *recorder = calloc(1, sizeof *recorder);
    struct cox_recorder_layout_head *head = (void *)area;
    if (!recorder) {
        munmap(area, size);
        cox_close_fd(&file_fd);
        return -ENOMEM;
    }
    /* relaxed, all but the last: no other thread has it, and pid is stored with release. */
    atomic_store_explicit(&recorder->references, 1, memory_order_relaxed);
    recorder->area = area;
    recorder->size = size;
    recorder->file_fd = file_fd;
    atomic_store_explicit(&head->incarnation, incarnation, memory_order_relaxed);
    atomic_store_explicit(&head->start, start, memory_order_relaxed);
    /* Partner: cox_recorder_area_pid. */
    atomic_store_explicit(&head->pid, (uint64_t)getpid(), memory_order_release);
    cox_recorder_save(recorder, head, sizeof *head);
    *ret_recorder = recorder;
    return 0;
}

int cox_recorder_attach(int fd, uint64_t offset, uint32_t rank, uint32_t incarnation,
                        uint64_t start, struct cox_recorder **ret_recorder)
{
    const uint64_t size = cox_recorder_area_size(false);
    struct stat st;
    if (fstat(fd, &st) < 0)
        return -errno;
    if ((uint64_t)st.st_size < offset + size) /* of a coordinator without recorders */
        return COX_NOT_FOUND;
    uint8_t *area = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)offset);
    if (area == MAP_FAILED)
        return -errno;
    if (!area_is_valid(area, rank)) {
        munmap(area, size);
        return COX_NOT_FOUND;
    }
    char path[COX_RECORDER_PATH_SIZE];
    memcpy(path, ((struct cox_recorder_layout_head *)(void *)area)->path, sizeof path);
    path[sizeof path - 1] = '\0';
    return recorder_new(area, size, path[0] ? file_open(path, rank) : -1, incarnation, start,
                        ret_recorder);
}

int cox_recorder_new_coordinator(const char *path, uint32_t group_incarnation,
                                 enum cox_recorder_clock clock, struct cox_recorder **ret_recorder,
                                 struct cox_error *err)
{
    const uint64_t size = cox_recorder_area_size(true);
    int file_fd = -1;
    int r = path ? cox_recorder_file_create(path, COX_RECORDER_COORDINATOR, group_incarnation,
                                            &file_fd, err)
                 : 0;
    if (r)
        return r;
    void *area = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (area == MAP_FAILED) {
        r = -errno;
        cox_close_fd(&file_fd);
        return cox_fail(err, r, "no memory for the recorder");
    }
    cox_recorder_area_init(area, COX_RECORDER_COORDINATOR, group_incarnation, NULL,
                           path ? COX_RECORDER_NS : clock);
    r = recorder_new(area, size, file_fd, 0, 0, ret_recorder);
    return r ? cox_fail(err, r, "no memory for the recorder") : 0;
}

struct cox_recorder *cox_recorder_ref(struct cox_recorder *recorder)
{
    /* relaxed: the caller has a reference. */
    if (recorder)
        atomic_fetch_add_explicit(&recorder->references, 1, memory_order_relaxed);
    return recorder;
}

struct cox_recorder *cox_recorder_unref(struct cox_recorder *recorder)
{
    /* acq_rel: the last one sees what the others did before. */
    if (recorder &&
        atomic_fetch_sub_explicit(&recorder->references, 1, memory_order_acq_rel) == 1) {
        munmap(recorder->area, recorder->size);
        cox_close_fd(&recorder->file_fd);
        free(recorder);
    }
    return NULL;
}

static bool is_plain(const struct cox_recorder *recorder)
{
    const struct cox_recorder_layout_head *head = (const void *)recorder->area;
    return head->clock == COX_RECORDER_TICKS && recorder->file_fd < 0;
}

struct cox_recorder_requests cox_recorder_requests(const struct cox_recorder *recorder,
                                                   enum cox_channel_id channel)
{
    struct cox_recorder_requests ring = {.mask = cox_recorder_capacity((int)channel) - 1,
                                         .recorder = recorder};
    if (recorder) {
        ring.records = (void *)(recorder->area + cox_recorder_ring_offset(false, (int)channel));
        ring.plain = is_plain(recorder);
    }
    return ring;
}

struct cox_recorder_submits cox_recorder_submits(const struct cox_recorder *recorder,
                                                 enum cox_channel_id channel)
{
    struct cox_recorder_submits ring = {.mask = cox_recorder_capacity((int)channel) - 1,
                                        .recorder = recorder};
    if (recorder) {
        ring.records = (void *)(recorder->area + cox_recorder_ring_offset(true, (int)channel));
        ring.plain = is_plain(recorder);
    }
    return ring;
}

/* ---- steps that are not recorded inline ---- */

/* The time in the clock of the recorder; time 0: it is now. */
static uint64_t time_of(const struct cox_recorder *recorder, uint64_t time)
{
    const struct cox_recorder_layout_head *head = (const void *)recorder->area;
    if (time)
        return time;
    return head->clock == COX_RECORDER_TICKS ? cox_recorder_ticks() : cox_now_ns();
}

void cox_recorder_take_at(const struct cox_recorder_requests *ring, uint64_t sequence,
                          uint64_t request, uint64_t time)
{
    cox_recorder_take_store(ring, sequence, request, time_of(ring->recorder, time));
    cox_recorder_save(ring->recorder, &ring->records[sequence & ring->mask], sizeof *ring->records);
}

/* Stores one time of a record. */
static void request_store(const struct cox_recorder_requests *ring, uint64_t sequence,
                          _Atomic uint64_t *word, uint64_t time)
{
    COX_RECORDER_STORE(word, time_of(ring->recorder, time));
    cox_recorder_save(ring->recorder, &ring->records[sequence & ring->mask], sizeof *ring->records);
}

void cox_recorder_begin_at(const struct cox_recorder_requests *ring, uint64_t sequence,
                           uint64_t time)
{
    request_store(ring, sequence, &ring->records[sequence & ring->mask].begin_ns, time);
}

void cox_recorder_end_at(const struct cox_recorder_requests *ring, uint64_t sequence, uint64_t time)
{
    request_store(ring, sequence, &ring->records[sequence & ring->mask].end_ns, time);
}

void cox_recorder_reply_at(const struct cox_recorder_requests *ring, uint64_t sequence,
                           uint64_t result, uint64_t time)
{
    cox_recorder_reply_store(ring, sequence, result, time_of(ring->recorder, time));
    cox_recorder_save(ring->recorder, &ring->records[sequence & ring->mask], sizeof *ring->records);
}

static void submit_store(const struct cox_recorder_submits *ring, uint64_t sequence,
                         _Atomic uint64_t *word, uint64_t time)
{
    COX_RECORDER_STORE(word, time_of(ring->recorder, time));
    cox_recorder_save(ring->recorder, &ring->records[sequence & ring->mask], sizeof *ring->records);
}

void cox_recorder_woken_at(const struct cox_recorder_submits *ring, uint64_t sequence,
                           uint64_t time)
{
    submit_store(ring, sequence, &ring->records[sequence & ring->mask].woken_ns, time);
}

void cox_recorder_gathered_at(const struct cox_recorder_submits *ring, uint64_t sequence,
                              uint64_t result, uint64_t time)
{
    struct cox_recorder_layout_submit *record = &ring->records[sequence & ring->mask];
    COX_RECORDER_STORE(&record->result, result);
    submit_store(ring, sequence, &record->gathered_ns, time);
}

void cox_recorder_handled_at(const struct cox_recorder_submits *ring, uint64_t sequence,
                             uint64_t time)
{
    submit_store(ring, sequence, &ring->records[sequence & ring->mask].handled_ns, time);
}

/* ---- operations of the rank group ---- */

void cox_recorder_group(const struct cox_recorder *recorder,
                        const struct cox_recorder_requests *ring, uint64_t sequence, uint64_t count,
                        uint64_t waited_ns)
{
    if (!recorder)
        return;
    /* relaxed: sums; a callback that has returned has ended its operations. */
    count = atomic_load_explicit(&recorder->operations, memory_order_relaxed) - count;
    waited_ns = atomic_load_explicit(&recorder->waited_ns, memory_order_relaxed) - waited_ns;
    const uint64_t word =
        (count < UINT16_MAX ? count : UINT16_MAX) << 48 | (waited_ns & ((UINT64_C(1) << 48) - 1));
    COX_RECORDER_STORE(&ring->records[sequence & ring->mask].group, word);
}

static struct cox_recorder_layout_operation *operation_of(const struct cox_recorder *recorder,
                                                          uint64_t number)
{
    struct cox_recorder_layout_operation *records =
        (void *)(recorder->area + cox_recorder_ring_offset(false, COX_RECORDER_GROUP));
    return &records[number % COX_RECORDER_OPERATION_COUNT];
}

uint64_t cox_recorder_operation_begin(struct cox_recorder *recorder,
                                      const struct cox_recorder_operation *operation,
                                      uint64_t now_ns)
{
    /* Threads may operate in subgroups at the same time: each gets a record of its own. relaxed:
     * only the number matters. */
    const uint64_t number =
        atomic_fetch_add_explicit(&recorder->operations, 1, memory_order_relaxed) + 1;
    struct cox_recorder_layout_operation *record = operation_of(recorder, number);
    /* relaxed: as in cox_recorder_take_store. */
    atomic_store_explicit(&record->index, 0, memory_order_relaxed);
    COX_RECORDER_STORE(&record->begin_ns, now_ns);
    COX_RECORDER_STORE(&record->arrived_ns, 0);
    COX_RECORDER_STORE(&record->end_ns, 0);
    COX_RECORDER_STORE(&record->operation, (uint64_t)(operation->kind & 0xff) << 56 |
                                               (uint64_t)(operation->slot & 0xff) << 48 |
                                               (operation->size & ((UINT64_C(1) << 48) - 1)));
    COX_RECORDER_STORE(&record->result, 0);
    COX_RECORDER_STORE(&record->round, operation->round);
    COX_RECORDER_STORE(&record->epoch, operation->epoch);
    COX_RECORDER_STORE(&record->index, number);
    cox_recorder_save(recorder, record, sizeof *record);
    return number;
}

void cox_recorder_operation_arrived(struct cox_recorder *recorder, uint64_t number,
                                    uint64_t begin_ns, uint64_t now_ns)
{
    COX_RECORDER_STORE(&operation_of(recorder, number)->arrived_ns, now_ns);
    /* relaxed: a sum. */
    atomic_fetch_add_explicit(&recorder->waited_ns, now_ns - begin_ns, memory_order_relaxed);
}

void cox_recorder_operation_end(struct cox_recorder *recorder, uint64_t number, int status,
                                uint64_t now_ns)
{
    struct cox_recorder_layout_operation *record = operation_of(recorder, number);
    COX_RECORDER_STORE(&record->result, cox_recorder_result_word(status, 0));
    COX_RECORDER_STORE(&record->end_ns, now_ns);
    cox_recorder_save(recorder, record, sizeof *record); /* with its arrival */
}

/* ---- reading ---- */

/* Returns true if the record was overwritten while it was copied. */
static bool record_copy(const _Atomic uint64_t *record, const _Atomic uint64_t *again, size_t words,
                        uint64_t *copy)
{
    /* acquire, all: a word of a later record is seen together with the 0 in its index; partners are
     * the release stores. */
    const uint64_t index = atomic_load_explicit(&record[0], memory_order_acquire);
    copy[0] = index;
    for (size_t i = words - 1; i > 0; i--)
        copy[i] = atomic_load_explicit(&record[i], memory_order_acquire);
    const bool overwritten = atomic_load_explicit(&again[0], memory_order_acquire) != index;
    if (overwritten || index == 0)
        memset(copy, 0, words * sizeof *copy);
    return overwritten;
}

/* The word of a field. */
#define FIELD(words, type, field) words[offsetof(struct type, field) / sizeof(uint64_t)]

/* Clears what an earlier request has left in the record of a later one (recorder_layout.h). */
static void request_settle(uint64_t *words)
{
    const uint64_t taken = FIELD(words, cox_recorder_layout_request, taken_ns);
    if (FIELD(words, cox_recorder_layout_request, begin_ns) < taken)
        FIELD(words, cox_recorder_layout_request, begin_ns) = 0;
    if (FIELD(words, cox_recorder_layout_request, end_ns) < taken) {
        FIELD(words, cox_recorder_layout_request, end_ns) = 0;
        FIELD(words, cox_recorder_layout_request, group) = 0;
    }
    if (FIELD(words, cox_recorder_layout_request, reply_ns) < taken) {
        FIELD(words, cox_recorder_layout_request, reply_ns) = 0;
        FIELD(words, cox_recorder_layout_request, result) = 0;
    }
}

static void submit_settle(uint64_t *words)
{
    const uint64_t submitted = FIELD(words, cox_recorder_layout_submit, submitted_ns);
    if (FIELD(words, cox_recorder_layout_submit, woken_ns) < submitted)
        FIELD(words, cox_recorder_layout_submit, woken_ns) = 0;
    if (FIELD(words, cox_recorder_layout_submit, gathered_ns) < submitted) {
        FIELD(words, cox_recorder_layout_submit, gathered_ns) = 0;
        FIELD(words, cox_recorder_layout_submit, result) = 0;
    }
    if (FIELD(words, cox_recorder_layout_submit, handled_ns) < submitted)
        FIELD(words, cox_recorder_layout_submit, handled_ns) = 0;
}

/* How ticks become ns: by the clocks now, and their rate since the area was made. */
struct conversion {
    struct clocks now;
    double rate;
};

/* The head's pair may be any numbers. */
static struct conversion conversion_make(const struct cox_recorder_layout_head *head)
{
    struct conversion conversion = {.now = clocks_read()};
    const struct clocks made = {.ticks = head->ticks, .ns = head->ns};
    if (conversion.now.ticks > made.ticks && conversion.now.ns > made.ns)
        conversion.rate =
            (double)(conversion.now.ns - made.ns) / (double)(conversion.now.ticks - made.ticks);
    return conversion;
}

static void word_convert(const struct conversion *conversion, uint64_t *word)
{
    if (*word == 0)
        return;
    /* Signed: a record may be younger than the pair. */
    const double since = (double)(int64_t)(*word - conversion->now.ticks) * conversion->rate;
    const double ns = (double)conversion->now.ns + since;
    if (ns < 1)
        *word = 1;
    else if (ns >= 0x1p62) /* no time that there can be */
        *word = UINT64_C(1) << 62;
    else
        *word = conversion->now.ns + (uint64_t)(int64_t)since;
}

/* The times in a record of a rank's request. */
static const size_t of_request[] = {
    offsetof(struct cox_recorder_layout_request, taken_ns),
    offsetof(struct cox_recorder_layout_request, begin_ns),
    offsetof(struct cox_recorder_layout_request, end_ns),
    offsetof(struct cox_recorder_layout_request, reply_ns),
};

static void record_convert(const struct conversion *conversion, bool coordinator, uint64_t *words)
{
    static const size_t of_submit[] = {
        offsetof(struct cox_recorder_layout_submit, submitted_ns),
        offsetof(struct cox_recorder_layout_submit, packing_ns),
        offsetof(struct cox_recorder_layout_submit, published_ns),
        offsetof(struct cox_recorder_layout_submit, woken_ns),
        offsetof(struct cox_recorder_layout_submit, gathered_ns),
        offsetof(struct cox_recorder_layout_submit, handled_ns),
    };
    const size_t *offsets = coordinator ? of_submit : of_request;
    const size_t count = coordinator ? sizeof of_submit / sizeof of_submit[0]
                                     : sizeof of_request / sizeof of_request[0];
    for (size_t i = 0; i < count; i++)
        word_convert(conversion, &words[offsets[i] / sizeof *words]);
}

/* The records of a ring, as record_copy. conversion NULL: their times are ns. */
static uint32_t ring_copy(const uint8_t *area, const uint8_t *again, bool coordinator, int ring,
                          const struct conversion *conversion, uint8_t *copy)
{
    const uint64_t size = record_size(coordinator);
    uint64_t offset = cox_recorder_ring_offset(coordinator, ring);
    uint32_t overwritten = 0;
    for (uint32_t i = 0; i < cox_recorder_capacity(ring); i++, offset += size) {
        uint64_t *words = (void *)(copy + offset);
        overwritten += record_copy((const void *)(area + offset), (const void *)(again + offset),
                                   size / sizeof(uint64_t), words);
        if (words[0] == 0 || ring == COX_RECORDER_GROUP)
            continue;
        if (coordinator)
            submit_settle(words);
        else
            request_settle(words);
        if (conversion)
            record_convert(conversion, coordinator, words);
    }
    return overwritten;
}

uint32_t cox_recorder_copy(const void *area, const void *again, bool coordinator, void *copy)
{
    uint32_t overwritten = 0;
    memset(copy, 0, sizeof(struct cox_recorder_layout_head));
    struct cox_recorder_layout_head *to = copy;
    const struct cox_recorder_layout_head *from = area;
    to->version = from->version;
    to->rank = from->rank;
    to->size = from->size;
    to->group_incarnation = from->group_incarnation;
    /* acquire: partner is recorder_new; relaxed: stored before it, or private. */
    atomic_init(&to->pid, atomic_load_explicit(&from->pid, memory_order_acquire));
    atomic_init(&to->incarnation, atomic_load_explicit(&from->incarnation, memory_order_relaxed));
    atomic_init(&to->start, atomic_load_explicit(&from->start, memory_order_relaxed));
    atomic_init(&to->magic, atomic_load_explicit(&from->magic, memory_order_acquire));
    const struct conversion conversion = conversion_make(from);
    for (int ring = 0; ring < ring_count(coordinator); ring++)
        overwritten += ring_copy(area, again, coordinator, ring,
                                 from->clock == COX_RECORDER_TICKS ? &conversion : NULL, copy);
    return overwritten;
}

static void word_shift(uint64_t *word, int64_t by)
{
    const uint64_t amount = by < 0 ? -(uint64_t)by : (uint64_t)by;
    if (*word == 0)
        return;
    if (by < 0)
        *word = *word > amount ? *word - amount : 1;
    else
        *word = *word < UINT64_MAX - amount ? *word + amount : UINT64_MAX;
}

void cox_recorder_shift(void *copy, int64_t by)
{
    static const size_t of_operation[] = {
        offsetof(struct cox_recorder_layout_operation, begin_ns),
        offsetof(struct cox_recorder_layout_operation, arrived_ns),
        offsetof(struct cox_recorder_layout_operation, end_ns),
    };
    for (int ring = 0; ring < COX_RECORDER_RING_COUNT; ring++) {
        const bool group = ring == COX_RECORDER_GROUP;
        const size_t *offsets = group ? of_operation : of_request;
        const size_t count = group ? sizeof of_operation / sizeof of_operation[0]
                                   : sizeof of_request / sizeof of_request[0];
        uint8_t *record = (uint8_t *)copy + cox_recorder_ring_offset(false, ring);
        for (uint32_t i = 0; i < cox_recorder_capacity(ring); i++, record += record_size(false))
            for (size_t k = 0; k < count; k++) {
                uint64_t word;
                memcpy(&word, record + offsets[k], sizeof word);
                word_shift(&word, by);
                memcpy(record + offsets[k], &word, sizeof word);
            }
    }
}

uint64_t cox_recorder_area_pid(const void *area)
{
    const struct cox_recorder_layout_head *head = area;
    /* acquire: partner is recorder_new. */
    return atomic_load_explicit(&head->pid, memory_order_acquire);
}

int cox_recorder_check(const void *copy, uint64_t size, bool *ret_coordinator,
                       struct cox_record_head *ret_head, struct cox_error *err)
{
    struct cox_recorder_layout_head head;
    if (size < sizeof head)
        return cox_fail(err, COX_CORRUPT, "a recorder of %" PRIu64 " bytes: expected %zu or more",
                        size, sizeof head);
    memcpy(&head, copy, sizeof head);
    /* relaxed, all: private memory. */
    if (atomic_load_explicit(&head.magic, memory_order_relaxed) != COX_RECORDER_MAGIC)
        return cox_fail(err, COX_CORRUPT, "these bytes are no recorder of Coxswain (magic)");
    if (head.version != COX_RECORDER_VERSION)
        return cox_fail(err, COX_VERSION,
                        "a recorder of version %" PRIu32 ", this program reads %u: read it with "
                        "the release that wrote it",
                        head.version, COX_RECORDER_VERSION);
    const bool coordinator = head.rank == COX_RECORDER_COORDINATOR;
    if (!coordinator && head.rank >= COX_RANK_COUNT_MAX)
        return cox_fail(err, COX_CORRUPT, "a recorder of rank %" PRIu32 ": expected 0 to %d",
                        head.rank, COX_RANK_COUNT_MAX - 1);
    const uint64_t expected = cox_recorder_area_size(coordinator);
    if (size < expected)
        return cox_fail(err, COX_CORRUPT, "a recorder of %" PRIu64 " bytes: expected %" PRIu64,
                        size, expected);
    *ret_coordinator = coordinator;
    *ret_head = (struct cox_record_head){
        .rank = head.rank,
        .incarnation = (uint32_t)atomic_load_explicit(&head.incarnation, memory_order_relaxed),
        .pid = atomic_load_explicit(&head.pid, memory_order_relaxed),
        .start = atomic_load_explicit(&head.start, memory_order_relaxed),
        .group_incarnation = head.group_incarnation,
    };
    return 0;
}

/* A record of a copy, as words. */
static const uint64_t *copy_words(const void *copy, bool coordinator, int ring, uint32_t i,
                                  uint64_t words[WORDS(cox_recorder_layout_submit)])
{
    const uint64_t size = record_size(coordinator);
    memcpy(words, (const uint8_t *)copy + cox_recorder_ring_offset(coordinator, ring) + i * size,
           size);
    return words;
}

bool cox_recorder_read(const void *copy, bool coordinator, int ring, uint32_t i,
                       struct cox_record *ret_record)
{
    uint64_t words[WORDS(cox_recorder_layout_submit)];
    copy_words(copy, coordinator, ring, i, words);
    /* A record that is not in its place was never written by this library. */
    if (words[0] == 0 || (words[0] & (cox_recorder_capacity(ring) - 1)) != i)
        return false;
    struct cox_record record = {.sequence = words[0]};
    uint64_t request, result;
    if (coordinator) {
        record.submitted_ns = FIELD(words, cox_recorder_layout_submit, submitted_ns);
        record.packing_ns = FIELD(words, cox_recorder_layout_submit, packing_ns);
        record.published_ns = FIELD(words, cox_recorder_layout_submit, published_ns);
        record.woken_ns = FIELD(words, cox_recorder_layout_submit, woken_ns);
        record.gathered_ns = FIELD(words, cox_recorder_layout_submit, gathered_ns);
        record.handled_ns = FIELD(words, cox_recorder_layout_submit, handled_ns);
        memcpy(record.asked, &FIELD(words, cox_recorder_layout_submit, asked), sizeof record.asked);
        request = FIELD(words, cox_recorder_layout_submit, request);
        result = FIELD(words, cox_recorder_layout_submit, result);
    } else {
        record.taken_ns = FIELD(words, cox_recorder_layout_request, taken_ns);
        record.begin_ns = FIELD(words, cox_recorder_layout_request, begin_ns);
        record.end_ns = FIELD(words, cox_recorder_layout_request, end_ns);
        record.reply_ns = FIELD(words, cox_recorder_layout_request, reply_ns);
        const uint64_t group = FIELD(words, cox_recorder_layout_request, group);
        record.group_count = (uint32_t)(group >> 48);
        record.group_wait_ns = group & ((UINT64_C(1) << 48) - 1);
        request = FIELD(words, cox_recorder_layout_request, request);
        result = FIELD(words, cox_recorder_layout_request, result);
    }
    record.type = (uint32_t)(request >> 32);
    record.size = (uint32_t)request;
    record.status = (int16_t)(uint16_t)(result >> 48);
    record.reply_size = result & ((UINT64_C(1) << 48) - 1);
    if (record.type == COX_TYPE_OPAQUE && record.begin_ns == 0) {
        record.begin_ns = record.taken_ns;
        record.end_ns = record.reply_ns;
    }
    *ret_record = record;
    return true;
}

bool cox_recorder_read_operation(const void *copy, uint32_t i,
                                 struct cox_record_operation *ret_operation)
{
    uint64_t words[WORDS(cox_recorder_layout_submit)];
    copy_words(copy, false, COX_RECORDER_GROUP, i, words);
    if (words[0] == 0 || words[0] % COX_RECORDER_OPERATION_COUNT != i)
        return false;
    const uint64_t operation = FIELD(words, cox_recorder_layout_operation, operation);
    *ret_operation = (struct cox_record_operation){
        .number = words[0],
        .begin_ns = FIELD(words, cox_recorder_layout_operation, begin_ns),
        .arrived_ns = FIELD(words, cox_recorder_layout_operation, arrived_ns),
        .end_ns = FIELD(words, cox_recorder_layout_operation, end_ns),
        .kind = (uint32_t)(operation >> 56),
        .slot = (uint32_t)(operation >> 48) & 0xff,
        .size = operation & ((UINT64_C(1) << 48) - 1),
        .status = (int16_t)(uint16_t)(FIELD(words, cox_recorder_layout_operation, result) >> 48),
        .round = FIELD(words, cox_recorder_layout_operation, round),
        .epoch = FIELD(words, cox_recorder_layout_operation, epoch),
    };
    return true;
}
