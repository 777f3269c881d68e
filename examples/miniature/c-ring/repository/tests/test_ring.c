#include "../src/ring.h"
#include "tap.h"

#include <string.h>

static void basics(void)
{
    struct ring ring;
    char out[16] = {0};

    ok(ring_init(&ring, 0) == -1, "a ring needs room");
    ok(ring_init(&ring, 8) == 0, "a ring is made");
    ok(ring_write(&ring, "abc", 3) == 3, "three bytes are written");
    ok(ring.used == 3, "three bytes are held");
    ok(ring_read(&ring, out, 2) == 2 && !memcmp(out, "ab", 2), "the oldest bytes are read first");
    ok(ring_read(&ring, out, 9) == 1 && out[0] == 'c', "no more is read than there is");
    ok(ring_read(&ring, out, 1) == 0, "an empty ring gives nothing");
    ring_free(&ring);
}

int main(void)
{
    basics();
    return tap_end();
}
