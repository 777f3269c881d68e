"""Who waits for which turn, and what becomes of a turn that nobody waits for.

A turn outlives the connection that asked for it. While somebody waits for it, it goes on; when the last one left before
it was delivered it is abandoned: a retry may pick it up, and without one its sampling ends after a grace. A request is a
retry only on evidence, since the same request sent again may as well ask for another sample.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from towline.conversation import Finish, Message, Request
from towline.tokens.graph import Node


class Waiting:
    """The waiting clients of one session's turns."""

    def __init__(self) -> None:
        self.abandoned: set[str] = set()
        """Turns that nobody waits for and nobody got."""
        self._clients: dict[str, int] = {}
        self._graces: dict[str, asyncio.TimerHandle] = {}

    def join(self, nodes: Sequence[Node]) -> None:
        """One more client waits for these turns."""
        for node in nodes:
            self._clients[node.id] = self._clients.get(node.id, 0) + 1
            self.abandoned.discard(node.id)
            grace = self._graces.pop(node.id, None)
            if grace is not None:
                grace.cancel()

    def leave(self, nodes: Sequence[Node], grace: float, end: Callable[[Node], None]) -> None:
        """A client waits no longer. A turn without one is abandoned; `end` is called if it still samples after `grace`."""
        for node in nodes:
            others = self._clients.pop(node.id, 1) - 1
            if others:
                self._clients[node.id] = others
            elif not node.delivered and node.finish is not Finish.ABORT:
                self.abandoned.add(node.id)
                if node.finish is None:
                    loop = asyncio.get_running_loop()
                    self._graces[node.id] = loop.call_later(grace, self._expire, node, end)

    def wanted(self, node: Node) -> bool:
        """Whether a client waits for the turn."""
        return node.id in self._clients

    def _expire(self, node: Node, end: Callable[[Node], None]) -> None:
        self._graces.pop(node.id, None)
        if node.finish is None:
            end(node)

    def close(self) -> None:
        for grace in self._graces.values():
            grace.cancel()
        self._graces.clear()

    def retried(self, request: Request, asked: dict[str, Any], same: Sequence[Node]) -> list[Node]:
        """The turns that `request` asks for again, one a choice; none if it is to be sampled.

        `same` are the turns of requests with the same messages under the same tools, oldest first; `asked` is what the
        request asks of the sampler.
        """
        alike = [node for node in reversed(same) if node.model == request.model and node.meta["requested"] == asked]
        for node in self._evidence(request, alike):
            if not _same_ids(node, request.messages):
                continue
            first = _first(node)
            choices = sorted((other for other in alike if _first(other) == first), key=lambda other: other.index)
            if len(choices) == request.sampling.n and all(other.finish is not Finish.ABORT for other in choices):
                return choices
        return []

    def _evidence(self, request: Request, alike: Sequence[Node]) -> Iterator[Node]:
        """Turns that the request may be a retry of, the best evidence first."""
        key, told = request.hints.idempotency_key, request.hints.retry
        if key:
            yield from (node for node in alike if node.hints.idempotency_key == key)
        yield from (node for node in alike if node.id in self.abandoned)
        if told:
            # Two keys that differ say that it is another request, whatever its retry count.
            others = [node for node in alike if not (key and node.hints.idempotency_key)]
            yield from (node for node in others if not node.delivered)
            yield from (node for node in others if node.delivered)


def _same_ids(node: Node, messages: Sequence[Message]) -> bool:
    """Whether the results in the request answer the very calls that they answered in the node's.

    Twins have the same words, and fingerprints; only the ids of their calls tell which of them a request goes on from.
    """
    end = len(messages)
    for turn in reversed(node.path()):
        start = max(0, end - len(turn.new))
        if [m.tool_call_id for m in messages[start:end]] != [m.tool_call_id for m in turn.new]:
            return False
        end = start - 1
        if end <= 0:
            break
    return True


def _first(node: Node) -> int:
    """The index of the first choice of the node's request."""
    return int(node.meta.get("first", node.index))
