"""Hermes Agent: chat completions, streamed.

Its configuration is one YAML file, written here as JSON, which is valid YAML. Its network lookups (updates, a model
catalogue) are off, and so is the extra call that generates a title for each session.
"""

from __future__ import annotations

import json
from typing import Any

from towline.common.mappings import deep_merge
from towline.errors import ConfigError
from towline.harnesses.base import Harness, Launch, LaunchContext, PyPI

VERSION = "0.19.0"
_TIMEOUT = 3600
"""Seconds without a token: a call may wait long while the policy is updated."""
_MAX_BYTES = 120_000
"""Maximum number of bytes of an instruction; a Linux command-line argument holds at most 128 KiB."""
_MIN_CONTEXT = 64_000
"""The smallest context that it starts with, in tokens."""


def launch(ctx: LaunchContext) -> Launch:
    if len(ctx.instruction.encode("utf-8", "replace")) > _MAX_BYTES:
        raise ConfigError(
            f"harness hermes takes its instruction as a command-line argument of at most {_MAX_BYTES} bytes; "
            "put longer text into a file of the task's environment"
        )
    folder = f"{ctx.home}/.hermes"
    config: dict[str, Any] = {
        "model": {
            "default": ctx.model,
            "provider": "custom",
            "base_url": f"{ctx.base_url}/v1",
            "api_key": ctx.key,
            # It accepts nothing smaller; if the real context is, the gateway says so and it compacts.
            "context_length": max(ctx.context, _MIN_CONTEXT),
            "max_tokens": ctx.max_tokens,
        },
        "auxiliary": {"title_generation": {"enabled": False}},
        "model_catalog": {"enabled": False},
        "curator": {"enabled": False},
        "security": {"tirith_enabled": False, "allow_lazy_installs": False},
        "agent": {"max_turns": ctx.options["max_turns"], "local_stream_stale_timeout": _TIMEOUT},
    }
    # It asks PyPI for a newer version unless it did so less than six hours ago.
    last_check = {"ts": 1e11, "behind": 0, "rev": None, "ver": VERSION}
    command = [f"{ctx.install}/bin/python3", "-I", f"{ctx.install}/bin/hermes", "chat", "--quiet", "--yolo"]
    command += ["--provider", "custom", "--model", ctx.model, *(["--continue"] if ctx.resume else [])]
    if ctx.options["toolsets"]:
        command += ["--toolsets", ",".join(ctx.options["toolsets"])]
    return Launch(
        command=(*command, f"--query={ctx.instruction}"),
        env={"HERMES_HOME": folder, "HERMES_API_TIMEOUT": str(_TIMEOUT)},
        files={
            f"{folder}/config.yaml": json.dumps(deep_merge(config, ctx.options["config"]), indent=2),
            f"{folder}/.update_check": json.dumps(last_check),
        },
    )


HARNESS = Harness(
    name="hermes",
    summary="Hermes Agent (Nous Research)",
    version=VERSION,
    install=PyPI((f"hermes-agent=={VERSION}",), lock="hermes"),
    launch=launch,
    resumes=True,
    options={"max_turns": 90, "toolsets": [], "config": {}},
)
"""Options: `toolsets` selects some of its tool sets (default: all); `config` is merged into its configuration."""
