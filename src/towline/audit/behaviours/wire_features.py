"""Features of single dialects, as harnesses that use them do."""

from __future__ import annotations

import copy
import re
from typing import Any

from towline.audit.behaviours.registry import behaviour
from towline.audit.clients import WireJson
from towline.audit.simulation import Expected, SimulatedHarness

_OURS = ("reasoning", "function_call")
_CAPITAL = re.compile(r"(?<=[a-z])([A-Z])")


@behaviour(free=True, dialects=("responses",))
async def answer_named(harness: SimulatedHarness) -> Expected:
    """Sends only new items, with the previous response id."""
    last = ""

    def echo(message: WireJson) -> WireJson:
        nonlocal last
        last = message["answer"]
        return message

    def dress(body: WireJson) -> WireJson:
        items = body["input"]
        said = [place for place, item in enumerate(items) if _is_reply(item)]
        return {**body, "input": items[said[-1] + 1 :], "previous_response_id": last} if said else body

    thread = harness.thread(echo=echo, dress=dress)
    await thread.work(3)
    await thread.finish()
    thread.user("Please go on.")
    await thread.finish()
    return Expected()


@behaviour(free=True, dialects=("responses",))
async def items_named(harness: SimulatedHarness) -> Expected:
    """Refers to its replies by item ids."""

    def dress(body: WireJson) -> WireJson:
        items = [
            {"type": "item_reference", "id": item["id"]} if _is_reply(item) and "id" in item else item
            for item in body["input"]
        ]
        return {**body, "input": items, "store": True}

    thread = harness.thread(dress=dress)
    await thread.work(3)
    await thread.finish()
    return Expected()


def _is_reply(item: WireJson) -> bool:
    return item["type"] in _OURS or item.get("role") == "assistant"


@behaviour("tools", "parallel", free=True, dialects=("messages", "google"))
async def results_apart(harness: SimulatedHarness) -> Expected:
    """Sends the result of every call as a separate message."""

    def dress(body: WireJson) -> WireJson:
        name, inner = ("messages", "content") if "messages" in body else ("contents", "parts")
        return {**body, name: [part for item in body[name] for part in _split_parts(item, inner)]}

    thread = harness.thread(dress=dress)
    for count in (2, 3, 1):
        thread.follow(await thread.reply(harness.step(calls=count)))
    await thread.finish()
    return Expected()


def _split_parts(item: WireJson, inner: str) -> list[WireJson]:
    if item["role"] != "user" or not isinstance(item[inner], list):
        return [item]
    return [{**item, inner: [part]} for part in item[inner]]


@behaviour("tools", "parallel", free=True, dialects=("google",))
async def call_ids_dropped(harness: SimulatedHarness) -> Expected:
    """Drops the ids of calls and their responses: names and order must suffice."""

    def dress(body: WireJson) -> WireJson:
        changed = copy.deepcopy(body)
        for part in (part for content in changed["contents"] for part in content["parts"]):
            for name in ("functionCall", "functionResponse"):
                part.get(name, {}).pop("id", None)
        return changed

    thread = harness.thread(dress=dress)
    for count in (2, 1, 3):
        thread.follow(await thread.reply(harness.step(calls=count)))
    await thread.finish()
    return Expected()


@behaviour("tools", free=True, dialects=("google",))
async def responses_repeated(harness: SimulatedHarness) -> Expected:
    """Sends all function responses twice, as a resumed harness does."""

    def dress(body: WireJson) -> WireJson:
        contents = []
        for content in body["contents"]:
            contents.append(content)
            if "functionResponse" in content["parts"][0]:
                contents.append({**content, "parts": [part for part in content["parts"] if "functionResponse" in part]})
        return {**body, "contents": contents}

    thread = harness.thread(dress=dress)
    await thread.work(3)
    await thread.finish()
    return Expected()


@behaviour(free=True, dialects=("google",))
async def names_in_snake_case(harness: SimulatedHarness) -> Expected:
    """Uses snake case field names in some requests, camel case in others."""

    def dress(body: WireJson) -> WireJson:
        return _snake_case(body, "") if harness.random.random() < 0.5 else body

    thread = harness.thread(dress=dress)
    await thread.work(3)
    await thread.finish()
    return Expected()


def _snake_case(value: Any, inside: str) -> Any:
    """The value with its fields in snake case, except where the harness chose the names."""
    if isinstance(value, list):
        return [_snake_case(item, inside) for item in value]
    if not isinstance(value, dict) or inside in ("args", "response", "parametersJsonSchema"):
        return value
    return {_CAPITAL.sub(r"_\1", name).lower(): _snake_case(item, name) for name, item in value.items()}
