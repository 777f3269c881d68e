"""Claude Code: Anthropic's coding agent, over the messages dialect."""

from __future__ import annotations

import json

from towline.harnesses.base import Harness, Launch, Npm, Place

VERSION = "2.1.325"
_PROGRAM = "node_modules/@anthropic-ai/claude-code/bin/claude.exe"


def launch(place: Place) -> Launch:
    model = place.model
    env = {
        "ANTHROPIC_BASE_URL": place.base_url,
        "ANTHROPIC_API_KEY": place.key,
        "ANTHROPIC_MODEL": model,
        # Every model that it would choose by itself is the one there is.
        **{f"ANTHROPIC_DEFAULT_{family}_MODEL": model for family in ("HAIKU", "SONNET", "OPUS")},
        "CLAUDE_CODE_SUBAGENT_MODEL": model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(place.context),
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(place.options["compact_at"] or place.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(place.max_tokens),
        # Without it, it refuses to skip permissions as root.
        "IS_SANDBOX": "1",
        # It gives up after ten minutes of pings otherwise.
        "CLAUDE_ENABLE_STREAM_WATCHDOG": "0",
        "API_TIMEOUT_MS": "3600000",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        # The line that changes on every call.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        **place.options["env"],
    }
    command = [f"{place.install}/{_PROGRAM}", "-p", "--dangerously-skip-permissions"]
    command += [*place.options["args"], *(["--continue"] if place.resume else [])]
    state = {"hasCompletedOnboarding": True, "autoUpdates": False, "bypassPermissionsModeAccepted": True}
    files = {} if place.resume else {f"{place.home}/.claude.json": json.dumps(state)}
    return Launch(command=tuple(command), env=env, files=files, stdin=place.instruction)


HARNESS = Harness(
    name="claude_code",
    summary="Claude Code, Anthropic's coding agent (messages)",
    launch=launch,
    install=Npm((f"@anthropic-ai/claude-code@{VERSION}",), scripts=True),
    version=VERSION,
    dialects=("messages",),
    options={"compact_at": 0, "env": {}, "args": []},
    resumes=True,
)
