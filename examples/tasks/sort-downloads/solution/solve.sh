#!/bin/sh
set -eu
cd /app/downloads
export LC_ALL=C
seen=$(mktemp)
for file in *; do
  sum=$(sha256sum <"$file")
  if grep -qxF "$sum" "$seen"; then
    rm "$file"
    continue
  fi
  printf '%s\n' "$sum" >>"$seen"
  case $(printf %s "$file" | tr 'A-Z' 'a-z') in
    *.txt | *.md) kind=text ;;
    *.csv | *.tsv) kind=tables ;;
    *.png | *.jpg) kind=images ;;
    *) kind=other ;;
  esac
  year=$(printf %s "$file" | cut -c1-4)
  mkdir -p "/app/sorted/$kind/$year"
  mv "$file" "/app/sorted/$kind/$year/"
done
rm "$seen"
cd /app/sorted
index=$(find . -type f | cut -c3- | sort)
printf '%s\n' "$index" >index.txt
