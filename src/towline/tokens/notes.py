"""What a reader of a session must know about its training signal: tokens that go untrained, and roots that match nothing.

Counts go into the fidelity report, sentences into the trajectory's notes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from towline.schema import POLICY, FidelityReport, ForkReason, Trace, TurnRole
from towline.tokens.graph import Node

_NAMED = 5
"""Turns that a note names; it counts the others."""


_MAIN = (TurnRole.MAIN, TurnRole.COMPACTION)
END_OF_TURN = "end_of_turn"
"""Why the last tokens of a turn are not trained: the harness wrote on behind the reply."""


def trained_tokens(traces: Sequence[Trace]) -> dict[int, int]:
    """How many tokens of each turn, by its index, the rows train."""
    trained: dict[int, int] = {}
    for trace in traces:
        indices, sizes = np.unique(trace.turn_ids[trace.loss_mask == 1], return_counts=True)
        for index, size in zip(indices.tolist(), sizes.tolist(), strict=True):
            trained[index] = trained.get(index, 0) + size
    return trained


def counts(nodes: Sequence[Node], roles: Mapping[Node, TurnRole], trained: Mapping[int, int]) -> dict[str, Any]:
    """The fields of a fidelity report about what is trained, by turn, and what is not."""
    untrained: dict[str, int] = {}
    for node in nodes:
        left = len(node.sampled) - trained.get(node.index, 0)
        if node.engine == POLICY and left > 0:
            why = END_OF_TURN if trained.get(node.index) else str(node.untrained or roles[node])
            untrained[why] = untrained.get(why, 0) + left
    return {
        "untrained_tokens": untrained,
        "main_tokens": sum(trained.get(node.index, 0) for node in nodes if roles[node] in _MAIN),
        "unmatched": sum(node.reason is ForkReason.UNMATCHED for node in nodes),
    }


def about(nodes: Sequence[Node], roles: Mapping[Node, TurnRole], report: FidelityReport) -> list[str]:
    """The notes of a session."""
    notes: list[str] = []
    left = report.untrained_tokens
    if left:
        total = sum(left.values())
        whole = sum(len(node.sampled) for node in nodes if node.engine == POLICY)
        why = ", ".join(f"{name} {count:,}" for name, count in sorted(left.items()))
        notes.append(f"{total:,} of {whole:,} sampled tokens are not trained: {why}")
    others = report.trained_tokens - report.main_tokens
    if others > report.main_tokens:
        notes.append(f"main trains {report.main_tokens:,} tokens, the other roles {others:,}")
    unmatched = [node for node in nodes if node.reason is ForkReason.UNMATCHED]
    notes += [_unmatched(node, roles[node]) for node in unmatched[:_NAMED]]
    if len(unmatched) > _NAMED:
        notes.append(f"{len(unmatched) - _NAMED:,} further requests match no conversation")
    return notes


def _unmatched(node: Node, role: TurnRole) -> str:
    what = node.difference
    note = f"turn {node.index} ({role}) matches no conversation"
    if not what:
        return note
    return (
        f"{note}: message {what['message']} differs from turn {what['turn']}: {what['was']!r} became {what['sent']!r}"
    )
