/* Large payloads: reserve, map and read, with each of their calls failing in turn. The sender of
 * what is read is another process. */
#include "channel/base/peer.h"
#include "channel/memory/large_payload.h"
#include "channel/memory/lazy_copy.h"
#include "countdown.h"
#include "testing.h"

#define PAYLOAD_SIZE 100000

static struct cox_large_payload_sender sender;
static struct cox_payload_memory_pool pool;
static struct cox_large_payload kept;
static struct cox_large_payload_ref foreign; /* the child's payload */
static struct cox_large_payload_origin child;
static int file_fd;

/* ---- sending ---- */

static void sender_prepare(void)
{
    cox_payload_memory_pool_init(&pool);
    cox_large_payload_sender_init(&sender);
}

static void sender_restore(void)
{
    cox_large_payload_drop(&sender, &kept);
    assert_int_equal(atomic_load(&sender.payload_count), 0);
    assert_int_equal(atomic_load(&sender.payload_bytes), 0);
    cox_large_payload_sender_deinit(&sender);
    cox_payload_memory_pool_deinit(&pool);
}

static int reserve(void *object, struct cox_error *err)
{
    struct cox_large_payload payload = {0};
    int r = cox_large_payload_reserve(&sender, NULL, PAYLOAD_SIZE, &payload, err);
    if (r == 0)
        memcpy(object, &payload, sizeof payload);
    return r;
}

static int fill(void *object, struct cox_error *err)
{
    static uint8_t bytes[PAYLOAD_SIZE];
    const struct iovec parts[] = {{bytes, 1}, {bytes, 0}, {bytes, sizeof bytes - 1}};
    struct cox_large_payload payload = {0};
    int r = cox_large_payload_fill(&sender, NULL, parts, sizeof bytes, &payload, err);
    if (r == 0)
        memcpy(object, &payload, sizeof payload);
    return r;
}

static int adopt(void *object, struct cox_error *err)
{
    static const uint8_t bytes[PAYLOAD_SIZE];
    struct cox_large_payload payload = {0};
    struct cox_payload_memory *memory = NULL;
    int r = cox_payload_memory_take(&pool, sizeof bytes, &memory, err);
    if (r == 0 && !cox_payload_memory_bytes(memory))
        r = cox_payload_memory_fill(memory, 0, bytes, sizeof bytes, err);
    if (r == 0)
        r = cox_payload_memory_finish(memory, err);
    if (r == 0)
        r = cox_large_payload_adopt(&sender, NULL, memory, sizeof bytes, &payload, err);
    cox_payload_memory_unref(memory);
    if (r == 0)
        memcpy(object, &payload, sizeof payload);
    return r;
}

DESTROY(drop, cox_large_payload_drop(&sender, object))

static void sender_prepare_kept(void)
{
    sender_prepare();
    assert_int_equal(cox_large_payload_reserve(&sender, NULL, PAYLOAD_SIZE, &kept, NULL), 0);
}

/* Replaces a payload that is too small: after a failure there is none. */
static int reserve_larger(void *object, struct cox_error *err)
{
    (void)object;
    int r = cox_large_payload_reserve(&sender, NULL, 2 * COX_LARGE_PAYLOAD_KEEP_SIZE, &kept, err);
    assert_int_equal(r == 0, kept.region.base != NULL);
    return r;
}

DESTROY(reserve_nothing, (void)object)

/* ---- reading ---- */

static int view_map(void *object, struct cox_error *err)
{
    struct cox_large_payload_view view = {0};
    const uint8_t *bytes;
    int r = cox_large_payload_view_map(&view, &foreign, &child, &bytes, err);
    if (r)
        return r;
    assert_memory_equal(bytes, "of the child", 12);
    memcpy(object, &view, sizeof view);
    return 0;
}

DESTROY(view_drop, cox_large_payload_view_drop(object))

static int view_map_of_any_start(void *object, struct cox_error *err)
{
    const uint64_t start = child.start;
    child.start = 0;
    int r = view_map(object, err);
    child.start = start;
    return r;
}

static int lazy_copy(void *object, struct cox_error *err)
{
    void *bytes;
    int r = cox_lazy_copy_new(file_fd, PAYLOAD_SIZE, PAYLOAD_SIZE, NULL, &bytes);
    if (r)
        return cox_fail(err, r, "memory for a copy: %s", cox_status_text(r));
    memcpy(object, &bytes, sizeof bytes);
    return 0;
}

static int view_copy(void *object, struct cox_error *err)
{
    struct cox_large_payload_view view = {0};
    void *bytes;
    int r = view_map(&view, err);
    if (r == 0)
        r = cox_large_payload_view_copy(&view, PAYLOAD_SIZE, &child, &bytes, err);
    cox_large_payload_view_drop(&view);
    if (r)
        return r;
    assert_memory_equal(bytes, "of the child", 12);
    memcpy(object, &bytes, sizeof bytes);
    return 0;
}

DESTROY(copy_free, cox_lazy_copy_free(*(void **)object))

static const int no_space[] = {COX_NO_SPACE, 0};

#define PAYLOAD(name, function)                                                                    \
    NAMED_SUBJECT(name, function, MAKES(struct cox_large_payload, drop),                           \
                  AROUND(sender_prepare, sender_restore), .codes = no_space, .lenient = true)

PLAIN_TEST(m3_b15_b19_b29_b47_any_call_may_fail)
{
    /* The number that is its fd's turn may be too high. */
    COUNTDOWN(EACH_MODE, PAYLOAD("large_payload_reserve", reserve),
              PAYLOAD("large_payload_fill", fill), PAYLOAD("large_payload_adopt", adopt),
              NAMED_SUBJECT("large_payload_reserve in place of another", reserve_larger,
                            AROUND(sender_prepare_kept, sender_restore), .codes = no_space,
                            .lenient = true, .destroy = reserve_nothing),
              SUBJECT(view_map, MAKES(struct cox_large_payload_view, view_drop), .codes = no_space),
              NAMED_SUBJECT("large_payload_view_map, start not told", view_map_of_any_start,
                            MAKES(struct cox_large_payload_view, view_drop), .codes = no_space),
              SUBJECT(lazy_copy, MAKES(void *, copy_free), .codes = no_space),
              SUBJECT(view_copy, MAKES(void *, copy_free), .codes = no_space));
}

static void child_say(void *ret)
{
    static struct cox_large_payload_sender of_child;
    static struct cox_large_payload payload;
    cox_large_payload_sender_init(&of_child);
    COX_ASSERT(cox_large_payload_reserve(&of_child, NULL, PAYLOAD_SIZE, &payload, NULL) == 0);
    memcpy(payload.region.base, "of the child", 12);
    *(struct cox_large_payload_ref *)ret = cox_large_payload_refer(&payload, PAYLOAD_SIZE);
}

int main(void)
{
    child.pid = countdown_child(child_say, &foreign, sizeof foreign);
    COX_ASSERT(cox_peer_start_time(child.pid, &child.start) == 0);
    file_fd = memfd_create("countdown", MFD_CLOEXEC);
    COX_ASSERT(file_fd >= 0 && ftruncate(file_fd, PAYLOAD_SIZE) == 0);
    int failed = test_run(NULL, NULL);
    test_kill_child(child.pid);
    close(file_fd);
    return failed;
}
