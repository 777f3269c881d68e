"""Tool results in the order of their calls, each with its tool's name.

Harnesses answer parallel calls in any order, and most dialects name the tool on the call only. Fingerprints and templates
see one order and full names, so that the same conversation is the same conversation.
"""

from __future__ import annotations

from collections.abc import Mapping

from towline.conversation import Message


def settled_prefix(messages: list[Message], shared: int) -> int:
    """How many of `shared` settled messages stay settled whatever follows: up to the last that is not a tool result."""
    while shared > 0 and messages[shared - 1].role == "tool":
        shared -= 1
    return shared


def settle(messages: list[Message], start: int = 0, native: Mapping[str, str] | None = None) -> None:
    """Sort and name the tool results of `messages[start:]` in place.

    `native` maps the bare form of call ids that Towline minted to the ids that the model itself sampled.
    """
    index = start
    while index < len(messages):
        if messages[index].role != "tool":
            index += 1
            continue
        end = index
        while end < len(messages) and messages[end].role == "tool":
            end += 1
        if index > 0 and messages[index - 1].tool_calls:
            _settle_run(messages, index, end)
        if native:
            _restore_ids(messages, index - 1, end, native)
        index = end


def bare_id(id: str) -> str:
    """A call id without what some harnesses strip from it."""
    return id if id.isalnum() else "".join(filter(str.isalnum, id))


def _settle_run(messages: list[Message], start: int, end: int) -> None:
    calls = messages[start - 1].tool_calls
    places = {bare_id(call.id): place for place, call in enumerate(calls)}
    for message in messages[start:end]:
        place = places.get(bare_id(message.tool_call_id))
        if place is not None and not message.name:
            message.name = calls[place].name
    if end - start > 1:
        run = messages[start:end]
        order = [places.get(bare_id(message.tool_call_id), len(calls)) for message in run]
        if order != sorted(order):
            messages[start:end] = [run[i] for i in sorted(range(len(run)), key=order.__getitem__)]


def _restore_ids(messages: list[Message], assistant: int, end: int, native: Mapping[str, str]) -> None:
    for message in messages[assistant + 1 : end]:
        message.tool_call_id = native.get(bare_id(message.tool_call_id), message.tool_call_id)
