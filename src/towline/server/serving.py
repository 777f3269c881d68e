"""The service on a socket, for as long as a block lasts."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import uvicorn

from towline.config import ServerSettings
from towline.errors import ConfigError
from towline.server.app import make_app
from towline.server.auth import loopback
from towline.server.runner import Runner
from towline.server.service import Service


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs the loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(slots=True)
class Serving:
    url: str
    service: Service


@contextlib.asynccontextmanager
async def serving(settings: ServerSettings, runner: Runner) -> AsyncIterator[Serving]:
    """Serve until the block ends; then let sessions end, keep what there is of the others, and close the runner."""
    service = Service(settings, runner)
    try:
        await service.open()
        try:
            if not loopback(settings.host) and not await service.keys.exist():
                raise ConfigError(
                    f"{settings.host} can be reached from elsewhere: make a key first (`towline serve keys create "
                    "--role admin`), or listen on 127.0.0.1"
                )
            async with _listening(settings, service) as url:
                yield Serving(url, service)
        finally:
            await service.close()
    finally:
        await runner.close()


@contextlib.asynccontextmanager
async def _listening(settings: ServerSettings, service: Service) -> AsyncIterator[str]:
    listener = _listen(settings.host, settings.port)
    config = uvicorn.Config(
        make_app(service),
        loop="none",
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        # Longer than the pauses of a trainer between two calls on one connection.
        timeout_keep_alive=300,
        timeout_graceful_shutdown=5,
    )
    server = _Server(config)
    with contextlib.closing(listener):
        running = asyncio.create_task(server.serve(sockets=[listener]))
        shown = f"[{settings.host}]" if ":" in settings.host else settings.host
        try:
            yield f"http://{shown}:{listener.getsockname()[1]}"
        finally:
            service.stop()
            server.should_exit = True
            await running


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With its protocol named, asyncio sends small answers at once rather than wait for the other side's acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.listen(2048)
    return listener
