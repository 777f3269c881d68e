"""The model calls of a session: which are in flight, who waits for them, and how each ended.

A turn outlives the connection that asked for it. While a client waits, it runs to its end. When the last client
disconnects before delivery, the turn is abandoned: a retry may pick it up, and without one its sampling ends after a grace
period. A request is a retry only on evidence, because an identical request may just as well ask for another sample.

A call that the engine failed and that the harness repeated until it was answered leaves no trace in the session. A call that
was never answered makes everything after it a consequence of the failure: such a session says nothing about the policy.
Refusals that the policy or the harness caused (a prompt over the context limit, an exhausted quota) are not failures.

When a harness ends, or gives up on a turn, the turn tells who is responsible. A token that still arrives shows an engine
at work: the harness ran out of patience or time, which is attributed to the policy. Silence up to the stall limit, or an
engine on hold, shows that the policy had no chance.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from towline.conversation import Finish, Message, Request
from towline.errors import TowlineError
from towline.schema import TRAINED_ROLES, TurnRole
from towline.tokens.graph import roles
from towline.tokens.graph.graph import Graph, GraphNode

CallIdentity = tuple[bytes, str]
"""What makes two calls the same: the fingerprint of the request and its root key."""


@dataclass(frozen=True, slots=True)
class FailedCall:
    """A model call that the infrastructure failed."""

    failure: str
    """A `FailureReason`."""
    error: str
    """The engine's own message, if it sent one."""
    engine: str
    """The name of the engine."""
    identity: CallIdentity | None
    """`None` if the call failed before it was parsed."""
    node: GraphNode | None
    at_fault: bool = False
    """The turn itself is considered the cause of the engine's failure."""
    at: float = field(default_factory=time.monotonic)

    @property
    def text(self) -> str:
        what = "stalled" if self.failure == "stall" else "failed"
        return f"a model call of engine {self.engine} {what} and was never answered: {self.error}"


def call_identity(node: GraphNode) -> CallIdentity:
    return node.request_hash, node.key


def failure_reason(error: BaseException | None) -> str:
    """The `FailureReason` of an error."""
    return error.failure if isinstance(error, TowlineError) else "storage" if isinstance(error, OSError) else "internal"


class CallLog:
    """The model calls of one session, in the order in which they ended."""

    def __init__(self) -> None:
        self.failed: list[FailedCall] = []
        self._answered: dict[CallIdentity, int] = {}
        """How many calls had failed when a call was last answered."""

    def answered(self, identity: CallIdentity) -> None:
        self._answered[identity] = len(self.failed)

    def fail(self, call: FailedCall) -> None:
        self.failed.append(call)

    def unanswered(self, graph: Graph, instructions: Sequence[str], trained: Collection[TurnRole]) -> FailedCall | None:
        """The last failed call that mattered and that no retry made up for; None if there is none.

        A call matters in every role except `side`, and in that one too if it is trained.
        """
        open_calls = [call for n, call in enumerate(self.failed) if not self._was_retried(n, call)]
        if not open_calls:
            return None
        lost = frozenset(call.node for call in open_calls if call.node is not None)
        parts = roles.assign_roles(graph, instructions, also=lost)
        matters = {*TRAINED_ROLES, *trained}
        for call in reversed(open_calls):
            part = parts.get(call.node) if call.node is not None else None
            if part is None or part.role in matters:
                return call
        return None

    def _was_retried(self, number: int, call: FailedCall) -> bool:
        return call.identity is not None and self._answered.get(call.identity, 0) > number


class InflightTurns:
    """Which clients wait for which turns of a session, and which request is a retry."""

    def __init__(self) -> None:
        self.abandoned: set[str] = set()
        """Turns without a waiting client that were not delivered."""
        self._clients: dict[str, int] = {}
        self._graces: dict[str, asyncio.TimerHandle] = {}

    def join(self, nodes: Sequence[GraphNode]) -> None:
        """One more client waits for these turns."""
        for node in nodes:
            self._clients[node.id] = self._clients.get(node.id, 0) + 1
            self.abandoned.discard(node.id)
            grace = self._graces.pop(node.id, None)
            if grace is not None:
                grace.cancel()

    def leave(self, nodes: Sequence[GraphNode], grace: float, end: Callable[[GraphNode], None]) -> None:
        """A client stops waiting. A turn without clients is abandoned; `end` is called if it still samples after `grace`."""
        for node in nodes:
            others = self._clients.pop(node.id, 1) - 1
            if others:
                self._clients[node.id] = others
            elif not node.delivered and node.finish is not Finish.ABORT:
                self.abandoned.add(node.id)
                if node.finish is None:
                    loop = asyncio.get_running_loop()
                    self._graces[node.id] = loop.call_later(grace, self._expire, node, end)

    def has_client(self, node: GraphNode) -> bool:
        """Whether a client waits for the turn."""
        return node.id in self._clients

    def _expire(self, node: GraphNode, end: Callable[[GraphNode], None]) -> None:
        self._graces.pop(node.id, None)
        if node.finish is None:
            end(node)

    def close(self) -> None:
        for grace in self._graces.values():
            grace.cancel()
        self._graces.clear()

    def retried(self, request: Request, requested: dict[str, Any], same: Sequence[GraphNode]) -> list[GraphNode]:
        """The turns that `request` is a retry of, one per choice; empty if the request has to be sampled.

        `same` are the turns of requests with the same messages and tools, oldest first; `requested` is the sampling that
        the request asks for.
        """
        alike = [node for node in reversed(same) if node.model == request.model and node.meta["requested"] == requested]
        for node in self._evidence(request, alike):
            if not _same_call_ids(node, request.messages):
                continue
            first = _first(node)
            choices = sorted((other for other in alike if _first(other) == first), key=lambda other: other.index)
            if len(choices) == request.sampling.n and all(other.finish is not Finish.ABORT for other in choices):
                return choices
        return []

    def _evidence(self, request: Request, alike: Sequence[GraphNode]) -> Iterator[GraphNode]:
        """Turns that the request may be a retry of, best evidence first."""
        key, is_retry = request.hints.idempotency_key, request.hints.retry
        if key:
            yield from (node for node in alike if node.hints.idempotency_key == key)
        yield from (node for node in alike if node.id in self.abandoned)
        if is_retry:
            # Different idempotency keys mean another request, whatever its retry count.
            others = [node for node in alike if not (key and node.hints.idempotency_key)]
            yield from (node for node in others if not node.delivered)
            yield from (node for node in others if node.delivered)


def _same_call_ids(node: GraphNode, messages: Sequence[Message]) -> bool:
    """Whether the tool results in the request answer the same calls as in the node's request.

    Identical turns have the same text and fingerprints; only their call ids tell which of them a request continues.
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


def _first(node: GraphNode) -> int:
    """The index of the first choice of the node's request."""
    return int(node.meta.get("first", node.index))
