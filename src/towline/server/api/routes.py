"""The routes of `/v1`, each a few lines between HTTP and the service. The signatures say which role may call them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import PlainTextResponse, StreamingResponse
from pydantic import Discriminator, Field, Tag, ValidationError

from towline.cluster.runner import LogNotFound
from towline.engines.base import PauseMode
from towline.errors import DamagedData
from towline.schema import (
    Accepted,
    FailureReason,
    Policy,
    SchemaError,
    Session,
    SessionState,
    SlowSession,
    Task,
    TaskState,
    TaskStatus,
    Trajectory,
)
from towline.schema.base import Id, Model, TenantName
from towline.server.api.auth import KeyInfo, KeyRequest, NewKey
from towline.server.api.dependencies import Admin, CheckedRoute, Consumer, Reader, ServiceDep, Submitter
from towline.server.api.result_routes import MAX_VERSION
from towline.server.api.tenancy import ActingTenant, VisibleTenant
from towline.server.delivery.trajectories import ARROW, arrow_stream, start_stream
from towline.server.errors import ResourceNotFound
from towline.server.store import names, queries

MOST_TASKS = 1000
MOST_IDS = 1000
LOG_BYTES = 1024 * 1024


router = APIRouter(prefix="/v1", route_class=CheckedRoute)

# Tasks

Submitted = Annotated[
    Annotated[Task, Tag("one")] | Annotated[list[Task], Field(max_length=MOST_TASKS), Tag("many")],
    Discriminator(lambda value: "many" if isinstance(value, list) else "one"),
]


@router.post("/tasks", tags=["tasks"])
async def submit(
    tasks: Submitted, service: ServiceDep, caller: Submitter, tenant: ActingTenant
) -> Accepted | list[Accepted]:
    """Submit one task or up to 1000, all or none. Idempotent: an identical task is not created twice."""
    many = isinstance(tasks, list)
    answers = await service.submit(tasks if isinstance(tasks, list) else [tasks], caller, tenant, many=many)
    return answers if many else answers[0]


@router.get("/tasks", tags=["tasks"])
async def list_tasks(
    service: ServiceDep,
    caller: Reader,
    visible: VisibleTenant,
    response: Response,
    state: TaskState | None = None,
    after: Annotated[Id | None, Query(description="The last task of the previous page.")] = None,
    after_tenant: Annotated[
        TenantName | None, Query(description="Its tenant, in a list of all tenants. Default: the caller's.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> list[TaskStatus]:
    """List tasks in the order of submission, without sessions. `Link` with `rel="next"` has the next page."""
    last = None if after is None else names.qualify(visible or after_tenant or caller.tenant, after)
    found = await queries.task_list(service.store, state, last, limit, visible)
    if len(found) == limit:
        query = {"after": found[-1].task_id, "limit": limit} | ({"state": state.value} if state else {})
        if caller.admin:
            query |= {"after_tenant": found[-1].tenant} if visible is None else {"tenant": visible}
        response.headers["Link"] = f'</v1/tasks?{urlencode(query)}>; rel="next"'
    return found


@router.get("/tasks/{task_id:path}", tags=["tasks"])
async def get_task(task_id: Id, service: ServiceDep, caller: Reader, tenant: ActingTenant) -> TaskStatus:
    """Get a task with the latest attempt at each sample, and all attempts."""
    return await queries.task_status(service.store, tenant, task_id)


@router.delete("/tasks/{task_id:path}", tags=["tasks"])
async def cancel_task(task_id: Id, service: ServiceDep, caller: Submitter, tenant: ActingTenant) -> TaskStatus:
    """Cancel a task: waiting sessions end, running ones are stopped and keep their finished turns."""
    return await service.cancel(tenant, task_id)


# Sessions


@router.get("/sessions", tags=["sessions"])
async def list_sessions(
    service: ServiceDep,
    caller: Reader,
    visible: VisibleTenant,
    response: Response,
    state: SessionState | None = None,
    reason: Annotated[FailureReason | None, Query(description="Failure reason of FAILED and LOST sessions.")] = None,
    task: Annotated[Id | None, Query(description="Only sessions of this task.")] = None,
    after: Annotated[Id | None, Query(description="The last session of the previous page.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    order: Annotated[
        queries.SortOrder, Query(description="Order by submission of their tasks.")
    ] = queries.SortOrder.OLDEST,
) -> list[Session]:
    """List sessions of all attempts. `Link` with `rel="next"` has the next page."""
    of_task = None if task is None else names.qualify(visible or caller.tenant, task)
    wanted = queries.SessionQuery(state, reason, of_task, after, order, limit, visible)
    found = await queries.session_list(service.store, wanted)
    if len(found) == limit:
        given = {"state": state, "reason": reason, "task": task, "order": order, "limit": limit}
        given |= {"tenant": visible} if caller.admin else {}
        query = {name: value for name, value in given.items() if value is not None}
        response.headers["Link"] = f'</v1/sessions?{urlencode(query | {"after": found[-1].session_id})}>; rel="next"'
    return found


@router.get("/sessions/{session_id}", tags=["sessions"])
async def get_session(session_id: Id, service: ServiceDep, caller: Reader, visible: VisibleTenant) -> Session:
    return await queries.session(service.store, session_id, visible)


_TRAJECTORY: dict[int | str, dict[str, Any]] = {
    200: {"model": Trajectory, "content": {ARROW: {"schema": {"type": "string", "format": "binary"}}}}
}


@router.get("/sessions/{session_id}/trajectory", tags=["sessions"], responses=_TRAJECTORY)
async def get_trajectory(
    session_id: Id,
    service: ServiceDep,
    caller: Consumer,
    visible: VisibleTenant,
    accept: Annotated[str, Header()] = "",
) -> Response:
    """Get the trajectory of an ended session: JSON, or an Arrow stream if the request accepts it."""
    await queries.session(service.store, session_id, visible)
    stored = await queries.find_trajectories(service.store, [session_id], visible)
    if not stored.pieces and not stored.broken:
        raise ResourceNotFound(
            f"session {session_id!r} has no trajectory: it has not ended, or it ended before it started"
        )
    try:
        if stored.broken:
            raise DamagedData(stored.broken[session_id])
        table = await service.segments.read(stored.pieces[session_id])
        if ARROW not in accept.lower():
            return Response(Trajectory.from_arrow(table).to_json(), media_type="application/json")
    except (DamagedData, SchemaError, ValidationError) as error:
        raise DamagedData(f"the trajectory of session {session_id!r} is damaged: {error}") from error
    return StreamingResponse(await start_stream(arrow_stream(service.segments, stored)), media_type=ARROW)


_LOG: dict[int | str, dict[str, Any]] = {
    200: {"description": "The end of the log", "content": {"text/plain": {"schema": {"type": "string"}}}}
}


@router.get("/sessions/{session_id}/log", tags=["sessions"], responses=_LOG, response_class=PlainTextResponse)
async def get_log(
    session_id: Id,
    service: ServiceDep,
    caller: Consumer,
    visible: VisibleTenant,
    name: Annotated[str, Query(pattern=r"^[^/\x00]{1,255}$", description="Name of the log file.")] = "harness.log",
    tail: Annotated[int | None, Query(ge=1, le=100_000, description="Return only the last N lines.")] = None,
) -> Response:
    """Get the last 1 MiB of a log of a session. Header `X-Towline-Left-Out`: bytes before it."""
    await queries.session(service.store, session_id, visible)
    try:
        log = await service.runner.read_log(session_id, name, LOG_BYTES)
    except LogNotFound as error:
        existing = f"there are: {', '.join(error.names)}" if error.names else "it has none"
        raise ResourceNotFound(f"session {session_id!r} has no log {name!r}; {existing}", field="name") from error
    data, left_out = log.data, log.left_out
    if tail is not None:
        lines = data.splitlines(keepends=True)
        left_out += sum(map(len, lines[:-tail]))
        data = b"".join(lines[-tail:])
    # An agent influences the content: browsers must not render it as a page.
    headers = {"X-Towline-Left-Out": str(left_out), "X-Content-Type-Options": "nosniff"}
    return PlainTextResponse(data.decode("utf-8", "replace"), headers=headers)


class SessionIds(Model):
    """The sessions whose trajectories are requested."""

    session_ids: Annotated[list[Id], Field(max_length=MOST_IDS)]


_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "One batch per trajectory",
        "content": {ARROW: {"schema": {"type": "string", "format": "binary"}}},
    }
}


@router.post("/trajectories", tags=["sessions"], responses=_STREAM, response_class=StreamingResponse)
async def get_trajectories(
    wanted: SessionIds, service: ServiceDep, caller: Consumer, visible: VisibleTenant
) -> StreamingResponse:
    """Get many trajectories as one Arrow stream, in the order of the request; sessions without one are left out.

    Damaged ones are left out too, and named in the metadata (`towline.damaged`) of an empty last batch.
    """
    stored = await queries.find_trajectories(service.store, wanted.session_ids, visible)
    return StreamingResponse(await start_stream(arrow_stream(service.segments, stored)), media_type=ARROW)


# Events


@router.get(
    "/events",
    tags=["service"],
    response_class=StreamingResponse,
    responses={
        200: {"description": "One `Event` each", "content": {"text/event-stream": {"schema": {"type": "string"}}}}
    },
)
async def stream_events(
    service: ServiceDep,
    caller: Reader,
    visible: VisibleTenant,
    last_event_id: Annotated[int | None, Header(ge=0, le=2**62)] = None,
    limit: Annotated[int | None, Query(ge=1, le=100_000, description="End after this many events.")] = None,
    idle: Annotated[
        float | None,
        Query(ge=0, le=86_400, allow_inf_nan=False, description="End after this many seconds without events."),
    ] = None,
) -> StreamingResponse:
    """Stream server-sent events from now, or after `Last-Event-ID`. An event `missed` names those no longer kept."""
    stream: AsyncIterator[bytes] = service.events.stream(last_event_id, limit, idle, visible)
    return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-store"})


# The policy


class Pause(Model):
    """How to pause sampling."""

    mode: PauseMode = PauseMode.DRAIN
    deadline: float | None = Field(default=None, ge=0, le=86_400, allow_inf_nan=False)
    """Seconds after which draining turns are aborted."""


class Resume(Model):
    """How to resume sampling."""

    version: int | None = Field(default=None, ge=0, le=MAX_VERSION)


class VersionAnnouncement(Resume):
    """The version of weights that the trainer has put into the engines; default: the one that they report."""


class WeightsUpdate(Model):
    """New weights of the policy."""

    folder: str = Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")
    """Folder on the server's machine."""
    version: int = Field(ge=0, le=MAX_VERSION)


@router.get("/policy", tags=["policy"])
async def get_policy(service: ServiceDep, caller: Reader) -> Policy:
    return service.policy.now


@router.post("/policy/pause", tags=["policy"])
async def pause(service: ServiceDep, caller: Admin, pause: Pause | None = None) -> Policy:
    """Pause sampling. Returns once turns in flight have ended (`drain`), or were interrupted (`abort`)."""
    wanted = pause or Pause()
    return await service.policy.pause(wanted.mode, wanted.deadline)


@router.post("/policy/resume", tags=["policy"])
async def resume(service: ServiceDep, caller: Admin, resume: Resume | None = None) -> Policy:
    """Resume sampling, under the given policy version."""
    return await service.policy.resume(resume.version if resume else None)


@router.post("/policy/version", tags=["policy"])
async def announce(service: ServiceDep, caller: Admin, announcement: VersionAnnouncement | None = None) -> Policy:
    """Announce weights that the trainer has put into the engines by its own means. Sampling continues."""
    return await service.policy.announce(announcement.version if announcement else None)


@router.post("/policy/weights", tags=["policy"])
async def update_weights(weights: WeightsUpdate, service: ServiceDep, caller: Admin) -> Policy:
    """Update the weights. Returns once no token of an older version is sampled."""
    return await service.policy.update_weights(Path(weights.folder), weights.version)


# The service


@router.get("/nodes", tags=["service"])
async def list_nodes(service: ServiceDep, caller: Reader, visible: VisibleTenant) -> list[dict[str, Any]]:
    """The nodes that run sessions, with the progress of each session."""
    return await service.nodes(visible)


@router.post("/nodes/{name}/drain", tags=["service"])
async def drain_node(service: ServiceDep, caller: Admin, name: Id) -> list[dict[str, Any]]:
    """Give a node no new sessions; those that run there end as usual. Returns all nodes."""
    return await service.drain(name, drained=True)


@router.post("/nodes/{name}/undrain", tags=["service"])
async def undrain_node(service: ServiceDep, caller: Admin, name: Id) -> list[dict[str, Any]]:
    """Let a drained node take sessions again. Returns all nodes."""
    return await service.drain(name, drained=False)


@router.get("/stragglers", tags=["service"])
async def list_stragglers(
    service: ServiceDep, caller: Reader, visible: VisibleTenant, limit: Annotated[int, Query(ge=1, le=1000)] = 20
) -> list[SlowSession]:
    """List the slowest of the sessions that are being worked on, compared with finished ones; stragglers first."""
    return await service.slowest(limit, visible)


@router.get("/keys", tags=["service"])
async def list_keys(service: ServiceDep, caller: Admin) -> list[KeyInfo]:
    return list(await service.keys.list())


@router.post("/keys", tags=["service"], status_code=201)
async def create_key(key: KeyRequest, service: ServiceDep, caller: Admin) -> NewKey:
    """Create an API key. It is shown only in this response."""
    return await service.keys.create(key.name, key.roles, key.tenant)


@router.delete("/keys/{key_id}", tags=["service"], status_code=204)
async def revoke_key(key_id: Id, service: ServiceDep, caller: Admin) -> None:
    await service.keys.revoke(key_id, keep_one=True)
