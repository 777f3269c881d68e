"""A small agent in plain Python: asks the model, runs the commands it calls for, until it answers in text.

How it behaves after that is its first argument: `work` ends well, `fail` ends with exit code 3, `hang` sleeps, `silent` never
asks, `daemon` leaves a process behind, `patient` sleeps before it asks. `edit` puts other words into each reply that it keeps;
`handoff` goes on under another system prompt.
"""

import json
import os
import subprocess
import sys
import time
import urllib.request

TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def reply(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "any", "messages": messages, "tools": [TOOL]}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["message"]


def main(behaviour):
    if behaviour == "silent":
        print("I have nothing to ask")
        return 0
    if behaviour == "patient":
        time.sleep(0.5)
    messages = [{"role": "user", "content": os.environ["TOWLINE_INSTRUCTION"]}]
    while True:
        prompt = "Another agent." if behaviour == "handoff" and len(messages) > 1 else "An agent."
        message = reply([{"role": "system", "content": prompt}, *messages] if behaviour == "handoff" else messages)
        messages.append({**message, "content": "(edited)"} if behaviour == "edit" else message)
        if not message.get("tool_calls"):
            break
        for call in message["tool_calls"]:
            command = json.loads(call["function"]["arguments"])["command"]
            done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
    print("answer:", message["content"], flush=True)
    if behaviour == "hang":
        time.sleep(600)
    if behaviour == "daemon":
        subprocess.Popen(["sleep", "98765"], start_new_session=True, stdout=subprocess.DEVNULL)
    return 3 if behaviour == "fail" else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
