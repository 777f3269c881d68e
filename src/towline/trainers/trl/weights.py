"""Weights from a TRL trainer to the engine: a safetensors folder that the service reads, and a version that only grows.

The service swaps them between two tokens and stamps every token with the version that sampled it, so nothing has to be
paused for it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from towline.client import Client
from towline.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

_KEPT = 2
"""Folders that stay: the service loads the newest again when it restarts, and may still be reading the one before."""


class TowlineWeights:
    """Writes weights below `folder`, on a disk that the service sees too, and has the engine load them.

    It is also a `weight_transfer` of `AsyncGRPOTrainer`, for which `config` names the model folder whose `config.json`
    describes the weights.
    """

    def __init__(self, client: Client, folder: Path, config: Path | None = None):
        self.client = client
        self.folder = folder.absolute()
        self.config = config
        self.before_push: Callable[[], None] = lambda: None
        """Called before the service gets a new version."""

    def push(self, named: Iterable[tuple[str, Tensor]], config: str) -> int:
        """Load these weights into the engine, under the version after the one it has; that version."""
        from safetensors.torch import save_file

        version = self.client.policy().version + 1
        place = self.folder / f"v{version}"
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text(config, encoding="utf-8")
        # Copies, since tied weights may come under two names and a file must not hold one tensor twice.
        tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in named}
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
        self.before_push()
        self.client.update_weights(place, version)
        for old in self.folder.glob("v*"):
            if old.name[1:].isdecimal() and int(old.name[1:]) <= version - _KEPT:
                shutil.rmtree(old, ignore_errors=True)
        return version

    def push_from(self, trainer: Any) -> None:
        """Push a `Trainer`'s model. Every process calls it, since sharded weights are gathered; one of them writes."""
        accelerator = trainer.accelerator
        model = accelerator.unwrap_model(trainer.model)
        if hasattr(model, "peft_config"):
            raise ConfigError(
                "adapters (PEFT) cannot be pushed to the engine: train the whole model, or merge them first"
            )
        state = accelerator.get_state_dict(trainer.model)
        if accelerator.is_main_process:
            self.push(state.items(), model.config.to_json_string(use_diff=False))
        accelerator.wait_for_everyone()

    # `weight_transfer` of AsyncGRPOTrainer

    def init_weight_transfer(self) -> None:
        if self.config is None:
            raise ConfigError("TowlineWeights needs the model's folder as `config` to send weights to the engine")

    def pause(self) -> None:
        """Nothing: sampling goes on until the weights are swapped."""

    def send_weights(self, iterator: Iterable[tuple[str, Tensor]]) -> None:
        assert self.config is not None
        self.push(iterator, (self.config / "config.json").read_text(encoding="utf-8"))

    def resume(self) -> None:
        """Nothing was paused."""

    def destroy(self) -> None:
        """The newest weights stay on disk: the service loads them again when it restarts."""
