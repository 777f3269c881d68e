"""The mutation check: with a fault in the code under test, the audit must fail.

Each fault is patched into this process for one short audit and removed again; nothing in the product can enable it. A fault
is caught if the audit finds a violation that it does not find in the same conversations without the fault.
"""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from towline.schema import TurnRole
from towline.schema import turn as turns
from towline.schema.turn import TurnSampling
from towline.tokens.codec import EncodedPrompt
from towline.tokens.continuation.plan import PromptPlan
from towline.tokens.continuation.planner import Planner
from towline.tokens.graph import roles
from towline.tokens.graph.graph import Graph, GraphNode
from towline.tokens.templates.chat_template import ChatTemplate
from towline.tokens.templates.family import FamilyCodec
from towline.tokens.templates.sentinel import SentinelCodec
from towline.tokens.traces import builders

_MIN_MESSAGES = 4
"""Shortest history from which a message is dropped."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, and the conversations that it breaks."""

    name: str
    target: str
    behaviours: tuple[str, ...]
    enabled: Callable[[], Any]
    """A context manager that enables the fault."""


Audit = Callable[[Path, Sequence[str], Sequence[str]], Awaitable[set[str]]]
"""Runs a short audit into a folder, with these targets and behaviours; returns the violations."""


async def check_faults(audit: Audit, progress: Callable[[str], None]) -> dict[str, bool]:
    """Whether each fault is caught."""
    caught = {}
    with tempfile.TemporaryDirectory(prefix="towline-mutations-") as scratch:
        baseline: set[str] = set()
        for target in dict.fromkeys(fault.target for fault in FAULTS):
            played = [name for fault in FAULTS if fault.target == target for name in fault.behaviours]
            baseline |= await audit(Path(scratch) / target, (target,), played)
        for fault in FAULTS:
            progress(fault.name)
            with fault.enabled():
                violations = await audit(Path(scratch) / fault.name, (fault.target,), fault.behaviours)
            caught[fault.name] = bool(violations - baseline)
    return caught


@contextmanager
def _dropped_message() -> Iterator[None]:
    """The template gets all messages except one in the middle."""
    render = ChatTemplate.render

    def dropping(self: ChatTemplate, messages: Sequence[Mapping[str, Any]], *rest: Any, **options: Any) -> str:
        indices = [n for n, one in enumerate(messages[:-1]) if n and one["role"] in ("user", "tool")]
        if indices and len(messages) >= _MIN_MESSAGES:
            messages = [*messages[: indices[-1]], *messages[indices[-1] + 1 :]]
        return render(self, messages, *rest, **options)

    with mock.patch.object(ChatTemplate, "render", dropping):
        yield


@contextmanager
def _wrong_suffix() -> Iterator[None]:
    """A continuation lacks the last token of its prompt."""

    def shortened(encoded: EncodedPrompt) -> EncodedPrompt:
        return replace(encoded, ids=encoded.ids[:-1])

    with _extending(shortened):
        yield


@contextmanager
def _extending(change: Callable[[EncodedPrompt], EncodedPrompt]) -> Iterator[None]:
    def wrapped(extend: Any) -> Any:
        return lambda self, *rest, **options: change(extend(self, *rest, **options))

    with (
        mock.patch.object(SentinelCodec, "extend", wrapped(SentinelCodec.extend)),
        mock.patch.object(FamilyCodec, "extend", wrapped(FamilyCodec.extend)),
    ):
        yield


@contextmanager
def _stale_seam_id() -> Iterator[None]:
    """Tool results are shown with the id of the first call that was ever continued."""
    extend = SentinelCodec.extend
    first: list[str] = []

    def stale(
        self: SentinelCodec, before: Any, reply: Any, tail: Any, sampled: Any, new: Any, *rest: Any, **kw: Any
    ) -> Any:
        first.extend(message.tool_call_id for message in new if message.role == "tool")
        shown = [replace(one, tool_call_id=first[0]) if one.role == "tool" else one for one in new]
        return extend(self, before, reply, tail, sampled, shown, *rest, **kw)

    with mock.patch.object(SentinelCodec, "extend", stale):
        yield


@contextmanager
def _single_temperature() -> Iterator[None]:
    """All tokens of a row have the temperature of its last turn."""
    right = turns.of_turns

    def single(
        turn_ids: npt.NDArray[np.int32], settings: Mapping[int, TurnSampling]
    ) -> tuple[npt.NDArray[np.float32], list[TurnSampling]]:
        last = settings[max(settings)].temperature if settings else 1.0
        return right(turn_ids, {index: one.model_copy(update={"temperature": last}) for index, one in settings.items()})

    with mock.patch.object(turns, "of_turns", single), mock.patch.object(builders, "of_turns", single):
        yield


@contextmanager
def _lost_role() -> Iterator[None]:
    """Every conversation but the first is a sub-agent's."""
    right = roles.assign_roles

    def lost(graph: Graph, *rest: Any, **options: Any) -> dict[GraphNode, roles.RoleAssignment]:
        found = right(graph, *rest, **options)
        first = graph.nodes[0].root if graph.nodes else None
        return {
            node: part
            if node.root is first or part.role is TurnRole.DISCARDED
            else replace(part, role=TurnRole.SUBAGENT)
            for node, part in found.items()
        }

    with mock.patch.object(roles, "assign_roles", lost):
        yield


@contextmanager
def _swapped_branches() -> Iterator[None]:
    """A request continues another answer to the same question."""
    right = Planner.plan

    def swapped(self: Planner, graph: Graph, *rest: Any, **options: Any) -> PromptPlan:
        plan = right(self, graph, *rest, **options)
        parent = plan.parent
        if parent is not None:
            twins = [
                node
                for node in graph.nodes
                if node is not parent and node.finish is not None and node.request_hash == parent.request_hash
            ]
            plan.parent = twins[0] if twins else parent
        return plan

    with mock.patch.object(Planner, "plan", swapped):
        yield


FAULTS = (
    Fault("dropped_message", "llama3_2", ("unsampled_replies", "task_edited"), _dropped_message),
    Fault("wrong_suffix", "llama3_2", ("verbatim",), _wrong_suffix),
    Fault("stale_seam_id", "mistral_nemo", ("content_null",), _stale_seam_id),
    Fault("single_temperature", "llama3_2", ("temperatures",), _single_temperature),
    Fault("lost_role", "llama3_2", ("side_call",), _lost_role),
    Fault("swapped_branches", "llama3_2", ("twins",), _swapped_branches),
)
