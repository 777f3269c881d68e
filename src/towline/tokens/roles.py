"""Which part each conversation of a session plays.

Roles are relative to the session as a whole and are settled when it is built: `main` is the root that carries the task's
instruction, else the one with most sampled tokens. Headers that a harness sends take precedence over shape. A turn that
was never delivered, and that nothing continues, is `discarded` whatever its conversation. What a frozen engine was asked
is `side`, or a sub-agent or a compaction by its headers and lineage.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from towline.schema import ForkReason, TurnRole, Untrained
from towline.tokens.graph import Graph, Node

_GOES_ON = (None, ForkReason.IMAGE_UNREPORTED)
"""Reasons of turns that simply go on, though their prompts are made anew."""


def assign(graph: Graph, instruction: str = "", *, also: Collection[Node] = ()) -> dict[Node, TurnRole]:
    """A role for every finished turn. Those in `also` get the role that they had if they were delivered."""
    trees: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if node.finish is not None:
            trees.setdefault(node.root, []).append(node)
    if not trees:
        return {}
    # What was rendered anew has no parent, but it went on all the same.
    went_on = {n.parent or n.origin for n in graph.nodes if n.parent is not None or n.reason in _GOES_ON}
    seen = {node for nodes in trees.values() for node in nodes if node.delivered or node in went_on or node in also}
    candidates = {root: nodes for root, nodes in trees.items() if not seen.isdisjoint(nodes)} or trees
    # What another engine was asked is never what the session is about, unless nothing else was.
    main = _main({root: nodes for root, nodes in candidates.items() if not _frozen(root)} or candidates, instruction)
    compacted = {n.origin.root for n in graph.nodes if n.reason is ForkReason.COMPACTION and n.origin is not None}
    by_root: dict[Node, TurnRole] = {}
    for root in trees:
        by_root[root] = TurnRole.MAIN if root is main else _role(root, main, by_root, root in compacted)
    return {
        node: _in_tree(node, main, by_root[root]) if node in seen else TurnRole.DISCARDED
        for root, nodes in trees.items()
        for node in nodes
    }


def _frozen(root: Node) -> bool:
    return root.untrained is Untrained.FROZEN


def _main(trees: dict[Node, list[Node]], instruction: str) -> Node:
    wanted = instruction.strip()
    if wanted:
        carriers = [r for r in trees if any(m.role == "user" and wanted in m.text for m in r.new)]
        # A title call quotes the instruction, and a sub-agent may be handed it.
        carriers.sort(key=lambda root: (bool(root.hints.parent_session), not root.has_tools))
        if carriers:
            return carriers[0]
    return max(trees, key=lambda root: (root.has_tools, _sampled(trees[root])))


def _sampled(nodes: Sequence[Node]) -> int:
    return sum(len(node.sampled) for node in nodes)


def _in_tree(node: Node, main: Node, role: TurnRole) -> TurnRole:
    """A sub-agent may go on from its parent's history: its turns say so themselves."""
    return TurnRole.SUBAGENT if _is_subagent(node, main) else role


def _is_subagent(node: Node, main: Node) -> bool:
    hints, own = node.hints, main.hints
    return bool(hints.agent and hints.agent != own.agent) or bool(
        hints.parent_session and hints.parent_session != own.parent_session
    )


def _role(root: Node, main: Node, known: dict[Node, TurnRole], compacted: bool) -> TurnRole:
    """`compacted` says that a later root is the summary of this one."""
    if _is_subagent(root, main):
        return TurnRole.SUBAGENT
    if root.reason is ForkReason.COMPACTION:
        return TurnRole.COMPACTION
    shares_history = root.reason is ForkReason.TOOLS_CHANGED and not root.origin_inferred
    if shares_history and root.origin is not None:
        if compacted and not root.has_tools:
            return TurnRole.COMPACTION
        if root.has_tools or not main.has_tools:
            return known.get(root.origin.root, TurnRole.MAIN)
    if _frozen(root) or (main.has_tools and (not root.has_tools or (root.model and root.model != main.model))):
        return TurnRole.SIDE
    return TurnRole.SUBAGENT
