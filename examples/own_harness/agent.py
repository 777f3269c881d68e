#!/usr/bin/env python3
"""An agent written in an evening: OpenAI chat completions, one tool, only the standard library.

OPENAI_BASE_URL=… OPENAI_API_KEY=… python3 agent.py "Count the lines of *.txt into count.out"
"""

import json
import os
import subprocess
import sys
import urllib.request

MAX_TURNS = 30
SYSTEM = f"You work in the folder {os.getcwd()}. Use the tool bash until the task is done, then say so in one sentence."
BASH = {
    "name": "bash",
    "description": "Runs a command and returns its output and exit status.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}


def ask(messages):
    """The model's next message."""
    body = {"model": os.environ.get("OPENAI_MODEL", ""), "messages": messages}
    body["tools"] = [{"type": "function", "function": BASH}]
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]


def bash(arguments):
    """The output of a command; mistakes of the model are reported back to it."""
    try:
        command = json.loads(arguments)["command"]
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, errors="replace", timeout=120)
    except (ValueError, KeyError, TypeError, subprocess.TimeoutExpired) as error:
        return f"error: {error!r}"
    return f"{(done.stdout + done.stderr)[-8000:]}\n[exit status {done.returncode}]"


def main():
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": sys.argv[1]}]
    for _ in range(MAX_TURNS):
        message = ask(messages)
        messages.append(message)
        calls = message.get("tool_calls") or []
        if not calls:
            print(message["content"])
            return
        for call in calls:
            result = bash(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    sys.exit(f"not done after {MAX_TURNS} turns")


if __name__ == "__main__":
    main()
