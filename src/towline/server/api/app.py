"""The ASGI application: routes, one body for every error, and `serving` for the duration of a block.

Every error response is a `Problem`: what is wrong, in which field. Unexpected errors are logged here and answered with a
plain 500 that reveals nothing.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException

from towline import __version__
from towline.cluster.runner import Runner
from towline.common.local_services import announced
from towline.common.sockets import is_loopback
from towline.config import ServerSettings
from towline.errors import ConfigError, DamagedData
from towline.schema import Problem
from towline.schema.trust import RootRegistry
from towline.server.api import result_routes, routes
from towline.server.api.dependencies import Reader, ServiceDep
from towline.server.api.docs_page import docs_page
from towline.server.api.first_key import ensure_admin_key
from towline.server.api.front_door import FrontDoor, problem
from towline.server.api.hosts import AllowedHosts, machine_names
from towline.server.api.listening import listening
from towline.server.api.tenancy import VisibleTenant
from towline.server.errors import RequestError
from towline.server.service import Service
from towline.server.store.database import is_transient

log = logging.getLogger("towline.server")
_SHAPE = ("one", "many")
"""The tags of the two shapes of a submission in the path of an error."""


def make_app(service: Service, hosts: AllowedHosts | None = None) -> FastAPI:
    """The application. `hosts`: the names of the service; default: those of its settings."""
    refusals: dict[int | str, dict[str, Any]] = {
        status: {"model": Problem} for status in (400, 401, 403, 404, 409, 413, 422, 429, 503)
    }
    app = FastAPI(
        title="Towline",
        version=__version__,
        summary="Rollouts as a service: submit tasks, lease token-exact trajectories.",
        responses=refusals,
        dependencies=[Depends(_known_parameters)],
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    app.include_router(routes.router)
    app.include_router(result_routes.router)
    app.add_api_route("/healthz", _health, methods=["GET"], tags=["service"], response_model=dict[str, Any])
    app.add_api_route("/livez", _alive, methods=["GET"], tags=["service"], response_model=dict[str, Any])
    app.add_api_route("/metrics", _metrics, methods=["GET"], tags=["service"], response_class=Response)
    for path in ("/docs", "/redoc"):
        app.add_api_route(path, _docs, methods=["GET"], include_in_schema=False, response_class=Response)
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(SQLAlchemyError, _database_error)
    app.add_exception_handler(OSError, _unavailable)
    app.add_exception_handler(DamagedData, _damaged_data)
    app.add_exception_handler(Exception, _unexpected)
    app.add_middleware(FrontDoor, service=service, hosts=hosts)
    return app


async def _health(request: Request) -> Response:
    """For monitors: 200 while sessions run (`ok`, `degraded`), 503 while none can (`held`, `broken`, `stopping`). No key."""
    health = request.app.state.service.health()
    return JSONResponse(health, 200 if health["status"] in ("ok", "degraded") else 503)


async def _alive(request: Request) -> Response:
    """For supervisors: 503 if only a restart helps; not for an engine, sandbox or database that is down. No key."""
    broken = request.app.state.service.scheduler.broken
    return JSONResponse({"alive": not broken, "error": broken or None}, 503 if broken else 200)


async def _docs(request: Request) -> Response:
    """The routes, for people. No key."""
    return docs_page(request.app.openapi())


async def _metrics(service: ServiceDep, caller: Reader, visible: VisibleTenant) -> Response:
    """For Prometheus. A key sees the totals of the service and the consumers of its own tenant; an admin key sees all."""
    return Response(await service.metrics_text(visible), media_type="text/plain; version=0.0.4; charset=utf-8")


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
    return JSONResponse(Problem(error=message, field=field).model_dump(), status, headers)


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return problem(error)


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


@dataclass(slots=True)
class Serving:
    """A running service."""

    url: str
    service: Service
    key_file: Path | None = None
    """The file with its admin key, if the service has made one."""


@contextlib.asynccontextmanager
async def serving(
    settings: ServerSettings, runner: Runner, registry: RootRegistry | None = None
) -> AsyncIterator[Serving]:
    """Serve until the block ends; then let sessions end, save the turns of the others, and close the runner."""
    service = Service(settings, runner, registry=registry)
    try:
        if not settings.auth and not is_loopback(settings.host):
            raise ConfigError(
                f"server.auth: {settings.host} is reachable from other machines, so requests need a key: "
                "leave out --no-auth, or listen on 127.0.0.1"
            )
        await service.open()
        try:
            key_file = await ensure_admin_key(service.keys, settings.data) if settings.auth else None
            hosts = AllowedHosts(settings.host, settings.allowed_hosts, await machine_names())
            async with listening(settings, make_app(service, hosts), service.stop) as url:
                with announced(url, key_file) if key_file else contextlib.nullcontext():
                    yield Serving(url, service, key_file)
        finally:
            await service.close()
    finally:
        await runner.close()
