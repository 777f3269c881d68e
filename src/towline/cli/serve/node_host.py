"""`towline node-host`: one node with its gateway, driven by a server. Started by `towline serve`, not by hand."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

from towline.cli import engines, terminal
from towline.common.private_files import private_folder
from towline.common.sockets import listen, url_of
from towline.errors import TowlineError

if TYPE_CHECKING:
    from towline.cluster.child_hosts import HostSettings

_PDEATHSIG = 1
"""PR_SET_PDEATHSIG of prctl(2)."""
_NICE = 5
"""How much less urgent a host and its sandboxes are than the server."""


def node_host() -> None:
    """Run one node for the server that starts it, with settings on standard input."""
    from towline.cluster.child_hosts import HostSettings

    given = HostSettings.load(_first_line(sys.stdin.fileno()))
    # Roots and installs are for the users of sandboxes; the data folder and what is written to it have modes of their own.
    os.umask(0o022)
    private_folder(given.settings.gateway.data)
    if given.listen.startswith("unix:"):
        _die_with_parent()
        # On one machine the server comes first: sessions may wait for a CPU, answers of the API should not.
        os.nice(_NICE)
    console = terminal.console(as_json=True)
    terminal.configure_logging(console, given.settings.log.format)
    # The engine computes in its own thread next to a busy event loop; a short interval keeps it from waiting for the GIL.
    sys.setswitchinterval(0.0005)
    try:
        terminal.run_async(_host(given))
    except (TowlineError, OSError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        raise SystemExit(1) from error


async def _host(given: HostSettings) -> None:
    from aiohttp import web

    from towline.cluster.local import NodeRunner
    from towline.cluster.node_host import NodeHost
    from towline.common.gc_tuning import gc_tuning
    from towline.runs import run as rollout

    settings = given.settings
    data = settings.gateway.data
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, stop.set)
    loop.add_reader(sys.stdin.fileno(), _exit_with_server)
    gateway, _ = engines.make_gateway(settings, terminal.console(as_json=True), given.script)
    async with rollout.local_node(gateway, settings, data, stores_trajectories=False) as node:
        info = gateway.engine.info
        facts = {"model": gateway.model, "engine": info.name, "capture": str(info.capture)}
        host = NodeHost(NodeRunner(node, given.name), given.token, facts)
        runner = web.AppRunner(host.application(), access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        host.start()
        listener, url = _listener(given.listen)
        await web.SockSite(runner, listener).start()
        print(json.dumps({"url": url}), flush=True)
        with gc_tuning():
            await stop.wait()
        await host.close()
        await runner.cleanup()


def _listener(where: str) -> tuple[socket.socket, str]:
    """The listening socket and its URL."""
    if where.startswith("unix:@"):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("\0" + where.removeprefix("unix:@"))
        return listener, where
    host, _, port = where.rpartition(":")
    listener = listen(host, int(port))
    return listener, url_of(listener, host)


def _exit_with_server() -> None:
    """Standard input ends with the server. Exiting at once is as safe as a crash, and sandboxes end with this process."""
    if not os.read(sys.stdin.fileno(), 4096):
        os._exit(1)


def _first_line(descriptor: int) -> bytes:
    """One line, without reading ahead: what follows is for the event loop."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(descriptor, 65_536)
        if not part:
            raise SystemExit("towline node-host is started by `towline serve`, which writes its settings to it")
        line += part
    return line


def _die_with_parent() -> None:
    """Let the kernel kill this process when the server dies, however busy the event loop is."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
