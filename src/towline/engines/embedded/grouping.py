"""Which single tokens attend together: a choice between few calls, little padding, and shared prefixes read once.

Sequences that begin with the same slots (a group's prompt, the system prompt of one harness) read them once if they attend
together; sequences of very different lengths pad each other. Costs are counted in slots read, with a fixed price for each
call, and the cheapest arrangement of a tree of shared prefixes is taken.

Invariant: every sequence is in one cluster, and all members of a cluster begin with the cluster's shared slots and have at
least one more.
"""

from __future__ import annotations

from dataclasses import dataclass

from towline.engines.embedded.batch import Indices

CALL = 1024
"""How many slots could be read in the time that one more call takes."""


@dataclass(slots=True)
class Cluster:
    members: list[int]
    shared: int
    """How many slots they all begin with and read once; 0 if that is not worth a call of its own."""


def arrange(table: Indices, rows: list[int], lengths: list[int]) -> list[Cluster]:
    """Clusters of the sequences in `rows` of `table`; members are indices into `rows`."""
    if len(rows) * max(lengths) <= 4 * CALL:
        return [Cluster(list(range(len(rows))), 0)]
    longest_first = sorted(range(len(rows)), key=lambda index: -lengths[index])
    return _by_prefix(table, rows, lengths, longest_first, 0)[1]


def _by_prefix(
    table: Indices, rows: list[int], lengths: list[int], members: list[int], known: int
) -> tuple[int, list[Cluster]]:
    """The cheapest arrangement of sequences of which `known` slots are known to be shared, longest first."""
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


def _by_length(lengths: list[int], members: list[int], shared: int) -> tuple[int, list[Cluster]]:
    """Cut a list, longest first, where padding would cost more than another call."""
    cost, used = _cost(len(members), lengths[members[0]], shared)
    cuts = (
        (_cost(at, lengths[members[0]], shared)[0] + _cost(len(members) - at, lengths[members[at]], shared)[0], at)
        for at in range(1, len(members))
    )
    apart, at = min(cuts, default=(cost, 0))
    if apart >= cost:
        return cost, [Cluster(members, used)]
    long, short = _by_length(lengths, members[:at], shared), _by_length(lengths, members[at:], shared)
    return long[0] + short[0], long[1] + short[1]


def _cost(count: int, longest: int, shared: int) -> tuple[int, int]:
    """The price of one cluster, and how many shared slots it should read apart."""
    padded = CALL + count * longest
    apart = 2 * CALL + shared + count * (longest - shared)
    return (apart, shared) if apart < padded else (padded, 0)
