"""Towline: any agent harness, unchanged, as a reinforcement-learning environment with token-exact trajectories."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from towline.client import AsyncClient, Client

try:
    __version__ = version("towline")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+source"

__all__ = ["AsyncClient", "Client", "__version__"]


def __getattr__(name: str) -> Any:
    """The clients, imported when they are asked for: `import towline` itself stays light."""
    if name in ("AsyncClient", "Client"):
        from towline import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
