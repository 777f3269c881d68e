"""HTTP/1.1 on a connection with limits: uvicorn's protocol, which has none on headers, slow clients or their number.

Promises, to the service: a request's headers have a size, a number and a deadline; its body has a deadline; a client that
takes none of its response is disconnected; pipelined requests are few. They hold before any key is known. What is refused
here is answered with a `Problem`, like everything else, and the connection is closed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from towline.config.http import HttpLimits
from towline.server.api.connections import ConnectionTable, address_group

CONNECTION = "towline.connection"
"""Where a request's scope has its connection, among the extensions."""
PIPELINED = 16
"""Requests that a client may send ahead of their responses."""


class _Deadline:
    """Calls a function if it is not stopped in time. Starting it again changes nothing."""

    def __init__(self, seconds: float, late: Callable[[], None]):
        self._seconds = seconds
        self._late = late
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._over)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _over(self) -> None:
        self._timer = None
        self._late()


class _Refused(Exception):
    """Ends the parsing of a request; the status and the reason are in `refusal`."""


class LimitedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, limits: HttpLimits, table: ConnectionTable, discard_bytes: int, **options: Any) -> None:
        """`discard_bytes`: how much of a body that is not wanted is read, so that the client sees its response."""
        super().__init__(**options)
        self.limits = limits
        self.address = ""
        self._table = table
        self._discard_left = self._most_discarded = discard_bytes
        self._in_head = True
        """Whether the next byte belongs to a request line or its headers."""
        self._head_left = limits.header_bytes
        self._header_count = 0
        self._heads = 0
        """Requests whose headers are complete."""
        self._got_body = False
        self._between_chunks = 0
        """Bytes of the body in a row that were no content: chunk headers and trailers."""
        self._refusal: tuple[int, str] | None = None
        self._head_deadline = _Deadline(limits.header_seconds, self._head_late)
        self._body_deadline = _Deadline(limits.body_seconds, self._body_late)
        self._write_deadline = _Deadline(limits.idle_seconds, self.evict)

    # Connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = address_group(self.client[0] if self.client else None)
        if self._table.admit(self):
            self._head_deadline.start()
        else:
            self._refuse(503, "too many connections: retry later")

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.remove(self)
        self._stop_timers()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def prove(self) -> None:
        """The client has sent a valid key."""
        self._table.prove(self)

    def evict(self) -> None:
        self._stop_timers()
        self.transport.abort()

    # Parsing

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._unset_keepalive_if_required()
        heads = self._heads
        try:
            while data:
                data = self._feed(data)
        except httptools.HttpParserUpgrade:
            # No protocol to upgrade to: the request is answered as it is.
            pass
        except (httptools.HttpParserError, _Refused):
            self._refuse(*(self._refusal or (400, "not an HTTP request")))
            return
        if not self._in_head:
            self._body_deadline.start()
        elif heads == self._heads:
            self._head_deadline.start()

    def _feed(self, data: bytes) -> bytes:
        """Parse some of the data; returns the rest."""
        if self._in_head:
            # The parser keeps an unfinished header: it never gets more bytes of one than the limit.
            piece, rest = data[: self._head_left], data[self._head_left :]
            self._head_left -= len(piece)
            self.parser.feed_data(piece)
            if self._in_head and self._head_left <= 0:
                self._reject(431, f"the headers are larger than {self.limits.header_bytes} bytes")
            return rest
        self._got_body = False
        self.parser.feed_data(data)
        self._between_chunks = 0 if self._got_body or self._in_head else self._between_chunks + len(data)
        if self._between_chunks > self.limits.header_bytes:
            self._reject(431, f"chunk headers or trailers are larger than {self.limits.header_bytes} bytes")
        return b""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_count = 0
        self.scope["extensions"] = {CONNECTION: {"connection": self}}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_count += 1
        if self._header_count > self.limits.headers:
            self._reject(431, f"more than {self.limits.headers} headers")
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._heads += 1
        self._head_deadline.stop()
        self._discard_left = self._most_discarded
        if len(self.pipeline) >= PIPELINED:
            self._reject(429, f"more than {PIPELINED} requests without waiting for a response")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._got_body = True
        if self.cycle.response_complete:
            self._discard_left -= len(body)
            if self._discard_left < 0:
                self._reject(413, "the body is too large")
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head = True
        self._head_left = self.limits.header_bytes
        self._between_chunks = 0
        self._body_deadline.stop()
        super().on_message_complete()

    # Time

    def _head_late(self) -> None:
        if self._busy():
            # The response to the request before is still to be sent.
            self._head_deadline.start()
        else:
            self._refuse(408, f"the headers took more than {self.limits.header_seconds:g} seconds")

    def _body_late(self) -> None:
        self._refuse(408, f"the body took more than {self.limits.body_seconds:g} seconds")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_deadline.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_deadline.stop()

    def _stop_timers(self) -> None:
        self._head_deadline.stop()
        self._body_deadline.stop()
        self._write_deadline.stop()

    # Refusing

    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _may_answer(self) -> bool:
        """Whether an error would be the response to the request that is being read, and not part of another one."""
        if self.cycle is None:
            return True
        return self._in_head if self.cycle.response_complete else not self.cycle.response_started

    def _reject(self, status: int, reason: str) -> None:
        """Refuse from inside the parser, which then stops."""
        self._refusal = (status, reason)
        raise _Refused

    def _refuse(self, status: int, reason: str) -> None:
        """Answer with an error, unless another response is on its way, and close."""
        self._refusal = (status, reason)
        self._stop_timers()
        if self.transport.is_closing():
            return
        if self._may_answer():
            body = json.dumps({"error": reason, "field": None}).encode()
            retry = "retry-after: 5\r\n" if status in (429, 503) else ""
            head = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n{retry}"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode("ascii") + body)
        self.transport.close()
