"""`AsyncClient`: the calls of `Client`, for asyncio. One belongs to the loop that it is used in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, overload

import httpx

from towline.client import calls
from towline.client.calls import Call, Fetched, PauseMode, StaleLike, StartLike, TaskLike, UnitLike
from towline.client.connection import Connection
from towline.client.delivered import Delivered, deliver, session_ids
from towline.client.errors import WaitTimeout
from towline.client.polling import Polling, Stream
from towline.client.sse import Lines
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
    Stale,
    Start,
    TaskState,
    TaskStatus,
    Trajectory,
    Unit,
)

T = TypeVar("T")
_LARGE = 1 << 20
"""Bytes of an answer that would hold up the loop while they are read."""


class AsyncClient:
    """A rollout service, seen from a trainer that runs on asyncio. Every method is that of `Client`."""

    def __init__(
        self, url: str | None = None, key: str | None = None, *, timeout: float = 60.0, patience: float = 300.0
    ):
        self._connection = Connection(url, key, timeout, patience)
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
        """Submit one task or many. The same task again is the same task; a task without an id gets one from its content."""
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
            if len(page) < calls.TASKS_A_PAGE:
                return found

    async def task(self, task_id: str) -> TaskStatus:
        return await self._do(calls.task(task_id))

    async def wait(self, task_id: str, within: float | None = None) -> TaskStatus:
        """The task once it has come to its end; `WaitTimeout` if that is not `within` so many seconds."""
        polling = Polling(within)
        while (status := await self.task(task_id)).state not in (TaskState.DONE, TaskState.CANCELLED):
            pause = polling.pause()
            if pause is None:
                raise WaitTimeout(f"task {task_id} is still {status.state} after {within:g} seconds")
            await asyncio.sleep(pause)
        return status

    async def cancel(self, task_id: str) -> TaskStatus:
        """End the task's sessions; what they have sampled is kept."""
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
        """Sessions of all attempts, by state, by why they failed, by task: from the oldest task on, or from the newest."""
        found: list[Session] = []
        while limit is None or len(found) < limit:
            most = calls.SESSIONS_A_PAGE if limit is None else min(calls.SESSIONS_A_PAGE, limit - len(found))
            after = found[-1].session_id if found else None
            page = await self._do(calls.sessions(state, reason, task, after, most, newest))
            found += page
            if len(page) < most:
                break
        return found

    async def log(self, session_id: str, name: str = "harness.log", tail: int | None = None) -> str:
        """The end of what a session's harness printed, at most 1 MiB; `tail` lines of it, or another log file."""
        return await self._do(calls.log(session_id, name, tail))

    async def trajectory(self, session_id: str) -> Trajectory:
        return await self._do(calls.trajectory(session_id))

    async def trajectories(self, ids: Sequence[str]) -> list[Trajectory]:
        """The trajectories of the named sessions that have one."""
        return (await self.fetch(ids)).trajectories

    async def fetch(self, ids: Sequence[str]) -> Fetched:
        """The trajectories of the named sessions that have one, and which of them the service has and cannot read."""
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

        With `prefix` the consumer follows only tasks whose ids begin so; its first call says it, for good. With
        `groups_per_update` the service starts sessions at the consumer's pace, so that groups are not older than
        `max_staleness` when it gets them. `max=0` leases nothing: it only makes the consumer known.
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
        """Results with their trajectories, as they finish. A session whose trajectory is damaged says so, and has none.

        It ends after `limit` results, or when none came for `idle` seconds; with neither it never does. A result that
        is not acknowledged within its lease comes again; one whose lease ran out while the loop was busy with another is
        not handed to it, if `lease` is given. With `auto_ack` each is acknowledged when the next is asked for: what the
        loop's body did with it must then be durable. With `groups_per_update` (and `unit="group"`) groups come at the pace
        of an update of so many groups per policy version: acknowledge them before the version advances.
        """
        stream = Stream(limit, idle, max, wait, lease)
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
            stream.came(batch)
            if not batch.results:
                await asyncio.sleep(stream.breath)
                continue
            fetched = await self.fetch(session_ids(batch.results)) if trajectories else Fetched()
            for result in batch.results:
                if stream.expired:
                    break
                yield deliver(result, fetched, batch.version, stream.take())
                if auto_ack:
                    await self.ack(consumer, [result.result_id])

    async def ack(self, consumer: str, result_ids: Sequence[str], *, unusable: Sequence[str] = ()) -> Acked:
        """Say that the results are used: they are never handed to this consumer again.

        Those that are also `unusable` do not count towards `groups_per_update`: no update learned from them.
        """
        return await self._do(calls.ack(consumer, result_ids, unusable))

    async def release(self, consumer: str) -> int:
        """Give back what is leased and not acknowledged, so that it comes again at once; how many results."""
        return await self._do(calls.release(consumer))

    # The policy

    async def policy(self) -> Policy:
        return await self._do(calls.policy())

    async def pause(self, mode: PauseMode = "drain", deadline: float | None = None) -> Policy:
        """Stop sampling: turns in flight finish, or with `abort`, or after `deadline` seconds, are cut and go on later."""
        return await self._do(calls.pause(mode, deadline))

    async def resume(self, version: int | None = None) -> Policy:
        """Go on sampling, under `version` if given."""
        return await self._do(calls.resume(version))

    async def update_weights(self, folder: str | Path, version: int) -> Policy:
        """Replace the weights by those of a folder on the service's machine."""
        return await self._do(calls.update_weights(str(folder), version))

    # The service

    async def pacing(self) -> Pacing:
        """The consumers that declared `groups_per_update`, and what pacing costs."""
        return await self._do(calls.pacing())

    async def nodes(self) -> list[dict[str, Any]]:
        return await self._do(calls.nodes())

    async def health(self) -> dict[str, Any]:
        return await self._do(calls.health())

    async def events(self, after: int | None = None) -> AsyncIterator[Event]:
        """What happens, as it happens, for ever; a broken connection is taken up where it ended."""
        connection, backoff = self._connection, self._connection.backoff()
        while True:
            lines, pause = Lines(), 0.0
            try:
                async with self._http.stream("GET", "/v1/events", **connection.listening(after)) as answer:
                    if not answer.is_success:
                        await answer.aread()
                        pause = connection.refused(answer, backoff)
                    else:
                        async for line in answer.aiter_lines():
                            event = lines.take(line)
                            if event is not None:
                                backoff, after = connection.backoff(), event.seq
                                yield event
            except httpx.HTTPError as error:
                pause = connection.broken(error, backoff)
            await asyncio.sleep(pause or backoff.first)

    # One exchange

    async def _do(self, call: Call[T]) -> T:
        connection, backoff = self._connection, self._connection.backoff()
        while True:
            try:
                answer = await self._http.request(**connection.request(call))
            except httpx.HTTPError as error:
                pause = connection.broken(error, backoff)
            else:
                if connection.answered(call, answer):
                    if len(answer.content) < _LARGE:
                        return call.read(answer.content)
                    return await asyncio.to_thread(call.read, answer.content)
                pause = connection.refused(answer, backoff)
            await asyncio.sleep(pause)
