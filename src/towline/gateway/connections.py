"""Connections to the gateway: how many, how fast their requests must arrive, and how long they may be idle.

A session's own listener holds at most its budget of connections; what connects beyond that gets status 429 and is closed.
Every connection has a clock at all times: from its beginning to the end of a request's headers, from there to the end of its
body, and between two requests. So a client that sends one byte per minute, or nothing, holds nothing for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Callable
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from towline.config.budgets import SessionBudgets

_BODY = b'{"error":{"message":"%s","type":"rate_limit_error","code":"rate_limit_exceeded","param":null}}'
_HEAD = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
_TOO_MANY = b"429 Too Many Requests"
_LARGE_HEADERS = b"431 Request Header Fields Too Large"


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with a session's budgets."""

    budgets: ClassVar[SessionBudgets]
    most: ClassVar[int]
    """How many connections of the listener are served."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._clock: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._in_headers = True
        """Whether the next bytes belong to a request's headers."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if exceeds(len(self.connections), self.most):
            self._refuse("connections", _TOO_MANY, b"this session has too many open connections")
            return
        self._limit("header_seconds", self.budgets.header_seconds)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_headers:
            if not self._header_bytes and self._clock is None:
                self._limit("header_seconds", self.budgets.header_seconds)
            self._header_bytes += len(data)
        super().data_received(data)
        if self._in_headers and exceeds(self._header_bytes, self.budgets.header_bytes):
            self._refuse("header_bytes", _LARGE_HEADERS, b"the request headers are too large")

    def on_headers_complete(self) -> None:
        self._in_headers, self._header_bytes = False, 0
        self._limit("body_seconds", self.budgets.body_seconds)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_headers = True
        self._stop()
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def count_refusal(self, budget: str) -> None:
        """A connection exceeds a budget."""

    def _limit(self, budget: str, seconds: float) -> None:
        self._stop()
        self._clock = self.loop.call_later(seconds, self._expired, budget)

    def _stop(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _expired(self, budget: str) -> None:
        self._clock = None
        self.count_refusal(budget)
        self.transport.abort()

    def _refuse(self, budget: str, status: bytes, reason: bytes) -> None:
        self.count_refusal(budget)
        body = _BODY % reason
        self.transport.write(_HEAD % (status, len(body)) + body)
        self.transport.close()


def exceeds(count: int, most: int) -> bool:
    """Whether a count is over its budget."""
    return count > most


def bounded_protocol(budgets: SessionBudgets, most: int, refused: Callable[[str], None]) -> type[BoundedProtocol]:
    """The protocol of one listener; `refused` is called with the budget that a connection exceeds."""

    class Bounded(BoundedProtocol):
        def count_refusal(self, budget: str) -> None:
            refused(budget)

    Bounded.budgets, Bounded.most = budgets, most
    return Bounded


def raise_descriptor_limit() -> None:
    """Let this process open as many files as the machine allows: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
