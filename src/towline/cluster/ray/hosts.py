"""Node hosts on the machines of a Ray cluster.

Ray itself is in a process next to the server, `ray.bridge`, which this one supervises. Hosts outlive both: a bridge that
is started again, by this server or by a later one, finds them and reports the same addresses.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from towline.cluster.child_hosts import HostSettings, node_settings
from towline.cluster.ray.bridge import BridgeInput
from towline.cluster.remote_node import HostAddress
from towline.common.background import BackgroundTasks
from towline.config import ModelSettings, Settings
from towline.config.cluster import RaySettings
from towline.errors import ConfigError

log = logging.getLogger("towline.cluster")
_BRIDGE = [sys.executable, "-m", "towline.cluster.ray.bridge"]
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
"""Seconds between the death of the bridge and its next start."""
_STOP_SECONDS = 60.0
"""How long hosts may take to end when the server closes."""
_LINE = 2**26
_NO_NODES = (
    "waiting for a node of the Ray cluster that suits: it needs the resources of cluster.ray.resources and the labels of "
    "cluster.ray.labels; `ray status` and `ray list nodes` show what there is"
)
UPSTREAM = "ray:"
"""Prefix of an upstream that is the name of an actor, which knows the URLs."""


class RayHosts:
    """Reports the hosts that the bridge finds or starts."""

    def __init__(self, settings: Settings, *, script: Path | None = None, command: Sequence[str] = _BRIDGE):
        """`command` starts the bridge."""
        self._command = command
        self._input = bridge_input(settings, script)
        self._process: asyncio.subprocess.Process | None = None
        self._background = BackgroundTasks()
        self._demand = 0

    async def start(self, up: Callable[[HostAddress], None], down: Callable[[str, str], None]) -> None:
        """Returns when every node has a host or an error. Raises `ConfigError` if all have errors; nodes may come later."""
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._background.start(self._supervise(up, down, ready), "Ray bridge")
        if problem := await ready:
            await self._background.close()
            raise ConfigError(problem)

    async def _supervise(
        self, up: Callable[[HostAddress], None], down: Callable[[str, str], None], ready: asyncio.Future[str]
    ) -> None:
        """Run the bridge, again whenever it has died. `ready` gets why the first one could not work, or nothing."""
        pause = _FIRST_PAUSE
        while True:
            problem = "the process that speaks to Ray died"
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                async for message in self._messages():
                    if "up" in message:
                        up(HostAddress(**message["up"]))
                        pause = _FIRST_PAUSE
                    elif "down" in message:
                        down(message["down"], message["reason"])
                    elif "ready" in message:
                        errors = message["errors"]
                        for error in errors:
                            log.error("no node host on %s", error)
                        if message["ready"] == 0:
                            log.warning(_NO_NODES)
                            self.report_demand(1)
                        if not ready.done():
                            none = errors and len(errors) == message["ready"]
                            ready.set_result(f"no node host could be started: {errors[0]}" if none else "")
                    elif "error" in message:
                        problem = f"Ray at {self._input.address} cannot be used: {message['error']}"
            if not ready.done():
                ready.set_result(problem)
            log.error("%s; it is started again in %g s, and nodes that are connected work on", problem, pause)
            await asyncio.sleep(pause)
            pause = min(_LONGEST_PAUSE, pause * 2)

    async def _messages(self) -> Any:
        """Start the bridge; yields its messages until it ends."""
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Ctrl-C is for the server, which ends the hosts in order.
            start_new_session=True,
            limit=_LINE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(self._input.dump())
            await process.stdin.drain()
            while line := await process.stdout.readline():
                yield json.loads(line)
        finally:
            # A bridge that ends by itself has closed its output; hosts do not end with it.
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await process.wait()

    def _send(self, command: dict[str, Any]) -> None:
        process = self._process
        if process is not None and process.returncode is None and process.stdin is not None:
            process.stdin.write(json.dumps(command).encode() + b"\n")

    def replace(self, name: str, reason: str) -> None:
        log.error("node host %s is ended if it can be reached: %s", name, reason)
        self._send({"replace": name})

    def report_demand(self, waiting: int) -> None:
        if waiting != self._demand:
            self._demand = waiting
            self._send({"demand": waiting})

    async def close(self) -> None:
        """End all hosts: the server has no more use for them, and the next one starts its own."""
        process = self._process
        if process is not None and process.returncode is None:
            self._send({"close": True})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_SECONDS):
                    await process.wait()
        await self._background.close()


def bridge_input(settings: Settings, script: Path | None) -> BridgeInput:
    """What a bridge needs to know: paths are absolute, for the nodes have another working directory."""
    sent = _with_absolute_paths(node_settings(settings, Path("data")))
    sent = sent.model_copy(update={"cluster": type(settings.cluster)()})
    given = HostSettings("", sent, "", script.absolute() if script is not None else None)
    keys = [settings.engine.key_variable, *(one.engine.key_variable for one in settings.engines.values())]
    return BridgeInput(
        settings.cluster.address or "auto",
        settings.cluster.name,
        given.dump().decode(),
        settings.cluster.ray.model_dump(mode="json"),
        {name: os.environ[name] for name in keys if name in os.environ},
        settings.node.run_workers,
    )


def _with_absolute_paths(settings: Settings) -> Settings:
    engines = {name: one.model_copy(update={"model": _absolute(one.model)}) for name, one in settings.engines.items()}
    cache = settings.node.cache.absolute() if settings.node.cache is not None else None
    node = settings.node.model_copy(update={"cache": cache})
    return settings.model_copy(update={"model": _absolute(settings.model), "engines": engines, "node": node})


def _absolute(model: ModelSettings) -> ModelSettings:
    places = {"folder": model.folder, "template": model.template}
    return model.model_copy(update={name: None if one is None else one.absolute() for name, one in places.items()})


def require_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("a Ray cluster needs Ray on this machine: pip install 'towline[ray]'")


async def resolve_upstreams(settings: Settings) -> Settings:
    """Replace upstreams `ray:NAME` by the URLs that the actor of that name has."""
    named = [url.removeprefix(UPSTREAM) for url in settings.engine.urls if url.startswith(UPSTREAM)]
    if not named:
        return settings
    require_ray()
    found = await _find_engines(settings.cluster.address or "auto", settings.cluster.ray, named)
    urls: list[str] = []
    for url in settings.engine.urls:
        urls += found[url.removeprefix(UPSTREAM)] if url.startswith(UPSTREAM) else [url]
    return settings.model_copy(update={"engine": settings.engine.model_copy(update={"urls": tuple(urls)})})


async def _find_engines(address: str, ray: RaySettings, names: Sequence[str]) -> dict[str, list[str]]:
    process = await asyncio.create_subprocess_exec(
        *_BRIDGE, address, ray.namespace, *names, stdout=asyncio.subprocess.PIPE, limit=_LINE
    )
    output, _ = await process.communicate()
    answer: dict[str, Any] = json.loads(output) if output else {"error": f"it ended with code {process.returncode}"}
    if "error" in answer:
        raise ConfigError(f"--upstream ray:{names[0]} cannot be found in the Ray cluster {address}: {answer['error']}")
    found: dict[str, list[str]] = answer["urls"]
    return found
