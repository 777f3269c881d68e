"""mini-swe-agent: chat completions through LiteLLM, whole replies.

It ends on the command `echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT` and has no way to take a conversation up again. The task
travels in a configuration file, merged over the one that it ships, so it may be of any length.
"""

from __future__ import annotations

import json
from typing import Any

from towline.harnesses.base import Harness, Launch, Place, PyPI, laid_over

VERSION = "2.4.6"


def launch(place: Place) -> Launch:
    folder = f"{place.home}/.config/mini-swe-agent"
    # Its budget is in dollars, which a model of one's own does not cost; steps are what can be limited.
    settings: dict[str, Any] = {
        "run": {"task": place.instruction},
        "agent": {"cost_limit": 0, "step_limit": place.options["step_limit"]},
        "model": {"model_name": f"openai/{place.model}"},
    }
    command = [f"{place.install}/bin/python3", "-I", f"{place.install}/bin/mini", "--yolo", "--exit-immediately"]
    command += ["-c", place.options["config"], "-c", f"{folder}/towline.yaml"]
    return Launch(
        command=tuple(command),
        env={
            "OPENAI_API_KEY": place.key,
            "OPENAI_API_BASE": f"{place.base_url}/v1",
            "OPENAI_BASE_URL": f"{place.base_url}/v1",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_GLOBAL_CONFIG_DIR": folder,
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        files={f"{folder}/towline.yaml": json.dumps(laid_over(settings, place.options["settings"]), indent=2)},
    )


HARNESS = Harness(
    name="mini_swe_agent",
    summary="mini-swe-agent (SWE-agent team): one bash tool",
    version=VERSION,
    # Without `mcp`, LiteLLM cannot be imported.
    install=PyPI((f"mini-swe-agent=={VERSION}", "mcp==2.3.0")),
    launch=launch,
    options={"config": "mini.yaml", "settings": {}, "step_limit": 0},
)
"""Options: `config` names a configuration that it ships, `settings` is laid over it."""
