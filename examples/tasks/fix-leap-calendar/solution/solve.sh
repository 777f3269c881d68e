#!/bin/sh
set -eu
cd /app/recur
python3 - <<'PYTHON'
from pathlib import Path

path = Path("recur/rules.py")
text = path.read_text()
before, rest = text.split("def monthly(", 1)
helpers = rest[rest.index("def _fitting(") :]
path.write_text(
    before
    + '''def monthly(start: date, count: int) -> list[date]:
    """`count` dates, one in each month."""
    if count < 0:
        raise ValueError("count must not be negative")
    months = (start.month - 1 + passed for passed in range(count))
    return [_fitting(start.year + month // 12, month % 12 + 1, start.day) for month in months]


def yearly(start: date, count: int) -> list[date]:
    """`count` dates, one in each year."""
    if count < 0:
        raise ValueError("count must not be negative")
    return [_fitting(start.year + passed, start.month, start.day) for passed in range(count)]


'''
    + helpers
)
PYTHON
python3 -m unittest
