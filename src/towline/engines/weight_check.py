"""Whether a server samples from the weights that it was given.

A server that takes an update without an error may still serve the old weights, or a mixture: on a CPU, vLLM keeps the head
of a model with tied embeddings. So after every update it is asked for a few tokens, and their logprobs are compared with
a forward pass of the pushed folder. Where this process cannot compute one (no torch, a model that the embedded decoder is
not, too many weights), what is left is whether the answer changed at all.

Invariant: after an update that passes as `forward`, the served logprobs are within the tolerance of the pushed weights,
however small each single update is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import util
from pathlib import Path

import numpy as np

from towline.arrays import Floats, Ids
from towline.errors import ConfigError, EngineError

LARGEST = 16 * 2**30
"""Bytes of weights that are read for a forward pass."""
EXACT = 1e-3
ROUNDED = 0.2
"""Tolerances of a mean difference, for servers that compute in 32 bits and in fewer."""
_FAMILIES = ("qwen3", "qwen2", "llama")
_PART = 2**20


class Proof(StrEnum):
    """How far an update is proven."""

    FORWARD = "forward"
    """The logprobs are those of a forward pass of the pushed weights."""
    CHANGED = "changed"
    """The logprobs are others than before the update."""


@dataclass(slots=True)
class Probe:
    """A greedy answer to a fixed prompt, with its logprobs at temperature 1."""

    prompt: Ids
    ids: Ids
    logprobs: Floats
    cached_tokens: int = 0


@dataclass(slots=True)
class Pushed:
    """A folder of weights, and what is known of it without reading the weights."""

    folder: Path
    tied: bool
    family: str
    size: int
    digest: str
    """Changes with the content of the files, as far as their first and last part tell."""

    @classmethod
    def of(cls, folder: Path) -> Pushed:
        """Raises `EngineError` if the folder holds no weights."""
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise EngineError(
                f"{folder} holds no safetensors file: weights are given as a folder in Hugging Face layout"
            )
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise EngineError(f"cannot read {folder / 'config.json'}: {error}") from error
        tied = bool(config.get("tie_word_embeddings", False))
        size = sum(path.stat().st_size for path in files)
        return cls(folder.absolute(), tied, str(config.get("model_type", "")), size, _digest(files))

    @property
    def computable(self) -> bool:
        return util.find_spec("torch") is not None and self.family in _FAMILIES and self.size <= LARGEST


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as file:
            step = max(_PART, size // 16)
            for place in range(0, size, step):
                file.seek(place)
                digest.update(file.read(_PART))
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How a server computes."""

    exact: bool
    """In 32 bits."""
    cpu: bool
    """On a CPU, where a reload may leave the head of a tied model behind."""


def check(
    server: str, pushed: Pushed, before: Probe | None, after: Probe, *, last: Pushed | None, arithmetic: Arithmetic
) -> Proof:
    """Raise `EngineError`, with what to do, if `after` does not come from the pushed weights; else how far that is proven.

    `before` is the answer before the update, `last` the folder pushed before.
    """
    if after.cached_tokens:
        raise EngineError(
            f"{server} answered from a key-value cache of the old weights: its prefix cache was not cleared"
        )
    same = before is not None and np.array_equal(before.ids, after.ids)
    unchanged = same and before is not None and np.array_equal(before.logprobs, after.logprobs)
    if pushed.computable:
        return _compare(server, pushed, after, last=last, exact=arithmetic.exact, unchanged=unchanged)
    if unchanged and (last is None or last.digest != pushed.digest):
        raise EngineError(
            f"{server} samples as before the update: it did not take the weights of {pushed.folder}; {_RESTART}"
        )
    if pushed.tied and arithmetic.cpu:
        raise EngineError(
            f"{server} runs on a CPU and the embeddings of {pushed.folder} are tied: vLLM then keeps its old head, and "
            f"whether it did cannot be checked without torch and a model of {', '.join(_FAMILIES)}. {_UNTIE}"
        )
    return Proof.CHANGED


_RESTART = "start the server again from this folder"
_UNTIE = (
    "Save the model with tie_word_embeddings=false and an lm_head.weight of its own, and start the server from such a "
    "folder; or start the server again from each new folder"
)


def _compare(server: str, pushed: Pushed, after: Probe, *, last: Pushed | None, exact: bool, unchanged: bool) -> Proof:
    difference = float(np.abs(_forward(pushed.folder, after) - after.logprobs).mean())
    tolerance = EXACT if exact else ROUNDED
    if difference <= tolerance:
        return Proof.FORWARD
    told = f"the logprobs of {server} are {difference:.3g} from those of {pushed.folder} after the update"
    if unchanged:
        raise EngineError(f"stale weights: {told}, and as they were before it; {_RESTART}")
    if pushed.tied and (last is None or not last.computable or _old_head(pushed, last, after, tolerance)):
        raise EngineError(
            f"stale head of tied embeddings: {told}. The hidden layers are the new ones, but the head, which shares the "
            f"embeddings' weights (tie_word_embeddings), kept the old ones: vLLM on a CPU does so. {_UNTIE}"
        )
    raise EngineError(f"stale weights: {told}, and not as before it either; {_RESTART}")


def _old_head(pushed: Pushed, last: Pushed, after: Probe, tolerance: float) -> bool:
    """Whether the answer is that of the new layers under the old head; an old folder that is gone proves nothing."""
    try:
        mixed = _forward(pushed.folder, after, head=last.folder)
    except EngineError:
        return True
    return float(np.abs(mixed - after.logprobs).mean()) <= tolerance


def _forward(folder: Path, probe: Probe, head: Path | None = None) -> Floats:
    """The logprobs of a probe's ids by the weights of a folder, with the head of another if one is given."""
    import torch

    from towline.engines.embedded import load

    try:
        decoder = load(folder)
        output = decoder.head if head is None else load(head).head
    except ConfigError as error:
        raise EngineError(f"cannot check the update: {error}") from error
    row = torch.from_numpy(np.concatenate([probe.prompt, probe.ids]).astype(np.int64))
    with torch.inference_mode():
        hidden = decoder.hidden(row[:-1].unsqueeze(0))[0, len(probe.prompt) - 1 :]
        logprobs = torch.log_softmax(torch.mm(hidden, output.T), -1)
        chosen = logprobs.gather(1, row[len(probe.prompt) :].unsqueeze(1))[:, 0]
    found: Floats = chosen.numpy().astype(np.float32)
    return found
