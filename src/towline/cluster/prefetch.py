"""What a node that joins prepares before its first session: installs, images and environments of tasks that run."""

from __future__ import annotations

import logging

from towline.cluster.remote_node import RemoteNode
from towline.common.mappings import BoundedDict
from towline.schema import Task

log = logging.getLogger("towline.cluster")
_SECONDS = 300.0
"""How long a new node prepares tasks before it gets sessions; the rest is prepared while they run."""
_ENVIRONMENTS = 16
"""Most environments that a new node prepares."""
_NODES = 10_000
"""Nodes that are remembered."""


class Prefetch:
    """The latest unfinished tasks, one per harness and environment."""

    def __init__(self) -> None:
        self._recent: BoundedDict[str, Task] = BoundedDict(_ENVIRONMENTS)
        self._prepared: BoundedDict[str, str] = BoundedDict(_NODES)
        """The process of each node that has prepared tasks: it does so once."""

    def add(self, task: Task) -> None:
        """A session of this task is about to run."""
        self._recent[task.model_dump_json(include={"harness", "harness_options", "environment"})] = task

    def forget(self, task_id: str) -> None:
        for key in [key for key, task in self._recent.items() if task.task_id == task_id]:
            self._recent.pop(key, None)

    async def prepare(self, node: RemoteNode) -> None:
        """Let a node that has just connected prepare the tasks, unless its process already has."""
        incarnation = node.hello["incarnation"]
        if not self._recent or self._prepared.get(node.name) == incarnation:
            return
        self._prepared[node.name] = incarnation
        for problem in await node.call_now("prefetch", tasks=list(self._recent.values()), seconds=_SECONDS):
            log.warning("node %s could not prepare task %s", node.name, problem)
