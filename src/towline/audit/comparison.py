"""Compares the engine's prompts with the oracle: what a plain server would have shown the model.

Under `as_sent` the two must be the same ids. Where the specification makes the gateway keep sampled tokens that a plain
server would write differently, the turn is excluded with a reason. Exclusion is decided when the request is sent, from the
request, the oracle's renderings and the scripted samples so far; never from the gateway's prompt.

One session setting changes the reference: for text that the settings call noise, the model keeps seeing the first version,
as the specification says.
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

from towline.audit.clients import WireJson
from towline.audit.conversion import ConvertedRequest, SeenReplies, convert, merge_assistant_messages, same_reply
from towline.audit.engine import EngineCall, ScriptedReply
from towline.audit.families import ReplyFormat
from towline.audit.oracle import HfMessage, Oracle, TemplateRefused
from towline.common.untrusted.patterns import compile_pattern

MIN_COMPARED_SHARE = 0.9
"""Share of turns that must be compared."""
_MARGIN = 8
"""Extra tokens beyond the number of characters, for tokens that start before the first one."""


class Exclusion(StrEnum):
    """Why a turn's prompt may differ from a plain server's."""

    IDS_KEPT = "sampled_ids_kept"
    """A reply was sampled as other ids than the tokenizer gives for its text."""
    SPELLING_KEPT = "spelling_kept"
    """The template or the harness spells a reply differently, with the same meaning."""
    CUT_KEPT = "cut_kept"
    """A reply was truncated in its reasoning or in a call, and only its readable part came back."""
    END_KEPT = "end_kept"
    """A reply ended with another end-of-turn id than the template writes."""
    VANISHED_KEPT = "vanished_kept"
    """The session's settings keep a message that is missing from the request."""
    PLAIN_TEXT = "special_text_plain"
    """The session's settings encode the text of special tokens as plain text."""
    IMAGE_TEXT = "image_token_plain"
    """A message spells an image token, which is encoded as plain text: it shows no image."""
    REFUSED = "template_refused"
    """The template refuses the messages as sent."""


_SAME_TEXT = (Exclusion.IDS_KEPT, Exclusion.IMAGE_TEXT)
"""Reasons for other ids with the same text."""


@dataclass(slots=True)
class ComparisonTally:
    """Turns by outcome of the comparison."""

    compared: int = 0
    different: int = 0
    excluded: Counter[str] = field(default_factory=Counter)

    @property
    def turns(self) -> int:
        return self.compared + sum(self.excluded.values())

    @property
    def share(self) -> float:
        return self.compared / self.turns if self.turns else 0.0

    def add(self, other: ComparisonTally) -> None:
        self.compared += other.compared
        self.different += other.different
        self.excluded.update(other.excluded)

    def as_json(self) -> dict[str, Any]:
        return {"compared": self.compared, "different": self.different, "excluded": dict(sorted(self.excluded.items()))}


@dataclass(slots=True)
class _Request:
    """One request of the harness and its rendering by the oracle."""

    asked: ConvertedRequest
    text: str
    ids: list[int]
    excluded: Exclusion | None
    tail: str = ""
    """The end of a plain server's prompt, from the content of the last message on."""


@dataclass(slots=True)
class _Reply:
    """One reply that the harness received."""

    request: _Request
    message: HfMessage
    """With the whole text, including a prefill by the harness."""
    body: str
    """The sampled text without the end-of-turn token."""
    sampled: list[int]
    """The sampled ids without the end-of-turn id."""
    end: str
    """The text of the end-of-turn token; empty if the reply was truncated."""


class PromptChecker:
    """Records what one harness sent and received, and compares it with the engine's prompts."""

    def __init__(
        self,
        oracle: Oracle,
        format: ReplyFormat,
        settings: Mapping[str, Any],
        now: datetime,
        *,
        closes: bool,
        plain_text: bool,
        image_text: re.Pattern[str] | None = None,
    ):
        """`closes`: the end of a turn belongs to the turn. `plain_text`: special tokens in messages are encoded as text;
        `image_text` matches those that always are."""
        self.oracle = oracle
        self.format = format
        self.settings = settings
        self.now = now
        self.closes = closes
        self.plain_text = plain_text
        self.image_text = image_text
        self.seen = SeenReplies()
        self._noise = [compile_pattern(pattern) for pattern in settings.get("noise", ())]
        self._shown: list[HfMessage] = []
        """The messages of the last request as shown to the model."""
        self._requests: dict[int, _Request] = {}
        self._replies: list[_Reply] = []

    def record_request(self, dialect: str, body: bytes, numbers: Sequence[int]) -> None:
        """Record a request; its samples have these numbers."""
        asked = convert(dialect, body, self.seen)
        kept = replace(asked, messages=self._as_kept(asked.messages))
        try:
            text = self._text(kept)
            if kept != asked and self._rewritten(kept, text):
                # The template now renders an earlier reply differently: a fork, which shows the request as sent.
                kept, text = asked, self._text(asked)
            ids = self.oracle.encode(text)
            request = _Request(kept, text, ids, self._excluded(kept, text), self._tail(kept, text))
        except TemplateRefused:
            request = _Request(kept, "", [], Exclusion.REFUSED)
        self._shown = request.asked.messages
        self._requests |= dict.fromkeys(numbers, request)

    def _text(self, asked: ConvertedRequest) -> str:
        show = self.oracle.continued if asked.prefilled else self.oracle.render
        return show(asked.messages, asked.tools, now=self.now)

    def record_reply(
        self, number: int, line: ScriptedReply, message: WireJson, calls: Sequence[EngineCall], stop_ids: frozenset[int]
    ) -> None:
        """Record the reply with this number; `calls` are the engine calls behind it."""
        request = self._requests[number]
        sampled = [int(id) for call in calls for id in call.sampled]
        ended = bool(sampled) and sampled[-1] in stop_ids
        end = self.oracle.decode(sampled[-1:]) if ended else ""
        kept = sampled[:-1] if ended else sampled
        prefill = request.asked.messages[-1]["content"] if request.asked.prefilled else ""
        written = self._written(line, message, prefill)
        self._replies.append(_Reply(request, written, self.oracle.decode(kept), kept, end))
        self._remember(line, message, written, request)

    def _written(self, line: ScriptedReply, message: WireJson, prefill: str) -> HfMessage:
        """The reply as the model wrote it: the received message with the model's own call ids."""
        native = line.written_calls(self.format)
        calls = []
        for index, call in enumerate(message.get("tool_calls") or ()):
            id = native[index].id if index < len(native) and native[index].id else call["id"]
            self.seen.ids["".join(filter(str.isalnum, call["id"]))] = id
            calls.append(
                {"id": id, "name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}
            )
        written: HfMessage = {"role": "assistant", "content": prefill + (message.get("content") or "")}
        if line.reasoning and not line.free:
            written["reasoning"] = line.reasoning
        if calls:
            written["tool_calls"] = calls
        return written

    def _remember(self, line: ScriptedReply, message: WireJson, written: HfMessage, request: _Request) -> None:
        seen = self.seen
        seen.written.append(written)
        if message.get("signature") and line.reasoning:
            seen.sealed[message["signature"]] = line.reasoning
        items = message.get("items", {})
        if "reasoning" in items:
            seen.items[items["reasoning"]] = {"role": "assistant", "content": "", "reasoning": line.reasoning or ""}
        if "message" in items:
            seen.items[items["message"]] = {"role": "assistant", "content": message.get("content") or ""}
        for call, own in zip(message.get("tool_calls") or (), written.get("tool_calls", ()), strict=True):
            if "item" in call:
                seen.items[call["item"]] = {"role": "assistant", "content": "", "tool_calls": [own]}
        if "answer" in message:
            seen.answers[message["answer"]] = [*request.asked.messages, written]

    def _tail(self, asked: ConvertedRequest, text: str) -> str:
        if asked.prefilled:
            return ""
        at = text.rfind(asked.messages[-1]["content"].strip())
        if at >= 0:
            return text[at:]
        # The template spells the content differently: only the generation prompt remains as the tail.
        closed = self.oracle.render(asked.messages, asked.tools, now=self.now, generation=False)
        shared = next((n for n, (a, b) in enumerate(zip(text, closed, strict=False)) if a != b), len(closed))
        return text[shared:]

    def _as_kept(self, messages: list[HfMessage]) -> list[HfMessage]:
        """The messages with the first version of any noise, as the model keeps seeing it."""
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

    def _excluded(self, asked: ConvertedRequest, text: str) -> Exclusion | None:
        if self._replies and self.settings.get("vanishing") == "keep":
            return Exclusion.VANISHED_KEPT
        if self.plain_text and self._spells_special(asked):
            return Exclusion.PLAIN_TEXT
        reasons = {reason for reply in self._own(asked) if (reason := self._kept(reply, text)) is not None}
        if any(self._appended_to(reply, asked) for reply in self._replies):
            reasons.add(Exclusion.IDS_KEPT)
        if self.image_text is not None and any(self.image_text.search(one["content"]) for one in asked.messages):
            reasons.add(Exclusion.IMAGE_TEXT)
        # With other ids the text can still be compared, so these are the last reasons to choose.
        return min(reasons, key=lambda reason: (reason in _SAME_TEXT, reason.value), default=None)

    def _own(self, asked: ConvertedRequest) -> Iterator[_Reply]:
        """The recorded replies that a request contains."""
        sent = [message for message in merge_assistant_messages(asked.messages) if message["role"] == "assistant"]
        for reply in self._replies:
            if any(same_reply(reply.message, message) for message in sent):
                yield reply

    def _appended_to(self, reply: _Reply, asked: ConvertedRequest) -> bool:
        """Whether the harness sent a reply back with text appended: its ids are kept up to the addition."""
        text = reply.message["content"].strip()
        sent = [message["content"] for message in asked.messages if message["role"] == "assistant"]
        return bool(text) and any(content.startswith(text) and content.strip() != text for content in sent)

    def _rewritten(self, asked: ConvertedRequest, text: str) -> bool:
        *_, last = [None, *self._own(asked)]
        return last is not None and self._rendered_differently(last, text)

    def _rendered_differently(self, reply: _Reply, text: str) -> bool:
        """Whether the template now renders the history before a reply differently, or omits its reasoning."""
        before = reply.request.text
        if not text.startswith(before):
            return True
        shown, reasoning = text[len(before) :], (reply.message.get("reasoning") or "").strip()
        return bool(reply.end and reasoning) and not shown.startswith(reply.body) and reasoning not in shown

    def _spells_special(self, asked: ConvertedRequest) -> bool:
        contents = [message["content"] for message in asked.messages if message["role"] in ("user", "tool")]
        return any(token in content for content in contents for token in self.oracle.added)

    def _kept(self, reply: _Reply, text: str) -> Exclusion | None:
        """Why a returned reply keeps its sampled ids although a plain server would write others."""
        before = reply.request.text
        canonical = self.oracle.encode(before + reply.body) == reply.request.ids + reply.sampled
        if self._rendered_differently(reply, text):
            # A fork: `as_sent` shows the template's rendering, with the sampled ids of replies that it contains verbatim.
            return None if canonical or reply.body not in text else Exclusion.IDS_KEPT
        shown = text[len(before) :]
        if not shown.startswith(reply.body):
            return Exclusion.SPELLING_KEPT if reply.end else Exclusion.CUT_KEPT
        if reply.end and not shown[len(reply.body) :].startswith(reply.end) and self.closes:
            return Exclusion.END_KEPT
        return None if canonical else Exclusion.IDS_KEPT

    # Comparison

    def compare(self, calls: Sequence[EngineCall]) -> tuple[ComparisonTally, list[str]]:
        """The turns of a session by outcome, and one line per difference. `calls` are in the engine's order."""
        tally, problems = ComparisonTally(), []
        seen: set[int] = set()
        for call in calls:
            request = self._requests.get(call.number)
            if call.number in seen or request is None:
                # An interrupted turn resumes from its own tokens, which the first call already proves.
                continue
            seen.add(call.number)
            given = [int(id) for id in call.prompt]
            if request.excluded is not None:
                tally.excluded[request.excluded.value] += 1
                # With other ids the text must still be the same.
                right = request.excluded not in _SAME_TEXT or self._same_text(given, request)
            else:
                tally.compared += 1
                right = given == request.ids
            if not right:
                tally.different += 1
                problems.append(f"as_sent: turn {call.turn}: {self._difference(given, request.ids)}")
        return tally, problems

    def tails(self, calls: Sequence[EngineCall]) -> Iterator[str]:
        """One line per prompt that does not end like a plain server's, which every context policy requires."""
        for number, call in {call.number: call for call in reversed(calls)}.items():
            tail = self._requests[number].tail if number in self._requests else ""
            given = self.oracle.decode([int(id) for id in call.prompt[-(len(tail) + _MARGIN) :]])
            if not given.endswith(tail):
                yield f"turn {call.turn}: the prompt ends with {given[-len(tail) :]!r}, a plain server's with {tail!r}"

    def _same_text(self, given: list[int], request: _Request) -> bool:
        """Whether ids read as the request's text, up to what encoding it changes (Unicode normalization)."""
        shown = self.oracle.decode(given)
        return shown == request.text or self.oracle.encode(shown) == request.ids

    def _difference(self, given: list[int], shown: list[int]) -> str:
        at = next(
            (n for n, (a, b) in enumerate(zip(given, shown, strict=False)) if a != b), min(len(given), len(shown))
        )
        start = max(0, at - 4)
        texts = [self.oracle.decode(ids[start : at + 12]) for ids in (given, shown)]
        return f"at token {at} the engine got {texts[0]!r}, a plain server shows {texts[1]!r}"
