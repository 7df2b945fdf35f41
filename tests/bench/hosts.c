#include "hosts.h"

#include <stdlib.h>
#include <string.h>

#define HOST_COUNT_MAX 40

struct hosts {
    struct {
        /* lent, of the kinds */
        const char *name;
        struct process process;
    } list[HOST_COUNT_MAX];
    size_t count;
};

struct hosts *hosts_new(void)
{
    return calloc(1, sizeof(struct hosts));
}

void hosts_free(struct hosts *hosts)
{
    for (size_t i = 0; hosts && i < hosts->count; i++)
        process_quit(&hosts->list[i].process);
    for (size_t i = 0; hosts && i < hosts->count; i++)
        process_free(&hosts->list[i].process);
    free(hosts);
}

void hosts_end(struct hosts *hosts, const char *name)
{
    for (size_t i = 0; i < hosts->count; i++)
        if (strcmp(hosts->list[i].name, name) == 0)
            process_free(&hosts->list[i].process);
}

struct process *hosts_home(struct hosts *hosts, const struct kind *kind, bool is_brief)
{
    const bool is_python = kind->program && strstr(kind->program, ".py");
    const char *name = kind->host ? kind->host : is_brief && is_python ? kind->name : NULL;
    size_t i = 0;
    while (name && i < hosts->count && strcmp(hosts->list[i].name, name) != 0)
        i++;
    if (!name || i == HOST_COUNT_MAX)
        return NULL;
    if (i == hosts->count) {
        hosts->list[hosts->count++].name = name;
        hosts->list[i].process = (struct process){.in_fd = -1, .out_fd = -1};
    }
    return &hosts->list[i].process;
}
