"""Labels of a server's weights, and the policy versions that they stand for.

A server names its weights with a label (SGLang's and vLLM's `weight_version`), which whoever replaces them sets: this
process, or a trainer that pushes weights to its own engine. So the label, not a call of ours, is what tells the version of
a token.

- A number is a policy version. One higher than before means that the trainer has pushed weights: it is followed.
- Any other word stands for the version under which it was first seen; an unknown one is looked into (`RemoteEngine`).
- A label of an older version than the one that was in use when the turn began means that the server was restarted.

Invariant: versions only grow, so a label is never followed backwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from towline.common.arrays import Ids
from towline.errors import EngineError

MAX_VERSION = 2**31 - 1
"""The largest version that a row can hold."""
MIXED_CACHE = "mixed_cache"
"""Flag of a turn with tokens whose context may have been computed under older weights than the tokens themselves."""
MIXED_VERSIONS = "mixed_versions"
"""Flag of a turn during which the weights changed on a server that does not say at which token: every token carries the
older version."""


@dataclass(slots=True)
class WeightLabels:
    """What is known of one server's labels."""

    current: str | None = None
    """The label last seen; `None` if the server reports none."""
    words: dict[str, int] = field(default_factory=dict)
    """Versions of labels that are not numbers."""

    def version_of(self, label: str) -> int | None:
        """The policy version of a label; `None` for a word that was not seen before."""
        return parse_version(label) if is_version(label) else self.words.get(label)

    def note(self, label: str, version: int) -> None:
        """Note that the server's weights carry this label now."""
        self.current = label
        if not is_version(label):
            self.words[label] = version


def is_version(label: str) -> bool:
    """Whether a label is a policy version rather than a word."""
    return label.isascii() and label.isdecimal()


def parse_version(label: str) -> int:
    version = int(label) if len(label) <= 10 else MAX_VERSION + 1
    if version > MAX_VERSION:
        raise EngineError(f"weight label {label:.40} is larger than any policy version ({MAX_VERSION})")
    return version


def label_spans(spans: Any) -> list[tuple[str, int, int]]:
    """The spans of a response, `[{"version", "start", "end"}, …]`, as tuples; raises `ValueError` or similar if invalid."""
    return [(str(span["version"]), span["start"], span["end"]) for span in spans or ()]


def mixed_cache_tokens(versions: Ids, cached_for: int, cached_tokens: int) -> int:
    """How many tokens of one call have a context that may have been computed under older weights.

    `cached_for` is the version whose prefix cache the call could read, `cached_tokens` what it took from there. Tokens
    after a change of weights count, since a server may keep the keys and values of what came before: servers that compute
    them again do not say so.
    """
    if len(versions) == 0:
        return 0
    first = int(versions[0])
    if first > cached_for and cached_tokens:
        return len(versions)
    return int(np.count_nonzero(versions > first))
