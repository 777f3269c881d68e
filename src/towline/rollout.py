"""Run tasks on this machine and keep what comes of them: what `towline run` does.

OUT/trajectories/<session>.arrow   one file a session: turns, traces, reward, timings
OUT/traces.parquet                 every training row of the run
OUT/results.jsonl                  one line a session: state, reward, figures
OUT/sessions/<session>/            what the harness and the verifier printed, and the artifacts
OUT/summary.json                   the run in figures
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from towline.config import Settings
from towline.gateway.gateway import Gateway
from towline.gateway.server import serving
from towline.harnesses.install import Installs
from towline.node.pipeline import Finished, Node
from towline.schema import Session, Task, traces_table
from towline.schema.files import write_atomically


@dataclass
class Results:
    """What came of a run, as it comes."""

    finished: list[Finished] = field(default_factory=list)

    def by_task(self) -> dict[str, list[Finished]]:
        groups: dict[str, list[Finished]] = {}
        for one in self.finished:
            groups.setdefault(one.session.task_id, []).append(one)
        return groups


@contextlib.asynccontextmanager
async def node_on(
    gateway: Gateway, settings: Settings, out: Path, *, changed: Callable[[Session], None] | None = None
) -> AsyncIterator[Node]:
    """A node with a gateway of its own in this process, for as long as the block lasts."""
    cache = settings.node.cache
    installs = Installs(cache / "harnesses" if cache is not None else None)
    async with serving(gateway, "tlc-" + secrets.token_urlsafe(32)) as running:
        node = Node(gateway, running, settings.node, out, installs, installs.folder.parent, changed=changed)
        try:
            yield node
        finally:
            await node.close()


async def run_tasks(
    node: Node, tasks: Sequence[Task], out: Path, told: Callable[[Finished], None] | None = None
) -> Results:
    """Every task's group; each session's line is in `results.jsonl` when it has ended."""
    results = Results()
    # More groups at once than there is room for would only prepare their environments too early.
    room = asyncio.Semaphore(node.settings.run_workers + node.settings.ahead)
    with (out / "results.jsonl").open("a", encoding="utf-8") as lines:

        def finished(one: Finished) -> None:
            results.finished.append(one)
            lines.write(json.dumps(line_of(one)) + "\n")
            lines.flush()
            if told is not None:
                told(one)

        async def group(task: Task) -> None:
            async with room:
                await node.run_group(task, finished)

        try:
            async with asyncio.TaskGroup() as groups:
                for task in tasks:
                    groups.create_task(group(task))
        finally:
            # Interrupted, what had finished is as good as it ever gets.
            await asyncio.to_thread(_write, results, out)
    return results


def _write(results: Results, out: Path) -> None:
    traces = [trace for one in results.finished for trace in one.trajectory.traces]
    pq.write_table(traces_table(traces), out / "traces.parquet")
    write_atomically(out / "summary.json", json.dumps(summary(results), indent=2).encode())


def line_of(one: Finished) -> dict[str, Any]:
    """A session in one line of JSON."""
    trajectory = one.trajectory
    reward, report = trajectory.reward, trajectory.report
    return {
        "session_id": one.session.session_id,
        "task_id": one.session.task_id,
        "sample": one.session.sample,
        "attempt": one.session.attempt,
        "state": one.session.state.value,
        "end_reason": trajectory.end_reason.value if trajectory.end_reason else None,
        "failure": trajectory.failure.value if trajectory.failure else None,
        "exit_code": trajectory.metadata.get("exit_code"),
        "reward": reward.score if reward is not None else None,
        "reward_status": reward.status.value if reward is not None else None,
        "components": reward.components if reward is not None else {},
        "reward_cause": reward.cause if reward is not None else None,
        "error": trajectory.error or (reward.error if reward is not None else None),
        "turns": report.turns,
        "chains": report.chains,
        "forks": report.forks,
        "trained_tokens": report.trained_tokens,
        "row_tokens": report.row_tokens,
        "malformed_calls": report.malformed_calls,
        "calls_as_text": report.calls_as_text,
        "timings": {stage: round(seconds, 3) for stage, seconds in trajectory.timings.items()},
        "notes": trajectory.metadata.get("notes", []),
    }


def summary(results: Results) -> dict[str, Any]:
    """The run in figures."""
    lines = [line_of(one) for one in results.finished]
    scores = [line["reward"] for line in lines if line["reward"] is not None]
    states: dict[str, int] = {}
    failures = Counter(line["failure"] for line in lines if line["failure"] is not None)
    for line in lines:
        states[line["state"]] = states.get(line["state"], 0) + 1
    return {
        "sessions": len(lines),
        "states": states,
        "failures": dict(failures.most_common()),
        "usable": sum(one.usable for one in results.finished),
        "scored": len(scores),
        "mean_reward": sum(scores) / len(scores) if scores else None,
        "turns": sum(line["turns"] for line in lines),
        "trained_tokens": sum(line["trained_tokens"] for line in lines),
        "malformed_calls": sum(line["malformed_calls"] for line in lines),
        "calls_as_text": sum(line["calls_as_text"] for line in lines),
        "tasks": {
            name: {
                "sessions": len(group),
                "rewards": [one.trajectory.reward.score if one.trajectory.reward else None for one in group],
            }
            for name, group in results.by_task().items()
        },
    }
