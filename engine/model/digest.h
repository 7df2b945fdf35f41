/*
 * digest: one number for a model: of the same configuration and the same weights the same, in every
 * process and on every machine; of others, in all likelihood, another.
 *
 * It is a hash (channel/base/hash.h) of the bytes of config.json, of the headers and sizes of the
 * tensor files, and of a sample of their data: all of it where a file has at most
 * COX_DIGEST_SAMPLE_SIZE, else that many bytes, in pieces that lie evenly from its beginning to its
 * end. So it is cheap for a file of any size, and training that went on changes it; what it may
 * miss is a change of a few numbers in a large file. Names of folders and times of files are not in
 * it.
 *
 * Any process, any thread; nothing is owned. Blocks only on the files. If the process dies nothing
 * is left.
 */
#ifndef COX_MODEL_DIGEST_H
#define COX_MODEL_DIGEST_H

#include "channel/base/base.h"

#define COX_DIGEST_SAMPLE_SIZE (UINT64_C(1) << 20)

/* Of the model in a folder; never 0. Returns 0; COX_NOT_FOUND, COX_CORRUPT, COX_INVALID as config.h
 * and checkpoint.h say; COX_TOO_LARGE; a negative errno. */
int cox_model_digest_folder(const char *directory, uint64_t *ret_digest, struct cox_error *err);
/* After the folder was read: that it is still what this digest, from before, is of. Returns as
 * folder; COX_CORRUPT also: it was changed meanwhile. */
int cox_model_digest_verify(const char *directory, uint64_t digest, struct cox_error *err);

#endif
