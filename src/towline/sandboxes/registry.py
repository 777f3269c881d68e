"""The runtimes by name. Each is imported when it is asked for: none costs anything where another is used."""

from __future__ import annotations

from pathlib import Path

from towline.sandboxes.base import DEFAULT_RESOURCES, Runtime
from towline.sandboxes.roots import RootCache
from towline.schema import Resources, SandboxKind


def make_runtime(
    kind: SandboxKind, data: Path, *, defaults: Resources = DEFAULT_RESOURCES, roots: RootCache | None = None
) -> Runtime:
    """A runtime that keeps its files in `data`; `open` it before use. `defaults` are the limits that the node itself
    gives to specs, which a runtime may waive, and says so, where it cannot enforce them. `roots` is a cache of root file
    systems that runtimes share; without it each that needs one has its own below `data`."""
    match kind:
        case SandboxKind.BUBBLEWRAP:
            from towline.sandboxes.bubblewrap import BubblewrapRuntime

            return BubblewrapRuntime(data, defaults=defaults, roots=roots)
        case SandboxKind.DOCKER:
            from towline.sandboxes.docker import DockerRuntime

            return DockerRuntime(data, defaults=defaults)
        case SandboxKind.APPTAINER:
            from towline.sandboxes.apptainer import ApptainerRuntime

            return ApptainerRuntime(data, defaults=defaults, roots=roots)
        case SandboxKind.PROCESS:
            from towline.sandboxes.process import ProcessRuntime

            return ProcessRuntime(data, defaults=defaults)
