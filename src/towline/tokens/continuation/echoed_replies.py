"""Our own replies as a harness sends them back: with text appended, or under other call ids.

smolagents closes a code block that a reply left open; others append a line. The message then differs from the reply, so
the turn is no prefix of the request. But everything it sampled before its end is still what the model sees, token for
token.

A fingerprint ignores call ids, so a reply is recognised by its content whatever ids it comes with. But some templates
write call ids into the prompt (Mistral), and a result must stand under the id that the model saw with the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from towline.conversation import Finish, Message
from towline.tokens.codec import ModelCodec
from towline.tokens.graph.graph import Graph, GraphNode
from towline.tokens.graph.matching import find_own_reply
from towline.tokens.graph.tool_results import bare_id

_MAX_DROPPED = 8
"""Sampled ids at the end of a reply that may be left out: its end of turn, and white space before it."""
_NOT_APPENDED = 0, ""


def appended_text(node: GraphNode, message: Message, codec: ModelCodec) -> tuple[int, str]:
    """How many sampled ids of the turn the message keeps, and the text after them.

    `(0, "")` if the message is not the turn's reply with text appended.
    """
    reply = node.reply
    if reply is None or node.finish in (None, Finish.ABORT) or node.prefill is not None or not len(node.sampled):
        return _NOT_APPENDED
    text = message.text.replace("\r\n", "\n")
    words = reply.text.strip()
    if message.role != "assistant" or message.tool_calls or reply.tool_calls or message.media or not words:
        return _NOT_APPENDED
    body = node.sampled[:-1] if int(node.sampled[-1]) in codec.stop_ids else node.sampled
    raw = codec.tokenizer.decode(body.tolist())
    start = raw.rfind(words)
    # The harness may send reasoning back inside the text; outer white space does not count.
    thought = text.find("</think>") if text.lstrip().startswith("<think>") else -1
    begins = text.find(words, thought) if thought >= 0 else len(text) - len(text.lstrip())
    if start < 0 or begins < 0 or not text.startswith(words, begins):
        return _NOT_APPENDED
    sampled, text = raw[start:], text[begins:]
    shared = next(
        (n for n, (a, b) in enumerate(zip(sampled, text, strict=False)) if a != b), min(len(sampled), len(text))
    )
    if shared < len(words) or sampled[shared:].strip() or shared == len(text):
        return _NOT_APPENDED
    for kept in range(len(body), max(len(body) - _MAX_DROPPED, 0), -1):
        before = codec.tokenizer.decode(body[:kept].tolist())
        length = len(before) - start
        if length <= shared and raw.startswith(before):
            return (kept, text[length:]) if not sampled[length:].strip() else _NOT_APPENDED
    return _NOT_APPENDED


def with_minted_ids(
    graph: Graph, messages: Sequence[Message], near: GraphNode | None, codec: ModelCodec, engine: str
) -> Sequence[Message]:
    """The messages with the ids that we minted for the calls of our replies."""
    if not codec.short_call_ids and not graph.native_ids:
        # No id is part of any prompt.
        return messages
    ids: dict[str, str] = {}
    for place, message in enumerate(messages):
        if not message.tool_calls or any(bare_id(call.id) in graph.by_call for call in message.tool_calls):
            continue
        node = find_own_reply(graph, message, near, place, engine)
        if node is not None and node.reply is not None:
            pairs = zip(message.tool_calls, node.reply.tool_calls, strict=False)
            ids |= {call.id: ours.id for call, ours in pairs}
    return [_with_ids(message, ids) for message in messages] if ids else messages


def _with_ids(message: Message, ids: dict[str, str]) -> Message:
    if message.tool_call_id in ids:
        return replace(message, tool_call_id=ids[message.tool_call_id])
    if any(call.id in ids for call in message.tool_calls):
        return replace(message, tool_calls=tuple(replace(c, id=ids.get(c.id, c.id)) for c in message.tool_calls))
    return message
