"""An agent on OpenAI's SDK: responses, streamed, one tool. It knows nothing of Towline.

TASK="what to do" OPENAI_BASE_URL=… OPENAI_API_KEY=… OPENAI_MODEL=… python openai_sdk.py
"""

import json
import os
import subprocess

import openai

TOOL = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command in sh.",
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
        "additionalProperties": False,
    },
    "strict": True,
}


def run(call):
    command = json.loads(call.arguments)["command"]
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    return {"type": "function_call_output", "call_id": call.call_id, "output": done.stdout + done.stderr}


def main():
    client = openai.OpenAI()
    items = [{"role": "user", "content": os.environ["TASK"]}]
    while True:
        with client.responses.stream(
            model=os.environ["OPENAI_MODEL"],
            instructions="You do what you are asked to, with the tool you have.",
            input=items,
            tools=[TOOL],
            store=False,
        ) as stream:
            response = stream.get_final_response()
        items += [item.to_dict() for item in response.output]
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            break
        items += map(run, calls)
    print(response.output_text)


main()
