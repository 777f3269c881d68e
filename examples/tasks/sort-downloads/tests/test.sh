#!/bin/sh
# 1 if the folder is in order, else 0. Only regular files count: a link is not a file that was kept.
export LC_ALL=C
reward=0
check() {
  [ -d /app/downloads ] && [ ! -L /app/downloads ] || { echo "/app/downloads is gone"; return 1; }
  [ -z "$(ls -A /app/downloads)" ] || { echo "/app/downloads is not empty"; return 1; }
  [ -d /app/sorted ] && [ ! -L /app/sorted ] || { echo "there is no /app/sorted"; return 1; }
  cd /app/sorted || return 1
  [ -z "$(find . ! -type f ! -type d)" ] || { echo "something is neither a file nor a folder"; return 1; }
  find . -type f ! -path ./index.txt | cut -c3- | sort | while IFS= read -r file; do
    printf '%s %s\n' "$file" "$(sha256sum <"$file" | cut -d" " -f1)"
  done >/tmp/found.txt
  diff /tests/expected.txt /tmp/found.txt || { echo "the files are not the expected ones"; return 1; }
  sed "s/ [0-9a-f]*$//" /tests/expected.txt | diff - index.txt || { echo "index.txt is wrong"; return 1; }
}
check && reward=1
echo "$reward" >/logs/verifier/reward.txt
