"""How much of its context the model saw otherwise than a plain server would have shown it, and in which turns.

Both directions count: tokens that only our prompt has, and tokens that only the plain server's has. A difference belongs
to the turn that brought its place: as new messages and generation prompt, or as the reply that later turns see.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from towline.arrays import Ids
from towline.schema import Trace
from towline.tokens.graph import Node

_COMPARED = 65_536
"""Longest prompt whose difference from a plain server's is measured."""
_ROW = 8
"""Tokens in a row that are no coincidence."""
MOST_NAMED = 100
"""Turns that a report names."""


class Span(NamedTuple):
    """One place where two prompts differ."""

    start: int
    """In ours."""
    ours: int
    """Tokens that only ours has there."""
    theirs: int
    """Tokens that only theirs has there."""


@dataclass(slots=True)
class PlainDifference:
    """The differences of several prompts together."""

    total: int = 0
    different: int = 0
    turns: dict[str, None] = field(default_factory=dict)
    """Ids of turns, each once, in the order found."""

    def add(self, ours: Ids, theirs: Ids) -> list[Span]:
        found = differences(ours, theirs)
        self.total += len(ours) + len(theirs)
        self.different += sum(span.ours + span.theirs for span in found)
        return found

    def name(self, turns: Iterable[Node]) -> None:
        self.turns.update((turn.id, None) for turn in turns)

    @property
    def share(self) -> float | None:
        """Of the tokens of both sides; `None` if nothing was compared."""
        return self.different / self.total if self.total else None


def plain_difference(prompts: Mapping[Node, Ids]) -> PlainDifference:
    """What a plain server would have rendered differently, given its prompts for some turns."""
    made = PlainDifference()
    for node, plain in prompts.items():
        if node.prompt_length <= _COMPARED:
            made.name(_turns(node, made.add(node.prompt(), plain)))
    return made


def stitched_difference(traces: Sequence[Trace], nodes: Sequence[Node]) -> PlainDifference:
    """What of the context of trained turns, in the stitched rows, is not what the model saw."""
    by_index = {node.index: node for node in nodes}
    made = PlainDifference()
    for trace in traces:
        places = np.flatnonzero(np.diff(trace.turn_ids, prepend=-1) != 0)
        for place in places[trace.loss_mask[places] == 1]:
            node = by_index[int(trace.turn_ids[place])]
            if place <= _COMPARED and made.add(trace.token_ids[:place], node.prompt()):
                made.name([node])
    return made


def _turns(node: Node, spans: Sequence[Span]) -> list[Node]:
    """The turns on the way to `node` whose part of its prompt holds one of the spans, first to last."""
    path: list[Node] = []
    turn: Node | None = node
    while turn is not None:
        path.append(turn)
        turn = turn.parent
    path.reverse()
    starts = [turn.prompt_length - len(turn.suffix) for turn in path]
    found: dict[Node, None] = {}
    for span in spans:
        # What only theirs has stands before the token at `start`: between a turn and the next it is the former's.
        place = bisect_left(starts, span.start + (1 if span.ours else 0)) - 1
        last = bisect_left(starts, span.start + span.ours) - 1
        found.update((path[index], None) for index in range(max(place, 0), max(last, place, 0) + 1))
    return list(found)


def differences(ours: Ids, theirs: Ids) -> list[Span]:
    """Where two prompts differ, in order.

    After a difference the two are brought together again where a few tokens in a row agree, with as little left out on
    either side as can be. The work grows with the tokens, not with their square: prompts are long and may differ often.
    """
    end = _agree(ours[::-1], theirs[::-1])
    ours, theirs = ours[: len(ours) - end], theirs[: len(theirs) - end]
    places: dict[bytes, list[int]] = {}
    for place in range(len(theirs) - _ROW + 1):
        places.setdefault(theirs[place : place + _ROW].tobytes(), []).append(place)
    spans = []
    here = there = 0
    while here < len(ours) or there < len(theirs):
        run = _agree(ours[here:], theirs[there:])
        here, there = here + run, there + run
        skipped, missed = _nearest(ours, theirs, here, there, places)
        if skipped or missed:
            spans.append(Span(here, skipped, missed))
        here, there = here + skipped, there + missed
    return spans


def _agree(ours: Ids, theirs: Ids) -> int:
    """How many leading tokens are the same."""
    length = min(len(ours), len(theirs))
    different = np.flatnonzero(ours[:length] != theirs[:length])
    return int(different[0]) if len(different) else length


def _nearest(ours: Ids, theirs: Ids, here: int, there: int, places: Mapping[bytes, list[int]]) -> tuple[int, int]:
    """How many tokens to leave out on both sides until they agree again; all that are left if they never do."""
    left = len(ours) - here
    found: tuple[int, int] | None = None
    for skipped in range(left - _ROW + 1):
        if found is not None and skipped >= sum(found):
            break
        known = places.get(ours[here + skipped : here + skipped + _ROW].tobytes(), ())
        at = bisect_left(known, there)
        if at < len(known) and (found is None or skipped + known[at] - there < sum(found)):
            found = skipped, known[at] - there
    return found or (left, len(theirs) - there)
