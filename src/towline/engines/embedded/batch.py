"""What one step computes, as plain arrays: the tokens, their positions, and the slots that each of them attends to; and
which single tokens attend together.

Attending together is a trade-off between few calls, little padding, and shared prefixes read once: sequences that begin
with the same slots (a group's prompt, the system prompt of one harness) read them once if they attend together; sequences
of very different lengths pad each other. Costs are counted in slots read, with a fixed cost per call, and the cheapest
clustering of a tree of shared prefixes is taken.

Invariants: tokens of one sequence have consecutive positions, and the slots a sequence attends to include those its own
tokens are written to in this step. Slot 0 is empty and only pads. Every sequence is in one cluster; all members of a
cluster begin with the cluster's shared slots and have at least one more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


@dataclass(slots=True)
class DecodeGroup:
    """Single tokens of several sequences, adjacent in the batch, that attend together."""

    start: int
    """Index of the first one in the batch."""
    stop: int
    prefix: Indices
    """Slots that all of them attend to first."""
    contexts: Indices
    """The slots that each of them attends to after those, one row each, padded with 0."""
    lengths: Indices
    """How many of each row are not padding; at least one, the token's own."""


@dataclass(slots=True)
class PrefillSpan:
    """Several consecutive tokens of one sequence."""

    start: int
    """Index of the first one in the batch."""
    stop: int
    past: Indices
    """The slots of the sequence before the first of these tokens."""


@dataclass(slots=True)
class StepBatch:
    """The tokens of one step: each is in one group or one span."""

    ids: Indices
    positions: Indices
    slots: Indices
    """Where the keys and values of each token are written."""
    groups: list[DecodeGroup]
    spans: list[PrefillSpan]


CALL_COST = 1024
"""How many slots can be read in the time of one more call."""


@dataclass(slots=True)
class DecodeCluster:
    """Sequences that attend together."""

    members: list[int]
    shared: int
    """How many leading slots they share and read once; 0 if that is not worth a call of its own."""


def cluster_decodes(table: Indices, rows: list[int], lengths: list[int]) -> list[DecodeCluster]:
    """Clusters of the sequences in `rows` of `table`; members are indices into `rows`."""
    if len(rows) * max(lengths) <= 4 * CALL_COST:
        return [DecodeCluster(list(range(len(rows))), 0)]
    longest_first = sorted(range(len(rows)), key=lambda index: -lengths[index])
    return _by_prefix(table, rows, lengths, longest_first, 0)[1]


def _by_prefix(
    table: Indices, rows: list[int], lengths: list[int], members: list[int], known: int
) -> tuple[int, list[DecodeCluster]]:
    """The cheapest clustering of sequences that share at least `known` slots, longest first."""
    end = lengths[members[-1]] - 1
    slots = table[[rows[member] for member in members], known:end]
    differing = (slots != slots[0]).any(axis=0)
    shared = known + (int(differing.argmax()) if differing.any() else end - known)
    best = _by_length(lengths, members, shared)
    if len(members) < 3:
        return best
    branches: dict[int, list[int]] = {}
    for member in members:
        branches.setdefault(int(table[rows[member], shared]), []).append(member)
    if len(branches) == len(members):
        return best
    parts = [_by_prefix(table, rows, lengths, branch, shared) for branch in branches.values()]
    apart = sum(cost for cost, _ in parts)
    return (apart, [cluster for _, clusters in parts for cluster in clusters]) if apart < best[0] else best


def _by_length(lengths: list[int], members: list[int], shared: int) -> tuple[int, list[DecodeCluster]]:
    """Split a list, longest first, where padding would cost more than another call."""
    cost, used = _cost(len(members), lengths[members[0]], shared)
    cuts = (
        (_cost(at, lengths[members[0]], shared)[0] + _cost(len(members) - at, lengths[members[at]], shared)[0], at)
        for at in range(1, len(members))
    )
    apart, at = min(cuts, default=(cost, 0))
    if apart >= cost:
        return cost, [DecodeCluster(members, used)]
    long, short = _by_length(lengths, members[:at], shared), _by_length(lengths, members[at:], shared)
    return long[0] + short[0], long[1] + short[1]


def _cost(count: int, longest: int, shared: int) -> tuple[int, int]:
    """The cost of one cluster, and how many shared slots it should read separately."""
    padded = CALL_COST + count * longest
    apart = 2 * CALL_COST + shared + count * (longest - shared)
    return (apart, shared) if apart < padded else (padded, 0)
