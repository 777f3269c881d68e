"""The provider listener: authenticate, read, continue, sample, record, reply.

Plain ASGI, since it is on the path of every token. Whatever a harness sends, the answer is in its provider's own shape:
a reply, or an error that says what is wrong. The whole turn is sampled and in the journal before its first content goes
out; until then a stream is kept alive with the provider's own pings.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl, unquote

import orjson
from starlette.types import Message as Event
from starlette.types import Receive, Scope, Send

from towline import exact_json
from towline.conversation import Request
from towline.crashpoints import crash_point
from towline.dialects.base import Call, Dialect, Response, Route, Stream
from towline.errors import ApiError, BadRequest, ErrorKind, FidelityError
from towline.gateway.calls import FailedCall
from towline.gateway.gateway import Gateway
from towline.gateway.session import Session, Turns
from towline.schema import POLICY

log = logging.getLogger("towline.gateway")
_IN_PATH = re.compile(r"/s/([A-Za-z0-9_-]{8,200})(/.*)")
_PIECE = 65_536
_STORED = ("stored", "delete_stored")
_STREAMED = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class _Left(Exception):
    """The client closed its connection."""


class Connection:
    """One HTTP exchange: its body, its answer, and whether the client is still there."""

    def __init__(self, receive: Receive, send: Send):
        self._receive = receive
        self._send = send
        self._watch: asyncio.Task[None] | None = None
        self.started = False
        self.ended = False
        self.left = False
        self.stream: Stream | None = None
        """Writes the answer, if that has begun as a stream."""

    async def body(self, limit: int, announced: str) -> bytes:
        """The request's body; `announced` is its content-length header, if it has one."""
        chunks: list[bytes] = []
        size = 0
        if announced.isascii() and announced.isdecimal() and int(announced) > limit:
            raise ApiError(ErrorKind.TOO_LARGE, f"the body is larger than {limit} bytes")
        while True:
            event: Event = await self._receive()
            if event["type"] == "http.disconnect":
                self.left = True
                raise _Left
            chunk = event.get("body", b"")
            size += len(chunk)
            if size > limit:
                raise ApiError(ErrorKind.TOO_LARGE, f"the body is larger than {limit} bytes")
            if chunk:
                chunks.append(chunk)
            if not event.get("more_body", False):
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def watch(self) -> asyncio.Task[None]:
        """A task that ends when the client leaves."""
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._until_left())
        return self._watch

    async def _until_left(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.left = True

    def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    async def respond(self, response: Response) -> bool:
        """The whole answer; whether the client was there until the end of it."""
        headers = {"content-type": "application/json", **response.headers, "content-length": str(len(response.body))}
        await self.begin(response.status, headers)
        return await self.end(response.body)

    async def begin(self, status: int, headers: dict[str, str]) -> None:
        self.started = True
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def begin_stream(self, stream: Stream) -> bytes:
        """Send the headers; the first bytes, to go out with what follows."""
        self.stream = stream
        await self.begin(200, {"content-type": stream.content_type, **_STREAMED})
        return stream.start()

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes) -> bool:
        """The rest of the answer; whether the client was there until the end of it.

        Every piece waits until most of those before it have been taken, so that a client that leaves in the middle of a
        long answer is noticed. What it takes for the end of the answer is in the last piece only.
        """
        self.watch()
        start = 0
        while len(data) - start > _PIECE and not self.left:
            await self.write(data[start : start + _PIECE])
            start += _PIECE
        # A client may have left in this very moment; the watch gets its turn to notice.
        await asyncio.sleep(0)
        if self.left:
            return False
        self.ended = True
        await self._send({"type": "http.response.body", "body": data[start:] if start else data})
        return not self.left


class ProviderApp:
    """Serves every dialect at its usual paths."""

    def __init__(self, gateway: Gateway, dialects: Sequence[Dialect], *, only: str | None = None):
        """With `only`, the listener serves that one session and no other."""
        self.gateway = gateway
        self.only = only
        self._dialects = tuple(dialects)
        self._routes = [(_pattern(route), route, dialect) for dialect in dialects for route in dialect.routes]
        self._fixed: dict[tuple[str, str], list[tuple[Route, Dialect]]] = {}
        for _, route, dialect in self._routes:
            if "{" not in route.path:
                self._fixed.setdefault((route.method, route.path), []).append((route, dialect))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        connection = Connection(receive, send)
        path, key = _split_path(scope)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        dialect: Dialect | None = None

        async def refuse(error: ApiError) -> None:
            await _refuse(connection, dialect or self._nearest(path, headers), error)

        try:
            route, dialect, values = self._find(scope["method"], path, headers)
            if route.operation == "probe":
                await connection.respond(Response(200, b""))
                return
            query = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
            session = self._authenticate(key, headers, query)
            await self._serve(connection, session, dialect, route, Call(route.operation, {}, headers, query, values))
        except _Left:
            return
        except ApiError as error:
            await refuse(error)
        except FidelityError:
            log.exception("the exactness invariant is broken; the turn is refused")
            await refuse(ApiError(ErrorKind.INTERNAL, "the gateway refused an inexact turn"))
        except Exception:
            log.exception("unexpected error while answering %s %s", scope["method"], scope["path"].split("/s/")[0])
            await refuse(ApiError(ErrorKind.INTERNAL, "the gateway failed; its log says why"))
        finally:
            connection.close()

    def _find(self, method: str, path: str, headers: dict[str, str]) -> tuple[Route, Dialect, dict[str, str]]:
        """The route of a path. Where several dialects name it, the one that claims the headers, else the first."""
        fixed = self._fixed.get((method, path))
        if fixed is not None:
            return *_claimed(fixed, headers), {}
        matches: list[tuple[Route, Dialect]] = []
        values: list[dict[str, str]] = []
        known = False
        for pattern, route, dialect in self._routes:
            found = pattern.fullmatch(path)
            if found is not None:
                known = True
                if route.method == method:
                    matches.append((route, dialect))
                    values.append(found.groupdict())
        if matches:
            chosen = _claimed(matches, headers)
            return *chosen, values[matches.index(chosen)]
        if known:
            raise ApiError(ErrorKind.METHOD, f"{method} is not allowed for {path}")
        raise ApiError(ErrorKind.NOT_FOUND, f"no such path: {method} {path}")

    def _nearest(self, path: str, headers: dict[str, str]) -> Dialect:
        """Whose shape an error has: of those that name the path, or else of all, the one that claims the headers."""
        named = dict.fromkeys(dialect for pattern, _, dialect in self._routes if pattern.fullmatch(path))
        among = list(named) or self._dialects
        return next((dialect for dialect in reversed(among) if dialect.claims(headers)), among[0])

    def _authenticate(self, key: str, headers: dict[str, str], query: dict[str, str]) -> Session:
        if not key:
            bearer = headers.get("authorization", "")
            if bearer[:7].lower() == "bearer ":
                key = bearer[7:].strip()
        key = key or headers.get("x-api-key", "") or headers.get("x-goog-api-key", "") or query.get("key", "")
        if not key:
            raise ApiError(ErrorKind.UNAUTHORISED, "no API key: give the session's key")
        session = self.gateway.by_key(key)
        if session is None or (self.only is not None and session.id != self.only):
            raise ApiError(ErrorKind.UNAUTHORISED, "the API key is not that of an open session")
        return session

    async def _serve(
        self, connection: Connection, session: Session, dialect: Dialect, route: Route, call: Call
    ) -> None:
        if route.operation == "models":
            await connection.respond(dialect.models(session.models, self.gateway.created))
            return
        if route.operation == "model":
            await connection.respond(dialect.model(call.path["model"], self.gateway.created))
            return
        if route.operation == "upgrade":
            # There is no WebSocket here; clients that try one fall back to POST on this answer.
            await connection.respond(Response(426, b"", {"upgrade": "websocket", "connection": "close"}))
            return
        if route.operation in _STORED:
            await self._stored(connection, session, dialect, route, call)
            return
        limit = self.gateway.settings.body_bytes
        call.body = _json(await connection.body(limit, call.headers.get("content-length", "")))
        request: Request | None = None
        try:
            request, thread = session.read(dialect, call)
            images = await session.look(request, thread)
            if route.operation == "count_tokens":
                await connection.respond(dialect.count(session.count(request, thread, images)))
                return
            turns = session.start(request, thread, images)
        except RecursionError as error:
            raise BadRequest("the body is nested too deeply") from error
        except ApiError as error:
            if request is None or not request.stream or error.kind not in dialect.told_in_stream:
                raise
            stream = dialect.stream(request, secrets.token_hex(12), int(time.time()), request.model)
            await connection.end(await connection.begin_stream(stream) + stream.error(error))
            return
        except Exception as error:
            session.calls.fail(FailedCall("internal", str(error) or repr(error), POLICY, None, None))
            raise
        try:
            if request.stream:
                await self._stream(connection, session, dialect, turns)
            else:
                await self._whole(connection, session, dialect, turns)
        except (_Left, ApiError):
            raise
        except Exception as error:
            # Sampled, and the client gets no answer all the same: nothing that the policy did.
            session.undelivered(turns, error)
            raise
        finally:
            session.release(turns, self.gateway.settings.orphan_seconds)

    async def _stored(
        self, connection: Connection, session: Session, dialect: Dialect, route: Route, call: Call
    ) -> None:
        """An answer that was kept under its id: shown again, whole or as the stream that it was, or forgotten."""
        answer = call.path["answer"]
        if route.operation == "delete_stored":
            session.answers.forget(answer)
            body = orjson.dumps({"id": answer, "object": "response", "deleted": True})
            await connection.respond(Response(200, body))
            return
        turns = session.stored(answer, call.query)
        error = await session.failed(turns)
        if error is not None:
            raise error
        kept = session.answer(turns)
        if not turns.request.stream:
            await connection.respond(dialect.write(turns.request, kept))
            return
        stream = dialect.stream(turns.request, turns.id, kept.created, kept.model)
        await connection.end(await connection.begin_stream(stream) + b"".join(stream.finish(kept)))

    async def _whole(self, connection: Connection, session: Session, dialect: Dialect, turns: Turns) -> None:
        if not turns.work.done():
            await asyncio.wait((turns.work, connection.watch()), return_when=asyncio.FIRST_COMPLETED)
            if connection.left:
                raise _Left
        error = await session.failed(turns)
        if error is not None:
            raise error
        crash_point("gateway.before_reply")
        received = await connection.respond(dialect.write(turns.request, session.answer(turns)))
        crash_point("gateway.after_reply")
        if received:
            await session.delivered(turns)

    async def _stream(self, connection: Connection, session: Session, dialect: Dialect, turns: Turns) -> None:
        ping = self.gateway.settings.ping_seconds
        stream = dialect.stream(turns.request, turns.id, int(time.time()), turns.request.model)
        head = b""
        while not turns.work.done():
            await asyncio.wait((turns.work, connection.watch()), timeout=ping, return_when=asyncio.FIRST_COMPLETED)
            if connection.left:
                raise _Left
            if turns.work.done():
                break
            if not connection.started:
                head = await connection.begin_stream(stream)
            await connection.write(head + stream.ping())
            head = b""
        error = await session.failed(turns)
        if error is not None:
            raise error
        answer = session.answer(turns)
        if not connection.started:
            head = await connection.begin_stream(stream)
        crash_point("gateway.before_reply")
        received = await connection.end(head + b"".join(stream.finish(answer)))
        crash_point("gateway.after_reply")
        if received:
            await session.delivered(turns)


async def _refuse(connection: Connection, dialect: Dialect, error: ApiError) -> None:
    if connection.left or connection.ended:
        return
    if not connection.started:
        await connection.respond(dialect.error(error))
    elif connection.stream is not None:
        await connection.end(connection.stream.error(error))


def _claimed(routes: Sequence[tuple[Route, Dialect]], headers: dict[str, str]) -> tuple[Route, Dialect]:
    if len(routes) == 1:
        return routes[0]
    return next((found for found in reversed(routes) if found[1].claims(headers)), routes[0])


def _split_path(scope: Scope) -> tuple[str, str]:
    """The path without a key in it, and that key."""
    path: str = scope["path"]
    found = _IN_PATH.fullmatch(path)
    return (found.group(2), unquote(found.group(1))) if found is not None else (path, "")


def _pattern(route: Route) -> re.Pattern[str]:
    """`{name}` is one path segment, `{name:path}` any rest."""
    parts = re.split(r"\{(\w+)(:path)?\}", route.path)
    text = ""
    for index in range(0, len(parts), 3):
        text += re.escape(parts[index])
        if index + 1 < len(parts):
            text += f"(?P<{parts[index + 1]}>{'.+' if parts[index + 2] else '[^/]+'})"
    return re.compile(text)


def _json(body: bytes) -> dict[str, Any]:
    try:
        value = exact_json.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object")
    return value
