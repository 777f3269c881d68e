"""Where a run's figures go: a JSONL file always, TensorBoard and Weights & Biases where they are installed and asked for."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from towline.errors import ConfigError


class Sink(Protocol):
    def write(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Metrics:
    """Every figure of every step, in `metrics.jsonl`, and in the sinks."""

    def __init__(self, folder: Path, *sinks: Sink):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        self._file = self.path.open("a", encoding="utf-8")
        self._sinks = sinks

    def measured(self, step: int) -> bool:
        """Whether success at this step is written, by this run or by one that it resumes."""
        lines = self.path.read_text(encoding="utf-8").splitlines()
        return any(line.startswith(f'{{"step": {step},') and '"success":' in line for line in lines)

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({"step": step, **figures}) + "\n")
        self._file.flush()
        numbers = {name: float(value) for name, value in figures.items() if isinstance(value, int | float)}
        for sink in self._sinks:
            sink.write(step, numbers)

    def close(self) -> None:
        self._file.close()
        for sink in self._sinks:
            sink.close()


def read(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run; of a step that was taken again after a crash, the last."""
    steps: dict[tuple[int, bool], dict[str, Any]] = {}
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        steps[found["step"], "success" in found] = found
    return [steps[key] for key in sorted(steps)]


class TensorBoard:
    def __init__(self, folder: Path):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ConfigError("tensorboardX is not installed: pip install 'towline[train]'") from error
        # Files are named by the second; a run that is taken up at once must not write over what it had.
        self._writer = SummaryWriter(str(folder), filename_suffix=f".{time.time_ns()}")

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    def __init__(self, project: str, name: str, config: Mapping[str, Any]):
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("Weights & Biases is not installed: pip install wandb") from error
        self._run = wandb.init(project=project, name=name, config=dict(config), resume="allow", id=name)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()
