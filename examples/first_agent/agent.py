#!/usr/bin/env python3
"""A small agent in plain standard-library Python. It knows OpenAI's chat completions and nothing of Towline.

It goes through a few questions about a registry of items in one conversation. For each question it lets the model call
tools, runs them, sends the results back, and takes the model's text as the answer.

    OPENAI_BASE_URL=http://127.0.0.1:8500/v1 OPENAI_API_KEY=… python agent.py --questions 4
"""

import argparse
import json
import os
import random
import sys
import urllib.error
import urllib.request

PROPERTIES = {
    "colour": ["red", "blue", "green", "gold"],
    "size": ["tiny", "small", "large", "huge"],
    "owner": ["ada", "ben", "cleo", "dan"],
}
ITEMS = ["lamp", "book", "coin"]
MOST_CALLS = 3


def registry(seed):
    """Every item's properties: what the tools look up."""
    chance = random.Random(seed)
    return {item: {name: chance.choice(values) for name, values in PROPERTIES.items()} for item in ITEMS}


def questions(seed, count, records):
    chance = random.Random(seed + 1)
    for _ in range(count):
        item, name = chance.choice(ITEMS), chance.choice(list(PROPERTIES))
        truth = records[item][name]
        offered = [truth, chance.choice([value for value in PROPERTIES[name] if value != truth])]
        chance.shuffle(offered)
        yield f"{name} of {item}: {offered[0]} or {offered[1]}?", truth


def tools():
    schema = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
    return [{"type": "function", "function": {"name": name, "parameters": schema}} for name in PROPERTIES]


def complete(messages):
    """One model call."""
    body = {"model": os.environ.get("MODEL", "tiny"), "messages": messages, "tools": tools(), "max_tokens": 128}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"].rstrip("/") + "/chat/completions",
        data=json.dumps(body).encode(),
        headers={
            "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)["choices"][0]["message"]


def run_tool(call, records):
    try:
        item = json.loads(call["function"]["arguments"]).get("item")
    except (ValueError, AttributeError):
        return "unknown"
    return records.get(item, {}).get(call["function"]["name"], "unknown")


def main():
    parser = argparse.ArgumentParser(description="An agent that answers questions by calling tools.")
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    records = registry(options.seed)
    messages = [{"role": "system", "content": "Registry of " + ", ".join(ITEMS) + "."}]
    right = 0
    for question, truth in questions(options.seed, options.questions, records):
        print(f"? {question}")
        messages.append({"role": "user", "content": question})
        for _ in range(MOST_CALLS):
            try:
                message = complete(messages)
            except urllib.error.HTTPError as error:
                print(f"the model refused: {error.code} {error.read(300).decode('utf-8', 'replace')}", file=sys.stderr)
                return 1
            messages.append(message)
            calls = message.get("tool_calls") or []
            for call in calls:
                result = run_tool(call, records)
                print(f"  {call['function']['name']}({call['function']['arguments']}) = {result}")
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            if not calls:
                break
        answer = (message.get("content") or "").strip()
        right += answer == truth
        print(f"  {answer!r}, {'right' if answer == truth else 'wrong'}")
    print(f"{right} of {options.questions} right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
