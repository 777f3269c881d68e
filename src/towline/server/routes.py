"""The routes of `/v1`, each a few lines between HTTP and the service. Which role may call what is in the signatures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse
from pydantic import Discriminator, Field, Tag, ValidationError

from towline.engines.base import PauseMode
from towline.schema import (
    Accepted,
    Ack,
    Acked,
    FailureReason,
    Pacing,
    Policy,
    Results,
    Role,
    SchemaError,
    Session,
    SessionState,
    Stale,
    Start,
    Task,
    TaskState,
    TaskStatus,
    Trajectory,
    Unit,
)
from towline.schema.base import Count, Id, Model
from towline.schema.files import dump_json
from towline.server import reading
from towline.server.auth import Caller, KeyInfo, KeyWish, NewKey
from towline.server.errors import Damaged, NotFound
from towline.server.results import Wish
from towline.server.runner import NoLog
from towline.server.service import Service
from towline.server.streaming import ARROW, arrow_stream, begun

MOST_TASKS = 1000
MOST_IDS = 1000
LOG_BYTES = 1024 * 1024
VERSIONS = 2**31 - 1


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _caller(request: Request) -> Caller:
    return await _service(request).keys.caller(request.headers.get("authorization"))


ServiceOf = Annotated[Service, Depends(_service)]
CallerOf = Annotated[Caller, Depends(_caller)]


def _role(*roles: Role) -> Any:
    async def check(caller: CallerOf) -> Caller:
        caller.need(*roles)
        return caller

    return Depends(check)


Submitter = Annotated[Caller, _role(Role.SUBMIT)]
Consumer = Annotated[Caller, _role(Role.CONSUME)]
Reader = Annotated[Caller, _role(Role.SUBMIT, Role.CONSUME)]
Admin = Annotated[Caller, _role(Role.ADMIN)]

router = APIRouter(prefix="/v1")

# Tasks

Submitted = Annotated[
    Annotated[Task, Tag("one")] | Annotated[list[Task], Field(max_length=MOST_TASKS), Tag("many")],
    Discriminator(lambda value: "many" if isinstance(value, list) else "one"),
]


@router.post("/tasks", tags=["tasks"])
async def submit(tasks: Submitted, service: ServiceOf, caller: Submitter) -> Accepted | list[Accepted]:
    """Submit a task, or up to 1000 of them, all or none. Safe to repeat: the same task again is the same task."""
    many = isinstance(tasks, list)
    answers = await service.submit(tasks if isinstance(tasks, list) else [tasks], caller, many=many)
    return answers if many else answers[0]


@router.get("/tasks", tags=["tasks"])
async def list_tasks(
    service: ServiceOf,
    caller: Reader,
    response: Response,
    state: TaskState | None = None,
    after: Annotated[Id | None, Query(description="The last task of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> list[TaskStatus]:
    """Tasks in the order they came, without their sessions. `Link` with `rel="next"` leads to the next page."""
    found = await reading.task_list(service.store, state, after, limit)
    if len(found) == limit:
        query = {"after": found[-1].task_id, "limit": limit} | ({"state": state.value} if state else {})
        response.headers["Link"] = f'</v1/tasks?{urlencode(query)}>; rel="next"'
    return found


@router.get("/tasks/{task_id:path}", tags=["tasks"])
async def get_task(task_id: Id, service: ServiceOf, caller: Reader) -> TaskStatus:
    """A task with the latest attempt of each of its samples, and all attempts."""
    return await reading.task_status(service.store, task_id)


@router.delete("/tasks/{task_id:path}", tags=["tasks"])
async def cancel_task(task_id: Id, service: ServiceOf, caller: Submitter) -> TaskStatus:
    """Cancel a task: sessions that wait end, those that run are stopped and keep their finished turns."""
    return await service.cancel(task_id)


# Sessions


@router.get("/sessions", tags=["sessions"])
async def list_sessions(
    service: ServiceOf,
    caller: Reader,
    response: Response,
    state: SessionState | None = None,
    reason: Annotated[FailureReason | None, Query(description="Why they are FAILED or LOST.")] = None,
    task: Annotated[Id | None, Query(description="Only sessions of this task.")] = None,
    after: Annotated[Id | None, Query(description="The last session of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    order: Annotated[reading.Order, Query(description="By when their tasks were submitted.")] = reading.Order.OLDEST,
) -> list[Session]:
    """Sessions of all attempts. `Link` with `rel="next"` leads to the next page."""
    wanted = reading.SessionQuery(state, reason, task, after, order, limit)
    found = await reading.session_list(service.store, wanted)
    if len(found) == limit:
        given = {"state": state, "reason": reason, "task": task, "order": order, "limit": limit}
        query = {name: value for name, value in given.items() if value is not None}
        response.headers["Link"] = f'</v1/sessions?{urlencode(query | {"after": found[-1].session_id})}>; rel="next"'
    return found


@router.get("/sessions/{session_id}", tags=["sessions"])
async def get_session(session_id: Id, service: ServiceOf, caller: Reader) -> Session:
    return await reading.session(service.store, session_id)


_TRAJECTORY: dict[int | str, dict[str, Any]] = {
    200: {"model": Trajectory, "content": {ARROW: {"schema": {"type": "string", "format": "binary"}}}}
}


@router.get("/sessions/{session_id}/trajectory", tags=["sessions"], responses=_TRAJECTORY)
async def get_trajectory(
    session_id: Id, service: ServiceOf, caller: Consumer, accept: Annotated[str, Header()] = ""
) -> Response:
    """The tokens of a session that has ended: JSON, or an Arrow stream for who accepts that."""
    await reading.session(service.store, session_id)
    stored = await reading.stored(service.store, [session_id])
    if not stored.pieces and not stored.broken:
        raise NotFound(f"session {session_id!r} has no trajectory: it has not ended, or ended before it began")
    try:
        if stored.broken:
            raise Damaged(stored.broken[session_id])
        table = await service.segments.read(stored.pieces[session_id])
        if ARROW not in accept.lower():
            return Response(Trajectory.from_arrow(table).to_json(), media_type="application/json")
    except (Damaged, SchemaError, ValidationError) as error:
        raise Damaged(f"the trajectory of session {session_id!r} is damaged: {error}") from error
    return StreamingResponse(await begun(arrow_stream(service.segments, stored)), media_type=ARROW)


_LOG: dict[int | str, dict[str, Any]] = {
    200: {"description": "The end of the log", "content": {"text/plain": {"schema": {"type": "string"}}}}
}


@router.get("/sessions/{session_id}/log", tags=["sessions"], responses=_LOG, response_class=PlainTextResponse)
async def get_log(
    session_id: Id,
    service: ServiceOf,
    caller: Consumer,
    name: Annotated[str, Query(pattern=r"^[^/\x00]{1,255}$", description="Which log file.")] = "harness.log",
    tail: Annotated[int | None, Query(ge=1, le=100_000, description="Only so many lines of its end.")] = None,
) -> Response:
    """What a session's harness printed: the end of it, at most 1 MiB. Header `X-Towline-Left-Out`: the bytes before it."""
    await reading.session(service.store, session_id)
    try:
        log = await service.runner.read_log(session_id, name, LOG_BYTES)
    except NoLog as error:
        there = f"; there are: {', '.join(error.names)}" if error.names else "; it has none"
        raise NotFound(f"session {session_id!r} has no log {name!r}{there}", field="name") from error
    data, left_out = log.data, log.left_out
    if tail is not None:
        lines = data.splitlines(keepends=True)
        left_out += sum(map(len, lines[:-tail]))
        data = b"".join(lines[-tail:])
    # An agent had a say in it: no browser is to take it for a page.
    headers = {"X-Towline-Left-Out": str(left_out), "X-Content-Type-Options": "nosniff"}
    return PlainTextResponse(data.decode("utf-8", "replace"), headers=headers)


class SessionIds(Model):
    session_ids: Annotated[list[Id], Field(max_length=MOST_IDS)]


_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "One batch a trajectory",
        "content": {ARROW: {"schema": {"type": "string", "format": "binary"}}},
    }
}


@router.post("/trajectories", tags=["sessions"], responses=_STREAM, response_class=StreamingResponse)
async def get_trajectories(wanted: SessionIds, service: ServiceOf, caller: Consumer) -> StreamingResponse:
    """The trajectories of many sessions as one Arrow stream, in the order asked; sessions without one are left out.

    Those that are damaged are left out too, and named in the metadata (`towline.damaged`) of an empty last batch.
    """
    stored = await reading.stored(service.store, wanted.session_ids)
    return StreamingResponse(await begun(arrow_stream(service.segments, stored)), media_type=ARROW)


# Results


@router.get("/results", tags=["results"], response_model=Results)
async def lease_results(
    request: Request,
    service: ServiceOf,
    caller: Consumer,
    consumer: Annotated[Id, Query(description="Who asks; each name has a position of its own.")],
    unit: Unit = Unit.SESSION,
    max: Annotated[int, Query(ge=0, le=1000, description="0 leases nothing: it only makes the consumer known.")] = 16,
    wait: Annotated[float, Query(ge=0, le=86_400, allow_inf_nan=False)] = 0.0,
    lease: Annotated[float | None, Query(gt=0, le=7 * 86_400, allow_inf_nan=False)] = None,
    start: Annotated[Start, Query(description="Where a consumer begins that was never seen.")] = Start.BEGINNING,
    max_staleness: Annotated[int | None, Query(ge=0, le=VERSIONS)] = None,
    stale: Stale = Stale.DROP,
    prefix: Annotated[
        Id | None,
        Query(description="Only of tasks whose ids begin so. The consumer's for good: what its first call says."),
    ] = None,
    groups_per_update: Annotated[
        int | None,
        Query(
            ge=1,
            le=1_000_000,
            description="How many groups the consumer uses per policy version: sessions start at its pace. `unit=group`.",
        ),
    ] = None,
) -> Response:
    """Lease results. What is not acknowledged before its lease runs out is handed out again."""
    seconds = lease if lease is not None else service.settings.lease_seconds
    gone = asyncio.Event()
    watching = asyncio.create_task(_watch(request, gone, service))
    try:
        wish = Wish(consumer, unit, max, seconds, start, max_staleness, stale, prefix, groups_per_update)
        found = await service.lease(wish, wait, gone)
    finally:
        watching.cancel()
    # A task's metadata is whatever its submitter sent, broken surrogates included.
    return Response(dump_json(found), media_type="application/json")


async def _watch(request: Request, gone: asyncio.Event, service: Service) -> None:
    """Notice that the caller left while it waited."""
    while (await request.receive())["type"] != "http.disconnect":
        continue
    gone.set()
    service.signals.results.give()


class Consuming(Model):
    consumer: Id


class Released(Model):
    released: Count


@router.post("/results/release", tags=["results"])
async def release_results(who: Consuming, service: ServiceOf, caller: Consumer) -> Released:
    """Give back what is leased and not acknowledged: it comes again at once. For a trainer that starts anew."""
    return Released(released=await service.release(who.consumer))


@router.post("/results/ack", tags=["results"])
async def ack_results(ack: Ack, service: ServiceOf, caller: Consumer) -> Acked:
    """Say that results are used: they never come again. Safe to repeat."""
    return await service.ack(ack.consumer, ack.result_ids, ack.unusable)


@router.get("/pacing", tags=["results"])
async def get_pacing(service: ServiceOf, caller: Reader) -> Pacing:
    """Consumers that declared `groups_per_update`: how many groups they have and may have, and what pacing costs."""
    return await service.pacer.status(service.policy.now.version)


# What happens


@router.get(
    "/events",
    tags=["service"],
    response_class=StreamingResponse,
    responses={
        200: {"description": "One `Event` each", "content": {"text/event-stream": {"schema": {"type": "string"}}}}
    },
)
async def stream_events(
    service: ServiceOf,
    caller: Reader,
    last_event_id: Annotated[int | None, Header(ge=0, le=2**62)] = None,
    limit: Annotated[int | None, Query(ge=1, le=100_000, description="End after so many.")] = None,
    idle: Annotated[
        float | None, Query(ge=0, le=86_400, allow_inf_nan=False, description="End after so many quiet seconds.")
    ] = None,
) -> StreamingResponse:
    """Server-sent events, from now or from where `Last-Event-ID` says. An event `missed` tells of those long gone."""
    stream: AsyncIterator[bytes] = service.events.stream(last_event_id, limit, idle)
    return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-store"})


# The policy


class Pause(Model):
    mode: PauseMode = PauseMode.DRAIN
    deadline: float | None = Field(default=None, ge=0, le=86_400, allow_inf_nan=False)
    """Seconds after which turns that drain are aborted."""


class Resume(Model):
    version: int | None = Field(default=None, ge=0, le=VERSIONS)


class Weights(Model):
    folder: str = Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")
    """On the server's machine."""
    version: int = Field(ge=0, le=VERSIONS)


@router.get("/policy", tags=["policy"])
async def get_policy(service: ServiceOf, caller: Reader) -> Policy:
    return service.policy.now


@router.post("/policy/pause", tags=["policy"])
async def pause(service: ServiceOf, caller: Admin, pause: Pause | None = None) -> Policy:
    """Stop sampling. Answers once turns in flight have ended (`drain`), or were cut to go on later (`abort`)."""
    wanted = pause or Pause()
    return await service.policy.pause(wanted.mode, wanted.deadline)


@router.post("/policy/resume", tags=["policy"])
async def resume(service: ServiceOf, caller: Admin, resume: Resume | None = None) -> Policy:
    """Go on sampling, under the version given."""
    return await service.policy.resume(resume.version if resume else None)


@router.post("/policy/weights", tags=["policy"])
async def update_weights(weights: Weights, service: ServiceOf, caller: Admin) -> Policy:
    """Replace the weights. Answers once no token of an older version is sampled any more."""
    return await service.policy.update_weights(Path(weights.folder), weights.version)


# The service


@router.get("/nodes", tags=["service"])
async def list_nodes(service: ServiceOf, caller: Reader) -> list[dict[str, Any]]:
    return service.runner.nodes()


@router.get("/keys", tags=["service"])
async def list_keys(service: ServiceOf, caller: Admin) -> list[KeyInfo]:
    return list(await service.keys.list())


@router.post("/keys", tags=["service"], status_code=201)
async def create_key(wish: KeyWish, service: ServiceOf, caller: Admin) -> NewKey:
    """Make a key. It is shown in this answer and never again."""
    return await service.keys.create(wish.name, wish.roles)


@router.delete("/keys/{key_id}", tags=["service"], status_code=204)
async def revoke_key(key_id: Id, service: ServiceOf, caller: Admin) -> None:
    await service.keys.revoke(key_id, keep_one=True)
