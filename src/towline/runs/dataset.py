"""Write the accepted sessions of a ledger as a dataset, each once, in the order of their tasks, with a dataset card.

Invariant: the dataset is a function of the ledger's samples and of the options, whatever order the samples finished in and
however often the run was interrupted. It is written next to an existing dataset and then replaces it as a whole.

The card says where the dataset came from and what it cost: README.md for people, card.json for programs.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from towline.common.files import write_atomically
from towline.errors import TowlineError
from towline.runs import formats as atif
from towline.runs.accept import NAMES, Accept
from towline.runs.formats import PARQUET_SCHEMA, parquet_batch, parquet_rows, sharegpt_lines, trained_traces
from towline.runs.ledger import Ledger, SampleRecord
from towline.schema import SessionState, Task, Trajectory
from towline.schema.files import dump_json


class DuplicateRule(StrEnum):
    """What makes a session of a task a duplicate of an earlier one."""

    TRAINED = "trained"
    """The same sampled tokens. The context may differ in times, names and paths."""
    WHOLE = "whole"
    """The same context and sampled tokens."""
    KEEP = "keep"
    """Nothing: all sessions are kept."""


def fingerprint(trajectory: Trajectory, rule: DuplicateRule) -> str:
    """The content digest of a session; equal for duplicates under the rule."""
    digest = hashlib.sha256()
    parts = [trajectory.group_id, str(trajectory.metadata.get("harness", ""))]
    if rule is DuplicateRule.KEEP:
        parts.append(trajectory.session_id)
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode("utf-8", "surrogatepass"))
    for trace in trained_traces(trajectory):
        mask = trace.loss_mask == 1
        tokens = trace.token_ids if rule is DuplicateRule.WHOLE else trace.token_ids[mask]
        for array in (tokens, trace.turn_ids[mask] if rule is DuplicateRule.TRAINED else trace.loss_mask):
            digest.update(len(array).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


_DRAFT = ".draft"
_BUFFERED = 1_000_000
"""Tokens that are buffered before a row group is written."""


class DatasetFormat(StrEnum):
    """A format that a dataset is written in."""

    PARQUET = "parquet"
    """One row per trace, with messages and tokens."""
    ATIF = "atif"
    """One Agent Trajectory Interchange Format document per session."""
    SHAREGPT = "sharegpt"
    """One ShareGPT conversation per trace."""


OUTPUT_PATHS = {DatasetFormat.PARQUET: "data", DatasetFormat.ATIF: "atif", DatasetFormat.SHAREGPT: "sharegpt.jsonl"}
ACCEPTED = "accepted.jsonl"


@dataclass
class SampleCounts:
    """Samples by verdict. Each sample counts in exactly one of the first five."""

    accepted: int = 0
    rejected: int = 0
    """Rejected by the accept expression."""
    duplicates: int = 0
    unusable: int = 0
    """Unscored although there is an evaluator, or without trained tokens."""
    failed: int = 0
    """Failed by infrastructure; they run again next time."""
    rows: int = 0
    trained_tokens: int = 0
    row_tokens: int = 0

    @property
    def samples(self) -> int:
        return self.accepted + self.rejected + self.duplicates + self.unusable + self.failed

    def as_json(self) -> dict[str, int]:
        return {"samples": self.samples, **asdict(self)}


@dataclass
class DatasetStats:
    """What was written, and what it was chosen from."""

    counts: SampleCounts = field(default_factory=SampleCounts)
    tasks: dict[str, SampleCounts] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    """Rewards of all scored samples, accepted or not."""
    sampled_tokens: int = 0
    session_seconds: float = 0.0


def write_dataset(
    ledger: Ledger,
    tasks: Sequence[Task],
    accept: Accept,
    *,
    formats: Iterable[DatasetFormat] = tuple(DatasetFormat),
    duplicates: DuplicateRule = DuplicateRule.TRAINED,
    on_progress: Callable[[int, int], None] | None = None,
) -> DatasetStats:
    """Write the dataset into the ledger's folder."""
    stats, chosen = DatasetStats(), list(dict.fromkeys(formats))
    draft = ledger.folder / _DRAFT
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    total = sum(task.num_samples for task in tasks)
    with _Files(draft, chosen) as files:
        for number, (sample, trajectory, digest) in enumerate(
            _judge_samples(ledger, tasks, accept, duplicates, stats), 1
        ):
            if trajectory is not None:
                files.add(sample, trajectory, digest)
            if on_progress is not None:
                on_progress(number, total)
    for name in {*OUTPUT_PATHS.values(), ACCEPTED}:
        _remove(ledger.folder / name)
        if (draft / name).exists():
            (draft / name).rename(ledger.folder / name)
    draft.rmdir()
    return stats


def _judge_samples(
    ledger: Ledger, tasks: Sequence[Task], accept: Accept, duplicates: DuplicateRule, stats: DatasetStats
) -> Iterator[tuple[SampleRecord, Trajectory | None, str]]:
    """Every sample, with its trajectory and digest if it is accepted; updates the stats."""
    seen: set[str] = set()
    for sample in ledger.of(tasks):
        own = stats.tasks.setdefault(sample.task_id, SampleCounts())
        stats.sampled_tokens += sample.sampled_tokens
        stats.session_seconds += sample.total_seconds
        if sample.reward is not None:
            stats.rewards.append(sample.reward)
        trajectory, digest = None, ""
        verdict = verdict_of(sample, accept)
        if verdict == "accepted":
            try:
                trajectory = Trajectory.read(ledger.path(sample))
            except (TowlineError, OSError, ValueError) as error:
                ledger.discard(sample, str(error))
                verdict = "failed"
            else:
                digest = fingerprint(trajectory, duplicates)
                if digest in seen:
                    verdict, trajectory = "duplicates", None
                seen.add(digest)
        for counts in (stats.counts, own):
            setattr(counts, verdict, getattr(counts, verdict) + 1)
            if trajectory is not None:
                counts.rows += sum(bool(trace.trained_tokens) for trace in trajectory.traces)
                counts.trained_tokens += sample.trained_tokens
                counts.row_tokens += sample.row_tokens
        yield sample, trajectory, digest


def verdict_of(sample: SampleRecord, accept: Accept) -> str:
    """The field of `SampleCounts` that a sample counts in, duplicates aside."""
    if sample.state is not SessionState.DONE:
        return "failed"
    if not sample.usable:
        return "unusable"
    return "accepted" if accept(accept_values(sample)) else "rejected"


def accept_values(sample: SampleRecord) -> dict[str, Any]:
    """The values of a sample that an accept expression can use."""
    return {name: getattr(sample, name) for name in NAMES}


class _Files:
    """The files of a dataset while they are written."""

    def __init__(self, folder: Path, formats: Sequence[DatasetFormat]):
        self.folder = folder
        self.formats = formats
        self._rows: list[dict[str, Any]] = []
        self._tokens = 0
        self._accepted = (folder / ACCEPTED).open("w", encoding="utf-8")
        if DatasetFormat.PARQUET in formats:
            (folder / OUTPUT_PATHS[DatasetFormat.PARQUET]).mkdir()
            path = folder / OUTPUT_PATHS[DatasetFormat.PARQUET] / "train-00000-of-00001.parquet"
            self._parquet = pq.ParquetWriter(path, PARQUET_SCHEMA, compression="zstd")
        if DatasetFormat.ATIF in formats:
            (folder / OUTPUT_PATHS[DatasetFormat.ATIF]).mkdir()
        if DatasetFormat.SHAREGPT in formats:
            self._lines = (folder / OUTPUT_PATHS[DatasetFormat.SHAREGPT]).open("wb")

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._accepted.close()
        if DatasetFormat.PARQUET in self.formats:
            if kind is None:
                self._flush()
            self._parquet.close()
        if DatasetFormat.SHAREGPT in self.formats:
            self._lines.close()

    def add(self, sample: SampleRecord, trajectory: Trajectory, digest: str) -> None:
        named = {"task_id": sample.task_id, "sample": sample.sample, "session_id": sample.session_id}
        self._accepted.write(json.dumps({**named, "reward": sample.reward, "content": digest}) + "\n")
        if DatasetFormat.PARQUET in self.formats:
            self._rows += parquet_rows(trajectory)
            self._tokens += sample.row_tokens
            if self._tokens >= _BUFFERED:
                self._flush()
        if DatasetFormat.ATIF in self.formats:
            path = self.folder / OUTPUT_PATHS[DatasetFormat.ATIF] / f"{sample.session_id}.json"
            path.write_bytes(dump_json(atif.atif_document(trajectory)))
        if DatasetFormat.SHAREGPT in self.formats:
            for line in sharegpt_lines(trajectory):
                self._lines.write(dump_json(line) + b"\n")

    def _flush(self) -> None:
        if self._rows:
            self._parquet.write_batch(parquet_batch(self._rows))
        self._rows, self._tokens = [], 0


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


_MOST_TASKS = 50
"""Maximum number of tasks listed in README.md."""


def card_fields(stats: DatasetStats, *, attempts: int, hours: float, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The content of card.json."""
    counts, rewards = stats.counts, stats.rewards
    return {
        "attempts": attempts,
        **counts.as_json(),
        "sampled_tokens": stats.sampled_tokens,
        "hours": round(hours, 4),
        "session_hours": round(stats.session_seconds / 3600, 4),
        "mean_reward": sum(rewards) / len(rewards) if rewards else None,
        "acceptance": counts.accepted / counts.samples if counts.samples else None,
        "recipe": dict(recipe),
        "tasks": {name: one.as_json() for name, one in stats.tasks.items()},
    }


def write_card(folder: Path, card: Mapping[str, Any], formats: list[DatasetFormat]) -> None:
    """Write card.json and README.md."""
    write_atomically(folder / "card.json", json.dumps(card, indent=2).encode())
    write_atomically(folder / "README.md", _readme(folder.resolve().name, card, formats).encode())


def _readme(name: str, card: Mapping[str, Any], formats: list[DatasetFormat]) -> str:
    recipe = card["recipe"]
    lines = ["---"]
    if DatasetFormat.PARQUET in formats:
        lines += ["configs:", "- config_name: default", "  data_files:", "  - split: train", "    path: data/*.parquet"]
    lines += [
        "tags: [agents, trajectories, towline]",
        "---",
        "",
        f"# {name}",
        "",
        f"Trajectories of `{_code(recipe.get('harness', ''))}` with `{_code(recipe.get('model', ''))}`, "
        f"accepted where `{_code(recipe.get('accept', ''))}`. Generated by Towline.",
        "",
        "| | |",
        "|---|---:|",
    ]
    rows = {
        "samples": card["samples"],
        "attempts (sessions run)": card["attempts"],
        "accepted": card["accepted"],
        "rejected": card["rejected"],
        "duplicates": card["duplicates"],
        "unusable": card["unusable"],
        "failed": card["failed"],
        "rows": card["rows"],
        "trained tokens": card["trained_tokens"],
        "tokens in rows": card["row_tokens"],
        "sampled tokens, accepted or not": card["sampled_tokens"],
    }
    lines += [f"| {label} | {value:,} |" for label, value in rows.items()]
    lines += [f"| wall-clock hours | {card['hours']:.2f} |", f"| session hours | {card['session_hours']:.2f} |"]
    if card["mean_reward"] is not None:
        lines.append(f"| mean reward of scored samples | {card['mean_reward']:.3f} |")
    lines += ["", "## Files", ""]
    about = {
        DatasetFormat.PARQUET: '`data/*.parquet`: one row per trace; `datasets.load_dataset("parquet", '
        'data_files="data/*.parquet")`',
        DatasetFormat.ATIF: "`atif/*.json`: one Agent Trajectory Interchange Format document per session",
        DatasetFormat.SHAREGPT: "`sharegpt.jsonl`: one conversation per trace",
    }
    lines += [f"- {about[one]}" for one in OUTPUT_PATHS if one in formats]
    lines += [
        "- `accepted.jsonl`: the accepted samples and the digests of their content",
        "- `card.json`: these numbers, also by task",
        "",
        "## Settings",
        "",
        "```json",
        json.dumps(recipe, indent=2, sort_keys=True),
        "```",
    ]
    tasks = list(card["tasks"].items())[:_MOST_TASKS]
    lines += ["", "## Tasks", "", "| task | samples | accepted | rejected | duplicates |", "|---|---:|---:|---:|---:|"]
    lines += [
        f"| `{_code(task)}` | {one['samples']} | {one['accepted']} | {one['rejected']} | {one['duplicates']} |"
        for task, one in tasks
    ]
    if len(card["tasks"]) > len(tasks):
        lines += ["", f"And {len(card['tasks']) - len(tasks)} more, in `card.json`."]
    return "\n".join(lines) + "\n"


def _code(value: object) -> str:
    """Text that is safe between backticks in a table."""
    return " ".join(str(value).replace("`", "'").replace("|", "\\|").split())
