#!/bin/sh
# Counts by position, last direction and how long it has gone that way.
awk 'BEGIN {
  n = 12; most = 3
  ways[0, 0, "none", 0] = 1
  for (s = 0; s < 2 * n; s++)
    for (x = 0; x <= n; x++) {
      y = s - x
      if (y < 0 || y > n) continue
      split("right up none", names, " ")
      for (d = 1; d <= 3; d++)
        for (k = 0; k <= most; k++) {
          w = ways[x, y, names[d], k]
          if (!w) continue
          for (m = 1; m <= 2; m++) {
            nx = x + (m == 1); ny = y + (m == 2)
            nk = (names[m] == names[d]) ? k + 1 : 1
            if (nx > n || ny > n || ny > nx + 2 || nk > most || (nx == 6 && ny == 6)) continue
            ways[nx, ny, names[m], nk] += w
          }
        }
    }
  for (m = 1; m <= 2; m++) for (k = 1; k <= most; k++) total += ways[n, n, names[m], k]
  printf "%d\n", total
}' >/app/answer.txt
