#include "held.h"

#include "channel/base/idioms.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define SEALS (F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
#define FOREVER_MS UINT64_MAX

struct cox_weights {
    struct cox_weights *next;
    /* fd -1: they are being loaded */
    struct cox_weights_image image;
    /* the first one loads them, while there is no image */
    struct cox_weights_user *users;
    uint64_t keep_ms;
    /* when they were put, or asked for */
    uint64_t since_ns;
    /* without a user: when they are dropped; else COX_DEADLINE_NEVER */
    uint64_t drop_ns;
    char key[COX_WEIGHTS_KEY_SIZE + 1];
};

/* ---- users of weights ---- */

/* At the end, so that who has waited longest is the next. */
static void user_add(struct cox_weights *weights, struct cox_weights_user *user)
{
    struct cox_weights_user **end = &weights->users;
    while (*end)
        end = &(*end)->next;
    *end = user;
    user->next = NULL;
    user->weights = weights;
    weights->drop_ns = COX_DEADLINE_NEVER;
}

static void user_remove(struct cox_weights *weights, struct cox_weights_user *user)
{
    struct cox_weights_user **link = &weights->users;
    while (*link != user)
        link = &(*link)->next;
    *link = user->next;
    user->next = NULL;
    user->weights = NULL;
    user->waits = false;
}

/* ---- the table ---- */

static struct cox_weights *find(const struct cox_held *held, const char *key)
{
    struct cox_weights *weights = held->first;
    while (weights && strcmp(weights->key, key) != 0)
        weights = weights->next;
    return weights;
}

static int add(struct cox_held *held, const char *key, struct cox_weights **ret_weights)
{
    if (held->count == COX_WEIGHTS_COUNT_MAX)
        return COX_FULL;
    struct cox_weights *weights = calloc(1, sizeof *weights);
    if (!weights)
        return -ENOMEM;
    weights->image.fd = -1;
    weights->since_ns = cox_now_ns();
    weights->drop_ns = COX_DEADLINE_NEVER;
    strcpy(weights->key, key);
    weights->next = held->first;
    held->first = weights;
    held->count++;
    *ret_weights = weights;
    return 0;
}

static void forget(struct cox_held *held, struct cox_weights *weights)
{
    struct cox_weights **link = &held->first;
    while (*link != weights)
        link = &(*link)->next;
    *link = weights->next;
    held->count--;
    while (weights->users)
        user_remove(weights, weights->users);
    if (weights->image.fd >= 0)
        held->close(held->context, &weights->image.fd);
    free(weights);
}

void cox_held_deinit(struct cox_held *held)
{
    while (held->first)
        forget(held, held->first);
}

/* ---- what users ask ---- */

static void keep(struct cox_weights *weights, uint64_t keep_ms)
{
    if (keep_ms > weights->keep_ms)
        weights->keep_ms = keep_ms;
}

int cox_held_get(struct cox_held *held, struct cox_weights_user *user, const char *key,
                 uint64_t keep_ms, struct cox_weights_image *ret_image)
{
    struct cox_weights *weights = find(held, key);
    const bool is_loader = !weights;
    if (user->asked)
        return COX_INVALID;
    int r = weights ? 0 : add(held, key, &weights);
    if (r)
        return r;
    user->asked = true;
    user_add(weights, user);
    keep(weights, keep_ms);
    user->waits = !is_loader && weights->image.fd < 0;
    if (weights->image.fd < 0)
        return is_loader ? COX_EMPTY : COX_BUSY;
    *ret_image = weights->image;
    return 0;
}

/* Returns as put. */
static int image_check(struct cox_weights_image *image)
{
    struct stat st;
    if (image->memory == COX_WEIGHTS_CUDA)
        return image->bytes > 0 ? 0 : COX_DENIED;
    const int seals = fcntl(image->fd, F_GET_SEALS);
    if (seals < 0)
        return errno == EINVAL ? COX_DENIED : -errno;
    if (fstat(image->fd, &st) < 0)
        return -errno;
    image->bytes = (uint64_t)st.st_size;
    return (seals & SEALS) == SEALS && st.st_size > 0 ? 0 : COX_DENIED;
}

static void answer_waiting(struct cox_held *held, const struct cox_weights *weights)
{
    for (struct cox_weights_user *user = weights->users; user; user = user->next) {
        if (!user->waits)
            continue;
        user->waits = false;
        held->answer(held->context, user, 0, &weights->image);
    }
}

int cox_held_put(struct cox_held *held, struct cox_weights_user *user, const char *key,
                 uint64_t keep_ms, struct cox_weights_image *image)
{
    struct cox_weights *weights = find(held, key);
    int r = image_check(image);
    if (r)
        return r;
    if (user->asked && (!weights || weights->users != user || weights->image.fd >= 0))
        return COX_INVALID;
    if (!user->asked && weights)
        return COX_TAKEN;
    if (!weights) {
        r = add(held, key, &weights);
        if (r)
            return r;
        user->asked = true;
        user_add(weights, user);
    }
    weights->image = *image;
    image->fd = -1;
    weights->since_ns = cox_now_ns();
    keep(weights, keep_ms);
    answer_waiting(held, weights);
    return 0;
}

uint32_t cox_held_drop(struct cox_held *held, const char *key)
{
    uint32_t count = 0;
    for (struct cox_weights *weights = held->first, *next; weights; weights = next) {
        next = weights->next;
        if (weights->image.fd < 0 || (key[0] && strcmp(weights->key, key) != 0))
            continue;
        forget(held, weights);
        count++;
    }
    return count;
}

void cox_held_leave(struct cox_held *held, struct cox_weights_user *user)
{
    struct cox_weights *weights = user->weights;
    if (!weights)
        return;
    user_remove(weights, user);
    struct cox_weights_user *next = weights->users;
    if (weights->image.fd >= 0 && !next) {
        weights->drop_ns = weights->keep_ms == FOREVER_MS ? COX_DEADLINE_NEVER
                                                          : cox_deadline_after_ms(weights->keep_ms);
        return;
    }
    if (weights->image.fd >= 0)
        return;
    if (!next) {
        forget(held, weights);
        return;
    }
    /* It was the loader, or one that waited: the first of the others loads. */
    if (next->waits) {
        next->waits = false;
        held->answer(held->context, next, COX_EMPTY, &(struct cox_weights_image){.fd = -1});
    }
}

uint64_t cox_held_turn(struct cox_held *held)
{
    const uint64_t now_ns = cox_now_ns();
    uint64_t next_ns = COX_DEADLINE_NEVER;
    for (struct cox_weights *weights = held->first, *next; weights; weights = next) {
        next = weights->next;
        if (weights->drop_ns <= now_ns)
            forget(held, weights);
        else if (weights->drop_ns < next_ns)
            next_ns = weights->drop_ns;
    }
    return next_ns;
}

/* ---- list ---- */

static json_t *seconds(uint64_t from_ns, uint64_t to_ns)
{
    return json_real(to_ns > from_ns ? (double)(to_ns - from_ns) / 1e9 : 0);
}

static json_t *describe(const struct cox_weights *weights, uint64_t now_ns)
{
    uint32_t users = 0;
    for (const struct cox_weights_user *user = weights->users; user; user = user->next)
        users++;
    json_t *key = json_string(weights->key); /* NULL: it is not UTF-8 */
    return json_pack(
        "{so sI si ss so so so sb}", "key", key ? key : json_string("?"), "bytes",
        (json_int_t)weights->image.bytes, "users", (int)users, "memory",
        weights->image.memory == COX_WEIGHTS_CUDA ? "CUDA" : "host", "keep_s",
        weights->keep_ms == FOREVER_MS ? json_null() : json_real((double)weights->keep_ms / 1e3),
        "left_s",
        weights->drop_ns == COX_DEADLINE_NEVER ? json_null() : seconds(now_ns, weights->drop_ns),
        "age_s", seconds(weights->since_ns, now_ns), "loading", weights->image.fd < 0);
}

json_t *cox_held_list(const struct cox_held *held)
{
    const uint64_t now_ns = cox_now_ns();
    json_t *list = json_array();
    for (const struct cox_weights *weights = held->first; list && weights; weights = weights->next)
        if (json_array_append_new(list, describe(weights, now_ns))) {
            json_decref(list);
            list = NULL;
        }
    return list;
}
