"""The front door: what is checked of every request before a route sees it, and before its body is read.

In this order: the host that it names, the page that it comes from, its key, and the length of its body. Every path needs a
key but those in `OPEN`, so that a new route is closed until it is opened here. A request that is refused costs the service
its headers: the body is neither kept nor parsed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from towline.config import ServerSettings
from towline.config.tenants import TenantLimits
from towline.schema import Problem
from towline.server.api.auth import ANONYMOUS, Caller
from towline.server.api.connections import address_group
from towline.server.api.hosts import AllowedHosts, same_origin, split_host
from towline.server.api.key_guesses import GuessLimiter
from towline.server.api.protocol import CONNECTION
from towline.server.errors import BodyTooLarge, Forbidden, RequestError, TooManyGuesses, Unauthorized, Unavailable
from towline.server.service import Service

OPEN = frozenset({"/healthz", "/livez", "/openapi.json", "/docs", "/redoc"})
"""Paths that need no key."""
LARGE = ("/v1/tasks", "/v1/files")
"""Paths that take bodies up to `server.body_bytes`."""
UPLOADS = "/v1/files"
"""Path whose bodies are streamed to a file."""
SMALL_BODY = 4 * 1024 * 1024
"""Largest body of every other path."""
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
)
"""On every response: what agents and tasks wrote is data to a browser, and no other site may embed it."""
POLICY = b"default-src 'none'; frame-ancestors 'none'"
"""Content security policy of every response that sets none: nothing in it is loaded or run."""


@dataclass(slots=True)
class RequestHead:
    """A request without its body."""

    method: str
    path: str
    version: str
    headers: Mapping[str, list[str]]
    local: str | None
    """Address of the service that the client connected to."""
    address: str
    """`address_group` of the client."""

    @classmethod
    def of(cls, scope: Scope) -> RequestHead:
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        client, server = scope.get("client"), scope.get("server")
        return cls(
            scope["method"],
            scope["path"],
            scope.get("http_version", "1.1"),
            headers,
            server[0] if server else None,
            address_group(client[0] if client else None),
        )

    def one(self, name: str) -> str | None:
        """The header's value; raises `RequestError` if it is given twice, as two readers could then see two values."""
        values = self.headers.get(name, [])
        if len(values) > 1:
            raise RequestError(f"header {name} is given {len(values)} times")
        return values[0] if values else None


def check_host(head: RequestHead, allowed: AllowedHosts) -> tuple[str, int | None]:
    """Name and port under which the client addresses the service; raises `RequestError` unless it is one of its names."""
    value = head.one("host")
    if value is None and head.version == "1.0":
        return "", None
    found = split_host(value or "")
    if found is None:
        raise RequestError("header host is missing, or not a host")
    if not allowed.allows(found[0], head.local):
        raise Forbidden(
            f"this service is not known as {found[0][:100]!r}: use its own address, or add the name to server.allowed_hosts"
        )
    return found


def check_origin(head: RequestHead, host: tuple[str, int | None]) -> None:
    """Raise `RequestError` for a request that a page of another site makes."""
    origin = head.one("origin")
    if origin is not None and not same_origin(origin, host):
        raise Forbidden("a web page of another origin may not use this service")
    # Browsers omit `Origin` where a page only embeds or links; links to the open pages are fine.
    if head.one("sec-fetch-site") in ("cross-site", "same-site") and head.path not in OPEN:
        raise Forbidden("a web page of another site may not use this service")


def body_limit(path: str, settings: ServerSettings) -> int:
    """Largest body of a request to this path, in bytes."""
    return settings.body_bytes if path.rstrip("/") in LARGE else min(settings.body_bytes, SMALL_BODY)


def tenant_body_limit(path: str, most: int, limits: TenantLimits) -> int:
    """Largest body of a tenant's request to this path; uploads are streamed, and their own quota bounds them."""
    if path.rstrip("/") == UPLOADS:
        return limits.file_bytes if limits.file_bytes is not None else 2**63
    return most if limits.body_bytes is None else min(most, limits.body_bytes)


def check_length(head: RequestHead, most: int) -> None:
    """Raise `RequestError` for a body that says that it is larger than `most` bytes."""
    length = head.one("content-length") or "0"
    if length.isdecimal() and int(length[:20]) > most:
        raise BodyTooLarge(f"the body is larger than {most} bytes")


class FrontDoor:
    """Middleware that lets only acceptable requests in."""

    def __init__(self, app: ASGIApp, service: Service, hosts: AllowedHosts | None = None):
        self.app = app
        self.service = service
        self.hosts = hosts or AllowedHosts(service.settings.host, service.settings.allowed_hosts)
        self.guesses = GuessLimiter(service.settings.http.key_guesses)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        most = body_limit(scope["path"], self.service.settings)
        counted: AbstractContextManager[None] = nullcontext()
        try:
            head = RequestHead.of(scope)
            check_origin(head, check_host(head, self.hosts))
            if head.path not in OPEN:
                caller = await self.authenticate(head)
                if caller is not ANONYMOUS:
                    _prove(scope)
                if not caller.admin:
                    most = tenant_body_limit(head.path, most, self.service.tenants.limits(caller.tenant))
                    self.service.requests.take(caller.tenant)
                    counted = self.service.requests.in_flight_of(caller.tenant)
            check_length(head, most)
        except RequestError as error:
            await problem(error)(scope, receive, _guarded(send))
        except (SQLAlchemyError, OSError):
            answer = problem(Unavailable("the database is down: retry later", retry_after=2.0))
            await answer(scope, receive, _guarded(send))
        else:
            with counted:
                await self.app(scope, _bounded(receive, most), _guarded(send))

    async def authenticate(self, head: RequestHead) -> Caller:
        """The caller; raises `Unauthorized`, or `RequestError` with 429 for an address that guesses keys."""
        given = head.one("authorization")
        if given is None:
            return await self.service.keys.caller(None)
        wait = self.guesses.retry_after(head.address, given)
        if wait is not None:
            raise TooManyGuesses("too many unknown keys from this address: retry later", retry_after=wait)
        try:
            caller = await self.service.keys.caller(given)
        except Unauthorized:
            self.guesses.failed(head.address)
            raise
        self.guesses.succeeded(given)
        return caller


def _prove(scope: Scope) -> None:
    found: dict[str, Any] = scope.get("extensions", {}).get(CONNECTION, {})
    if found:
        found["connection"].prove()


def problem(error: RequestError) -> JSONResponse:
    """The response to a request that is refused."""
    headers = {} if error.retry_after is None else {"Retry-After": str(math.ceil(error.retry_after))}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(Problem(error=str(error), field=error.field).model_dump(), error.status, headers)


def _guarded(send: Send) -> Send:
    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            given = {name.lower() for name, _ in headers}
            headers += [one for one in (*HEADERS, (b"content-security-policy", POLICY)) if one[0] not in given]
            message = {**message, "headers": headers}
        await send(message)

    return guarded


def _bounded(receive: Receive, most: int) -> Receive:
    taken = 0

    async def bounded() -> Message:
        nonlocal taken
        message = await receive()
        if message["type"] == "http.request":
            taken += len(message.get("body", b""))
            if taken > most:
                raise HTTPException(413, f"the body is larger than {most} bytes")
        return message

    return bounded
