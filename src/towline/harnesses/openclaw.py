"""OpenClaw: chat completions, streamed; its embedded agent, without its message channels and its own gateway process.

It ends every prompt with a user message that is gone from the next request, so no turn is ever a prefix of the next one:
with `vanishing: keep` that note stays where it was sampled under, and the session is one chain.
"""

from __future__ import annotations

import json
from typing import Any

from towline.harnesses.base import Harness, Launch, Npm, Place, laid_over

VERSION = "2026.9.6"


def launch(place: Place) -> Launch:
    state = f"{place.home}/.openclaw"
    model: dict[str, Any] = {
        "id": place.model,
        "name": place.model,
        "reasoning": True,
        "input": ["text"],
        "contextWindow": place.context,
        "maxTokens": place.max_tokens,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    provider = {
        "baseUrl": f"{place.base_url}/v1",
        "apiKey": place.key,
        "api": "openai-completions",
        # Without a token: a policy that is being updated may let a call wait for long.
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
                "workspace": place.workdir,
                "model": {"primary": f"towline/{place.model}"},
                "skipBootstrap": True,
            }
        },
        "tools": {"profile": "coding", "exec": {"security": "full", "ask": "off"}},
        "discovery": {"mdns": {"mode": "off"}},
        "telemetry": {"enabled": False},
        "update": {"checkOnStart": False},
    }
    command = [f"{place.install}/bin/node", f"{place.install}/node_modules/openclaw/openclaw.mjs", "agent", "--local"]
    command += ["--session-id", "towline", "--message-file", f"{state}/instruction.txt"]
    command += ["--thinking", place.options["thinking"], "--timeout", str(place.options["seconds"])]
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
            f"{state}/openclaw.json": json.dumps(laid_over(config, place.options["config"]), indent=2),
            f"{state}/instruction.txt": place.instruction,
        },
    )


HARNESS = Harness(
    name="openclaw",
    summary="OpenClaw, its embedded agent",
    version=VERSION,
    # Its own script completes the install at first start otherwise, which a read-only install does not allow.
    install=Npm((f"openclaw@{VERSION}",), scripts=True),
    launch=launch,
    resumes=True,
    options={"thinking": "low", "seconds": 86_400, "config": {}},
    settings={"vanishing": "keep"},
)
"""Options: `config` is laid over its configuration; `seconds` is its own limit for one turn."""
