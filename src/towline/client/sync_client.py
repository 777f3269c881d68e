"""`Client`: blocking calls. Can be shared by threads, used inside a running event loop, and inherited over a fork."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, overload

import httpx

from towline.client import calls
from towline.client.calls import ApiCall, Fetched, PauseMode, StaleLike, StartLike, TaskLike, UnitLike
from towline.client.connection import ServiceConnection
from towline.client.errors import WaitTimeout
from towline.client.results import Delivered, EventParser, Polling, ResultStream, deliver, session_ids
from towline.schema import (
    Accepted,
    Acked,
    Event,
    FailureReason,
    Pacing,
    Policy,
    Results,
    Session,
    SessionState,
    SlowSession,
    Stale,
    Start,
    TaskState,
    TaskStatus,
    Trajectory,
    Unit,
)

T = TypeVar("T")


class Client:
    """A client of the rollout service.

    `url` and `key` default to `TOWLINE_URL` and `TOWLINE_KEY`; the key of a service of the same user on this machine is
    found. `timeout`: seconds for one response; `patience`: seconds for which a call is retried while the service is down or
    full. `ca`: file with the certificates to trust for https, default `TOWLINE_CA`.
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        timeout: float = 60.0,
        patience: float = 300.0,
        ca: str | Path | None = None,
    ):
        self._connection = ServiceConnection(url, key, timeout, patience, ca)
        self._making = threading.Lock()
        self._http: httpx.Client | None = None
        self._owner = 0

    @property
    def url(self) -> str:
        return self._connection.url

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        with self._making:
            if self._http is not None and self._owner == os.getpid():
                self._http.close()
            self._http = None

    # Tasks

    @overload
    def submit(self, tasks: TaskLike) -> Accepted: ...
    @overload
    def submit(self, tasks: Sequence[TaskLike]) -> list[Accepted]: ...
    def submit(self, tasks: TaskLike | Sequence[TaskLike]) -> Accepted | list[Accepted]:
        """Submit one task or many. Idempotent; a task without an id gets one derived from its content."""
        if isinstance(tasks, Sequence):
            return [one for call in calls.submit(tasks) for one in self._do(call)]
        (call,) = calls.submit([tasks])
        (accepted,) = self._do(call)
        return accepted

    def tasks(self, state: TaskState | str | None = None) -> list[TaskStatus]:
        """Every task, or those in one state, without their sessions."""
        found: list[TaskStatus] = []
        while True:
            page = self._do(calls.tasks(state, found[-1].task_id if found else None))
            found += page
            if len(page) < calls.TASKS_PER_PAGE:
                return found

    def task(self, task_id: str) -> TaskStatus:
        return self._do(calls.task(task_id))

    def wait(self, task_id: str, within: float | None = None) -> TaskStatus:
        """Wait for the task to end; raises `WaitTimeout` after `within` seconds."""
        polling = Polling(within)
        while (status := self.task(task_id)).state not in (TaskState.DONE, TaskState.CANCELLED):
            pause = polling.pause()
            if pause is None:
                raise WaitTimeout(f"task {task_id} is still {status.state} after {within:g} seconds")
            time.sleep(pause)
        return status

    def cancel(self, task_id: str) -> TaskStatus:
        """Cancel a task; its running sessions stop and keep their finished turns."""
        return self._do(calls.cancel(task_id))

    # Sessions and their tokens

    def session(self, session_id: str) -> Session:
        return self._do(calls.session(session_id))

    def sessions(
        self,
        state: SessionState | str | None = None,
        reason: FailureReason | str | None = None,
        task: str | None = None,
        *,
        limit: int | None = None,
        newest: bool = False,
    ) -> list[Session]:
        """Sessions of all attempts, filtered by state, failure reason and task; oldest or newest task first."""
        found: list[Session] = []
        while limit is None or len(found) < limit:
            most = calls.SESSIONS_PER_PAGE if limit is None else min(calls.SESSIONS_PER_PAGE, limit - len(found))
            after = found[-1].session_id if found else None
            page = self._do(calls.sessions(state, reason, task, after, most, newest))
            found += page
            if len(page) < most:
                break
        return found

    def log(self, session_id: str, name: str = "harness.log", tail: int | None = None) -> str:
        """The last 1 MiB of a log of a session, or its last `tail` lines."""
        return self._do(calls.log(session_id, name, tail))

    def trajectory(self, session_id: str) -> Trajectory:
        return self._do(calls.trajectory(session_id))

    def trajectories(self, ids: Sequence[str]) -> list[Trajectory]:
        """The trajectories of those sessions that have one."""
        return (self.fetch(ids)).trajectories

    def fetch(self, ids: Sequence[str]) -> Fetched:
        """The trajectories of those sessions that have one, and which of them are damaged."""
        fetched = Fetched()
        for call in calls.trajectories(ids):
            fetched.add(self._do(call))
        return fetched

    # Results

    def lease(
        self,
        consumer: str,
        unit: UnitLike = Unit.SESSION,
        *,
        max: int = 16,
        wait: float = 20.0,
        lease: float | None = None,
        start: StartLike = Start.BEGINNING,
        max_staleness: int | None = None,
        stale: StaleLike = Stale.DROP,
        prefix: str | None = None,
        groups_per_update: int | None = None,
    ) -> Results:
        """Up to `max` results, leased for `lease` seconds; waits up to `wait` seconds for the first.

        With `prefix` the consumer follows only tasks whose ids have it; the first call fixes it. With `groups_per_update`
        the service starts sessions at the consumer's pace, so that groups do not exceed `max_staleness` when they are
        delivered. `max=0` only registers the consumer.
        """
        return self._do(
            calls.lease(
                consumer,
                unit,
                max=max,
                wait=wait,
                lease=lease,
                start=start,
                max_staleness=max_staleness,
                stale=stale,
                prefix=prefix,
                groups_per_update=groups_per_update,
            )
        )

    def results(
        self,
        consumer: str,
        unit: UnitLike = Unit.SESSION,
        *,
        limit: int | None = None,
        idle: float | None = None,
        max: int = 16,
        wait: float = 20.0,
        lease: float | None = None,
        start: StartLike = Start.BEGINNING,
        max_staleness: int | None = None,
        stale: StaleLike = Stale.DROP,
        prefix: str | None = None,
        groups_per_update: int | None = None,
        trajectories: bool = True,
        auto_ack: bool = False,
    ) -> Iterator[Delivered]:
        """Results with their trajectories, as they finish. A session with a damaged trajectory is flagged and has none.

        The loop ends after `limit` results, or after `idle` seconds without one; with neither it runs forever. A result
        that is not acknowledged within its lease is delivered again; if `lease` is given, results whose lease expired while
        the loop was busy are skipped. With `auto_ack` each is acknowledged when the next is requested: what the loop body
        did with it must then be durable. With `groups_per_update` (and `unit="group"`) groups arrive at the pace of one
        update of that many groups per policy version: acknowledge them before the version advances.
        """
        stream = ResultStream(limit, idle, max, wait, lease)
        while not stream.over:
            batch = self.lease(
                consumer,
                unit,
                max=stream.max,
                wait=stream.wait,
                lease=lease,
                start=start,
                max_staleness=max_staleness,
                stale=stale,
                prefix=prefix,
                groups_per_update=groups_per_update,
            )
            stream.add_batch(batch)
            if not batch.results:
                time.sleep(stream.empty_pause)
                continue
            fetched = self.fetch(session_ids(batch.results)) if trajectories else Fetched()
            for result in batch.results:
                if stream.expired:
                    break
                yield deliver(result, fetched, batch.version, stream.take())
                if auto_ack:
                    self.ack(consumer, [result.result_id])

    def ack(self, consumer: str, result_ids: Sequence[str], *, unusable: Sequence[str] = ()) -> Acked:
        """Acknowledge results: they are never delivered to this consumer again.

        Those that are also `unusable` do not count towards `groups_per_update`: no update used them.
        """
        return self._do(calls.ack(consumer, result_ids, unusable))

    def release(self, consumer: str) -> int:
        """End all leases of the consumer: its results are available again at once. Returns how many."""
        return self._do(calls.release(consumer))

    # The policy

    def policy(self) -> Policy:
        return self._do(calls.policy())

    def pause(self, mode: PauseMode = "drain", deadline: float | None = None) -> Policy:
        """Pause sampling: turns in flight finish; with `abort`, or after `deadline` seconds, they are interrupted."""
        return self._do(calls.pause(mode, deadline))

    def resume(self, version: int | None = None) -> Policy:
        """Resume sampling, under `version` if given."""
        return self._do(calls.resume(version))

    def announce(self, version: int | None = None) -> Policy:
        """Announce that the engines have the weights of `version` now, which the trainer gave them by its own means.

        Default: the version that the engines themselves report. Sampling continues; each token carries the version that
        sampled it, where the engine labels its weights.
        """
        return self._do(calls.announce(version))

    def update_weights(self, folder: str | Path, version: int) -> Policy:
        """Load the weights of a folder on the server's machine."""
        return self._do(calls.update_weights(str(folder), version))

    # The service

    def pacing(self) -> Pacing:
        """The paced consumers, and what pacing costs."""
        return self._do(calls.pacing())

    def nodes(self) -> list[dict[str, Any]]:
        return self._do(calls.nodes())

    def drain_node(self, name: str) -> list[dict[str, Any]]:
        """Give a node no new sessions; those that run there end as usual. Returns all nodes."""
        return self._do(calls.drain_node(name, drained=True))

    def undrain_node(self, name: str) -> list[dict[str, Any]]:
        """Let a drained node take sessions again. Returns all nodes."""
        return self._do(calls.drain_node(name, drained=False))

    def stragglers(self, limit: int = 20) -> list[SlowSession]:
        """The slowest of the sessions that are being worked on, compared with finished ones; stragglers first."""
        return self._do(calls.stragglers(limit))

    def health(self) -> dict[str, Any]:
        return self._do(calls.health())

    def events(self, after: int | None = None) -> Iterator[Event]:
        """Events as they happen, forever; reconnects after a broken connection and continues where it ended."""
        connection, backoff = self._connection, self._connection.backoff()
        while True:
            lines, pause = EventParser(), 0.0
            try:
                with self._client().stream(**connection.event_request(after)) as response:
                    if not response.is_success:
                        response.read()
                        pause = connection.retry_pause(response, backoff)
                    else:
                        for line in response.iter_lines():
                            event = lines.take(line)
                            if event is not None:
                                backoff, after = connection.backoff(), event.seq
                                yield event
            except httpx.HTTPError as error:
                pause = connection.reconnect_pause(error, backoff)
            time.sleep(pause or backoff.first)

    # Requests

    def _do(self, call: ApiCall[T]) -> T:
        connection, backoff = self._connection, self._connection.backoff()
        while True:
            try:
                response = self._client().request(**connection.request(call))
            except httpx.HTTPError as error:
                pause = connection.reconnect_pause(error, backoff)
            else:
                if connection.is_answer(call, response):
                    return call.read(response.content)
                pause = connection.retry_pause(response, backoff, call)
            time.sleep(pause)

    def _client(self) -> httpx.Client:
        """The HTTP client of this process; a forked child makes its own."""
        with self._making:
            if self._http is None or self._owner != os.getpid():
                self._http, self._owner = httpx.Client(**self._connection.options()), os.getpid()
            return self._http
