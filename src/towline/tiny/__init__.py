"""A tiny model made from nothing: tokenizer, template, weights, and seconds of format warm-up.

It is what `towline demo` serves, and `towline gateway` without `--model`. Its vocabulary is small, since on a CPU a large
one is what costs; it knows the format of the registry's calls and answers, and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib import resources
from pathlib import Path

from towline.errors import ConfigError

STEPS = 800
"""Warm-up steps of the default model."""
_STAMP = "towline-tiny.json"

Progress = Callable[[int, int, str], None]


def default_folder() -> Path:
    """Where the tiny model is kept: the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "towline" / "tiny"


def create(folder: Path, *, seed: int = 0, steps: int = STEPS, progress: Progress | None = None) -> Path:
    """Make the model, or leave it as it is if it was made by this very recipe. It is there wholly or not at all."""
    recipe = _recipe(seed, steps)
    stamp = folder / _STAMP
    if stamp.is_file() and json.loads(stamp.read_text()).get("recipe") == recipe:
        return folder
    if folder.exists() and not stamp.is_file() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty and holds no tiny model; choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _make(made, seed, steps, progress)
        (made / _STAMP).write_text(json.dumps({"recipe": recipe, "seed": seed, "steps": steps}) + "\n")
        made.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _make(folder: Path, seed: int, steps: int, progress: Progress | None) -> None:
    try:
        import torch

        from towline.engines.embedded import DecoderConfig, create, save
    except ImportError as error:
        raise ConfigError("the tiny model needs torch: pip install 'towline[torch]'") from error
    from towline.tiny import tokenizer
    from towline.tiny.warmup import warm_up
    from towline.tokens.loading import load_codec

    tokenizer.write(folder)
    codec = load_codec(folder, renderer="sentinel")
    config = DecoderConfig(
        "qwen3",
        codec.tokenizer.size,
        128,
        256,
        2,
        4,
        4,
        32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.08,
    )
    decoder = create(config, seed)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            if name.endswith("q_norm.weight"):
                # Sharp attention from the start: looking things up is all that this model has to learn.
                weight.fill_(3.0)
    threads = torch.get_num_threads()
    # So small a model gains nothing from a second thread, and loses much when the machine is busy.
    torch.set_num_threads(1)
    try:
        warm_up(decoder, codec, seed=seed, steps=steps, progress=progress)
    finally:
        torch.set_num_threads(threads)
    save(decoder, folder)
    ends = sorted(codec.stop_ids)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}) + "\n")


def _recipe(seed: int, steps: int) -> str:
    """A hash of everything the model is made from."""
    digest = hashlib.sha256(f"{seed} {steps}".encode())
    for file in sorted(resources.files("towline.tiny").iterdir(), key=lambda file: file.name):
        if file.name.endswith((".py", ".jinja")):
            digest.update(file.read_bytes())
    return digest.hexdigest()
