#!/bin/sh
set -eu
awk -F, '
  NR == 1 || seen[$1]++ { next }
  {
    value = $7 * ($6 == "USD" ? 0.92 : 1) * ($5 == "refund" ? -1 : 1)
    year += value
    month = substr($2, 6, 2) + 0
    if (month >= 4 && month <= 6) quarter[$3] += value
    if ($5 == "refund") refunds[$4]++
  }
  END {
    for (name in quarter) if (region == "" || quarter[name] > quarter[region]) region = name
    for (name in refunds) if (customer == "" || refunds[name] > refunds[customer]) customer = name
    printf "region=%s\nregion_sum=%.2f\ncustomer=%s\nyear_sum=%.2f\n", region, quarter[region], customer, year
  }' /app/orders.csv >/app/report.txt
