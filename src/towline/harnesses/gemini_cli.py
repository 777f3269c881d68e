"""Gemini CLI: Google's coding agent, over the google dialect.

Date and folder listing change on resume (`noise`). Options: `settings` is merged into its configuration; `args` are added
to its command.
"""

from __future__ import annotations

import json

from towline.common.mappings import deep_merge
from towline.harnesses.base import Harness, Launch, LaunchContext, Npm

VERSION = "0.61.0"
_PROGRAM = "node_modules/@google/gemini-cli/bundle/gemini.js"

_NOISE = [
    # In the first message; rewritten there when it resumes.
    r"Today's date is [^\n]*",
    r"- \*\*Directory Structure:\*\*[\s\S]*?</session_context>",
]


def launch(ctx: LaunchContext) -> Launch:
    settings = {
        "security": {"auth": {"selectedType": "gemini-api-key"}},
        "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
    }
    env = {
        "GEMINI_API_KEY": ctx.key,
        "GOOGLE_GEMINI_BASE_URL": ctx.base_url,
        "GEMINI_TELEMETRY_ENABLED": "false",
        # It would restart itself with a larger heap.
        "GEMINI_CLI_NO_RELAUNCH": "true",
    }
    command = [f"{ctx.install}/bin/node", f"{ctx.install}/{_PROGRAM}", "-m", ctx.model, "--skip-trust", "-y"]
    command += [*ctx.options["args"], *(["--resume", "latest"] if ctx.resume else [])]
    return Launch(
        command=tuple(command),
        stdin=ctx.instruction,
        env=env,
        files={f"{ctx.home}/.gemini/settings.json": json.dumps(deep_merge(settings, ctx.options["settings"]))},
    )


HARNESS = Harness(
    name="gemini_cli",
    summary="Gemini CLI, Google's coding agent (google)",
    launch=launch,
    install=Npm((f"@google/gemini-cli@{VERSION}",), lock="gemini_cli"),
    version=VERSION,
    dialects=("google",),
    options={"settings": {}, "args": []},
    resumes=True,
    settings={"noise": _NOISE},
)
