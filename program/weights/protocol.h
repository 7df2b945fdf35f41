/*
 * protocol: what a process that uses weights says to the holder, and what it is answered.
 *
 * The holder listens at `.weights.sock` in the runtime directory (runtime_dir.h), which no group
 * can be named. It serves processes of its own user and of root. Everything is little-endian.
 *
 * A request is 544 bytes. A put has one fd with its first byte:
 *
 *   0   op u32        enum cox_weights_op
 *   4   memory u32    put: enum cox_weights_memory, what the fd is; else zero
 *   8   keep_ms u64   put and get: how long the weights stay without a user. The largest of all
 *                     requests for a key counts; UINT64_MAX: until they are dropped
 *   16  bytes u64     put of COX_WEIGHTS_CUDA: of the memory; else zero
 *   24  reserved, zero
 *   32  key, 512 bytes, padded with zeros
 *
 * An answer is 16 bytes. That of a get that has found weights, and of a list, has one fd:
 *
 *   0   status u32    enum cox_status
 *   4   memory u32    put, get: enum cox_weights_memory
 *   8   count u64     drop: how many weights were dropped; put, get: bytes of the memory
 *
 * A connection is one user of one key, from the answer to its put or get until it ends:
 *
 *   get   0: the fd is the memory. COX_EMPTY: nobody has these weights, and whoever is told so is
 *         their loader: others that ask for them get no answer until the loader has put them, or
 *         its connection has ended, and then one of them is the next loader.
 *   put   from the loader, or for a key that nobody has. The fd is memory with the seals
 *         F_SEAL_WRITE, F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_SEAL; or of COX_WEIGHTS_CUDA an fd
 *         of the CUDA driver, about which the holder, which has no driver, knows nothing.
 *         COX_TAKEN: others have put them; COX_DENIED: no such memory.
 *   drop  forgets the weights of the key, or all if it is empty. Who has mapped them keeps them.
 *         Those that are being loaded stay.
 *   list  the fd is memory with a JSON array; of each: key, bytes, users, memory ("host" or
 *         "CUDA"), keep_s (null: until they are dropped), left_s (null: they have users), age_s,
 *         loading (true: nobody has put them).
 *
 * A request that is not one (reserved bytes, an unknown op or memory, no key, no fd, a second key)
 * is answered COX_INVALID; COX_FULL: COX_WEIGHTS_COUNT_MAX are held.
 *
 * What the memory contains is between those who put and get it (python/coxswain/_internal/
 * weights.py): the holder never maps it.
 */
#ifndef COX_PROGRAM_WEIGHTS_PROTOCOL_H
#define COX_PROGRAM_WEIGHTS_PROTOCOL_H

/* The name, as that of a group, whose socket the holder's is. */
#define COX_WEIGHTS_NAME ".weights"

#define COX_WEIGHTS_REQUEST_SIZE 544
#define COX_WEIGHTS_ANSWER_SIZE 16
#define COX_WEIGHTS_KEY_SIZE 512
/* Parts of models that are held at once. */
#define COX_WEIGHTS_COUNT_MAX 4096

enum cox_weights_memory {
    COX_WEIGHTS_HOST = 0,
    COX_WEIGHTS_CUDA = 3, /* as COX_DOMAIN_CUDA */
};

enum cox_weights_op {
    COX_WEIGHTS_GET = 1,
    COX_WEIGHTS_PUT = 2,
    COX_WEIGHTS_DROP = 3,
    COX_WEIGHTS_LIST = 4,
};

#endif
