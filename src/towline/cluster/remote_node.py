"""One node host as the server sees it: a connection that is made again, and the sessions that run behind it.

A broken connection is not a dead node: sessions continue there, and calls wait for the next connection. A node is lost when
its process is gone (`lose`), when the process behind the address is another one, or when it cannot be reached for
`lost_seconds`; then its sessions end with `NodeLost`. A host that comes back later is told to drop what was given up.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp.client_exceptions import UnixClientConnectorError

from towline.cluster import wire
from towline.cluster.runner import NodeLost, SessionOutcome
from towline.cluster.segments import Segments
from towline.common.background import BackgroundTasks
from towline.errors import TowlineError
from towline.schema import BreakerStatus, EndReason, FailureReason, Session, Task
from towline.schema.files import dump_json, load_json

log = logging.getLogger("towline.cluster")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
"""Seconds between two attempts to connect."""
_CONNECT_SECONDS = 5.0
"""How long a host may take to accept a connection."""


class AbstractConnector(aiohttp.UnixConnector):
    """Connects to an abstract Unix socket on any event loop: uvloop refuses its name, but takes a connected socket."""

    async def _create_connection(self, req: Any, traces: Any, timeout: Any) -> Any:  # noqa: ASYNC109 - aiohttp calls it
        connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connecting.setblocking(False)
            async with asyncio.timeout(timeout.sock_connect):
                await self._loop.sock_connect(connecting, self.path)
                _, protocol = await self._loop.create_unix_connection(self._factory, sock=connecting)
        except OSError as error:
            connecting.close()
            raise UnixClientConnectorError(self.path, req.connection_key, error) from error
        except BaseException:
            connecting.close()
            raise
        return protocol


@dataclass(frozen=True, slots=True)
class HostAddress:
    """Where a node host listens."""

    name: str
    url: str
    """`unix:@NAME` for an abstract socket, or `http://HOST:PORT`."""
    token: str = field(repr=False)
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _RemoteSession:
    session_id: str
    outcome: asyncio.Future[SessionOutcome]
    submission: dict[str, Any] | None = None
    """What to submit if the host does not know the session; an adopted one it does."""
    cancelled: EndReason | None = None


@dataclass(slots=True)
class NodeReports:
    """What a node calls with its reports."""

    up: Callable[[RemoteNode], Awaitable[None]]
    """It is connected, for the first time or again; it is used once this returns."""
    down: Callable[[RemoteNode], None]
    """It is not connected any more."""
    changed: Callable[[RemoteNode], None]
    """Its status or a breaker has changed."""
    session: Callable[[RemoteNode, Session], None]
    engine_failed: Callable[[str, FailureReason], None]


class RemoteNode:
    """One node host."""

    def __init__(
        self,
        address: HostAddress,
        segments: Segments,
        epoch: int,
        reports: NodeReports,
        *,
        lost_seconds: float,
        adopting: bool = False,
    ):
        self.address = address
        self.name = address.name
        self.hello: dict[str, Any] = {}
        """The greeting of the current process."""
        self.status: dict[str, Any] = {}
        self.version = 0
        self.trouble = ""
        self.breakers: dict[str, BreakerStatus] = {}
        self.connected = False
        self.adopting = adopting
        """Whether sessions of an earlier server may yet be adopted."""
        self.refused = ""
        """Why the host does not work for this server; empty if it does, or is not reached."""
        self.lost = ""
        """Why its sessions were given up; empty while it is used."""
        self._segments = segments
        self._epoch = epoch
        self._reports = reports
        self._lost_seconds = lost_seconds
        self._heartbeat = min(wire.HEARTBEAT, lost_seconds / 3)
        self._sessions: dict[str, _RemoteSession] = {}
        self._unclaimed: dict[str, dict[str, Any]] = {}
        """Outcomes of sessions of an earlier server, which this one may yet adopt."""
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._background = BackgroundTasks()
        self._usable = asyncio.Event()

    def start(self) -> None:
        self._background.start(self._stay_connected(), f"node {self.name}")

    async def close(self) -> None:
        await self._background.close()
        self.lose("the server is closing")

    @property
    def sessions(self) -> set[str]:
        return set(self._sessions)

    # Sessions

    def submit(self, task: Task, session: Session) -> asyncio.Future[SessionOutcome]:
        # The host validates both again: they are sent as they are.
        one = self._add(session.session_id, {"task": task, "session": session})
        if self.lost:
            self.lose(self.lost)
        else:
            self._send_submit(one)
        return one.outcome

    def adopt(self, session_id: str) -> asyncio.Future[SessionOutcome]:
        """A session that already runs there, submitted by an earlier server."""
        one = self._add(session_id, None)
        if (fields := self._unclaimed.pop(session_id, None)) is not None:
            self._ended(fields)
        return one.outcome

    async def keep(self, call: Callable[..., Awaitable[Any]]) -> None:
        """Let the host drop every session that is not this server's: none is adopted from here on."""
        self.adopting = False
        self._unclaimed.clear()
        await call("keep", session_ids=sorted(self._sessions))

    def _add(self, session_id: str, submission: dict[str, Any] | None) -> _RemoteSession:
        one = _RemoteSession(session_id, asyncio.get_running_loop().create_future(), submission)
        self._sessions[session_id] = one
        return one

    def cancel(self, session_id: str, reason: EndReason = EndReason.CANCELLED) -> None:
        one = self._sessions.get(session_id)
        if one is not None:
            one.cancelled = one.cancelled or reason
            self._send_cancel(one)

    def forget_session(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)

    def forget_task(self, task_id: str) -> None:
        self._send({"call": "forget", "args": {"task_id": task_id}})

    def lose(self, reason: str) -> None:
        """Give up the sessions and calls of this node. The first reason stays."""
        self.lost = reason = self.lost or reason
        self._set_connected(False)
        sessions, self._sessions = self._sessions, {}
        running = [one for one in sessions.values() if not one.outcome.done()]
        for one in running:
            one.outcome.set_exception(NodeLost(reason, sessions=len(running)))
            one.outcome.exception()  # the caller may have gone away
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.done():
                call.set_exception(NodeLost(reason, sessions=0))
                call.exception()

    # Calls

    async def call(self, name: str, /, **args: Any) -> Any:
        """Call the host; waits while it is disconnected. Raises `NodeLost` if it is lost, or what the host raised.

        A call that a disconnection cut off is made again: every call of a host may be repeated.
        """
        while True:
            if self.lost:
                raise NodeLost(self.lost, sessions=0)
            await self._usable_or_lost()
            if self.lost:
                continue
            try:
                return await self.call_now(name, **args)
            except ConnectionResetError:
                continue

    async def call_now(self, name: str, /, **args: Any) -> Any:
        """Call the host over the current connection; raises `ConnectionResetError` if that breaks."""
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        self._outbox.put_nowait(dump_json({"id": number, "call": name, "args": args}))
        try:
            return await answer
        finally:
            self._calls.pop(number, None)

    async def _usable_or_lost(self) -> None:
        # `lose` sets the event too, so that waiting calls see it.
        await self._usable.wait()

    def _send(self, message: dict[str, Any]) -> None:
        """Send if connected; sessions and their cancellations are sent again on the next connection."""
        if self.connected:
            self._outbox.put_nowait(dump_json(message))

    def _send_submit(self, one: _RemoteSession) -> None:
        self._send({"call": "submit", "args": one.submission})
        self._send_cancel(one)

    def _send_cancel(self, one: _RemoteSession) -> None:
        if one.cancelled is not None:
            self._send({"call": "cancel", "args": {"session_id": one.session_id, "reason": one.cancelled.value}})

    # The connection

    async def _stay_connected(self) -> None:
        loop = asyncio.get_running_loop()
        pause, since = _FIRST_PAUSE, loop.time()
        connector = (
            AbstractConnector("\0" + self.address.url.removeprefix("unix:@"))
            if self.address.url.startswith("unix:")
            else aiohttp.TCPConnector()
        )
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._heartbeat)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            while True:
                reason = await self._connect_once(http)
                if self.connected:
                    pause, since = _FIRST_PAUSE, loop.time()
                self._disconnected(reason)
                if not self.lost and loop.time() - since > self._lost_seconds:
                    log.error("node %s is lost: %s", self.name, reason)
                    self.lose(f"node {self.name} is not reachable: {reason}")
                    self._reports.changed(self)
                await asyncio.sleep(pause)
                pause = min(_LONGEST_PAUSE, pause * 2)

    async def _connect_once(self, http: aiohttp.ClientSession) -> str:
        """Use one connection until it breaks; returns why it did."""
        url = "http://host" if self.address.url.startswith("unix:") else self.address.url
        try:
            # A host that is stopped accepts connections, by its kernel, and answers nothing.
            async with asyncio.timeout(_CONNECT_SECONDS):
                connection = await http.ws_connect(
                    url + wire.PATH,
                    headers={"Authorization": f"Bearer {self.address.token}"},
                    heartbeat=self._heartbeat,
                    max_msg_size=wire.LARGEST,
                )
            async with connection:
                return await self._use(connection)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return str(error) or repr(error)

    async def _use(self, socket: aiohttp.ClientWebSocketResponse) -> str:
        segments = self._segments
        greeting = {"epoch": self._epoch, "store": segments.store, "run": segments.run}
        await socket.send_bytes(dump_json({**greeting, "segments": segments.location.name}))
        message = await socket.receive(timeout=wire.HEARTBEAT)
        if message.type is not aiohttp.WSMsgType.BINARY:
            return "it closed the connection"
        answer = load_json(message.data)
        if "refused" in answer:
            self._refuse(str(answer["refused"]))
            return self.refused
        self.refused = ""
        self._outbox = asyncio.Queue()
        writing = asyncio.create_task(_write(socket, self._outbox))
        bringing_up = self._background.start(self._bring_up(socket, answer["hello"]), f"node {self.name}")
        try:
            async for message in socket:
                if message.type is aiohttp.WSMsgType.BINARY:
                    self._received(load_json(message.data))
            return "the connection broke"
        finally:
            writing.cancel()
            bringing_up.cancel()

    def _refuse(self, reason: str) -> None:
        if reason != self.refused:
            log.error("node %s refuses this server: %s", self.name, reason)
            self.refused = reason
            self._reports.changed(self)

    async def _bring_up(self, socket: aiohttp.ClientWebSocketResponse, hello: dict[str, Any]) -> None:
        earlier = self.hello.get("incarnation")
        if earlier not in (None, hello["incarnation"]) and not self.lost:
            self.lose(f"the process of node {self.name} was replaced")
        self.hello, self.lost = hello, ""
        self._update(hello)
        self.breakers = {one["component"]: BreakerStatus.model_validate(one) for one in hello["breakers"]}
        try:
            await self._reports.up(self)
        except ConnectionResetError:
            return
        except (TowlineError, OSError) as error:
            log.error("node %s cannot be used: %s", self.name, error)
            await socket.close()
            return
        self._set_connected(True)
        known = {*hello["running"], *hello["ended"]}
        for session_id, one in list(self._sessions.items()):
            if session_id not in known and one.submission is not None:
                self._send_submit(one)
            else:
                self._send_cancel(one)
        self._reports.changed(self)

    def _set_connected(self, connected: bool) -> None:
        self.connected = connected
        if connected or self.lost:
            self._usable.set()
        else:
            self._usable.clear()

    def _disconnected(self, reason: str) -> None:
        was = self.connected
        self._set_connected(False)
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.done():
                call.set_exception(ConnectionResetError(reason))
                call.exception()
        if was:
            self._reports.down(self)

    # Reports

    def _received(self, message: dict[str, Any]) -> None:
        if "id" in message:
            answer = self._calls.get(message["id"])
            if answer is not None and not answer.done():
                if "error" in message:
                    answer.set_exception(wire.load_error(message["error"]))
                else:
                    answer.set_result(message["result"])
            return
        match message["report"]:
            case "ended":
                self._ended(message["outcome"])
            case "session":
                self._reports.session(self, Session.model_validate(message["session"]))
            case "breaker":
                status = BreakerStatus.model_validate(message["status"])
                self.breakers[status.component] = status
                self._reports.changed(self)
            case "engine_failed":
                self._reports.engine_failed(message["engine"], FailureReason(message["reason"]))
            case "status":
                self._update(message)
                self._reports.changed(self)

    def _update(self, message: dict[str, Any]) -> None:
        self.status, self.version, self.trouble = message["status"], message["version"], message["trouble"]

    def _ended(self, fields: dict[str, Any]) -> None:
        session_id = fields["session"]["session_id"] if "session" in fields else fields["session_id"]
        one = self._sessions.get(session_id)
        if one is None:
            if self.adopting:
                self._unclaimed[session_id] = fields
            return
        if one.outcome.done():
            return
        if "error" in fields:
            one.outcome.set_exception(wire.load_error(fields["error"]))
        else:
            one.outcome.set_result(wire.load_outcome(fields))


async def _write(socket: aiohttp.ClientWebSocketResponse, outbox: asyncio.Queue[bytes]) -> None:
    while True:
        await socket.send_bytes(await outbox.get())
