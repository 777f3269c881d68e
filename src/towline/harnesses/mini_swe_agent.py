"""mini-swe-agent: chat completions through LiteLLM, not streamed.

It ends on the command `echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT` and cannot resume a conversation. The task is passed
in a configuration file, merged into the one that it ships, so it may be of any length.
"""

from __future__ import annotations

import json
from typing import Any

from towline.common.mappings import deep_merge
from towline.harnesses.base import Harness, Launch, LaunchContext, PyPI

VERSION = "2.4.6"


def launch(ctx: LaunchContext) -> Launch:
    folder = f"{ctx.home}/.config/mini-swe-agent"
    # Its budget is in dollars, which do not apply to a served model; steps can be limited.
    settings: dict[str, Any] = {
        "run": {"task": ctx.instruction},
        "agent": {"cost_limit": 0, "step_limit": ctx.options["step_limit"]},
        "model": {"model_name": f"openai/{ctx.model}"},
    }
    command = [f"{ctx.install}/bin/python3", "-I", f"{ctx.install}/bin/mini", "--yolo", "--exit-immediately"]
    command += ["-c", ctx.options["config"], "-c", f"{folder}/towline.yaml"]
    return Launch(
        command=tuple(command),
        env={
            "OPENAI_API_KEY": ctx.key,
            "OPENAI_API_BASE": f"{ctx.base_url}/v1",
            "OPENAI_BASE_URL": f"{ctx.base_url}/v1",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_GLOBAL_CONFIG_DIR": folder,
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        files={f"{folder}/towline.yaml": json.dumps(deep_merge(settings, ctx.options["settings"]), indent=2)},
    )


HARNESS = Harness(
    name="mini_swe_agent",
    summary="mini-swe-agent (SWE-agent team): one bash tool",
    version=VERSION,
    # LiteLLM cannot be imported without `mcp`.
    install=PyPI((f"mini-swe-agent=={VERSION}", "mcp==2.3.0"), lock="mini_swe_agent"),
    launch=launch,
    options={"config": "mini.yaml", "settings": {}, "step_limit": 0},
)
"""Options: `config` names a configuration that it ships, `settings` is merged into it."""
