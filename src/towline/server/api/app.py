"""The ASGI application and its socket: routes, one body for every error, and `serving` for the duration of a block.

Every error response is a `Problem`: what is wrong, in which field. Unexpected errors are logged here and answered with a
plain 500 that reveals nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from towline import __version__
from towline.cluster.runner import Runner
from towline.common.sockets import listen, url_of
from towline.config import ServerSettings
from towline.errors import ConfigError, DamagedData
from towline.schema import Problem
from towline.server.api import routes
from towline.server.api.auth import is_loopback
from towline.server.errors import RequestError
from towline.server.service import Service
from towline.server.store.database import is_transient

log = logging.getLogger("towline.server")
_SHAPE = ("one", "many")
"""The tags of the two shapes of a submission in the path of an error."""


def make_app(service: Service) -> FastAPI:
    refusals: dict[int | str, dict[str, Any]] = {
        status: {"model": Problem} for status in (400, 401, 403, 404, 409, 413, 422, 429, 503)
    }
    app = FastAPI(
        title="Towline",
        version=__version__,
        summary="Rollouts as a service: submit tasks, lease token-exact trajectories.",
        responses=refusals,
        dependencies=[Depends(_known_parameters)],
    )
    app.state.service = service
    app.include_router(routes.router)
    app.add_api_route("/healthz", _health, methods=["GET"], tags=["service"], response_model=dict[str, Any])
    app.add_api_route("/livez", _alive, methods=["GET"], tags=["service"], response_model=dict[str, Any])
    app.add_api_route("/metrics", _metrics, methods=["GET"], tags=["service"], response_class=Response)
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(SQLAlchemyError, _database_error)
    app.add_exception_handler(OSError, _unavailable)
    app.add_exception_handler(DamagedData, _damaged_data)
    app.add_exception_handler(Exception, _unexpected)
    app.add_middleware(_RequestGuard, service=service)
    return app


async def _health(request: Request) -> Response:
    """For monitors: 200 while sessions run (`ok`, `degraded`), 503 while none can (`held`, `broken`, `stopping`). No key."""
    health = request.app.state.service.health()
    return JSONResponse(health, 200 if health["status"] in ("ok", "degraded") else 503)


async def _alive(request: Request) -> Response:
    """For supervisors: 503 if only a restart helps; not for an engine, sandbox or database that is down. No key."""
    broken = request.app.state.service.scheduler.broken
    return JSONResponse({"alive": not broken, "error": broken or None}, 503 if broken else 200)


async def _metrics(service: routes.ServiceDep, caller: routes.Reader) -> Response:
    """For Prometheus."""
    return Response(await service.metrics_text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _known_parameters(request: Request) -> None:
    """Reject unknown query parameters: a caller would rely on one that is silently ignored."""
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    known = sorted(_parameters(route.dependant))
    for name in request.query_params:
        if name not in known:
            allowed = f"allowed: {', '.join(known)}" if known else "it takes none"
            raise RequestError(f"{route.path} has no query parameter {name[:100]!r}; {allowed}", field=name[:100])


def _parameters(dependant: Dependant) -> set[str]:
    """The query parameters of a route and its dependencies."""
    inner = [_parameters(one) for one in dependant.dependencies]
    return {field.alias for field in dependant.query_params}.union(*inner)


# Errors


def _problem(status: int, message: str, field: str | None = None, retry_after: float | None = None) -> JSONResponse:
    headers = {} if retry_after is None else {"Retry-After": str(math.ceil(retry_after))}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(Problem(error=message, field=field).model_dump(), status, headers)


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _problem(error.status, str(error), error.field, error.retry_after)


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_validation_error":
        return _problem(422, f"the body is not JSON: {first.get('ctx', {}).get('error', '')}".rstrip(": "))
    return _problem(422, str(first["msg"]).removeprefix("Value error, "), _path(first["loc"]))


def _path(places: Sequence[int | str]) -> str | None:
    """`body.many.3.environment.files.0` as `[3].environment.files[0]`."""
    where, *rest = places
    if where == "body" and rest and rest[0] in _SHAPE:
        rest = rest[1:]
    text = "".join(f"[{place}]" if isinstance(place, int) else f".{place}" for place in rest)
    return text.lstrip(".") or None


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = _problem(error.status_code, str(error.detail))
    answer.headers.update(error.headers or {})
    return answer


async def _database_error(request: Request, error: Exception) -> Response:
    return await (_unavailable if is_transient(error) else _unexpected)(request, error)


async def _unavailable(request: Request, error: Exception) -> Response:
    """The database or the trajectory storage is down."""
    service: Service = request.app.state.service
    if not service.store.outage.reason:
        service.unreadable.failed(f"{request.method} {request.url.path}: {error}")
    return _problem(503, "the database or the trajectory storage is down: retry later", retry_after=2)


async def _damaged_data(request: Request, error: Exception) -> Response:
    log.error("%s", error)
    return _problem(500, str(error))


async def _unexpected(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _problem(500, "internal error; see the server's log")


# Middleware


class _RequestGuard:
    """Rejects bodies that are too large, and requests from web pages to a service without keys."""

    def __init__(self, app: ASGIApp, service: Service):
        self.app = app
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        most = self.service.settings.body_bytes
        problem = None
        if headers.get(b"content-length", "0").isdecimal() and int(headers.get(b"content-length", "0")) > most:
            problem = _problem(413, f"the body is larger than {most} bytes")
        elif not self._is_local_request(headers):
            problem = await self._reject_without_keys()
        if problem is not None:
            await problem(scope, receive, send)
            return
        await self.app(scope, self._bounded(receive, most), send)

    async def _reject_without_keys(self) -> JSONResponse | None:
        keys = self.service.keys
        try:
            if keys.needed or await keys.exist():
                return None
        except (SQLAlchemyError, OSError):
            return _problem(503, "the database is down: retry later", retry_after=2)
        return _problem(403, "a service without API keys only accepts requests to localhost: create a key first")

    def _is_local_request(self, headers: dict[bytes, str]) -> bool:
        """Whether host and origin are loopback: a page of another site has another origin or host."""
        host = urlsplit("//" + headers.get(b"host", "localhost")).hostname or ""
        origin = headers.get(b"origin")
        return is_loopback(host) and (origin is None or is_loopback(urlsplit(origin).hostname or ""))

    def _bounded(self, receive: Receive, most: int) -> Receive:
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


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the command owns the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(slots=True)
class Serving:
    """A running service."""

    url: str
    service: Service


@contextlib.asynccontextmanager
async def serving(settings: ServerSettings, runner: Runner) -> AsyncIterator[Serving]:
    """Serve until the block ends; then let sessions end, save the turns of the others, and close the runner."""
    service = Service(settings, runner)
    try:
        await service.open()
        try:
            if not is_loopback(settings.host) and not await service.keys.exist():
                raise ConfigError(
                    f"{settings.host} is reachable from other machines: create an API key first (`towline serve keys create "
                    "--role admin`), or listen on 127.0.0.1"
                )
            async with _listening(settings, service) as url:
                yield Serving(url, service)
        finally:
            await service.close()
    finally:
        await runner.close()


@contextlib.asynccontextmanager
async def _listening(settings: ServerSettings, service: Service) -> AsyncIterator[str]:
    listener = listen(settings.host, settings.port)
    config = uvicorn.Config(
        make_app(service),
        loop="none",
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        # Longer than a trainer pauses between two calls on one connection.
        timeout_keep_alive=300,
        timeout_graceful_shutdown=5,
    )
    server = _Server(config)
    with contextlib.closing(listener):
        running = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield url_of(listener, settings.host)
        finally:
            service.stop()
            server.should_exit = True
            await running
