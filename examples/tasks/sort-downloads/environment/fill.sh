#!/bin/sh
# Makes the folder of downloads. The same on every machine.
set -eu
mkdir -p "$1"
cd "$1"
put() { printf '%s\n' "$2" >"$1"; }
put '2021-03-14 minutes.txt' 'Present: all. Agenda: the pump, the roof, the accounts.'
put '2021-03-14 minutes (1).txt' 'Present: all. Agenda: the pump, the roof, the accounts.'
put '2021-07-01 readings.csv' 'day,level
1,204
2,198'
put '2021-11-30 readme.MD' '# Pump 3'
put '2022-01-09 roof.png' 'not really a picture of the roof'
put '2022-01-09 roof copy.PNG' 'not really a picture of the roof'
put '2022-02-20 roof.jpg' 'the roof after the repair'
put '2022-06-15 accounts.tsv' 'year	sum
2021	1204.50'
put '2022-06-15 accounts.csv' 'year,sum
2021,1204.50'
put '2022-08-08 archive.tar.gz' 'pretend this is an archive'
put '2023-05-02 notes.txt' 'Ask about the valve.'
put '2023-05-02 notes.md' 'Ask about the valve.'
put '2023-05-03 LICENSE' 'Do what you like.'
put '2023-09-19 -draft.txt' 'A name that starts oddly after its date.'
put "2023-12-24 cook's list.txt" 'flour, butter, a goose'
: >'2024-01-01 empty.log'
: >'2024-01-02 empty too.log'
