"""`Fleet`: the runner of the server: sessions on node hosts, as many as there are.

Where hosts come from is a `HostProvider`'s concern (child processes, Ray); the fleet connects to them, places sessions on
them, and keeps one policy over all of them. A host that connects later, or again, gets the current policy before its first
session. A node whose engine or sandbox is down takes no new sessions; the queue is held only if no node takes any.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import Metric

from towline.cluster import fleet_status, wire
from towline.cluster.fleet_policy import FleetPolicy
from towline.cluster.fleet_status import NODES, FleetBreakers
from towline.cluster.host_provider import HostProvider
from towline.cluster.placement import NodeOffer, Placement
from towline.cluster.prefetch import Prefetch
from towline.cluster.remote_node import HostAddress, NodeReports, RemoteNode
from towline.cluster.runner import NodeLost, NodeNotFound, SessionLog, SessionOutcome, Stored, StoreRequest
from towline.cluster.segments import Segments
from towline.common.background import BackgroundTasks
from towline.common.mappings import BoundedDict
from towline.engines.base import PauseMode
from towline.errors import ConfigError
from towline.schema import POLICY, BreakerStatus, EndReason, FailureReason, SandboxKind, Session, SessionState, Task

log = logging.getLogger("towline.cluster")
_CHECK_SECONDS = 5.0
"""How long the check of a task waits for a node; without one the task is accepted unchecked."""
_START_SECONDS = 30.0
"""How long the start waits for hosts that do not answer, if one does."""
_DEMAND_SECONDS = 5.0
"""Least time between two reports of the demand."""
_AFFINITIES = 10_000
"""Tasks whose latest node is remembered."""
_STARTED = (SessionState.READY, SessionState.RUNNING)


class Fleet:
    """Runs sessions on node hosts."""

    name = "fleet"

    def __init__(
        self,
        provider: HostProvider,
        *,
        sandbox: SandboxKind,
        shared_engine: bool,
        lost_seconds: float = 60.0,
    ):
        """`sandbox`: the default of the nodes. `shared_engine`: whether all nodes use the same engine replicas."""
        self._provider = provider
        self._sandbox = sandbox
        self._lost_seconds = lost_seconds
        self.remote: dict[str, RemoteNode] = {}
        self.placement = Placement()
        self._policy = FleetPolicy(self._usable_nodes, shared=shared_engine)
        self._homes: BoundedDict[str, str] = BoundedDict(_AFFINITIES)
        """The latest node of each task: its environment is prepared there."""
        self._prefetch = Prefetch()
        self._drained: set[str] = set()
        self._nodes_of: dict[str, RemoteNode] = {}
        """The node of each session that was submitted, adopted or recovered, until it is discarded."""
        self._unplaced: dict[str, EndReason | None] = {}
        """Sessions that wait for a node, with the reason if they were cancelled meanwhile."""
        self._segments: Segments | None = None
        self._epoch = 0
        self._reported_demand = -_DEMAND_SECONDS
        self._recovered = False
        self._background = BackgroundTasks()
        self._connected = asyncio.Event()
        self._freed = asyncio.Event()
        """Set when a node may have room again."""
        self._breakers = FleetBreakers()
        self._session_changed: Callable[[Session], None] = lambda session: None
        self._engine_failed: Callable[[str, FailureReason], None] = lambda engine, reason: None
        self._room_changed: Callable[[], None] = lambda: None

    # Hosts

    async def use_store(self, segments: Segments, epoch: int) -> None:
        """Start the hosts; returns when they are connected, or one of them after a while.

        Raises `ConfigError` if every host refuses this server.
        """
        self._segments, self._epoch = segments, epoch
        await self._provider.start(self.host_up, self.host_down)
        try:
            async with asyncio.timeout(_START_SECONDS):
                # What runs on a host that connects later cannot be adopted.
                await self._until(lambda: all(one.connected or one.refused for one in self.remote.values()))
        except TimeoutError:
            late = [node.name for node in self.remote.values() if not node.connected]
            log.warning("the server starts without nodes that do not answer: %s", ", ".join(late))
        await self._until(lambda: bool(self._usable_nodes()) or self._refusal() != "")
        if not self._usable_nodes():
            raise ConfigError(self._refusal())

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._freed.clear()
            await self._freed.wait()

    def _refusal(self) -> str:
        """Why all hosts refuse this server; empty if one does not."""
        reasons = [one.refused for one in self.remote.values()]
        return reasons[0] if reasons and all(reasons) else ""

    def host_up(self, address: HostAddress) -> None:
        assert self._segments is not None
        earlier = self.remote.get(address.name)
        if earlier is not None:
            if earlier.address == address:
                return
            self.host_down(address.name, f"the process of node {address.name} was replaced")
        reports = NodeReports(
            self._up, self._down_again, self._changed, self._reported, lambda *failed: self._engine_failed(*failed)
        )
        node = RemoteNode(
            address,
            self._segments,
            self._epoch,
            reports,
            lost_seconds=self._lost_seconds,
            adopting=not self._recovered,
        )
        self.remote[address.name] = node
        node.start()

    def host_down(self, name: str, reason: str) -> None:
        """The process of a host is gone, and every session with it."""
        node = self.remote.pop(name, None)
        if node is None:
            return
        self.placement.remove(name)
        node.lose(reason)
        self._background.start(node.close())
        self._changed(node)

    def _usable_nodes(self) -> list[RemoteNode]:
        return [node for node in self.remote.values() if node.connected]

    async def _up(self, node: RemoteNode) -> None:
        """Prepare a node that has connected: first its leftovers, then the policy, then sessions."""
        if self._recovered:
            if not node.hello["recovered"]:
                await node.call_now("recover", lost=[])
            await node.keep(node.call_now)
            await self._policy.apply(node)
            await self._prefetch.prepare(node)
        offer = NodeOffer(node.name, node.hello["capacity"], node.hello["starting"], node.address.labels)
        self.placement.update(offer)
        self.placement.release_hold(node.name)
        if node.name in self._drained:
            self.placement.drain(node.name)
        self._connected.set()

    def _down_again(self, node: RemoteNode) -> None:
        self.placement.hold(node.name, "disconnected")
        self._changed(node)

    def _changed(self, node: RemoteNode) -> None:
        if node.name in self.remote:
            if node.lost:
                self.placement.remove(node.name)
                self._provider.replace(node.name, node.lost)
            elif node.connected:
                self._hold(
                    node, "breaker", any(one.open and self.needs(one.component) for one in node.breakers.values())
                )
                self._hold(node, "trouble", bool(node.trouble))
                if node.trouble and not node.sessions:
                    self._provider.replace(node.name, node.trouble)
        self._update_breakers()
        self._freed.set()
        self._room_changed()

    def _hold(self, node: RemoteNode, reason: str, held: bool) -> None:
        change = self.placement.hold if held else self.placement.release_hold
        change(node.name, reason)

    def _reported(self, node: RemoteNode, session: Session) -> None:
        if session.state in _STARTED:
            self.placement.started(session.session_id)
            self._room_changed()
        self._session_changed(session)

    def drain(self, name: str, drained: bool) -> None:
        """Give a node no new sessions; those that run there end as usual."""
        if name not in self.remote:
            raise NodeNotFound(f"no node {name!r}; nodes: {', '.join(sorted(self.remote)) or 'none'}")
        (self._drained.add if drained else self._drained.discard)(name)
        (self.placement.drain if drained else self.placement.undrain)(name)
        self._room_changed()

    async def close(self) -> None:
        await asyncio.gather(*(node.close() for node in self.remote.values()))
        await self._provider.close()
        await self._background.finish()

    def report_demand(self, waiting: int) -> None:
        """Tell the provider about sessions for which there is no room; at most once in a few seconds."""
        now = time.monotonic()
        if now - self._reported_demand >= _DEMAND_SECONDS:
            self._reported_demand = now
            self._provider.report_demand(waiting if self.room == 0 else 0)

    # Room

    @property
    def capacity(self) -> int:
        return self.placement.capacity

    @property
    def room(self) -> int:
        return self.placement.room

    @property
    def trouble(self) -> str:
        """Always empty: a node in trouble is replaced."""
        return ""

    def watch_room(self, changed: Callable[[], None]) -> None:
        self._room_changed = changed

    def watch_sessions(self, changed: Callable[[Session], None]) -> None:
        self._session_changed = changed

    def watch_engines(self, failed: Callable[[str, FailureReason], None]) -> None:
        self._engine_failed = failed

    # Circuit breakers

    @property
    def breakers(self) -> Sequence[BreakerStatus]:
        """Per component over all nodes: open if no node can use it."""
        return self._breakers.all

    def needs(self, component: str) -> bool:
        return component in (NODES, f"engine:{POLICY}", f"sandbox:{self._sandbox.value}")

    def watch_breakers(self, changed: Callable[[BreakerStatus], None]) -> None:
        self._breakers.on_change = changed

    def _update_breakers(self) -> None:
        nodes = self._usable_nodes()
        if self._connected.is_set():
            self._breakers.set_down(not nodes)
        self._breakers.update(nodes)

    async def probe(self) -> list[str]:
        return await fleet_status.probe(self._usable_nodes())

    # Tasks

    async def check(self, task: Task) -> None:
        nodes = self._usable_nodes()
        if not nodes:
            return
        try:
            async with asyncio.timeout(_CHECK_SECONDS):
                await nodes[0].call("check", task=task)
        except (TimeoutError, NodeLost):
            log.warning("task %s was accepted unchecked: no node answered", task.task_id)

    @property
    def default_sandbox(self) -> SandboxKind:
        return self._sandbox

    async def prefetch(self, tasks: Sequence[Task], seconds: float) -> list[str]:
        """Nothing to do now: every node that joins prepares the tasks whose sessions run."""
        return []

    def forget(self, task_id: str) -> None:
        self._homes.pop(task_id, None)
        self._prefetch.forget(task_id)
        for node in self.remote.values():
            node.forget_task(task_id)

    # Sessions

    def submit(self, task: Task, session: Session) -> Awaitable[SessionOutcome]:
        name = self.placement.place(session.session_id, prefer=self._homes.get(task.task_id, ""))
        if name is None:
            return self._submit_later(task, session)
        return self._submit_to(self.remote[name], task, session)

    def _submit_to(self, node: RemoteNode, task: Task, session: Session) -> Awaitable[SessionOutcome]:
        self._homes[task.task_id] = node.name
        self._prefetch.add(task)
        session = session.model_copy(update={"node": node.name})
        return self._outcome(node, session.session_id, node.submit(task, session))

    async def _submit_later(self, task: Task, session: Session) -> SessionOutcome:
        """A node went away between the count of the room and this call."""
        session_id = session.session_id
        self._unplaced[session_id] = None
        try:
            while (name := self.placement.place(session_id)) is None:
                self._freed.clear()
                await self._freed.wait()
        finally:
            cancelled = self._unplaced.pop(session_id)
        running = self._submit_to(self.remote[name], task, session)
        if cancelled is not None:
            self.cancel(session_id, cancelled)
        return await running

    def _outcome(
        self, node: RemoteNode, session_id: str, running: asyncio.Future[SessionOutcome]
    ) -> Awaitable[SessionOutcome]:
        self._nodes_of[session_id] = node
        return asyncio.ensure_future(self._wait(node, session_id, running))

    async def _wait(self, node: RemoteNode, session_id: str, running: asyncio.Future[SessionOutcome]) -> SessionOutcome:
        try:
            return await running
        except asyncio.CancelledError:
            node.cancel(session_id)
            raise
        except BaseException:
            self._nodes_of.pop(session_id, None)
            raise
        finally:
            self.placement.ended(session_id)
            self._freed.set()

    def cancel(self, session_id: str, reason: EndReason = EndReason.CANCELLED) -> None:
        node = self._nodes_of.get(session_id)
        if node is not None:
            node.cancel(session_id, reason)
        elif session_id in self._unplaced:
            self._unplaced[session_id] = self._unplaced[session_id] or reason

    async def adopt(self, session_ids: Collection[str]) -> Mapping[str, Awaitable[SessionOutcome]]:
        found: dict[str, Awaitable[SessionOutcome]] = {}
        for node in self._usable_nodes():
            for session_id in {*node.hello["running"], *node.hello["ended"]} & set(session_ids):
                self.placement.book(session_id, node.name)
                found[session_id] = self._outcome(node, session_id, node.adopt(session_id))
        return found

    async def recover(self, lost: Collection[str]) -> AsyncIterator[SessionOutcome]:
        self._recovered = True
        for node in self._usable_nodes():
            try:
                await node.keep(node.call)
                recovered = await node.call("recover", lost=sorted(lost))
            except NodeLost as error:
                # What it had of the lost sessions is lost with it; they are retried all the same.
                log.error("node %s was lost during the recovery: %s", node.name, error)
                continue
            for fields in recovered:
                outcome = wire.load_outcome(fields)
                self._nodes_of[outcome.session.session_id] = node
                yield outcome

    # Results

    async def store(self, requests: Sequence[StoreRequest]) -> list[Stored]:
        by_node: dict[RemoteNode | None, list[StoreRequest]] = {}
        for one in requests:
            by_node.setdefault(self._nodes_of.get(one.session_id), []).append(one)
        found = await asyncio.gather(*(self._store_on(node, some) for node, some in by_node.items()))
        stored = {
            one.session_id: piece
            for some, pieces in zip(by_node.values(), found, strict=True)
            for one, piece in zip(some, pieces, strict=True)
        }
        return [stored[one.session_id] for one in requests]

    async def _store_on(self, node: RemoteNode | None, requests: list[StoreRequest]) -> list[Stored]:
        try:
            if node is None:
                raise NodeLost("its node died before the trajectory was stored")
            answer = await node.call("store", requests=[wire.dump_request(one) for one in requests])
        except NodeLost as error:
            # These sessions had ended: they are not what killed the node.
            return [NodeLost(str(error), sessions=0) for _ in requests]
        return [wire.load_stored(one) for one in answer]

    async def discard(self, session_id: str) -> None:
        node = self._nodes_of.pop(session_id, None)
        if node is not None:
            node.forget_session(session_id)
            with contextlib.suppress(NodeLost):
                await node.call("discard", session_id=session_id)

    async def erase(self, session_ids: Collection[str]) -> None:
        if session_ids:
            for node in self._usable_nodes():
                with contextlib.suppress(NodeLost):
                    await node.call("erase", session_ids=sorted(session_ids))

    async def read_log(self, session_id: str, name: str, most: int) -> SessionLog:
        return await fleet_status.read_log(self._usable_nodes(), session_id, name, most)

    # Status and policy

    @property
    def version(self) -> int:
        return self._policy.version

    def facts(self) -> dict[str, Any]:
        """The model and engine of the nodes, for display."""
        nodes = self._usable_nodes()
        return nodes[0].hello if nodes else {}

    async def nodes(self) -> list[dict[str, Any]]:
        nodes = [node for _, node in sorted(self.remote.items())]
        return await fleet_status.statuses(nodes, self.placement)

    async def metrics(self) -> Iterable[Metric]:
        return await fleet_status.metrics(self._usable_nodes())

    async def pause(self, mode: PauseMode, deadline: float | None) -> None:
        await self._policy.pause(mode, deadline)

    async def resume(self, version: int | None) -> None:
        await self._policy.resume(version)

    async def announce(self, version: int | None) -> int:
        return await self._policy.announce(version)

    async def update_weights(self, folder: Path, version: int) -> None:
        await self._policy.update_weights(folder, version)
