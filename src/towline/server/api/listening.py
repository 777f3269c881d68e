"""The socket of the service: an ASGI application served over HTTP or HTTPS, with limits, for the duration of a block."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from towline.common.sockets import listen, url_of
from towline.config import ServerSettings
from towline.errors import ConfigError
from towline.server.api.connections import ConnectionTable
from towline.server.api.protocol import LimitedProtocol

log = logging.getLogger("towline.server")
_RESERVED_FILES = 256
"""Descriptors that connections leave free: for the database, trajectories and node hosts."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which the command owns, and with a deadline for TLS handshakes."""

    def __init__(self, config: uvicorn.Config, handshake_seconds: float):
        super().__init__(config)
        self._handshake_seconds = handshake_seconds

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        def connection() -> asyncio.Protocol:
            made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
                config=self.config, server_state=self.server_state, app_state={}
            )
            return made

        tls: Any = self.config.ssl
        limit = self._handshake_seconds if tls else None
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(
                connection, sock=one, ssl=tls, ssl_handshake_timeout=limit, backlog=self.config.backlog
            )
            for one in sockets or ()
        ]
        self.started = True


@contextlib.asynccontextmanager
async def listening(settings: ServerSettings, app: ASGIApp, stop: Callable[[], None]) -> AsyncIterator[str]:
    """Serve the application and yield its URL; `stop` is called before waiting for requests in flight."""
    table = ConnectionTable(_most_connections(settings.http.connections), settings.http.connections_per_address)
    protocol: Any = functools.partial(LimitedProtocol, settings.http, table, settings.body_bytes)
    listener = listen(settings.host, settings.port)
    with contextlib.closing(listener):
        config = uvicorn.Config(
            app,
            loop="none",
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            # A client could claim any address, and guess keys as another each time.
            proxy_headers=False,
            # Longer than a trainer pauses between two calls on one connection.
            timeout_keep_alive=settings.http.idle_seconds,  # type: ignore[arg-type]
            timeout_graceful_shutdown=5,
        )
        config.load()
        config.ssl = tls_context(settings)
        server = _Server(config, settings.http.header_seconds)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield url_of(listener, settings.host, tls=settings.tls_cert is not None)
        finally:
            stop()
            server.should_exit = True
            await running


def tls_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """How the service speaks TLS, 1.2 or newer; `None` without a certificate."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # A callback instead of a prompt: a service has no terminal to ask on.
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password=_no_password)
    except (OSError, ssl.SSLError, ValueError) as error:
        raise ConfigError(f"server.tls_cert, server.tls_key: cannot use {settings.tls_cert}: {error}") from error
    return context


def _no_password() -> str:
    raise ValueError("the private key is encrypted; store it without a password, readable by its owner alone")


def _most_connections(wanted: int) -> int:
    """As many connections as are wanted and as this process has descriptors for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    most = max(1, soft - _RESERVED_FILES)
    log.warning("only %d connections at once: the limit of open files (ulimit -n) is %d", most, soft)
    return most
