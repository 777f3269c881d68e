"""A small agent that asks the model a fixed number of times, and says what it does when the model fails.

    agent.py TURNS FAULT_TURN FAULT ON_ERROR

The question of turn FAULT_TURN names the fault (`fault:reset`), so that a proxy between gateway and engine can inject it.
ON_ERROR: `lie` ends with exit code 0 and an answer of its own, `fail` with exit code 3, `hang` waits for the end of the
budget, `skip` drops the question and continues the conversation without it. `coin` meets no error, and ends with exit code
0 or 3 by chance.
"""

import http.client
import json
import os
import sys
import time
from urllib.parse import urlsplit


def ask(messages):
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=600)
    body = json.dumps({"model": "any", "messages": messages, "max_tokens": 12})
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    connection.request("POST", url.path.rstrip("/") + "/chat/completions", body, headers)
    response = connection.getresponse()
    data = response.read()
    if response.status != 200:
        raise OSError(f"the model answered {response.status}: {data[:200]!r}")
    return json.loads(data)["choices"][0]["message"]


def main(turns, fault_turn, fault, on_error):
    messages = [{"role": "user", "content": os.environ["TOWLINE_INSTRUCTION"]}]
    for turn in range(1, turns + 1):
        if turn > 1:
            word = f"fault:{fault}" if turn == fault_turn else "more"
            messages.append({"role": "user", "content": f"{word}, turn {turn}"})
        try:
            reply = ask(messages)
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            print("no answer:", error, flush=True)
            if on_error == "fail":
                return 3
            if on_error == "hang":
                time.sleep(600)
            if on_error == "lie":
                print("answer: 42")
                return 0
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": reply.get("content") or ""})
    print("answer:", messages[-1]["content"])
    return 3 * (os.urandom(1)[0] % 2) if on_error == "coin" else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]))
