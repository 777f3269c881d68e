"""Pi: small, quick, and at home in all four dialects."""

from __future__ import annotations

import json

from towline.harnesses.base import Harness, Launch, Npm, Place

VERSION = "0.87.1"
_PROGRAM = "node_modules/@earendil-works/pi-coding-agent/dist/bundle/cli.js"
_APIS = {
    "chat": ("openai-completions", "/v1"),
    "responses": ("openai-responses", "/v1"),
    "messages": ("anthropic-messages", ""),
    "google": ("google-generative-ai", "/v1beta"),
}


def launch(place: Place) -> Launch:
    api, path = _APIS[place.options["dialect"]]
    model = {
        "id": place.model,
        "name": place.model,
        "reasoning": place.options["thinking"] != "off",
        "input": ["text"],
        "contextWindow": place.context,
        "maxTokens": place.max_tokens,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    provider = {"baseUrl": place.base_url + path, "api": api, "apiKey": place.key, "models": [model]}
    command = [f"{place.install}/bin/node", f"{place.install}/{_PROGRAM}", "-p", "--approve"]
    command += ["--provider", "towline", "--model", place.model, "--thinking", place.options["thinking"]]
    command += [*place.options["args"], *(["--continue"] if place.resume else [])]
    return Launch(
        command=tuple(command),
        stdin=place.instruction,
        env={"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1", "PI_TELEMETRY": "0"},
        files={f"{place.home}/.pi/agent/models.json": json.dumps({"providers": {"towline": provider}})},
    )


HARNESS = Harness(
    name="pi",
    summary="Pi, a small coding agent (four dialects)",
    launch=launch,
    install=Npm((f"@earendil-works/pi-coding-agent@{VERSION}",)),
    version=VERSION,
    dialects=("chat", "responses", "messages", "google"),
    options={"dialect": "chat", "thinking": "medium", "args": []},
    resumes=True,
)
