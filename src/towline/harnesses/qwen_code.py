"""Qwen Code: Qwen's coding agent, over the chat dialect."""

from __future__ import annotations

import json

from towline.harnesses.base import Harness, Launch, Npm, Place, laid_over

VERSION = "0.24.4"
_PROGRAM = "node_modules/@qwen-code/qwen-code/cli.js"

_NOISE = [
    # Told before the newest user message, and gone from the older ones when it resumes.
    r"<system-reminder>\nThe current date is: [^<]*</system-reminder>",
    # Told in the first message, and told anew in the same place when it resumes.
    r"Today's date is [^\n]*",
    r"Here is the folder structure of the current working directories:[\s\S]*?</system-reminder>",
]


def launch(place: Place) -> Launch:
    settings = {
        "general": {"disableAutoUpdate": True, "disableUpdateNag": True, "enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": place.model, "generationConfig": {"contextWindowSize": place.context, "timeout": 3_600_000}},
    }
    env = {
        "OPENAI_API_KEY": place.key,
        "OPENAI_BASE_URL": f"{place.base_url}/v1",
        "OPENAI_MODEL": place.model,
        "QWEN_CODE_NO_RELAUNCH": "true",
    }
    command = [f"{place.install}/bin/node", f"{place.install}/{_PROGRAM}", "--auth-type", "openai", "-y"]
    command += [*place.options["args"], *(["--continue"] if place.resume else [])]
    return Launch(
        command=tuple(command),
        stdin=place.instruction,
        env=env,
        files={f"{place.home}/.qwen/settings.json": json.dumps(laid_over(settings, place.options["settings"]))},
    )


HARNESS = Harness(
    name="qwen_code",
    summary="Qwen Code, Qwen's coding agent (chat)",
    launch=launch,
    install=Npm((f"@qwen-code/qwen-code@{VERSION}",)),
    version=VERSION,
    dialects=("chat",),
    options={"settings": {}, "args": []},
    resumes=True,
    settings={"noise": _NOISE},
)
