"""Two listeners in one event loop: provider routes for harnesses, control routes for trainers and the node.

A sandbox without a network provides a third kind: a socket that listens inside the sandbox, on which the provider routes of
one session are served and nothing else (`SessionListener`).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from towline.common.sockets import listen, url_of
from towline.dialects.registry import all_dialects
from towline.gateway.app import ProviderApp
from towline.gateway.connections import BoundedProtocol, bounded_protocol, raise_descriptor_limit
from towline.gateway.control import ControlApi
from towline.gateway.gateway import Gateway

_CLOSING_SECONDS = 1.0
"""How long requests whose connection was aborted may take to notice."""


class _Server(uvicorn.Server):
    """Leaves signal handling to the owner of the event loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(slots=True)
class SessionListener:
    """Serves one session on its own listener."""

    server: asyncio.Server
    state: ServerState

    async def close(self) -> None:
        """Stop accepting, and abort the remaining connections: their clients are gone."""
        self.server.close()
        for connection in list(self.state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()
        # Most requests end by themselves as soon as they notice.
        if self.state.tasks:
            await asyncio.wait(list(self.state.tasks), timeout=_CLOSING_SECONDS)
        for task in list(self.state.tasks):
            task.cancel()
        await asyncio.gather(*self.state.tasks, return_exceptions=True)


@dataclass(slots=True)
class RunningGateway:
    """The listeners of a running gateway."""

    base_url: str
    control_url: str
    control_key: str
    provider: ProviderApp

    async def serve_session(self, listener: socket.socket, session_id: str) -> SessionListener:
        """Serve the provider routes of one session on a duplicate of `listener`, whose owner may close it at any time."""
        app = copy.copy(self.provider)
        app.only = session_id
        budgets, usage = self.provider.gateway.settings.budgets, self.provider.gateway.get(session_id).usage
        protocol = bounded_protocol(budgets, budgets.connections, usage.count_refusal)
        config = _config(app, 0, protocol, budgets.idle_seconds)
        config.load()
        state = ServerState()
        loop = asyncio.get_running_loop()
        copied = listener.dup()
        try:
            server = await loop.create_server(lambda: protocol(config, state, {}), sock=copied)
        except BaseException:
            copied.close()
            raise
        return SessionListener(server, state)


def _config(app: ASGIApp, drain_seconds: float, protocol: type[BoundedProtocol], idle_seconds: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="none",
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        # A harness may be idle for minutes between two calls on one connection.
        timeout_keep_alive=math.ceil(idle_seconds),
        # Longer than the gateway's drain time, so that waiting clients still get an error in their provider's format.
        timeout_graceful_shutdown=math.ceil(drain_seconds) + 5,
    )


@contextlib.asynccontextmanager
async def serve_gateway(gateway: Gateway, control_key: str) -> AsyncIterator[RunningGateway]:
    """Open the gateway and serve both listeners until the block ends."""
    settings = gateway.settings
    provider = listen(settings.host, settings.port)
    with contextlib.closing(provider):
        control = listen(settings.control_host, settings.control_port)
        with contextlib.closing(control):
            base_url = (settings.public_url or url_of(provider, settings.host)).rstrip("/")
            app = ProviderApp(gateway, all_dialects())
            control_app = ControlApi(gateway, base_url).app(control_key)
            raise_descriptor_limit()
            protocol = bounded_protocol(settings.budgets, settings.connections, gateway.count_refusal)
            apps = [
                (_Server(_config(each, settings.drain_seconds, protocol, settings.budgets.idle_seconds)), listener)
                for each, listener in ((app, provider), (control_app, control))
            ]
            await gateway.open()
            tasks = [asyncio.create_task(server.serve(sockets=[listener])) for server, listener in apps]
            try:
                yield RunningGateway(base_url, url_of(control, settings.control_host), control_key, app)
            finally:
                for server, _ in apps:
                    server.should_exit = True
                try:
                    await asyncio.wait(tasks, timeout=settings.drain_seconds)
                    await gateway.stop()
                    await asyncio.gather(*tasks)
                finally:
                    await gateway.close()
