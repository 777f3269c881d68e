#!/usr/bin/env python3
"""A small agent in plain standard-library Python. It knows OpenAI's chat completions, but not Towline.

It asks a few questions about a registry of items in one conversation. For each question it lets the model call tools, runs
them, sends the results back, and takes the model's text as the answer.

    OPENAI_BASE_URL=http://127.0.0.1:8500/v1 OPENAI_API_KEY=… python agent.py --questions 4
"""

import argparse
import http.client
import json
import os
import sys
from urllib.parse import urlsplit

PROPERTIES = {
    "colour": ["red", "blue", "green", "gold"],
    "size": ["tiny", "small", "large", "huge"],
    "owner": ["ada", "ben", "cleo", "dan"],
}
ITEMS = ["lamp", "book", "coin"]
MAX_CALLS = 3
"""Model calls per question."""


class Refused(Exception):
    """The model did not answer, and a retry would not help."""


class Model:
    """An OpenAI-compatible chat endpoint, over one connection."""

    def __init__(self, base_url, key, name):
        url = urlsplit(base_url)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        self.connection = kind(url.hostname, url.port, timeout=300)
        self.path = url.path.rstrip("/") + "/chat/completions"
        self.headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
        self.name = name

    def reply(self, messages, tools):
        """The assistant's next message."""
        body = json.dumps({"model": self.name, "messages": messages, "tools": tools})
        try:
            self.connection.request("POST", self.path, body, self.headers)
            response = self.connection.getresponse()
            data = response.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise Refused(f"no answer from the model: {error!r}") from error
        if response.status != 200:
            raise Refused(f"the model answered with status {response.status}: {data[:300]}")
        return json.loads(data)["choices"][0]["message"]


def random_registry(seed, count):
    """A random registry with questions about it."""
    import random  # Imported here to start faster when a registry is given.

    generator = random.Random(seed)
    records = {item: {name: generator.choice(values) for name, values in PROPERTIES.items()} for item in ITEMS}
    questions = []
    for _ in range(count):
        item, name = generator.choice(ITEMS), generator.choice(list(PROPERTIES))
        truth = records[item][name]
        offered = [truth, generator.choice([value for value in PROPERTIES[name] if value != truth])]
        generator.shuffle(offered)
        questions.append({"text": f"{name} of {item}: {offered[0]} or {offered[1]}?", "answer": truth})
    return records, questions


def declared(records):
    """One tool per property."""
    schema = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
    names = next(iter(records.values()))
    return [{"type": "function", "function": {"name": name, "parameters": schema}} for name in names]


def run_tool(call, records):
    """The result of a call, however malformed."""
    try:
        item = json.loads(call["function"]["arguments"])["item"]
        return records[item][call["function"]["name"]]
    except (ValueError, KeyError, TypeError):
        return "unknown"


def without_reasoning(message):
    """The message without its reasoning, as many agents send it back."""
    return {name: value for name, value in message.items() if name != "reasoning_content"}


def ask(model, messages, records, drops_reasoning=False):
    """Let the model call tools until it answers in text; returns an empty answer if it never does."""
    for _ in range(MAX_CALLS):
        message = model.reply(messages, declared(records))
        messages.append(without_reasoning(message) if drops_reasoning else message)
        calls = message.get("tool_calls") or []
        if not calls:
            return (message.get("content") or "").strip()
        for call in calls:
            result = run_tool(call, records)
            print(f"  {call['function']['name']}({call['function']['arguments']}) = {result}", flush=True)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return ""


def main():
    parser = argparse.ArgumentParser(description="An agent that answers questions by calling tools.")
    parser.add_argument("--questions", type=int, default=4, help="number of questions without --registry (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random registry (default: 0)")
    parser.add_argument(
        "--registry", help='JSON file: {"records": {item: {property: value}}, "questions": [{"text", "answer"}]}'
    )
    parser.add_argument("--drop-reasoning", action="store_true", help="send replies back without their reasoning")
    options = parser.parse_args()
    missing = [name for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY") if not os.environ.get(name)]
    if missing:
        parser.error(f"set {' and '.join(missing)}")
    if options.registry:
        with open(options.registry, encoding="utf-8") as file:
            given = json.load(file)
        records, questions = given["records"], given["questions"]
    else:
        records, questions = random_registry(options.seed, options.questions)
    model = Model(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], os.environ.get("MODEL", "tiny"))
    messages = [{"role": "system", "content": f"Registry of {', '.join(records)}."}]
    right = 0
    for question in questions:
        print(f"? {question['text']}", flush=True)
        messages.append({"role": "user", "content": question["text"]})
        try:
            answer = ask(model, messages, records, options.drop_reasoning)
        except Refused as refusal:
            print(refusal, file=sys.stderr)
            return 1
        right += answer == question["answer"]
        print(f"  {answer!r} is {'right' if answer == question['answer'] else 'wrong'}", flush=True)
    print(f"{right} of {len(questions)} right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
