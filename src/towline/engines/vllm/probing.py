"""What a server's first answers say about it.

The probe prompt is long enough for a cache block of any usual size. It is asked for one token at temperature 1 and again
at `TEMPERATURE`: the second answer shows whether logprobs are those of the distribution that was sampled from, and
whether the prompt came from a prefix cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import orjson

from towline.arrays import Ids
from towline.engines.base import Load
from towline.errors import EngineError

TEMPERATURE = 0.7
ASKED = 5
"""Likeliest ids whose logprobs are compared."""
_PROMPT = 600
_SMALL = 32
"""Ids that any vocabulary has."""
_AGREE = 0.02
"""The largest relative difference that rounding explains, in 16-bit arithmetic too."""
PROCESSED = "--logprobs-mode processed_logprobs"


def probe_prompt(context: int, seed: int = 0) -> Ids:
    """A fixed row of ids."""
    length = max(1, min(_PROMPT, context - 64))
    return np.random.default_rng(seed).integers(0, _SMALL, length).astype(np.int32)


def check_logprobs(url: str, at_one: Mapping[int, float], at_probe: Mapping[int, float]) -> None:
    """Raise unless both are logprobs of what was sampled from: scaled by their temperature, and normalised."""
    shared = sorted(at_one.keys() & at_probe.keys(), key=lambda id: -at_one[id])[: ASKED + 1]
    if len(shared) < 2:
        raise EngineError(f"{url} tells no logprobs of its likeliest tokens: start it with --max-logprobs {ASKED}")
    one = np.array([at_one[id] for id in shared])
    probe = np.array([at_probe[id] for id in shared])
    logits = one.max() > 1e-3 or probe.max() > 1e-3 or np.allclose(probe, one / TEMPERATURE, rtol=1e-4)
    # Differences between two ids do not depend on how the rest of the distribution is normalised.
    scaled = np.abs((probe - probe[0]) - (one - one[0]) / TEMPERATURE).max()
    raw = np.abs((probe - probe[0]) - (one - one[0])).max()
    if logits or scaled > max(_AGREE * np.ptp(one) / TEMPERATURE, 1e-4) or raw < scaled:
        raise EngineError(
            f"{url} reports {'logits' if logits else 'logprobs from before the temperature'}, not the logprobs of what it "
            f"samples from: start it with {PROCESSED}"
        )


def metric(text: str, name: str) -> float | None:
    """The sum of a Prometheus metric over its labels."""
    values = _values(text, name)
    return sum(values) if values else None


def _values(text: str, name: str) -> list[float]:
    """A Prometheus metric, once for each set of labels: a server with data-parallel ranks has one for each rank."""
    lines = (line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} ")))
    return [float(line.rpartition(" ")[2]) for line in lines]


def load(text: str) -> Load:
    """How busy the server is, from its metrics: of several ranks, the cache of the fullest counts."""
    running, waiting = metric(text, "vllm:num_requests_running"), metric(text, "vllm:num_requests_waiting")
    if running is None or waiting is None:
        raise EngineError("the server's /metrics tell nothing of its requests: start it without --disable-log-stats")
    return Load(int(running), int(waiting), max(_values(text, "vllm:kv_cache_usage_perc"), default=None))


def vocabulary(root: str) -> int:
    """The size of the vocabulary if the model's folder can be read from here, else 0."""
    try:
        config = orjson.loads((Path(root) / "config.json").read_bytes())
        size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 0
    except (OSError, orjson.JSONDecodeError, AttributeError):
        return 0
    return int(size)
