#include "message.h"

void *cox_message_new(struct cox_arena *arena, const ProtobufCMessageDescriptor *type)
{
    void *message = cox_arena_alloc(arena, type->sizeof_message);
    if (message)
        type->message_init(message);
    return message;
}

void *cox_message_list(struct cox_arena *arena, const ProtobufCMessageDescriptor *type,
                       size_t count, size_t *ret_count)
{
    void **list = cox_arena_alloc(arena, count * sizeof *list);
    *ret_count = 0;
    for (size_t i = 0; list && i < count; i++)
        if (!(list[i] = cox_message_new(arena, type)))
            return NULL;
    *ret_count = list ? count : 0;
    return list;
}

char *cox_message_text(struct cox_arena *arena, const char *text)
{
    return text && text[0] ? cox_arena_strdup(arena, text) : NULL;
}

char *cox_message_lend(const char *text)
{
    return (char *)(uintptr_t)text;
}
