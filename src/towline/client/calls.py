"""Every call of the service as a value: method, path, body, and how its response is parsed. No I/O.

Both clients perform the same calls, so they cannot differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

import pyarrow as pa
import pyarrow.ipc as ipc
from pydantic import TypeAdapter, ValidationError

from towline.client.errors import BadAnswer, ClientError, InvalidRequest, refusal
from towline.errors import TowlineError
from towline.schema import (
    Accepted,
    Ack,
    Acked,
    FailureReason,
    Pacing,
    Policy,
    Results,
    SchemaError,
    Session,
    SessionState,
    SlowSession,
    Stale,
    Start,
    Task,
    TaskState,
    TaskStatus,
    Trajectory,
    Unit,
)
from towline.schema.files import DAMAGED, dump_json, from_table, load_json

T = TypeVar("T")
ARROW = "application/vnd.apache.arrow.stream"
TaskLike = Task | Mapping[str, Any]
UnitLike = Unit | Literal["session", "group"]
StartLike = Start | Literal["beginning", "now"]
StaleLike = Stale | Literal["drop", "flag"]
PauseMode = Literal["drain", "abort"]

TASKS_PER_CALL = 64
SESSIONS_PER_CALL = 64
TASKS_PER_PAGE = 1000
SESSIONS_PER_PAGE = 1000
"""Maximum number of items per request; more are sent in several."""


@dataclass(frozen=True)
class ApiCall(Generic[T]):
    """One call of the service."""

    method: str
    path: str
    read: Callable[[bytes], T]
    """Parses the body of the response; raises `BadAnswer`."""
    params: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    accept: str = "application/json"
    waits: float = 0.0
    """Seconds that the service may wait on purpose, in addition to the timeout."""
    also: frozenset[int] = frozenset()
    """Statuses besides 2xx that are not errors."""
    older: ApiCall[T] | None = None
    """The same call for a service that answers this one with 405, as older versions do."""


# Tasks


def submit(tasks: Sequence[TaskLike]) -> Iterator[ApiCall[list[Accepted]]]:
    whole = [with_id(task) for task in tasks]
    for start in range(0, len(whole), TASKS_PER_CALL):
        body = dump_json([task.model_dump(mode="json") for task in whole[start : start + TASKS_PER_CALL]])
        yield ApiCall("POST", "/v1/tasks", _reads(list[Accepted]), body=body)


def with_id(task: TaskLike) -> Task:
    """The task; one without a `task_id` gets one derived from its content, which makes submitting it idempotent."""
    if isinstance(task, Task):
        return task
    given = dict(task)
    if not given.get("task_id"):
        given["task_id"] = "content"
        content = _task(given).model_dump(mode="json", exclude={"task_id"})
        given["task_id"] = f"task-{hashlib.sha256(_canonical(content)).hexdigest()[:24]}"
    return _task(given)


def _task(given: Mapping[str, Any]) -> Task:
    try:
        return Task.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidRequest(first["msg"], status=422, field=".".join(map(str, first["loc"])) or None) from error


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def tasks(state: TaskState | str | None, after: str | None) -> ApiCall[list[TaskStatus]]:
    """One page; a full page may be followed by another."""
    params = _given(state=state, after=after, limit=TASKS_PER_PAGE)
    return ApiCall("GET", "/v1/tasks", _reads(list[TaskStatus]), params=params)


def task(task_id: str) -> ApiCall[TaskStatus]:
    return ApiCall("GET", f"/v1/tasks/{_segment(task_id)}", _reads(TaskStatus))


def cancel(task_id: str) -> ApiCall[TaskStatus]:
    return ApiCall("DELETE", f"/v1/tasks/{_segment(task_id)}", _reads(TaskStatus))


# Sessions and their tokens


def session(session_id: str) -> ApiCall[Session]:
    return ApiCall("GET", f"/v1/sessions/{_segment(session_id)}", _reads(Session))


def sessions(
    state: SessionState | str | None,
    reason: FailureReason | str | None,
    task: str | None,
    after: str | None,
    limit: int,
    newest: bool,
) -> ApiCall[list[Session]]:
    """One page; a full page may be followed by another."""
    params = _given(state=state, reason=reason, task=task, after=after, limit=limit, order="newest" if newest else None)
    return ApiCall("GET", "/v1/sessions", _reads(list[Session]), params=params)


def log(session_id: str, name: str, tail: int | None) -> ApiCall[str]:
    def read(body: bytes) -> str:
        return body.decode("utf-8", "replace")

    path = f"/v1/sessions/{_segment(session_id)}/log"
    return ApiCall("GET", path, read, params=_given(name=name, tail=tail), accept="text/plain")


def trajectory(session_id: str) -> ApiCall[Trajectory]:
    return ApiCall("GET", f"/v1/sessions/{_segment(session_id)}/trajectory", _one_trajectory, accept=ARROW)


@dataclass
class Fetched:
    """Trajectories of sessions, and the reasons of those that are damaged."""

    trajectories: list[Trajectory] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    """Reasons by session id."""

    def add(self, other: Fetched) -> None:
        self.trajectories += other.trajectories
        self.damaged |= other.damaged


def trajectories(session_ids: Sequence[str]) -> Iterator[ApiCall[Fetched]]:
    for start in range(0, len(session_ids), SESSIONS_PER_CALL):
        body = dump_json({"session_ids": list(session_ids[start : start + SESSIONS_PER_CALL])})
        yield ApiCall("POST", "/v1/trajectories", _fetched, body=body, accept=ARROW)


# Results


def lease(
    consumer: str,
    unit: UnitLike,
    *,
    max: int,
    wait: float,
    lease: float | None,
    start: StartLike,
    max_staleness: int | None,
    stale: StaleLike,
    prefix: str | None,
    groups_per_update: int | None,
) -> ApiCall[Results]:
    given = {
        "consumer": consumer,
        "unit": Unit(unit).value,
        "max": max,
        "wait": wait,
        "lease": lease,
        "start": Start(start).value,
        "max_staleness": max_staleness,
        "stale": Stale(stale).value if max_staleness is not None else None,
        "prefix": prefix,
        "groups_per_update": groups_per_update,
    }
    body = {name: value for name, value in given.items() if value is not None}
    params = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in body.items()}
    older = ApiCall("GET", "/v1/results", _reads(Results), params=params, waits=wait)
    return ApiCall("POST", "/v1/results", _reads(Results), body=dump_json(body), waits=wait, older=older)


def ack(consumer: str, result_ids: Sequence[str], unusable: Sequence[str] = ()) -> ApiCall[Acked]:
    ack = Ack(consumer=consumer, result_ids=list(result_ids), unusable=list(unusable))
    body = dump_json(ack.model_dump(mode="json", exclude_defaults=True))
    return ApiCall("POST", "/v1/results/ack", _reads(Acked), body=body)


def release(consumer: str) -> ApiCall[int]:
    body = dump_json({"consumer": consumer})
    return ApiCall("POST", "/v1/results/release", lambda content: int(load_json(content)["released"]), body=body)


# The policy and the service


def policy() -> ApiCall[Policy]:
    return ApiCall("GET", "/v1/policy", _reads(Policy))


def pause(mode: PauseMode, deadline: float | None) -> ApiCall[Policy]:
    body = {"mode": mode} | ({} if deadline is None else {"deadline": deadline})
    # Without a deadline the service waits for the longest turn in flight.
    waits = 86_400.0 if deadline is None and mode == "drain" else deadline or 0.0
    return ApiCall("POST", "/v1/policy/pause", _reads(Policy), body=dump_json(body), waits=waits)


def resume(version: int | None) -> ApiCall[Policy]:
    body = {} if version is None else {"version": version}
    return ApiCall("POST", "/v1/policy/resume", _reads(Policy), body=dump_json(body))


def announce(version: int | None) -> ApiCall[Policy]:
    body = {} if version is None else {"version": version}
    return ApiCall("POST", "/v1/policy/version", _reads(Policy), body=dump_json(body), waits=120.0)


def update_weights(folder: str, version: int) -> ApiCall[Policy]:
    body = dump_json({"folder": folder, "version": version})
    return ApiCall("POST", "/v1/policy/weights", _reads(Policy), body=body, waits=3600.0)


def pacing() -> ApiCall[Pacing]:
    return ApiCall("GET", "/v1/pacing", _reads(Pacing))


def nodes() -> ApiCall[list[dict[str, Any]]]:
    return ApiCall("GET", "/v1/nodes", _reads(list[dict[str, Any]]))


def drain_node(name: str, *, drained: bool) -> ApiCall[list[dict[str, Any]]]:
    action = "drain" if drained else "undrain"
    return ApiCall("POST", f"/v1/nodes/{_segment(name)}/{action}", _reads(list[dict[str, Any]]))


def stragglers(limit: int) -> ApiCall[list[SlowSession]]:
    return ApiCall("GET", "/v1/stragglers", _reads(list[SlowSession]), params=_given(limit=limit))


def health() -> ApiCall[dict[str, Any]]:
    # A service that is held or broken answers with 503 at once.
    return ApiCall("GET", "/healthz", _reads(dict[str, Any]), also=frozenset({503}))


# Parsing responses


def _reads(kind: type[T]) -> Callable[[bytes], T]:
    def read(body: bytes) -> T:
        try:
            adapter: TypeAdapter[T] = _adapter(kind)  # type: ignore[arg-type]
            value: T = adapter.validate_python(load_json(body))
            return value
        except (ValidationError, TowlineError) as error:
            raise BadAnswer(f"the response violates the contract: {error}") from error

    return read


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _one_trajectory(body: bytes) -> Trajectory:
    fetched = _fetched(body)
    if fetched.damaged:
        raise BadAnswer(f"the trajectory cannot be read: {', '.join(fetched.damaged.values())}")
    if len(fetched.trajectories) != 1:
        raise BadAnswer(f"expected one trajectory, found {len(fetched.trajectories)}")
    return fetched.trajectories[0]


def _fetched(body: bytes) -> Fetched:
    """Parse batch by batch: each fits Arrow's columns, all together may not. A batch that cannot be read, because a newer
    service wrote it, is reported as damaged."""
    fetched = Fetched()
    try:
        with ipc.open_stream(pa.py_buffer(body)) as stream:
            for batch, metadata in stream.iter_batches_with_custom_metadata():
                if metadata is not None and DAMAGED in metadata:
                    fetched.damaged |= _reasons(load_json(metadata[DAMAGED]))
                table = pa.Table.from_batches([batch])
                try:
                    fetched.trajectories += [Trajectory.model_validate(row) for row in from_table(Trajectory, table)]
                except (ValidationError, SchemaError) as error:
                    names = table.column("session_id").to_pylist() if "session_id" in table.column_names else []
                    if not names:
                        raise
                    fetched.damaged |= dict.fromkeys(map(str, names), " ".join(str(error).split())[:300])
    except (pa.ArrowException, ValidationError, TowlineError) as error:
        raise BadAnswer(f"the response is not a stream of trajectories: {error}") from error
    return fetched


def _reasons(value: Any) -> dict[str, str]:
    return {str(name): str(reason) for name, reason in value.items()} if isinstance(value, dict) else {}


def failure(status: int, body: bytes) -> ClientError:
    """The error of an error response."""
    try:
        problem = load_json(body)
    except TowlineError:
        problem = None
    if not isinstance(problem, dict) or not isinstance(problem.get("error"), str):
        return refusal(status, f"the service answered with status {status}", None)
    place = problem.get("field")
    return refusal(status, problem["error"], place if isinstance(place, str) else None)


def _segment(name: str) -> str:
    return quote(name, safe="")


def _given(**params: Any) -> dict[str, str]:
    return {name: str(value) for name, value in params.items() if value is not None}
