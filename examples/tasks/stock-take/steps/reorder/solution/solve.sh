#!/bin/sh
set -eu
awk '
  FILENAME ~ /stock/ { split($0, part, "\t"); stock[part[1]] = part[3]; next }
  NF == 3 {
    missing = $2 - stock[$1]
    if (missing > 0) printf "%s\t%d\n", $1, int((missing + $3 - 1) / $3)
  }
' /app/stock.tsv /app/rules.txt | LC_ALL=C sort >/app/orders.tsv
