#!/bin/sh
# Rotate log files: FILE becomes FILE.1, FILE.1 becomes FILE.2, up to the number of files that are kept.

usage() {
  echo "usage: rotate.sh [-k KEEP] FILE..." >&2
  exit 2
}

keep=3
while getopts k: option; do
  case $option in
    k) keep=$OPTARG ;;
    *) usage ;;
  esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] || usage
case $keep in
  '' | *[!0-9]* | 0) usage ;;
esac

rotate() {
  number=1
  while [ $number -le $keep ]; do
    if [ -f $1.$number ]; then
      mv $1.$number $1.$((number + 1))
    fi
    number=$((number + 1))
  done
  mv $1 $1.1
  : >$1
}

for file in $*; do
  if [ ! -f $file ]; then
    echo "rotate.sh: $file: no such file" >&2
    exit 1
  fi
  rotate $file
done
