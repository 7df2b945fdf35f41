#include "options.h"

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SPEC_COUNT_MAX 16

static bool parse_number(const char *text, const struct option_spec *spec, size_t *ret_number)
{
    char *end;
    errno = 0;
    const unsigned long long number = strtoull(text, &end, 10);
    if (errno || end == text || *end || text[0] == '-' || number < spec->min || number > spec->max)
        return false;
    *ret_number = number;
    return true;
}

static bool parse_list(const char *text, const struct option_spec *spec)
{
    struct options_list list = {.count = 0};
    char copy[256];
    char *rest = copy;
    if (snprintf(copy, sizeof copy, "%s", text) >= (int)sizeof copy)
        return false;
    for (char *item; (item = strsep(&rest, ",")) != NULL; list.count++)
        if (list.count == OPTIONS_LIST_MAX || !parse_number(item, spec, &list.values[list.count]))
            return false;
    *spec->list = list;
    return true;
}

static bool take(const struct option_spec *spec, const char *text)
{
    if (spec->flag)
        *spec->flag = true;
    if (spec->text)
        *spec->text = text;
    return spec->number ? parse_number(text, spec, spec->number)
           : spec->list ? parse_list(text, spec)
                        : true;
}

int options_parse(int argc, char **argv, const struct option_spec *specs, const char *usage)
{
    struct option names[SPEC_COUNT_MAX + 2] = {{"help", no_argument, NULL, SPEC_COUNT_MAX}};
    for (int i = 0; specs[i].name; i++)
        names[i + 1] = (struct option){specs[i].name,
                                       specs[i].flag ? no_argument : required_argument, NULL, i};
    optind = 1;
    for (int option; (option = getopt_long(argc, argv, "", names, NULL)) != -1;)
        if (option == SPEC_COUNT_MAX || option == '?' || !take(&specs[option], optarg)) {
            fputs(usage, option == SPEC_COUNT_MAX ? stdout : stderr);
            return option == SPEC_COUNT_MAX ? 0 : 2;
        }
    if (optind < argc)
        fputs(usage, stderr);
    return optind < argc ? 2 : -1;
}

int options_program_path(char *path, size_t size)
{
    const ssize_t length = readlink("/proc/self/exe", path, size - 1);
    if (length < 0)
        return -errno;
    path[length] = '\0';
    return 0;
}
