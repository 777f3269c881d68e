"""The adapters import their frameworks when they are used, not when they are imported."""

from __future__ import annotations

import subprocess
import sys

ADAPTERS = ("areal", "nemo_gym", "nemo_rl", "packing", "prime_rl", "skyrl", "slime", "tinker", "trl", "verl")
FRAMEWORKS = ("torch", "safetensors", "transformers", "accelerate", "ray")
FRAMEWORKS += ("areal", "nemo_gym", "prime_rl", "skyrl", "slime", "miles", "tinker", "trl", "verifiers", "verl")


def test_adapters_import_without_their_frameworks() -> None:
    code = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({FRAMEWORKS!r}))\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(f'towline.trainers.{name}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *ADAPTERS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
