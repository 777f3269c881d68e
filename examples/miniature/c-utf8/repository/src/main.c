/* Reads standard input and says whether it is UTF-8, and how many characters it has. */
#include "utf8.h"

#include <stdio.h>

int main(void)
{
    static unsigned char text[1 << 20];
    size_t length = fread(text, 1, sizeof text, stdin);

    if (!utf8_valid(text, length)) {
        puts("invalid");
        return 1;
    }
    printf("%zu characters in %zu bytes\n", utf8_length(text, length), length);
    return 0;
}
