"""An agent in plain standard-library Python: chat completions, one tool. It knows nothing of Towline.

    OPENAI_BASE_URL=… OPENAI_API_KEY=… MODEL=… python3 stdlib.py "what to do"

It keeps its conversation in ~/.stdlib_agent.json and goes on with it when it is started again.
"""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

HISTORY = Path.home() / ".stdlib_agent.json"
TOOL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Runs a command in sh.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def ask(messages):
    """The model's next message."""
    body = json.dumps({"model": os.environ["MODEL"], "messages": messages, "tools": [TOOL]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)["choices"][0]["message"]


def run(call):
    command = json.loads(call["function"]["arguments"])["command"]
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    return {"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr}


def main():
    start = [{"role": "system", "content": "You do what you are asked to, with the tool you have."}]
    messages = json.loads(HISTORY.read_text()) if HISTORY.exists() else start
    messages.append({"role": "user", "content": sys.argv[1]})
    while True:
        message = ask(messages)
        # Like many programs, it keeps the text and the calls and forgets the reasoning.
        kept = {name: message[name] for name in ("role", "content", "tool_calls") if message.get(name)}
        messages.append(kept)
        if not message.get("tool_calls"):
            break
        messages.extend(map(run, message["tool_calls"]))
    HISTORY.write_text(json.dumps(messages))
    print(message["content"])


main()
