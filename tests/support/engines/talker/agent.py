"""A program that talks: three questions in one conversation, nothing but the standard library."""

import json
import os
import urllib.request

QUESTIONS = ["Name three rivers of Europe.", "Which of them is the longest?", "Say thank you — in one word."]


def ask(messages):
    body = {"model": os.environ.get("OPENAI_MODEL", ""), "messages": messages}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]


messages = []
for question in QUESTIONS:
    messages.append({"role": "user", "content": question})
    answer = ask(messages)
    print(answer["content"])
    messages.append({"role": "assistant", "content": answer["content"]})
