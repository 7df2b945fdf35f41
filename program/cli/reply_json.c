#include "reply_json.h"

#include "coordinator/executor/core.h"
#include "coordinator/recovery/recovery.h"
#include "coordinator/server/group_links.h"
#include "proto/control.pb-c.h"

#include <coxswain/executor.h>

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define KEY_SIZE 64

/* Numbers that are printed as words. */
static const struct {
    const ProtobufCMessageDescriptor *type;
    const char *field;
    const char *(*name)(uint32_t number);
} words[] = {
    {&coxswain_control__rank_status__descriptor, "liveness", cox_rank_liveness_name},
    {&coxswain_control__rank_channel_status__descriptor, "state", cox_rank_state_name},
    {&coxswain_control__recovery_status__descriptor, "on_death", cox_on_death_name},
    {&coxswain_control__transfer_status__descriptor, "role", cox_role_name},
    {&coxswain_control__link_state__descriptor, "state", cox_link_state_name},
};

/* Lists that are printed as objects, with `name` as the key. */
static const ProtobufCMessageDescriptor *const named[] = {
    &coxswain_control__phase_status__descriptor,
    &coxswain_control__limit_status__descriptor,
};

static bool is_time(const ProtobufCFieldDescriptor *field)
{
    size_t length = strlen(field->name);
    return length > 3 && !strcmp(field->name + length - 3, "_ns");
}

static const char *key_of(const ProtobufCFieldDescriptor *field, char key[KEY_SIZE])
{
    size_t length = strlen(field->name);
    snprintf(key, KEY_SIZE, "%.*s", (int)(is_time(field) ? length - 2 : length), field->name);
    if (is_time(field))
        strcat(key, "s");
    return key;
}

static bool is_named(const ProtobufCFieldDescriptor *field)
{
    for (size_t i = 0; i < sizeof named / sizeof *named; i++)
        if (field->type == PROTOBUF_C_TYPE_MESSAGE && field->descriptor == named[i])
            return true;
    return false;
}

/* ---- values ---- */

static json_t *bytes_json(const ProtobufCBinaryData *bytes)
{
    static const char digits[] = "0123456789abcdef";
    json_t *array = NULL;
    char *text = malloc(2 * bytes->len + 1);
    if (!text)
        return NULL;
    for (size_t i = 0; i < bytes->len; i++) {
        text[2 * i] = digits[bytes->data[i] >> 4];
        text[2 * i + 1] = digits[bytes->data[i] & 15];
    }
    array = json_stringn(text, 2 * bytes->len);
    free(text);
    return array;
}

static json_t *unsigned_json(const ProtobufCMessageDescriptor *type,
                             const ProtobufCFieldDescriptor *field, uint64_t number)
{
    if (is_time(field))
        return json_real((double)number / 1e9);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (words[i].type == type && !strcmp(words[i].field, field->name))
            return json_string(words[i].name((uint32_t)number));
    return json_integer((json_int_t)number);
}

static json_t *enum_json(const ProtobufCFieldDescriptor *field, int32_t number)
{
    const ProtobufCEnumValue *value =
        protobuf_c_enum_descriptor_get_value(field->descriptor, number);
    return value ? json_string(value->name) : json_integer(number);
}

static json_t *fixed64_json(uint64_t number)
{
    char digits[17];
    snprintf(digits, sizeof digits, "%016" PRIx64, number);
    return json_string(digits);
}

/* The value at that address. */
static json_t *value_json(const ProtobufCMessageDescriptor *type,
                          const ProtobufCFieldDescriptor *field, const void *at)
{
    switch (field->type) {
    case PROTOBUF_C_TYPE_INT32:
    case PROTOBUF_C_TYPE_SINT32:
    case PROTOBUF_C_TYPE_SFIXED32:
        return json_integer(*(const int32_t *)at);
    case PROTOBUF_C_TYPE_UINT32:
    case PROTOBUF_C_TYPE_FIXED32:
        return unsigned_json(type, field, *(const uint32_t *)at);
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_SINT64:
    case PROTOBUF_C_TYPE_SFIXED64:
        return json_integer(*(const int64_t *)at);
    case PROTOBUF_C_TYPE_UINT64:
        return unsigned_json(type, field, *(const uint64_t *)at);
    case PROTOBUF_C_TYPE_FIXED64:
        return fixed64_json(*(const uint64_t *)at);
    case PROTOBUF_C_TYPE_FLOAT:
        return json_real((double)*(const float *)at);
    case PROTOBUF_C_TYPE_DOUBLE:
        return json_real(*(const double *)at);
    case PROTOBUF_C_TYPE_BOOL:
        return json_boolean(*(const protobuf_c_boolean *)at);
    case PROTOBUF_C_TYPE_ENUM:
        return enum_json(field, *(const int32_t *)at);
    case PROTOBUF_C_TYPE_STRING:
        return json_string(*(char *const *)at);
    case PROTOBUF_C_TYPE_BYTES:
        return bytes_json(at);
    case PROTOBUF_C_TYPE_MESSAGE:
        return cox_reply_json(*(ProtobufCMessage *const *)at);
    }
    return json_null();
}

/* ---- fields ---- */

static size_t value_size(const ProtobufCFieldDescriptor *field)
{
    switch (field->type) {
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_SINT64:
    case PROTOBUF_C_TYPE_SFIXED64:
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_FIXED64:
    case PROTOBUF_C_TYPE_DOUBLE:
        return sizeof(uint64_t);
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_MESSAGE:
        return sizeof(void *);
    case PROTOBUF_C_TYPE_BYTES:
        return sizeof(ProtobufCBinaryData);
    case PROTOBUF_C_TYPE_BOOL:
        return sizeof(protobuf_c_boolean);
    default:
        return sizeof(uint32_t);
    }
}

static bool is_present(const ProtobufCFieldDescriptor *field, const uint8_t *message)
{
    if (field->label == PROTOBUF_C_LABEL_REQUIRED)
        return true;
    if (field->type == PROTOBUF_C_TYPE_STRING || field->type == PROTOBUF_C_TYPE_MESSAGE)
        return *(void *const *)(const void *)(message + field->offset) != NULL;
    return *(const protobuf_c_boolean *)(const void *)(message + field->quantifier_offset);
}

static json_t *list_json(const ProtobufCMessageDescriptor *type,
                         const ProtobufCFieldDescriptor *field, const uint8_t *message)
{
    size_t count = *(const size_t *)(const void *)(message + field->quantifier_offset);
    const uint8_t *items = *(uint8_t *const *)(const void *)(message + field->offset);
    json_t *list = is_named(field) ? json_object() : json_array();
    for (size_t i = 0; i < count; i++) {
        json_t *item = value_json(type, field, items + i * value_size(field));
        if (!is_named(field)) {
            json_array_append_new(list, item);
            continue;
        }
        const char *name = json_string_value(json_object_get(item, "name"));
        json_object_set(list, name ? name : "?", item);
        json_object_del(item, "name");
        json_decref(item);
    }
    return list;
}

json_t *cox_reply_json(const ProtobufCMessage *message)
{
    const ProtobufCMessageDescriptor *type = message->descriptor;
    const uint8_t *bytes = (const uint8_t *)message;
    json_t *root = json_object();
    for (unsigned i = 0; root && i < type->n_fields; i++) {
        const ProtobufCFieldDescriptor *field = &type->fields[i];
        char key[KEY_SIZE];
        json_t *value = field->label == PROTOBUF_C_LABEL_REPEATED ? list_json(type, field, bytes)
                        : is_present(field, bytes) ? value_json(type, field, bytes + field->offset)
                                                   : json_null();
        json_object_set_new(root, key_of(field, key), value);
    }
    return root;
}
