"""OpenHands SDK: chat completions or responses through LiteLLM, not streamed.

The SDK is a library, so the program is the short script below, run by the install's own interpreter: its standard agent
with its standard tools except the browser, and the conversation kept in the home folder, where a second start finds it.
"""

from __future__ import annotations

import json
from typing import Any

from towline.harnesses.base import Harness, Launch, LaunchContext, PyPI

VERSION = "1.58.0"
_PROGRAM = '''\
"""Run one user turn of the OpenHands agent; exit status 1 if it did not finish by itself."""

import json
import sys
import uuid
from pathlib import Path

from openhands.sdk import LLM, Conversation
from openhands.sdk.conversation.state import ConversationExecutionStatus
from openhands.tools.preset.default import get_default_agent

settings = json.loads(Path(sys.argv[1]).read_text("utf-8"))
agent = get_default_agent(llm=LLM(**settings["llm"]), cli_mode=True)
conversation = Conversation(
    agent=agent,
    workspace=settings["workdir"],
    persistence_dir=settings["state"],
    conversation_id=uuid.UUID(int=1),
    max_iteration_per_run=settings["max_turns"],
    delete_on_close=False,
)
conversation.send_message(settings["instruction"])
conversation.run()
status = conversation.state.execution_status
conversation.close()
if status is not ConversationExecutionStatus.FINISHED:
    sys.exit(f"the agent did not finish: {status.value}")
'''


def launch(ctx: LaunchContext) -> Launch:
    folder = f"{ctx.home}/.openhands"
    settings: dict[str, Any] = {
        "llm": {
            "model": f"openai/{ctx.model}",
            "base_url": f"{ctx.base_url}/v1",
            "api_key": ctx.key,
            "api_mode": ctx.options["dialect"],
            "max_input_tokens": ctx.context,
            "max_output_tokens": ctx.max_tokens,
            # A call may wait long while the policy is updated.
            "timeout": 3600,
            "usage_id": "agent",
            **ctx.options["llm"],
        },
        "instruction": ctx.instruction,
        "workdir": ctx.workdir,
        "state": f"{folder}/conversations",
        "max_turns": ctx.options["max_turns"],
    }
    return Launch(
        command=(f"{ctx.install}/bin/python3", "-I", f"{folder}/run.py", f"{folder}/settings.json"),
        env={
            "OPENHANDS_SUPPRESS_BANNER": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LOG_LEVEL": "WARNING",
        },
        files={f"{folder}/run.py": _PROGRAM, f"{folder}/settings.json": json.dumps(settings, indent=2)},
    )


HARNESS = Harness(
    name="openhands_sdk",
    summary="OpenHands, by its software agent SDK",
    version=VERSION,
    install=PyPI(
        (f"openhands-sdk=={VERSION}", f"openhands-tools=={VERSION}"),
        python="3.12",
        lock="openhands_sdk",
        sources=("func-timeout",),
    ),
    launch=launch,
    dialects=("chat", "responses"),
    resumes=True,
    options={"dialect": "chat", "max_turns": 500, "llm": {}},
)
"""Options: `llm` holds additional fields of the SDK's `LLM`."""
