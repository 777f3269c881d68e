"""Client of Anthropic's messages: content blocks, with tool results in user messages."""

from __future__ import annotations

import json
from typing import Any

import orjson

from towline.audit.clients.base import (
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

_SAME = ("model", "temperature", "stream", "max_tokens")


class MessagesClient:
    name = "messages"

    def __init__(self, *, open_reasoning: bool):
        """Without `open_reasoning`, thinking is exchanged only as its signature."""
        self._open = open_reasoning

    def credentials(self, key: str) -> dict[str, str]:
        return {"x-api-key": key, "anthropic-version": "2023-06-01"}

    def encode(self, request: WireJson) -> WireRequest:
        messages: list[WireJson] = []
        body: WireJson = {name: request[name] for name in _SAME if name in request}
        # This dialect has no seed. The session's own sampling overrides top-k, so it can carry the request's number.
        body |= {"messages": messages, "top_k": request["seed"]}
        body["thinking"] = {"type": "adaptive", "display": "summarized" if self._open else "omitted"}
        if "stop" in request:
            body["stop_sequences"] = request["stop"]
        for index, message in enumerate(request["messages"]):
            if index == 0 and message["role"] in ("system", "developer"):
                # A developer message becomes a block with a cache marker, a system message a string: both mean the same.
                block = {
                    "type": "text",
                    "text": joined_text(message["content"]),
                    "cache_control": {"type": "ephemeral"},
                }
                body["system"] = [block] if message["role"] == "developer" else block["text"]
            elif message["role"] == "assistant":
                messages.append({"role": "assistant", "content": _blocks(message)})
            else:
                _append_user(messages, message)
        if "tools" in request:
            body["tools"] = [_declared(tool["function"]) for tool in request["tools"]]
        return WireRequest("/v1/messages", body, "beta=true")

    def decode(self, data: bytes, *, stream: bool) -> list[WireJson]:
        if stream:
            return [_assembled(data)]
        message = orjson.loads(data)
        return [_decoded(message["content"], message["stop_reason"])]


def _declared(function: WireJson) -> WireJson:
    return {
        "name": function["name"],
        "description": function["description"],
        "input_schema": function["parameters"],
    }


def _append_user(messages: list[WireJson], message: WireJson) -> None:
    """Append a user message; after tool results it joins their message."""
    content = message["content"]
    if message["role"] == "tool":
        output: Any = (
            content if isinstance(content, str) else [{"type": "text", **part} for part in text_parts(content)]
        )
        blocks = [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": output}]
    else:
        blocks = [{"type": "text", **part} for part in text_parts(content)]
    last = messages[-1] if messages and messages[-1]["role"] == "user" else None
    if last is not None and isinstance(last["content"], list) and last["content"][-1]["type"] == "tool_result":
        last["content"] += blocks
    elif message["role"] == "user" and isinstance(content, str):
        messages.append({"role": "user", "content": content})
    else:
        messages.append({"role": "user", "content": blocks})


def _blocks(message: WireJson) -> list[WireJson]:
    blocks: list[WireJson] = []
    reasoning, signature = reasoning_text(message), message.get("signature", "")
    if reasoning or signature:
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": signature})
    if message.get("content") is not None:
        blocks += [{"type": "text", **part, **extra_fields(message)} for part in text_parts(message["content"])]
    for one in message.get("tool_calls") or ():
        arguments = json.loads(one["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": one["id"], "name": one["function"]["name"], "input": arguments})
    return blocks


def _assembled(data: bytes) -> WireJson:
    blocks: list[WireJson] = []
    pieces: list[str] = []
    reason = None
    for event in sse_events(data):
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
            pieces = []
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                pieces.append(delta["partial_json"])
            else:
                name = delta["type"].removesuffix("_delta")
                blocks[-1][name] += delta[name]
        elif event["type"] == "content_block_stop" and blocks[-1]["type"] == "tool_use":
            blocks[-1]["input"] = orjson.loads("".join(pieces))
        elif event["type"] == "message_delta":
            reason = event["delta"]["stop_reason"]
    return _decoded(blocks, reason)


def _decoded(blocks: list[WireJson], reason: str | None) -> WireJson:
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    thoughts = [block for block in blocks if block["type"] == "thinking"]
    calls = [
        make_call(block["id"], block["name"], json.dumps(block["input"], ensure_ascii=False))
        for block in blocks
        if block["type"] == "tool_use"
    ]
    return make_choice(
        "".join(texts) if texts else None,
        "".join(block["thinking"] for block in thoughts),
        calls,
        truncated=reason == "max_tokens",
        signature="".join(block["signature"] for block in thoughts),
    )
