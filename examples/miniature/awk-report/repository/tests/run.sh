#!/bin/sh
. ./tests/tap.sh
file=$(mktemp)
trap 'rm -f "$file"' EXIT

# A report of the lines, with options behind `--`; blanks are squeezed, and whole numbers may have decimals.
report() {
  : >"$file"
  while [ $# -gt 0 ] && [ "$1" != -- ]; do
    printf '%s\n' "$1" >>"$file"
    shift
  done
  [ $# -eq 0 ] || shift
  sh ./report.sh "$@" "$file" | sed 's/  */ /g; s/\.00$//'
}

check "one sale" "ann 5
total 5" report ann,north,5
check "sales of one name are added" "ann 7
total 7" report ann,north,5 ann,south,2
check "a heading is no sale" "ann 5
total 5" report name,region,amount ann,north,5
check "the largest is first" "bob 8
ann 5
total 13" report ann,north,5 bob,south,8
check "a region" "ann 5
total 5" report ann,north,5 bob,south,8 -- -r north
check "empty lines are nothing" "ann 5
total 5" report "" ann,north,5 ""
finish
