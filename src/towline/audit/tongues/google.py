"""Google's generateContent: contents of parts, the model in the path."""

from __future__ import annotations

import json
from typing import Any

import orjson

from towline.audit.tongues.base import Told, Wired, call, choice, events, text, texts, thought

_CONFIG = {
    "seed": "seed",
    "temperature": "temperature",
    "max_tokens": "maxOutputTokens",
    "stop": "stopSequences",
    "n": "candidateCount",
}


class Google:
    name = "google"

    def __init__(self, *, open_reasoning: bool):
        """Without `open_reasoning` thoughts come and go as signatures alone."""
        self._open = open_reasoning

    def credentials(self, key: str) -> dict[str, str]:
        return {"x-goog-api-key": key}

    def tell(self, ask: Wired) -> Told:
        contents: list[Wired] = []
        config: Wired = {name: ask[own] for own, name in _CONFIG.items() if own in ask}
        if self._open:
            config["thinkingConfig"] = {"includeThoughts": True}
        body: Wired = {"contents": contents, "generationConfig": config}
        names: dict[str, str] = {}
        for place, message in enumerate(ask["messages"]):
            if place == 0 and message["role"] in ("system", "developer"):
                body["systemInstruction"] = {"parts": [{"text": text(message["content"])}]}
            elif message["role"] == "assistant":
                names |= {one["id"]: one["function"]["name"] for one in message.get("tool_calls") or ()}
                contents.append({"role": "model", "parts": _parts(message)})
            else:
                _say(contents, message, names)
        if "tools" in ask:
            body["tools"] = [{"functionDeclarations": [_declared(tool["function"]) for tool in ask["tools"]]}]
        method = "streamGenerateContent" if ask["stream"] else "generateContent"
        return Told(f"/v1beta/models/{ask['model']}:{method}", body, "alt=sse" if ask["stream"] else "")

    def hear(self, data: bytes, *, stream: bool) -> list[Wired]:
        answers: list[Any] = list(events(data)) if stream else [orjson.loads(data)]
        found: dict[int, list[Wired]] = {}
        reasons: dict[int, str] = {}
        for answer in answers:
            for candidate in answer["candidates"]:
                found.setdefault(candidate["index"], []).extend(candidate["content"]["parts"])
                reasons[candidate["index"]] = candidate.get("finishReason", "")
        return [_heard(found[index], reasons[index]) for index in sorted(found)]


def _declared(function: Wired) -> Wired:
    return {
        "name": function["name"],
        "description": function["description"],
        "parametersJsonSchema": function["parameters"],
    }


def _say(contents: list[Wired], message: Wired, names: dict[str, str]) -> None:
    """What the user says; behind responses of functions in the same content."""
    said: list[Wired] = list(texts(message["content"]))
    if message["role"] == "tool":
        id = message["tool_call_id"]
        response = {"id": id, "name": names[id], "response": {"output": text(message["content"])}}
        said = [{"functionResponse": response}]
    last = contents[-1] if contents and contents[-1]["role"] == "user" else None
    if last is not None and "functionResponse" in last["parts"][-1]:
        last["parts"] += said
    else:
        contents.append({"role": "user", "parts": said})


def _parts(message: Wired) -> list[Wired]:
    parts: list[Wired] = []
    if reasoning := thought(message):
        parts.append({"text": reasoning, "thought": True})
    first = len(parts)
    if message.get("content") is not None:
        parts += [{"text": part["text"]} for part in texts(message["content"])]
    for one in message.get("tool_calls") or ():
        arguments = json.loads(one["function"]["arguments"])
        parts.append({"functionCall": {"id": one["id"], "name": one["function"]["name"], "args": arguments}})
    if message.get("signature") and first < len(parts):
        parts[first]["thoughtSignature"] = message["signature"]
    return parts


def _heard(parts: list[Wired], reason: str) -> Wired:
    said = [part["text"] for part in parts if "text" in part and not part.get("thought")]
    calls = [
        call(made["id"], made["name"], json.dumps(made["args"], ensure_ascii=False))
        for part in parts
        if (made := part.get("functionCall")) is not None
    ]
    return choice(
        "".join(said) if said else None,
        "".join(part["text"] for part in parts if part.get("thought")),
        calls,
        cut=reason == "MAX_TOKENS",
        signature=next((part["thoughtSignature"] for part in parts if "thoughtSignature" in part), ""),
    )
