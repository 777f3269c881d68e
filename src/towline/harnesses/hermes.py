"""Hermes Agent: chat completions, streamed.

Its configuration is one YAML file, written here as JSON, which is YAML. What it would look up outside (updates, a catalogue
of models) is off. It generates a title of each session with a call of its own; nobody reads it here, so that is off too.
"""

from __future__ import annotations

import json
from typing import Any

from towline.errors import ConfigError
from towline.harnesses.base import Harness, Launch, Place, PyPI, laid_over

VERSION = "0.19.0"
_PATIENCE = 3600
"""Seconds without a token: a policy that is being updated may let a call wait for long."""
_LONGEST = 120_000
"""Bytes of an instruction; Linux takes no word of more than 128 KiB."""
_SMALLEST = 64_000
"""Tokens of a context."""


def launch(place: Place) -> Launch:
    if len(place.instruction.encode("utf-8", "replace")) > _LONGEST:
        raise ConfigError(
            f"harness hermes takes its instruction as a word of a command, which holds {_LONGEST} bytes; "
            "put what is long into a file of the task's environment"
        )
    folder = f"{place.home}/.hermes"
    config: dict[str, Any] = {
        "model": {
            "default": place.model,
            "provider": "custom",
            "base_url": f"{place.base_url}/v1",
            "api_key": place.key,
            # It starts with nothing smaller; where there is less, the gateway says so and it compacts.
            "context_length": max(place.context, _SMALLEST),
            "max_tokens": place.max_tokens,
        },
        "auxiliary": {"title_generation": {"enabled": False}},
        "model_catalog": {"enabled": False},
        "curator": {"enabled": False},
        "security": {"tirith_enabled": False, "allow_lazy_installs": False},
        "agent": {"max_turns": place.options["max_turns"], "local_stream_stale_timeout": _PATIENCE},
    }
    # It asks PyPI for a newer version unless it remembers to have asked less than six hours ago.
    asked = {"ts": 1e11, "behind": 0, "rev": None, "ver": VERSION}
    command = [f"{place.install}/bin/python3", "-I", f"{place.install}/bin/hermes", "chat", "--quiet", "--yolo"]
    command += ["--provider", "custom", "--model", place.model, *(["--continue"] if place.resume else [])]
    if place.options["toolsets"]:
        command += ["--toolsets", ",".join(place.options["toolsets"])]
    return Launch(
        command=(*command, f"--query={place.instruction}"),
        env={"HERMES_HOME": folder, "HERMES_API_TIMEOUT": str(_PATIENCE)},
        files={
            f"{folder}/config.yaml": json.dumps(laid_over(config, place.options["config"]), indent=2),
            f"{folder}/.update_check": json.dumps(asked),
        },
    )


HARNESS = Harness(
    name="hermes",
    summary="Hermes Agent (Nous Research)",
    version=VERSION,
    install=PyPI((f"hermes-agent=={VERSION}",)),
    launch=launch,
    resumes=True,
    options={"max_turns": 90, "toolsets": [], "config": {}},
)
"""Options: `toolsets` limits it to those of its tool sets; `config` is laid over its configuration."""
