#include "init_options.h"

#include "channel/base/idioms.h"
#include "program/cli/json_file.h"
#include "proto/utf8.h"

#include <stdlib.h>
#include <string.h>

static void entry_free(struct cox_config_entry *entry)
{
    free((char *)(uintptr_t)entry->key);
    free((char *)(uintptr_t)entry->value);
}

void cox_init_choice_deinit(struct cox_init_choice *choice)
{
    for (size_t i = 0; i < choice->count; i++)
        entry_free(&choice->entries[i]);
    free(choice->entries);
    *choice = (struct cox_init_choice){0};
}

/* NULL: no such key among the entries from `from` on. */
static struct cox_config_entry *choice_find(const struct cox_init_choice *choice, size_t from,
                                            size_t to, const char *key)
{
    for (size_t i = from; i < to; i++)
        if (strcmp(choice->entries[i].key, key) == 0)
            return &choice->entries[i];
    return NULL;
}

const char *cox_init_choice_get(const struct cox_init_choice *choice, const char *key)
{
    const struct cox_config_entry *entry = choice_find(choice, 0, choice->count, key);
    return entry ? entry->value : NULL;
}

/* Inserts at the index. Takes ownership of key and value, also when it fails. */
static int choice_insert(struct cox_init_choice *choice, size_t index, char *key, char *value,
                         struct cox_error *err)
{
    struct cox_config_entry entry = {.key = key, .value = value};
    struct cox_config_entry *grown =
        key && value ? realloc(choice->entries, (choice->count + 1) * sizeof *grown) : NULL;
    if (!grown) {
        entry_free(&entry);
        return cox_fail(err, -ENOMEM, "no memory for the init configuration");
    }
    memmove(&grown[index + 1], &grown[index], (choice->count - index) * sizeof *grown);
    grown[index] = entry;
    choice->entries = grown;
    choice->count++;
    return 0;
}

/* Takes one KEY=VALUE, which overrides the file's. */
static int entry_take(struct cox_init_choice *choice, const char *text, struct cox_error *err)
{
    const char *equals = strchr(text, '='), *bad = cox_utf8_find_bad(text);
    if (!equals || equals == text)
        return cox_fail(err, COX_INVALID, "--init is '%.64s': expected KEY=VALUE or @FILE", text);
    if (bad)
        return cox_fail(err, COX_INVALID, "--init %.*s: the byte 0x%02x at offset %td is no UTF-8",
                        (int)(equals - text < 64 ? equals - text : 64), text,
                        (unsigned)(unsigned char)*bad, bad - text);
    _cox_cleanup_(cox_free_ptr) char *key = strndup(text, (size_t)(equals - text));
    if (!key)
        return cox_fail(err, -ENOMEM, "no memory for the init configuration");
    if (choice_find(choice, choice->file_count, choice->count, key))
        return cox_fail(err, COX_INVALID, "--init names '%.64s' twice", key);
    struct cox_config_entry *old = choice_find(choice, 0, choice->file_count, key);
    if (old) {
        const size_t index = (size_t)(old - choice->entries);
        entry_free(old);
        memmove(old, old + 1, (choice->count - index - 1) * sizeof *old);
        choice->count--;
        choice->file_count--;
    }
    return choice_insert(choice, choice->count, cox_steal_ptr(&key), strdup(equals + 1), err);
}

/* ---- the file ---- */

/* The value as JSON writes it. NULL: no memory, or its kind is refused (*ret_kind). */
static char *value_text(const json_t *value, const char **ret_kind)
{
    *ret_kind = NULL;
    if (json_is_string(value))
        return strdup(json_string_value(value));
    if (json_is_boolean(value))
        return strdup(json_is_true(value) ? "true" : "false");
    if (json_is_number(value))
        return json_dumps(value, JSON_ENCODE_ANY);
    *ret_kind = json_is_object(value) ? "an object" : json_is_array(value) ? "an array" : "null";
    return NULL;
}

static int take_member(struct cox_init_choice *choice, const struct cox_json_file *file,
                       const char *key, const json_t *value, struct cox_error *err)
{
    const char *kind = NULL;
    if (!*key)
        return cox_fail(err, COX_INVALID, "%s, line %d: a key without a name", file->path,
                        cox_json_file_line(file, key));
    char *copy = value_text(value, &kind);
    if (kind)
        return cox_fail(err, COX_INVALID,
                        "%s, line %d: '%.64s' is %s: expected a string, a number, true or false",
                        file->path, cox_json_file_line(file, key), key, kind);
    if (choice_find(choice, choice->file_count, choice->count, key)) { /* --init overrides it */
        free(copy);
        return 0;
    }
    int r = choice_insert(choice, choice->file_count, strdup(key), copy, err);
    choice->file_count += r == 0;
    return r;
}

static int init_file_take(struct cox_init_choice *choice, const char *path, struct cox_error *err)
{
    _cox_cleanup_(cox_json_file_deinit) struct cox_json_file file = {0};
    if (choice->has_file)
        return cox_fail(err, COX_INVALID, "--init @%s: there is a file already", path);
    choice->has_file = true;
    int r = cox_json_file_read("--init @FILE", path, &file, err);
    const char *key;
    json_t *value;
    if (r == 0) {
        json_object_foreach(file.root, key, value)
        {
            r = take_member(choice, &file, key, value, err);
            if (r)
                return r;
        }
    }
    return r;
}

int cox_init_choice_take(void *choice, const char *text, struct cox_error *err)
{
    return text[0] == '@' && text[1] ? init_file_take(choice, text + 1, err)
                                     : entry_take(choice, text, err);
}
