#!/bin/sh
sh /tests/same.sh /app/stock.tsv
