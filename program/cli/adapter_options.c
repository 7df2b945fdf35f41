#include "adapter_options.h"

#include "channel/base/idioms.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

void cox_adapter_choice_deinit(struct cox_adapter_choice *choice)
{
    for (size_t i = 0; i < choice->count; i++) {
        free(choice->items[i].name);
        free(choice->items[i].path);
    }
    choice->count = 0;
}

int cox_adapter_path(const char *text, char **ret_path, struct cox_error *err)
{
    char *path = realpath(text, NULL);
    if (path) {
        *ret_path = path;
        return 0;
    }
    int r = -errno;
    if (r == -ENOENT || r == -ENOTDIR)
        return cox_fail(err, COX_NOT_FOUND, "the adapter folder '%.512s' does not exist", text);
    return cox_fail(err, r, "the adapter folder %.512s: %s", text, cox_status_text(r));
}

static bool choice_has(const struct cox_adapter_choice *choice, const char *name)
{
    for (size_t i = 0; i < choice->count; i++)
        if (!strcmp(choice->items[i].name, name))
            return true;
    return false;
}

int cox_adapter_choice_take(void *member, const char *text, struct cox_error *err)
{
    struct cox_adapter_choice *choice = member;
    const char *equals = strchr(text, '=');
    if (!equals || equals == text || !equals[1])
        return cox_fail(err, COX_INVALID, "--adapter is '%.64s': expected NAME=DIR", text);
    if (choice->count == COX_ADAPTER_CHOICE_MAX)
        return cox_fail(err, COX_INVALID, "--adapter: at most %d", COX_ADAPTER_CHOICE_MAX);
    _cox_cleanup_(cox_free_ptr) char *name = strndup(text, (size_t)(equals - text));
    if (!name)
        return cox_fail(err, -ENOMEM, "no memory");
    if (choice_has(choice, name))
        return cox_fail(err, COX_INVALID, "--adapter names '%.128s' twice", name);
    int r = cox_adapter_path(equals + 1, &choice->items[choice->count].path, err);
    if (r)
        return r;
    choice->items[choice->count++].name = cox_steal_ptr(&name);
    return 0;
}
