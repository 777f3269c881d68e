"""The service as one object: wires its parts, starts and stops them in order; submit, cancel, lease, acknowledge."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from towline.cluster.runner import NodeNotFound, Runner
from towline.cluster.segments import Segments
from towline.common.background import BackgroundTasks
from towline.common.private_files import secure_folder
from towline.common.untrusted.loop_stalls import LoopStalls, merged
from towline.config import ServerSettings
from towline.config.tenants import TenantLimits
from towline.errors import StoreError
from towline.schema import DEFAULT_TENANT, Accepted, Acked, Results, SlowSession, Task, TaskStatus, Unit
from towline.schema.trust import RootRegistry
from towline.server.api.auth import Caller, KeyStore
from towline.server.delivery.callbacks import Callbacks
from towline.server.delivery.leases import LeaseManager, LeaseRequest
from towline.server.delivery.trajectories import flag_damaged
from towline.server.errors import InvalidInput, QueueFull, ResourceNotFound
from towline.server.events import Events, Signals
from towline.server.metrics import ServerMetrics
from towline.server.pacing.pacer import Pacer
from towline.server.policy import PolicyController
from towline.server.quotas import RequestQuota
from towline.server.scheduling import queue
from towline.server.scheduling.end_sessions import Effects, EndSessions
from towline.server.scheduling.grace import GracePeriods
from towline.server.scheduling.queue import admit
from towline.server.scheduling.scheduler import SessionScheduler
from towline.server.scheduling.stragglers import slowest_sessions
from towline.server.scheduling.task_trust import is_trusted
from towline.server.store import names, ownership, queries
from towline.server.store.database import Outage, Store, database_url
from towline.server.store.repair import repair_rows
from towline.server.store.retention import Retention
from towline.server.tenants import Tenants

log = logging.getLogger("towline.server")
_REFRESH_SECONDS = 3.0
"""Between two reads of what the operator has set for tenants."""
_CHECK_SECONDS = 30.0
"""Between two checks that the store is still this server's, and two counts of waiting sessions."""


class Service:
    """The rollout service without HTTP."""

    def __init__(
        self,
        settings: ServerSettings,
        runner: Runner,
        *,
        store: Store | None = None,
        registry: RootRegistry | None = None,
    ):
        """`store`: the database, if it is not the one that the settings name. `registry`: the roots that tasks may name."""
        self.settings = settings
        self.registry = registry or RootRegistry()
        self.runner = runner
        self.stopping = asyncio.Event()
        self.signals = Signals()
        self.metrics = ServerMetrics()
        self.stalls = LoopStalls()
        self.store = store or Store(database_url(settings.database, settings.data))
        self.segments = Segments(settings.segments or settings.data / "segments")
        self.keys = KeyStore(self.store, needed=settings.auth)
        self.leases = LeaseManager(self.store)
        # A new version can make results available to paced consumers.
        self.policy = PolicyController(self.store, runner, self.signals.work, self.signals.results)
        self.tenants = Tenants(self.store, settings, settings.queue)
        self.requests = RequestQuota(self.tenants.limits)
        self._submitting: Counter[str] = Counter()
        """Sessions of each tenant that calls under way want to add."""
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
        self.scheduler = SessionScheduler(
            self.store,
            runner,
            self.policy,
            self.pacer,
            self.signals,
            self.metrics,
            quarantine_deaths=settings.quarantine_deaths,
            weight=self.tenants.weight,
        )
        self.grace = GracePeriods(self.store, self.signals.deadlines, self.scheduler.apply)
        runner.watch_sessions(self.scheduler.stages.changed)
        runner.watch_engines(self.metrics.engine_failed)
        runner.watch_room(self.signals.work.notify)
        self.callbacks = Callbacks(
            self.store,
            self.signals.callbacks,
            self.metrics,
            tries=settings.callback_tries,
            hosts=settings.callback_hosts,
        )
        self.problems: list[str] = []
        """What the probe found at the start; the circuit breakers have the current state."""
        self.unreadable = Outage("the trajectory storage")
        self.started = 0.0
        self._background = BackgroundTasks()

    # Start and stop

    async def open(self) -> None:
        """Take over the store, end what an earlier server left running, and start."""
        await asyncio.to_thread(secure_folder, self.settings.data)
        await self.store.open()
        try:
            # Once more: the database may be new.
            await asyncio.to_thread(secure_folder, self.settings.data)
            async with self.store.write() as tx:
                await repair_rows(tx)
            await ownership.take_store(self.store, self.segments)
            await ownership.take_location(self.store, self.segments)
            await self.runner.use_store(self.segments, self.store.epoch)
            # Probe before the policy is restored, which may pause sampling.
            self.problems = await self.runner.probe()
            await self.policy.restore()
            await self.pacer.restore()
            await self.tenants.refresh()
            lost = await self.scheduler.recover()
            # Samples whose deadline passed while no server ran are not started again.
            await self.grace.stop_due()
            orphans = await self._orphans()
            if lost or orphans:
                log.warning(
                    "recovered from a crash: %d sessions were lost, %d orphaned segments removed", lost, orphans
                )
            self.scheduler.start()
            for loop in (self.callbacks.run(), self.retention.run(), self.grace.run(), self._watch(), self._refresh()):
                self._background.start(loop)
        except BaseException:
            await self.store.close()
            raise
        self.started = self.store.clock.now()
        self.stalls.start()

    async def _orphans(self) -> int:
        """Remove segments that no row names; skipped while the location is down."""
        try:
            return await self.retention.collect_orphans()
        except OSError as error:
            log.error("orphaned segments could not be removed: %s", error)
            return 0

    def stop(self) -> None:
        """Answer clients that wait for results or events now."""
        self.stopping.set()
        self.signals.results.notify()
        self.signals.events.notify()

    async def close(self) -> None:
        self.stop()
        self.stalls.close()
        await self.scheduler.close(self.settings.stop_seconds)
        await self._background.close()
        await self.store.close()

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(_REFRESH_SECONDS)
            try:
                await self.tenants.refresh()
            except (SQLAlchemyError, OSError) as error:
                log.debug("the database is down: %s", error)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            try:
                await self.store.check_lock()
                self.scheduler.waiting_of = await queue.count_waiting(self.store)
            except StoreError as error:
                self.scheduler.broken = str(error)
                log.critical("%s", error)
                return
            except (SQLAlchemyError, OSError) as error:
                log.debug("the database is down: %s", error)

    # Tasks

    async def submit(
        self, tasks: Sequence[Task], caller: Caller, tenant: str = DEFAULT_TENANT, *, many: bool
    ) -> list[Accepted]:
        """Store the tasks as those of the tenant, all or none."""
        trusted = is_trusted(caller, self.settings)
        limits = None if caller.admin else self.tenants.limits(tenant)
        await self._check_stored(limits, tenant)
        written = [
            await admit(
                task,
                f"[{index}]" if many else "",
                runner=self.runner,
                settings=self.settings,
                trusted=trusted,
                registry=self.registry,
                tenant=tenant,
                limits=limits,
            )
            for index, task in enumerate(tasks)
        ]
        if not written:
            return []
        wanted = sum(task.num_samples for task in tasks)
        most = queue_limit(self.tenants, tenant)
        if wanted > most:
            raise InvalidInput(f"{wanted} sessions exceed the queue limit of {most}: submit fewer tasks per call")
        # What other calls are adding counts, or many at once would exceed the limit together.
        room = most - self.scheduler.waiting_of[tenant] - self._submitting[tenant]
        self._submitting[tenant] += wanted
        try:
            answers, waiting = await queue.accept(self.store, written, room=room, at=self.store.clock.now())
            self.scheduler.waiting_of[tenant] += waiting
        except QueueFull as error:
            self.metrics.refused.inc()
            error.retry_after = 5.0
            raise
        finally:
            self._submitting[tenant] -= wanted
        self.pacer.submitted()
        self.metrics.tasks.inc(sum(answer.created for answer in answers))
        self.signals.work.notify()
        self.signals.events.notify()
        return answers

    async def _check_stored(self, limits: TenantLimits | None, tenant: str) -> None:
        if limits is not None and limits.stored_bytes is not None:
            stored = await self.tenants.stored_bytes(tenant)
            if stored > limits.stored_bytes:
                raise QueueFull(
                    f"{stored} bytes are stored, and the limit stored_bytes is {limits.stored_bytes}: acknowledge results, "
                    "and wait until they are removed",
                    retry_after=60.0,
                )

    async def cancel(self, tenant: str, task_id: str) -> TaskStatus:
        key = names.qualify(tenant, task_id)

        async def write(tx: AsyncConnection) -> Effects | None:
            return await EndSessions(self.store, tx, self.store.clock.now()).cancel(key)

        effects = await self.store.write_with_retry(write, what="cancel")
        if effects is None:
            raise ResourceNotFound(f"no task {task_id!r}")
        self.scheduler.apply(effects)
        return await queries.task_status(self.store, tenant, task_id)

    async def nodes(self, tenant: str | None = None) -> list[dict[str, Any]]:
        """The nodes; with a tenant, with its own sessions only."""
        owners = self.scheduler.owners

        def shown(session: Mapping[str, Any]) -> bool:
            return names.visible(owners.get(session["session_id"], ""), tenant)

        found = await self.runner.nodes()
        return [
            node | ({"sessions": list(filter(shown, node["sessions"]))} if "sessions" in node else {}) for node in found
        ]

    async def drain(self, name: str, *, drained: bool) -> list[dict[str, Any]]:
        """Stop or resume giving sessions to a node."""
        try:
            self.runner.drain(name, drained)
        except NodeNotFound as error:
            raise ResourceNotFound(str(error)) from error
        self.signals.work.notify()
        return await self.runner.nodes()

    # Results

    async def lease(self, request: LeaseRequest, wait: float, gone: asyncio.Event | None = None) -> Results:
        """Wait at most `wait` seconds for results. Disconnected clients get none: they would stay leased until expiry."""
        if request.groups_per_update is None:
            return await self._lease(request, wait, gone)
        if request.unit is not Unit.GROUP:
            raise InvalidInput("needs unit=group", field="groups_per_update")
        self.pacer.active = True
        self.pacer.call_began(request.key)
        found = None
        try:
            found = await self._lease(request, wait, gone)
        finally:
            self.pacer.call_ended(request.key, len(found.results) if found is not None else 0)
        return found

    async def _lease(self, request: LeaseRequest, wait: float, gone: asyncio.Event | None) -> Results:
        clock = asyncio.get_running_loop().time
        until = clock() + min(wait, self.settings.wait_seconds)
        dropped = 0
        while True:
            count = self.signals.results.count
            version = self.policy.now.version
            if gone is not None and gone.is_set():
                return Results(results=[], dropped=dropped, version=version)
            found = await self.leases.lease(request, version=version, now=self.store.clock.now())
            dropped += found.dropped
            unit = request.unit.value
            self.metrics.dropped.labels(unit).inc(found.dropped)
            for one in found.passed:
                self.pacer.bias.add(request.key, one)
            self.metrics.flagged.labels(unit).inc(found.flagged)
            left = until - clock()
            if found.results or self.stopping.is_set() or (left <= 0 and not found.more):
                self.metrics.delivered.labels(unit).inc(len(found.results))
                results = await flag_damaged(self.store, self.segments, found.results)
                return Results(results=results, dropped=dropped, version=version)
            if not found.more:
                if found.next_expiry is not None:
                    left = min(left, max(0.01, found.next_expiry - self.store.clock.now()))
                began = clock()
                await self.signals.results.wait(count, left)
                if found.withheld:
                    self.pacer.add_withheld(request.key, clock() - began)

    async def release(self, consumer: str) -> int:
        """End all leases of a consumer, by its stored name: its results are available again at once."""
        released = await self.leases.release_all(consumer, now=self.store.clock.now())
        self.signals.results.notify()
        return released

    async def ack(self, consumer: str, result_ids: Sequence[str], unusable: Sequence[str] = ()) -> Acked:
        version = self.policy.now.version
        acked, done = await self.leases.ack(consumer, result_ids, unusable, version=version, now=self.store.clock.now())
        self.metrics.acked.inc(len(acked.acked))
        for one in done:
            self.pacer.bias.add(consumer, one)
        if self.pacer.active:
            self.signals.work.notify()
            self.signals.results.notify()
        return acked

    # Status

    def health(self) -> dict[str, object]:
        """Status for monitors. `held`: no session starts, or no end is written, until what `reasons` names works again."""
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
            "active": len(self.scheduler.active),
            "version": self.policy.now.version,
            "paused": self.policy.now.paused,
            "seconds": round(self.store.clock.now() - self.started, 1),
        }

    async def slowest(self, limit: int, tenant: str | None = None) -> list[SlowSession]:
        """The slowest of the sessions of a tenant, or of all, that are being worked on, stragglers first."""
        active = [one for one in self.scheduler.stages.reached.values() if names.visible(one.tenant, tenant)]
        return await slowest_sessions(self.store, active, self.metrics.durations, await self.runner.nodes(), limit)

    async def metrics_text(self, tenant: str | None = None) -> bytes:
        """The metrics of the service; those of consumers only for one tenant, or for all."""
        nodes, engines = await self.runner.nodes(), await self.runner.metrics()
        disk = await asyncio.to_thread(shutil.disk_usage, self.settings.data)
        lags = []
        try:
            lags = await queries.consumer_lags(self.store, tenant)
        except (SQLAlchemyError, OSError) as error:
            # The other metrics matter most while the database is down.
            log.debug("consumer metrics: %s", error)
        # From here on nothing waits: another call for another tenant must not see these values.
        metrics = self.metrics
        metrics.waiting.set(self.scheduler.waiting)
        metrics.active.set(len(self.scheduler.active))
        metrics.version.set(self.policy.now.version)
        metrics.paused.set(self.policy.now.paused)
        metrics.held.set(bool(self.scheduler.held))
        metrics.broken.set(bool(self.scheduler.broken))
        metrics.breakers(self.runner.breakers)
        metrics.pacing(self.pacer, tenant)
        metrics.tenants(self.scheduler.waiting_of, self.scheduler.share, tenant)
        metrics.consumers(lags)
        metrics.nodes(nodes)
        metrics.disk_free.set(disk.free)
        metrics.database.set(not self.store.outage.reason)
        return metrics.text(merged([*self.stalls.collect("server"), *engines]))


def queue_limit(tenants: Tenants, tenant: str) -> int:
    """Waiting sessions that a tenant may have. Each has a queue of its own: one that is full is nobody else's."""
    most = tenants.limits(tenant).queued
    return 2**53 if most is None else most


async def open_store(settings: ServerSettings) -> Store:
    """The store of a service that need not be running, to manage its keys."""
    await asyncio.to_thread(secure_folder, settings.data)
    store = Store(database_url(settings.database, settings.data))
    await store.open(serving=False)
    await asyncio.to_thread(secure_folder, settings.data)
    return store
