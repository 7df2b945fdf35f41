/*
 * varint: base-128 numbers of the protobuf encoding, one by one and in packed columns.
 *
 * Written from the end to the front, so that the length of what was written is known when the
 * length in front of it is to be written.
 *
 * Threads: stateless.
 * Ownership: every pointer is lent for the call.
 * Codes: false: the bytes end too early, or are no form that a writer of protobuf uses; what such
 *   bytes mean is not decided here.
 * If the process dies: nothing is kept.
 */
#ifndef COX_PROTO_VARINT_H
#define COX_PROTO_VARINT_H

#include <endian.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Bytes of a number, at most: of 64 bits, which every negative one has, and of 32. */
#define COX_VARINT_SIZE_MAX 10
#define COX_VARINT_UINT32_SIZE_MAX 5

static inline bool cox_varint_get_long(const uint8_t **at, const uint8_t *end, uint64_t *ret_value)
{
    const uint8_t *byte = *at;
    uint64_t value = 0;
    for (unsigned shift = 0; byte < end; shift += 7) {
        value |= (uint64_t)(*byte & 0x7f) << shift;
        if (*byte++ < 0x80) {
            *at = byte;
            *ret_value = value;
            return true;
        }
        /* The last one has one bit. */
        if (shift == 56 && (byte == end || *byte > 1))
            return false;
    }
    return false;
}

/* Reads the number at *at, and moves *at behind it. */
static inline bool cox_varint_get(const uint8_t **at, const uint8_t *end, uint64_t *ret_value)
{
    if (*at == end || **at >= 0x80)
        return cox_varint_get_long(at, end, ret_value);
    *ret_value = *(*at)++;
    return true;
}

/* The numbers of a packed column of int32 or uint32: one per byte at most. */
static inline bool cox_varint_get_column(const uint8_t *at, const uint8_t *end, uint32_t *to,
                                         size_t *ret_count)
{
    uint32_t *const first = to;
    uint64_t value;
    while (at < end) {
        unsigned size = 9;
        if (end - at >= 8) {
            uint64_t word;
            memcpy(&word, at, sizeof word);
            word = le64toh(word);
            const uint64_t more = word & UINT64_C(0x8080808080808080);
            if (more == 0) { /* eight of one byte */
                to[0] = at[0], to[1] = at[1], to[2] = at[2], to[3] = at[3];
                to[4] = at[4], to[5] = at[5], to[6] = at[6], to[7] = at[7];
                to += 8;
                at += 8;
                continue;
            }
            if (more == UINT64_C(0x0080008000800080)) { /* four of two bytes */
                word = (word & UINT64_C(0x007f007f007f007f)) |
                       ((word & UINT64_C(0x7f007f007f007f00)) >> 1);
                to[0] = word & 0xffff, to[1] = word >> 16 & 0xffff;
                to[2] = word >> 32 & 0xffff, to[3] = (uint32_t)(word >> 48);
                to += 4;
                at += 8;
                continue;
            }
            if (more != UINT64_C(0x8080808080808080))
                size = (unsigned)__builtin_ctzll(more ^ UINT64_C(0x8080808080808080)) / 8 + 1;
            if (size <= COX_VARINT_UINT32_SIZE_MAX) {
                word &= UINT64_MAX >> (64 - 8 * size);
                value = (word & 0x7f) | (word >> 1 & 0x3f80) | (word >> 2 & 0x1fc000) |
                        (word >> 3 & 0xfe00000) | (word >> 4 & UINT64_C(0x7f0000000));
                at += size;
            }
        }
        if (size > COX_VARINT_UINT32_SIZE_MAX && !cox_varint_get(&at, end, &value))
            return false;
        /* Negative ones come with the sign in all 64 bits. */
        if (value > UINT32_MAX && value < (uint64_t)INT32_MIN)
            return false;
        *to++ = (uint32_t)value;
    }
    *ret_count = (size_t)(to - first);
    return true;
}

/* Writes in front of end. Returns where it begins. */
static inline uint8_t *cox_varint_put(uint8_t *end, uint64_t value)
{
    if (value < 0x80) {
        *--end = (uint8_t)value;
        return end;
    }
    if (value < 0x4000) {
        *--end = (uint8_t)(value >> 7);
        *--end = (uint8_t)(value | 0x80);
        return end;
    }
    const unsigned size = (63u - (unsigned)__builtin_clzll(value)) / 7 + 1;
    uint8_t *const begin = end - size;
    for (unsigned i = 0; i + 1 < size; i++, value >>= 7)
        begin[i] = (uint8_t)(value | 0x80);
    begin[size - 1] = (uint8_t)value;
    return begin;
}

static inline uint8_t *cox_varint_put_uint32s(uint8_t *end, const uint32_t *values, size_t count)
{
    while (count >= 4) {
        const uint32_t *v = values + count - 4;
        if ((v[0] | v[1] | v[2] | v[3]) < 0x80) {
            const uint32_t word = htole32(v[0] | v[1] << 8 | v[2] << 16 | v[3] << 24);
            end -= sizeof word;
            memcpy(end, &word, sizeof word);
            count -= 4;
            continue;
        }
        for (unsigned i = 4; i-- > 0; count--)
            end = cox_varint_put(end, v[i]);
    }
    while (count-- > 0)
        end = cox_varint_put(end, values[count]);
    return end;
}

static inline uint8_t *cox_varint_put_int32s(uint8_t *end, const int32_t *values, size_t count)
{
    while (count-- > 0)
        end = cox_varint_put(end, (uint64_t)values[count]);
    return end;
}

#endif
