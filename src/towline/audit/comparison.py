"""The comparison with the oracle: what the engine was given against what a plain server would have shown the model.

Under `as_sent` the two must be the same ids. Where the specification has the gateway keep what was sampled although a
plain server would write it otherwise, a turn is excluded, with the reason. Whether a turn is excluded is decided when its
request is sent, from the request, the oracle's own renderings and what the script sampled before; never from the prompt
that the gateway made.

One setting of a session changes what a plain server is compared with: of text that it calls noise the model keeps seeing
the first version, as the specification says.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from towline.audit.conversion import Asked, Known, convert, in_one, same_reply
from towline.audit.engine import Call
from towline.audit.formats import Format
from towline.audit.oracle import HfMessage, Oracle, Refusal
from towline.audit.script import Line
from towline.audit.tongues import Wired

LEAST_COMPARED = 0.9
"""The share of turns that must be compared."""
_MARGIN = 8
"""Tokens more than there are characters, for those that begin before the first."""


class Excluded(StrEnum):
    """Why a turn's prompt need not be the plain server's."""

    IDS_KEPT = "sampled_ids_kept"
    """A reply was sampled in other ids than the tokenizer gives for its text."""
    SPELLING_KEPT = "spelling_kept"
    """A reply that came back with the same meaning is spelled otherwise by the template, or by the harness."""
    CUT_KEPT = "cut_kept"
    """A reply was cut short, in its reasoning or in a call, and came back as the part of it that can be read."""
    END_KEPT = "end_kept"
    """A reply ended on another end-of-turn id than the template writes."""
    VANISHED_KEPT = "vanished_kept"
    """The session's settings keep a message that is gone from the request."""
    PLAIN_TEXT = "special_text_plain"
    """The session's settings encode the text of special tokens as plain text."""
    REFUSED = "template_refused"
    """The template itself refuses the messages as they were sent."""


@dataclass(slots=True)
class Tally:
    """Turns by the outcome of their comparison."""

    compared: int = 0
    different: int = 0
    excluded: Counter[str] = field(default_factory=Counter)

    @property
    def turns(self) -> int:
        return self.compared + sum(self.excluded.values())

    @property
    def share(self) -> float:
        return self.compared / self.turns if self.turns else 0.0

    def add(self, other: Tally) -> None:
        self.compared += other.compared
        self.different += other.different
        self.excluded.update(other.excluded)

    def as_json(self) -> dict[str, Any]:
        return {"compared": self.compared, "different": self.different, "excluded": dict(sorted(self.excluded.items()))}


@dataclass(slots=True)
class _Request:
    """One request of the harness, and what the oracle makes of it."""

    asked: Asked
    text: str
    ids: list[int]
    excluded: Excluded | None
    tail: str = ""
    """How a plain server's prompt ends: from the content of the last message on."""


@dataclass(slots=True)
class _Reply:
    """One reply that the harness got."""

    request: _Request
    message: HfMessage
    """With the whole text, the beginning that the harness wrote included."""
    body: str
    """What was sampled, without its end."""
    sampled: list[int]
    """Likewise."""
    end: str
    """The text of the token that it ended on; empty if it was cut short."""


class Witness:
    """Keeps what one harness sent and got, and compares it with what the engine was given."""

    def __init__(
        self,
        oracle: Oracle,
        format: Format,
        settings: Mapping[str, Any],
        now: datetime,
        *,
        closes: bool,
        plain_text: bool,
    ):
        """`closes`: the end of a turn belongs to the turn. `plain_text`: special tokens in messages stay text."""
        self.oracle = oracle
        self.format = format
        self.settings = settings
        self.now = now
        self.closes = closes
        self.plain_text = plain_text
        self.known = Known()
        self._noise = [re.compile(pattern) for pattern in settings.get("noise", ())]
        self._shown: list[HfMessage] = []
        """The messages of the last request as the model was shown them."""
        self._requests: dict[int, _Request] = {}
        self._replies: list[_Reply] = []

    def asked(self, dialect: str, body: bytes, numbers: Sequence[int]) -> None:
        """A request goes out; its samples have these numbers."""
        asked = convert(dialect, body, self.known)
        kept = replace(asked, messages=self._as_kept(asked.messages))
        try:
            text = self._text(kept)
            if kept != asked and self._rewritten(kept, text):
                # The template shows a reply otherwise by now: a fork, which shows the request as it was sent.
                kept, text = asked, self._text(asked)
            ids = self.oracle.encode(text)
            request = _Request(kept, text, ids, self._excluded(kept, text), self._tail(kept, text))
        except Refusal:
            request = _Request(kept, "", [], Excluded.REFUSED)
        self._shown = request.asked.messages
        self._requests |= dict.fromkeys(numbers, request)

    def _text(self, asked: Asked) -> str:
        show = self.oracle.continued if asked.prefilled else self.oracle.render
        return show(asked.messages, asked.tools, now=self.now)

    def heard(self, number: int, line: Line, message: Wired, calls: Sequence[Call], stop_ids: frozenset[int]) -> None:
        """The reply with this number has come; `calls` are the engine's for it."""
        request = self._requests[number]
        sampled = [int(id) for call in calls for id in call.sampled]
        ended = bool(sampled) and sampled[-1] in stop_ids
        end = self.oracle.decode(sampled[-1:]) if ended else ""
        kept = sampled[:-1] if ended else sampled
        begun = request.asked.messages[-1]["content"] if request.asked.prefilled else ""
        written = self._written(line, message, begun)
        self._replies.append(_Reply(request, written, self.oracle.decode(kept), kept, end))
        self._know(line, message, written, request)

    def _written(self, line: Line, message: Wired, begun: str) -> HfMessage:
        """The reply as the model meant it: what the harness got, with the ids that the model wrote."""
        native = line.written_calls(self.format)
        calls = []
        for place, call in enumerate(message.get("tool_calls") or ()):
            id = native[place].id if place < len(native) and native[place].id else call["id"]
            self.known.ids["".join(filter(str.isalnum, call["id"]))] = id
            calls.append(
                {"id": id, "name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}
            )
        written: HfMessage = {"role": "assistant", "content": begun + (message.get("content") or "")}
        if line.reasoning and not line.free:
            written["reasoning"] = line.reasoning
        if calls:
            written["tool_calls"] = calls
        return written

    def _know(self, line: Line, message: Wired, written: HfMessage, request: _Request) -> None:
        known = self.known
        known.written.append(written)
        if message.get("signature") and line.reasoning:
            known.sealed[message["signature"]] = line.reasoning
        items = message.get("items", {})
        if "reasoning" in items:
            known.items[items["reasoning"]] = {"role": "assistant", "content": "", "reasoning": line.reasoning or ""}
        if "message" in items:
            known.items[items["message"]] = {"role": "assistant", "content": message.get("content") or ""}
        for call, own in zip(message.get("tool_calls") or (), written.get("tool_calls", ()), strict=True):
            if "item" in call:
                known.items[call["item"]] = {"role": "assistant", "content": "", "tool_calls": [own]}
        if "answer" in message:
            known.answers[message["answer"]] = [*request.asked.messages, written]

    def _tail(self, asked: Asked, text: str) -> str:
        if asked.prefilled:
            return ""
        at = text.rfind(asked.messages[-1]["content"].strip())
        if at >= 0:
            return text[at:]
        # The template spells the content otherwise: what opens the reply is left.
        closed = self.oracle.render(asked.messages, asked.tools, now=self.now, generation=False)
        shared = next((n for n, (a, b) in enumerate(zip(text, closed, strict=False)) if a != b), len(closed))
        return text[shared:]

    def _as_kept(self, messages: list[HfMessage]) -> list[HfMessage]:
        """The messages with noise as the model saw it first."""
        before = [*self._shown, *([{}] * len(messages))] if self._noise else []
        return [
            old if old and self._without_noise(old) == self._without_noise(message) else message
            for old, message in zip(before or messages, messages, strict=False)
        ]

    def _without_noise(self, message: HfMessage) -> HfMessage:
        content = message["content"]
        for pattern in self._noise:
            content = pattern.sub("", content)
        return {**message, "content": content.strip()}

    # Exclusion

    def _excluded(self, asked: Asked, text: str) -> Excluded | None:
        if self._replies and self.settings.get("vanishing") == "keep":
            return Excluded.VANISHED_KEPT
        if self.plain_text and self._spells_special(asked):
            return Excluded.PLAIN_TEXT
        reasons = {reason for reply in self._own(asked) if (reason := self._kept(reply, text)) is not None}
        if any(self._written_on(reply, asked) for reply in self._replies):
            reasons.add(Excluded.IDS_KEPT)
        # Other ids alone leave the text to be compared: that is the last excuse to take.
        return min(reasons, key=lambda reason: (reason is Excluded.IDS_KEPT, reason.value), default=None)

    def _own(self, asked: Asked) -> Iterator[_Reply]:
        """The replies that came back in a request."""
        told = [message for message in in_one(asked.messages) if message["role"] == "assistant"]
        for reply in self._replies:
            if any(same_reply(reply.message, message) for message in told):
                yield reply

    def _written_on(self, reply: _Reply, asked: Asked) -> bool:
        """Whether the harness sent a reply back with more behind it: its ids stay, up to what was added."""
        said = reply.message["content"].strip()
        told = [message["content"] for message in asked.messages if message["role"] == "assistant"]
        return bool(said) and any(content.startswith(said) and content.strip() != said for content in told)

    def _rewritten(self, asked: Asked, text: str) -> bool:
        *_, last = [None, *self._own(asked)]
        return last is not None and self._shown_otherwise(last, text)

    def _shown_otherwise(self, reply: _Reply, text: str) -> bool:
        """Whether the template shows the history before a reply otherwise by now, or its reasoning no more."""
        before = reply.request.text
        if not text.startswith(before):
            return True
        shown, reasoning = text[len(before) :], (reply.message.get("reasoning") or "").strip()
        return bool(reply.end and reasoning) and not shown.startswith(reply.body) and reasoning not in shown

    def _spells_special(self, asked: Asked) -> bool:
        said = [message["content"] for message in asked.messages if message["role"] in ("user", "tool")]
        return any(token in content for content in said for token in self.oracle.added)

    def _kept(self, reply: _Reply, text: str) -> Excluded | None:
        """Why a reply that came back stays as it was sampled, though a plain server writes other ids for it."""
        before = reply.request.text
        canonical = self.oracle.encode(before + reply.body) == reply.request.ids + reply.sampled
        if self._shown_otherwise(reply, text):
            # A fork: `as_sent` shows what the template shows, with replies that it shows as they were sampled.
            return None if canonical or reply.body not in text else Excluded.IDS_KEPT
        shown = text[len(before) :]
        if not shown.startswith(reply.body):
            return Excluded.SPELLING_KEPT if reply.end else Excluded.CUT_KEPT
        if reply.end and not shown[len(reply.body) :].startswith(reply.end) and self.closes:
            return Excluded.END_KEPT
        return None if canonical else Excluded.IDS_KEPT

    # Comparison

    def compare(self, calls: Sequence[Call]) -> tuple[Tally, list[str]]:
        """The turns of a session by outcome, and a line for each that differs. `calls` are in the engine's order."""
        tally, problems = Tally(), []
        seen: set[int] = set()
        for call in calls:
            request = self._requests.get(call.number)
            if call.number in seen or request is None:
                # A turn that was interrupted goes on from its own tokens, which the first call already proves.
                continue
            seen.add(call.number)
            given = [int(id) for id in call.prompt]
            if request.excluded is not None:
                tally.excluded[request.excluded.value] += 1
                # Other ids are no excuse for another text.
                right = request.excluded is not Excluded.IDS_KEPT or self.oracle.decode(given) == request.text
            else:
                tally.compared += 1
                right = given == request.ids
            if not right:
                tally.different += 1
                problems.append(f"as_sent: turn {call.turn}: {self._difference(given, request.ids)}")
        return tally, problems

    def tails(self, calls: Sequence[Call]) -> Iterator[str]:
        """A line for each prompt that does not end as a plain server's, which it must under every context policy."""
        for number, call in {call.number: call for call in reversed(calls)}.items():
            tail = self._requests[number].tail if number in self._requests else ""
            given = self.oracle.decode([int(id) for id in call.prompt[-(len(tail) + _MARGIN) :]])
            if not given.endswith(tail):
                yield f"turn {call.turn}: the prompt ends in {given[-len(tail) :]!r}, a plain server's in {tail!r}"

    def _difference(self, given: list[int], shown: list[int]) -> str:
        at = next(
            (n for n, (a, b) in enumerate(zip(given, shown, strict=False)) if a != b), min(len(given), len(shown))
        )
        start = max(0, at - 4)
        texts = [self.oracle.decode(ids[start : at + 12]) for ids in (given, shown)]
        return f"at token {at} the engine was given {texts[0]!r}, a plain server shows {texts[1]!r}"
