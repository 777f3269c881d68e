#!/bin/sh
# 1 if the package does what the issue asks and what it did before, else 0. Read whole before the tests delete themselves.
main() {
  if ! command -v python3 >/dev/null; then
    echo "this task needs python3 in its root" # and gives no score without it
    exit 1
  fi
  sleep 0.1
  reward=0
  python3 -I -B /tests/check.py && reward=1
  stop_the_rest
  rm -rf /logs/verifier/reward.json /logs/verifier/reward.txt
  echo "$reward" >/logs/verifier/reward.txt
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
main
