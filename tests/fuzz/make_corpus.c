/*
 * make_corpus: writes what has a layout of the C code, from real objects:
 *
 *     make_corpus tests/fuzz/corpus
 *
 * To be run again when a layout changes; the files are committed. make_messages.py writes what is
 * messages. The files of config, http_request, safetensors, sizes and tokenizer are text, which is
 * kept by hand.
 */
#include "fuzz.h"

#include "channel/attach/named/names.h"
#include "channel/socket/fd_entries.h"
#include "channel/socket/hello.h"
#include "channel/handle/handle_internal.h"
#include "channel/shm/reply.h"
#include "channel/shm/request.h"
#include "channel/shm/state.h"
#include "memory.h"

static const char *root;

struct bytes {
    size_t size;
    uint8_t data[8192];
};

static void put(struct bytes *bytes, const void *data, size_t size)
{
    FUZZ_CHECK(bytes->size + size <= sizeof bytes->data);
    if (size)
        memcpy(bytes->data + bytes->size, data, size);
    bytes->size += size;
}

static void put_byte(struct bytes *bytes, unsigned value)
{
    uint8_t byte = (uint8_t)value;
    put(bytes, &byte, 1);
}

static void save(const char *target, const char *name, const struct bytes *bytes)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", root, target);
    mkdir(path, 0777);
    snprintf(path, sizeof path, "%s/%s/%s", root, target, name);
    FILE *file = fopen(path, "w");
    FUZZ_CHECK(file && fwrite(bytes->data, 1, bytes->size, file) == bytes->size);
    FUZZ_CHECK(fclose(file) == 0);
}

static void control_attach(const char *name, uint32_t rank_count,
                           const struct cox_geometry_choice *choice)
{
    struct cox_control control = COX_CONTROL_NONE;
    struct cox_geometry geometry;
    FUZZ_CHECK(cox_geometry_resolve(rank_count, choice, &geometry, NULL) == 0);
    FUZZ_CHECK(cox_control_create(&control, "cox_corpus", &geometry, NULL) == 0);
    /* The same bytes at every run. */
    control.layout->header.coordinator_pid = 4242;
    control.layout->header.coordinator_start = 424242;
    control.layout->header.instance = MEMORY_INSTANCE;
    struct bytes bytes = {0};
    uint32_t size = (uint32_t)control.region.size;
    put(&bytes, &size, sizeof size);
    put(&bytes, control.layout, offsetof(struct cox_layout_header, padding));
    save("control_attach", name, &bytes);
    cox_control_unlink_names("cox_corpus", &geometry, 0);
    cox_control_close(&control);
}

static void request_frame(const char *name, unsigned ranks, unsigned depth, uint64_t sequence,
                          struct cox_rank_set asked, const char *text)
{
    const struct cox_channel *channel =
        memory_channel((uint8_t)ranks, (uint8_t)depth, false, COX_CHANNEL_EXECUTE);
    size_t capacity;
    uint8_t *frame = cox_request_frame(channel, sequence, &capacity);
    memcpy(frame, text, strlen(text));
    cox_request_publish(channel, sequence, COX_TYPE_OPAQUE, strlen(text), &asked);
    struct bytes bytes = {0};
    put_byte(&bytes, ranks);
    put_byte(&bytes, depth);
    put_byte(&bytes, COX_CHANNEL_EXECUTE);
    put(&bytes, &sequence, sizeof sequence);
    put(&bytes,
        &cox_state_channel(channel->control, COX_CHANNEL_EXECUTE)
             ->frames[sequence % channel->control->geometry.depth],
        sizeof(struct cox_layout_frame));
    put(&bytes, frame - COX_PREFIX_SIZE, COX_PREFIX_SIZE + strlen(text));
    save("request_frame", name, &bytes);
}

static void reply_slot(const char *name, unsigned ranks, unsigned depth, uint32_t rank,
                       unsigned flags, uint64_t sequence, bool failed, const char *text)
{
    const struct cox_channel *channel =
        memory_channel((uint8_t)ranks, (uint8_t)depth, flags & 1, COX_CHANNEL_EXECUTE);
    struct cox_layout_rank_line *line = cox_state_line(channel->control, rank, COX_CHANNEL_EXECUTE);
    uint32_t incarnation = 1, buffer_size = UINT32_MAX;
    size_t capacity;
    uint8_t *slot = cox_reply_slot(channel, rank, sequence, flags & 2, &capacity);
    memset(line, 0, sizeof *line);
    atomic_store(&line->instance, MEMORY_INSTANCE);
    atomic_store(&line->incarnation, incarnation);
    memcpy(slot, text, strlen(text));
    cox_reply_commit(channel, rank, sequence, strlen(text), failed);
    cox_state_set_done(line, sequence);
    struct bytes bytes = {0};
    put_byte(&bytes, ranks);
    put_byte(&bytes, depth);
    put_byte(&bytes, COX_CHANNEL_EXECUTE);
    put_byte(&bytes, rank);
    put_byte(&bytes, flags);
    put(&bytes, &sequence, sizeof sequence);
    put(&bytes, &incarnation, sizeof incarnation);
    put(&bytes, &buffer_size, sizeof buffer_size);
    put(&bytes, line, sizeof *line);
    put(&bytes, slot - COX_PREFIX_SIZE, COX_PREFIX_SIZE + strlen(text));
    save("reply_slot", name, &bytes);
}

static void hellos(void)
{
    struct cox_hello worker = {.role = COX_HELLO_WORKER,
                               .rank = 3,
                               .rank_count = 8,
                               .incarnation = 2,
                               .request_size_min = 1 << 20,
                               .response_size_min = 1 << 16,
                               .start = 424242};
    struct cox_hello fd_store = {.role = COX_HELLO_FD_STORE, .fd_count_max = 1};
    struct cox_hello later = {.role = COX_HELLO_COMMAND, .version = 2};
    struct bytes bytes = {.size = COX_HELLO_SIZE};
    cox_hello_format(&worker, bytes.data);
    save("hello", "worker", &bytes);
    cox_hello_format(&fd_store, bytes.data);
    save("hello", "fd_store", &bytes);
    cox_hello_format(&later, bytes.data);
    save("hello", "later_version", &bytes);
}

static void sockets(void)
{
    struct cox_hello_reply hello_reply = {.version = COX_HELLO_VERSION,
                                          .attach = COX_ATTACH_SEALED,
                                          .rank = 3,
                                          .rank_count = 8,
                                          .incarnation = 2,
                                          .instance = MEMORY_INSTANCE};
    static const uint8_t head[] = {0, 4, 0, 31, 3},
                         requests[] = {2, 8, 4, 1, 2, 1, 20, 2, 22, 2, 1, 1, 12, 3, 70, 1, 246, 2};
    struct bytes bytes = {0};
    put(&bytes, head, sizeof head);
    cox_hello_reply_format(&hello_reply, 4, bytes.data + bytes.size);
    bytes.size += COX_HELLO_REPLY_SIZE;
    save("control_socket", "hello_reply", &bytes);
    bytes = (struct bytes){.size = 1, .data = {1}};
    bytes.size += cox_refusal_format(COX_TAKEN, "rank 3 is served by process 4242", bytes.data + 1);
    save("control_socket", "refusal", &bytes);
    bytes.size = 0;
    put(&bytes, requests, sizeof requests);
    save("control_socket", "fd_store", &bytes);
    bytes = (struct bytes){.size = 1 + COX_FD_STORE_REPLY_SIZE, .data = {3}};
    cox_fd_store_reply_format(COX_FULL, 4242, bytes.data + 1);
    save("control_socket", "fd_store_reply", &bytes);
}

/* how: of the target; what depends on the process that reads it is made right there. */
static void handle(const char *name, unsigned how, struct cox_handle_info info)
{
    struct cox_handle packed;
    struct bytes bytes = {0};
    info.pid = info.pid ? info.pid : 4242;
    info.start = 424242;
    info.system = UINT64_C(0x0123456789abcdef);
    info.dev = 1;
    info.ino = 4711;
    info.generation = 7;
    cox_handle_format(&info, &packed);
    put_byte(&bytes, how);
    put(&bytes, packed.bytes, sizeof packed.bytes);
    save("handle", name, &bytes);
}

static void handles(void)
{
    const struct cox_handle_info memory = {.kind = COX_HANDLE_MEMORY, .fd = 256, .size = 1000};
    struct cox_handle_info info = memory;
    handle("plain", 0, memory);
    handle("elsewhere", 1, memory);
    handle("other_fd", 1 | 2, memory);
    info.offset = 5000;
    handle("own", 1 | 2 | 4, info);
    info.size = 5001;
    handle("too_long", 1 | 2 | 4, info);
    info.offset = UINT64_MAX - 100;
    handle("overflow", 1 | 2 | 4, info);
    handle("socket", 1 | 2, (struct cox_handle_info){.kind = COX_HANDLE_OTHER, .fd = 2});
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
        return 2;
    }
    root = argv[1];
    mkdir(root, 0777);
    control_attach("default", 4, &(struct cox_geometry_choice){0});
    control_attach("deep", 1, &(struct cox_geometry_choice){.depth = 8});
    control_attach("legacy", 8, &(struct cox_geometry_choice){.mode = &cox_attach_legacy});
    struct cox_rank_set all = cox_rank_set_first(4), one = {{4}};
    request_frame("all", 3, 2, 1, all, "echo hello");
    request_frame("one", 3, 1, 1000, one, "");
    reply_slot("own", 3, 2, 2, 8, 7, false, "hello");
    reply_slot("failed", 1, 0, 1, 8, 3, true, "no");
    reply_slot("legacy_whole", 1, 0, 0, 1 | 2 | 4, 1, false, "hello");
    hellos();
    sockets();
    handles();
    return 0;
}
