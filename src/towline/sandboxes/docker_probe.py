"""What an engine really does on this machine, found out by a container and not by what it says it can."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from towline.sandboxes.docker_api import Engine
from towline.sandboxes.docker_container import DockerSandbox
from towline.schema import Network, Resources

LIMITS = Resources(memory_mb=32, pids=16, cpus=0.5)
"""Of the container that is looked at."""
_WHY = {
    "memory_mb": "its control groups do not take the memory limit; use cgroup v2 with delegation, a rootful engine, or ask "
    "for none",
    "pids": "its control groups do not take the limit of processes; use cgroup v2 with delegation, or ask for none",
    "cpus": "its kernel has no CPU quota for containers",
    "disk_mb": "its storage driver has no quota (overlay2 on xfs with pquota, btrfs and zfs have); move its data folder to "
    "one, or ask for none",
    "seconds": "",
    Network.GATEWAY: "to listen inside, Towline must run as root on the engine's machine, or as a rootless engine's user",
    Network.OPEN: "it has no network `bridge` (it was started with --bridge=none)",
}


@dataclass(frozen=True, slots=True)
class Found:
    """The result. Before a probe: all that it needs itself, and nothing else."""

    enforced: frozenset[str] = frozenset()
    networks: frozenset[Network] = frozenset({Network.NONE})
    local: bool = False
    """Whether its containers' processes can be seen and entered from here."""
    notes: tuple[str, ...] = ()

    def why(self, what: str) -> str:
        return _WHY[what]

    def with_disk(self) -> Found:
        notes = tuple(note for note in self.notes if not note.startswith("disk_mb"))
        return replace(self, enforced=self.enforced | {"disk_mb"}, notes=notes)


async def look(engine: Engine, sandbox: DockerSandbox) -> Found:
    """Look at a running container that was made with `LIMITS`."""
    stats = await engine.json(
        "GET", f"/containers/{sandbox.container}/stats", query={"stream": "false", "one-shot": "true"}
    )
    info = await engine.json("GET", "/info")
    enforced = {"seconds"}
    assert LIMITS.memory_mb is not None
    memory = (stats.get("memory_stats") or {}).get("limit")
    if LIMITS.memory_mb << 20 in (memory, _held(sandbox, "memory", "memory.limit_in_bytes", "memory.max")):
        enforced.add("memory_mb")
    # podman does not tell this one, so its control group is asked as well.
    if LIMITS.pids in ((stats.get("pids_stats") or {}).get("limit"), _held(sandbox, "pids", "pids.max", "pids.max")):
        enforced.add("pids")
    if info.get("CpuCfsQuota"):
        enforced.add("cpus")
    networks = {Network.NONE}
    local = sandbox.sees_inside()
    if local:
        networks.add(Network.GATEWAY)
    known = await engine.json("GET", "/networks", query={"filters": '{"name":["^bridge$"]}'})
    if any(network.get("Name") == "bridge" and network.get("Driver") == "bridge" for network in known):
        networks.add(Network.OPEN)
    notes = [
        f"{limit} is not enforced: {_WHY[limit]}"
        for limit in ("memory_mb", "pids", "cpus", "disk_mb")
        if limit not in enforced
    ]
    notes += [
        f"no network {network}: {_WHY[network]}"
        for network in (Network.GATEWAY, Network.OPEN)
        if network not in networks
    ]
    if not any("seccomp" in str(option) for option in info.get("SecurityOptions") or []):
        notes.append("the engine filters no system calls: start it with its default seccomp profile")
    if not (local and os.geteuid() == 0):
        notes.append(
            "ending one command, or all of them, restarts the container: files stay, the gateway is not reached after it"
        )
    return Found(frozenset(enforced), frozenset(networks), local, tuple(notes))


def _held(sandbox: DockerSandbox, controller: str, first: str, second: str) -> int | None:
    """What the control group of a container's first process says, by version 1 or 2; None if it cannot be seen."""
    try:
        groups = Path(f"/proc/{sandbox.pid}/cgroup").read_text() if sandbox.owns(sandbox.pid) else ""
        for line in groups.splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                return int(Path(f"/sys/fs/cgroup/{controllers}{path}/{first}").read_text())
            file = Path(f"/sys/fs/cgroup{path}/{second}")
            if not controllers and file.exists():
                return int(file.read_text())
    except (OSError, ValueError):
        return None
    return None
