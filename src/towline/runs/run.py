"""Run many sessions on a node in this process: the one way that `run`, `eval` and `generate` share.

Every sample of a task is run once and retried while its infrastructure fails. `complete_ledger` runs the samples that a
ledger lacks, so that an interrupted run resumes. `run_tasks` runs all samples and writes what `towline run` leaves behind:

OUT/trajectories/<session>.arrow   one file per session: turns, traces, reward, timings
OUT/traces.parquet                 every training row of the run
OUT/results.jsonl                  one line per session: state, reward, counts
OUT/sessions/<session>/            output of the harness and the verifier, and the artifacts
OUT/summary.json                   totals of the run
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow.parquet as pq

from towline.common.files import write_atomically
from towline.config import Settings
from towline.gateway.gateway import Gateway
from towline.gateway.server import serve_gateway
from towline.harnesses.install import Installs
from towline.node.finished import FinishedSession
from towline.node.node import RolloutNode, new_session
from towline.runs import retries
from towline.runs.early_stop import stop_deadline
from towline.runs.ledger import Ledger, SampleRecord
from towline.schema import (
    EarlyStop,
    EndReason,
    Session,
    SessionLength,
    SessionState,
    SessionSummary,
    Task,
    traces_table,
)


@dataclass
class RunResults:
    """The sessions of a run that have ended, in that order."""

    finished: list[FinishedSession] = field(default_factory=list)

    def by_task(self) -> dict[str, list[FinishedSession]]:
        groups: dict[str, list[FinishedSession]] = {}
        for one in self.finished:
            groups.setdefault(one.session.task_id, []).append(one)
        return groups

    def early_stop(self) -> EarlyStop | None:
        """What stopping groups early cut, saved and favoured; `None` if no session was cut."""
        return EarlyStop.of([SessionLength.of(one.trajectory) for one in group] for group in self.by_task().values())

    def write(self, out: Path) -> None:
        """Write the training rows and the summary."""
        traces = [trace for one in self.finished for trace in one.trajectory.traces]
        pq.write_table(traces_table(traces), out / "traces.parquet")
        write_atomically(out / "summary.json", json.dumps(run_summary(self), indent=2).encode())


def session_line(one: FinishedSession) -> dict[str, Any]:
    """A session as one line of `results.jsonl`."""
    trajectory = one.trajectory
    reward, report = trajectory.reward, trajectory.report
    summary = SessionSummary.of(trajectory, sample=one.session.sample, attempt=one.session.attempt)
    return {
        **summary.model_dump(mode="json"),
        "exit_code": trajectory.metadata.get("exit_code"),
        "components": reward.components if reward is not None else {},
        "reward_cause": reward.cause if reward is not None else None,
        "suspicion": [one.model_dump() for one in reward.suspicion] if reward is not None else [],
        "chains": report.chains,
        "forks": report.forks,
        "row_tokens": report.row_tokens,
        "malformed_calls": report.malformed_calls,
        "calls_as_text": report.calls_as_text,
        "timings": {stage: round(seconds, 3) for stage, seconds in trajectory.timings.items()},
        "notes": trajectory.metadata.get("notes", []),
    }


def _names(line: dict[str, Any]) -> set[str]:
    """The findings of a session's line, each once."""
    return {one["name"] for one in line["suspicion"]}


def run_summary(results: RunResults) -> dict[str, Any]:
    """The totals of a run."""
    lines = [session_line(one) for one in results.finished]
    scores = [line["reward"] for line in lines if line["reward"] is not None]
    failures = Counter(line["failure"] for line in lines if line["failure"] is not None)
    early = results.early_stop()
    return {
        "sessions": len(lines),
        "states": dict(Counter(line["state"] for line in lines)),
        "failures": dict(failures.most_common()),
        "usable": sum(line["usable"] for line in lines),
        "scored": len(scores),
        "mean_reward": sum(scores) / len(scores) if scores else None,
        "turns": sum(line["turns"] for line in lines),
        "trained_tokens": sum(line["trained_tokens"] for line in lines),
        "malformed_calls": sum(line["malformed_calls"] for line in lines),
        "calls_as_text": sum(line["calls_as_text"] for line in lines),
        "suspicion": dict(Counter(name for line in lines for name in _names(line)).most_common()),
        "early_stop": None if early is None else early.model_dump(mode="json"),
        "tasks": {
            name: {
                "sessions": len(group),
                "rewards": [one.trajectory.reward.score if one.trajectory.reward else None for one in group],
                "cut": sum(one.cut for one in group),
            }
            for name, group in results.by_task().items()
        },
    }


OnFinished: TypeAlias = Callable[[Task, FinishedSession], Awaitable[None]]


def harness_installs(settings: Settings) -> Installs:
    """The harness installs of this machine, in the configured cache."""
    cache = settings.node.cache
    return Installs(cache / "harnesses" if cache is not None else None)


@contextlib.asynccontextmanager
async def local_node(
    gateway: Gateway,
    settings: Settings,
    out: Path,
    *,
    changed: Callable[[Session], None] | None = None,
    stores_trajectories: bool = True,
) -> AsyncIterator[RolloutNode]:
    """A node and its gateway in this process, for as long as the block lasts."""
    installs = harness_installs(settings)
    async with serve_gateway(gateway, "tlc-" + secrets.token_urlsafe(32)) as running:
        node = RolloutNode(
            gateway,
            running,
            settings.node,
            out,
            installs,
            installs.folder.parent,
            images=settings.images,
            changed=changed,
            stores_trajectories=stores_trajectories,
        )
        try:
            yield node
        finally:
            await node.close()


async def run_sample(
    node: RolloutNode, task: Task, sample: int, *, wanted: Callable[[], bool] = lambda: True
) -> FinishedSession:
    """Run one sample, retried while its infrastructure fails; a sample that is not `wanted` is stopped early."""
    strikes = attempt = 0
    while True:
        attempt += 1
        session = new_session(task, sample, attempt)
        # No scheduler holds this queue: the outage of a component is waited for once, not once per session behind it.
        running = node.submit(task, session, since_opening=True)
        if not wanted():
            node.cancel(session.session_id, EndReason.EARLY_STOP)
        one = await running
        state = one.session.state
        strikes = retries.strikes_after(state, strikes, attempt=attempt, blameless=one.blameless)
        final = one.hopeless or one.held
        if not retries.is_retried(state, hopeless=final, strikes=strikes, max_attempts=task.max_attempts):
            return one


async def run_samples(node: RolloutNode, samples: Sequence[tuple[Task, int]], on_finished: OnFinished) -> None:
    """Run samples in order; each is passed to `on_finished` when it has ended, those that a cancellation cut short too.

    When `min_samples` of a task are usable, its other sessions have `grace_seconds` more, and are then stopped early.
    Cancelling this call cancels the sessions under way, and waits for them.
    """
    left = Counter(task.task_id for task, _ in samples)
    usable: Counter[str] = Counter()
    stopped: set[str] = set()
    deadlines: dict[str, float] = {}
    timers: list[asyncio.TimerHandle] = []
    loop = asyncio.get_running_loop()
    settings = node.settings
    # More sessions than all stages hold would only prepare their environments too early.
    room = asyncio.Semaphore(settings.run_workers + settings.ahead + settings.build_workers + settings.evaluate_workers)

    def stop(name: str) -> None:
        stopped.add(name)
        node.cancel_task(name, EndReason.EARLY_STOP)

    def start_grace(task: Task) -> None:
        name, now = task.task_id, loop.time()
        deadline = stop_deadline(
            usable=usable[name], required=task.min_samples, grace=task.grace_seconds, since=None, now=now
        )
        if deadline is not None:
            deadlines[name] = deadline
            if deadline <= now:
                stop(name)
            else:
                timers.append(loop.call_at(deadline, stop, name))

    async def one(task: Task, sample: int) -> None:
        name = task.task_id

        try:
            finished = await run_sample(node, task, sample, wanted=lambda: name not in stopped)
            await on_finished(task, finished)
            usable[name] += finished.usable
            if task.min_samples and name not in deadlines:
                start_grace(task)
        finally:
            left[name] -= 1
            if not left[name]:
                node.forget_task(task.task_id)
            room.release()

    try:
        async with asyncio.TaskGroup() as group:
            for task, sample in samples:
                await room.acquire()
                group.create_task(one(task, sample))
    finally:
        for timer in timers:
            timer.cancel()


async def run_group(node: RolloutNode, task: Task) -> list[FinishedSession]:
    """Run all sessions of one task; the results in the order of the samples."""
    done: list[FinishedSession] = []

    async def add(task: Task, finished: FinishedSession) -> None:
        done.append(finished)

    await run_samples(node, [(task, sample) for sample in range(task.num_samples)], add)
    return sorted(done, key=lambda one: one.session.sample)


async def run_tasks(
    node: RolloutNode, tasks: Sequence[Task], out: Path, on_progress: Callable[[FinishedSession], None] | None = None
) -> RunResults:
    """Run all sessions of the tasks; each session's line is in `results.jsonl` as soon as it has ended.

    When it returns or is cancelled, the training rows and the summary of what has ended are in `out` as well.
    """
    results = RunResults()
    with (out / "results.jsonl").open("a", encoding="utf-8") as lines:

        async def add(task: Task, finished: FinishedSession) -> None:
            results.finished.append(finished)
            lines.write(json.dumps(session_line(finished)) + "\n")
            lines.flush()
            if on_progress is not None:
                on_progress(finished)

        try:
            await run_samples(node, [(task, sample) for task in tasks for sample in range(task.num_samples)], add)
        finally:
            await asyncio.to_thread(results.write, out)
    return results


async def complete_ledger(
    gateway: Gateway,
    settings: Settings,
    groups: Sequence[Sequence[Task]],
    ledger: Ledger,
    *,
    changed: Callable[[Session], None] | None = None,
    on_progress: Callable[[FinishedSession], None] | None = None,
) -> None:
    """Run the samples that the ledger lacks on a node in this process; starts nothing if it lacks none.

    A sample is in the ledger before its progress is reported. Sessions that were cancelled get no line and run again
    next time. Groups run one after the other: what a node prepares for a task is for one harness, and two groups may
    hold the same tasks with different harnesses.
    """

    async def add(task: Task, finished: FinishedSession) -> None:
        session = finished.session
        if session.state in (SessionState.DONE, SessionState.FAILED):
            record = SampleRecord.of_sample(task, finished.trajectory, sample=session.sample, attempt=session.attempt)
            await asyncio.to_thread(ledger.add, record)
            if on_progress is not None:
                on_progress(finished)

    missing = [left for left in map(ledger.missing, groups) if left]
    if missing:
        async with local_node(gateway, settings, ledger.folder, changed=changed) as node:
            for left in missing:
                # A ledger counts all samples: a group has none too many.
                await run_samples(node, [(task.model_copy(update={"min_samples": None}), n) for task, n in left], add)


def recipe_of(settings: Settings, model: str, template: str) -> dict[str, Any]:
    """What all samples of a ledger share: a folder with another recipe is not resumed."""
    return {
        "engine": settings.engine.kind,
        "model": model,
        "template": template,
        "session": settings.session.model_dump(mode="json"),
    }
