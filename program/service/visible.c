#include "visible.h"

#include "channel/text/text.h"

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

char *cox_visible_text(const char *text)
{
    char *copy = malloc(GROWTH * strlen(text) + 1), *to = copy;
    for (const char *from = text; copy && *from;) {
        uint32_t code = 0;
        const size_t size = cox_text_character(from, &code);
        if (size == 0)
            to += sprintf(to, "\\x%02x", (unsigned char)*from);
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
