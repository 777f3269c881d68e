#!/bin/sh
# Runs the tool on small inputs and compares.
cd "$(dirname "$0")/.." || exit 1
failed=0
expect() { # what it is, what is wanted, what came out
  if [ "$2" = "$3" ]; then echo "ok   $1"; else echo "FAIL $1: wanted '$2', got '$3'"; failed=1; fi
}
data='name,city,paid
Ada,London,12.5
Grace,"New York",7
'
expect head "$(printf 'name\ncity\npaid')" "$(printf '%s' "$data" | ./csvtool head -)"
expect column "$(printf 'London\nNew York')" "$(printf '%s' "$data" | ./csvtool column city -)"
expect sum 19.50 "$(printf '%s' "$data" | ./csvtool sum paid -)"
expect rows 2 "$(printf '%s' "$data" | ./csvtool rows -)"
printf '%s' "$data" | ./csvtool column nothing - 2>/dev/null
expect "exit code" 2 $?
exit $failed
