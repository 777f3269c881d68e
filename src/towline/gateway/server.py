"""Two listeners in one loop: provider routes for harnesses, control routes for whoever runs them.

A sandbox without a network brings a third kind, a door: a socket that listens inside the sandbox, on which the provider
routes of one session are served and nothing else.
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
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from towline.dialects.registry import all_dialects
from towline.errors import ConfigError
from towline.gateway.app import ProviderApp
from towline.gateway.control import Control
from towline.gateway.gateway import Gateway


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs the loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(slots=True)
class Door:
    """Serves one session on a listener of its own."""

    server: asyncio.Server
    state: ServerState

    async def close(self) -> None:
        """Accept no more, and cut the connections that are left: whoever was behind them is gone."""
        self.server.close()
        for connection in list(self.state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()
        for task in list(self.state.tasks):
            task.cancel()
        await asyncio.gather(*self.state.tasks, return_exceptions=True)


@dataclass(slots=True)
class Running:
    """Where the listeners are."""

    base_url: str
    control_url: str
    control_key: str
    provider: ProviderApp

    async def admit(self, listener: socket.socket, session_id: str) -> Door:
        """Serve the provider routes of one session on a copy of `listener`, whose owner may close it at any time."""
        app = copy.copy(self.provider)
        app.only = session_id
        config = _config(app, 0)
        config.load()
        state = ServerState()
        loop = asyncio.get_running_loop()
        copied = listener.dup()
        try:
            server = await loop.create_server(lambda: HttpToolsProtocol(config, state, {}), sock=copied)
        except BaseException:
            copied.close()
            raise
        return Door(server, state)


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # By its name, since a loop of plain asyncio sends small answers at once only on sockets that say they are TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.listen(2048)
    return listener


def _url(listener: socket.socket, host: str) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"


def _config(app: ASGIApp, drain_seconds: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="none",
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        # A harness may think for minutes between two calls on one connection.
        timeout_keep_alive=900,
        # Longer than the gateway gives turns in flight: whoever waits is answered in his provider's own shape.
        timeout_graceful_shutdown=math.ceil(drain_seconds) + 5,
    )


@contextlib.asynccontextmanager
async def serving(gateway: Gateway, control_key: str) -> AsyncIterator[Running]:
    """Open the gateway and serve both listeners until the block ends."""
    settings = gateway.settings
    provider = listen(settings.host, settings.port)
    with contextlib.closing(provider):
        control = listen(settings.control_host, settings.control_port)
        with contextlib.closing(control):
            base_url = (settings.public_url or _url(provider, settings.host)).rstrip("/")
            app = ProviderApp(gateway, all_dialects())
            control_app = Control(gateway, base_url).app(control_key)
            apps = [
                (_Server(_config(app, settings.drain_seconds)), provider),
                (_Server(_config(control_app, settings.drain_seconds)), control),
            ]
            await gateway.open()
            tasks = [asyncio.create_task(server.serve(sockets=[listener])) for server, listener in apps]
            try:
                yield Running(base_url, _url(control, settings.control_host), control_key, app)
            finally:
                for server, _ in apps:
                    server.should_exit = True
                try:
                    await asyncio.wait(tasks, timeout=settings.drain_seconds)
                    await gateway.stop()
                    await asyncio.gather(*tasks)
                finally:
                    await gateway.close()
