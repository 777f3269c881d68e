"""Tool results in the order of their calls, each with its tool's name.

Harnesses answer parallel calls in any order, and most dialects name the tool on the call only. Fingerprints and templates
always see call order and full names, so that equal conversations compare equal. A message that changes is replaced by a
copy: messages that were read are never modified, and ordering them again is a no-op.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from towline.conversation import Message, ToolCall


def ordered_prefix(messages: list[Message], shared: int) -> int:
    """How many of `shared` ordered messages stay in order whatever follows: up to the last that is not a tool result."""
    while shared > 0 and messages[shared - 1].role == "tool":
        shared -= 1
    return shared


def order_tool_results(messages: list[Message], start: int = 0, native: Mapping[str, str] | None = None) -> None:
    """Sort and name the tool results of `messages[start:]` in place.

    `native` maps call ids that Towline minted (in bare form) to the ids that the model itself sampled.
    """
    index = start
    while index < len(messages):
        if messages[index].role != "tool":
            index += 1
            continue
        end = index
        while end < len(messages) and messages[end].role == "tool":
            end += 1
        run = messages[index:end]
        if index > 0 and messages[index - 1].tool_calls:
            run = _in_call_order(run, messages[index - 1].tool_calls)
        messages[index:end] = [_with_native_id(message, native) for message in run] if native else run
        index = end


def bare_id(id: str) -> str:
    """A call id reduced to its alphanumeric characters: some harnesses strip the others."""
    return id if id.isalnum() else "".join(filter(str.isalnum, id))


def _in_call_order(run: Sequence[Message], calls: Sequence[ToolCall]) -> list[Message]:
    """The results in the order of their calls; calls that share an id are answered in order, unknown ids come last."""
    places: dict[str, list[int]] = {}
    for place, call in enumerate(calls):
        places.setdefault(bare_id(call.id), []).append(place)
    placed: list[tuple[int, Message]] = []
    for message in run:
        waiting = places.get(bare_id(message.tool_call_id))
        if not waiting:
            placed.append((len(calls), message))
            continue
        # The last place stays, for a harness that sends a result twice.
        place = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        named = message if message.name else replace(message, name=calls[place].name)
        placed.append((place, named))
    return [message for _, message in sorted(placed, key=lambda item: item[0])]


def _with_native_id(message: Message, native: Mapping[str, str]) -> Message:
    id = native.get(bare_id(message.tool_call_id))
    return message if id is None else replace(message, tool_call_id=id)
