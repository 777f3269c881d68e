#!/bin/sh
# same.sh FILE: 1 if the file is a regular one with exactly the expected lines, else 0.
reward=0
if [ -L "$1" ] || [ ! -f "$1" ]; then
  echo "there is no $1"
elif tr -d '\r' <"$1" | diff /tests/expected.tsv -; then
  reward=1
fi
echo "$reward" >/logs/verifier/reward.txt
