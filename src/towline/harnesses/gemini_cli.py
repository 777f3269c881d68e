"""Gemini CLI: Google's coding agent, over the google dialect."""

from __future__ import annotations

import json

from towline.harnesses.base import Harness, Launch, Npm, Place, laid_over

VERSION = "0.61.0"
_PROGRAM = "node_modules/@google/gemini-cli/bundle/gemini.js"

_NOISE = [
    # Told in the first message, and told anew in the same place when it resumes.
    r"Today's date is [^\n]*",
    r"- \*\*Directory Structure:\*\*[\s\S]*?</session_context>",
]


def launch(place: Place) -> Launch:
    settings = {
        "security": {"auth": {"selectedType": "gemini-api-key"}},
        "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
    }
    env = {
        "GEMINI_API_KEY": place.key,
        "GOOGLE_GEMINI_BASE_URL": place.base_url,
        "GEMINI_TELEMETRY_ENABLED": "false",
        # It would start itself again for a larger heap.
        "GEMINI_CLI_NO_RELAUNCH": "true",
    }
    command = [f"{place.install}/bin/node", f"{place.install}/{_PROGRAM}", "-m", place.model, "--skip-trust", "-y"]
    command += [*place.options["args"], *(["--resume", "latest"] if place.resume else [])]
    return Launch(
        command=tuple(command),
        stdin=place.instruction,
        env=env,
        files={f"{place.home}/.gemini/settings.json": json.dumps(laid_over(settings, place.options["settings"]))},
    )


HARNESS = Harness(
    name="gemini_cli",
    summary="Gemini CLI, Google's coding agent (google)",
    launch=launch,
    install=Npm((f"@google/gemini-cli@{VERSION}",)),
    version=VERSION,
    dialects=("google",),
    options={"settings": {}, "args": []},
    resumes=True,
    settings={"noise": _NOISE},
)
