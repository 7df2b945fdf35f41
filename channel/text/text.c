#include "text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

size_t cox_text_character(const char *text, uint32_t *ret_code)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    const unsigned char *at = (const unsigned char *)text;
    const size_t size = at[0] < 0x80   ? 1
                        : at[0] < 0xc2 ? 0
                        : at[0] < 0xe0 ? 2
                        : at[0] < 0xf0 ? 3
                        : at[0] < 0xf5 ? 4
                                       : 0;
    uint32_t code = size < 2 ? at[0] : at[0] & (0x7fu >> size);
    for (size_t i = 1; i < size; i++) {
        if ((at[i] & 0xc0) != 0x80)
            return 0;
        code = code << 6 | (at[i] & 0x3fu);
    }
    const bool surrogate = code >= 0xd800 && code < 0xe000;
    *ret_code = code;
    return size > 1 && (code < least[size] || surrogate || code > 0x10ffff) ? 0 : size;
}

bool cox_text_is_control(uint32_t code)
{
    return code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0x2028 || code == 0x2029 ||
           (code >= 0x202a && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
}

const char *cox_text_find_control(const char *text)
{
    while (*text) {
        uint32_t code;
        const size_t size = cox_text_character(text, &code);
        if (size == 0 || cox_text_is_control(code))
            return text;
        text += size;
    }
    return NULL;
}

char *cox_text_escape(const char *text, bool tabs, bool quotes)
{
    char *escaped = malloc(6 * strlen(text) + 1), *to = escaped;
    while (escaped && *text) {
        uint32_t code;
        const size_t size = cox_text_character(text, &code);
        if (size == 0)
            to += sprintf(to, "\xef\xbf\xbd");
        else if (quotes && (code == '"' || code == '\\'))
            to += sprintf(to, "\\%c", (char)code);
        else if (code == '\n' || code == '\r' || (code == '\t' && !tabs))
            to += sprintf(to, "\\%c", code == '\n' ? 'n' : code == '\r' ? 'r' : 't');
        else if (cox_text_is_control(code) && code != '\t')
            to += sprintf(to, "\\u%04x", (unsigned)code);
        else
            to = (char *)memcpy(to, text, size) + size;
        text += size ? size : 1;
    }
    if (escaped)
        *to = '\0';
    return escaped;
}
