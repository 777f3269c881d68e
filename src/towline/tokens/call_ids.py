"""Call ids of our own replies, where a harness sent others or none.

A fingerprint ignores call ids, so a reply is known by its words whatever its ids are. But some templates write the ids
into the prompt (Mistral), and the result of a call must stand under the id that the model saw with the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from towline.conversation import Message
from towline.tokens import finding
from towline.tokens.codec import Codec
from towline.tokens.graph import Graph, Node
from towline.tokens.settle import bare_id


def of_ours(
    graph: Graph, messages: Sequence[Message], near: Node | None, codec: Codec, engine: str
) -> Sequence[Message]:
    """The messages with the ids that we gave to the calls of our replies."""
    if not codec.short_call_ids and not graph.native_ids:
        # No id is part of any prompt.
        return messages
    ids: dict[str, str] = {}
    for place, message in enumerate(messages):
        if not message.tool_calls or any(bare_id(call.id) in graph.by_call for call in message.tool_calls):
            continue
        node = finding.own(graph, message, near, place, engine)
        if node is not None and node.reply is not None:
            pairs = zip(message.tool_calls, node.reply.tool_calls, strict=False)
            ids |= {call.id: ours.id for call, ours in pairs}
    return [_with(message, ids) for message in messages] if ids else messages


def _with(message: Message, ids: dict[str, str]) -> Message:
    if message.tool_call_id in ids:
        return replace(message, tool_call_id=ids[message.tool_call_id])
    if any(call.id in ids for call in message.tool_calls):
        return replace(message, tool_calls=tuple(replace(c, id=ids.get(c.id, c.id)) for c in message.tool_calls))
    return message
