/* Large payloads in one process: what a sender makes, what a reader opens, and what it refuses. */
#include "testing.h"

#include "channel/memory/large_payload.h"
#include "channel/socket/control_socket.h"
#include "channel/handle/handle_internal.h"
#include "channel/base/peer.h"

#define SIZE 100000

static struct cox_large_payload_sender sender;
static struct cox_large_payload_origin self;

static void begin(void)
{
    cox_large_payload_sender_init(&sender);
    self = (struct cox_large_payload_origin){.pid = getpid()};
    assert_int_equal(cox_peer_start_time(getpid(), &self.start), 0);
}

static struct cox_large_payload payload_of(const char *socket_path, size_t size, uint8_t byte)
{
    struct cox_large_payload payload = {0};
    assert_ok(cox_large_payload_reserve(&sender, socket_path, size, &payload, test_err()));
    assert_true(payload.region.size >= size);
    memset(payload.region.base, byte, size);
    return payload;
}

static void end(struct cox_large_payload *payload)
{
    cox_large_payload_drop(&sender, payload);
    cox_large_payload_drop(&sender, payload);
    assert_int_equal(atomic_load(&sender.payload_count), 0);
    assert_int_equal(atomic_load(&sender.payload_bytes), 0);
    cox_large_payload_sender_deinit(&sender);
}

/* Every byte of a payload, through a mapping of its own. */
static int read_copy(const struct cox_large_payload_ref *ref, uint8_t *copy)
{
    struct cox_large_payload_view view = {0};
    const uint8_t *bytes;
    int r = cox_large_payload_view_map(&view, ref, &self, &bytes, NULL);
    if (r == 0)
        memcpy(copy, bytes, ref->size);
    cox_large_payload_view_drop(&view);
    return r;
}

TEST(m3_a_block_is_read_in_place)
{
    begin();
    struct cox_large_payload payload = payload_of(NULL, SIZE, 7);
    struct cox_large_payload_ref ref = cox_large_payload_refer(&payload, SIZE);
    struct cox_large_payload_view view = {0};
    const uint8_t *bytes, *again;
    assert_int_equal(cox_large_payload_view_map(&view, &ref, &self, &bytes, NULL), 0);
    assert_memory_equal(bytes, payload.region.base, SIZE);
    /* A small payload stays mapped, and is reused. */
    cox_large_payload_view_release(&view);
    memset(payload.region.base, 9, SIZE);
    ref.size = SIZE - 1;
    assert_int_equal(cox_large_payload_view_map(&view, &ref, &self, &again, NULL), 0);
    assert_ptr_equal(bytes, again);
    assert_int_equal(again[SIZE - 1], 9);
    /* It cannot be written, neither through the mapping nor through a new one. */
    assert_int_equal(mprotect(view.region.base, 4096, PROT_READ | PROT_WRITE), -1);
    assert_int_equal(errno, EACCES);
    cox_large_payload_view_drop(&view);
    cox_large_payload_view_drop(&view);
    int fd = -1;
    assert_int_equal(cox_handle_open(&ref.handle, NULL, 0, &fd, NULL), 0);
    assert_int_equal(fcntl(fd, F_GETFL) & O_ACCMODE, O_RDONLY);
    int writer = test_reopen(fd, O_RDWR); /* a seal prevents writes */
    assert_true(writer >= 0);
    assert_int_equal(pwrite(writer, "x", 1, 0), -1);
    assert_int_equal(errno, EPERM);
    assert_ptr_equal(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, writer, 0), MAP_FAILED);
    assert_int_equal(errno, EPERM);
    close(writer);
    close(fd);
    end(&payload);
}

TEST(m3_a_large_payload_outlives_its_sender_for_its_readers)
{
    begin();
    struct cox_large_payload payload = payload_of(NULL, 2 * COX_LARGE_PAYLOAD_KEEP_SIZE, 3);
    assert_true(cox_large_payload_is_transient(&payload));
    struct cox_large_payload_ref ref =
        cox_large_payload_refer(&payload, 2 * COX_LARGE_PAYLOAD_KEEP_SIZE);
    struct cox_large_payload_view view = {0};
    const uint8_t *bytes;
    assert_int_equal(cox_large_payload_view_map(&view, &ref, &self, &bytes, NULL), 0);
    end(&payload);
    assert_int_equal(bytes[2 * COX_LARGE_PAYLOAD_KEEP_SIZE - 1], 3);
    struct cox_large_payload_view late = {0};
    assert_int_equal(cox_large_payload_view_map(&late, &ref, &self, &bytes, NULL), COX_NOT_FOUND);
    cox_large_payload_view_release(&view); /* too large to be kept: unmapped */
    assert_null(view.region.base);
}

TEST(m3_what_is_filled_is_there_and_never_changes)
{
    static uint8_t content[] = "filled by parts";
    /* An empty one among them. */
    const struct iovec parts[] = {
        {content, 6}, {content + 6, 0}, {content + 6, sizeof content - 6}};
    struct cox_large_payload payload = {0};
    const uint8_t *bytes;
    char path[64];
    begin();
    assert_int_equal(cox_large_payload_fill(&sender, NULL, parts, sizeof content, &payload, NULL),
                     0);
    assert_int_equal(atomic_load(&sender.payload_bytes), sizeof content);
    const struct cox_handle first = payload.handle;
    const struct cox_large_payload_ref ref = cox_large_payload_refer(&payload, sizeof content);
    struct cox_large_payload_view view = {0};
    assert_int_equal(cox_large_payload_view_map(&view, &ref, &self, &bytes, NULL), 0);
    assert_memory_equal(bytes, content, sizeof content);
    int fd = -1;
    assert_int_equal(cox_handle_open(&payload.handle, NULL, COX_DEADLINE_NEVER, &fd, NULL), 0);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int writer = open(path, O_RDWR | O_CLOEXEC);
    assert_int_equal(pwrite(writer, "x", 1, 0), -1);
    assert_int_equal(errno, EPERM);
    close(writer);
    close(fd);
    /* It is for one message: what is reserved next can be written to. */
    assert_true(cox_large_payload_is_transient(&payload));
    assert_int_equal(cox_large_payload_reserve(&sender, NULL, 1, &payload, NULL), 0);
    assert_memory_not_equal(&first, &payload.handle, sizeof first);
    ((uint8_t *)payload.region.base)[0] = 1;
    assert_false(cox_large_payload_is_transient(&payload));
    cox_large_payload_view_drop(&view);
    end(&payload);
}

TEST(m3_memory_that_has_the_bytes_is_adopted)
{
    static const uint8_t content[] = "adopted";
    struct cox_payload_memory_pool pool;
    struct cox_payload_memory *memory = NULL;
    struct cox_large_payload payload = {0};
    const uint8_t *bytes;
    begin();
    cox_payload_memory_pool_init(&pool);
    assert_int_equal(cox_payload_memory_take(&pool, SIZE, &memory, NULL), 0);
    assert_int_equal(cox_payload_memory_fill(memory, 0, content, sizeof content, NULL), 0);
    /* Others could write to it. */
    assert_int_equal(cox_large_payload_adopt(&sender, NULL, memory, sizeof content, &payload, NULL),
                     -EBADF);
    assert_null(payload.region.base);
    assert_int_equal(cox_payload_memory_finish(memory, NULL), 0);
    assert_int_equal(cox_large_payload_adopt(&sender, NULL, memory, sizeof content, &payload, NULL),
                     0);
    cox_payload_memory_unref(memory);
    assert_int_equal(atomic_load(&sender.payload_bytes), sizeof content);
    assert_true(cox_large_payload_is_transient(&payload));
    const struct cox_large_payload_ref ref = cox_large_payload_refer(&payload, sizeof content);
    struct cox_large_payload_view view = {0};
    assert_int_equal(cox_large_payload_view_map(&view, &ref, &self, &bytes, NULL), 0);
    assert_memory_equal(bytes, content, sizeof content);
    assert_int_equal(view.region.size, sizeof content);
    cox_large_payload_view_drop(&view);
    assert_null(pool.kept);
    end(&payload);
    assert_ptr_equal(pool.kept, memory); /* no reader opens it any more */
    cox_payload_memory_pool_deinit(&pool);
}

TEST(m3_a_reserve_finds_what_is_large_enough)
{
    begin();
    struct cox_large_payload payload = payload_of(NULL, 1, 1);
    const struct cox_handle first = payload.handle;
    assert_int_equal(cox_large_payload_reserve(&sender, NULL, 65536, &payload, NULL), 0);
    assert_memory_equal(&first, &payload.handle, sizeof first);
    assert_int_equal(cox_large_payload_reserve(&sender, NULL, 65537, &payload, NULL), 0);
    assert_memory_not_equal(&first, &payload.handle, sizeof first);
    assert_int_equal(atomic_load(&sender.payload_count), 1);
    assert_int_equal(atomic_load(&sender.payload_bytes), 131072);
    assert_false(cox_large_payload_is_transient(&payload));
    assert_int_equal(
        cox_large_payload_reserve(&sender, NULL, COX_LARGE_PAYLOAD_SIZE_MAX + 1, &payload, NULL),
        COX_NO_SPACE);
    assert_null(payload.region.base);
    end(&payload);
}

TEST(m3_what_cannot_be_is_refused)
{
    begin();
    struct cox_large_payload payload = payload_of(NULL, SIZE, 7);
    const struct cox_large_payload_ref right = cox_large_payload_refer(&payload, SIZE);
    for (int which = 0; which < 9; which++) {
        struct cox_large_payload_ref ref = right;
        struct cox_large_payload_origin peer = self;
        struct cox_large_payload_view view = {0};
        struct cox_error err = {0};
        struct cox_handle_info info;
        const uint8_t *bytes = NULL;
        assert_int_equal(cox_handle_parse(&ref.handle, &info, NULL), 0);
        int expected = COX_CORRUPT;
        if (which == 0)
            ref.handle.bytes[20] ^= 1;
        else if (which == 1)
            peer.pid = getppid();
        else if (which == 2)
            peer.start++;
        else if (which == 3)
            ref.size = 0;
        else if (which == 4)
            ref.size = payload.region.size + 1;
        else if (which == 5)
            info.offset = 4096;
        else if (which == 6)
            info.kind = COX_HANDLE_OTHER, info.size = 0;
        else if (which == 7)
            info.size *= 2, ref.size = info.size, expected = COX_NOT_FOUND;
        else
            info.ino++, expected = COX_NOT_FOUND;
        if (which >= 5)
            cox_handle_format(&info, &ref.handle);
        int r = cox_large_payload_view_map(&view, &ref, &peer, &bytes, &err);
        if (r != expected || bytes || view.region.base)
            fail_msg("case %d: %d: %s", which, r, err.text);
        assert_true(err.text[0] != '\0');
    }
    end(&payload);
}

/* A process that can truncate the memory can kill its readers. */
TEST(m3_memory_that_could_shrink_is_refused)
{
    begin();
    struct cox_exporter *exporter;
    assert_int_equal(cox_exporter_new(NULL, &exporter, NULL), 0);
    static const unsigned seals[] = {0, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_SHRINK | F_SEAL_GROW};
    for (size_t i = 0; i < sizeof seals / sizeof *seals; i++) {
        int fd = memfd_create("seals", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        struct cox_large_payload_ref ref = {.size = 4096};
        struct cox_large_payload_view view = {0};
        const uint8_t *bytes;
        assert_int_equal(ftruncate(fd, 4096), 0);
        assert_int_equal(fcntl(fd, F_ADD_SEALS, seals[i]), 0);
        assert_int_equal(cox_exporter_export(exporter, fd, 0, 0, &ref.handle, NULL), 0);
        assert_int_equal(cox_large_payload_view_map(&view, &ref, &self, &bytes, NULL),
                         i < 3 ? COX_CORRUPT : 0);
        cox_large_payload_view_drop(&view);
        cox_exporter_put(exporter, &ref.handle);
        close(fd);
    }
    cox_exporter_free(exporter);
    cox_large_payload_sender_deinit(&sender);
}

/* Readers that need the control socket get an error; others do not notice. */
TEST(m3_a_socket_that_is_gone_or_full_does_not_matter)
{
    static uint8_t copy[SIZE];
    begin();
    struct cox_large_payload payload = payload_of("/nonexistent/control socket", SIZE, 7);
    struct cox_large_payload_ref ref = cox_large_payload_refer(&payload, SIZE);
    assert_int_equal(read_copy(&ref, copy), 0);
    end(&payload);
    char name[64];
    const struct cox_control_socket_options options = {.name = test_unique_name(name),
                                                       .fd_entry_max = 2};
    const struct cox_control_socket_hooks hooks = {0};
    struct cox_control_socket *control_socket = NULL;
    assert_int_equal(cox_control_socket_open(&options, &hooks, &control_socket, NULL), 0);
    begin();
    struct cox_large_payload payloads[4];
    for (int i = 0; i < 4; i++) {
        payloads[i] = payload_of(cox_control_socket_path(control_socket), SIZE, (uint8_t)i);
        if (i == 0 || i == 3)
            assert_ptr_equal(payloads[i].exporter, i ? sender.plain : sender.exporter);
        ref = cox_large_payload_refer(&payloads[i], SIZE);
        assert_int_equal(read_copy(&ref, copy), 0);
        assert_int_equal(copy[SIZE - 1], i);
    }
    for (int i = 1; i < 4; i++)
        cox_large_payload_drop(&sender, &payloads[i]);
    end(&payloads[0]);
    cox_control_socket_close(control_socket);
}
