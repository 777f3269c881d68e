"""Apptainer's command lines, and how they are run. What is asked for is a pure function of a spec.

Every instance has a user namespace with one id (root inside is the user outside), a PID and a network namespace, no
capabilities, no new privileges, none of the host's folders and an environment of its own. Variables go by the
environment and never by arguments, which everyone on the machine can read.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from towline.sandboxes.base import SandboxError, Spec
from towline.sandboxes.helping import finished
from towline.schema import Network

ISOLATION = (
    "--userns",
    "--fakeroot",
    # One id and no preloaded library: the same on every machine, and files outside all belong to the user.
    "--ignore-subuid",
    "--ignore-fakeroot-command",
    "--containall",
    "--cleanenv",
    "--no-privs",
    "--no-home",
    "--no-mount",
    "tmp,home,cwd,hostfs,bind-paths,sys",
)
START = ".singularity.d/actions/start"
"""What an instance runs first, in its root; a root that is no Apptainer image has none."""
_PASSED = ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")
"""What Apptainer needs of the node's environment to reach systemd for control groups."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the files of one instance are on the host."""

    name: str
    root: Path
    overlay: Path
    """Its `upper` holds what is written."""
    layers: tuple[Path, ...]
    """Each with an `upper`, lowest first."""
    writable: tuple[Path, ...]
    """Copies of the sources of writable mounts, in their order."""
    pid_file: Path


def start_command(spec: Spec, place: Place) -> list[str]:
    """`instance start` for a spec."""
    command = ["instance", "start", *ISOLATION]
    if spec.network is not Network.OPEN:
        command += ["--net", "--network", "none"]
    limits = spec.resources
    if limits.memory_mb is not None:
        command += ["--memory", f"{limits.memory_mb}m", "--memory-swap", f"{limits.memory_mb}m"]
    if limits.pids is not None:
        command += ["--pids-limit", str(limits.pids)]
    if limits.cpus is not None:
        command += ["--cpus", f"{limits.cpus:g}"]
    for layer in place.layers:
        command += ["--overlay", f"{layer}:ro"]
    command += ["--overlay", str(place.overlay)]
    copies = iter(place.writable)
    for mount in spec.mounts:
        source = next(copies) if mount.writable else mount.source.resolve()
        command += [
            "--mount",
            f"type=bind,src={_quoted(str(source))},dst={_quoted(mount.target)}" + ("" if mount.writable else ",ro"),
        ]
    return [*command, "--pid-file", str(place.pid_file), str(place.root), place.name]


def exec_command(name: str, command: Sequence[str], *, cwd: str, home: str | None) -> list[str]:
    """`exec` in an instance. HOME is the one variable that Apptainer does not let through."""
    given = ["env", f"HOME={home}", *command] if home is not None else list(command)
    return ["exec", "--cleanenv", "--no-eval", "--pwd", cwd, f"instance://{name}", *given]


def inside_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables of a command inside, as Apptainer wants them in its own environment."""
    return {f"APPTAINERENV_{name}": value for name, value in variables.items() if name != "HOME"}


def _quoted(value: str) -> str:
    """A field of `--mount`, which is comma-separated."""
    return '"' + value.replace('"', '""') + '"' if any(mark in value for mark in ',"') else value


class Apptainer:
    """The program, with a state folder of the node's own."""

    def __init__(self, program: str, data: Path):
        self.program = program
        self._data = data

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        base = {
            "PATH": os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin"),
            "HOME": str(self._data),
            "APPTAINER_CONFIGDIR": str(self._data / "config"),
            "APPTAINER_CACHEDIR": str(self._data / "cache"),
            "APPTAINER_TMPDIR": str(self._data),
        }
        passed = {name: os.environ[name] for name in _PASSED if name in os.environ}
        return base | passed | dict(more or {})

    async def run(self, arguments: Sequence[str]) -> str:
        """Run a command to its end; `SandboxError` with what it said if it fails."""
        process = await asyncio.create_subprocess_exec(
            *(self.program, "-q", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self.environment(),
            cwd="/",
            start_new_session=True,
        )
        out, errors = await finished(process, f"`apptainer {' '.join(arguments[:2])}`")
        if process.returncode != 0:
            said = errors.decode("utf-8", "replace").strip()[-2000:]
            raise SandboxError(f"`apptainer {' '.join(arguments[:2])}` failed ({process.returncode}): {said}")
        return out.decode("utf-8", "replace")
