"""The ASGI application: routes, and one shape for everything that goes wrong.

Every refusal is a `Problem`: what is wrong, in which field. What nobody foresaw is logged here and answered with a plain
500, without its insides.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from fastapi import Depends, FastAPI, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from towline import __version__
from towline.schema import Problem
from towline.server import routes
from towline.server.auth import loopback
from towline.server.errors import Damaged, ServiceError
from towline.server.service import Service
from towline.server.store import passing

log = logging.getLogger("towline.server")
_SHAPE = ("one", "many")
"""The names that the two shapes of a submission have in an error's path."""


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
    app.add_exception_handler(ServiceError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(SQLAlchemyError, _database)
    app.add_exception_handler(OSError, _away)
    app.add_exception_handler(Damaged, _damaged)
    app.add_exception_handler(Exception, _unforeseen)
    app.add_middleware(_Door, service=service)
    return app


async def _health(request: Request) -> Response:
    """For monitors: 200 while sessions run (`ok`, `degraded`), 503 while none can (`held`, `broken`, `stopping`). No key."""
    told = request.app.state.service.health()
    return JSONResponse(told, 200 if told["status"] in ("ok", "degraded") else 503)


async def _alive(request: Request) -> Response:
    """For supervisors: 503 if only a restart helps. An engine, a sandbox or a database that is away is no reason. No key."""
    broken = request.app.state.service.scheduler.broken
    return JSONResponse({"alive": not broken, "error": broken or None}, 503 if broken else 200)


async def _metrics(service: routes.ServiceOf, caller: routes.Reader) -> Response:
    """For Prometheus."""
    return Response(await service.figures(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _known_parameters(request: Request) -> None:
    """Refuse what the route does not know: a parameter that is ignored silently is one that its caller relies on."""
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    known = sorted(_parameters(route.dependant))
    for name in request.query_params:
        if name not in known:
            there = f"it knows: {', '.join(known)}" if known else "it takes none"
            raise ServiceError(f"{route.path} has no query parameter {name[:100]!r}; {there}", field=name[:100])


def _parameters(dependant: Dependant) -> set[str]:
    """The query parameters of a route and of what it depends on."""
    inner = [_parameters(one) for one in dependant.dependencies]
    return {field.alias for field in dependant.query_params}.union(*inner)


# Problems


def _problem(status: int, message: str, field: str | None = None, retry_after: float | None = None) -> JSONResponse:
    headers = {} if retry_after is None else {"Retry-After": str(math.ceil(retry_after))}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(Problem(error=message, field=field).model_dump(), status, headers)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    return _problem(error.status, str(error), error.field, error.retry_after)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return _problem(422, f"the body is not JSON: {first.get('ctx', {}).get('error', '')}".rstrip(": "))
    return _problem(422, str(first["msg"]).removeprefix("Value error, "), _path(first["loc"]))


def _path(places: Sequence[int | str]) -> str | None:
    """`body.many.3.environment.files.0` as `[3].environment.files[0]`."""
    where, *rest = places
    if where == "body" and rest and rest[0] in _SHAPE:
        rest = rest[1:]
    text = "".join(f"[{place}]" if isinstance(place, int) else f".{place}" for place in rest)
    return text.lstrip(".") or None


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = _problem(error.status_code, str(error.detail))
    answer.headers.update(error.headers or {})
    return answer


async def _database(request: Request, error: Exception) -> Response:
    return await (_away if passing(error) else _unforeseen)(request, error)


async def _away(request: Request, error: Exception) -> Response:
    """A database that refuses connections, or a disk that does: later it may not."""
    service: Service = request.app.state.service
    if not service.store.outage.reason:
        service.unreadable.met(f"{request.method} {request.url.path}: {error}")
    return _problem(503, "the database, or the place of the trajectories, is away", retry_after=2)


async def _damaged(request: Request, error: Exception) -> Response:
    log.error("%s", error)
    return _problem(500, str(error))


async def _unforeseen(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _problem(500, "something failed that should not; the server's log says what")


# Before the routes


class _Door:
    """Refuses bodies that are too large, and web pages that reach for a service without keys."""

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
        elif not self._invited(headers):
            problem = await self._uninvited()
        if problem is not None:
            await problem(scope, receive, send)
            return
        await self.app(scope, self._bounded(receive, most), send)

    async def _uninvited(self) -> JSONResponse | None:
        keys = self.service.keys
        try:
            if keys.needed or await keys.exist():
                return None
        except (SQLAlchemyError, OSError):
            return _problem(503, "the database is away", retry_after=2)
        return _problem(403, "a service without keys answers only requests to this machine's own name")

    def _invited(self, headers: dict[bytes, str]) -> bool:
        """Whether host and origin are loopback: a page from elsewhere has another origin, or another host's name."""
        host = urlsplit("//" + headers.get(b"host", "localhost")).hostname or ""
        origin = headers.get(b"origin")
        return loopback(host) and (origin is None or loopback(urlsplit(origin).hostname or ""))

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
