"""The provider listener: authenticate, read, continue, sample, record, reply.

Plain ASGI, because it is on the path of every token. Whatever a harness sends, the response is in its provider's own format:
a reply, or an error that says what is wrong. The whole turn is sampled and in the journal before its first content is sent;
until then a stream is kept alive with the provider's own pings.
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

from towline.common import exact_json
from towline.common.crashpoints import crash_point
from towline.conversation import Request
from towline.dialects.base import Dialect, DialectCall, ReplyStream, Response, Route
from towline.errors import ApiError, BadRequest, ErrorKind, FidelityError
from towline.gateway.budgets import SessionUsage
from towline.gateway.calls import FailedCall
from towline.gateway.gateway import Gateway
from towline.gateway.off_loop import LARGE_BYTES, off_loop
from towline.gateway.session import GatewaySession, RequestTurns
from towline.schema import POLICY

log = logging.getLogger("towline.gateway")
_KEY_IN_PATH = re.compile(r"/s/([A-Za-z0-9_-]{8,200})(/.*)")
_CHUNK_BYTES = 65_536
_STORED_OPERATIONS = ("stored", "delete_stored")
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class _Disconnected(Exception):
    """The client closed its connection."""


class HttpExchange:
    """One HTTP request and its response, and whether the client is still connected."""

    def __init__(self, receive: Receive, send: Send):
        self._receive = receive
        self._send = send
        self._watch: asyncio.Task[None] | None = None
        self.started = False
        self.ended = False
        self.disconnected = False
        self.stream: ReplyStream | None = None
        """Writes the response, once it has started as a stream."""

    async def body(self, limit: int, announced: str, usage: SessionUsage) -> bytes:
        """The request's body; `announced` is its content-length header, if any. Counted in `usage` while it arrives."""
        chunks: list[bytes] = []
        size = 0
        if announced.isascii() and announced.isdecimal() and int(announced) > limit:
            raise usage.too_large(limit)
        try:
            while True:
                event: Event = await self._receive()
                if event["type"] == "http.disconnect":
                    self.disconnected = True
                    raise _Disconnected
                chunk = event.get("body", b"")
                if size + len(chunk) > limit:
                    raise usage.too_large(limit)
                usage.receive(len(chunk))
                size += len(chunk)
                if chunk:
                    chunks.append(chunk)
                if not event.get("more_body", False):
                    return chunks[0] if len(chunks) == 1 else b"".join(chunks)
        finally:
            usage.received(size)

    def watch(self) -> asyncio.Task[None]:
        """A task that ends when the client disconnects."""
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._until_disconnected())
        return self._watch

    async def _until_disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.disconnected = True

    def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    async def respond(self, response: Response) -> bool:
        """Send the whole response; returns whether the client stayed connected to the end."""
        headers = {"content-type": "application/json", **response.headers, "content-length": str(len(response.body))}
        await self.begin(response.status, headers)
        return await self.end(response.body)

    async def begin(self, status: int, headers: dict[str, str]) -> None:
        self.started = True
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def begin_stream(self, stream: ReplyStream) -> bytes:
        """Send the headers; returns the first bytes, which are sent with what follows."""
        self.stream = stream
        await self.begin(200, {"content-type": stream.content_type, **_STREAM_HEADERS})
        return stream.start()

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes) -> bool:
        """Send the rest of the response; returns whether the client stayed connected to the end.

        Each chunk waits until most of the previous ones have been received, so that a disconnect in the middle of a long
        response is noticed. Only the last chunk contains what the client takes for the end of the response.
        """
        self.watch()
        start = 0
        while len(data) - start > _CHUNK_BYTES and not self.disconnected:
            await self.write(data[start : start + _CHUNK_BYTES])
            start += _CHUNK_BYTES
        # The client may just have disconnected; let the watch task run.
        await asyncio.sleep(0)
        if self.disconnected:
            return False
        self.ended = True
        await self._send({"type": "http.response.body", "body": data[start:] if start else data})
        return not self.disconnected


class ProviderApp:
    """Serves every dialect at its provider's paths."""

    def __init__(self, gateway: Gateway, dialects: Sequence[Dialect], *, only: str | None = None):
        """With `only`, serves that one session and no other."""
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
        exchange = HttpExchange(receive, send)
        path, key = _split_path(scope)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        dialect: Dialect | None = None

        async def refuse(error: ApiError) -> None:
            await _refuse(exchange, dialect or self._error_dialect(path, headers), error)

        try:
            route, dialect, values = self._find(scope["method"], path, headers)
            if route.operation == "probe":
                await exchange.respond(Response(200, b""))
                return
            query = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
            session = self._authenticate(key, headers, query)
            with session.usage.exchange():
                await self._serve(
                    exchange, session, dialect, route, DialectCall(route.operation, {}, headers, query, values)
                )
        except _Disconnected:
            return
        except ApiError as error:
            await refuse(error)
        except FidelityError:
            log.exception("token exactness violated; the turn is refused")
            await refuse(ApiError(ErrorKind.INTERNAL, "the gateway refused an inexact turn; see its log"))
        except Exception:
            log.exception("unexpected error while serving %s %s", scope["method"], scope["path"].split("/s/")[0])
            await refuse(ApiError(ErrorKind.INTERNAL, "internal error in the gateway; see its log"))
        finally:
            exchange.close()

    def _find(self, method: str, path: str, headers: dict[str, str]) -> tuple[Route, Dialect, dict[str, str]]:
        """The route of a path. Where several dialects have it, the one that claims the headers, else the first."""
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
        raise ApiError(ErrorKind.NOT_FOUND, f"unknown path: {method} {path}")

    def _error_dialect(self, path: str, headers: dict[str, str]) -> Dialect:
        """The dialect used to format an error for this path: of those with the path, the one that claims the headers."""
        named = dict.fromkeys(dialect for pattern, _, dialect in self._routes if pattern.fullmatch(path))
        among = list(named) or self._dialects
        return next((dialect for dialect in reversed(among) if dialect.claims(headers)), among[0])

    def _authenticate(self, key: str, headers: dict[str, str], query: dict[str, str]) -> GatewaySession:
        if not key:
            bearer = headers.get("authorization", "")
            if bearer[:7].lower() == "bearer ":
                key = bearer[7:].strip()
        key = key or headers.get("x-api-key", "") or headers.get("x-goog-api-key", "") or query.get("key", "")
        if not key:
            raise ApiError(ErrorKind.UNAUTHORISED, "no API key; send the session's key")
        session = self.gateway.by_key(key)
        if session is None or (self.only is not None and session.id != self.only):
            raise ApiError(ErrorKind.UNAUTHORISED, "the API key does not belong to an open session")
        return session

    async def _serve(
        self, exchange: HttpExchange, session: GatewaySession, dialect: Dialect, route: Route, call: DialectCall
    ) -> None:
        if route.operation == "models":
            await exchange.respond(dialect.models(session.models, self.gateway.created))
            return
        if route.operation == "model":
            await exchange.respond(dialect.model(call.path["model"], self.gateway.created))
            return
        if route.operation == "upgrade":
            # WebSockets are not supported; clients fall back to POST on this status.
            await exchange.respond(Response(426, b"", {"upgrade": "websocket", "connection": "close"}))
            return
        if route.operation in _STORED_OPERATIONS:
            await self._stored(exchange, session, dialect, route, call)
            return
        limit, usage = self.gateway.settings.body_bytes, session.usage
        body = await exchange.body(limit, call.headers.get("content-length", ""), usage)
        large = len(body) > LARGE_BYTES
        request: Request | None = None
        try:
            usage.check_values(body)
            call.body = await off_loop(_json, body) if large else _json(body)
            usage.check_counts(dialect.items(call.body), call.body.get("tools"))
            request, conversation = await session.read_request(dialect, call, large=large)
            usage.check_counts(request.messages, request.tools)
            await session.fetch_images(request, conversation, self.gateway.images)
            images = await session.resolve_images(request, conversation)
            if route.operation == "count_tokens":
                count = await session.count_request(request, conversation, images, large=large)
                await exchange.respond(dialect.count(count))
                return
            turns = await session.start_request(request, conversation, images, large=large)
        except RecursionError as error:
            raise BadRequest("the request body is nested too deeply") from error
        except ApiError as error:
            if request is None or not request.stream or error.kind not in dialect.errors_in_stream:
                raise
            stream = dialect.stream(request, secrets.token_hex(12), int(time.time()), request.model)
            await exchange.end(await exchange.begin_stream(stream) + stream.error(error))
            return
        except Exception as error:
            session.calls.fail(FailedCall("internal", str(error) or repr(error), POLICY, None, None))
            raise
        try:
            if request.stream:
                await self._stream(exchange, session, dialect, turns)
            else:
                await self._whole(exchange, session, dialect, turns)
        except (_Disconnected, ApiError):
            raise
        except Exception as error:
            # The turn was sampled but cannot be delivered: not the policy's fault.
            session.undelivered(turns, error)
            raise
        finally:
            session.release(turns, self.gateway.settings.orphan_seconds)

    async def _stored(
        self, exchange: HttpExchange, session: GatewaySession, dialect: Dialect, route: Route, call: DialectCall
    ) -> None:
        """A response stored by id: returned whole or as a stream, or deleted."""
        answer = call.path["answer"]
        if route.operation == "delete_stored":
            session.responses.delete(answer)
            body = orjson.dumps({"id": answer, "object": "response", "deleted": True})
            await exchange.respond(Response(200, body))
            return
        turns = session.stored(answer, call.query)
        error = await session.failed(turns)
        if error is not None:
            raise error
        kept = session.answer(turns)
        if not turns.request.stream:
            await exchange.respond(dialect.write(turns.request, kept))
            return
        stream = dialect.stream(turns.request, turns.id, kept.created, kept.model)
        await exchange.end(await exchange.begin_stream(stream) + b"".join(stream.finish(kept)))

    async def _whole(
        self, exchange: HttpExchange, session: GatewaySession, dialect: Dialect, turns: RequestTurns
    ) -> None:
        if not turns.work.done():
            await asyncio.wait((turns.work, exchange.watch()), return_when=asyncio.FIRST_COMPLETED)
            if exchange.disconnected:
                raise _Disconnected
        error = await session.failed(turns)
        if error is not None:
            raise error
        crash_point("gateway.before_reply")
        received = await exchange.respond(dialect.write(turns.request, session.answer(turns)))
        crash_point("gateway.after_reply")
        if received:
            await session.delivered(turns)

    async def _stream(
        self, exchange: HttpExchange, session: GatewaySession, dialect: Dialect, turns: RequestTurns
    ) -> None:
        ping = self.gateway.settings.ping_seconds
        stream = dialect.stream(turns.request, turns.id, int(time.time()), turns.request.model)
        head = b""
        while not turns.work.done():
            await asyncio.wait((turns.work, exchange.watch()), timeout=ping, return_when=asyncio.FIRST_COMPLETED)
            if exchange.disconnected:
                raise _Disconnected
            if turns.work.done():
                break
            if not exchange.started:
                head = await exchange.begin_stream(stream)
            await exchange.write(head + stream.ping())
            head = b""
        error = await session.failed(turns)
        if error is not None:
            raise error
        answer = session.answer(turns)
        if not exchange.started:
            head = await exchange.begin_stream(stream)
        crash_point("gateway.before_reply")
        received = await exchange.end(head + b"".join(stream.finish(answer)))
        crash_point("gateway.after_reply")
        if received:
            await session.delivered(turns)


async def _refuse(exchange: HttpExchange, dialect: Dialect, error: ApiError) -> None:
    if exchange.disconnected or exchange.ended:
        return
    if not exchange.started:
        await exchange.respond(dialect.error(error))
    elif exchange.stream is not None:
        await exchange.end(exchange.stream.error(error))


def _claimed(routes: Sequence[tuple[Route, Dialect]], headers: dict[str, str]) -> tuple[Route, Dialect]:
    if len(routes) == 1:
        return routes[0]
    return next((found for found in reversed(routes) if found[1].claims(headers)), routes[0])


def _split_path(scope: Scope) -> tuple[str, str]:
    """The path without the key in it, and the key."""
    path: str = scope["path"]
    found = _KEY_IN_PATH.fullmatch(path)
    return (found.group(2), unquote(found.group(1))) if found is not None else (path, "")


def _pattern(route: Route) -> re.Pattern[str]:
    """`{name}` matches one path segment, `{name:path}` the rest."""
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
        raise BadRequest(f"the request body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadRequest("the request body must be a JSON object")
    return value
