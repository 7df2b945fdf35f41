#include "digest.h"
#include "checkpoint.h"
#include "file.h"

#include <stdio.h>
#include <stdlib.h>

#include "channel/base/idioms.h"
#include "channel/base/hash.h"

#define CONFIG_SIZE_MAX ((size_t)1 << 20)

static int digest_config(const char *directory, uint64_t *digest, struct cox_error *err)
{
    _cox_cleanup_(cox_free_ptr) char *path = NULL;
    _cox_cleanup_(cox_free_ptr) char *text = NULL;
    _cox_cleanup_(cox_close_fd) int fd = -1;
    uint64_t size;
    int r;

    if (asprintf(&path, "%s/config.json", directory) < 0) {
        path = NULL;
        return cox_fail(err, -ENOMEM, "no memory to read %s", directory);
    }
    r = cox_file_open(path, &fd, &size, err);
    if (r)
        return r;
    if (size > CONFIG_SIZE_MAX)
        return cox_fail(err, COX_TOO_LARGE, "%s has %llu bytes; at most %zu are allowed", path,
                        (unsigned long long)size, CONFIG_SIZE_MAX);
    text = malloc((size_t)size + 1);
    if (!text)
        return cox_fail(err, -ENOMEM, "no memory to read %s", path);
    r = cox_file_read(fd, path, 0, text, (size_t)size, err);
    if (r)
        return r;
    *digest = cox_hash_bytes(*digest, text, (size_t)size);
    return 0;
}

int cox_model_digest_folder(const char *directory, uint64_t *ret_digest, struct cox_error *err)
{
    _cox_cleanup_(cox_checkpoint_freep) struct cox_checkpoint *checkpoint = NULL;
    uint64_t digest = COX_HASH_START;
    int r = digest_config(directory, &digest, err);

    if (!r)
        r = cox_checkpoint_new(directory, &checkpoint, err);
    if (!r)
        r = cox_checkpoint_digest(checkpoint, &digest, err);
    if (r)
        return r;
    *ret_digest = digest ? digest : 1;
    return 0;
}

int cox_model_digest_verify(const char *directory, uint64_t digest, struct cox_error *err)
{
    uint64_t present;
    int r = cox_model_digest_folder(directory, &present, err);

    if (!r && present != digest)
        r = cox_fail(err, COX_CORRUPT, "%s was changed while it was read", directory);
    return r;
}
