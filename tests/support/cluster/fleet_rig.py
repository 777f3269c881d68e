"""A server with a fleet of node hosts in this process: real WebSockets and placement, fake nodes behind them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from support.server.server_rig import Caller, admin_key
from towline.benchmarks.fake_runner import FakeRunner
from towline.cluster.fleet import Fleet
from towline.cluster.node_host import NodeHost
from towline.cluster.remote_node import HostAddress
from towline.config import ServerSettings
from towline.schema import SandboxKind
from towline.server.api.app import serving
from towline.server.service import Service


@dataclass
class FakeHost:
    """One node host with a fake node."""

    name: str
    runner: FakeRunner
    host: NodeHost
    site: web.AppRunner
    port: int

    @property
    def address(self) -> HostAddress:
        return HostAddress(self.name, f"http://127.0.0.1:{self.port}", "secret")

    @classmethod
    async def start(cls, name: str, capacity: int, port: int = 0) -> FakeHost:
        runner = FakeRunner(capacity)
        runner.name = name
        host = NodeHost(runner, "secret", {"model": "m", "engine": "fake", "capture": "exact"})
        site = web.AppRunner(host.application(), access_log=None, shutdown_timeout=0.1)
        await site.setup()
        listening = web.TCPSite(site, "127.0.0.1", port)
        await listening.start()
        host.start()
        return cls(name, runner, host, site, site.addresses[0][1])

    async def close(self) -> None:
        await self.host.close()
        await self.site.cleanup()

    async def disconnect(self) -> None:
        """Close the listener and the connection; the node continues."""
        await self.site.cleanup()

    async def listen_again(self) -> None:
        self.site = web.AppRunner(self.host.application(), access_log=None, shutdown_timeout=0.1)
        await self.site.setup()
        await web.TCPSite(self.site, "127.0.0.1", self.port).start()


@dataclass
class FakeProvider:
    """Hosts that a test starts and ends."""

    hosts: dict[str, FakeHost]
    replaced: list[str] = field(default_factory=list)
    demand: list[int] = field(default_factory=list)
    up: Callable[[HostAddress], None] = lambda address: None
    down: Callable[[str, str], None] = lambda name, reason: None

    async def start(self, up: Callable[[HostAddress], None], down: Callable[[str, str], None]) -> None:
        self.up, self.down = up, down
        for host in self.hosts.values():
            up(host.address)

    def replace(self, name: str, reason: str) -> None:
        self.replaced.append(name)

    def report_demand(self, waiting: int) -> None:
        self.demand.append(waiting)

    async def add(self, name: str, capacity: int) -> FakeHost:
        self.hosts[name] = host = await FakeHost.start(name, capacity)
        self.up(host.address)
        return host

    async def kill(self, name: str) -> None:
        """As if the process had died."""
        host = self.hosts.pop(name)
        await host.close()
        self.down(name, f"node host {name} was killed by SIGKILL")

    async def close(self) -> None:
        return None

    async def close_hosts(self) -> None:
        for host in self.hosts.values():
            await host.close()


@dataclass
class FleetRig:
    service: Service
    fleet: Fleet
    provider: FakeProvider
    caller: Caller


@contextlib.asynccontextmanager
async def fleet_rig(
    data: Path,
    database: str | None = None,
    *,
    nodes: int = 2,
    capacity: int = 4,
    shared_engine: bool = False,
    lost_seconds: float = 60.0,
    provider: FakeProvider | None = None,
    **settings: Any,
) -> AsyncIterator[FleetRig]:
    """A server over hosts `a`, `b`, …; with a provider, over those that it has, which the caller closes."""
    names = [chr(ord("a") + number) for number in range(nodes)]
    mine = provider is None
    provider = provider or FakeProvider({name: await FakeHost.start(name, capacity) for name in names})
    fleet = Fleet(provider, sandbox=SandboxKind.BUBBLEWRAP, shared_engine=shared_engine, lost_seconds=lost_seconds)
    values = {"port": 0, "data": data, "database": database, "stop_seconds": 0, **settings}
    try:
        async with (
            serving(ServerSettings.model_validate(values), fleet) as running,
            aiohttp.ClientSession(running.url, timeout=aiohttp.ClientTimeout(total=60)) as http,
        ):
            yield FleetRig(running.service, fleet, provider, Caller(http, admin_key(data)))
    finally:
        if mine:
            await provider.close_hosts()
