/* A ring buffer of bytes with a fixed capacity. */
#ifndef RING_H
#define RING_H

#include <stddef.h>

struct ring {
    unsigned char *data;
    size_t capacity;
    size_t head; /* where the oldest byte is */
    size_t used; /* how many bytes it holds */
};

/* 0, or -1 if there is no memory or the capacity is 0. */
int ring_init(struct ring *ring, size_t capacity);
void ring_free(struct ring *ring);

/* Both return how many bytes were copied, which may be fewer than asked for. */
size_t ring_write(struct ring *ring, const void *from, size_t length);
size_t ring_read(struct ring *ring, void *to, size_t length);

size_t ring_space(const struct ring *ring);

/* The byte at this distance from the oldest one, or -1. */
int ring_peek(const struct ring *ring, size_t offset);

#endif
