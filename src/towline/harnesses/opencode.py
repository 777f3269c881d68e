"""OpenCode: a coding agent that speaks all four dialects through the adapters it is built with."""

from __future__ import annotations

import json

from towline.harnesses.base import Harness, Launch, Npm, Place, laid_over

VERSION = "1.18.33"
_PROGRAM = "node_modules/opencode-ai/bin/opencode.exe"
_ADAPTERS = {
    "chat": ("@ai-sdk/openai-compatible", "/v1"),
    "responses": ("@ai-sdk/openai", "/v1"),
    "messages": ("@ai-sdk/anthropic", "/v1"),
    "google": ("@ai-sdk/google", "/v1beta"),
}


def launch(place: Place) -> Launch:
    adapter, path = _ADAPTERS[place.options["dialect"]]
    model = {
        "name": place.model,
        "reasoning": True,
        "tool_call": True,
        "limit": {"context": place.context, "output": place.max_tokens},
        "cost": {"input": 0, "output": 0},
    }
    provider = {
        "npm": adapter,
        "name": "towline",
        "options": {"baseURL": place.base_url + path, "apiKey": place.key, "timeout": False},
        "models": {place.model: model},
    }
    config = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {"towline": provider},
        "enabled_providers": ["towline"],
        "model": f"towline/{place.model}",
        "small_model": f"towline/{place.model}",
        "permission": "allow",
        "autoupdate": False,
        "share": "disabled",
    }
    names = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS", "SHARE")
    command = [f"{place.install}/{_PROGRAM}", "run", "--model", f"towline/{place.model}"]
    command += [*place.options["args"], *(["--continue"] if place.resume else [])]
    return Launch(
        command=tuple(command),
        env={f"OPENCODE_DISABLE_{name}": "1" for name in names},
        # As an argument it would be put in quotes.
        stdin=place.instruction,
        files={f"{place.home}/.config/opencode/opencode.json": json.dumps(laid_over(config, place.options["config"]))},
    )


HARNESS = Harness(
    name="opencode",
    summary="OpenCode, an open-source coding agent (four dialects)",
    launch=launch,
    install=Npm((f"opencode-ai@{VERSION}",), scripts=True),
    version=VERSION,
    dialects=("chat", "responses", "messages", "google"),
    options={"dialect": "chat", "config": {}, "args": []},
    resumes=True,
)
