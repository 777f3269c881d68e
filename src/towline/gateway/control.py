"""The control listener: sessions and the policy, for trainers and the node. Never reachable by a harness.

All routes except `/healthz` require the control key.
"""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from towline.engines.base import PauseMode
from towline.errors import ConfigError, TowlineError
from towline.gateway.gateway import Gateway, SessionError
from towline.gateway.session import GatewaySession
from towline.schema import EndReason, Trajectory

ARROW = "application/vnd.apache.arrow.stream"
_LONGEST_WAIT = 86_400
_HIGHEST_VERSION = 2**31 - 1


class _Keyed:
    """Middleware that requires the control key."""

    def __init__(self, app: ASGIApp, key: str):
        self.app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/healthz":
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(given, self._expected):
                refusal = JSONResponse({"error": "the control key is missing or wrong"}, 401)
                await refusal(scope, receive, send)
                return
        await self.app(scope, receive, send)


class ControlApi:
    """The control routes of one gateway."""

    def __init__(self, gateway: Gateway, base_url: str):
        self.gateway = gateway
        self.base_url = base_url
        """The URL at which harnesses reach the provider listener."""

    def app(self, key: str) -> ASGIApp:
        if not key:
            raise TowlineError("the control listener needs a key; set one")
        routes = [
            Route("/healthz", self.healthz),
            Route("/v1/sessions", self.create, methods=["POST"]),
            Route("/v1/sessions", self.listing),
            Route("/v1/sessions/{id}", self.show),
            Route("/v1/sessions/{id}", self.seal, methods=["DELETE"]),
            Route("/v1/sessions/{id}/trajectory", self.trajectory),
            Route("/v1/policy", self.policy),
            Route("/v1/policy/pause", self.pause, methods=["POST"]),
            Route("/v1/policy/resume", self.resume, methods=["POST"]),
            Route("/v1/policy/weights", self.weights, methods=["POST"]),
        ]
        handlers: Any = {TowlineError: _failed, HTTPException: _http_failed}
        return _Keyed(Starlette(routes=routes, exception_handlers=handlers), key)

    async def healthz(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def create(self, request: Request) -> Response:
        opened = await self.gateway.create(await _object(request))
        session, key = opened.session, opened.key
        return JSONResponse({**_summary(session), "key": key, "base_urls": self._urls(key)}, 201)

    def _urls(self, key: str) -> dict[str, str]:
        """The base URL for each kind of client."""
        root = self.base_url
        return {"root": root, "openai": f"{root}/v1", "keyed": f"{root}/s/{key}", "keyed_openai": f"{root}/s/{key}/v1"}

    async def listing(self, _: Request) -> Response:
        return JSONResponse({"sessions": [_summary(session) for session in self.gateway.sessions.values()]})

    async def show(self, request: Request) -> Response:
        return JSONResponse(_summary(self.gateway.get(request.path_params["id"])))

    async def seal(self, request: Request) -> Response:
        wanted = request.query_params.get("end_reason", EndReason.EXITED.value)
        try:
            end_reason = EndReason(wanted)
        except ValueError as error:
            raise SessionError(422, f"end_reason must be one of {', '.join(EndReason)}") from error
        trajectory = await self.gateway.seal(request.path_params["id"], end_reason)
        report = trajectory.report.model_dump(mode="json")
        about = {"id": trajectory.session_id, "state": trajectory.state, "failure": trajectory.failure}
        return JSONResponse({**about, "error": trajectory.error, "report": report})

    async def trajectory(self, request: Request) -> Response:
        trajectory = self.gateway.trajectory(request.path_params["id"])
        if ARROW in request.headers.get("accept", ""):
            return Response(_arrow(trajectory), media_type=ARROW)
        return Response(trajectory.to_json(), media_type="application/json")

    async def policy(self, _: Request) -> Response:
        info = self.gateway.engine.info
        return JSONResponse({"version": self.gateway.engine.version, "engine": info.name, "context": info.context})

    async def pause(self, request: Request) -> Response:
        body = await _object(request)
        try:
            mode = PauseMode(body.get("mode", "drain"))
        except ValueError as error:
            raise SessionError(422, "mode must be drain or abort") from error
        deadline = body.get("deadline")
        if deadline is not None and (isinstance(deadline, bool) or not isinstance(deadline, (int, float))):
            raise SessionError(422, "deadline must be a number of seconds")
        if deadline is not None and not 0 <= deadline <= _LONGEST_WAIT:
            raise SessionError(422, f"deadline must be from 0 to {_LONGEST_WAIT} seconds")
        await self.gateway.engine.pause(mode, deadline)
        return await self.policy(request)

    async def resume(self, request: Request) -> Response:
        body = await _object(request)
        await self.gateway.engine.resume(_version(body, required=False))
        return await self.policy(request)

    async def weights(self, request: Request) -> Response:
        body = await _object(request)
        version = _version(body, required=True)
        folder = body.get("folder")
        if not isinstance(folder, str) or version is None:
            raise SessionError(422, "folder must be a path and version an integer")
        await self.gateway.engine.update_weights(Path(folder), version)
        return await self.policy(request)


def _summary(session: GatewaySession) -> dict[str, Any]:
    return {
        "id": session.id,
        "group": session.group,
        "created": session.created,
        "turns": len(session.graph.nodes),
        "in_flight": session.in_flight,
        "sampled_tokens": session.sampled_tokens,
        "failed_calls": len(session.calls.failed),
    }


def _arrow(trajectory: Trajectory) -> bytes:
    table = trajectory.to_arrow()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def _version(body: dict[str, Any], *, required: bool) -> int | None:
    version = body.get("version")
    if version is None and not required:
        return None
    if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version <= _HIGHEST_VERSION:
        raise SessionError(422, f"version must be an integer from 0 to {_HIGHEST_VERSION}")
    return version


async def _object(request: Request) -> dict[str, Any]:
    data = await request.body()
    try:
        value = orjson.loads(data) if data else {}
    except orjson.JSONDecodeError as error:
        raise SessionError(400, f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise SessionError(400, "the body must be a JSON object")
    return value


async def _failed(_: Request, error: Exception) -> Response:
    status = error.status if isinstance(error, SessionError) else 422 if isinstance(error, ConfigError) else 502
    return JSONResponse({"error": str(error)}, status)


async def _http_failed(_: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return JSONResponse({"error": str(getattr(error, "detail", error))}, status)
