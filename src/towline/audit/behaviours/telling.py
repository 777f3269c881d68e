"""What only some dialects can say, and harnesses that speak them do."""

from __future__ import annotations

import copy
import re
from typing import Any

from towline.audit.behaviours.registry import behaviour
from towline.audit.play import Expected, Play
from towline.audit.tongues import Wired

_OURS = ("reasoning", "function_call")
_CAPITAL = re.compile(r"(?<=[a-z])([A-Z])")


@behaviour(free=True, dialects=("responses",))
async def answer_named(play: Play) -> Expected:
    """Sends only what is new, behind the id of the answer before."""
    last = ""

    def echo(message: Wired) -> Wired:
        nonlocal last
        last = message["answer"]
        return message

    def dress(body: Wired) -> Wired:
        items = body["input"]
        said = [place for place, item in enumerate(items) if _said(item)]
        return {**body, "input": items[said[-1] + 1 :], "previous_response_id": last} if said else body

    thread = play.thread(echo=echo, dress=dress)
    await thread.work(3)
    await thread.finish()
    thread.user("Please go on.")
    await thread.finish()
    return Expected()


@behaviour(free=True, dialects=("responses",))
async def items_named(play: Play) -> Expected:
    """Refers to its replies by the ids of their items."""

    def dress(body: Wired) -> Wired:
        items = [
            {"type": "item_reference", "id": item["id"]} if _said(item) and "id" in item else item
            for item in body["input"]
        ]
        return {**body, "input": items, "store": True}

    thread = play.thread(dress=dress)
    await thread.work(3)
    await thread.finish()
    return Expected()


def _said(item: Wired) -> bool:
    return item["type"] in _OURS or item.get("role") == "assistant"


@behaviour("tools", "parallel", free=True, dialects=("messages", "google"))
async def results_apart(play: Play) -> Expected:
    """Sends the result of every call as a message of its own."""

    def dress(body: Wired) -> Wired:
        name, inner = ("messages", "content") if "messages" in body else ("contents", "parts")
        return {**body, name: [part for item in body[name] for part in _apart(item, inner)]}

    thread = play.thread(dress=dress)
    for count in (2, 3, 1):
        thread.follow(await thread.reply(play.step(calls=count)))
    await thread.finish()
    return Expected()


def _apart(item: Wired, inner: str) -> list[Wired]:
    if item["role"] != "user" or not isinstance(item[inner], list):
        return [item]
    return [{**item, inner: [part]} for part in item[inner]]


@behaviour("tools", "parallel", free=True, dialects=("google",))
async def call_ids_dropped(play: Play) -> Expected:
    """Drops the ids of calls and of their responses: the names and their order must do."""

    def dress(body: Wired) -> Wired:
        told = copy.deepcopy(body)
        for part in (part for content in told["contents"] for part in content["parts"]):
            for name in ("functionCall", "functionResponse"):
                part.get(name, {}).pop("id", None)
        return told

    thread = play.thread(dress=dress)
    for count in (2, 1, 3):
        thread.follow(await thread.reply(play.step(calls=count)))
    await thread.finish()
    return Expected()


@behaviour("tools", free=True, dialects=("google",))
async def responses_repeated(play: Play) -> Expected:
    """Sends all responses of functions twice, as a session that was resumed does."""

    def dress(body: Wired) -> Wired:
        contents = []
        for content in body["contents"]:
            contents.append(content)
            if "functionResponse" in content["parts"][0]:
                contents.append({**content, "parts": [part for part in content["parts"] if "functionResponse" in part]})
        return {**body, "contents": contents}

    thread = play.thread(dress=dress)
    await thread.work(3)
    await thread.finish()
    return Expected()


@behaviour(free=True, dialects=("google",))
async def names_in_snake_case(play: Play) -> Expected:
    """Writes the names of fields in snake case in some requests, in camel case in others."""

    def dress(body: Wired) -> Wired:
        return _snake(body, "") if play.random.random() < 0.5 else body

    thread = play.thread(dress=dress)
    await thread.work(3)
    await thread.finish()
    return Expected()


def _snake(value: Any, inside: str) -> Any:
    """The value with other names for its fields, except where the names are the harness's own."""
    if isinstance(value, list):
        return [_snake(item, inside) for item in value]
    if not isinstance(value, dict) or inside in ("args", "response", "parametersJsonSchema"):
        return value
    return {_CAPITAL.sub(r"_\1", name).lower(): _snake(item, name) for name, item in value.items()}
