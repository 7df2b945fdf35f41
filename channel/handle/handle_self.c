/* handle_self: the checksum of a handle, and where this process is. Apart from opening, which needs
 * the control socket: pools and queues use these alone. */
#include "channel/base/base_internal.h"
#include "channel/base/hash.h"
#include "channel/base/idioms.h"
#include "channel/base/peer.h"
#include "handle_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <unistd.h>

#define BOOT_ID_PATH "/proc/sys/kernel/random/boot_id"

uint32_t cox_handle_crc(const void *bytes, size_t size)
{
    /* Four bits at a time: entry i is i shifted four times through 0x82f63b78, the polynomial
     * reflected. */
    static const uint32_t table[16] = {
        0x00000000, 0x105ec76f, 0x20bd8ede, 0x30e349b1, 0x417b1dbc, 0x5125dad3,
        0x61c69362, 0x7198540d, 0x82f63b78, 0x92a8fc17, 0xa24bb5a6, 0xb21572c9,
        0xc38d26c4, 0xd3d3e1ab, 0xe330a81a, 0xf36e6f75,
    };
    const uint8_t *byte = bytes;
    uint32_t crc = UINT32_MAX;
    for (size_t i = 0; i < size; i++) {
        crc ^= byte[i];
        crc = crc >> 4 ^ table[crc & 15];
        crc = crc >> 4 ^ table[crc & 15];
    }
    return ~crc;
}

int cox_handle_system(uint64_t *ret_system, struct cox_error *err)
{
    char boot_id[64];
    struct stat st;
    const ssize_t length = cox_small_file_read(BOOT_ID_PATH, boot_id, sizeof boot_id);
    if (length <= 0) {
        const int r = length < 0 ? (int)length : -ENODATA;
        return cox_fail(err, r, BOOT_ID_PATH ": %s; handles need /proc", cox_status_text(r));
    }
    if (stat("/proc/self/ns/pid", &st) < 0) {
        int e = errno;
        return cox_fail(err, -e, "/proc/self/ns/pid: %s; handles need /proc", cox_status_text(-e));
    }
    uint64_t namespaces[2] = {st.st_ino, 0};
    /* The start time of a process differs between time namespaces. */
    if (stat("/proc/self/ns/time", &st) == 0)
        namespaces[1] = st.st_ino;
    else if (errno != ENOENT) { /* of a kernel that has none */
        int e = errno;
        return cox_fail(err, -e, "/proc/self/ns/time: %s; handles need /proc", cox_status_text(-e));
    }
    uint64_t hash = cox_hash_bytes(COX_HASH_START, boot_id, (size_t)length);
    *ret_system = cox_hash_bytes(hash, namespaces, sizeof namespaces);
    return 0;
}

int cox_handle_self_load(struct cox_handle_self *ret_self, struct cox_error *err)
{
    struct cox_handle_self self = {.pid = getpid()};
    char seen[32];
    int r = cox_handle_system(&self.system, err);
    if (r)
        return r;
    ssize_t length = readlink("/proc/self", seen, sizeof seen - 1);
    if (length < 0) {
        int e = errno;
        return cox_fail(err, -e, "/proc/self: %s; handles need /proc", cox_status_text(-e));
    }
    seen[length] = '\0';
    /* After unshare(CLONE_NEWPID) without a new /proc, start times would be those of other
     * processes. */
    if (strtol(seen, NULL, 10) != self.pid)
        return cox_fail(err, COX_UNSUPPORTED,
                        "/proc calls process %jd %s: it shows another pid namespace; mount it anew",
                        (intmax_t)self.pid, seen);
    r = cox_peer_start_time(self.pid, &self.start);
    if (r)
        return cox_fail(err, r, "/proc/%jd/stat: %s; handles need /proc", (intmax_t)self.pid,
                        cox_status_text(r));
    *ret_self = self;
    return 0;
}
