"""`AsyncClient`: the calls of `Client` for asyncio. Each belongs to the event loop that it is used in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
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
_LARGE = 1 << 20
"""Responses of at least this many bytes are parsed in a thread, so that they do not block the event loop."""


class AsyncClient:
    """A rollout service, seen from a trainer that runs on asyncio. Every method is that of `Client`."""

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
        self._http = httpx.AsyncClient(**self._connection.options())

    @property
    def url(self) -> str:
        return self._connection.url

    def __repr__(self) -> str:
        return f"AsyncClient({self.url!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    # Tasks

    @overload
    async def submit(self, tasks: TaskLike) -> Accepted: ...
    @overload
    async def submit(self, tasks: Sequence[TaskLike]) -> list[Accepted]: ...
    async def submit(self, tasks: TaskLike | Sequence[TaskLike]) -> Accepted | list[Accepted]:
        """Submit one task or many. Idempotent; a task without an id gets one derived from its content."""
        if isinstance(tasks, Sequence):
            return [one for call in calls.submit(tasks) for one in await self._do(call)]
        (call,) = calls.submit([tasks])
        (accepted,) = await self._do(call)
        return accepted

    async def tasks(self, state: TaskState | str | None = None) -> list[TaskStatus]:
        """Every task, or those in one state, without their sessions."""
        found: list[TaskStatus] = []
        while True:
            page = await self._do(calls.tasks(state, found[-1].task_id if found else None))
            found += page
            if len(page) < calls.TASKS_PER_PAGE:
                return found

    async def task(self, task_id: str) -> TaskStatus:
        return await self._do(calls.task(task_id))

    async def wait(self, task_id: str, within: float | None = None) -> TaskStatus:
        """Wait for the task to end; raises `WaitTimeout` after `within` seconds."""
        polling = Polling(within)
        while (status := await self.task(task_id)).state not in (TaskState.DONE, TaskState.CANCELLED):
            pause = polling.pause()
            if pause is None:
                raise WaitTimeout(f"task {task_id} is still {status.state} after {within:g} seconds")
            await asyncio.sleep(pause)
        return status

    async def cancel(self, task_id: str) -> TaskStatus:
        """Cancel a task; its running sessions stop and keep their finished turns."""
        return await self._do(calls.cancel(task_id))

    # Sessions and their tokens

    async def session(self, session_id: str) -> Session:
        return await self._do(calls.session(session_id))

    async def sessions(
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
            page = await self._do(calls.sessions(state, reason, task, after, most, newest))
            found += page
            if len(page) < most:
                break
        return found

    async def log(self, session_id: str, name: str = "harness.log", tail: int | None = None) -> str:
        """The last 1 MiB of a log of a session, or its last `tail` lines."""
        return await self._do(calls.log(session_id, name, tail))

    async def trajectory(self, session_id: str) -> Trajectory:
        return await self._do(calls.trajectory(session_id))

    async def trajectories(self, ids: Sequence[str]) -> list[Trajectory]:
        """The trajectories of those sessions that have one."""
        return (await self.fetch(ids)).trajectories

    async def fetch(self, ids: Sequence[str]) -> Fetched:
        """The trajectories of those sessions that have one, and which of them are damaged."""
        fetched = Fetched()
        for call in calls.trajectories(ids):
            fetched.add(await self._do(call))
        return fetched

    # Results

    async def lease(
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
        return await self._do(
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

    async def results(
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
    ) -> AsyncIterator[Delivered]:
        """Results with their trajectories, as they finish. A session with a damaged trajectory is flagged and has none.

        The loop ends after `limit` results, or after `idle` seconds without one; with neither it runs forever. A result
        that is not acknowledged within its lease is delivered again; if `lease` is given, results whose lease expired while
        the loop was busy are skipped. With `auto_ack` each is acknowledged when the next is requested: what the loop body
        did with it must then be durable. With `groups_per_update` (and `unit="group"`) groups arrive at the pace of one
        update of that many groups per policy version: acknowledge them before the version advances.
        """
        stream = ResultStream(limit, idle, max, wait, lease)
        while not stream.over:
            batch = await self.lease(
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
                await asyncio.sleep(stream.empty_pause)
                continue
            fetched = await self.fetch(session_ids(batch.results)) if trajectories else Fetched()
            for result in batch.results:
                if stream.expired:
                    break
                yield deliver(result, fetched, batch.version, stream.take())
                if auto_ack:
                    await self.ack(consumer, [result.result_id])

    async def ack(self, consumer: str, result_ids: Sequence[str], *, unusable: Sequence[str] = ()) -> Acked:
        """Acknowledge results: they are never delivered to this consumer again.

        Those that are also `unusable` do not count towards `groups_per_update`: no update used them.
        """
        return await self._do(calls.ack(consumer, result_ids, unusable))

    async def release(self, consumer: str) -> int:
        """End all leases of the consumer: its results are available again at once. Returns how many."""
        return await self._do(calls.release(consumer))

    # The policy

    async def policy(self) -> Policy:
        return await self._do(calls.policy())

    async def pause(self, mode: PauseMode = "drain", deadline: float | None = None) -> Policy:
        """Pause sampling: turns in flight finish; with `abort`, or after `deadline` seconds, they are interrupted."""
        return await self._do(calls.pause(mode, deadline))

    async def resume(self, version: int | None = None) -> Policy:
        """Resume sampling, under `version` if given."""
        return await self._do(calls.resume(version))

    async def announce(self, version: int | None = None) -> Policy:
        """Announce that the engines have the weights of `version` now, which the trainer gave them by its own means.

        Default: the version that the engines themselves report. Sampling continues; each token carries the version that
        sampled it, where the engine labels its weights.
        """
        return await self._do(calls.announce(version))

    async def update_weights(self, folder: str | Path, version: int) -> Policy:
        """Load the weights of a folder on the server's machine."""
        return await self._do(calls.update_weights(str(folder), version))

    # The service

    async def pacing(self) -> Pacing:
        """The paced consumers, and what pacing costs."""
        return await self._do(calls.pacing())

    async def nodes(self) -> list[dict[str, Any]]:
        return await self._do(calls.nodes())

    async def drain_node(self, name: str) -> list[dict[str, Any]]:
        """Give a node no new sessions; those that run there end as usual. Returns all nodes."""
        return await self._do(calls.drain_node(name, drained=True))

    async def undrain_node(self, name: str) -> list[dict[str, Any]]:
        """Let a drained node take sessions again. Returns all nodes."""
        return await self._do(calls.drain_node(name, drained=False))

    async def stragglers(self, limit: int = 20) -> list[SlowSession]:
        """The slowest of the sessions that are being worked on, compared with finished ones; stragglers first."""
        return await self._do(calls.stragglers(limit))

    async def health(self) -> dict[str, Any]:
        return await self._do(calls.health())

    async def events(self, after: int | None = None) -> AsyncIterator[Event]:
        """Events as they happen, forever; reconnects after a broken connection and continues where it ended."""
        connection, backoff = self._connection, self._connection.backoff()
        while True:
            lines, pause = EventParser(), 0.0
            try:
                async with self._http.stream(**connection.event_request(after)) as response:
                    if not response.is_success:
                        await response.aread()
                        pause = connection.retry_pause(response, backoff)
                    else:
                        async for line in response.aiter_lines():
                            event = lines.take(line)
                            if event is not None:
                                backoff, after = connection.backoff(), event.seq
                                yield event
            except httpx.HTTPError as error:
                pause = connection.reconnect_pause(error, backoff)
            await asyncio.sleep(pause or backoff.first)

    # One exchange

    async def _do(self, call: ApiCall[T]) -> T:
        connection, backoff = self._connection, self._connection.backoff()
        while True:
            try:
                response = await self._http.request(**connection.request(call))
            except httpx.HTTPError as error:
                pause = connection.reconnect_pause(error, backoff)
            else:
                if connection.is_answer(call, response):
                    if len(response.content) < _LARGE:
                        return call.read(response.content)
                    return await asyncio.to_thread(call.read, response.content)
                pause = connection.retry_pause(response, backoff, call)
            await asyncio.sleep(pause)
