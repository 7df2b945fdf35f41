/*
 * varint: base-128 numbers of the protobuf encoding.
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

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

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

#endif
