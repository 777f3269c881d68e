"""Claude Code: Anthropic's coding agent, over the messages dialect.

Sub-agents run beside the main conversation; `/compact` is an instruction. The changing attribution header is switched off,
and ignored as `noise` where it appears. Options: `compact_at` is the context size at which it compacts (default: the
model's context); `env` and `args` are added to its environment and command.
"""

from __future__ import annotations

import json

from towline.harnesses.base import Harness, Launch, LaunchContext, Npm

VERSION = "2.1.325"
_PROGRAM = "node_modules/@anthropic-ai/claude-code/bin/claude.exe"

_NOISE = [
    # The attribution header: the first line of the system prompt, different on every call. `launch` switches it off; a
    # version or an `env` option that brings it back must not fork every call.
    r"(?m)^x-anthropic-billing-header:[^\n]*\n?",
]


def launch(ctx: LaunchContext) -> Launch:
    model = ctx.model
    env = {
        "ANTHROPIC_BASE_URL": ctx.base_url,
        "ANTHROPIC_API_KEY": ctx.key,
        "ANTHROPIC_MODEL": model,
        # Every model that it would pick by itself is the one that is served.
        **{f"ANTHROPIC_DEFAULT_{family}_MODEL": model for family in ("HAIKU", "SONNET", "OPUS")},
        "CLAUDE_CODE_SUBAGENT_MODEL": model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(ctx.context),
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(ctx.options["compact_at"] or ctx.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(ctx.max_tokens),
        # Without this it refuses to skip permissions as root.
        "IS_SANDBOX": "1",
        # Otherwise it gives up after ten minutes of pings.
        "CLAUDE_ENABLE_STREAM_WATCHDOG": "0",
        "API_TIMEOUT_MS": "3600000",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        # No `x-anthropic-billing-header` line in the system prompt (see `_NOISE`).
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        **ctx.options["env"],
    }
    command = [f"{ctx.install}/{_PROGRAM}", "-p", "--dangerously-skip-permissions"]
    command += [*ctx.options["args"], *(["--continue"] if ctx.resume else [])]
    state = {"hasCompletedOnboarding": True, "autoUpdates": False, "bypassPermissionsModeAccepted": True}
    files = {} if ctx.resume else {f"{ctx.home}/.claude.json": json.dumps(state)}
    return Launch(command=tuple(command), env=env, files=files, stdin=ctx.instruction)


HARNESS = Harness(
    name="claude_code",
    summary="Claude Code, Anthropic's coding agent (messages)",
    launch=launch,
    install=Npm((f"@anthropic-ai/claude-code@{VERSION}",), scripts=True, lock="claude_code"),
    version=VERSION,
    dialects=("messages",),
    options={"compact_at": 0, "env": {}, "args": []},
    resumes=True,
    settings={"noise": _NOISE},
)
