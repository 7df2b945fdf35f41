#include "checkpoint.h"
#include "digest.h"
#include "file.h"
#include "safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "channel/base/idioms.h"
#include "channel/base/hash.h"

/* An index has one line per tensor; the largest known ones are a few MB. */
#define INDEX_SIZE_MAX ((size_t)64 << 20)

struct shard {
    /* of the file, in the folder */
    char *name;
    struct cox_safetensors *file;
};

struct cox_checkpoint {
    char *directory;
    /* NULL: a single file */
    json_t *index;
    /* borrowed from index: tensor -> shard name */
    json_t *weight_map;
    uint32_t shard_count;
    struct shard shards[COX_SHARD_COUNT_MAX];
};

static struct cox_safetensors *find_shard(const struct cox_checkpoint *checkpoint, const char *name)
{
    for (uint32_t i = 0; i < checkpoint->shard_count; i++)
        if (!strcmp(checkpoint->shards[i].name, name))
            return checkpoint->shards[i].file;
    return NULL;
}

static int open_shard(struct cox_checkpoint *checkpoint, const char *name, struct cox_error *err)
{
    _cox_cleanup_(cox_free_ptr) char *path = NULL;
    struct shard *shard = &checkpoint->shards[checkpoint->shard_count];
    int r;

    if (checkpoint->shard_count == COX_SHARD_COUNT_MAX)
        return cox_fail(err, COX_INVALID, "%s: the index names more than %d files",
                        checkpoint->directory, COX_SHARD_COUNT_MAX);
    if (asprintf(&path, "%s/%s", checkpoint->directory, name) < 0) {
        path = NULL;
        return cox_fail(err, -ENOMEM, "no memory to open %s", name);
    }
    r = cox_safetensors_new(path, &shard->file, err);
    if (r)
        return r;
    checkpoint->shard_count++;
    shard->name = strdup(name);
    if (!shard->name)
        return cox_fail(err, -ENOMEM, "no memory to open %s", name);
    return 0;
}

static int open_index(struct cox_checkpoint *checkpoint, const char *path, struct cox_error *err)
{
    const char *tensor;
    json_t *value;
    int r;

    r = cox_json_load(path, INDEX_SIZE_MAX, &checkpoint->index, err);
    if (r)
        return r;
    checkpoint->weight_map = json_object_get(checkpoint->index, "weight_map");
    if (!json_is_object(checkpoint->weight_map))
        return cox_fail(err, COX_INVALID, "%s has no weight_map object", path);
    json_object_foreach(checkpoint->weight_map, tensor, value)
    {
        const char *name = json_string_value(value);

        if (!name || !name[0] || strchr(name, '/'))
            return cox_fail(err, COX_INVALID, "%s: weight_map names no file of this folder for %s",
                            path, tensor);
        if (find_shard(checkpoint, name))
            continue;
        r = open_shard(checkpoint, name, err);
        if (r)
            return r;
    }
    return 0;
}

static int open_files(struct cox_checkpoint *checkpoint, struct cox_error *err)
{
    _cox_cleanup_(cox_free_ptr) char *path = NULL;
    struct cox_error why = {0};
    int r;

    r = open_shard(checkpoint, "model.safetensors", &why);
    if (r != COX_NOT_FOUND)
        return r ? cox_fail(err, r, "%s", why.text) : 0;

    if (asprintf(&path, "%s/model.safetensors.index.json", checkpoint->directory) < 0) {
        path = NULL;
        return cox_fail(err, -ENOMEM, "no memory to open %s", checkpoint->directory);
    }
    why = (struct cox_error){0};
    r = open_index(checkpoint, path, &why);
    if (r == COX_NOT_FOUND && !checkpoint->index)
        return cox_fail(err, r,
                        "%s contains neither model.safetensors nor model.safetensors.index.json",
                        checkpoint->directory);
    return r ? cox_fail(err, r, "%s", why.text) : 0;
}

int cox_checkpoint_new(const char *directory, struct cox_checkpoint **ret_checkpoint,
                       struct cox_error *err)
{
    _cox_cleanup_(cox_checkpoint_freep) struct cox_checkpoint *checkpoint =
        calloc(1, sizeof(*checkpoint));
    int r;

    if (!checkpoint || !(checkpoint->directory = strdup(directory)))
        return cox_fail(err, -ENOMEM, "no memory to open %s", directory);
    r = open_files(checkpoint, err);
    if (r)
        return r;
    *ret_checkpoint = cox_steal_ptr(&checkpoint);
    return 0;
}

struct cox_checkpoint *cox_checkpoint_free(struct cox_checkpoint *checkpoint)
{
    if (!checkpoint)
        return NULL;
    for (uint32_t i = 0; i < checkpoint->shard_count; i++) {
        cox_safetensors_free(checkpoint->shards[i].file);
        free(checkpoint->shards[i].name);
    }
    json_decref(checkpoint->index);
    free(checkpoint->directory);
    free(checkpoint);
    return NULL;
}

static int choose_file(const struct cox_checkpoint *checkpoint, const char *name,
                       const struct cox_safetensors **ret_file, struct cox_error *err)
{
    const char *shard;

    if (!checkpoint->weight_map) {
        *ret_file = checkpoint->shards[0].file;
        return 0;
    }
    shard = json_string_value(json_object_get(checkpoint->weight_map, name));
    if (!shard)
        return cox_fail(err, COX_NOT_FOUND, "%s: the index has no tensor %s", checkpoint->directory,
                        name);
    *ret_file = find_shard(checkpoint, shard);
    return 0;
}

const char *cox_checkpoint_name(const struct cox_checkpoint *checkpoint, size_t i)
{
    for (uint32_t shard = 0; shard < checkpoint->shard_count; shard++) {
        const struct cox_safetensors *file = checkpoint->shards[shard].file;

        if (i < cox_safetensors_count(file))
            return cox_safetensors_name(file, i);
        i -= cox_safetensors_count(file);
    }
    return NULL;
}

bool cox_checkpoint_has(const struct cox_checkpoint *checkpoint, const char *name)
{
    const struct cox_safetensors *file = NULL;

    return choose_file(checkpoint, name, &file, NULL) == 0 && cox_safetensors_has(file, name);
}

int cox_checkpoint_read(const struct cox_checkpoint *checkpoint, const char *name,
                        const uint64_t *shape, size_t dimension_count, float *buffer,
                        struct cox_error *err)
{
    const struct cox_safetensors *file = NULL;
    int r = choose_file(checkpoint, name, &file, err);

    return r ? r : cox_safetensors_read(file, name, shape, dimension_count, buffer, err);
}

int cox_checkpoint_read_part(const struct cox_checkpoint *checkpoint, const char *name,
                             uint64_t rows, uint64_t columns, const struct cox_tensor_part *part,
                             float *buffer, struct cox_error *err)
{
    const struct cox_safetensors *file = NULL;
    int r = choose_file(checkpoint, name, &file, err);

    return r ? r : cox_safetensors_read_part(file, name, rows, columns, part, buffer, err);
}

int cox_checkpoint_digest(const struct cox_checkpoint *checkpoint, uint64_t *digest,
                          struct cox_error *err)
{
    uint64_t sum = *digest;

    for (uint32_t i = 0; i < checkpoint->shard_count; i++) {
        const struct shard *shard = &checkpoint->shards[i];
        int r;

        sum = cox_hash_bytes(sum, shard->name, strlen(shard->name) + 1);
        r = cox_safetensors_digest(shard->file, &sum, err);
        if (r)
            return r;
    }
    *digest = sum;
    return 0;
}
