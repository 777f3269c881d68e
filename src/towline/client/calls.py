"""Every call of the service as a value: method, path, body, and how its answer is read. No I/O.

The blocking client and the asynchronous one perform the same calls, so that they cannot differ.
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
    Stale,
    Start,
    Task,
    TaskState,
    TaskStatus,
    Trajectory,
    Unit,
)
from towline.schema.columns import DAMAGED, from_table
from towline.schema.files import dump_json, load_json

T = TypeVar("T")
ARROW = "application/vnd.apache.arrow.stream"
TaskLike = Task | Mapping[str, Any]
UnitLike = Unit | Literal["session", "group"]
StartLike = Start | Literal["beginning", "now"]
StaleLike = Stale | Literal["drop", "flag"]
PauseMode = Literal["drain", "abort"]

TASKS_A_CALL = 64
SESSIONS_A_CALL = 64
TASKS_A_PAGE = 1000
SESSIONS_A_PAGE = 1000
"""What goes into one request; more is several."""


@dataclass(frozen=True)
class Call(Generic[T]):
    method: str
    path: str
    read: Callable[[bytes], T]
    """The answer's body as what it means; raises `BadAnswer`."""
    params: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    accept: str = "application/json"
    waits: float = 0.0
    """Seconds that the service may take on purpose, beyond what an answer usually takes."""
    also: frozenset[int] = frozenset()
    """Statuses besides 2xx that are answers."""


# Tasks


def submit(tasks: Sequence[TaskLike]) -> Iterator[Call[list[Accepted]]]:
    whole = [with_id(task) for task in tasks]
    for start in range(0, len(whole), TASKS_A_CALL):
        body = dump_json([task.model_dump(mode="json") for task in whole[start : start + TASKS_A_CALL]])
        yield Call("POST", "/v1/tasks", _reads(list[Accepted]), body=body)


def with_id(task: TaskLike) -> Task:
    """The task; one without a `task_id` gets one made from its content, so that submitting it again is the same task."""
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


def tasks(state: TaskState | str | None, after: str | None) -> Call[list[TaskStatus]]:
    """One page; a full one is followed by another."""
    params = _given(state=state, after=after, limit=TASKS_A_PAGE)
    return Call("GET", "/v1/tasks", _reads(list[TaskStatus]), params=params)


def task(task_id: str) -> Call[TaskStatus]:
    return Call("GET", f"/v1/tasks/{_segment(task_id)}", _reads(TaskStatus))


def cancel(task_id: str) -> Call[TaskStatus]:
    return Call("DELETE", f"/v1/tasks/{_segment(task_id)}", _reads(TaskStatus))


# Sessions and their tokens


def session(session_id: str) -> Call[Session]:
    return Call("GET", f"/v1/sessions/{_segment(session_id)}", _reads(Session))


def sessions(
    state: SessionState | str | None,
    reason: FailureReason | str | None,
    task: str | None,
    after: str | None,
    limit: int,
    newest: bool,
) -> Call[list[Session]]:
    """One page; a full one is followed by another."""
    params = _given(state=state, reason=reason, task=task, after=after, limit=limit, order="newest" if newest else None)
    return Call("GET", "/v1/sessions", _reads(list[Session]), params=params)


def log(session_id: str, name: str, tail: int | None) -> Call[str]:
    def read(body: bytes) -> str:
        return body.decode("utf-8", "replace")

    path = f"/v1/sessions/{_segment(session_id)}/log"
    return Call("GET", path, read, params=_given(name=name, tail=tail), accept="text/plain")


def trajectory(session_id: str) -> Call[Trajectory]:
    return Call("GET", f"/v1/sessions/{_segment(session_id)}/trajectory", _one_trajectory, accept=ARROW)


@dataclass
class Fetched:
    """Trajectories of sessions, and why those are missing that the service has and cannot read."""

    trajectories: list[Trajectory] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    """Reasons by session id."""

    def add(self, other: Fetched) -> None:
        self.trajectories += other.trajectories
        self.damaged |= other.damaged


def trajectories(session_ids: Sequence[str]) -> Iterator[Call[Fetched]]:
    for start in range(0, len(session_ids), SESSIONS_A_CALL):
        body = dump_json({"session_ids": list(session_ids[start : start + SESSIONS_A_CALL])})
        yield Call("POST", "/v1/trajectories", _fetched, body=body, accept=ARROW)


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
) -> Call[Results]:
    params = _given(
        consumer=consumer,
        unit=Unit(unit).value,
        max=max,
        wait=f"{wait:g}",
        lease=None if lease is None else f"{lease:g}",
        start=Start(start).value,
        max_staleness=max_staleness,
        stale=Stale(stale).value if max_staleness is not None else None,
        prefix=prefix,
        groups_per_update=groups_per_update,
    )
    return Call("GET", "/v1/results", _reads(Results), params=params, waits=wait)


def ack(consumer: str, result_ids: Sequence[str], unusable: Sequence[str] = ()) -> Call[Acked]:
    ack = Ack(consumer=consumer, result_ids=list(result_ids), unusable=list(unusable))
    body = dump_json(ack.model_dump(mode="json", exclude_defaults=True))
    return Call("POST", "/v1/results/ack", _reads(Acked), body=body)


def release(consumer: str) -> Call[int]:
    body = dump_json({"consumer": consumer})
    return Call("POST", "/v1/results/release", lambda content: int(load_json(content)["released"]), body=body)


# The policy and the service


def policy() -> Call[Policy]:
    return Call("GET", "/v1/policy", _reads(Policy))


def pause(mode: PauseMode, deadline: float | None) -> Call[Policy]:
    body = {"mode": mode} | ({} if deadline is None else {"deadline": deadline})
    # Without a deadline the service waits for its longest turn.
    waits = 86_400.0 if deadline is None and mode == "drain" else deadline or 0.0
    return Call("POST", "/v1/policy/pause", _reads(Policy), body=dump_json(body), waits=waits)


def resume(version: int | None) -> Call[Policy]:
    body = {} if version is None else {"version": version}
    return Call("POST", "/v1/policy/resume", _reads(Policy), body=dump_json(body))


def update_weights(folder: str, version: int) -> Call[Policy]:
    body = dump_json({"folder": folder, "version": version})
    return Call("POST", "/v1/policy/weights", _reads(Policy), body=body, waits=3600.0)


def pacing() -> Call[Pacing]:
    return Call("GET", "/v1/pacing", _reads(Pacing))


def nodes() -> Call[list[dict[str, Any]]]:
    return Call("GET", "/v1/nodes", _reads(list[dict[str, Any]]))


def health() -> Call[dict[str, Any]]:
    # A service that is held or broken says so with 503, at once.
    return Call("GET", "/healthz", _reads(dict[str, Any]), also=frozenset({503}))


# Reading answers


def _reads(kind: type[T]) -> Callable[[bytes], T]:
    def read(body: bytes) -> T:
        try:
            adapter: TypeAdapter[T] = _adapter(kind)  # type: ignore[arg-type]
            value: T = adapter.validate_python(load_json(body))
            return value
        except (ValidationError, TowlineError) as error:
            raise BadAnswer(f"the answer is not what the contract says: {error}") from error

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
    """One batch at a time: a batch fits Arrow's columns, all of them together need not. One that cannot be read, because a
    newer service wrote it, is told of as damaged."""
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
        raise BadAnswer(f"the answer is not a stream of trajectories: {error}") from error
    return fetched


def _reasons(told: Any) -> dict[str, str]:
    return {str(name): str(reason) for name, reason in told.items()} if isinstance(told, dict) else {}


def failure(status: int, body: bytes) -> ClientError:
    """The error that a refusal's body tells."""
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
