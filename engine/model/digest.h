/*
 * digest: one number for a model. Equal configurations and weights have equal digests, in every
 * process and on every machine. Others differ with high probability.
 *
 * It is a hash (channel/base/hash.h) of config.json, of the headers and sizes of the tensor files,
 * and of a sample of their data. A file of at most COX_DIGEST_SAMPLE_SIZE bytes is hashed
 * completely; of a larger one that many bytes, in pieces at equal distances. So the cost does not
 * depend on the file size, and further training changes the digest. A change of a few numbers in a
 * large file may be missed. Folder names and file times are not included.
 *
 * Threads: any.
 * Ownership: nothing is owned.
 * Blocks: only on the files.
 * If the process dies: nothing is left.
 */
#ifndef COX_MODEL_DIGEST_H
#define COX_MODEL_DIGEST_H

#include <coxswain/base.h>

#define COX_DIGEST_SAMPLE_SIZE (UINT64_C(1) << 20)

/* The digest of the model in a folder; never 0.
 * Returns
 *   0
 *   COX_NOT_FOUND, COX_CORRUPT, COX_INVALID: as config.h and checkpoint.h
 *   COX_TOO_LARGE
 *   -errno
 */
int cox_model_digest_folder(const char *directory, uint64_t *ret_digest, struct cox_error *err);
/* Checks after reading a folder that it still has the digest from before. Returns as
 * cox_model_digest_folder; COX_CORRUPT also when the folder has changed. */
int cox_model_digest_verify(const char *directory, uint64_t digest, struct cox_error *err);

#endif
