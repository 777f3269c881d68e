"""Client of Google's generateContent: contents made of parts, with the model in the path."""

from __future__ import annotations

import json
from typing import Any

import orjson

from towline.audit.clients.base import (
    WireJson,
    WireRequest,
    joined_text,
    make_call,
    make_choice,
    reasoning_text,
    sse_events,
    text_parts,
)

_CONFIG = {
    "seed": "seed",
    "temperature": "temperature",
    "max_tokens": "maxOutputTokens",
    "stop": "stopSequences",
    "n": "candidateCount",
}


class GoogleClient:
    name = "google"

    def __init__(self, *, open_reasoning: bool):
        """Without `open_reasoning`, thoughts are exchanged only as signatures."""
        self._open = open_reasoning

    def credentials(self, key: str) -> dict[str, str]:
        return {"x-goog-api-key": key}

    def encode(self, request: WireJson) -> WireRequest:
        contents: list[WireJson] = []
        config: WireJson = {name: request[own] for own, name in _CONFIG.items() if own in request}
        if self._open:
            config["thinkingConfig"] = {"includeThoughts": True}
        body: WireJson = {"contents": contents, "generationConfig": config}
        names: dict[str, str] = {}
        for index, message in enumerate(request["messages"]):
            if index == 0 and message["role"] in ("system", "developer"):
                body["systemInstruction"] = {"parts": [{"text": joined_text(message["content"])}]}
            elif message["role"] == "assistant":
                names |= {one["id"]: one["function"]["name"] for one in message.get("tool_calls") or ()}
                contents.append({"role": "model", "parts": _parts(message)})
            else:
                _append_user(contents, message, names)
        if "tools" in request:
            body["tools"] = [{"functionDeclarations": [_declared(tool["function"]) for tool in request["tools"]]}]
        method = "streamGenerateContent" if request["stream"] else "generateContent"
        return WireRequest(f"/v1beta/models/{request['model']}:{method}", body, "alt=sse" if request["stream"] else "")

    def decode(self, data: bytes, *, stream: bool) -> list[WireJson]:
        answers: list[Any] = list(sse_events(data)) if stream else [orjson.loads(data)]
        parts: dict[int, list[WireJson]] = {}
        reasons: dict[int, str] = {}
        for answer in answers:
            for candidate in answer["candidates"]:
                parts.setdefault(candidate["index"], []).extend(candidate["content"]["parts"])
                reasons[candidate["index"]] = candidate.get("finishReason", "")
        return [_decoded(parts[index], reasons[index]) for index in sorted(parts)]


def _declared(function: WireJson) -> WireJson:
    return {
        "name": function["name"],
        "description": function["description"],
        "parametersJsonSchema": function["parameters"],
    }


def _append_user(contents: list[WireJson], message: WireJson, names: dict[str, str]) -> None:
    """Append a user message; after function responses it joins their content."""
    parts: list[WireJson] = list(text_parts(message["content"]))
    if message["role"] == "tool":
        id = message["tool_call_id"]
        response = {"id": id, "name": names[id], "response": {"output": joined_text(message["content"])}}
        parts = [{"functionResponse": response}]
    last = contents[-1] if contents and contents[-1]["role"] == "user" else None
    if last is not None and "functionResponse" in last["parts"][-1]:
        last["parts"] += parts
    else:
        contents.append({"role": "user", "parts": parts})


def _parts(message: WireJson) -> list[WireJson]:
    parts: list[WireJson] = []
    if reasoning := reasoning_text(message):
        parts.append({"text": reasoning, "thought": True})
    first = len(parts)
    if message.get("content") is not None:
        parts += [{"text": part["text"]} for part in text_parts(message["content"])]
    for one in message.get("tool_calls") or ():
        arguments = json.loads(one["function"]["arguments"])
        parts.append({"functionCall": {"id": one["id"], "name": one["function"]["name"], "args": arguments}})
    if message.get("signature") and first < len(parts):
        parts[first]["thoughtSignature"] = message["signature"]
    return parts


def _decoded(parts: list[WireJson], reason: str) -> WireJson:
    texts = [part["text"] for part in parts if "text" in part and not part.get("thought")]
    calls = [
        make_call(made["id"], made["name"], json.dumps(made["args"], ensure_ascii=False))
        for part in parts
        if (made := part.get("functionCall")) is not None
    ]
    return make_choice(
        "".join(texts) if texts else None,
        "".join(part["text"] for part in parts if part.get("thought")),
        calls,
        truncated=reason == "MAX_TOKENS",
        signature=next((part["thoughtSignature"] for part in parts if "thoughtSignature" in part), ""),
    )
