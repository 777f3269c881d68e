"""A plain forward pass over rows that an engine recorded."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from towline.audit.evidence import logprobs
from towline.engines.embedded import Decoder, load_decoder
from towline.schema import Trace

BOUND = 1e-3
"""The largest |Δlogp| of a token that was computed by the same weights."""

_load = cache(load_decoder)


def differences(trace: Trace, weights: Mapping[int, Path]) -> Any:
    """|Δlogp| of each sampled token, by the weights of the version that it carries."""
    places = np.flatnonzero(trace.turn_ids >= 0)
    found = np.empty(len(places))
    for version in np.unique(trace.policy_versions[places]):
        mine = trace.policy_versions[places] == version
        computed = logprobs(_decoder(weights[int(version)]), trace.token_ids, places[mine], _undivided(trace.token_ids))
        found[mine] = np.abs(computed - trace.logprobs[places[mine]])
    return found


def distances(trace: Trace, folder: Path) -> Any:
    """|Δlogp| of each sampled token, by one set of weights, whatever version it carries."""
    places = np.flatnonzero(trace.turn_ids >= 0)
    return np.abs(
        logprobs(_decoder(folder), trace.token_ids, places, _undivided(trace.token_ids)) - trace.logprobs[places]
    )


def _undivided(ids: Any) -> Any:
    """Divisors of the logits: these tests sample at temperature 1."""
    return np.ones(len(ids), np.float32)


def _decoder(folder: Path) -> Decoder:
    return _load(folder)
