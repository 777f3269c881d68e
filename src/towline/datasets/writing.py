"""From what a ledger holds to a dataset: the sessions that are accepted, each once, in the order of their tasks.

Invariant: what is written is a function of the ledger's samples and of the options, whatever the order they finished in
and however often the run was interrupted. It is put together beside the dataset that is there, and takes its place whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from towline.datasets import atif, rows, sharegpt
from towline.datasets.accept import NAMES, Accept
from towline.datasets.duplicates import Duplicates, fingerprint
from towline.errors import TowlineError
from towline.ledger import Ledger, Sample
from towline.schema import SessionState, Task, Trajectory
from towline.schema.files import dump_json

_DRAFT = ".draft"
_BUFFERED = 1_000_000
"""Tokens that are held before a group of rows is written."""


class Format(StrEnum):
    PARQUET = "parquet"
    ATIF = "atif"
    SHAREGPT = "sharegpt"


PLACES = {Format.PARQUET: "data", Format.ATIF: "atif", Format.SHAREGPT: "sharegpt.jsonl"}
ACCEPTED = "accepted.jsonl"


@dataclass
class Counts:
    """What became of the samples. Every one is in exactly one of the first five."""

    accepted: int = 0
    rejected: int = 0
    """The expression did not hold."""
    duplicates: int = 0
    unusable: int = 0
    """Without a score although there is an evaluator, or with nothing to train."""
    failed: int = 0
    """Infrastructure failed; running again tries them again."""
    rows: int = 0
    trained_tokens: int = 0
    row_tokens: int = 0

    @property
    def samples(self) -> int:
        return self.accepted + self.rejected + self.duplicates + self.unusable + self.failed

    def as_json(self) -> dict[str, int]:
        return {"samples": self.samples, **asdict(self)}


@dataclass
class Written:
    counts: Counts = field(default_factory=Counts)
    tasks: dict[str, Counts] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    """Of every scored sample, accepted or not."""
    sampled_tokens: int = 0
    session_seconds: float = 0.0


def write(
    ledger: Ledger,
    tasks: Sequence[Task],
    accept: Accept,
    *,
    formats: Iterable[Format] = tuple(Format),
    duplicates: Duplicates = Duplicates.TRAINED,
    told: Callable[[int, int], None] | None = None,
) -> Written:
    """Write the dataset into the ledger's folder."""
    written, chosen = Written(), list(dict.fromkeys(formats))
    draft = ledger.folder / _DRAFT
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    total = sum(task.num_samples for task in tasks)
    with _Files(draft, chosen) as files:
        for number, (sample, trajectory, mark) in enumerate(_judged(ledger, tasks, accept, duplicates, written), 1):
            if trajectory is not None:
                files.add(sample, trajectory, mark)
            if told is not None:
                told(number, total)
    for name in {*PLACES.values(), ACCEPTED}:
        _remove(ledger.folder / name)
        if (draft / name).exists():
            (draft / name).rename(ledger.folder / name)
    draft.rmdir()
    return written


def _judged(
    ledger: Ledger, tasks: Sequence[Task], accept: Accept, duplicates: Duplicates, written: Written
) -> Iterator[tuple[Sample, Trajectory | None, str]]:
    """Every sample, with its trajectory if it is accepted; counts as it goes."""
    seen: set[str] = set()
    for sample in ledger.of(tasks):
        own = written.tasks.setdefault(sample.task_id, Counts())
        written.sampled_tokens += sample.sampled_tokens
        written.session_seconds += sample.total_seconds
        if sample.reward is not None:
            written.rewards.append(sample.reward)
        trajectory, mark = None, ""
        verdict = verdict_of(sample, accept)
        if verdict == "accepted":
            try:
                trajectory = Trajectory.read(ledger.path(sample))
            except (TowlineError, OSError, ValueError) as error:
                ledger.spoil(sample, str(error))
                verdict = "failed"
            else:
                mark = fingerprint(trajectory, duplicates)
                if mark in seen:
                    verdict, trajectory = "duplicates", None
                seen.add(mark)
        for counts in (written.counts, own):
            setattr(counts, verdict, getattr(counts, verdict) + 1)
            if trajectory is not None:
                counts.rows += sum(bool(trace.trained_tokens) for trace in trajectory.traces)
                counts.trained_tokens += sample.trained_tokens
                counts.row_tokens += sample.row_tokens
        yield sample, trajectory, mark


def verdict_of(sample: Sample, accept: Accept) -> str:
    if sample.state is not SessionState.DONE:
        return "failed"
    if not sample.usable:
        return "unusable"
    return "accepted" if accept(values_of(sample)) else "rejected"


def values_of(sample: Sample) -> dict[str, Any]:
    """What an expression sees of a sample."""
    fields = sample.__dict__
    return {name: fields[name].value if name == "state" else fields[name] for name in NAMES}


class _Files:
    """The files of a dataset while they are written."""

    def __init__(self, folder: Path, formats: Sequence[Format]):
        self.folder = folder
        self.formats = formats
        self._rows: list[dict[str, Any]] = []
        self._tokens = 0
        self._accepted = (folder / ACCEPTED).open("w", encoding="utf-8")
        if Format.PARQUET in formats:
            (folder / PLACES[Format.PARQUET]).mkdir()
            path = folder / PLACES[Format.PARQUET] / "train-00000-of-00001.parquet"
            self._parquet = pq.ParquetWriter(path, rows.SCHEMA, compression="zstd")
        if Format.ATIF in formats:
            (folder / PLACES[Format.ATIF]).mkdir()
        if Format.SHAREGPT in formats:
            self._lines = (folder / PLACES[Format.SHAREGPT]).open("wb")

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._accepted.close()
        if Format.PARQUET in self.formats:
            if kind is None:
                self._flush()
            self._parquet.close()
        if Format.SHAREGPT in self.formats:
            self._lines.close()

    def add(self, sample: Sample, trajectory: Trajectory, mark: str) -> None:
        named = {"task_id": sample.task_id, "sample": sample.sample, "session_id": sample.session_id}
        self._accepted.write(json.dumps({**named, "reward": sample.reward, "content": mark}) + "\n")
        if Format.PARQUET in self.formats:
            self._rows += rows.rows_of(trajectory)
            self._tokens += sample.row_tokens
            if self._tokens >= _BUFFERED:
                self._flush()
        if Format.ATIF in self.formats:
            path = self.folder / PLACES[Format.ATIF] / f"{sample.session_id}.json"
            path.write_bytes(dump_json(atif.document(trajectory)))
        if Format.SHAREGPT in self.formats:
            for line in sharegpt.lines_of(trajectory):
                self._lines.write(dump_json(line) + b"\n")

    def _flush(self) -> None:
        if self._rows:
            self._parquet.write_batch(rows.batch_of(self._rows))
        self._rows, self._tokens = [], 0


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
