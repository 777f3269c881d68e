"""A trainer as a process of its own, to be killed: leases results, acknowledges them, and journals both.

    consumer.py URL JOURNAL UNIT

A line is written before an acknowledgement is sent (`ack`) and after it was answered (`acked`). A consumer that starts
again reads its journal, and repeats acknowledgements that were not answered. `again` names a result that was delivered
after its acknowledgement had been answered.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request


def call(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as response:
        return json.load(response)


def read_journal(path):
    """The entries of a journal; a line that a kill cut off is left out."""
    if not os.path.exists(path):
        return []
    with open(path) as file:
        lines = file.read().split("\n")
    entries = []
    for line in lines:
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue
    return entries


def main(url, journal, unit):
    entries = read_journal(journal)
    acked = {name for one in entries if one["what"] == "acked" for name in one["ids"]}
    owed = {name for one in entries if one["what"] == "ack" for name in one["ids"]} - acked
    with open(journal, "a") as file:

        def write(what, ids, **more):
            file.write(json.dumps({"what": what, "ids": sorted(ids), **more}) + "\n")
            file.flush()

        file.write("\n")  # ends a line that a kill cut off
        while True:
            try:
                if owed:
                    answer = call(url + "/v1/results/ack", {"consumer": unit, "result_ids": sorted(owed)})
                    if answer["unknown"]:
                        write("unknown", answer["unknown"])
                    write("acked", owed)
                    acked |= owed
                    owed = set()
                found = call(url + "/v1/results", {"consumer": unit, "unit": unit, "wait": 1, "max": 20, "lease": 3})
            except (OSError, ValueError, urllib.error.HTTPError):
                time.sleep(0.2)
                continue
            for result in found["results"]:
                if result["result_id"] in acked:
                    write("again", [result["result_id"]])
            owed = {one["result_id"] for one in found["results"]}
            if owed:
                write("ack", owed, results=[_short(one) for one in found["results"]])


def _short(result):
    keys = ("session_id", "task_id", "sample", "attempt", "state", "failure", "usable", "reward", "end_reason")
    sessions = [{name: one.get(name) for name in keys} for one in result["sessions"]]
    return {"result_id": result["result_id"], "task_id": result["task_id"], "sessions": sessions}


if __name__ == "__main__":
    main(*sys.argv[1:])
