#!/bin/sh
. ./tests/tap.sh
here=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# A fresh folder with files NAME=CONTENT, then a rotation; prints what is there.
rotated() {
  rm -rf "$work/d" && mkdir "$work/d" && cd "$work/d" || exit 1
  while [ "$1" != -- ]; do
    printf '%s' "${1#*=}" >"./${1%%=*}"
    shift
  done
  shift
  sh "$here/rotate.sh" "$@" 2>&1
  echo "status $?"
  sh "$here/report.sh" .
}

check "a file is rotated" "status 0
a: 
a.1: one" rotated a=one -- a
check "an old file moves on" "status 0
a: 
a.1: two
a.2: one" rotated a=two a.1=one -- a
check "two files" "status 0
a: 
a.1: one
b: 
b.1: two" rotated a=one b=two -- a b
check "nothing to do is a mistake" "usage: rotate.sh [-k KEEP] FILE...
status 2" rotated --
check "a number is kept" "usage: rotate.sh [-k KEEP] FILE...
status 2
a: one" rotated a=one -- -k x a
check "a missing file is told" "rotate.sh: b: no such file
status 1" rotated -- b
finish
