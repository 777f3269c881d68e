"""The circuit breakers of all nodes as one per component: open only if no node can use it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from towline.cluster.remote_node import RemoteNode
from towline.schema import BreakerStatus

NODES = "nodes"
"""The component whose breaker is open while no node can be reached."""


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
