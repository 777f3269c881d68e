"""Where the server's node hosts come from: `--nodes` and `--cluster`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from towline.config import Settings
from towline.errors import ConfigError

if TYPE_CHECKING:
    from towline.cluster.fleet import HostProvider


def host_provider(settings: Settings, cluster: str | None, script: Path | None) -> HostProvider:
    """The provider for `--cluster`: child processes, here or in a Slurm job."""
    from towline.cluster.child_hosts import ChildHosts, local_places
    from towline.cluster.slurm_hosts import slurm_places

    data = settings.server.data
    kind, _, argument = (cluster or "local").partition(":")
    if kind == "local" and not argument:
        return ChildHosts(settings, local_places(data, settings.server.nodes), script=script)
    if kind == "slurm" and argument:
        # Hosts run on other machines, in the same shared folder.
        script = script.absolute() if script is not None else None
        return ChildHosts(settings, slurm_places(Path(argument), data.absolute()), script=script)
    raise ConfigError(f"--cluster {cluster} is not known; use local or slurm:FILE")
