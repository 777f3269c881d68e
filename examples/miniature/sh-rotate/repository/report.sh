#!/bin/sh
# List the rotated files of a folder with their first lines, oldest last.
cd "${1:-.}" || exit 1
for file in *; do
  [ -f "$file" ] || continue
  printf '%s: %s\n' "$file" "$(head -n 1 -- "$file")"
done
