"""Checks the package from outside of its process: 1 if every case is right.

The package is not trusted: it runs in processes of its own that are given a case and print dates. By the time the first one
starts, nothing of the tests is left on disk.
"""

import json
import shutil
import subprocess
import sys

CHILD = """
import json, sys
from datetime import date
sys.path.insert(0, "/app/recur")
import recur
name, start, count = json.loads(sys.stdin.read())
try:
    print(json.dumps([day.isoformat() for day in getattr(recur, name)(date.fromisoformat(start), count)]))
except ValueError:
    print(json.dumps("ValueError"))
"""
CASES = [
    ("monthly", "2024-01-31", 4, ["2024-01-31", "2024-02-29", "2024-03-31", "2024-04-30"]),
    ("monthly", "2022-12-30", 4, ["2022-12-30", "2023-01-30", "2023-02-28", "2023-03-30"]),
    ("monthly", "2023-11-05", 3, ["2023-11-05", "2023-12-05", "2024-01-05"]),
    ("monthly", "2023-08-31", 14, None),
    ("monthly", "2024-05-01", 0, []),
    ("monthly", "2024-05-01", 1, ["2024-05-01"]),
    ("monthly", "2024-05-01", -1, "ValueError"),
    ("yearly", "2024-02-29", 5, ["2024-02-29", "2025-02-28", "2026-02-28", "2027-02-28", "2028-02-29"]),
    ("yearly", "2023-06-15", 2, ["2023-06-15", "2024-06-15"]),
    ("yearly", "2023-06-15", 0, []),
    ("yearly", "2023-06-15", -3, "ValueError"),
    ("weekly", "2024-02-26", 2, ["2024-02-26", "2024-03-04"]),
    ("weekly", "2024-02-26", -1, "ValueError"),
]
LONG = [
    *("2023-08-31", "2023-09-30", "2023-10-31", "2023-11-30", "2023-12-31", "2024-01-31", "2024-02-29"),
    *("2024-03-31", "2024-04-30", "2024-05-31", "2024-06-30", "2024-07-31", "2024-08-31", "2024-09-30"),
]


def right(name, start, count, wanted):
    done = subprocess.run(
        [sys.executable, "-I", "-B", "-c", CHILD],
        input=json.dumps([name, start, count]),
        capture_output=True,
        text=True,
        timeout=20,
    )
    if done.stdout.strip() == json.dumps(LONG if wanted is None else wanted):
        return True
    print(f"{name}({start}, {count}) gave {done.stdout.strip()[:300]} {done.stderr.strip()[-300:]}")
    return False


shutil.rmtree("/tests", ignore_errors=True)
try:
    passed = all([right(*case) for case in CASES])
except subprocess.TimeoutExpired:
    passed = False
sys.exit(0 if passed else 1)
