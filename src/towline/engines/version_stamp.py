"""Version stamps: the policy version of each sampled token.

Every engine stamps the tokens of a `Sample` with `stamp_versions`, where it makes the sample: `remote.py` (vLLM, SGLang,
llama.cpp), `openai.py`, `embedded/turn.py`, `scripted.py`. The version is that of the weights the engine has loaded
(`update_weights` and `resume` set it), unless the server reports versions itself (`vllm/wire.py`), which then win.

Invariant: one stamp per token. Parts of a turn are stamped separately and joined afterwards, so a turn that a weight
update interrupted keeps the version of each token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from towline.common.arrays import Ids
from towline.engines.validation import token_count


def stamp_versions(count: int, version: int, reported: Sequence[int] = ()) -> Ids:
    """The policy version of each of `count` tokens: those that the server reported, or else `version` for all."""
    return np.array(reported, np.int32) if reported else np.full(count, version, np.int32)


def version_spans(spans: Iterable[tuple[int, int, int]], length: int) -> list[int]:
    """One policy version per token, from spans of `(version, start, end)` that cover at least `length` tokens in order."""
    versions: list[int] = []
    for version, start, end in spans:
        if token_count(start, "the start of a version span") != len(versions) or token_count(end, "its end") < start:
            raise ValueError(f"a version span from {start} to {end} does not follow {len(versions)} tokens")
        versions += [token_count(version, "a weight version")] * (min(end, length) - start)
        if end >= length:
            return versions
    raise ValueError(f"the version spans cover {len(versions)} of {length} tokens")
