"""OpenClaw: chat completions, streamed; its embedded agent, without its message channels and its own gateway process.

It ends every prompt with a user message that is missing from the next request, so no turn would be a prefix of the next
one: with `vanishing: keep` that note stays where it was when the turn was sampled, and the session is one chain.
"""

from __future__ import annotations

import json
from typing import Any

from towline.common.mappings import deep_merge
from towline.harnesses.base import Harness, Launch, LaunchContext, Npm

VERSION = "2026.9.6"


def launch(ctx: LaunchContext) -> Launch:
    state = f"{ctx.home}/.openclaw"
    model: dict[str, Any] = {
        "id": ctx.model,
        "name": ctx.model,
        "reasoning": True,
        "input": ["text"],
        "contextWindow": ctx.context,
        "maxTokens": ctx.max_tokens,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    provider = {
        "baseUrl": f"{ctx.base_url}/v1",
        "apiKey": ctx.key,
        "api": "openai-completions",
        # Without a token: a call may wait long while the policy is updated.
        "timeoutSeconds": 3600,
        "models": [model],
    }
    config: dict[str, Any] = {
        "models": {
            "mode": "replace",
            "providers": {"towline": provider},
            "catalogRefresh": {"enabled": False},
        },
        "agents": {
            "defaults": {
                "workspace": ctx.workdir,
                "model": {"primary": f"towline/{ctx.model}"},
                "skipBootstrap": True,
            }
        },
        "tools": {"profile": "coding", "exec": {"security": "full", "ask": "off"}},
        "discovery": {"mdns": {"mode": "off"}},
        "telemetry": {"enabled": False},
        "update": {"checkOnStart": False},
    }
    command = [f"{ctx.install}/bin/node", f"{ctx.install}/node_modules/openclaw/openclaw.mjs", "agent", "--local"]
    command += ["--session-id", "towline", "--message-file", f"{state}/instruction.txt"]
    command += ["--thinking", ctx.options["thinking"], "--timeout", str(ctx.options["seconds"])]
    return Launch(
        command=tuple(command),
        env={
            "OPENCLAW_STATE_DIR": state,
            "OPENCLAW_CONFIG_PATH": f"{state}/openclaw.json",
            "OPENCLAW_NO_AUTO_UPDATE": "1",
            "OPENCLAW_OFFLINE": "1",
            "OPENCLAW_DISABLE_BONJOUR": "1",
        },
        files={
            f"{state}/openclaw.json": json.dumps(deep_merge(config, ctx.options["config"]), indent=2),
            f"{state}/instruction.txt": ctx.instruction,
        },
    )


HARNESS = Harness(
    name="openclaw",
    summary="OpenClaw, its embedded agent",
    version=VERSION,
    # Otherwise it completes its install at the first start, which a read-only install does not allow.
    install=Npm((f"openclaw@{VERSION}",), scripts=True, lock="openclaw"),
    launch=launch,
    resumes=True,
    options={"thinking": "low", "seconds": 86_400, "config": {}},
    settings={"vanishing": "keep"},
)
"""Options: `config` is merged into its configuration; `seconds` is its own limit for one user turn."""
