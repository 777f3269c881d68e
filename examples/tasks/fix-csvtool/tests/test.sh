#!/bin/sh
# 1 if both bugs are gone and the rest still works, else 0.
#
# The tool is run here, and it is not trusted: what it could read the answers from is deleted first (this text is in memory
# by then), and what it left running and may have written in place of a score goes last.
main() {
  sleep 0.1
  failed=0
  cp /app/csvtool/csvtool /tmp/csvtool 2>/dev/null && [ ! -L /app/csvtool/csvtool ] && chmod +x /tmp/csvtool || failed=1
  rm -rf /tests
  cd /tmp || exit 1
  data='id,"who, really",note,amount
1,"Lovelace, Ada","said ""go"", then went",10.25
2,Hopper,"",4
3,"O""Brien, M",plain,x

4,"Noether, E",",,,",-1.5
'
  expect "a comma inside quotes" 'Lovelace, Ada
Hopper
O"Brien, M
Noether, E' column 'who, really'
  expect "a doubled quote" 'said "go", then went

plain
,,,' column note
  expect "the sum of a shifted column" 12.75 sum amount
  expect "the sum of a column of text" 0.00 sum note
  expect "names in quotes" 'id
who, really
note
amount' head
  expect "rows" 4 rows
  data='a,b
"x, y",2
z,3
'
  data=$(printf '%s' "$data" | sed 's/$/\r/')
  expect "carriage returns" 'x, y
z' column a
  expect "carriage returns, sum" 5.00 sum b
  data='a,b
1,2
'
  for word in column sum; do
    printf '%s' "$data" | run "$word" nothing - >/tmp/out 2>/tmp/err
    code=$?
    [ $code -eq 2 ] && [ ! -s /tmp/out ] && [ "$(cat /tmp/err)" = "csvtool: no column nothing" ] || {
      echo "FAIL $word of no column: code $code, $(cat /tmp/out /tmp/err)"
      failed=1
    }
  done
  run sum a /nowhere/at/all >/dev/null 2>&1
  [ $? -eq 1 ] || { echo "FAIL a file that is not there"; failed=1; }
  stop_the_rest
  rm -rf /logs/verifier/reward.json /logs/verifier/reward.txt
  if [ $failed -eq 0 ]; then echo 1 >/logs/verifier/reward.txt; else echo 0 >/logs/verifier/reward.txt; fi
}
# Ends whatever was started since this script, so that nothing but this script writes the score.
stop_the_rest() {
  mine=$(started $$)
  for round in 1 2 3; do
    for folder in /proc/[0-9]*; do
      pid=${folder#/proc/}
      then=$(started "$pid")
      if [ "$pid" != $$ ] && [ "${then:-0}" -gt "$mine" ]; then kill -9 "$pid" 2>/dev/null; fi
    done
  done
}
started() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; } # in ticks since the machine's start
run() { timeout 10 /tmp/csvtool "$@"; }
expect() { # what it is, what is wanted, and the arguments before the file
  what=$1 wanted=$2
  shift 2
  got=$(printf '%s\n' "$data" | run "$@" - 2>&1)
  if [ "$got" = "$wanted" ]; then echo "ok   $what"; else echo "FAIL $what: wanted '$wanted', got '$got'"; failed=1; fi
}
main
