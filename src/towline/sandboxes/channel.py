"""The node's end of a `wire` socket: requests that wait for their answer, and events that nobody asked for."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

from towline.sandboxes import wire
from towline.sandboxes.base import SandboxError

Answer = tuple[wire.Message, list[int]]


class Channel:
    """Requests are numbered; an answer carries its request's number, an event none."""

    def __init__(self, connection: socket.socket, event: Callable[[wire.Message], None], gone: str):
        self._connection, self._event, self._gone = connection, event, gone
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._outgoing: list[tuple[wire.Message, list[int]]] = []
        self._loop = asyncio.get_running_loop()
        self.closed = False
        connection.setblocking(False)
        self._loop.add_reader(connection.fileno(), self._readable)

    async def ask(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> Answer:
        """Send a request and wait for its answer; the descriptors stay the caller's."""
        if self.closed:
            raise SandboxError(self._gone)
        number = next(self._numbers)
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._waiting[number] = answer
        try:
            self._send({**message, "n": number}, descriptors)
            return await answer
        except asyncio.CancelledError:
            # An answer that comes later must not leak what it carries.
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                for descriptor in answer.result()[1]:
                    os.close(descriptor)
            raise
        finally:
            self._waiting.pop(number, None)

    def tell(self, message: dict[str, Any]) -> None:
        if not self.closed:
            self._send({**message, "n": 0}, ())

    def _send(self, message: wire.Message, descriptors: Sequence[int]) -> None:
        if self._outgoing:
            self._outgoing.append((message, [os.dup(descriptor) for descriptor in descriptors]))
            return
        try:
            wire.send(self._connection, message, descriptors)
        except BlockingIOError:
            self._outgoing.append((message, [os.dup(descriptor) for descriptor in descriptors]))
            self._loop.add_writer(self._connection.fileno(), self._writable)
        except OSError as error:
            self.close()
            raise SandboxError(self._gone) from error

    def _writable(self) -> None:
        while self._outgoing:
            message, descriptors = self._outgoing[0]
            try:
                wire.send(self._connection, message, descriptors)
            except BlockingIOError:
                return
            except OSError:
                self.close()
                return
            self._outgoing.pop(0)
            for descriptor in descriptors:
                os.close(descriptor)
        self._loop.remove_writer(self._connection.fileno())

    def _readable(self) -> None:
        while True:
            try:
                received = wire.receive(self._connection)
            except BlockingIOError:
                return
            if received is None:
                self.close()
                return
            message, descriptors = received
            answer = self._waiting.get(message["n"]) if "n" in message else None
            if answer is not None and not answer.done():
                answer.set_result((message, descriptors))
                continue
            for descriptor in descriptors:
                os.close(descriptor)
            if "n" not in message:
                self._event(message)
            if self.closed:
                return

    def close(self) -> None:
        """End the connection; whoever waits is told."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._connection.fileno())
        self._loop.remove_writer(self._connection.fileno())
        self._connection.close()
        for _, descriptors in self._outgoing:
            for descriptor in descriptors:
                os.close(descriptor)
        self._outgoing.clear()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(SandboxError(self._gone))
        self._event({"closed": True})
