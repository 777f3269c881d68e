"""Checks of a server: which logprobs it reports, and whether it samples from the weights it was given.

At the start, a probe prompt that is long enough for a cache block of any usual size asks for one token at temperature 1 and
again at `TEMPERATURE`: the second response shows whether logprobs are those of the sampling distribution, and whether the
prompt came from a prefix cache.

After every weight update, a few tokens are compared with a forward pass over the pushed folder: a server that accepts an
update without an error may still serve the old weights, or a mixture (on a CPU, vLLM keeps the head of a model with tied
embeddings). Where this process cannot compute a forward pass (no torch, a model that the embedded decoder does not support,
too many weights), the remaining check is whether the response changed at all.

Forced ids are scored where sampled ones would be: after the prompt and the ids before them, in the distribution at the
turn's temperature, by requesting one token and the logprob of the given id with it. The prefix cache makes that cheap.

Invariant: after an update that passes as `forward`, the served logprobs are within the tolerance of the pushed weights,
however small each single update is.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import util
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
import orjson

from towline.common.arrays import Floats, Ids
from towline.conversation import Finish
from towline.engines.remote import ActiveTurn
from towline.errors import ConfigError, EngineError

MAX_BYTES = 16 * 2**30
"""Maximum number of bytes of weights that are read for a forward pass."""
EXACT = 1e-3
ROUNDED = 0.2
"""Tolerances of the mean difference, for servers that compute in 32 bits and in fewer."""
TEMPERATURE = 0.7
TOP_LOGPROBS = 5
"""Most likely ids whose logprobs are compared."""
_PROMPT_LENGTH = 600
_SMALL_IDS = 32
"""Ids that any vocabulary has."""
_TOLERANCE = 0.02
"""The largest relative difference that rounding explains, in 16-bit arithmetic too."""
T = TypeVar("T", int, str)
Score = Callable[[Ids, int], Awaitable[tuple[float, int, int]]]
"""The logprob of an id after a prompt, with how many prompt tokens the server counted and took from its cache."""
_BATCH = 16
PROCESSED = "--logprobs-mode processed_logprobs"
_FAMILIES = ("qwen3", "qwen2", "llama")
_PART = 2**20
_RESTART = "restart the server from this folder"
_UNTIE = (
    "Save the model with tie_word_embeddings=false and an lm_head.weight of its own, and start the server from such a "
    "folder; or restart the server from each new folder"
)


class UpdateProof(StrEnum):
    """How strongly a weight update is proven."""

    FORWARD = "forward"
    """The logprobs are those of a forward pass of the pushed weights."""
    CHANGED = "changed"
    """The logprobs differ from those before the update."""


@dataclass(slots=True)
class ProbeAnswer:
    """A greedy response to a fixed prompt, with its logprobs at temperature 1."""

    prompt: Ids
    ids: Ids
    logprobs: Floats
    cached_tokens: int = 0


@dataclass(slots=True)
class PushedWeights:
    """A folder of weights, and what is known of it without loading them."""

    folder: Path
    tied: bool
    family: str
    size: int
    digest: str
    """Hash of samples spread over the files: changes with their content."""

    @classmethod
    def of(cls, folder: Path) -> PushedWeights:
        """Raises `EngineError` if the folder holds no weights."""
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise EngineError(f"{folder} holds no safetensors file: weights must be a folder in Hugging Face layout")
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise EngineError(f"cannot read {folder / 'config.json'}: {error}") from error
        tied = bool(config.get("tie_word_embeddings", False))
        size = sum(path.stat().st_size for path in files)
        return cls(folder.absolute(), tied, str(config.get("model_type", "")), size, _digest(files))

    @property
    def computable(self) -> bool:
        return util.find_spec("torch") is not None and self.family in _FAMILIES and self.size <= MAX_BYTES


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as file:
            step = max(_PART, size // 16)
            for offset in range(0, size, step):
                file.seek(offset)
                digest.update(file.read(_PART))
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class ServerPrecision:
    """How a server computes."""

    exact: bool
    """In float32."""
    cpu: bool
    """On a CPU, where a reload may leave the head of a tied model behind."""


def check_update(
    server: str,
    pushed: PushedWeights,
    before: ProbeAnswer | None,
    after: ProbeAnswer,
    *,
    last: PushedWeights | None,
    precision: ServerPrecision,
) -> UpdateProof:
    """How strongly it is proven that `after` comes from the pushed weights; raises `EngineError`, with what to do, if not.

    `before` is the response before the update, `last` the folder pushed before.
    """
    if after.cached_tokens:
        raise EngineError(
            f"{server} answered from a key-value cache of the old weights: its prefix cache was not cleared"
        )
    same = before is not None and np.array_equal(before.ids, after.ids)
    unchanged = same and before is not None and np.array_equal(before.logprobs, after.logprobs)
    if pushed.computable:
        return _compare(server, pushed, after, last=last, exact=precision.exact, unchanged=unchanged)
    if unchanged and (last is None or last.digest != pushed.digest):
        raise EngineError(
            f"{server} samples as before the update: it did not load the weights of {pushed.folder}; {_RESTART}"
        )
    if pushed.tied and precision.cpu:
        raise EngineError(
            f"{server} runs on a CPU and the embeddings of {pushed.folder} are tied: vLLM then keeps its old head, and "
            f"whether it did cannot be checked without torch and a model of {', '.join(_FAMILIES)}. {_UNTIE}"
        )
    return UpdateProof.CHANGED


def _compare(
    server: str, pushed: PushedWeights, after: ProbeAnswer, *, last: PushedWeights | None, exact: bool, unchanged: bool
) -> UpdateProof:
    difference = float(np.abs(_forward(pushed.folder, after) - after.logprobs).mean())
    tolerance = EXACT if exact else ROUNDED
    if difference <= tolerance:
        return UpdateProof.FORWARD
    finding = f"the logprobs of {server} are {difference:.3g} from those of {pushed.folder} after the update"
    if unchanged:
        raise EngineError(f"stale weights: {finding}, and as they were before it; {_RESTART}")
    if pushed.tied and (last is None or not last.computable or _old_head(pushed, last, after, tolerance)):
        raise EngineError(
            f"stale head of tied embeddings: {finding}. The hidden layers are the new ones, but the head, which shares the "
            f"embeddings' weights (tie_word_embeddings), kept the old ones, as vLLM does on a CPU. {_UNTIE}"
        )
    raise EngineError(f"stale weights: {finding}, and not as before it either; {_RESTART}")


def _old_head(pushed: PushedWeights, last: PushedWeights, after: ProbeAnswer, tolerance: float) -> bool:
    """Whether the response is that of the new layers with the old head; assumed if the old folder is gone."""
    try:
        mixed = _forward(pushed.folder, after, head=last.folder)
    except EngineError:
        return True
    return float(np.abs(mixed - after.logprobs).mean()) <= tolerance


def _forward(folder: Path, probe: ProbeAnswer, head: Path | None = None) -> Floats:
    """The logprobs of a probe's ids under the weights of a folder, with the head of another if one is given."""
    import torch

    from towline.engines.embedded import load_decoder

    try:
        decoder = load_decoder(folder)
        output = decoder.head if head is None else load_decoder(head).head
    except ConfigError as error:
        raise EngineError(f"cannot check the update: {error}") from error
    row = torch.from_numpy(np.concatenate([probe.prompt, probe.ids]).astype(np.int64))
    with torch.inference_mode():
        hidden = decoder.hidden(row[:-1].unsqueeze(0))[0, len(probe.prompt) - 1 :]
        logprobs = torch.log_softmax(torch.mm(hidden, output.T), -1)
        chosen = logprobs.gather(1, row[len(probe.prompt) :].unsqueeze(1))[:, 0]
    found: Floats = chosen.numpy().astype(np.float32)
    return found


def probe_prompt(context: int, seed: int = 0) -> Ids:
    """A fixed row of ids."""
    length = max(1, min(_PROMPT_LENGTH, context - 64))
    return np.random.default_rng(seed).integers(0, _SMALL_IDS, length).astype(np.int32)


def check_logprobs(url: str, at_one: Mapping[T, float], at_probe: Mapping[T, float]) -> None:
    """Raise unless both are logprobs of the sampling distribution: scaled by their temperature, and normalised.

    Keys are ids, or the texts of tokens. With fewer than two in common nothing can be told, which raises too.
    """
    shared = sorted(at_one.keys() & at_probe.keys(), key=lambda id: -at_one[id])[: TOP_LOGPROBS + 1]
    if len(shared) < 2:
        raise EngineError(
            f"{url} reports no logprobs of its most likely tokens: start it with --max-logprobs {TOP_LOGPROBS}"
        )
    one = np.array([at_one[id] for id in shared])
    probe = np.array([at_probe[id] for id in shared])
    logits = one.max() > 1e-3 or probe.max() > 1e-3 or np.allclose(probe, one / TEMPERATURE, rtol=1e-4)
    # Differences between two ids do not depend on how the rest of the distribution is normalised.
    scaled = np.abs((probe - probe[0]) - (one - one[0]) / TEMPERATURE).max()
    raw = np.abs((probe - probe[0]) - (one - one[0])).max()
    if logits or scaled > max(_TOLERANCE * np.ptp(one) / TEMPERATURE, 1e-4) or raw < scaled:
        raise EngineError(
            f"{url} reports {'logits' if logits else 'logprobs from before the temperature'}, not those of the "
            f"distribution it samples from: start it with {PROCESSED}"
        )


def vocabulary(root: str) -> int:
    """The size of the vocabulary if the model's folder is readable from here, else 0."""
    try:
        config = orjson.loads((Path(root) / "config.json").read_bytes())
        size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 0
    except (OSError, orjson.JSONDecodeError, AttributeError):
        return 0
    return int(size)


async def score(turn: ActiveTurn, limit: int, score_one: Score) -> None:
    """Fill a turn with its forced ids and their logprobs, up to the first stop id."""
    request = turn.request
    if request.forced is None or request.stop_strings:
        raise EngineError("forced ids cannot be combined with stop strings")
    forced = np.asarray(request.forced, np.int32)[:limit]
    stops = np.flatnonzero(np.isin(forced, list(request.stop_ids)))
    forced = forced[: stops[0] + 1] if len(stops) else forced
    row = np.concatenate([np.asarray(request.prompt, np.int32), forced])
    length = len(request.prompt)
    # The first one alone: it fills the cache with the prompt for the others.
    bounds = [0, *range(1, len(forced), _BATCH), len(forced)]
    for start, end in pairwise(bounds):
        answers = await asyncio.gather(
            *(score_one(row[: length + place], int(forced[place])) for place in range(start, end))
        )
        if start == 0 and answers:
            _, turn.prompt_tokens, turn.cached_tokens = answers[0]
        turn.ids += [int(id) for id in forced[start:end]]
        turn.logprobs += [logprob for logprob, *_ in answers]
    turn.finish = Finish.STOP if len(stops) else Finish.LENGTH
