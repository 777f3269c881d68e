#!/bin/sh
# Scores each of the three questions; the reward is 1 only if all are answered.
report=/app/report.txt
if [ -L "$report" ] || [ ! -f "$report" ]; then
  echo "there is no $report"
  report=/dev/null
fi
awk -F= '
  function near(text, wanted) { return text ~ /^-?[0-9]+\.[0-9][0-9]$/ && text - wanted < 0.011 && wanted - text < 0.011 }
  { sub(/\r$/, "", $2); found[$1] = $2; lines++ }
  END {
    region = found["region"] == "west" && near(found["region_sum"], 4036.57)
    customer = found["customer"] == "cedar-04"
    year = near(found["year_sum"], 60435.53)
    reward = region && customer && year && lines == 4
    printf "{\"reward\": %d, \"region\": %d, \"customer\": %d, \"year\": %d}\n", reward, region, customer, year
  }' "$report" >/logs/verifier/reward.json
cat /logs/verifier/reward.json
