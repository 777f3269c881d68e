"""The tiny model, created from scratch: tokenizer, template, weights, and a short format warm-up.

`towline demo` serves it, and so does `towline gateway` without `--model`. Its vocabulary is small, since a large one
dominates the cost on a CPU. It knows the format of the registry's calls and answers, but not which of them are right.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path

from towline.common.files import replace_folder, user_cache_folder
from towline.errors import ConfigError

__all__ = ["WARMUP_STEPS", "ProgressCallback", "create", "default_folder"]

WARMUP_STEPS = 700
"""Warm-up steps of the default model."""
_STAMP = "towline-tiny.json"
_RECIPE_FILES = ("chat_template.jinja", "registry.py", "tiny_model.py", "tokenizer.py", "warmup.py")
"""What the model is made from: a change in any of them recreates it."""

ProgressCallback = Callable[[int, int, str], None]
"""Called with steps done, total steps, and a status text."""


def default_folder() -> Path:
    """The tiny model's folder in the user's cache."""
    return user_cache_folder("tiny")


def create(
    folder: Path,
    *,
    seed: int = 0,
    steps: int = WARMUP_STEPS,
    thinking: bool = False,
    progress: ProgressCallback | None = None,
) -> Path:
    """Create a model folder in the Hugging Face layout; a folder made by the same recipe is left as it is.

    The weights have had only a *format warm-up*: with the default steps about 99% of the turns are well-formed calls and
    answers at temperature 1, and about one question in five is right, the rate of repeating one of the mentioned words at
    random (`registry.CHANCE`). Getting questions right is left to reinforcement learning. With `thinking` every reply
    begins with a line of reasoning, for experiments on whether a harness sends reasoning back.

    The folder is created atomically, and concurrent callers wait for each other. The same seed and steps give the same
    folder on one machine. Raises `ConfigError` if the folder holds something else.
    """
    folder = folder.absolute()
    recipe = _recipe(seed, steps, thinking)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        stamp = folder / _STAMP
        if stamp.is_file() and _stamped(stamp) == recipe:
            return folder
        if folder.exists() and not stamp.is_file() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} is not empty and holds no tiny model: choose another folder")
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            _build(made, seed, steps, thinking, progress)
            stamp_of = {"recipe": recipe, "seed": seed, "steps": steps, "thinking": thinking}
            (made / _STAMP).write_text(json.dumps(stamp_of) + "\n")
            replace_folder(made, folder)
    return folder


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock file beside the folder; the kernel releases it if the process dies."""
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _stamped(stamp: Path) -> str | None:
    """The recipe recorded in a folder's stamp."""
    try:
        recipe = json.loads(stamp.read_text()).get("recipe")
    except (ValueError, AttributeError):
        return None
    return recipe if isinstance(recipe, str) else None


def _recipe(seed: int, steps: int, thinking: bool) -> str:
    """A hash of the recipe's files and the arguments."""
    digest = hashlib.sha256(f"{seed} {steps} {thinking}".encode())
    for name in _RECIPE_FILES:
        digest.update(resources.files("towline.demo").joinpath(name).read_bytes())
    return digest.hexdigest()


def _build(folder: Path, seed: int, steps: int, thinking: bool, progress: ProgressCallback | None) -> None:
    try:
        import torch

        from towline.engines.embedded import DecoderConfig, create_decoder, save_decoder
    except ImportError as error:
        raise ConfigError("the tiny model needs torch: pip install 'towline[torch]'") from error
    from towline.demo import tokenizer
    from towline.demo.warmup import warm_up
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
        # Resolves positions within a few hundred tokens, the length of a session.
        rope_theta=1000.0,
        tie_word_embeddings=True,
        # Near 1 / sqrt(hidden): with smaller initial weights the model learns to copy many times more slowly.
        initializer_range=0.08,
    )
    decoder = create_decoder(config, seed)
    threads = torch.get_num_threads()
    # So small a model gains little from a second thread and loses much on a busy machine; and with one thread the result
    # does not depend on the number of cores.
    torch.set_num_threads(1)
    try:
        warm_up(decoder, codec, seed=seed, steps=steps, thinking=thinking, progress=progress)
    finally:
        torch.set_num_threads(threads)
    save_decoder(decoder, folder)
    generation = {"eos_token_id": sorted(codec.stop_ids), "do_sample": True, "temperature": 1.0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
