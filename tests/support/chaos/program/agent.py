"""An agent that puts a mark of its own into every prompt, and notices answers that belong to another session.

    agent.py TURNS ON_ERROR

ON_ERROR: `lie` ends at once with an answer of its own, `retry` repeats a failed call some times first. Exit code 0: every
call was answered; 3: one never was; 4: an answer had the mark of another session.
"""

import http.client
import json
import os
import random
import sys
import time
from urllib.parse import urlsplit


def ask(messages):
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=600)
    body = json.dumps({"model": "any", "messages": messages, "max_tokens": 40})
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    connection.request("POST", url.path.rstrip("/") + "/chat/completions", body, headers)
    response = connection.getresponse()
    data = response.read()
    if response.status != 200:
        raise OSError(f"the model answered {response.status}: {data[:200]!r}")
    return json.loads(data)["choices"][0]["message"]["content"] or ""


def main(turns, on_error):
    mark = f"M{random.SystemRandom().randrange(10**12):012d}M"
    messages = [{"role": "user", "content": f"{os.environ['TOWLINE_INSTRUCTION']} {mark}"}]
    for turn in range(turns):
        if turn:
            messages.append({"role": "user", "content": f"more {mark} {turn}"})
        for left in reversed(range(4 if on_error == "retry" else 1)):
            try:
                answer = ask(messages)
                break
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                print("no answer:", error, flush=True)
                time.sleep(0.3)
                if not left:
                    return 3
        if mark not in answer:
            print("foreign answer:", answer, flush=True)
            return 4
        messages.append({"role": "assistant", "content": answer})
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
