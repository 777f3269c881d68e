"""A tiny model made from nothing: tokenizer, template, weights, and seconds of format warm-up.

It is what `towline demo` serves, and `towline gateway` without `--model`. Its vocabulary is small, since on a CPU a large
one is what costs; it knows the format of the registry's calls and answers, and nothing about which of them is right.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path

from towline.errors import ConfigError

__all__ = ["STEPS", "Progress", "create", "default_folder"]

STEPS = 700
"""Warm-up steps of the default model."""
_STAMP = "towline-tiny.json"

Progress = Callable[[int, int, str], None]
"""Called with steps done, steps in all, and a word on how it goes."""


def default_folder() -> Path:
    """Where the tiny model is kept: the user's cache."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification: a relative path is to be ignored.
    return (base if base.is_absolute() else Path.home() / ".cache") / "towline" / "tiny"


def create(
    folder: Path, *, seed: int = 0, steps: int = STEPS, thinking: bool = False, progress: Progress | None = None
) -> Path:
    """Make a model folder in the Hugging Face layout, or leave it as it is if it was made by this very recipe.

    The weights have had a *format warm-up* and no more: with the default steps about 99% of the turns are well-formed calls
    and answers at temperature 1, and about one question in five is right, which is what repeating one of the mentions at
    random gives (`registry.CHANCE`). Getting questions right is left to reinforcement learning. With `thinking` every reply
    begins with a line of reasoning, for what depends on whether a harness sends reasoning back.

    The folder appears whole or not at all, and makers at the same time wait for each other. The same seed and steps give
    the same folder on one machine. Raises `ConfigError` if the folder holds something else.
    """
    folder = folder.absolute()
    recipe = _recipe(seed, steps, thinking)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        stamp = folder / _STAMP
        if stamp.is_file() and _stamped(stamp) == recipe:
            return folder
        if folder.exists() and not stamp.is_file() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} is not empty and holds no tiny model; choose another folder")
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            _make(made, seed, steps, thinking, progress)
            stamp_of = {"recipe": recipe, "seed": seed, "steps": steps, "thinking": thinking}
            (made / _STAMP).write_text(json.dumps(stamp_of) + "\n")
            if folder.exists():
                # No folder can be renamed over another: the old one is moved away, and goes with the scratch folder.
                folder.rename(Path(scratch) / "old")
            made.rename(folder)
    return folder


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock beside the folder, which ends with its holder."""
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _stamped(stamp: Path) -> str | None:
    """The recipe that a folder says it was made by."""
    try:
        recipe = json.loads(stamp.read_text()).get("recipe")
    except (ValueError, AttributeError):
        return None
    return recipe if isinstance(recipe, str) else None


def _recipe(seed: int, steps: int, thinking: bool) -> str:
    """A hash of everything the model is made from: this package's own files, and the arguments."""
    digest = hashlib.sha256(f"{seed} {steps} {thinking}".encode())
    for file in sorted(resources.files(__name__).iterdir(), key=lambda file: file.name):
        if file.name.endswith((".py", ".jinja")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _make(folder: Path, seed: int, steps: int, thinking: bool, progress: Progress | None) -> None:
    try:
        import torch

        from towline.engines.embedded import DecoderConfig, save
        from towline.engines.embedded import create as create_decoder
    except ImportError as error:
        raise ConfigError("the tiny model needs torch: pip install 'towline[torch]'") from error
    from towline.tiny import tokenizer
    from towline.tiny.warmup import warm_up
    from towline.tokens.loading import load_codec

    tokenizer.write(folder)
    codec = load_codec(folder, renderer="sentinel")
    config = DecoderConfig(
        model_type="qwen3",
        vocab_size=codec.tokenizer.size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=4096,
        # Positions are told apart within some hundred tokens, which is all that a session has.
        rope_theta=1000.0,
        tie_word_embeddings=True,
        # Near 1 / sqrt(hidden): from weights that start smaller, copying is learned many times more slowly.
        initializer_range=0.08,
    )
    decoder = create_decoder(config, seed)
    threads = torch.get_num_threads()
    # So small a model gains little from a second thread and loses much when the machine is busy; and with one, what
    # comes out does not depend on how many there are.
    torch.set_num_threads(1)
    try:
        warm_up(decoder, codec, seed=seed, steps=steps, thinking=thinking, progress=progress)
    finally:
        torch.set_num_threads(threads)
    save(decoder, folder)
    generation = {"eos_token_id": sorted(codec.stop_ids), "do_sample": True, "temperature": 1.0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
