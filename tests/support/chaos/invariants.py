"""What must hold after a storm, counted and printed."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import select

from support.chaos import processes
from support.chaos.echo_engine import MARK
from towline.cluster.segments import Segments, SegmentSlice
from towline.schema import Trajectory
from towline.server.store import tables
from towline.server.store.database import Store, database_url

SAMPLES = 4
_TASK = re.compile(r"task (\d+) begin")


@dataclass
class Report:
    """Violations by invariant, and figures that show that the storm was one."""

    violations: dict[str, list[str]] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    def check(self, invariant: str, found: Collection[Any]) -> None:
        self.violations[invariant] = [str(one) for one in found]

    def lines(self) -> list[str]:
        counted = [f"  {len(found):>6} {name}" for name, found in self.violations.items()]
        return [*counted, *(f"  {name}: {value}" for name, value in self.figures.items())]

    @property
    def broken(self) -> dict[str, list[str]]:
        return {name: found[:5] for name, found in self.violations.items() if found}


async def check_store(
    report: Report,
    data: Path,
    database: str,
    *,
    tasks: int,
    sessions: Sequence[dict[str, Any]],
    groups: Sequence[dict[str, Any]],
    decode: Callable[[Sequence[int]], str],
) -> None:
    """Compare the store with what the consumers journaled (`sessions`, `groups`), and read every trajectory."""
    store = Store(database_url(database, data))
    await store.open(serving=False)
    async with store.read() as tx:
        task_rows = {row.task_id: row for row in await tx.execute(select(tables.tasks))}
        rows = {row.session_id: row for row in await tx.execute(select(tables.sessions))}
        results = list(await tx.execute(select(tables.results)))
    await store.close()

    acked = {unit: _ids(journal, "acked") for unit, journal in (("session", sessions), ("group", groups))}
    got = {one["result_id"]: one for entry in sessions for one in entry.get("results", [])}
    stored = {row.session_id: row for row in results if row.unit == "session"}
    report.check("tasks lost", {f"task/{number}" for number in range(tasks)} - task_rows.keys())
    report.check("tasks not done", [one.task_id for one in task_rows.values() if one.state != "done"])
    report.check("sessions that never ended", [one.session_id for one in rows.values() if one.phase != 2])
    per_sample = Counter((rows[one].task_id, rows[one].sample) for one in stored)
    report.check("samples without one result", [one for one in _samples(tasks) if per_sample[one] != 1])
    report.check(
        "samples without a usable session", [_told(rows[row.session_id]) for row in stored.values() if not row.usable]
    )
    delivered = {one["sessions"][0]["session_id"] for name, one in got.items() if name in acked["session"]}
    report.check("acknowledged results lost", delivered - stored.keys())
    report.check("results never delivered", stored.keys() - delivered)
    unknown = [*_ids(sessions, "unknown"), *_ids(groups, "unknown")]
    report.check("acknowledgements that the server did not know", unknown)
    report.check(
        "results delivered again after their acknowledgement", [*_ids(sessions, "again"), *_ids(groups, "again")]
    )
    report.check("groups not delivered once", _uneven(len(acked["group"]), tasks))
    scored = [one["sessions"][0] for one in got.values()]
    report.check("sessions scored on an engine failure", [one for one in scored if one["reward"]])
    await _check_trajectories(report, data / "segments", rows, decode)
    named = {row.segment for row in rows.values() if row.segment}
    there = {str(path.relative_to(data / "segments")) for path in (data / "segments").rglob("*.arrow")}
    report.check("orphaned segments", there - named)
    report.check("missing segments", named - there)
    report.figures["attempts"] = len(rows)
    report.figures["attempts by end"] = dict(
        Counter(f"{row.state}/{row.failure or row.end_reason}" for row in rows.values())
    )


async def _check_trajectories(
    report: Report, folder: Path, rows: dict[str, Any], decode: Callable[[Sequence[int]], str]
) -> None:
    segments = Segments(folder)
    foreign: list[str] = []
    unreadable: list[str] = []
    owners: dict[str, str] = {}
    turns = tokens = 0
    for row in rows.values():
        if row.segment is None:
            continue
        try:
            table = await segments.read(SegmentSlice.at(row.segment, row.place, row.sha256))
            trajectory = Trajectory.from_arrow(table)
        except Exception as error:
            unreadable.append(f"{row.session_id}: {error}")
            continue
        if (trajectory.session_id, trajectory.group_id) != (row.session_id, row.task_id):
            foreign.append(f"{row.session_id} names the trajectory of {trajectory.session_id}")
        texts = [
            decode(np.concatenate([trajectory.prompt(turn.id), turn.sampled]).tolist()) for turn in trajectory.turns
        ]
        texts += [decode(trace.token_ids.tolist()) for trace in trajectory.traces]
        turns += len(trajectory.turns)
        tokens += sum(len(turn.sampled) for turn in trajectory.turns)
        marks = {mark for text in texts for mark in MARK.findall(text)}
        numbers = {int(number) for text in texts for number in _TASK.findall(text)}
        if len(marks) > 1 or (texts and numbers != {int(row.task_id.rpartition("/")[2])}):
            foreign.append(f"{row.session_id}: marks {marks}, tasks {numbers}")
        for turn in trajectory.turns:
            answer = decode(turn.sampled.tolist())
            if turn.finish != "abort" and not MARK.search(answer):
                foreign.append(f"turn {turn.id} ({turn.finish}) has no mark in its answer {answer!r}")
        others = {mark: owners.setdefault(mark, row.session_id) for mark in marks}
        foreign += [f"{mark} of {one} is in {row.session_id}" for mark, one in others.items() if one != row.session_id]
    report.check("tokens attributed to another session", foreign)
    report.check("unreadable trajectories", unreadable)
    report.figures["trajectories read"] = len(owners)
    report.figures["turns, sampled tokens"] = f"{turns}, {tokens}"


@dataclass
class Leftovers:
    """What a server could leave on the machine. `watch` is called now and then while it runs."""

    data: Path
    before: set[int] = field(default_factory=set)
    """Processes below this one that are not of the server."""
    disk: str = ""
    """Where the test itself mounted a file system."""
    groups: set[str] = field(default_factory=set)

    def watch(self) -> None:
        for listed in self.data.glob("**/sandboxes/*/keeper-*/groups.json"):
            try:
                self.groups |= set(json.loads(listed.read_text()))
            except (OSError, ValueError):
                continue

    def check(self, report: Report, allowed: Collection[int], mount_tables: Sequence[Path]) -> None:
        """`allowed`: processes that may live on."""
        left = set(processes.descendants(os.getpid())) - self.before - set(allowed)
        report.check("leaked processes", [f"{pid} {processes.command_line(pid)[:200]}" for pid in sorted(left)])
        mounts = [line.split()[4] for table in mount_tables for line in table.read_text().splitlines()]
        report.check("leaked mounts", [one for one in mounts if one.startswith(f"{self.data}/") and one != self.disk])
        report.check("leaked control groups", [one for one in sorted(self.groups) if Path(one).exists()])
        report.check("leaked sandbox folders", list(self.data.glob("**/sandboxes/*/keeper-*")))
        report.figures["control groups seen"] = len(self.groups)


def _samples(tasks: int) -> list[tuple[str, int]]:
    return [(f"task/{number}", sample) for number in range(tasks) for sample in range(SAMPLES)]


def _ids(journal: Sequence[dict[str, Any]], what: str) -> set[str]:
    return {name for entry in journal if entry["what"] == what for name in entry["ids"]}


def _uneven(count: int, wanted: int) -> list[str]:
    return [] if count == wanted else [f"{count} groups of {wanted} tasks"]


def _told(row: Any) -> str:
    return f"{row.session_id} attempt {row.attempt}: {row.state} {row.failure} {row.error}"
