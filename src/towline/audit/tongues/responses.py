"""OpenAI's responses: a reply is several items, each with an id of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from towline.audit.tongues.base import Refused, Told, Wired, call, choice, events, others, text, texts, thought

_NAMES = {"max_tokens": "max_output_tokens"}
_SAME = ("model", "seed", "temperature", "stream", "stop", "max_tokens")


class Responses:
    name = "responses"

    def __init__(self, *, open_reasoning: bool):
        """Without `open_reasoning` answers are not stored, and reasoning is sealed as well, as Codex wants it."""
        self._open = open_reasoning

    def credentials(self, key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}"}

    def tell(self, ask: Wired) -> Told:
        items: list[Wired] = []
        body: Wired = {_NAMES.get(name, name): ask[name] for name in _SAME if name in ask}
        body["input"] = items
        if not self._open:
            body |= {"store": False, "include": ["reasoning.encrypted_content"]}
        for place, message in enumerate(ask["messages"]):
            if place == 0 and message["role"] == "system":
                body["instructions"] = text(message["content"])
            else:
                items += _items(message)
        if "tools" in ask:
            body["tools"] = [{"type": "function", **tool["function"]} for tool in ask["tools"]]
        return Told("/v1/responses", body)

    def hear(self, data: bytes, *, stream: bool) -> list[Wired]:
        if not stream:
            response = orjson.loads(data)
            return [_heard(response, response["output"])]
        items = []
        response = None
        for event in events(data):
            if event["type"] == "response.output_item.done":
                items.append(event["item"])
            response = event.get("response", response)
        if response is None or response["status"] not in ("completed", "incomplete"):
            raise Refused("the stream has no end")
        return [_heard(response, items)]


def _items(message: Wired) -> Iterator[Wired]:
    role, content = message["role"], message.get("content")
    if role == "tool":
        output: Any = content if isinstance(content, str) else [{"type": "input_text", **one} for one in texts(content)]
        yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": output}
        return
    if role != "assistant":
        parts: Any = content if isinstance(content, str) else [{"type": "input_text", **one} for one in texts(content)]
        yield {"type": "message", "role": role, "content": parts, **others(message)}
        return
    ids = message.get("items", {})
    reasoning, sealed = thought(message), message.get("signature")
    if reasoning or sealed:
        summary = [{"type": "summary_text", "text": reasoning}] if reasoning else []
        yield {"type": "reasoning", **_id(ids.get("reasoning")), "summary": summary, "encrypted_content": sealed}
    if content is not None:
        said = [{"type": "output_text", "annotations": [], **one} for one in texts(content)]
        yield {"type": "message", "role": role, **_id(ids.get("message")), "content": said, **others(message)}
    for one in message.get("tool_calls") or ():
        yield {"type": "function_call", "call_id": one["id"], **_id(one.get("item")), **one["function"]}


def _id(id: str | None) -> Wired:
    return {"id": id} if id else {}


def _heard(response: Wired, items: list[Wired]) -> Wired:
    said = [item for item in items if item["type"] == "message"]
    thoughts = [item for item in items if item["type"] == "reasoning"]
    calls = [
        call(item["call_id"], item["name"], item["arguments"], item=item["id"])
        for item in items
        if item["type"] == "function_call"
    ]
    ids = {item["type"]: item["id"] for item in (*said, *thoughts)}
    return choice(
        "".join(part["text"] for item in said for part in item["content"]) if said else None,
        "".join(part["text"] for item in thoughts for part in item["summary"]),
        calls,
        cut=response["status"] == "incomplete",
        signature="".join(item.get("encrypted_content") or "" for item in thoughts),
        items=ids,
        answer=response["id"],
    )
