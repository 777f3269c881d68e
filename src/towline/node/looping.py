"""Whether a session goes round in circles: the same calls with the same results, again and again.

Calls and results are compared, not how the turns hang together: a harness that edits its history makes every turn a
root, and repeats itself all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from towline.conversation import Message, ToolCall
from towline.tokens import fingerprint
from towline.tokens.graph import Node
from towline.tokens.lineage import request_of
from towline.tokens.settle import bare_id

_Step = tuple[tuple[str, bytes, str], ...]
"""The calls of one message, each with its result; their ids mean nothing."""


def repetitions(node: Node) -> int:
    """How many times in a row, up to this turn, the same calls gave the same results; 0 if the last step had no call.

    The more of two counts: along the turns, each step as it was first sent, and within this request's own history.
    """
    return max(_along(_as_happened(node)), _along(_steps(request_of(node))))


def _along(steps: Iterator[_Step | None]) -> int:
    first = next(steps, None)
    if not first:
        return 0
    # A harness may merge the equal calls of several turns into one message: each counts.
    unit = first[:1] if len(set(first)) == 1 else first
    alike = takewhile(lambda step: bool(step) and set(step or ()) == set(unit), steps)
    return sum(len(step) if len(unit) == 1 else 1 for step in (first, *alike) if step)


def _as_happened(node: Node) -> Iterator[_Step | None]:
    """The steps that led to this turn and to those before it, the last first."""
    turn: Node | None = node
    while turn is not None:
        before = turn.parent or turn.origin
        replied = before is not None and (turn.parent is not None or len(turn.new) < turn.covered)
        reply = [before.reply_message()] if replied and before is not None and before.reply is not None else []
        yield next(_steps([*reply, *turn.new]), None)
        turn = before


def _steps(messages: Sequence[Message]) -> Iterator[_Step | None]:
    """The steps of a history, the last first."""
    end = len(messages)
    for place in range(len(messages) - 1, -1, -1):
        message = messages[place]
        if message.role == "assistant":
            yield _step(message.tool_calls, messages[place + 1 : end])
            end = place


def _step(calls: Sequence[ToolCall], after: Sequence[Message]) -> _Step | None:
    """The calls with their results; `None` if there was no call."""
    if not calls:
        return None
    results = [message for message in after if message.role == "tool"]
    by_id = {bare_id(message.tool_call_id): message.text for message in results}
    # Where ids were altered beyond recognition, the results are in the order of the calls.
    in_order = [*(message.text for message in results), *("" for _ in calls)]
    return tuple(
        (call.name, fingerprint.canonical(call.arguments), by_id.get(bare_id(call.id), in_order[place]))
        for place, call in enumerate(calls)
    )
