#!/bin/sh
# 1 if the file holds the right number and nothing else, else 0.
answer=/app/answer.txt
reward=0
if [ -L "$answer" ] || [ ! -f "$answer" ]; then
  echo "there is no $answer"
elif [ "$(tr -d ' \t\r\n' <"$answer" | head -c 100)" = 226637 ]; then
  reward=1
else
  echo "wrong: $(head -c 200 "$answer")"
fi
echo "$reward" >/logs/verifier/reward.txt
