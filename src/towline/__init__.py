"""Towline: any agent harness, unchanged, as a reinforcement-learning environment with token-exact trajectories."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("towline")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+source"
