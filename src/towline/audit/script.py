"""What the model says in an audit: chosen by a script, written in its family's documented format, split as no encoder would.

A tiny random model never makes a tool call by itself, so a script chooses the ids and the model scores them. A model
samples any ids that spell its text, not only those that the tokenizer would choose; so do the scripts here.

Invariant: splitting changes ids only. The text that they decode to stays the same.
"""

from __future__ import annotations

import asyncio
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from towline.audit.formats import Format, FormatCall
from towline.audit.oracle import Oracle

_OPENED = re.compile(r"<think>\s*$")
_CLOSED = re.compile(r"<think>\s*</think>\s*$")
_NINE = 9


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
    as_shown: bool = False
    """Spelled as the template shows it in history, where the family has several spellings."""
    seed: int = 0
    calls_before: int = 0
    """Calls in the history that it answers: some families number them."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the engine has been asked."""
    hold: asyncio.Event | None = None
    """The reply is not begun before this is set."""

    def written_calls(self, format: Format) -> list[FormatCall]:
        """The calls with the ids that a model of this family writes itself."""
        random = Random(self.seed)
        written = []
        for place, (name, arguments) in enumerate(self.calls):
            id = ""
            if format.ids == "kimi":
                id = f"functions.{name}:{self.calls_before + place}"
            elif format.ids == "mistral":
                id = "".join(random.choices(string.ascii_letters + string.digits, k=_NINE))
            written.append(FormatCall(name, arguments, id))
        # Mistral documents its calls with an id and without one.
        if format.ids == "mistral" and not self.as_shown and self.seed % 2:
            return [FormatCall(call.name, call.arguments) for call in written]
        return written


def write(oracle: Oracle, format: Format, stop_ids: frozenset[int], line: Line, tail: Sequence[int]) -> list[int]:
    """The ids of a scripted reply to a prompt that ends with `tail`."""
    prompt = oracle.decode(tail)
    if _CLOSED.search(prompt):
        # The prompt says that there is no reasoning.
        line.reasoning = None
    calls = line.written_calls(format)
    opened = _OPENED.search(prompt) is not None
    text = format.text(line.reasoning, line.text, calls, opened=opened, as_shown=line.as_shown)
    end = oracle.id_of(format.ending(calls))
    if end is None or line.other_end:
        end = next(id for id in sorted(stop_ids) if id != end)
    ids = oracle.encode(text)
    if line.garble:
        ids = ids[: len(ids) * 2 // 3]
    return [*split(oracle, ids, line.split, Random(line.seed)), end]


def split(oracle: Oracle, ids: Sequence[int], share: float, random: Random) -> list[int]:
    """The ids with about `share` of the tokens replaced by two or more shorter ones of the same text."""
    if share <= 0:
        return list(ids)
    made: list[int] = []
    for id in ids:
        made += _halves(oracle, id, random) if random.random() < share else [id]
    return made if oracle.decode(made) == oracle.decode(ids) else list(ids)


def _halves(oracle: Oracle, id: int, random: Random) -> list[int]:
    """A token as two that spell it, if the vocabulary has such."""
    token = oracle.backend.id_to_token(id)
    if token is None or token in oracle.added or len(token) < 2:
        return [id]
    for cut in random.sample(range(1, len(token)), len(token) - 1):
        halves = [oracle.id_of(part) for part in (token[:cut], token[cut:])]
        if all(half is not None for half in halves) and not {token[:cut], token[cut:]} & oracle.added.keys():
            return [half for half in halves if half is not None]
    return [id]
