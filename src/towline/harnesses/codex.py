"""Codex: OpenAI's coding agent, over the responses dialect.

Options: `compact_at` is how many tokens make it compact, nine tenths of the context by default; `config` is laid over its
configuration by dotted names. JSON strings, numbers, booleans and lists are TOML as well.
"""

from __future__ import annotations

import json

from towline.harnesses.base import Harness, Launch, Npm, Place

VERSION = "0.166.0"
_PROGRAM = "node_modules/@openai/codex/bin/codex.js"
_KEY = "TOWLINE_KEY"


def launch(place: Place) -> Launch:
    compact_at = place.options["compact_at"] or place.context * 9 // 10
    config = {
        "model": place.model,
        "model_provider": "towline",
        "model_context_window": place.context,
        "model_auto_compact_token_limit": compact_at,
        "model_reasoning_effort": place.options["effort"],
        "check_for_update_on_startup": False,
        "web_search": "disabled",
        # They are looked for outside, and the program would wait for that at its end.
        "features.plugins": False,
        "analytics.enabled": False,
        "feedback.enabled": False,
        "otel.exporter": "none",
        "history.persistence": "none",
        "model_providers.towline.name": "towline",
        "model_providers.towline.base_url": f"{place.base_url}/v1",
        "model_providers.towline.env_key": _KEY,
        "model_providers.towline.wire_api": "responses",
        # An engine may think longer than the usual five minutes between two events.
        "model_providers.towline.stream_idle_timeout_ms": 3_600_000,
        **place.options["config"],
    }
    lines = (f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in config.items())
    command = [f"{place.install}/bin/node", f"{place.install}/{_PROGRAM}", "exec"]
    command += ["resume", "--last"] if place.resume else ["--color", "never"]
    command += ["--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check"]
    command += [*place.options["args"], "-"]
    return Launch(
        command=tuple(command),
        stdin=place.instruction,
        env={_KEY: place.key, "CODEX_HOME": f"{place.home}/.codex"},
        files={f"{place.home}/.codex/config.toml": "".join(lines)},
    )


HARNESS = Harness(
    name="codex",
    summary="Codex, OpenAI's coding agent (responses)",
    launch=launch,
    install=Npm((f"@openai/codex@{VERSION}",)),
    version=VERSION,
    dialects=("responses",),
    options={"effort": "medium", "compact_at": 0, "config": {}, "args": []},
    resumes=True,
)
