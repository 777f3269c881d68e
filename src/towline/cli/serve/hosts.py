"""Where the server's node hosts come from: `--nodes` and `--cluster`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from towline.config import Settings

if TYPE_CHECKING:
    from towline.cluster.host_provider import HostProvider


def host_provider(settings: Settings, script: Path | None) -> HostProvider:
    """The provider that the settings want: child processes, here or in a Slurm job, or actors of a Ray cluster."""
    from towline.cluster.child_hosts import ChildHosts, local_places
    from towline.cluster.ray.hosts import RayHosts, require_ray
    from towline.cluster.slurm_hosts import slurm_places

    data, address = settings.server.data, settings.cluster.address
    kind, _, argument = address.partition(":")
    if kind == "local" or not (address or settings.cluster.kind == "ray"):
        count = int(argument) if argument else settings.server.nodes
        return ChildHosts(settings, local_places(data, count), script=script)
    if kind == "slurm":
        # Hosts run on other machines, in the same shared folder.
        script = script.absolute() if script is not None else None
        return ChildHosts(settings, slurm_places(Path(argument), data.absolute()), script=script)
    require_ray()
    return RayHosts(settings, script=script)
