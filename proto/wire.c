#include "wire.h"

#include "channel/base/idioms.h"
#include "proto/control.pb-c.h"
#include "proto/executor.pb-c.h"
#include "step_wire.h"

#include <limits.h>
#include <protobuf-c/protobuf-c.h>
#include <stdalign.h>
#include <stdlib.h>
#include <string.h>

/* Blocks are handed out in units of this; enough for every C type and for vector loads of 16 bytes.
 */
#define ARENA_ALIGNMENT 16

/* The first block of an arena that started with none. A step of a few sequences fits. */
#define ARENA_BLOCK_SIZE_MIN 4096

/* Protocol buffers end at 2 GiB, and protobuf-c keeps lengths of members in an unsigned int. */
#define WIRE_SIZE_MAX ((size_t)INT32_MAX)

/* Under AddressSanitizer what an arena has not handed out, or has forgotten at a reset, is
 * unreadable: a message that is used after its arena was reset then fails at the place of use. */
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ARENA_POISONS 1
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define ARENA_POISONS 1
#endif
#ifdef ARENA_POISONS
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

struct cox_arena_block {
    struct cox_arena_block *next;
    /* of data */
    size_t size;
    /* of data, a multiple of ARENA_ALIGNMENT */
    size_t used;
    alignas(ARENA_ALIGNMENT) unsigned char data[];
};

static struct cox_arena_block *block_new(size_t size)
{
    if (size > SIZE_MAX - sizeof(struct cox_arena_block))
        return NULL;
    struct cox_arena_block *block = malloc(sizeof *block + size);
    if (!block)
        return NULL;
    block->next = NULL;
    block->size = size;
    block->used = 0;
    ASAN_POISON_MEMORY_REGION(block->data, size);
    return block;
}

static void block_free_all(struct cox_arena_block *block)
{
    while (block) {
        struct cox_arena_block *next = block->next;
        ASAN_UNPOISON_MEMORY_REGION(block->data, block->size);
        free(block);
        block = next;
    }
}

/* The block that follows the current one, with room for size bytes. Those kept over a reset come
 * first. */
static struct cox_arena_block *arena_next_block(struct cox_arena *arena, size_t size)
{
    struct cox_arena_block **link = arena->current ? &arena->current->next : &arena->first;
    if (*link && (*link)->size >= size)
        return *link;

    /* Doubling bounds the number of blocks; the cap's remainder is all that can ever be asked for.
     */
    size_t room = arena->size_max - arena->used;
    size_t last_size = arena->current ? arena->current->size : ARENA_BLOCK_SIZE_MIN / 2;
    size_t block_size = last_size > room / 2 ? room : 2 * last_size;
    if (block_size < size)
        block_size = size;

    struct cox_arena_block *block = block_new(block_size);
    if (!block)
        return NULL;
    block->next = *link;
    *link = block;
    return block;
}

int cox_arena_init(struct cox_arena *arena, size_t first_size, size_t size_max)
{
    *arena = (struct cox_arena){.size_max = size_max};
    if (first_size > size_max)
        first_size = size_max;
    if (first_size > 0) {
        arena->first = block_new(first_size);
        if (!arena->first)
            return -ENOMEM;
    }
    return 0;
}

void cox_arena_deinit(struct cox_arena *arena)
{
    block_free_all(arena->first);
    *arena = (struct cox_arena){0};
}

void cox_arena_reset(struct cox_arena *arena)
{
    arena->current = NULL;
    arena->used = 0;
    arena->exhausted = false;

    if (arena->first && arena->first->next) {
        size_t size = 0;
        for (const struct cox_arena_block *block = arena->first; block; block = block->next)
            size += block->size;
        if (size > arena->size_max)
            size = arena->size_max;
        /* Without memory for the merged block the chain serves as before. */
        struct cox_arena_block *merged = block_new(size);
        if (merged) {
            block_free_all(arena->first);
            arena->first = merged;
        }
    }
    for (struct cox_arena_block *block = arena->first; block; block = block->next) {
        block->used = 0;
        ASAN_POISON_MEMORY_REGION(block->data, block->size);
    }
}

/* Empty allocations take a unit too: distinct pointers, none of them NULL. */
static size_t arena_rounded(size_t size)
{
    return ((size ? size : 1) + ARENA_ALIGNMENT - 1) & ~(size_t)(ARENA_ALIGNMENT - 1);
}

void *cox_arena_alloc(struct cox_arena *arena, size_t size)
{
    if (size > SIZE_MAX - (ARENA_ALIGNMENT - 1))
        goto refuse;
    const size_t rounded = arena_rounded(size);
    if (rounded > arena->size_max - arena->used)
        goto refuse;

    struct cox_arena_block *block = arena->current;
    if (!block || rounded > block->size - block->used) {
        block = arena_next_block(arena, rounded);
        if (!block)
            goto refuse;
        arena->current = block;
    }
    void *memory = block->data + block->used;
    block->used += rounded;
    arena->used += rounded;
    ASAN_UNPOISON_MEMORY_REGION(memory, size);
    return memory;

refuse:
    arena->exhausted = true;
    return NULL;
}

static void *allocator_alloc(void *data, size_t size)
{
    return cox_arena_alloc(data, size);
}

/* protobuf-c gives back its scratch memory and, after a failure, the message; both wait for the
 * reset. */
static void allocator_free(void *data, void *memory)
{
    (void)data;
    (void)memory;
}

static int message_pack(const ProtobufCMessage *message, void *buffer, size_t buffer_size,
                        size_t *ret_size)
{
    size_t size = protobuf_c_message_get_packed_size(message);
    if (size > buffer_size)
        return COX_TOO_LARGE;
    size_t packed = protobuf_c_message_pack(message, buffer);
    COX_ASSERT(packed == size);
    *ret_size = size;
    return 0;
}

static int message_unpack(struct cox_arena *arena, const ProtobufCMessageDescriptor *descriptor,
                          const void *bytes, size_t size, ProtobufCMessage **ret_message)
{
    if (size > WIRE_SIZE_MAX)
        return COX_TOO_LARGE;

    ProtobufCAllocator allocator = {
        .alloc = allocator_alloc,
        .free = allocator_free,
        .allocator_data = arena,
    };
    /* protobuf-c says NULL for both bad bytes and no memory. The flag tells them apart, for this
     * call alone: an earlier refusal in the same arena must not make corrupt bytes look like large
     * ones. */
    bool exhausted_before = arena->exhausted;
    arena->exhausted = false;
    ProtobufCMessage *message = protobuf_c_message_unpack(descriptor, &allocator, size, bytes);
    bool refused = arena->exhausted;
    arena->exhausted = refused || exhausted_before;

    if (refused)
        return COX_TOO_LARGE;
    if (!message)
        return COX_CORRUPT;
    *ret_message = message;
    return 0;
}

size_t cox_wire_request_size(const struct Coxswain__ExecuteRequest *request)
{
    return protobuf_c_message_get_packed_size(&request->base);
}

size_t cox_wire_response_size(const struct Coxswain__ExecuteResponse *response)
{
    return protobuf_c_message_get_packed_size(&response->base);
}

int cox_wire_request_pack(const struct Coxswain__ExecuteRequest *request, void *buffer,
                          size_t buffer_size, size_t *ret_size)
{
    if (cox_step_wire_pack_request(request, buffer, buffer_size, ret_size))
        return 0;
    return message_pack(&request->base, buffer, buffer_size, ret_size);
}

int cox_wire_response_pack(const struct Coxswain__ExecuteResponse *response, void *buffer,
                           size_t buffer_size, size_t *ret_size)
{
    if (cox_step_wire_pack_response(response, buffer, buffer_size, ret_size))
        return 0;
    return message_pack(&response->base, buffer, buffer_size, ret_size);
}

int cox_wire_request_unpack(struct cox_arena *arena, const void *bytes, size_t size,
                            struct Coxswain__ExecuteRequest **ret_request)
{
    ProtobufCMessage *message = NULL;
    if (size <= WIRE_SIZE_MAX && cox_step_wire_unpack_request(arena, bytes, size, ret_request))
        return 0;
    int r = message_unpack(arena, &coxswain__execute_request__descriptor, bytes, size, &message);
    if (r)
        return r;
    *ret_request = (struct Coxswain__ExecuteRequest *)message;
    return 0;
}

int cox_wire_response_unpack(struct cox_arena *arena, const void *bytes, size_t size,
                             struct Coxswain__ExecuteResponse **ret_response)
{
    ProtobufCMessage *message = NULL;
    if (size <= WIRE_SIZE_MAX && cox_step_wire_unpack_response(arena, bytes, size, ret_response))
        return 0;
    int r = message_unpack(arena, &coxswain__execute_response__descriptor, bytes, size, &message);
    if (r)
        return r;
    *ret_response = (struct Coxswain__ExecuteResponse *)message;
    return 0;
}

int cox_wire_control_request_unpack(struct cox_arena *arena, const void *bytes, size_t size,
                                    struct CoxswainControl__ControlRequest **ret_request)
{
    ProtobufCMessage *message = NULL;
    int r = message_unpack(arena, &coxswain_control__control_request__descriptor, bytes, size,
                           &message);
    if (r)
        return r;
    *ret_request = (struct CoxswainControl__ControlRequest *)message;
    return 0;
}

int cox_wire_control_reply_unpack(struct cox_arena *arena, const void *bytes, size_t size,
                                  struct CoxswainControl__ControlReply **ret_reply)
{
    ProtobufCMessage *message = NULL;
    int r =
        message_unpack(arena, &coxswain_control__control_reply__descriptor, bytes, size, &message);
    if (r)
        return r;
    *ret_reply = (struct CoxswainControl__ControlReply *)message;
    return 0;
}

const char *cox_wire_type_name(uint32_t execute_type)
{
    const ProtobufCEnumValue *value = NULL;
    if (execute_type <= INT_MAX)
        value = protobuf_c_enum_descriptor_get_value(&coxswain__execute_type__descriptor,
                                                     (int)execute_type);
    return value ? value->name : "unknown";
}
