#include "../src/utf8.h"
#include "tap.h"

#include <string.h>

#define VALID(text) utf8_valid((const unsigned char *)(text), sizeof(text) - 1)
#define LENGTH(text) utf8_length((const unsigned char *)(text), sizeof(text) - 1)
#define CUT(text, most) utf8_cut((const unsigned char *)(text), sizeof(text) - 1, most)

static void basics(void)
{
    ok(VALID(""), "an empty text is valid");
    ok(VALID("plain"), "ASCII is valid");
    ok(VALID("\xC3\xA4\xE2\x82\xAC\xF0\x9F\x98\x80"), "two, three and four bytes are valid");
    ok(!VALID("\x80"), "a continuation cannot come first");
    ok(!VALID("\xC3(") && !VALID("\xE2\x82("), "a continuation cannot be missing");
    ok(!VALID("\xFF"), "a byte of ones is nothing");
    ok(LENGTH("plain") == 5, "characters of ASCII");
    ok(CUT("plain", 3) == 3 && CUT("plain", 9) == 5, "ASCII is cut anywhere");
}

int main(void)
{
    basics();
    return tap_end();
}
