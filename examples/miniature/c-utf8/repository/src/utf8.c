#include "utf8.h"

size_t utf8_size(unsigned char first)
{
    if (first < 0x80)
        return 1;
    if (first < 0xC0)
        return 0;
    if (first < 0xE0)
        return 2;
    if (first < 0xF0)
        return 3;
    return first < 0xF8 ? 4 : 0;
}

static int is_continuation(unsigned char byte)
{
    return (byte & 0xC0) == 0x80;
}

int utf8_valid(const unsigned char *text, size_t length)
{
    size_t at = 0;

    while (at < length) {
        size_t size = utf8_size(text[at]);
        if (size == 0)
            return 0;
        for (size_t i = 1; i < size && at + i < length; i++)
            if (!is_continuation(text[at + i]))
                return 0;
        at += size;
    }
    return 1;
}

size_t utf8_length(const unsigned char *text, size_t length)
{
    size_t count = 0;

    for (size_t at = 0; at < length; at++)
        count += text[at] != 0;
    return count;
}

size_t utf8_cut(const unsigned char *text, size_t length, size_t most)
{
    (void)text;
    return length < most ? length : most;
}
