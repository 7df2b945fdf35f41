#include "nearest.h"

#include <string.h>

#define LENGTH_MAX 32
#define DISTANCE_MAX 2

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Letters that are wrong, missing or surplus; neighbours that have changed places count once. */
static size_t distance_of(const char *a, const char *b)
{
    const size_t a_length = strlen(a), b_length = strlen(b);
    size_t rows[3][LENGTH_MAX + 1];
    size_t *before = rows[0], *last = rows[1], *row = rows[2];
    if (a_length > LENGTH_MAX || b_length > LENGTH_MAX)
        return LENGTH_MAX;
    memset(rows, 0, sizeof rows);
    for (size_t k = 0; k <= b_length; k++)
        last[k] = k;
    for (size_t i = 1; i <= a_length; i++) {
        row[0] = i;
        for (size_t k = 1; k <= b_length; k++) {
            row[k] = least(least(last[k], row[k - 1]) + 1, last[k - 1] + (a[i - 1] != b[k - 1]));
            if (i > 1 && k > 1 && a[i - 1] == b[k - 2] && a[i - 2] == b[k - 1])
                row[k] = least(row[k], before[k - 2] + 1);
        }
        size_t *oldest = before;
        before = last;
        last = row;
        row = oldest;
    }
    return last[b_length];
}

void cox_nearest_try(struct cox_nearest *nearest, const char *word)
{
    const size_t length = strlen(nearest->typed);
    const size_t limit = least(length, strlen(word)) <= 3 ? 1 : DISTANCE_MAX;
    size_t distance = distance_of(nearest->typed, word);
    if (length >= 3 && strncmp(nearest->typed, word, length) == 0)
        distance = least(distance, 1);
    if (distance > limit || (nearest->best && distance >= nearest->distance))
        return;
    nearest->best = word;
    nearest->distance = distance;
}
