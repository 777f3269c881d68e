"""The node host: serves one node to the server over a WebSocket, from a process of its own.

One server drives a host at a time: a connection with a later epoch replaces the earlier one, and one with an earlier epoch
is refused. Sessions outlive a connection. The outcome of an ended session is reported on every new connection until the
server discards it; sessions that the server no longer wants are cancelled and discarded here.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

from towline.cluster import wire
from towline.cluster.runner import Runner, SessionOutcome
from towline.cluster.segments import Segments
from towline.common.background import BackgroundTasks
from towline.engines.base import PauseMode
from towline.errors import TowlineError
from towline.schema import BreakerStatus, EndReason, FailureReason, Session, Task
from towline.schema.files import dump_json, load_json

log = logging.getLogger("towline.host")
_STATUS_SECONDS = 1.0
"""Seconds between two status reports."""


class NodeHost:
    """One node behind a WebSocket."""

    def __init__(self, runner: Runner, token: str, facts: dict[str, Any]):
        """`token` is the secret that the server proves; `facts` describe the node's model and engine for display."""
        self.runner = runner
        self.incarnation = secrets.token_hex(8)
        """Differs for every process: whoever asks for sessions of another incarnation has lost them."""
        self._token = token
        self._facts = facts
        self._epoch = 0
        self._socket: web.WebSocketResponse | None = None
        self._running: dict[str, asyncio.Task[None]] = {}
        self._outcomes: dict[str, dict[str, Any]] = {}
        """Outcomes of ended sessions that the server has not discarded."""
        self._recovered = False
        self._segments: Segments | None = None
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._background = BackgroundTasks()
        self._calls: dict[str, Callable[..., Awaitable[Any]]] = {
            "probe": runner.probe,
            "status": self._node_status,
            "check": self._check,
            "prefetch": self._prefetch,
            "recover": self._recover,
            "keep": self._keep,
            "store": self._store,
            "discard": self._discard,
            "erase": runner.erase,
            "read_log": self._read_log,
            "metrics": self._metrics,
            "pause": self._pause,
            "resume": runner.resume,
            "update_weights": self._update_weights,
            "announce": runner.announce,
        }
        runner.watch_sessions(self._session_changed)
        runner.watch_breakers(self._breaker_changed)
        runner.watch_engines(self._engine_failed)

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_get(wire.PATH, self._serve)
        return application

    def start(self) -> None:
        self._background.start(self._report_status())

    async def close(self) -> None:
        await self._background.close()
        if self._socket is not None:
            await self._socket.close()

    # Connections

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            raise web.HTTPUnauthorized(text="wrong token")
        connection = web.WebSocketResponse(heartbeat=wire.HEARTBEAT, max_msg_size=wire.LARGEST, compress=False)
        await connection.prepare(request)
        hello = load_json(await connection.receive_bytes())
        if hello["epoch"] < self._epoch:
            await connection.send_bytes(dump_json({"refused": f"a server of epoch {self._epoch} drives this node"}))
            await connection.close()
            return connection
        try:
            segments = await self._open_segments(hello)
        except (TowlineError, OSError) as error:
            await connection.send_bytes(dump_json({"refused": str(error)}))
            await connection.close()
            return connection
        earlier, self._socket, self._epoch = self._socket, connection, hello["epoch"]
        if earlier is not None:
            await earlier.close()
        await self.runner.use_store(segments, hello["epoch"])
        greeting = await self._greeting()
        # Whatever was reported to an earlier connection is said again, or is part of the greeting, which comes first.
        outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._outbox = outbox
        self._send({"hello": greeting})
        for fields in self._outcomes.values():
            self._send({"report": "ended", "outcome": fields})
        writer = asyncio.create_task(_write(connection, outbox))
        try:
            async for message in connection:
                if message.type is WSMsgType.BINARY and self._socket is connection:
                    self._received(load_json(message.data), connection)
        finally:
            writer.cancel()
            if self._socket is connection:
                self._socket = None
        return connection

    async def _open_segments(self, hello: dict[str, Any]) -> Segments:
        """Where this server stores trajectories; raises `OSError` if that is not visible from here.

        A run keeps its object over connections: file numbers must not start again.
        """
        place, store, run = hello["segments"], hello["store"], hello["run"]
        known = self._segments
        if known is not None and (known.location.name, known.store, known.run) == (place, store, run):
            return known
        segments = Segments(place, writer=f"{self.runner.name}-{self.incarnation}")
        segments.set_owner(store, run)
        if not await segments.marked(store):
            raise OSError(
                f"{place} on {socket.gethostname()} is not the folder that the server stores trajectories in: set "
                "server.segments to a folder that all nodes share, or to a URL"
            )
        self._segments = segments
        return segments

    async def _greeting(self) -> dict[str, Any]:
        runner = self.runner
        return {
            **self._facts,
            "incarnation": self.incarnation,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "capacity": runner.capacity,
            "starting": 0,
            "running": list(self._running),
            "ended": list(self._outcomes),
            "recovered": self._recovered,
            "breakers": [one.model_dump(mode="json") for one in runner.breakers],
            **await self._status(),
        }

    def _send(self, message: dict[str, Any]) -> None:
        if self._socket is not None:
            self._outbox.put_nowait(dump_json(message))

    def _received(self, message: dict[str, Any], connection: web.WebSocketResponse) -> None:
        args = message.get("args", {})
        match message["call"]:
            case "submit":
                self._submit(**args)
            case "cancel":
                self.runner.cancel(args["session_id"], EndReason(args["reason"]))
            case "forget":
                self.runner.forget(**args)
            case name:
                self._background.start(self._answer(message["id"], name, args, connection))

    async def _answer(self, id: int, name: str, args: dict[str, Any], connection: web.WebSocketResponse) -> None:
        """Answer a call over the connection that it came by: on another one the number is that of another call."""
        try:
            answer = {"id": id, "result": await self._calls[name](**args)}
        except (TowlineError, OSError) as error:
            answer = {"id": id, "error": wire.dump_error(error)}
        except Exception as error:
            log.exception("call %s failed", name)
            answer = {"id": id, "error": wire.dump_error(error)}
        if self._socket is connection:
            self._send(answer)

    # Reports

    def _session_changed(self, session: Session) -> None:
        self._send({"report": "session", "session": session.model_dump(mode="json")})

    def _breaker_changed(self, status: BreakerStatus) -> None:
        self._send({"report": "breaker", "status": status.model_dump(mode="json")})

    def _engine_failed(self, engine: str, reason: FailureReason) -> None:
        self._send({"report": "engine_failed", "engine": engine, "reason": reason.value})

    async def _report_status(self) -> None:
        while True:
            await asyncio.sleep(_STATUS_SECONDS)
            self._send({"report": "status", **await self._status()})

    async def _status(self) -> dict[str, Any]:
        status = await self._node_status()
        return {"status": status, "version": self.runner.version, "trouble": self.runner.trouble}

    # Calls

    def _submit(self, task: dict[str, Any], session: dict[str, Any]) -> None:
        one = Session.model_validate(session)
        if one.session_id in self._running or one.session_id in self._outcomes:
            return
        try:
            running = self.runner.submit(Task.model_validate(task), one)
        except Exception as error:  # whatever it is, the server must hear of it
            running = _raise(error)
        self._running[one.session_id] = self._background.start(self._run(one.session_id, running))

    async def _run(self, session_id: str, running: Awaitable[SessionOutcome]) -> None:
        try:
            fields = wire.dump_outcome(await running)
        except Exception as error:
            log.exception("session %s failed", session_id)
            fields = {"session_id": session_id, "error": wire.dump_error(error)}
        del self._running[session_id]
        self._outcomes[session_id] = fields
        self._send({"report": "ended", "outcome": fields})

    async def _node_status(self) -> dict[str, Any]:
        (status,) = await self.runner.nodes()
        return status

    async def _check(self, task: dict[str, Any]) -> None:
        await self.runner.check(Task.model_validate(task))

    async def _prefetch(self, tasks: list[dict[str, Any]], seconds: float) -> list[str]:
        """Prepare what these tasks need; returns why some could not be prepared, which their sessions will find again."""
        return await self.runner.prefetch([Task.model_validate(one) for one in tasks], seconds)

    async def _recover(self, lost: list[str]) -> list[dict[str, Any]]:
        """Only of a fresh process: one that already runs sessions has nothing to recover."""
        if self._recovered:
            return []
        self._recovered = True
        return [wire.dump_outcome(one) async for one in self.runner.recover(set(lost))]

    async def _keep(self, session_ids: list[str]) -> None:
        """Cancel and discard every other session: the server has given them up."""
        unwanted = {*self._running, *self._outcomes} - set(session_ids)
        for session_id in unwanted & self._running.keys():
            self.runner.cancel(session_id)
        await asyncio.gather(*(self._running[one] for one in unwanted & self._running.keys()))
        for session_id in unwanted:
            await self._discard(session_id)

    async def _store(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        stored = await self.runner.store([wire.load_request(one) for one in requests])
        return [wire.dump_stored(one) for one in stored]

    async def _discard(self, session_id: str) -> None:
        self._outcomes.pop(session_id, None)
        await self.runner.discard(session_id)

    async def _read_log(self, session_id: str, name: str, most: int) -> dict[str, Any]:
        found = await self.runner.read_log(session_id, name, most)
        return {"data": found.data.decode("latin-1"), "left_out": found.left_out, "names": found.names}

    async def _metrics(self) -> list[dict[str, Any]]:
        return [wire.dump_metric(one) for one in await self.runner.metrics()]

    async def _pause(self, mode: str, deadline: float | None) -> None:
        await self.runner.pause(PauseMode(mode), deadline)

    async def _update_weights(self, folder: str, version: int) -> None:
        await self.runner.update_weights(Path(folder), version)


async def _write(connection: web.WebSocketResponse, outbox: asyncio.Queue[bytes]) -> None:
    while True:
        await connection.send_bytes(await outbox.get())


async def _raise(error: Exception) -> SessionOutcome:
    raise error
