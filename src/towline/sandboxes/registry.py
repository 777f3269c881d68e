"""The runtimes by name. Each is imported on first use, so a runtime costs nothing where another one is used."""

from __future__ import annotations

from pathlib import Path

from towline.sandboxes.base import DEFAULT_RESOURCES, Runtime
from towline.sandboxes.egress import EgressRules
from towline.sandboxes.images.root_cache import RootCache
from towline.schema import Resources, SandboxKind


def make_runtime(
    kind: SandboxKind,
    data: Path,
    *,
    defaults: Resources = DEFAULT_RESOURCES,
    roots: RootCache | None = None,
    egress: EgressRules | None = None,
    totals: Resources | None = None,
) -> Runtime:
    """A runtime that keeps its files in `data`; call `open` before use.

    `defaults` are the limits that the node itself adds to specs; a runtime may waive those it cannot enforce, and names them
    in its facts. `roots` is a cache of root file systems that runtimes share; without it, each runtime that needs one keeps
    its own below `data`. `egress` is what network `open` reaches; `totals` bound all sandboxes of a runtime together.
    """
    match kind:
        case SandboxKind.BUBBLEWRAP:
            from towline.sandboxes.bubblewrap.runtime import BubblewrapRuntime

            return BubblewrapRuntime(data, defaults=defaults, roots=roots, egress=egress, totals=totals)
        case SandboxKind.DOCKER:
            from towline.sandboxes.docker.runtime import DockerRuntime

            return DockerRuntime(data, defaults=defaults, egress=egress)
        case SandboxKind.APPTAINER:
            from towline.sandboxes.apptainer.runtime import ApptainerRuntime

            return ApptainerRuntime(data, defaults=defaults, roots=roots, egress=egress)
        case SandboxKind.PROCESS:
            from towline.sandboxes.process.runtime import ProcessRuntime

            return ProcessRuntime(data, defaults=defaults)
