"""A reply that a harness wrote on behind: how much of it stands as it was sampled.

smolagents closes the code block of a reply that left it open; others add a line of their own. The reply is then another
message, so the turn is no prefix. But all that it sampled before its end is still what the model sees, token for token.
"""

from __future__ import annotations

from towline.conversation import Finish, Message
from towline.tokens.codec import Codec
from towline.tokens.graph import Node

_LOOSE = 8
"""Sampled ids at the end of a reply that may be left out: its end of turn, and space before it."""


def appended(node: Node, message: Message, codec: Codec) -> tuple[int, str]:
    """How many sampled ids the message keeps, and the text behind them; `(0, "")` if it is no reply that was written on."""
    reply = node.reply
    if reply is None or node.finish in (None, Finish.ABORT) or node.prefill is not None or not len(node.sampled):
        return 0, ""
    text = message.text.replace("\r\n", "\n")
    words = reply.text.strip()
    if message.role != "assistant" or message.tool_calls or reply.tool_calls or message.media or not words:
        return 0, ""
    body = node.sampled[:-1] if int(node.sampled[-1]) in codec.stop_ids else node.sampled
    raw = codec.tokenizer.decode(body.tolist())
    start = raw.rfind(words)
    # The harness may send reasoning back within the text; outer space means nothing.
    thought = text.find("</think>") if text.lstrip().startswith("<think>") else -1
    begins = text.find(words, thought) if thought >= 0 else len(text) - len(text.lstrip())
    if start < 0 or begins < 0 or not text.startswith(words, begins):
        return 0, ""
    said, text = raw[start:], text[begins:]
    shared = next((n for n, (a, b) in enumerate(zip(said, text, strict=False)) if a != b), min(len(said), len(text)))
    if shared < len(words) or said[shared:].strip() or shared == len(text):
        return 0, ""
    for kept in range(len(body), max(len(body) - _LOOSE, 0), -1):
        before = codec.tokenizer.decode(body[:kept].tolist())
        length = len(before) - start
        if length <= shared and raw.startswith(before):
            return (kept, text[length:]) if not said[length:].strip() else (0, "")
    return 0, ""
