"""Run what a ledger lacks: every sample of every task once, whatever interrupts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from towline import rollout
from towline.config import Settings
from towline.gateway.gateway import Gateway
from towline.ledger import Ledger, Sample
from towline.node.pipeline import Finished, Node
from towline.schema import Session, SessionState, Task


async def run_missing(
    node: Node, tasks: Sequence[Task], ledger: Ledger, told: Callable[[Finished], None] | None = None
) -> None:
    """Run the samples that have no line yet; each is in the ledger before the next thing is said of it.

    Cancelling it cancels the sessions under way; those have no line and are run again another time.
    """
    left = ledger.missing(tasks)
    of_task = Counter(task.task_id for task, _ in left)
    # More sessions at once than there is room for would only prepare their environments too early.
    room = asyncio.Semaphore(node.settings.run_workers + node.settings.ahead)

    async def one(task: Task, number: int) -> None:
        try:
            finished = await node.attempts(task, number)
            if finished.session.state in (SessionState.DONE, SessionState.FAILED):
                await asyncio.to_thread(ledger.add, sample_of(task, finished))
                if told is not None:
                    told(finished)
        finally:
            of_task[task.task_id] -= 1
            if not of_task[task.task_id]:
                node.preparer.forget(task)
            room.release()

    async with asyncio.TaskGroup() as group:
        for task, number in left:
            await room.acquire()
            group.create_task(one(task, number))


async def fill(
    gateway: Gateway,
    settings: Settings,
    groups: Sequence[Sequence[Task]],
    ledger: Ledger,
    *,
    changed: Callable[[Session], None] | None = None,
    told: Callable[[Finished], None] | None = None,
) -> None:
    """Run what the ledger lacks on a node in this process; nothing is started if it lacks nothing.

    Groups go one after the other: what a node prepares for a task is for one harness, and two groups may have the same
    tasks with different ones.
    """
    left = [tasks for tasks in groups if ledger.missing(tasks)]
    if left:
        async with rollout.node_on(gateway, settings, ledger.folder, changed=changed) as node:
            for tasks in left:
                await run_missing(node, tasks, ledger, told)


def sample_of(task: Task, finished: Finished) -> Sample:
    session = finished.session
    return Sample.of(task, finished.trajectory, sample=session.sample, attempt=session.attempt, usable=finished.usable)


def recipe_of(settings: Settings, model: str, template: str) -> dict[str, Any]:
    """What the tokens of all samples have in common: a folder that was begun otherwise is not gone on with."""
    return {
        "engine": settings.engine.kind,
        "model": model,
        "template": template,
        "session": settings.session.model_dump(mode="json"),
    }
