/* UTF-8, as RFC 3629 has it. */
#ifndef UTF8_H
#define UTF8_H

#include <stddef.h>

/* How many bytes the character at `text` has, by its first byte; 0 for a byte that cannot be the first one. */
size_t utf8_size(unsigned char first);

/* Whether the bytes are valid UTF-8. */
int utf8_valid(const unsigned char *text, size_t length);

/* The number of characters of a valid text. */
size_t utf8_length(const unsigned char *text, size_t length);

/* The length of the longest prefix of a valid text with at most `most` bytes that cuts no character apart. */
size_t utf8_cut(const unsigned char *text, size_t length, size_t most);

#endif
