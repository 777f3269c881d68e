"""Which part each conversation of a session plays.

Roles are relative to the session as a whole and are settled when it is built: `main` is the root that carries the task's
instruction, else the one with most sampled tokens. Headers that a harness sends take precedence over shape. A turn that
was never delivered, and that nothing continues, is `discarded` whatever its conversation.
"""

from __future__ import annotations

from collections.abc import Sequence

from towline.schema import ForkReason, TurnRole
from towline.tokens.graph import Graph, Node


def assign(graph: Graph, instruction: str = "") -> dict[Node, TurnRole]:
    """A role for every finished turn."""
    trees: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if node.finish is not None:
            trees.setdefault(node.root, []).append(node)
    if not trees:
        return {}
    main = _main(trees, instruction)
    by_root: dict[Node, TurnRole] = {}
    for root in trees:
        by_root[root] = TurnRole.MAIN if root is main else _role(root, main, by_root)
    return {
        node: by_root[root] if node.delivered or node.children else TurnRole.DISCARDED
        for root, nodes in trees.items()
        for node in nodes
    }


def _main(trees: dict[Node, list[Node]], instruction: str) -> Node:
    wanted = instruction.strip()
    if wanted:
        for root in trees:
            if any(message.role == "user" and wanted in message.text for message in root.new):
                return root
    return max(trees, key=lambda root: (root.has_tools, _sampled(trees[root])))


def _sampled(nodes: Sequence[Node]) -> int:
    return sum(len(node.sampled) for node in nodes)


def _role(root: Node, main: Node, known: dict[Node, TurnRole]) -> TurnRole:
    hints = root.hints
    if (hints.agent and hints.agent != main.hints.agent) or hints.parent_session:
        return TurnRole.SUBAGENT
    if root.reason is ForkReason.COMPACTION:
        return TurnRole.COMPACTION
    shares_history = root.reason is ForkReason.TOOLS_CHANGED and not root.origin_inferred
    if shares_history and root.origin is not None:
        return TurnRole.COMPACTION if not root.has_tools else known.get(root.origin.root, TurnRole.MAIN)
    if main.has_tools and (not root.has_tools or (root.model and root.model != main.model)):
        return TurnRole.SIDE
    return TurnRole.SUBAGENT
