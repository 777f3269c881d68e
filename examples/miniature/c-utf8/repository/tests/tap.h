/* The Test Anything Protocol, in a few lines. */
#ifndef TAP_H
#define TAP_H

#include <stdio.h>

static int tap_count, tap_failed;

#define ok(condition, name) \
    do { \
        int tap_good = (condition); \
        printf("%sok %d - %s\n", tap_good ? "" : "not ", ++tap_count, name); \
        fflush(stdout); \
        tap_failed += !tap_good; \
    } while (0)

static int tap_end(void)
{
    printf("1..%d\n", tap_count);
    return tap_failed != 0;
}

#endif
