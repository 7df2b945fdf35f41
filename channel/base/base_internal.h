/* base_internal: what the library has beyond base.h. Its contract is the same. */
#ifndef COX_CHANNEL_BASE_INTERNAL_H
#define COX_CHANNEL_BASE_INTERNAL_H

#include <coxswain/base.h>

#include <endian.h>
#include <string.h>
#include <sys/types.h>

/* The same clock at the kernel's last tick, a few milliseconds ago at most. Cheaper; for timestamps
 * that are only displayed. */
uint64_t cox_now_coarse_ns(void);
/* now + duration, saturating at COX_DEADLINE_NEVER. */
uint64_t cox_deadline_after_ns(uint64_t duration_ns);

/* For poll: milliseconds that are left, rounded up, or a loop would spin in the last one; -1: of
 * NEVER. */
int cox_deadline_poll_ms(uint64_t deadline_ns);
/* Moves *fd to 3 or above, close-on-exec. Call it for every fd that is kept: in a host that closed
 * its standard fds, new fds get the numbers 0 to 2, to which the host may still write its log.
 * Returns
 *   0
 *   -errno, with *fd as it was
 */
int cox_fd_raise(int *fd);
/* Reads a small file, at most text_size - 1 bytes, and adds a 0. Returns the length without it, or
 * -errno. */
ssize_t cox_small_file_read(const char *path, char *text, size_t text_size);

/* ---- numbers in messages and files: little-endian, at any address ---- */

static inline void cox_le32_put(void *at, uint32_t value)
{
    value = htole32(value);
    memcpy(at, &value, sizeof value);
}

static inline uint32_t cox_le32_get(const void *at)
{
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return le32toh(value);
}

static inline void cox_le64_put(void *at, uint64_t value)
{
    value = htole64(value);
    memcpy(at, &value, sizeof value);
}

static inline uint64_t cox_le64_get(const void *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return le64toh(value);
}

#endif
