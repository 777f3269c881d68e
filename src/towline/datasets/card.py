"""The card of a dataset: where it came from and what it cost, for people (README.md) and programs (card.json)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from towline.datasets.writing import PLACES, Format, Written
from towline.schema.files import write_atomically

_MOST_TASKS = 50
"""Tasks that the card for people lists."""


def figures(written: Written, *, attempts: int, hours: float, recipe: Mapping[str, Any]) -> dict[str, Any]:
    counts, rewards = written.counts, written.rewards
    return {
        "attempts": attempts,
        **counts.as_json(),
        "sampled_tokens": written.sampled_tokens,
        "hours": round(hours, 4),
        "session_hours": round(written.session_seconds / 3600, 4),
        "mean_reward": sum(rewards) / len(rewards) if rewards else None,
        "acceptance": counts.accepted / counts.samples if counts.samples else None,
        "recipe": dict(recipe),
        "tasks": {name: one.as_json() for name, one in written.tasks.items()},
    }


def write(folder: Path, told: Mapping[str, Any], formats: list[Format]) -> None:
    write_atomically(folder / "card.json", json.dumps(told, indent=2).encode())
    write_atomically(folder / "README.md", _readme(folder.resolve().name, told, formats).encode())


def _readme(name: str, told: Mapping[str, Any], formats: list[Format]) -> str:
    recipe = told["recipe"]
    lines = ["---"]
    if Format.PARQUET in formats:
        lines += ["configs:", "- config_name: default", "  data_files:", "  - split: train", "    path: data/*.parquet"]
    lines += [
        "tags: [agents, trajectories, towline]",
        "---",
        "",
        f"# {name}",
        "",
        f"Trajectories of `{_code(recipe.get('harness', ''))}` with `{_code(recipe.get('model', ''))}`, "
        f"kept where `{_code(recipe.get('accept', ''))}`. Made by Towline.",
        "",
        "| | |",
        "|---|---:|",
    ]
    rows = {
        "samples": told["samples"],
        "attempts (sessions run)": told["attempts"],
        "accepted": told["accepted"],
        "rejected": told["rejected"],
        "duplicates": told["duplicates"],
        "unusable": told["unusable"],
        "failed": told["failed"],
        "rows": told["rows"],
        "trained tokens": told["trained_tokens"],
        "tokens of rows": told["row_tokens"],
        "tokens sampled, kept or not": told["sampled_tokens"],
    }
    lines += [f"| {label} | {value:,} |" for label, value in rows.items()]
    lines += [f"| hours | {told['hours']:.2f} |", f"| hours of sessions | {told['session_hours']:.2f} |"]
    if told["mean_reward"] is not None:
        lines.append(f"| mean reward of scored samples | {told['mean_reward']:.3f} |")
    lines += ["", "## Files", ""]
    about = {
        Format.PARQUET: '`data/*.parquet`: one row a training row; `datasets.load_dataset("parquet", '
        'data_files="data/*.parquet")`',
        Format.ATIF: "`atif/*.json`: one session each, Agent Trajectory Interchange Format",
        Format.SHAREGPT: "`sharegpt.jsonl`: conversations",
    }
    lines += [f"- {about[one]}" for one in PLACES if one in formats]
    lines += [
        "- `accepted.jsonl`: which samples are in it, and the digest of their content",
        "- `card.json`: these figures, by task too",
        "",
        "## Settings",
        "",
        "```json",
        json.dumps(recipe, indent=2, sort_keys=True),
        "```",
    ]
    tasks = list(told["tasks"].items())[:_MOST_TASKS]
    lines += ["", "## Tasks", "", "| task | samples | accepted | rejected | duplicates |", "|---|---:|---:|---:|---:|"]
    lines += [
        f"| `{_code(task)}` | {one['samples']} | {one['accepted']} | {one['rejected']} | {one['duplicates']} |"
        for task, one in tasks
    ]
    if len(told["tasks"]) > len(tasks):
        lines += ["", f"And {len(told['tasks']) - len(tasks)} more, in `card.json`."]
    return "\n".join(lines) + "\n"


def _code(value: object) -> str:
    """Text that may stand between backticks in a table."""
    return " ".join(str(value).replace("`", "'").replace("|", "\\|").split())
