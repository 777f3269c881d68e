"""A chat completion that comes as a stream, put together to what the server would have answered as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")


class Assembly:
    """The first choice of a stream; `feed` takes its events in order."""

    def __init__(self) -> None:
        self.finished = False
        self._about: dict[str, Any] = {}
        self._texts: dict[str, str] = {}
        self._calls: dict[int, dict[str, Any]] = {}
        self._ids: list[Any] = []
        self._logprobs: list[Any] = []
        self._choice: dict[str, Any] = {"index": 0}

    def feed(self, event: Mapping[str, Any]) -> int:
        """Take one event; how many tokens it brought, at least one if it brought anything of the reply."""
        for name in ("id", "model", "usage", "prompt_token_ids"):
            if event.get(name) is not None:
                self._about[name] = event[name]
        return sum(self._take(choice) for choice in event.get("choices") or () if not choice.get("index"))

    def _take(self, choice: Mapping[str, Any]) -> int:
        delta = choice.get("delta") or {}
        for name in _TEXTS:
            if delta.get(name):
                self._texts[name] = self._texts.get(name, "") + delta[name]
        for call in delta.get("tool_calls") or ():
            self._take_call(call)
        ids, told = choice.get("token_ids") or [], (choice.get("logprobs") or {}).get("content") or []
        self._ids += ids
        self._logprobs += told
        if choice.get("prompt_token_ids"):
            self._about["prompt_token_ids"] = choice["prompt_token_ids"]
        if choice.get("finish_reason") is not None:
            self._choice |= {"finish_reason": choice["finish_reason"], "stop_reason": choice.get("stop_reason")}
            self.finished = True
        said = any(delta.get(name) for name in (*_TEXTS, "tool_calls"))
        return len(ids) or len(told) or int(said)

    def _take_call(self, part: Mapping[str, Any]) -> None:
        # Servers that send calls whole may leave the place out: each is then a call of its own.
        place = part.get("index")
        call = self._calls.setdefault(len(self._calls) if place is None else int(place), {"type": "function"})
        if part.get("id"):
            call["id"] = part["id"]
        function = call.setdefault("function", {"name": "", "arguments": ""})
        given = part.get("function") or {}
        function["name"] = given.get("name") or function["name"]
        function["arguments"] += given.get("arguments") or ""

    def answer(self) -> dict[str, Any]:
        """The whole completion."""
        message: dict[str, Any] = {"role": "assistant", "content": None, **self._texts}
        if self._calls:
            message["tool_calls"] = [self._calls[place] for place in sorted(self._calls)]
        choice = {
            **self._choice,
            "message": message,
            "logprobs": {"content": self._logprobs} if self._logprobs else None,
        }
        if self._ids:
            choice["token_ids"] = self._ids
        return {**self._about, "choices": [choice]}
