"""An agent on Anthropic's SDK: messages, streamed, one tool. It knows nothing of Towline.

    ANTHROPIC_BASE_URL=… ANTHROPIC_API_KEY=… python anthropic_sdk.py settings.json

The settings are a JSON object with the model and the task.
"""

import json
import subprocess
import sys
from pathlib import Path

import anthropic

TOOL = {
    "name": "bash",
    "description": "Runs a command in sh.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}


def run(call):
    done = subprocess.run(["sh", "-c", call.input["command"]], capture_output=True, text=True, timeout=60)
    return {"type": "tool_result", "tool_use_id": call.id, "content": done.stdout + done.stderr}


def main():
    settings = json.loads(Path(sys.argv[1]).read_text())
    client = anthropic.Anthropic()
    messages = [{"role": "user", "content": settings["task"]}]
    while True:
        with client.messages.stream(
            model=settings["model"],
            max_tokens=4096,
            system="You do what you are asked to, with the tool you have.",
            messages=messages,
            tools=[TOOL],
            thinking={"type": "enabled", "budget_tokens": 1024},
        ) as stream:
            message = stream.get_final_message()
        messages.append({"role": "assistant", "content": [block.to_dict() for block in message.content]})
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            break
        messages.append({"role": "user", "content": [run(call) for call in calls]})
    print("".join(block.text for block in message.content if block.type == "text"))


main()
