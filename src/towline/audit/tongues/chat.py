"""OpenAI's chat completions: the common shape itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from towline.audit.tongues.base import Told, Wired, events


class Chat:
    name = "chat"

    def credentials(self, key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}"}

    def tell(self, ask: Wired) -> Told:
        return Told("/v1/chat/completions", ask)

    def hear(self, data: bytes, *, stream: bool) -> list[Wired]:
        if stream:
            return _assembled(events(data))
        choices: list[Wired] = orjson.loads(data)["choices"]
        return choices


def _assembled(chunks: Iterable[Any]) -> list[Wired]:
    """The choices that a client puts together from the chunks of a stream."""
    choices: dict[int, Wired] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            message = {"role": "assistant", "content": None}
            choice = choices.setdefault(part["index"], {"index": part["index"], "message": message})
            choice["finish_reason"] = part["finish_reason"]
            _add(choice["message"], part["delta"])
    return [choices[index] for index in sorted(choices)]


def _add(message: Wired, delta: Wired) -> None:
    for name in ("content", "reasoning_content"):
        if delta.get(name) is not None:
            message[name] = (message.get(name) or "") + delta[name]
    for piece in delta.get("tool_calls") or ():
        calls = message.setdefault("tool_calls", [])
        if piece["index"] == len(calls):
            calls.append({"id": piece["id"], "type": piece["type"], "function": dict(piece["function"])})
        else:
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
