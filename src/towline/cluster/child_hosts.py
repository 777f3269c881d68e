"""Node hosts as child processes of the server: on this machine, or on others by a command that runs them there.

Each host is a process `towline node-host` that listens on an abstract Unix socket, or on an address of its machine. Its
settings, with the token, come over its standard input, which stays open: a host exits when that closes, so none outlives its
server. A host that dies is started again with backoff, also one that is killed during its first start; one that ends by
itself then stops the server with its error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from towline.cluster.remote_node import HostAddress
from towline.common.background import BackgroundTasks
from towline.common.private_files import private_folder
from towline.config import Settings
from towline.errors import ConfigError

log = logging.getLogger("towline.cluster")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
"""Seconds between the death of a host and its next start."""
_STEADY_SECONDS = 60.0
"""A host that lived this long starts again after the shortest pause."""
_FIRST_STARTS = 5
"""How often a host may be killed while it starts for the first time."""
_STOP_SECONDS = 30.0
"""How long a host may take to end its sandboxes when the server closes."""


class HostKilled(ConfigError):
    """A host was killed while it started; its next start may succeed."""


@dataclass(frozen=True, slots=True)
class HostSettings:
    """What a host is started with, as JSON on its standard input."""

    name: str
    settings: Settings
    token: str
    script: Path | None = None
    listen: str = ""
    """`unix:@NAME` for an abstract socket, or `HOST:PORT`."""

    def dump(self) -> bytes:
        fields = {"name": self.name, "token": self.token, "listen": self.listen}
        fields["script"] = str(self.script) if self.script is not None else ""
        return json.dumps(fields | {"settings": self.settings.model_dump(mode="json")}).encode() + b"\n"

    @classmethod
    def load(cls, line: bytes) -> HostSettings:
        fields = json.loads(line)
        return cls(
            fields["name"],
            Settings.model_validate(fields["settings"]),
            fields["token"],
            Path(fields["script"]) if fields["script"] else None,
            fields["listen"],
        )


@dataclass(frozen=True, slots=True)
class HostPlace:
    """Where one host runs."""

    name: str
    data: Path
    """Its data folder; the server creates it."""
    launcher: tuple[str, ...] = ()
    """What comes before the host's own command: a program that runs it elsewhere and passes on its standard input."""
    listen: str = ""
    """`HOST:PORT`. Default: an abstract Unix socket, for hosts on this machine."""


def local_places(data: Path, count: int) -> list[HostPlace]:
    """Hosts on this machine. The first has the data folder itself: there a single node has always kept its files."""
    others = [f"local-{number}" for number in range(2, count + 1)]
    return [HostPlace("local", data), *(HostPlace(name, data / "nodes" / name) for name in others)]


def host_command() -> list[str]:
    return [sys.executable, "-m", "towline", "node-host"]


def node_settings(settings: Settings, data: Path) -> Settings:
    """The settings of a host: everything in its data folder, free ports, and nothing of the server's."""
    gateway = settings.gateway.model_copy(update={"port": 0, "control_port": 0, "data": data})
    return settings.model_copy(update={"gateway": gateway, "server": type(settings.server)()})


class ChildHosts:
    """Starts hosts as child processes and watches them."""

    def __init__(self, settings: Settings, places: Sequence[HostPlace], *, script: Path | None = None):
        self._children = [_Child(place, settings, script) for place in places]
        self._background = BackgroundTasks()

    async def start(self, up: Callable[[HostAddress], None], down: Callable[[str, str], None]) -> None:
        await asyncio.gather(*(child.start_first(up) for child in self._children))
        for child in self._children:
            self._background.start(child.supervise(up, down), f"host {child.name}")

    def replace(self, name: str, reason: str) -> None:
        for child in self._children:
            if child.name == name:
                log.error("node host %s is ended: %s", name, reason)
                child.kill()

    def report_demand(self, waiting: int) -> None:
        """The number of child processes is fixed."""

    async def close(self) -> None:
        await self._background.close()
        await asyncio.gather(*(child.stop() for child in self._children))


class _Child:
    """One host process."""

    def __init__(self, place: HostPlace, settings: Settings, script: Path | None):
        self.name = place.name
        self._place = place
        self._settings = node_settings(settings, place.data)
        self._script = script
        self._process: asyncio.subprocess.Process | None = None

    async def start_first(self, up: Callable[[HostAddress], None]) -> None:
        """Start the process, again if it is killed meanwhile. Raises `ConfigError` with its reason if it cannot start."""
        pause = _FIRST_PAUSE
        for _ in range(_FIRST_STARTS - 1):
            try:
                return await self.start(up)
            except HostKilled as error:
                log.error("%s; it is started again in %g s", error, pause)
                await asyncio.sleep(pause)
                pause *= 2
        return await self.start(up)

    async def start(self, up: Callable[[HostAddress], None]) -> None:
        """Start the process; returns when it listens. Raises `ConfigError` with its reason if it cannot."""
        private_folder(self._place.data)
        token = secrets.token_urlsafe(32)
        # An abstract socket: it has no file to copy, to clean up, or with a path that is too long.
        listen = self._place.listen or f"unix:@towline-{secrets.token_hex(16)}"
        given = HostSettings(self.name, self._settings, token, self._script, listen)
        self._process = process = await asyncio.create_subprocess_exec(
            *self._place.launcher,
            *host_command(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Ctrl-C is for the server, which ends its hosts in order. Not a session of its own: a kernel that schedules
            # by session would compare the host's priority with nothing but the host. (uvloop has no `process_group`.)
            preexec_fn=os.setpgrp,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(given.dump())
        line = await process.stdout.readline()
        if not line and (code := await process.wait()) < 0:
            raise HostKilled(f"node host {self.name} {_describe_end(code)} while it started")
        answer = json.loads(line) if line else {"error": f"it ended with code {process.returncode}"}
        if "error" in answer:
            self.kill()
            await process.wait()
            raise ConfigError(f"{answer['error']}")
        up(HostAddress(self.name, answer["url"], token))

    async def supervise(self, up: Callable[[HostAddress], None], down: Callable[[str, str], None]) -> None:
        """Report the death of the process and start it again, forever."""
        loop = asyncio.get_running_loop()
        pause, began = _FIRST_PAUSE, loop.time()
        while True:
            assert self._process is not None
            code = await self._process.wait()
            reason = f"node host {self.name} {_describe_end(code)}"
            log.error("%s; it is started again in %g s", reason, pause)
            down(self.name, reason)
            await asyncio.sleep(pause)
            pause = _FIRST_PAUSE if loop.time() - began > _STEADY_SECONDS else min(_LONGEST_PAUSE, pause * 2)
            began = loop.time()
            while True:
                try:
                    await self.start(up)
                    break
                except (ConfigError, OSError) as error:
                    log.error("node host %s cannot start: %s; next attempt in %g s", self.name, error, pause)
                    await asyncio.sleep(pause)
                    pause = min(_LONGEST_PAUSE, pause * 2)

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)

    async def stop(self) -> None:
        """Let the process end its sandboxes and exit."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            log.error("node host %s did not end in %g s and is killed", self.name, _STOP_SECONDS)
            self.kill()
            await process.wait()


def _describe_end(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
