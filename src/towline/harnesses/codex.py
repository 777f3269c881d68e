"""Codex: OpenAI's coding agent, over the responses dialect.

Options: `compact_at` is the number of tokens at which it compacts (default: 90% of the context); `config` overrides its
configuration by dotted names. JSON strings, numbers, booleans and lists are valid TOML too.
"""

from __future__ import annotations

import json

from towline.harnesses.base import Harness, Launch, LaunchContext, Npm

VERSION = "0.166.0"
_PROGRAM = "node_modules/@openai/codex/bin/codex.js"
_KEY = "TOWLINE_KEY"


def launch(ctx: LaunchContext) -> Launch:
    compact_at = ctx.options["compact_at"] or ctx.context * 9 // 10
    config = {
        "model": ctx.model,
        "model_provider": "towline",
        "model_context_window": ctx.context,
        "model_auto_compact_token_limit": compact_at,
        "model_reasoning_effort": ctx.options["effort"],
        "check_for_update_on_startup": False,
        "web_search": "disabled",
        # It looks for plugins on the network, and would wait for that before it exits.
        "features.plugins": False,
        "analytics.enabled": False,
        "feedback.enabled": False,
        "otel.exporter": "none",
        "history.persistence": "none",
        "model_providers.towline.name": "towline",
        "model_providers.towline.base_url": f"{ctx.base_url}/v1",
        "model_providers.towline.env_key": _KEY,
        "model_providers.towline.wire_api": "responses",
        # An engine may take longer than the default five minutes between two events.
        "model_providers.towline.stream_idle_timeout_ms": 3_600_000,
        **ctx.options["config"],
    }
    lines = (f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in config.items())
    command = [f"{ctx.install}/bin/node", f"{ctx.install}/{_PROGRAM}", "exec"]
    command += ["resume", "--last"] if ctx.resume else ["--color", "never"]
    command += ["--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check"]
    command += [*ctx.options["args"], "-"]
    return Launch(
        command=tuple(command),
        stdin=ctx.instruction,
        env={_KEY: ctx.key, "CODEX_HOME": f"{ctx.home}/.codex"},
        files={f"{ctx.home}/.codex/config.toml": "".join(lines)},
    )


HARNESS = Harness(
    name="codex",
    summary="Codex, OpenAI's coding agent (responses)",
    launch=launch,
    install=Npm((f"@openai/codex@{VERSION}",), lock="codex"),
    version=VERSION,
    dialects=("responses",),
    options={"effort": "medium", "compact_at": 0, "config": {}, "args": []},
    resumes=True,
)
