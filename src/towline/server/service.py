"""The service as one object: its parts, put together, started and stopped in order."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from towline.config import ServerSettings
from towline.schema import Accepted, Acked, Results, Task, TaskStatus, Unit
from towline.server import ownership, queueing, reading
from towline.server.admission import admit
from towline.server.auth import Caller, Keys, loopback
from towline.server.callbacks import Callbacks
from towline.server.damage import flag_damaged
from towline.server.ending import Effects, Ender
from towline.server.errors import Full, Invalid, NotFound, StoreError
from towline.server.events import Events
from towline.server.metrics import Metrics
from towline.server.outages import Outage
from towline.server.pacer import Pacer
from towline.server.policy import PolicyDesk
from towline.server.repair import repair_rows
from towline.server.results import Delivery, Wish
from towline.server.retention import Retention
from towline.server.runner import Runner
from towline.server.scheduler import Scheduler, Signals
from towline.server.segments import Segments
from towline.server.signals import Signal
from towline.server.store import Store, database_url

log = logging.getLogger("towline.server")
_CHECK = 30.0
"""Seconds between two looks at the store: is it still this server's, and how much waits."""


class Service:
    def __init__(self, settings: ServerSettings, runner: Runner):
        self.settings = settings
        self.runner = runner
        self.stopping = asyncio.Event()
        self.signals = Signals(Signal(), Signal(), Signal(), Signal())
        self.metrics = Metrics()
        self.store = Store(database_url(settings.database, settings.data))
        self.segments = Segments(settings.segments or settings.data / "segments")
        self.keys = Keys(self.store, needed=not loopback(settings.host))
        self.delivery = Delivery(self.store)
        # Results that a paced consumer waits for may come with the next version.
        self.policy = PolicyDesk(self.store, runner, self.signals.work, self.signals.results)
        self.pacer = Pacer(self.store, settings.pacing_seconds)
        self.events = Events(self.store, self.signals.events, self.stopping, keep=settings.events)
        self.retention = Retention(
            self.store,
            self.segments,
            self.events,
            runner,
            keep=settings.keep_seconds,
            silent=settings.silent_seconds,
        )
        self.scheduler = Scheduler(
            self.store,
            self.segments,
            runner,
            self.policy,
            self.pacer,
            self.signals,
            self.metrics,
            quarantine_deaths=settings.quarantine_deaths,
        )
        runner.watch(self.scheduler.stages.changed)
        runner.watch_engines(self.metrics.engine_failed)
        self.callbacks = Callbacks(self.store, self.signals.callbacks, self.metrics, tries=settings.callback_tries)
        self.problems: list[str] = []
        """What a probe found at the start; the circuit breakers say what is so now."""
        self.unreadable = Outage("the place of the trajectories is")
        self.started = 0.0
        self._watching: asyncio.Task[None] | None = None

    # Life

    async def open(self) -> None:
        """Take the store, end what an earlier server left, and start to work."""
        self.settings.data.mkdir(parents=True, exist_ok=True)
        await self.store.open()
        try:
            await repair_rows(self.store)
            await ownership.take_store(self.store, self.segments)
            await ownership.take_location(self.store, self.segments)
            # Before sampling is paused, if it was.
            self.problems = await self.runner.probe()
            await self.policy.restore()
            await self.pacer.restore()
            lost = await self.scheduler.recover()
            orphans = await self._orphans()
            if lost or orphans:
                log.warning("after a crash: %d sessions were lost, %d segments removed", lost, orphans)
            self.scheduler.start()
            self.callbacks.start()
            self.retention.start()
            self._watching = asyncio.create_task(self._watch())
        except BaseException:
            await self.store.close()
            raise
        self.started = time.time()

    async def _orphans(self) -> int:
        """The segments that no row names; a location that is away is looked through another time."""
        try:
            return await self.retention.collect_orphans()
        except OSError as error:
            log.error("the location of the trajectories could not be looked through: %s", error)
            return 0

    def stop(self) -> None:
        """Those who wait for results or events are answered now."""
        self.stopping.set()
        self.signals.results.give()
        self.signals.events.give()

    async def close(self) -> None:
        self.stop()
        await self.scheduler.close(self.settings.stop_seconds)
        for part in (self.callbacks, self.retention):
            await part.close()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self.store.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_CHECK)
            try:
                await self.store.hold()
                self.scheduler.waiting = await queueing.waiting(self.store)
            except StoreError as error:
                self.scheduler.broken = str(error)
                log.critical("%s", error)
                return
            except (SQLAlchemyError, OSError) as error:
                log.debug("the database is away: %s", error)

    # Tasks

    async def submit(self, tasks: Sequence[Task], caller: Caller, *, many: bool) -> list[Accepted]:
        trusted = caller.may()
        written = [
            await admit(task, f"[{index}]" if many else "", runner=self.runner, settings=self.settings, trusted=trusted)
            for index, task in enumerate(tasks)
        ]
        wanted = sum(task.num_samples for task in tasks)
        if wanted > self.settings.queue:
            raise Invalid(f"{wanted} sessions at once are more than the queue holds, {self.settings.queue}")
        if not written:
            return []
        room = self.settings.queue - self.scheduler.waiting
        try:
            answers, waiting = await queueing.accept(self.store, written, room=room, at=time.time())
        except Full as error:
            self.metrics.refused.inc()
            error.retry_after = 5.0
            raise
        self.scheduler.waiting += waiting
        self.pacer.submitted()
        self.metrics.tasks.inc(sum(answer.created for answer in answers))
        self.signals.work.give()
        self.signals.events.give()
        return answers

    async def cancel(self, task_id: str) -> TaskStatus:
        async def write(tx: AsyncConnection) -> Effects | None:
            return await Ender(self.store, tx, time.time()).cancel(task_id)

        effects = await self.store.insist(write, what="cancel")
        if effects is None:
            raise NotFound(f"no task {task_id!r}")
        self.scheduler.apply(effects)
        return await reading.task_status(self.store, task_id)

    # Results

    async def lease(self, wish: Wish, wait: float, gone: asyncio.Event | None = None) -> Results:
        """Waits for the first result, at most so long. Whoever is gone gets nothing: it would be his for a whole lease."""
        if wish.groups_per_update is None:
            return await self._lease(wish, wait, gone)
        if wish.unit is not Unit.GROUP:
            raise Invalid("is declared by consumers of groups: unit=group", field="groups_per_update")
        self.pacer.active = True
        self.pacer.asks(wish.consumer)
        found = None
        try:
            found = await self._lease(wish, wait, gone)
        finally:
            self.pacer.answered(wish.consumer, len(found.results) if found is not None else 0)
        return found

    async def _lease(self, wish: Wish, wait: float, gone: asyncio.Event | None) -> Results:
        clock = asyncio.get_running_loop().time
        until = clock() + min(wait, self.settings.wait_seconds)
        dropped = 0
        while True:
            count = self.signals.results.count
            version = self.policy.now.version
            if gone is not None and gone.is_set():
                return Results(results=[], dropped=dropped, version=version)
            found = await self.delivery.lease(wish, version=version, now=time.time())
            dropped += found.dropped
            unit = wish.unit.value
            self.metrics.dropped.labels(unit).inc(found.dropped)
            for one in found.passed:
                self.pacer.bias.add(wish.consumer, one)
            self.metrics.flagged.labels(unit).inc(found.flagged)
            left = until - clock()
            if found.results or self.stopping.is_set() or (left <= 0 and not found.more):
                self.metrics.delivered.labels(unit).inc(len(found.results))
                results = await flag_damaged(self.store, self.segments, found.results)
                return Results(results=results, dropped=dropped, version=version)
            if not found.more:
                if found.next_expiry is not None:
                    left = min(left, max(0.01, found.next_expiry - time.time()))
                began = clock()
                await self.signals.results.wait(count, left)
                if found.withheld:
                    self.pacer.withheld(wish.consumer, clock() - began)

    async def release(self, consumer: str) -> int:
        """Give back what a consumer holds: it comes again at once."""
        released = await self.delivery.give_back(consumer, now=time.time())
        self.signals.results.give()
        return released

    async def ack(self, consumer: str, result_ids: Sequence[str], unusable: Sequence[str] = ()) -> Acked:
        version = self.policy.now.version
        acked, done = await self.delivery.ack(consumer, result_ids, unusable, version=version, now=time.time())
        self.metrics.acked.inc(len(acked.acked))
        for one in done:
            self.pacer.bias.add(consumer, one)
        if self.pacer.active:
            self.signals.work.give()
            self.signals.results.give()
        return acked

    # For people

    def health(self) -> dict[str, object]:
        """`held`: no session is started, or none of their ends is written, until what `reasons` names works again."""
        problem = self.scheduler.broken
        breakers = self.scheduler.breakers
        away = self.store.outage.reason
        reasons = [*([f"database: {away}"] if away else []), *filter(None, [breakers.holding()])]
        status = "held" if reasons else "degraded" if breakers.degraded() else "ok"
        return {
            "status": "broken" if problem else "stopping" if self.stopping.is_set() else status,
            **({"error": problem} if problem else {}),
            "reasons": [*reasons, *breakers.degraded()],
            "breakers": [one.model_dump(mode="json") for one in self.runner.breakers],
            "waiting": self.scheduler.waiting,
            "active": len(self.scheduler.flights),
            "version": self.policy.now.version,
            "paused": self.policy.now.paused,
            "seconds": round(time.time() - self.started, 1),
        }

    async def figures(self) -> bytes:
        metrics = self.metrics
        metrics.waiting.set(self.scheduler.waiting)
        metrics.active.set(len(self.scheduler.flights))
        metrics.version.set(self.policy.now.version)
        metrics.paused.set(self.policy.now.paused)
        metrics.held.set(bool(self.scheduler.held))
        metrics.broken.set(bool(self.scheduler.broken))
        metrics.breakers(self.runner.breakers)
        metrics.pacing(self.pacer)
        metrics.disk_free.set((await asyncio.to_thread(shutil.disk_usage, self.settings.data)).free)
        try:
            metrics.consumers(await reading.consumers(self.store))
        except (SQLAlchemyError, OSError) as error:
            # The other figures are wanted most while the database is away.
            log.debug("the figures of consumers: %s", error)
        metrics.database.set(not self.store.outage.reason)
        return metrics.text()


async def open_store(settings: ServerSettings) -> Store:
    """The store of a service that need not run, to look after its keys."""
    await asyncio.to_thread(Path.mkdir, settings.data, parents=True, exist_ok=True)
    store = Store(database_url(settings.database, settings.data))
    await store.open(serving=False)
    return store
