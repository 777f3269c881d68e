"""OpenCode: a coding agent that speaks all four dialects through its bundled adapters.

It requests a title beside the first turn: a `side` call, not trained. Options: `dialect`; `config` is merged into its
configuration; `args` are added to its command.
"""

from __future__ import annotations

import json

from towline.common.mappings import deep_merge
from towline.harnesses.base import Harness, Launch, LaunchContext, Npm

VERSION = "1.18.33"
_PROGRAM = "node_modules/opencode-ai/bin/opencode.exe"
_ADAPTERS = {
    "chat": ("@ai-sdk/openai-compatible", "/v1"),
    "responses": ("@ai-sdk/openai", "/v1"),
    "messages": ("@ai-sdk/anthropic", "/v1"),
    "google": ("@ai-sdk/google", "/v1beta"),
}


def launch(ctx: LaunchContext) -> Launch:
    adapter, path = _ADAPTERS[ctx.options["dialect"]]
    model = {
        "name": ctx.model,
        "reasoning": True,
        "tool_call": True,
        "limit": {"context": ctx.context, "output": ctx.max_tokens},
        "cost": {"input": 0, "output": 0},
    }
    provider = {
        "npm": adapter,
        "name": "towline",
        "options": {"baseURL": ctx.base_url + path, "apiKey": ctx.key, "timeout": False},
        "models": {ctx.model: model},
    }
    config = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {"towline": provider},
        "enabled_providers": ["towline"],
        "model": f"towline/{ctx.model}",
        "small_model": f"towline/{ctx.model}",
        "permission": "allow",
        "autoupdate": False,
        "share": "disabled",
    }
    names = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS", "SHARE")
    command = [f"{ctx.install}/{_PROGRAM}", "run", "--model", f"towline/{ctx.model}"]
    command += [*ctx.options["args"], *(["--continue"] if ctx.resume else [])]
    return Launch(
        command=tuple(command),
        env={f"OPENCODE_DISABLE_{name}": "1" for name in names},
        # As an argument it would be quoted.
        stdin=ctx.instruction,
        files={f"{ctx.home}/.config/opencode/opencode.json": json.dumps(deep_merge(config, ctx.options["config"]))},
    )


HARNESS = Harness(
    name="opencode",
    summary="OpenCode, an open-source coding agent (four dialects)",
    launch=launch,
    install=Npm((f"opencode-ai@{VERSION}",), scripts=True, lock="opencode"),
    version=VERSION,
    dialects=("chat", "responses", "messages", "google"),
    options={"dialect": "chat", "config": {}, "args": []},
    resumes=True,
)
