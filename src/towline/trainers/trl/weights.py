"""Weight transfer from a TRL trainer to the engine: a safetensors folder that the service reads, and a growing version.

The service swaps weights between two tokens and stamps every token with its policy version, so no pause is needed.
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
"""Folders kept: the service reloads the newest when it restarts, and may still be reading the previous one."""


class TowlineWeights:
    """Writes weights below `folder`, which the service must be able to read, and makes the engine load them.

    It is also a `weight_transfer` of `AsyncGRPOTrainer`; for that, `config` is the model folder whose `config.json`
    describes the weights.
    """

    def __init__(self, client: Client, folder: Path, config: Path | None = None):
        self.client = client
        self.folder = folder.absolute()
        self.config = config
        self.before_push: Callable[[], None] = lambda: None
        """Called before a new version is sent to the service."""

    def push(self, named: Iterable[tuple[str, Tensor]], config: str) -> int:
        """Load these weights into the engine under the next version, and return that version."""
        from safetensors.torch import save_file

        version = self.client.policy().version + 1
        target = self.folder / f"v{version}"
        target.mkdir(parents=True, exist_ok=True)
        (target / "config.json").write_text(config, encoding="utf-8")
        # Copies: tied weights may come under two names, and a file must not share storage between tensors.
        tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in named}
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        self.before_push()
        self.client.update_weights(target, version)
        for old in self.folder.glob("v*"):
            if old.name[1:].isdecimal() and int(old.name[1:]) <= version - _KEPT:
                shutil.rmtree(old, ignore_errors=True)
        return version

    def push_from(self, trainer: Any) -> None:
        """Push a `Trainer`'s model. Every process must call it, to gather sharded weights; the main process writes."""
        accelerator = trainer.accelerator
        model = accelerator.unwrap_model(trainer.model)
        if hasattr(model, "peft_config"):
            raise ConfigError(
                "PEFT adapters cannot be pushed to the engine: train the whole model, or merge the adapters first"
            )
        state = accelerator.get_state_dict(trainer.model)
        if accelerator.is_main_process:
            self.push(state.items(), model.config.to_json_string(use_diff=False))
        accelerator.wait_for_everyone()

    # The `weight_transfer` interface of AsyncGRPOTrainer

    def init_weight_transfer(self) -> None:
        if self.config is None:
            raise ConfigError("TowlineWeights(config=) must be the model folder to transfer weights")

    def pause(self) -> None:
        """No-op: sampling continues until the weights are swapped."""

    def send_weights(self, iterator: Iterable[tuple[str, Tensor]]) -> None:
        assert self.config is not None
        self.push(iterator, (self.config / "config.json").read_text(encoding="utf-8"))

    def resume(self) -> None:
        """No-op: nothing was paused."""

    def destroy(self) -> None:
        """No-op: the newest weights stay on disk, since the service reloads them when it restarts."""
