"""One policy over all nodes: pauses, resumes and weight updates reach every node, those that connect later too.

Engines inside the nodes load new weights on each node. Engines that all nodes share are updated by one node while the
others are paused: no node may stamp a token with a version that its replica does not have.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from towline.cluster.remote_node import RemoteNode
from towline.cluster.runner import NodeLost
from towline.engines.base import PauseMode
from towline.errors import EngineError

log = logging.getLogger("towline.cluster")


@dataclass(slots=True)
class _Wanted:
    """What every node is brought to; empty fields were never set."""

    version: int | None = None
    folder: Path | None = None
    announced: bool = False
    """Whether the weights were pushed by a trainer: then the engines may be further than this version."""
    paused: bool = False


class FleetPolicy:
    """Keeps the nodes at one version, paused or not. `nodes` returns those that are connected."""

    def __init__(self, nodes: Callable[[], list[RemoteNode]], *, shared: bool):
        self._nodes = nodes
        self._shared = shared
        self._wanted = _Wanted()
        self._changing = asyncio.Lock()

    @property
    def version(self) -> int:
        if self._wanted.version is not None:
            return self._wanted.version
        return max((node.version for node in self._nodes()), default=0)

    async def apply(self, node: RemoteNode) -> None:
        """Bring a node that has just connected to the policy of the others, which may change meanwhile."""
        version = node.version
        while True:
            wanted = replace(self._wanted)
            if wanted.version is not None and version != wanted.version:
                if wanted.announced and version > wanted.version:
                    pass  # The trainer has pushed weights that it has not announced yet.
                elif wanted.folder is not None and not self._shared:
                    await node.call_now("update_weights", folder=str(wanted.folder), version=wanted.version)
                else:
                    await node.call_now("resume", version=wanted.version)
                version = wanted.version
            if wanted.paused:
                await node.call_now("pause", mode=PauseMode.ABORT.value, deadline=None)
            if wanted == self._wanted:
                return

    async def pause(self, mode: PauseMode, deadline: float | None) -> None:
        async with self._changing:
            self._wanted.paused = True
            await self._all("pause", mode=mode.value, deadline=deadline)

    async def resume(self, version: int | None) -> None:
        async with self._changing:
            self._wanted.paused = False
            if version is not None:
                self._wanted.version, self._wanted.folder, self._wanted.announced = version, None, False
            await self._all("resume", version=version)

    async def announce(self, version: int | None) -> int:
        async with self._changing:
            nodes = self._nodes()
            if not nodes:
                raise EngineError("no node is connected")
            reached = await _each(nodes, "announce", version=version)
            announced = max((int(one) for one in reached if one is not None), default=version or 0)
            self._wanted.version, self._wanted.folder, self._wanted.announced = announced, None, True
            for late in [node for node in self._nodes() if node not in nodes]:
                await self.apply(late)
            return announced

    async def update_weights(self, folder: Path, version: int) -> None:
        async with self._changing:
            nodes = self._nodes()
            if not nodes:
                raise EngineError("no node is connected")
            if self._shared and len(nodes) > 1:
                await self._update_shared(nodes, folder, version)
            else:
                await self._all("update_weights", folder=str(folder), version=version)
            self._wanted.version, self._wanted.folder, self._wanted.announced = version, folder, False
            for late in [node for node in self._nodes() if node not in nodes]:
                await self.apply(late)

    async def _update_shared(self, nodes: list[RemoteNode], folder: Path, version: int) -> None:
        first, *others = nodes
        await _each(others, "pause", mode=PauseMode.ABORT.value, deadline=None)
        updated = False
        try:
            await first.call("update_weights", folder=str(folder), version=version)
            updated = True
        finally:
            await _each(others, "resume", version=version if updated else None)
            if self._wanted.paused:
                await _each(others, "pause", mode=PauseMode.ABORT.value, deadline=None)

    async def _all(self, name: str, /, **args: object) -> None:
        await _each(self._nodes(), name, **args)


async def _each(nodes: list[RemoteNode], name: str, /, **args: object) -> list[Any]:
    """Call every node; returns their answers. A node that is lost meanwhile is brought up to date when it returns."""
    outcomes = await asyncio.gather(*(node.call(name, **args) for node in nodes), return_exceptions=True)
    for node, outcome in zip(nodes, outcomes, strict=True):
        if isinstance(outcome, NodeLost):
            log.warning("node %s was lost during %s", node.name, name)
        elif isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
