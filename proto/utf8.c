#include "utf8.h"

#include "channel/base/idioms.h"
#include "channel/text/text.h"
#include "proto/executor.pb-c.h"

#include <stdio.h>
#include <string.h>

/* Messages in messages; the protocol has 6. */
#define DEPTH_MAX 16
#define PATH_SIZE 256

#define WORD_HIGH_BITS UINT64_C(0x8080808080808080)

const char *cox_utf8_find_bad(const char *text)
{
    const char *const end = text + strlen(text);
    while (text < end) {
        uint64_t word;
        while ((size_t)(end - text) >= sizeof word &&
               (memcpy(&word, text, sizeof word), !(word & WORD_HIGH_BITS)))
            text += sizeof word;
        while (text < end && (unsigned char)*text < 0x80)
            text++;
        if (text == end)
            break;
        uint32_t code;
        const size_t size = cox_text_character(text, &code);
        if (size == 0)
            return text;
        text += size;
    }
    return NULL;
}

void cox_utf8_mend(char *text)
{
    const char *bad = text;
    while ((bad = cox_utf8_find_bad(bad)) != NULL)
        text[bad - text] = '?';
}

/* ---- messages ---- */

struct path {
    struct {
        const char *name;
        /* SIZE_MAX: not repeated */
        size_t index;
    } steps[DEPTH_MAX];
    size_t depth;
};

/* "pull_kv_request.pull_kv_infos[2].cluster_id" */
static void path_write(const struct path *path, char text[PATH_SIZE])
{
    size_t used = 0;
    text[0] = '\0';
    for (size_t i = 0; i < path->depth && used < PATH_SIZE; i++) {
        used += (size_t)snprintf(text + used, PATH_SIZE - used, "%s%s", i ? "." : "",
                                 path->steps[i].name);
        if (path->steps[i].index != SIZE_MAX && used < PATH_SIZE)
            used += (size_t)snprintf(text + used, PATH_SIZE - used, "[%zu]", path->steps[i].index);
    }
}

static int check_text(const struct path *path, const char *text, struct cox_error *err)
{
    const char *bad = text ? cox_utf8_find_bad(text) : NULL;
    char where[PATH_SIZE];
    if (!bad)
        return 0;
    path_write(path, where);
    return cox_fail(err, COX_INVALID,
                    "%s is no UTF-8: the byte 0x%02x at offset %td; nothing was sent", where,
                    (unsigned)(unsigned char)*bad, bad - text);
}

static int check_message(struct path *path, const ProtobufCMessage *message, struct cox_error *err);

static int check_value(struct path *path, const ProtobufCFieldDescriptor *field, const void *value,
                       struct cox_error *err)
{
    if (field->type == PROTOBUF_C_TYPE_STRING)
        return check_text(path, *(char *const *)value, err);
    const ProtobufCMessage *below = *(ProtobufCMessage *const *)value;
    return below ? check_message(path, below, err) : 0;
}

static int check_field(struct path *path, const ProtobufCMessage *message,
                       const ProtobufCFieldDescriptor *field, struct cox_error *err)
{
    const char *base = (const char *)message;
    COX_ASSERT(path->depth < DEPTH_MAX);
    path->steps[path->depth].name = field->name;
    path->steps[path->depth++].index = SIZE_MAX;
    int r = 0;
    if (field->label == PROTOBUF_C_LABEL_REPEATED) {
        const size_t count = *(const size_t *)(const void *)(base + field->quantifier_offset);
        const char *items = *(const char *const *)(const void *)(base + field->offset);
        for (size_t i = 0; r == 0 && i < count; i++) {
            path->steps[path->depth - 1].index = i;
            r = check_value(path, field, items + i * sizeof(void *), err);
        }
    } else if (!(field->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) ||
               *(const uint32_t *)(const void *)(base + field->quantifier_offset) == field->id) {
        r = check_value(path, field, base + field->offset, err);
    }
    path->depth--;
    return r;
}

static int check_message(struct path *path, const ProtobufCMessage *message, struct cox_error *err)
{
    const ProtobufCMessageDescriptor *descriptor = message->descriptor;
    int r = 0;
    for (unsigned i = 0; r == 0 && i < descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *field = &descriptor->fields[i];
        if (field->type == PROTOBUF_C_TYPE_STRING || field->type == PROTOBUF_C_TYPE_MESSAGE)
            r = check_field(path, message, field, err);
    }
    return r;
}

int cox_utf8_check_request(const struct Coxswain__ExecuteRequest *request, struct cox_error *err)
{
    struct path path = {.depth = 0};
    return check_message(&path, &request->base, err);
}
