"""The agent program of the benchmarks that run sandboxes. It starts as fast as a Python program can.

It runs inside a sandbox by its file path, so it imports only the standard library.
"""

import http.client
import json
import os
import subprocess
from urllib.parse import urlsplit

TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def main() -> None:
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=300)
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    messages = [{"role": "user", "content": os.environ["TOWLINE_INSTRUCTION"]}]
    while True:
        body = json.dumps({"model": "any", "messages": messages, "tools": [TOOL]})
        connection.request("POST", url.path + "/chat/completions", body, headers)
        message = json.loads(connection.getresponse().read())["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return
        for call in message["tool_calls"]:
            command = json.loads(call["function"]["arguments"])["command"]
            done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout})


if __name__ == "__main__":
    main()
