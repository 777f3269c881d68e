"""What became of every model call of a session: answered, failed by the infrastructure, or neither.

A call that the engine failed and that the harness repeated until it was answered leaves no trace in the session. One that
was never answered makes everything after it a consequence of the failure: such a session says nothing about the policy.
Refusals that the policy or the harness brought about (a prompt over the context limit, a used-up quota) are no failures.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from towline.errors import TowlineError
from towline.schema import TRAINED_ROLES, TurnRole
from towline.tokens import roles
from towline.tokens.graph import Graph, Node

Identity = tuple[bytes, str]
"""What makes two calls the same: the fingerprint of the request and its root key."""


@dataclass(frozen=True, slots=True)
class FailedCall:
    """A model call that the infrastructure failed."""

    failure: str
    """A `FailureReason`."""
    error: str
    """What the engine answered, where there was an answer."""
    engine: str
    """The name of the engine that was asked."""
    identity: Identity | None
    """`None` if the call failed before it was understood."""
    node: Node | None
    at_fault: bool = False
    """The turn itself is held to be what makes the engine fail."""
    at: float = field(default_factory=time.monotonic)

    @property
    def text(self) -> str:
        what = "stalled" if self.failure == "stall" else "failed"
        return f"a model call of engine {self.engine} {what} and was never answered: {self.error}"


def identity_of(node: Node) -> Identity:
    return node.request_hash, node.key


def failure_of(error: BaseException) -> str:
    """The `FailureReason` that an error stands for."""
    return error.failure if isinstance(error, TowlineError) else "storage" if isinstance(error, OSError) else "internal"


class Calls:
    """The calls of one session, in the order in which they ended."""

    def __init__(self) -> None:
        self.failed: list[FailedCall] = []
        self._answered: dict[Identity, int] = {}
        """How many calls had failed when a call was last answered."""

    def answered(self, identity: Identity) -> None:
        self._answered[identity] = len(self.failed)

    def fail(self, call: FailedCall) -> None:
        self.failed.append(call)

    def unanswered(self, graph: Graph, instructions: Sequence[str], trained: Collection[TurnRole]) -> FailedCall | None:
        """The last failed call that mattered and that no repetition made good; None if there is none.

        A call matters in every role but `side`; in that one too if it is trained.
        """
        open_calls = [call for n, call in enumerate(self.failed) if not self._made_good(n, call)]
        if not open_calls:
            return None
        lost = frozenset(call.node for call in open_calls if call.node is not None)
        parts = roles.assign(graph, instructions, also=lost)
        matters = {*TRAINED_ROLES, *trained}
        for call in reversed(open_calls):
            part = parts.get(call.node) if call.node is not None else None
            if part is None or part.role in matters:
                return call
        return None

    def _made_good(self, number: int, call: FailedCall) -> bool:
        return call.identity is not None and self._answered.get(call.identity, 0) > number
