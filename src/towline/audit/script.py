"""What the model says in an audit: chosen by a script, written in the model's own format, split as no encoder would.

A tiny random model never makes a tool call by itself, so a script chooses the ids and the model scores them. A model
samples any ids that spell its text, not only those that the tokenizer would choose; so do the scripts here.

Invariant: splitting changes ids only. The text that they decode to stays the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from towline.conversation import Tool, ToolCall
from towline.tokens.codec import Frame
from towline.tokens.parser import ParsedCall
from towline.tokens.template import SentinelCodec
from towline.tokens.tokenizer import Tokenizer


@dataclass(slots=True, eq=False)
class Line:
    """One reply: what is said and how it comes about."""

    text: str = ""
    reasoning: str | None = None
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    split: float = 0.0
    """The share of tokens that are split in two."""
    free: bool = False
    """Sampled by the model itself; all that is said above is ignored."""
    garble: bool = False
    """The end of the reply is lost, so that its last call cannot be read."""
    other_end: bool = False
    """Ends on another end-of-turn id than the template's own."""
    seed: int = 0
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the engine has been asked."""
    hold: asyncio.Event | None = None
    """The reply is not begun before this is set."""


def write(codec: SentinelCodec, line: Line, prompt_tail: str, tools: Sequence[Tool]) -> list[int]:
    """The ids of a scripted reply to a prompt that ends with `prompt_tail`."""
    calls = [ToolCall("", name, arguments) for name, arguments in line.calls]
    opened = codec.parse("", prompt_tail, ()).reasoning_open
    body = codec.format.write(
        line.reasoning,
        line.text,
        [ParsedCall(call.name, call.arguments) for call in calls],
        tools=tools,
        reasoning_open=opened,
    )
    end = codec.write(line.text, line.reasoning, calls, Frame(tuple(tools)))[-1]
    if line.other_end:
        end = next((id for id in sorted(codec.stop_ids) if id != end), end)
    ids = codec.tokenizer.encode(body)
    if line.garble:
        ids = ids[: len(ids) * 2 // 3]
    return [*split(codec.tokenizer, ids, line.split, Random(line.seed)), end]


def split(tokenizer: Tokenizer, ids: Sequence[int], share: float, random: Random) -> list[int]:
    """The ids with about `share` of the tokens replaced by two or more shorter ones of the same text."""
    if share <= 0:
        return list(ids)
    made: list[int] = []
    for id in ids:
        made += _halves(tokenizer, id, random) if random.random() < share else [id]
    return made if tokenizer.decode(made) == tokenizer.decode(list(ids)) else list(ids)


def _halves(tokenizer: Tokenizer, id: int, random: Random) -> list[int]:
    """A token as two that spell it, if the vocabulary has such."""
    token = tokenizer.token_of(id)
    if token is None or token in tokenizer.added or len(token) < 2:
        return [id]
    for cut in random.sample(range(1, len(token)), len(token) - 1):
        halves = [tokenizer.id_of(part) for part in (token[:cut], token[cut:])]
        if all(half is not None for half in halves) and not {token[:cut], token[cut:]} & tokenizer.added.keys():
            return [half for half in halves if half is not None]
    return [id]
