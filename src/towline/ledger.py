"""What has been run, durably: one line for every sample of a task that came to its end.

A sample is in the ledger if, and only if, its trajectory is on disk: the line is written, and forced to disk, after the
trajectory was. Whoever is killed and started again runs the samples that have no line, and no other. A last line that a
crash cut in two is dropped. One process at a time holds a ledger.
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

from towline import locks
from towline.errors import TowlineError
from towline.quarantine import FOLDER, Quarantine
from towline.schema import FailureReason, FailureTally, Model, SessionState, Task, Trajectory
from towline.schema.files import write_atomically

LINES, RECIPE, TRAJECTORIES = "progress.jsonl", "recipe.json", "trajectories"


class LedgerError(TowlineError):
    """A folder whose progress cannot be gone on with, and what to do."""


class Sample(Model):
    """One sample of a task at its end."""

    task_id: str
    digest: str
    """Of the task: another task under the same id is not gone on with."""
    harness: str
    sample: int
    session_id: str
    attempt: int = 1
    state: SessionState
    end_reason: str | None = None
    exit_code: int | None = None
    failure: FailureReason | None = None
    error: str | None = None
    reward: float | None = None
    reward_status: str | None = None
    components: dict[str, float] = Field(default_factory=dict)
    usable: bool
    """Done, scored if there is an evaluator, and with tokens to train."""
    turns: int = 0
    chains: int = 0
    trained_tokens: int = 0
    row_tokens: int = 0
    sampled_tokens: int = 0
    malformed_calls: int = 0
    calls_as_text: int = 0
    truncated: bool = False
    plain_difference: float | None = None
    seconds: float = 0.0
    """Of the harness."""
    total_seconds: float = 0.0
    at: float = 0.0
    """Unix time."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """The task's own."""

    @classmethod
    def of(cls, task: Task, trajectory: Trajectory, *, sample: int, attempt: int, usable: bool) -> Sample:
        reward, report = trajectory.reward, trajectory.report
        code = trajectory.metadata.get("exit_code")
        return cls(
            task_id=task.task_id,
            digest=digest_of(task),
            harness=task.harness,
            sample=sample,
            session_id=trajectory.session_id,
            attempt=attempt,
            state=trajectory.state,
            end_reason=trajectory.end_reason.value if trajectory.end_reason else None,
            exit_code=code if isinstance(code, int) else None,
            failure=trajectory.failure,
            error=trajectory.error or (reward.error if reward is not None else None),
            reward=reward.score if reward is not None else None,
            reward_status=reward.status.value if reward is not None else None,
            components=reward.components if reward is not None else {},
            usable=usable,
            turns=report.turns,
            chains=report.chains,
            trained_tokens=report.trained_tokens,
            row_tokens=report.row_tokens,
            sampled_tokens=sum(len(turn.sampled) for turn in trajectory.turns),
            malformed_calls=report.malformed_calls,
            calls_as_text=report.calls_as_text,
            truncated=any(trace.truncated for trace in trajectory.traces),
            plain_difference=report.plain_difference,
            seconds=trajectory.timings.get("run", 0.0),
            total_seconds=trajectory.timings.get("total", 0.0),
            at=time.time(),
            metadata=task.metadata,
        )

    @property
    def key(self) -> tuple[str, str, int]:
        return self.harness, self.task_id, self.sample


def digest_of(task: Task) -> str:
    """Of what the task's sessions do; how many of them there are, and which goes first, is not part of it."""
    content = task.model_dump(mode="json", exclude={"num_samples", "min_samples", "priority", "max_attempts"})
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def failures_of(samples: Iterable[Sample]) -> FailureTally:
    """The infrastructure failures among samples."""
    tally = FailureTally()
    for sample in samples:
        if sample.state is SessionState.DONE:
            tally.add_ended()
        else:
            tally.add_failed(sample.failure, sample.error)
    return tally


class Ledger:
    def __init__(self, folder: Path, recipe: Mapping[str, Any]):
        """Open the folder's ledger, or begin one. The recipe is what all its samples share: model, policy, sampling."""
        self.folder = folder
        self.quarantine = Quarantine(folder / FOLDER)
        folder.mkdir(parents=True, exist_ok=True)
        for name in (LINES, RECIPE):
            if (folder / name).is_dir():
                self.quarantine.move(folder / name, "a file should be there")
        self._file: IO[bytes] = (folder / LINES).open("ab+")
        try:
            self._lock()
            self._same(dict(recipe))
            self._samples, self.runs = self._read()
            self._missing_files()
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

    def add(self, sample: Sample) -> None:
        """Durable when it returns."""
        with self._writing:
            self._write(sample.model_dump(mode="json"))
            self._samples.setdefault(sample.key, []).append(sample)
            self.runs[-1] = (self.runs[-1][0], sample.at)

    def done(self, task: Task, sample: int) -> Sample | None:
        """The sample's line if it need not be run again. Infrastructure that failed is tried anew."""
        lines = self._samples.get((task.harness, task.task_id, sample), [])
        if not lines:
            return None
        if lines[-1].digest != digest_of(task):
            raise LedgerError(
                f"{self.folder} has samples of another task under the id {task.task_id!r}: the task was changed since. "
                "Give another folder, or the task another id."
            )
        return lines[-1] if lines[-1].state is SessionState.DONE else None

    def missing(self, tasks: Sequence[Task]) -> list[tuple[Task, int]]:
        """What is left to run, in the order of the tasks."""
        return [(task, n) for task in tasks for n in range(task.num_samples) if self.done(task, n) is None]

    def of(self, tasks: Sequence[Task]) -> Iterator[Sample]:
        """The latest line of every sample of the tasks that has one, in the order of the tasks."""
        for task in tasks:
            for number in range(task.num_samples):
                lines = self._samples.get((task.harness, task.task_id, number))
                if lines:
                    yield lines[-1]

    def attempts(self) -> int:
        """Sessions that came to an end, those that were tried again included."""
        return sum(line.attempt for lines in self._samples.values() for line in lines)

    def hours(self) -> float:
        """Wall clock of all runs, each until its last sample."""
        return sum(max(0.0, end - start) for start, end in self.runs if end) / 3600

    def path(self, sample: Sample) -> Path:
        return self.folder / TRAJECTORIES / f"{sample.session_id}.arrow"

    # The file

    def _lock(self) -> None:
        try:
            locks.take(self._file.fileno())
        except BlockingIOError as error:
            raise LedgerError(f"another process is at work in {self.folder}") from error

    def _same(self, recipe: dict[str, Any]) -> None:
        path = self.folder / RECIPE
        if not path.exists():
            write_atomically(path, json.dumps(recipe, indent=2, sort_keys=True).encode())
            return
        try:
            before = json.loads(path.read_bytes())
            if not isinstance(before, dict):
                raise ValueError("it is no object")
        except ValueError as error:
            self.quarantine.move(path, f"{error}; the settings of this run take its place")
            before = recipe
            write_atomically(path, json.dumps(recipe, indent=2, sort_keys=True).encode())
        plain = json.loads(json.dumps(recipe))
        different = sorted(name for name in {*before, *plain} if not _agree(before.get(name), plain.get(name)))
        if different:
            told = ", ".join(f"{name} was {before.get(name)!r} and is {plain.get(name)!r}" for name in different)
            raise LedgerError(f"{self.folder} was begun otherwise: {told}. Give another folder, or the same settings.")

    def _read(self) -> tuple[dict[tuple[str, str, int], list[Sample]], list[tuple[float, float]]]:
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            self._file.truncate(whole)
        samples: dict[tuple[str, str, int], list[Sample]] = {}
        runs: list[tuple[float, float]] = []
        good: list[bytes] = []
        bad: list[str] = []
        for number, line in enumerate(data[:whole].split(b"\n")[:-1], 1):
            try:
                fields = json.loads(line)
                if "run" in fields:
                    runs.append((float(fields["run"]), 0.0))
                else:
                    sample = Sample.model_validate(fields)
                    samples.setdefault(sample.key, []).append(sample)
                    if runs:
                        runs[-1] = (runs[-1][0], sample.at)
            except (ValueError, TypeError, ValidationError) as error:
                bad.append(f"line {number}: {error}")
            else:
                good.append(line + b"\n")
        if bad:
            self._without(good, bad)
        return samples, runs

    def _without(self, good: list[bytes], bad: list[str]) -> None:
        """Go on with the lines that can be read; the file as it was is kept. The samples of the others are run again."""
        path = self.folder / LINES
        self.quarantine.copy(path, f"{len(bad)} lines cannot be read, whose samples are run again; {bad[0]}")
        write_atomically(path, b"".join(good))
        self._file.close()
        self._file = path.open("ab+")
        self._lock()

    def spoil(self, sample: Sample, why: str) -> None:
        """The sample's trajectory cannot be read: it is kept elsewhere, and the sample is run again another time."""
        self.quarantine.move(self.path(sample), why)

    def _missing_files(self) -> None:
        for key, lines in list(self._samples.items()):
            if lines[-1].state is SessionState.DONE and not self.path(lines[-1]).is_file():
                del self._samples[key]

    def _write(self, fields: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(fields).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _agree(before: Any, now: Any) -> bool:
    """Whether two recipes' values agree. A section's fields that only one of them has are of another version of Towline."""
    if isinstance(before, dict) and isinstance(now, dict):
        return all(_agree(before[name], now[name]) for name in before.keys() & now.keys())
    return bool(before == now)
