#!/bin/sh
set -eu
awk -F';' '
  /^[ \t]*#/ || /^[ \t]*$/ { next }
  {
    for (i = 1; i <= 3; i++) gsub(/^[ \t]+|[ \t]+$/, "", $i)
    code = toupper($1)
    if (!(code in name)) name[code] = $2
    quantity[code] += $3 + 0
  }
  END { for (code in name) printf "%s\t%s\t%d\n", code, name[code], quantity[code] }
' /app/counted.txt | LC_ALL=C sort >/app/stock.tsv
