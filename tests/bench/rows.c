#include "rows.h"

#include <stdio.h>

json_t *rows_samples(const uint64_t *samples_ns, size_t count, double unit_ns)
{
    json_t *array = json_array();
    for (size_t i = 0; i < count; i++)
        json_array_append_new(array, json_real((double)samples_ns[i] / unit_ns));
    return array;
}

json_t *rows_figures(const double *figures, size_t count)
{
    json_t *array = json_array();
    for (size_t i = 0; i < count; i++)
        json_array_append_new(array, json_real(figures[i]));
    return array;
}

int rows_write(const char *program, const char *path, json_t *rows)
{
    json_t *root = json_pack("{s:o}", "rows", rows);
    int r = path && json_dump_file(root, path, JSON_INDENT(1) | JSON_REAL_PRECISION(6)) < 0;
    if (r)
        fprintf(stderr, "%s: %s could not be written\n", program, path);
    json_decref(root);
    return r;
}
