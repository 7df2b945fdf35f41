#include "visible.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The longest replacement of a byte: U+1F, with a byte for each of its digits. */
#define GROWTH 6

/* First and last code of each range that shows nothing, or changes how others show: C1 controls,
 * the soft hyphen, blanks that are no ASCII blank, joiners, marks of direction, tags, and what is
 * no character. */
static const uint32_t invisible[][2] = {
    {0x7f, 0xa0},     {0xad, 0xad},     {0x34f, 0x34f},   {0x61c, 0x61c},   {0x115f, 0x1160},
    {0x1680, 0x1680}, {0x17b4, 0x17b5}, {0x180b, 0x180f}, {0x2000, 0x200f}, {0x2028, 0x202f},
    {0x205f, 0x206f}, {0x3000, 0x3000}, {0x3164, 0x3164}, {0xe000, 0xf8ff}, {0xfe00, 0xfe0f},
    {0xfeff, 0xfeff}, {0xffa0, 0xffa0}, {0xfff0, 0xfffb}, {0xfffe, 0xffff}, {0xe0000, 0x10ffff},
};

static bool is_visible(uint32_t code)
{
    if (code < 0x20)
        return code == '\n' || code == '\t';
    for (size_t i = 0; i < sizeof invisible / sizeof invisible[0]; i++)
        if (code >= invisible[i][0] && code <= invisible[i][1])
            return false;
    return true;
}

/* The bytes of the character at text; 0: there is none. */
static size_t character_get(const unsigned char *text, uint32_t *ret_code)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    const size_t size = text[0] < 0x80   ? 1
                        : text[0] < 0xc2 ? 0
                        : text[0] < 0xe0 ? 2
                        : text[0] < 0xf0 ? 3
                        : text[0] < 0xf5 ? 4
                                         : 0;
    uint32_t code = size < 2 ? text[0] : text[0] & (0x7fu >> size);
    for (size_t i = 1; i < size; i++) {
        if ((text[i] & 0xc0) != 0x80)
            return 0;
        code = code << 6 | (text[i] & 0x3fu);
    }
    *ret_code = code;
    return code < least[size] || (code >= 0xd800 && code < 0xe000) || code > 0x10ffff ? 0 : size;
}

char *cox_visible_text(const char *text)
{
    char *copy = malloc(GROWTH * strlen(text) + 1), *to = copy;
    for (const unsigned char *from = (const unsigned char *)text; copy && *from;) {
        uint32_t code = 0;
        const size_t size = character_get(from, &code);
        if (size == 0)
            to += sprintf(to, "\\x%02x", *from);
        else if (is_visible(code))
            to = (char *)memcpy(to, from, size) + size;
        else
            to += sprintf(to, "U+%04X", code);
        from += size ? size : 1;
    }
    if (copy)
        *to = '\0';
    return copy;
}
