#include "nodes.h"

#include "nodes_library.h"

#include <coxswain/version.h>

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LIBRARY "libcoxswain-nodes.so.0"

int cox_node_name_check(const char *what, const char *name, struct cox_error *err)
{
    static const char allowed[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-";
    const size_t length = strlen(name), good = strspn(name, allowed);
    if (length == 0 || length > COX_NODE_NAME_MAX)
        return cox_fail(err, COX_INVALID,
                        "the name of a %s has %zu characters: 1 to %d are allowed", what, length,
                        COX_NODE_NAME_MAX);
    if (good < length)
        return cox_fail(
            err, COX_INVALID,
            "the name '%s' of a %s has a '%c': letters, digits, '-' and '_' are allowed, "
            "since it is a part of NATS subjects",
            name, what, name[good]);
    return 0;
}

/* Reads NAME:RANKS, in place. */
static int place_parse(char *item, struct cox_node_place *ret_place, struct cox_error *err)
{
    char *colon = strchr(item, ':'), *end = NULL;
    const unsigned long ranks = colon ? strtoul(colon + 1, &end, 10) : 0;
    if (!colon || end == colon + 1 || *end || ranks < 1 || ranks > COX_RANK_COUNT_MAX)
        return cox_fail(err, COX_INVALID,
                        "nodes: '%.60s' is no NAME:RANKS, as in a:4,b:4 (1 to %d ranks)", item,
                        COX_RANK_COUNT_MAX);
    *colon = '\0';
    int r = cox_node_name_check("node", item, err);
    if (r)
        return r;
    snprintf(ret_place->name, sizeof ret_place->name, "%s", item);
    ret_place->rank_count = (uint32_t)ranks;
    return 0;
}

int cox_nodes_parse(const char *nodes, struct cox_node_place *ret_places, uint32_t *ret_node_count,
                    uint32_t *ret_rank_count, struct cox_error *err)
{
    struct cox_node_place places[COX_NODE_COUNT_MAX];
    char list[4096], *rest = NULL;
    uint32_t count = 0, world = 0;
    if (snprintf(list, sizeof list, "%s", nodes) >= (int)sizeof list)
        return cox_fail(err, COX_INVALID, "nodes: the list is too long");
    if (strstr(list, ",,") || list[0] == ',' || (list[0] && list[strlen(list) - 1] == ','))
        return cox_fail(err, COX_INVALID, "nodes '%.60s': a node is empty, expected a:4,b:4", list);
    for (char *item = strtok_r(list, ",", &rest); item; item = strtok_r(NULL, ",", &rest)) {
        struct cox_node_place place = {.rank_first = world};
        int r = place_parse(item, &place, err);
        if (r)
            return r;
        if (count == COX_NODE_COUNT_MAX || world + place.rank_count > COX_RANK_COUNT_MAX)
            return cox_fail(err, COX_INVALID, "nodes: at most %d nodes and %d ranks",
                            COX_NODE_COUNT_MAX, COX_RANK_COUNT_MAX);
        for (uint32_t i = 0; i < count; i++)
            if (strcmp(places[i].name, place.name) == 0)
                return cox_fail(err, COX_INVALID, "nodes: node %s is named twice", place.name);
        places[count++] = place;
        world += place.rank_count;
    }
    if (count == 0)
        return cox_fail(err, COX_INVALID, "nodes: no node is named, as in a:4,b:4");
    if (ret_places)
        memcpy(ret_places, places, count * sizeof *places);
    *ret_node_count = count;
    *ret_rank_count = world;
    return 0;
}

/* Tries a path that ends in `file`, which stands for the program or library there. */
static void *open_beside(const char *file, const char *where, char *why, size_t why_size)
{
    char path[PATH_MAX + 64];
    const char *slash = strrchr(file, '/');
    if (!slash)
        return NULL;
    snprintf(path, sizeof path, "%.*s/%s" LIBRARY, (int)(slash - file), file, where);
    if (access(path, F_OK) != 0)
        return NULL;
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle)
        snprintf(why, why_size, "%s", dlerror());
    return handle;
}

int cox_nodes_library_open(const struct cox_nodes_library **ret_library, struct cox_error *err)
{
    char program[PATH_MAX], why[512] = "";
    Dl_info own;
    void *handle = NULL;
    const ssize_t size = readlink("/proc/self/exe", program, sizeof program - 1);
    if (size > 0) {
        program[size] = '\0';
        handle = open_beside(program, "../lib/", why, sizeof why);
    }
    if (!handle && !why[0] && dladdr((void *)(uintptr_t)cox_nodes_parse, &own) && own.dli_fname)
        handle = open_beside(own.dli_fname, "", why, sizeof why);
    if (!handle && !why[0]) {
        handle = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
        if (!handle)
            snprintf(why, sizeof why, "%s", dlerror());
    }
    if (!handle)
        return cox_fail(err, COX_UNSUPPORTED,
                        "groups over several machines need " LIBRARY
                        " (Debian: coxswain-nodes; or build with libnats-dev and libssl-dev): %s",
                        why);
    const struct cox_nodes_library *library = dlsym(handle, "cox_nodes_library");
    if (!library || library->version != COX_NODES_LIBRARY_VERSION ||
        strcmp(library->release, COX_VERSION_TEXT) != 0)
        return cox_fail(err, COX_UNSUPPORTED,
                        LIBRARY " is of Coxswain %s, this program of " COX_VERSION_TEXT
                                ": install the same release",
                        library ? library->release : "another release");
    *ret_library = library;
    return 0;
}
