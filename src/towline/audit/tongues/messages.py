"""Anthropic's messages: blocks, and results of tools in the message of the user."""

from __future__ import annotations

import json
from typing import Any

import orjson

from towline.audit.tongues.base import Told, Wired, call, choice, events, others, text, texts, thought

_SAME = ("model", "temperature", "stream", "max_tokens")


class Messages:
    name = "messages"

    def __init__(self, *, open_reasoning: bool):
        """Without `open_reasoning` thinking comes and goes as its signature alone."""
        self._open = open_reasoning

    def credentials(self, key: str) -> dict[str, str]:
        return {"x-api-key": key, "anthropic-version": "2023-06-01"}

    def tell(self, ask: Wired) -> Told:
        told: list[Wired] = []
        body: Wired = {name: ask[name] for name in _SAME if name in ask}
        # There is no seed on this wire; the session's own sampling overrides top-k, which makes it as good a number.
        body |= {"messages": told, "top_k": ask["seed"]}
        body["thinking"] = {"type": "adaptive", "display": "summarized" if self._open else "omitted"}
        if "stop" in ask:
            body["stop_sequences"] = ask["stop"]
        for place, message in enumerate(ask["messages"]):
            if place == 0 and message["role"] in ("system", "developer"):
                # A developer's text is a block with a marker, the system's a bare string: they are the same.
                block = {"type": "text", "text": text(message["content"]), "cache_control": {"type": "ephemeral"}}
                body["system"] = [block] if message["role"] == "developer" else block["text"]
            elif message["role"] == "assistant":
                told.append({"role": "assistant", "content": _blocks(message)})
            else:
                _say(told, message)
        if "tools" in ask:
            body["tools"] = [_declared(tool["function"]) for tool in ask["tools"]]
        return Told("/v1/messages", body, "beta=true")

    def hear(self, data: bytes, *, stream: bool) -> list[Wired]:
        if stream:
            return [_assembled(data)]
        message = orjson.loads(data)
        return [_heard(message["content"], message["stop_reason"])]


def _declared(function: Wired) -> Wired:
    return {
        "name": function["name"],
        "description": function["description"],
        "input_schema": function["parameters"],
    }


def _say(told: list[Wired], message: Wired) -> None:
    """What the user says; behind results of tools in the same message."""
    content = message["content"]
    if message["role"] == "tool":
        output: Any = content if isinstance(content, str) else [{"type": "text", **part} for part in texts(content)]
        said = [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": output}]
    else:
        said = [{"type": "text", **part} for part in texts(content)]
    last = told[-1] if told and told[-1]["role"] == "user" else None
    if last is not None and isinstance(last["content"], list) and last["content"][-1]["type"] == "tool_result":
        last["content"] += said
    elif message["role"] == "user" and isinstance(content, str):
        told.append({"role": "user", "content": content})
    else:
        told.append({"role": "user", "content": said})


def _blocks(message: Wired) -> list[Wired]:
    blocks: list[Wired] = []
    reasoning, signature = thought(message), message.get("signature", "")
    if reasoning or signature:
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": signature})
    if message.get("content") is not None:
        blocks += [{"type": "text", **part, **others(message)} for part in texts(message["content"])]
    for one in message.get("tool_calls") or ():
        arguments = json.loads(one["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": one["id"], "name": one["function"]["name"], "input": arguments})
    return blocks


def _assembled(data: bytes) -> Wired:
    blocks: list[Wired] = []
    pieces: list[str] = []
    reason = None
    for event in events(data):
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
    return _heard(blocks, reason)


def _heard(blocks: list[Wired], reason: str | None) -> Wired:
    said = [block["text"] for block in blocks if block["type"] == "text"]
    thoughts = [block for block in blocks if block["type"] == "thinking"]
    calls = [
        call(block["id"], block["name"], json.dumps(block["input"], ensure_ascii=False))
        for block in blocks
        if block["type"] == "tool_use"
    ]
    return choice(
        "".join(said) if said else None,
        "".join(block["thinking"] for block in thoughts),
        calls,
        cut=reason == "max_tokens",
        signature="".join(block["signature"] for block in thoughts),
    )
