"""Whether a session goes round in circles: the same call with the same result, again and again."""

from __future__ import annotations

from typing import Any

from towline.tokens import fingerprint
from towline.tokens.graph import Node


def repetitions(node: Node) -> int:
    """How many times in a row, up to this turn, the same calls gave the same results; 0 if the last step had no call."""
    step = _step(node)
    count = 0
    while step is not None and node.parent is not None:
        count += 1
        node = node.parent
        if _step(node) != step:
            break
    return count


def _step(node: Node) -> tuple[Any, ...] | None:
    """The calls that led to this turn, and what came back; their ids mean nothing."""
    if node.parent is None or node.parent.reply is None or not node.parent.reply.tool_calls:
        return None
    calls = tuple((call.name, _canonical(call.arguments)) for call in node.parent.reply.tool_calls)
    results = tuple(message.text for message in node.new if message.role == "tool")
    return calls, results


def _canonical(arguments: Any) -> bytes:
    return fingerprint.canonical(arguments)
