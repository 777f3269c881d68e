"""What a launcher renders from: the settings, and the folders of the command that was called."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from towline.config import Settings
from towline.errors import ConfigError

REMOTE_KINDS = ("vllm", "sglang", "openai")


@dataclass(frozen=True, slots=True)
class LaunchInputs:
    """Everything that a rendered file depends on: the same inputs give the same text."""

    settings: Settings
    folder: Path
    """Working folder of the command, absolute: relative paths in the settings start here."""
    config: Path | None
    """Settings file, absolute, if there is one."""

    @property
    def data(self) -> Path:
        return self.folder / self.settings.server.data

    @property
    def state(self) -> Path:
        """Folder of what the launcher and its job write: script, log, URL, key."""
        return self.data / "cluster"


def engine_kind(settings: Settings) -> str:
    """The engine that the server uses for launched model servers."""
    kind = settings.engine.kind
    return kind if kind in REMOTE_KINDS else "vllm"


def engine_model(settings: Settings) -> str:
    """The model that launched servers load."""
    engine = settings.cluster.engine
    assert engine is not None
    if engine.model:
        return engine.model
    if settings.model.folder is None:
        raise ConfigError("cluster.engine.model: set it, or `model.folder`, which is its default")
    return str(settings.model.folder)
