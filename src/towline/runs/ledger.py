"""The progress of a run on disk: one line per sample that has ended.

Invariant: a sample is in the ledger if, and only if, its trajectory is on disk; the line is written, and fsynced, after the
trajectory. A run that was killed resumes with the samples that have no line, and no others. A last line that a crash cut
in two is dropped. One process at a time holds a ledger.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from pydantic import Field, ValidationError

from towline.common.files import QUARANTINE, Quarantine, lock_file, write_atomically
from towline.errors import TowlineError
from towline.schema import FailureTally, SessionState, SessionSummary, Task, Trajectory
from towline.schema.entities import digest_values

_SCHEDULING = {"num_samples", "min_samples", "grace_seconds", "priority", "max_attempts"}
"""Fields of a task that change how many samples are run and when, not what a sample is."""
LINES, RECIPE, TRAJECTORIES = "progress.jsonl", "recipe.json", "trajectories"


class LedgerError(TowlineError):
    """A folder that cannot be resumed; the message says what to do."""


class SampleRecord(SessionSummary):
    """One ended sample of a task."""

    digest: str
    """Digest of the task: another task under the same id is not resumed."""
    harness: str
    attempt: int = 1
    exit_code: int | None = None
    components: dict[str, float] = Field(default_factory=dict)
    turns: int = 0
    trained_tokens: int = 0
    chains: int = 0
    row_tokens: int = 0
    sampled_tokens: int = 0
    malformed_calls: int = 0
    calls_as_text: int = 0
    truncated: bool = False
    plain_difference: float | None = None
    total_seconds: float = 0.0
    at: float = 0.0
    """Unix time."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """The metadata of the task."""

    @classmethod
    def of_sample(cls, task: Task, trajectory: Trajectory, *, sample: int, attempt: int) -> SampleRecord:
        """The record of a sample that has ended now."""
        report = trajectory.report
        code = trajectory.metadata.get("exit_code")
        return cls.of(
            trajectory,
            sample=sample,
            attempt=attempt,
            digest=task_digest(task),
            harness=task.harness,
            exit_code=code if isinstance(code, int) else None,
            components=trajectory.reward.components if trajectory.reward is not None else {},
            chains=report.chains,
            row_tokens=report.row_tokens,
            sampled_tokens=sum(len(turn.sampled) for turn in trajectory.turns),
            malformed_calls=report.malformed_calls,
            calls_as_text=report.calls_as_text,
            truncated=any(trace.truncated for trace in trajectory.traces),
            plain_difference=report.plain_difference,
            total_seconds=trajectory.timings.get("total", 0.0),
            at=time.time(),
            metadata=task.metadata,
        )

    @property
    def key(self) -> tuple[str, str, int]:
        return self.harness, self.task_id, self.sample


def task_digest(task: Task) -> str:
    """Digest of what the sessions of a task do; their number, priority and retries are not part of it."""
    content = digest_values(task.model_dump(mode="json", exclude=_SCHEDULING))
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def tally_failures(samples: Iterable[SampleRecord]) -> FailureTally:
    """The infrastructure failures among samples."""
    tally = FailureTally()
    for sample in samples:
        if sample.state is SessionState.DONE:
            tally.add_ended()
        else:
            tally.add_failed(sample.failure, sample.error)
    return tally


class Ledger:
    """The samples of a folder that have ended."""

    def __init__(self, folder: Path, recipe: Mapping[str, Any]):
        """Open or create the ledger of a folder. The recipe is what all samples share: model, policy, sampling."""
        self.folder = folder
        self.quarantine = Quarantine(folder / QUARANTINE)
        folder.mkdir(parents=True, exist_ok=True)
        for name in (LINES, RECIPE):
            if (folder / name).is_dir():
                self.quarantine.move(folder / name, "expected a file, found a folder")
        self._file: IO[bytes] = (folder / LINES).open("ab+")
        try:
            self._lock()
            self._check_recipe(dict(recipe))
            self._samples, self.runs = self._read()
            self._drop_missing_files()
            self._write({"run": time.time()})
        except BaseException:
            self._file.close()
            raise
        self.runs.append((time.time(), 0.0))
        self._writing = threading.Lock()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, sample: SampleRecord) -> None:
        """Add a sample; it is durable when this returns."""
        with self._writing:
            self._write(sample.model_dump(mode="json"))
            self._samples.setdefault(sample.key, []).append(sample)
            self.runs[-1] = (self.runs[-1][0], sample.at)

    def done(self, task: Task, sample: int) -> SampleRecord | None:
        """The record of a sample that need not run again. Samples that infrastructure failed run again."""
        lines = self._samples.get((task.harness, task.task_id, sample), [])
        if not lines:
            return None
        if lines[-1].digest != task_digest(task):
            raise LedgerError(
                f"{self.folder} has samples of a different task with the id {task.task_id!r}: the task has changed. "
                "Choose another folder, or give the task another id."
            )
        return lines[-1] if lines[-1].state is SessionState.DONE else None

    def missing(self, tasks: Sequence[Task]) -> list[tuple[Task, int]]:
        """The samples that are left to run, in the order of the tasks."""
        return [(task, n) for task in tasks for n in range(task.num_samples) if self.done(task, n) is None]

    def of(self, tasks: Sequence[Task]) -> Iterator[SampleRecord]:
        """The latest record of every ended sample, in the order of the tasks."""
        for task in tasks:
            for number in range(task.num_samples):
                lines = self._samples.get((task.harness, task.task_id, number))
                if lines:
                    yield lines[-1]

    def attempts(self) -> int:
        """Sessions that have ended, retries included."""
        return sum(line.attempt for lines in self._samples.values() for line in lines)

    def hours(self) -> float:
        """Wall-clock hours of all runs, each until its last sample."""
        return sum(max(0.0, end - start) for start, end in self.runs if end) / 3600

    def path(self, sample: SampleRecord) -> Path:
        """The trajectory file of a sample."""
        return self.folder / TRAJECTORIES / f"{sample.session_id}.arrow"

    def _lock(self) -> None:
        try:
            lock_file(self._file.fileno())
        except BlockingIOError as error:
            raise LedgerError(
                f"another process is using {self.folder}; wait for it, or choose another folder"
            ) from error

    def _check_recipe(self, recipe: dict[str, Any]) -> None:
        path = self.folder / RECIPE
        if not path.exists():
            write_atomically(path, json.dumps(recipe, indent=2, sort_keys=True).encode())
            return
        try:
            before = json.loads(path.read_bytes())
            if not isinstance(before, dict):
                raise ValueError("not a JSON object")
        except ValueError as error:
            self.quarantine.move(path, f"{error}; replaced with the settings of this run")
            before = recipe
            write_atomically(path, json.dumps(recipe, indent=2, sort_keys=True).encode())
        plain = json.loads(json.dumps(recipe))
        different = sorted(name for name in {*before, *plain} if not _agree(before.get(name), plain.get(name)))
        if different:
            changes = ", ".join(f"{name} was {before.get(name)!r} and is {plain.get(name)!r}" for name in different)
            raise LedgerError(
                f"{self.folder} was started with other settings: {changes}. Use the same settings, or another folder."
            )

    def _read(self) -> tuple[dict[tuple[str, str, int], list[SampleRecord]], list[tuple[float, float]]]:
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            self._file.truncate(whole)
        samples: dict[tuple[str, str, int], list[SampleRecord]] = {}
        runs: list[tuple[float, float]] = []
        good: list[bytes] = []
        bad: list[str] = []
        for number, line in enumerate(data[:whole].split(b"\n")[:-1], 1):
            try:
                fields = json.loads(line)
                if "run" in fields:
                    runs.append((float(fields["run"]), 0.0))
                else:
                    sample = SampleRecord.model_validate(fields)
                    samples.setdefault(sample.key, []).append(sample)
                    if runs:
                        runs[-1] = (runs[-1][0], sample.at)
            except (ValueError, TypeError, ValidationError) as error:
                bad.append(f"line {number}: {error}")
            else:
                good.append(line + b"\n")
        if bad:
            self._rewrite(good, bad)
        return samples, runs

    def _rewrite(self, good: list[bytes], bad: list[str]) -> None:
        """Continue with the readable lines; the old file is kept in quarantine, and the samples of bad lines run again."""
        path = self.folder / LINES
        self.quarantine.copy(path, f"{len(bad)} unreadable lines, whose samples run again; {bad[0]}")
        write_atomically(path, b"".join(good))
        self._file.close()
        self._file = path.open("ab+")
        self._lock()

    def discard(self, sample: SampleRecord, why: str) -> None:
        """Move an unreadable trajectory to quarantine; the next run repeats its sample."""
        self.quarantine.move(self.path(sample), why)

    def _drop_missing_files(self) -> None:
        for key, lines in list(self._samples.items()):
            if lines[-1].state is SessionState.DONE and not self.path(lines[-1]).is_file():
                del self._samples[key]

    def _write(self, fields: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(fields).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _agree(before: Any, now: Any) -> bool:
    """Whether the values of two recipes agree. Fields that only one section has come from another version of Towline."""
    if isinstance(before, dict) and isinstance(now, dict):
        return all(_agree(before[name], now[name]) for name in before.keys() & now.keys())
    return bool(before == now)
