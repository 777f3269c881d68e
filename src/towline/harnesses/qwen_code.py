"""Qwen Code: Qwen's coding agent, over the chat dialect.

It puts a space before an `@`; date and folder listing change on resume (`noise`). Options: `settings` is merged into its
configuration; `args` are added to its command.
"""

from __future__ import annotations

import json

from towline.common.mappings import deep_merge
from towline.harnesses.base import Harness, Launch, LaunchContext, Npm

VERSION = "0.24.4"
_PROGRAM = "node_modules/@qwen-code/qwen-code/cli.js"

_NOISE = [
    # Before the newest user message; removed from older ones when it resumes.
    r"<system-reminder>\nThe current date is: [^<]*</system-reminder>",
    # In the first message; rewritten there when it resumes.
    r"Today's date is [^\n]*",
    r"Here is the folder structure of the current working directories:[\s\S]*?</system-reminder>",
]


def launch(ctx: LaunchContext) -> Launch:
    settings = {
        "general": {"disableAutoUpdate": True, "disableUpdateNag": True, "enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": ctx.model, "generationConfig": {"contextWindowSize": ctx.context, "timeout": 3_600_000}},
    }
    env = {
        "OPENAI_API_KEY": ctx.key,
        "OPENAI_BASE_URL": f"{ctx.base_url}/v1",
        "OPENAI_MODEL": ctx.model,
        "QWEN_CODE_NO_RELAUNCH": "true",
    }
    command = [f"{ctx.install}/bin/node", f"{ctx.install}/{_PROGRAM}", "--auth-type", "openai", "-y"]
    command += [*ctx.options["args"], *(["--continue"] if ctx.resume else [])]
    return Launch(
        command=tuple(command),
        stdin=ctx.instruction,
        env=env,
        files={f"{ctx.home}/.qwen/settings.json": json.dumps(deep_merge(settings, ctx.options["settings"]))},
    )


HARNESS = Harness(
    name="qwen_code",
    summary="Qwen Code, Qwen's coding agent (chat)",
    launch=launch,
    install=Npm((f"@qwen-code/qwen-code@{VERSION}",), lock="qwen_code"),
    version=VERSION,
    dialects=("chat",),
    options={"settings": {}, "args": []},
    resumes=True,
    settings={"noise": _NOISE},
)
