/*
 * handle_format: the 64 bytes of a by-value handle (handle.h), little-endian.
 *
 *   0   magic u16       0x4843 "CH"
 *   2   version u8      1
 *   3   kind u8         enum cox_handle_kind
 *   4   pid u32         of the exporter
 *   8   start u64       its start time (peer.h)
 *   16  system u64      hash of boot id, pid namespace and time namespace
 *   24  fd u32          the fd's number in the exporter
 *   28  dev u32         of the object, as fstat returns it
 *   32  ino u64
 *   40  size u64        bytes of the object that may be mapped; 0: not memory
 *   48  offset u64      where the exported range begins; 0 if the object is not memory
 *   56  serial u32      a counter of the exporter, so that no two handles are equal
 *   60  crc32c u32      over bytes 0 to 59
 *
 * The control socket stores fds under these bytes without opening handles. So the format is
 * separate from the functions that export and open.
 *
 * Threads: any; nothing here has state.
 */
#ifndef COX_CHANNEL_HANDLE_FORMAT_H
#define COX_CHANNEL_HANDLE_FORMAT_H

#include <coxswain/handle.h>

/* Offsets of the fields. */
enum cox_handle_field {
    COX_HANDLE_AT_MAGIC = 0,
    COX_HANDLE_AT_VERSION = 2,
    COX_HANDLE_AT_KIND = 3,
    COX_HANDLE_AT_PID = 4,
    COX_HANDLE_AT_START = 8,
    COX_HANDLE_AT_SYSTEM = 16,
    COX_HANDLE_AT_FD = 24,
    COX_HANDLE_AT_DEV = 28,
    COX_HANDLE_AT_INO = 32,
    COX_HANDLE_AT_SIZE = 40,
    COX_HANDLE_AT_OFFSET = 48,
    COX_HANDLE_AT_SERIAL = 56,
    COX_HANDLE_AT_CRC = 60,
};

#endif
