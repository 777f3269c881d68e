"""The models that score an audit: tiny, random, and kept with the rows so that anybody can compute the logprobs again.

There is one model a vocabulary, with two sets of weights that alternate: version 0 is the first, every weight update
goes to the other one. `versions.json` beside them says which version is which.

Invariant: the same seed and vocabulary give the same weights.
"""

from __future__ import annotations

import json
from pathlib import Path

from towline.engines.embedded import DecoderConfig, create, save

VERSIONS = "versions.json"
_SETS = ("a", "b")
CONTEXT = 49_152
"""The longest prompt with its reply."""


def config(vocabulary: int) -> DecoderConfig:
    """Small enough for a vocabulary of 150,000 on two cores.

    The weights are drawn wide, so that what a token is given depends on every token before it.
    """
    return DecoderConfig(
        model_type="qwen3",
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )


def make(out: Path, name: str, shape: DecoderConfig, seed: int) -> Path:
    """Create and save the weights of one vocabulary; returns their folder."""
    folder = out / f"model-{name}"
    for place, label in enumerate(_SETS):
        save(create(shape, seed * len(_SETS) + place), folder / label)
    note_versions(folder, 0)
    return folder


def weights(folder: Path, version: int) -> Path:
    """Where the weights of a version are."""
    return folder / _SETS[version % len(_SETS)]


def note_versions(folder: Path, last: int) -> None:
    """Write down which weights each version up to `last` is."""
    named = {str(version): weights(folder, version).name for version in range(last + 1)}
    (folder / VERSIONS).write_text(json.dumps(named, indent=2) + "\n", encoding="utf-8")


def read_versions(folder: Path) -> dict[int, Path]:
    """The folder of weights of each version."""
    named = json.loads((folder / VERSIONS).read_text(encoding="utf-8"))
    return {int(version): folder / name for version, name in named.items()}
