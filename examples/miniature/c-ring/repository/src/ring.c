#include "ring.h"

#include <stdlib.h>
#include <string.h>

int ring_init(struct ring *ring, size_t capacity)
{
    if (capacity == 0)
        return -1;
    /* Some room behind the end, so that a read too far does no harm. */
    ring->data = calloc(2, capacity + 64);
    ring->capacity = capacity;
    ring->head = ring->used = 0;
    return ring->data ? 0 : -1;
}

void ring_free(struct ring *ring)
{
    free(ring->data);
    ring->data = NULL;
}

size_t ring_space(const struct ring *ring)
{
    return ring->capacity - ring->used - 1;
}

size_t ring_write(struct ring *ring, const void *from, size_t length)
{
    size_t tail = (ring->head + ring->used) % ring->capacity;

    if (length > ring_space(ring))
        length = ring_space(ring);
    memcpy(ring->data + tail, from, length);
    ring->used += length;
    return length;
}

size_t ring_read(struct ring *ring, void *to, size_t length)
{
    if (length > ring->used)
        length = ring->used;
    memcpy(to, ring->data + ring->head, length);
    ring->head = (ring->head + length) % ring->capacity;
    ring->used -= length;
    return length;
}

int ring_peek(const struct ring *ring, size_t offset)
{
    if (offset > ring->used)
        return -1;
    return ring->data[ring->head + offset];
}
