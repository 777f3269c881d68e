"""Clients of OpenAI's two dialects: chat completions, whose request is the common shape itself, and responses.

In responses a reply is several items, each with its own id.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from towline.audit.clients.base import (
    GatewayRefused,
    WireJson,
    WireRequest,
    extra_fields,
    joined_text,
    make_call,
    make_choice,
    reasoning_text,
    sse_events,
    text_parts,
)


class ChatClient:
    name = "chat"

    def credentials(self, key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}"}

    def encode(self, request: WireJson) -> WireRequest:
        return WireRequest("/v1/chat/completions", request)

    def decode(self, data: bytes, *, stream: bool) -> list[WireJson]:
        if stream:
            return _assembled(sse_events(data))
        choices: list[WireJson] = orjson.loads(data)["choices"]
        return choices


def _assembled(chunks: Iterable[Any]) -> list[WireJson]:
    """The choices assembled from the chunks of a stream."""
    choices: dict[int, WireJson] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            message = {"role": "assistant", "content": None}
            choice = choices.setdefault(part["index"], {"index": part["index"], "message": message})
            choice["finish_reason"] = part["finish_reason"]
            _add(choice["message"], part["delta"])
    return [choices[index] for index in sorted(choices)]


def _add(message: WireJson, delta: WireJson) -> None:
    for name in ("content", "reasoning_content"):
        if delta.get(name) is not None:
            message[name] = (message.get(name) or "") + delta[name]
    for piece in delta.get("tool_calls") or ():
        calls = message.setdefault("tool_calls", [])
        if piece["index"] == len(calls):
            calls.append({"id": piece["id"], "type": piece["type"], "function": dict(piece["function"])})
        else:
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]


_NAMES = {"max_tokens": "max_output_tokens"}
_SAME = ("model", "seed", "temperature", "stream", "stop", "max_tokens")


class ResponsesClient:
    name = "responses"

    def __init__(self, *, open_reasoning: bool):
        """Without `open_reasoning`, answers are not stored and reasoning is also sealed, as Codex requests it."""
        self._open = open_reasoning

    def credentials(self, key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}"}

    def encode(self, request: WireJson) -> WireRequest:
        items: list[WireJson] = []
        body: WireJson = {_NAMES.get(name, name): request[name] for name in _SAME if name in request}
        body["input"] = items
        if not self._open:
            body |= {"store": False, "include": ["reasoning.encrypted_content"]}
        for index, message in enumerate(request["messages"]):
            if index == 0 and message["role"] == "system":
                body["instructions"] = joined_text(message["content"])
            else:
                items += _items(message)
        if "tools" in request:
            body["tools"] = [{"type": "function", **tool["function"]} for tool in request["tools"]]
        return WireRequest("/v1/responses", body)

    def decode(self, data: bytes, *, stream: bool) -> list[WireJson]:
        if not stream:
            response = orjson.loads(data)
            return [_decoded(response, response["output"])]
        items = []
        response = None
        for event in sse_events(data):
            if event["type"] == "response.output_item.done":
                items.append(event["item"])
            response = event.get("response", response)
        if response is None or response["status"] not in ("completed", "incomplete"):
            raise GatewayRefused("the stream ended without a final response")
        return [_decoded(response, items)]


def _items(message: WireJson) -> Iterator[WireJson]:
    role, content = message["role"], message.get("content")
    if role == "tool":
        output: Any = (
            content if isinstance(content, str) else [{"type": "input_text", **one} for one in text_parts(content)]
        )
        yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": output}
        return
    if role != "assistant":
        parts: Any = (
            content if isinstance(content, str) else [{"type": "input_text", **one} for one in text_parts(content)]
        )
        yield {"type": "message", "role": role, "content": parts, **extra_fields(message)}
        return
    ids = message.get("items", {})
    reasoning, sealed = reasoning_text(message), message.get("signature")
    if reasoning or sealed:
        summary = [{"type": "summary_text", "text": reasoning}] if reasoning else []
        yield {"type": "reasoning", **_id(ids.get("reasoning")), "summary": summary, "encrypted_content": sealed}
    if content is not None:
        texts = [{"type": "output_text", "annotations": [], **one} for one in text_parts(content)]
        yield {"type": "message", "role": role, **_id(ids.get("message")), "content": texts, **extra_fields(message)}
    for one in message.get("tool_calls") or ():
        yield {"type": "function_call", "call_id": one["id"], **_id(one.get("item")), **one["function"]}


def _id(id: str | None) -> WireJson:
    return {"id": id} if id else {}


def _decoded(response: WireJson, items: list[WireJson]) -> WireJson:
    messages = [item for item in items if item["type"] == "message"]
    thoughts = [item for item in items if item["type"] == "reasoning"]
    calls = [
        make_call(item["call_id"], item["name"], item["arguments"], item=item["id"])
        for item in items
        if item["type"] == "function_call"
    ]
    ids = {item["type"]: item["id"] for item in (*messages, *thoughts)}
    return make_choice(
        "".join(part["text"] for item in messages for part in item["content"]) if messages else None,
        "".join(part["text"] for item in thoughts for part in item["summary"]),
        calls,
        truncated=response["status"] == "incomplete",
        signature="".join(item.get("encrypted_content") or "" for item in thoughts),
        items=ids,
        answer=response["id"],
    )
