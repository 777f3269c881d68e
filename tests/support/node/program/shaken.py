"""An agent in plain Python whose model calls may fail; its first argument says what it then does.

`pretend` prints an answer of its own and ends well, `crash` ends with an exit code, `hang` sleeps, `retry` asks again until it
is answered, `tell` puts the error into the conversation and goes on, `impatient` waits two seconds for each answer and then
pretends. `title` asks for a title first and works without one, `delegate` hands its second step to a sub-agent and works
without its result. `summary` asks for a summary of its second step, `transcript` for one of the step as text; without one both
drop the history. `mute` never asks for anything. `explode` fills its memory, `term` sends itself a signal.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def ask(messages, tools=True, seconds=120.0):
    body = {"model": "any", "messages": messages}
    if tools:
        body["tools"] = [TOOL]
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=seconds) as response:
            return json.load(response)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        print("refused:", error.code, error.read().decode(), flush=True)
    except OSError as error:
        print("no answer:", error, flush=True)
    return None


def attempt(behaviour, messages):
    if behaviour == "impatient":
        return ask(messages, seconds=2.0)
    message = ask(messages)
    while message is None and behaviour == "retry":
        time.sleep(0.1)
        message = ask(messages)
    if message is None and behaviour == "tell":
        messages.append({"role": "user", "content": "An error occurred. Go on."})
        message = ask(messages)
    return message


def drop_history(behaviour, messages):
    """Ask for a summary; without one, start from the instruction and a note."""
    wish = "Summarise this."
    if behaviour == "summary":
        asked = [*messages, {"role": "user", "content": wish}]
    else:
        asked = [{"role": "system", "content": "You write."}, {"role": "user", "content": wish + json.dumps(messages)}]
    if ask(asked, tools=False) is None:
        messages[1:] = [{"role": "user", "content": "What you did so far is lost."}]


def main(behaviour):
    if behaviour == "mute":
        time.sleep(600)
    if behaviour == "title":
        ask([{"role": "user", "content": "A title, please."}], tools=False)
    messages = [{"role": "user", "content": os.environ["TOWLINE_INSTRUCTION"]}]
    for step in range(20):
        message = attempt(behaviour, messages)
        if message is None:
            if behaviour == "hang":
                time.sleep(600)
            if behaviour == "crash":
                return 7
            print("answer: I made this up", flush=True)
            return 0
        messages.append(message)
        if not message.get("tool_calls"):
            break
        for call in message["tool_calls"]:
            command = json.loads(call["function"]["arguments"])["command"]
            done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
        if step == 0 and behaviour == "delegate":
            ask([{"role": "system", "content": "You are a sub-agent."}, {"role": "user", "content": "Look around."}])
        if step == 0 and behaviour in ("summary", "transcript"):
            drop_history(behaviour, messages)
        if step == 0 and behaviour == "explode":
            kept = []
            while True:
                kept.append(bytearray(os.urandom(1 << 20)) * 16)
        if step == 0 and behaviour == "term":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 0 and behaviour == "linger":
            time.sleep(600)
    print("answer:", message["content"], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
