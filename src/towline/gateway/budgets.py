"""What one session has taken of the gateway, and whether it may take more.

Every refusal is an `ApiError` in the harness's own format and is counted by the budget's name; none is a failed call, so
whatever a harness provokes here is its own doing and never an infrastructure failure. Sizes are checked before the work that
they cause: bytes before they are kept, JSON values before they are parsed, messages and tools before they are converted or
rendered.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from towline.config.budgets import SessionBudgets
from towline.conversation import Message
from towline.errors import ApiError, BadRequest, ErrorKind

_RETRY_SECONDS = 1.0
_MESSAGE_OVERHEAD = 256
"""Approximate bytes of a message in the journal besides its text."""


class SessionUsage:
    """The budgets of one session, and what it has used of them."""

    def __init__(
        self,
        budgets: SessionBudgets,
        refusals: Counter[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`refusals` counts the refusals of all sessions by budget."""
        self.budgets = budgets
        self.refused = 0
        """How many requests and connections of the session were refused."""
        self.buffered = 0
        """Bytes of bodies that are being received."""
        self.journaled = 0
        """Bytes that the session's turns wrote to the journal, or are about to."""
        self.on_exhausted: Callable[[], None] = lambda: None
        """Called when the session has used up its `refusals`: it ends."""
        self._exchanges = 0
        self._refusals = Counter() if refusals is None else refusals
        self._clock = clock
        self._tokens = float(budgets.request_burst)
        self._refilled = clock()

    def count_refusal(self, budget: str) -> None:
        """Count a request or connection that exceeds a budget; a session that never stops sending them ends."""
        self.refused += 1
        self._refusals[budget] += 1
        if self.refused > self.budgets.refusals:
            self.on_exhausted()

    def _refuse(self, budget: str, kind: ErrorKind, message: str, param: str | None = None) -> ApiError:
        self.count_refusal(budget)
        retry = _RETRY_SECONDS if kind is ErrorKind.RATE_LIMIT else None
        return ApiError(kind, message, param=param, retry_after=retry)

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """One request from its headers to the end of its response; raises if the session has too many, or too fast."""
        most = self.budgets.connections
        if self._exchanges >= most:
            message = f"this session has {most} requests open already"
            raise self._refuse("connections", ErrorKind.RATE_LIMIT, message)
        self.check_rate()
        self._exchanges += 1
        try:
            yield
        finally:
            self._exchanges -= 1

    def check_rate(self) -> None:
        """Count a request; raises if the session sends more than its rate."""
        budgets, now = self.budgets, self._clock()
        grown = self._tokens + (now - self._refilled) * budgets.request_rate
        self._tokens, self._refilled = min(grown, float(budgets.request_burst)), now
        if self._tokens < 1:
            message = f"this session sends more than {budgets.request_rate:g} requests per second"
            raise self._refuse("request_rate", ErrorKind.RATE_LIMIT, message)
        self._tokens -= 1

    def receive(self, size: int) -> None:
        """Count bytes of a body before they are kept; raises if the session's bodies are too large together."""
        most = self.budgets.buffered_bytes
        if self.buffered + size > most:
            message = f"the request bodies that this session sends at once are larger than {most} bytes"
            raise self._refuse("buffered_bytes", ErrorKind.RATE_LIMIT, message)
        self.buffered += size

    def received(self, size: int) -> None:
        """A body that was counted has been read, or given up."""
        self.buffered -= size

    def too_large(self, most: int) -> ApiError:
        """The refusal of a body over the gateway's `body_bytes`."""
        return self._refuse("body_bytes", ErrorKind.TOO_LARGE, f"the request body is larger than {most} bytes")

    def check_values(self, body: bytes) -> None:
        """Raise if a body has too many JSON values, without parsing it."""
        most = self.budgets.values
        if more_values_than(body, most):
            message = f"the request body has more than {most} JSON values"
            raise self._refuse("values", ErrorKind.TOO_LARGE, message)

    def check_counts(self, items: Sequence[Any], tools: Any) -> None:
        """Raise if a body has too many history items or tools, before either is converted."""
        budgets = self.budgets
        if len(items) > budgets.messages:
            self.count_refusal("messages")
            raise BadRequest(f"the request has more than {budgets.messages} messages", param="messages")
        if count_tools(tools) > budgets.tools:
            self.count_refusal("tools")
            raise BadRequest(f"the request has more than {budgets.tools} tools", param="tools")

    def check_turns(self, in_flight: int, choices: int) -> None:
        """Raise if a request's turns are too many, alone or beside those in flight."""
        most = self.budgets.turns_in_flight
        if choices > most:
            self.count_refusal("turns_in_flight")
            raise BadRequest(f"at most {most} choices per request are supported", param="n")
        if in_flight + choices > most:
            message = f"this session has {in_flight} turns in flight; at most {most} are sampled at once"
            raise self._refuse("turns_in_flight", ErrorKind.RATE_LIMIT, message)

    def check_journal(self, messages: Sequence[Message], tokens: int, choices: int) -> None:
        """Raise if a request's turns may write more to the journal than the session has left."""
        most = self.budgets.journal_bytes
        if self.journaled + choices * journal_size(messages, tokens) > most:
            message = f"the session's limit of {most} bytes of recorded turns is exhausted"
            raise self._refuse("journal_bytes", ErrorKind.QUOTA, message)


def more_values_than(body: bytes, most: int) -> bool:
    """Whether JSON text has more than `most` values, at the cost of a few passes in C and without building any.

    Every value but the first follows a comma, a colon or an opening bracket. Those inside strings are left out only if
    it matters.
    """
    if 1 + body.count(b",") + body.count(b"[") + body.count(b"{") <= most:
        return False
    # A backslash occurs only in strings; without escaped quotes, every second part is outside of strings.
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') > 4 * most:
        return True
    outside = b"".join(bare.split(b'"')[::2])
    return 1 + outside.count(b",") + outside.count(b"[") + outside.count(b"{") > most


def count_tools(tools: Any) -> int:
    """How many tools a body declares: Google and `responses` group them in lists inside a tool."""
    if not isinstance(tools, (list, tuple)):
        return 0
    count = 0
    for tool in tools:
        inner = [len(value) for value in tool.values() if isinstance(value, list)] if isinstance(tool, dict) else []
        count += max(1, *inner) if inner else 1
    return count


def journal_size(messages: Sequence[Message], tokens: int) -> int:
    """Approximate bytes in the journal of messages, and of the prompt tokens that they add."""
    return 4 * tokens + sum(
        _MESSAGE_OVERHEAD + len(m.text) + sum(len(media.url) for media in m.media) for m in messages
    )
