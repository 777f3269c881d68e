"""How much of the context differs from what a plain server would have shown the model, and in which turns.

Both directions count: tokens that only our prompt has, and tokens that only the plain server's has. A difference belongs
to the turn that added the tokens: as new messages and generation prompt, or as the reply that later turns see.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from towline.common.arrays import Ids
from towline.schema import Trace
from towline.tokens.graph.graph import GraphNode

_MAX_COMPARED = 65_536
"""Longest prompt, in tokens, that is compared."""
_ALIGNED_RUN = 8
"""Consecutive equal tokens at which two prompts count as aligned again."""
MAX_NAMED_TURNS = 100
"""Maximum number of turns that a report names."""


class DifferenceSpan(NamedTuple):
    """One range in which two prompts differ."""

    start: int
    """Position in our prompt."""
    ours: int
    """Tokens that only our prompt has."""
    theirs: int
    """Tokens that only the plain prompt has."""


@dataclass(slots=True)
class PlainDifference:
    """The differences of several prompts, summed."""

    total: int = 0
    different: int = 0
    turns: dict[str, None] = field(default_factory=dict)
    """Ids of the turns, each once, in the order found."""

    def add(self, ours: Ids, theirs: Ids) -> list[DifferenceSpan]:
        found = differences(ours, theirs)
        self.total += len(ours) + len(theirs)
        self.different += sum(span.ours + span.theirs for span in found)
        return found

    def name(self, turns: Iterable[GraphNode]) -> None:
        self.turns.update((turn.id, None) for turn in turns)

    @property
    def share(self) -> float | None:
        """Share of differing tokens of both sides; `None` if nothing was compared."""
        return self.different / self.total if self.total else None


def plain_difference(prompts: Mapping[GraphNode, Ids]) -> PlainDifference:
    """What a plain server would have rendered differently, given its prompts of some turns."""
    made = PlainDifference()
    for node, plain in prompts.items():
        if node.prompt_length <= _MAX_COMPARED:
            made.name(_turns_with(node, made.add(node.prompt(), plain)))
    return made


def stitched_difference(traces: Sequence[Trace], nodes: Sequence[GraphNode]) -> PlainDifference:
    """Which context of trained turns in stitched rows is not what the model saw."""
    by_index = {node.index: node for node in nodes}
    made = PlainDifference()
    for trace in traces:
        places = np.flatnonzero(np.diff(trace.turn_ids, prepend=-1) != 0)
        for place in places[trace.loss_mask[places] == 1]:
            node = by_index[int(trace.turn_ids[place])]
            if place <= _MAX_COMPARED and made.add(trace.token_ids[:place], node.prompt()):
                made.name([node])
    return made


def _turns_with(node: GraphNode, spans: Sequence[DifferenceSpan]) -> list[GraphNode]:
    """The turns on the path to `node` whose part of its prompt contains one of the spans, first to last."""
    path: list[GraphNode] = []
    turn: GraphNode | None = node
    while turn is not None:
        path.append(turn)
        turn = turn.parent
    path.reverse()
    starts = [turn.prompt_length - len(turn.suffix) for turn in path]
    found: dict[GraphNode, None] = {}
    for span in spans:
        # Tokens that only the plain prompt has come before `start`: between two turns they belong to the former.
        place = bisect_left(starts, span.start + (1 if span.ours else 0)) - 1
        last = bisect_left(starts, span.start + span.ours) - 1
        found.update((path[index], None) for index in range(max(place, 0), max(last, place, 0) + 1))
    return list(found)


def differences(ours: Ids, theirs: Ids) -> list[DifferenceSpan]:
    """Where two prompts differ, in order.

    After a difference the two are aligned again where a few consecutive tokens agree, skipping as little as possible on
    either side. Linear in the tokens, not quadratic: prompts are long and may differ often.
    """
    end = _common_prefix(ours[::-1], theirs[::-1])
    ours, theirs = ours[: len(ours) - end], theirs[: len(theirs) - end]
    places: dict[bytes, list[int]] = {}
    for place in range(len(theirs) - _ALIGNED_RUN + 1):
        places.setdefault(theirs[place : place + _ALIGNED_RUN].tobytes(), []).append(place)
    spans = []
    here = there = 0
    while here < len(ours) or there < len(theirs):
        run = _common_prefix(ours[here:], theirs[there:])
        here, there = here + run, there + run
        skipped, missed = _realign(ours, theirs, here, there, places)
        if skipped or missed:
            spans.append(DifferenceSpan(here, skipped, missed))
        here, there = here + skipped, there + missed
    return spans


def _common_prefix(ours: Ids, theirs: Ids) -> int:
    """How many leading tokens are equal."""
    length = min(len(ours), len(theirs))
    different = np.flatnonzero(ours[:length] != theirs[:length])
    return int(different[0]) if len(different) else length


def _realign(ours: Ids, theirs: Ids, here: int, there: int, places: Mapping[bytes, list[int]]) -> tuple[int, int]:
    """How many tokens to skip on both sides until they agree again; all that remain if they never do."""
    left = len(ours) - here
    found: tuple[int, int] | None = None
    for skipped in range(left - _ALIGNED_RUN + 1):
        if found is not None and skipped >= sum(found):
            break
        known = places.get(ours[here + skipped : here + skipped + _ALIGNED_RUN].tobytes(), ())
        at = bisect_left(known, there)
        if at < len(known) and (found is None or skipped + known[at] - there < sum(found)):
            found = skipped, known[at] - there
    return found or (left, len(theirs) - there)
