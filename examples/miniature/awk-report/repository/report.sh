#!/bin/sh
# Add up a CSV file of name,region,amount by name; the largest amount first.
region=
while getopts r: option; do
  case $option in
    r) region=$OPTARG ;;
    *) exit 2 ;;
  esac
done
shift $((OPTIND - 1))
[ $# -eq 1 ] || { echo "usage: report.sh [-r REGION] FILE" >&2; exit 2; }
here=$(dirname "$0")
awk -f "$here/report.awk" -v region="$region" "$1" | sort -r | awk -f "$here/total.awk"
