"""What nodes tell about themselves: status, metrics, logs, probes and circuit breakers.

A node that does not answer in time is left out. The breakers of all nodes are one per component: open only if no node can
use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prometheus_client import Metric

from towline.cluster import wire
from towline.cluster.placement import Placement
from towline.cluster.remote_node import RemoteNode
from towline.cluster.runner import LogNotFound, NodeLost, SessionLog
from towline.schema import BreakerStatus

NODES = "nodes"
"""The component whose breaker is open while no node can be reached."""
_STATUS_SECONDS = 2.0
"""How long the status of a node may take; a busy node is shown with its latest report."""
_LOG_SECONDS = 5.0
"""How long a node may take to read a log file."""


async def statuses(nodes: Sequence[RemoteNode], placement: Placement) -> list[dict[str, Any]]:
    return list(await asyncio.gather(*(_status(node, placement) for node in nodes)))


async def _status(node: RemoteNode, placement: Placement) -> dict[str, Any]:
    if node.connected:
        with contextlib.suppress(TimeoutError, NodeLost):
            async with asyncio.timeout(_STATUS_SECONDS):
                node.status = await node.call("status")
    return {
        **node.status,
        "name": node.name,
        "connected": node.connected,
        "unusable": placement.unusable(node.name) if node.connected else node.lost or "disconnected",
        "labels": dict(node.address.labels),
        "pid": node.hello.get("pid"),
        "host": node.hello.get("host"),
    }


async def metrics(nodes: Sequence[RemoteNode]) -> Iterable[Metric]:
    calls = (asyncio.wait_for(node.call("metrics"), _STATUS_SECONDS) for node in nodes)
    found = await asyncio.gather(*calls, return_exceptions=True)
    answers = {node.name: one for node, one in zip(nodes, found, strict=True) if not isinstance(one, BaseException)}
    return wire.merge_metrics(answers)


async def read_log(nodes: Sequence[RemoteNode], session_id: str, name: str, most: int) -> SessionLog:
    """The last bytes of a session's log file on the node that has it; raises `LogNotFound`."""
    names: list[str] = []
    for node in nodes:
        try:
            async with asyncio.timeout(_LOG_SECONDS):
                found = await node.call("read_log", session_id=session_id, name=name, most=most)
        except LogNotFound as error:
            names += error.names
        except (NodeLost, TimeoutError):
            continue
        else:
            return SessionLog(found["data"].encode("latin-1"), found["left_out"], found["names"])
    raise LogNotFound(sorted(names))


async def probe(nodes: Sequence[RemoteNode]) -> list[str]:
    """The problems of all nodes; with more than one node, each line names its node."""
    found = await asyncio.gather(*(_probe(node) for node in nodes))
    if len(nodes) == 1:
        return found[0]
    return [f"{node.name}: {line}" for node, lines in zip(nodes, found, strict=True) for line in lines]


async def _probe(node: RemoteNode) -> list[str]:
    try:
        return list(await node.call("probe"))
    except NodeLost as error:
        return [str(error)]


class FleetBreakers:
    """Merges the breakers of the nodes, and has one for the nodes themselves."""

    def __init__(self) -> None:
        self.on_change: Callable[[BreakerStatus], None] = lambda status: None
        self._down = BreakerStatus(component=NODES, open=False)
        self._merged: dict[str, BreakerStatus] = {}

    @property
    def all(self) -> Sequence[BreakerStatus]:
        return [*self._merged.values(), *([self._down] if self._down.opened else [])]

    def update(self, nodes: Sequence[RemoteNode]) -> None:
        """Merge the breakers of these nodes, which are all that are connected."""
        names = dict.fromkeys(name for node in nodes for name in node.breakers)
        for name in names:
            found = [node.breakers[name] for node in nodes if name in node.breakers]
            best = next((one for one in found if not one.open), found[0])
            # A node without this breaker has never had a problem with the component.
            down = best.open and len(found) == len(nodes)
            status = best.model_copy(update={"open": down, "opened": sum(one.opened for one in found)})
            if self._merged.get(name) != status:
                self._merged[name] = status
                self.on_change(status)

    def set_down(self, down: bool) -> None:
        """Record whether no node is connected."""
        if down != self._down.open:
            reason = "no node is connected" if down else self._down.reason
            opened = self._down.opened + down
            self._down = BreakerStatus(component=NODES, open=down, reason=reason, since=time.time(), opened=opened)
            self.on_change(self._down)
