"""Two listeners in one loop: provider routes for harnesses, control routes for whoever runs them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp

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
class Running:
    """Where the listeners are."""

    base_url: str
    control_url: str
    control_key: str


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
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


def _serve(app: ASGIApp, drain_seconds: float) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            loop="none",
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            # A harness may think for minutes between two calls on one connection.
            timeout_keep_alive=900,
            # Longer than the gateway gives turns in flight: whoever waits is answered in his provider's own shape.
            timeout_graceful_shutdown=math.ceil(drain_seconds) + 5,
        )
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
            apps = [
                (_serve(ProviderApp(gateway, all_dialects()), settings.drain_seconds), provider),
                (_serve(Control(gateway, base_url).app(control_key), settings.drain_seconds), control),
            ]
            await gateway.open()
            tasks = [asyncio.create_task(server.serve(sockets=[listener])) for server, listener in apps]
            try:
                yield Running(base_url, _url(control, settings.control_host), control_key)
            finally:
                for server, _ in apps:
                    server.should_exit = True
                try:
                    await asyncio.wait(tasks, timeout=settings.drain_seconds)
                    await gateway.stop()
                    await asyncio.gather(*tasks)
                finally:
                    await gateway.close()
