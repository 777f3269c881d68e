"""Pi: a small, fast coding agent that speaks all four dialects."""

from __future__ import annotations

import json

from towline.harnesses.base import Harness, Launch, LaunchContext, Npm

VERSION = "0.87.1"
_PROGRAM = "node_modules/@earendil-works/pi-coding-agent/dist/bundle/cli.js"
_APIS = {
    "chat": ("openai-completions", "/v1"),
    "responses": ("openai-responses", "/v1"),
    "messages": ("anthropic-messages", ""),
    "google": ("google-generative-ai", "/v1beta"),
}


def launch(ctx: LaunchContext) -> Launch:
    api, path = _APIS[ctx.options["dialect"]]
    model = {
        "id": ctx.model,
        "name": ctx.model,
        "reasoning": ctx.options["thinking"] != "off",
        "input": ["text"],
        "contextWindow": ctx.context,
        "maxTokens": ctx.max_tokens,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    provider = {"baseUrl": ctx.base_url + path, "api": api, "apiKey": ctx.key, "models": [model]}
    command = [f"{ctx.install}/bin/node", f"{ctx.install}/{_PROGRAM}", "-p", "--approve"]
    command += ["--provider", "towline", "--model", ctx.model, "--thinking", ctx.options["thinking"]]
    command += [*ctx.options["args"], *(["--continue"] if ctx.resume else [])]
    return Launch(
        command=tuple(command),
        stdin=ctx.instruction,
        env={"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1", "PI_TELEMETRY": "0"},
        files={f"{ctx.home}/.pi/agent/models.json": json.dumps({"providers": {"towline": provider}})},
    )


HARNESS = Harness(
    name="pi",
    summary="Pi, a small coding agent (four dialects)",
    launch=launch,
    install=Npm((f"@earendil-works/pi-coding-agent@{VERSION}",), lock="pi"),
    version=VERSION,
    dialects=("chat", "responses", "messages", "google"),
    options={"dialect": "chat", "thinking": "medium", "args": []},
    resumes=True,
)
