"""A streamed chat completion, assembled into what the server would have sent as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")


class StreamAssembler:
    """Assembles a streamed chat completion into what the server would have sent as a whole (its first choice)."""

    def __init__(self) -> None:
        self.finished = False
        self._fields: dict[str, Any] = {}
        self._texts: dict[str, str] = {}
        self._calls: dict[int, dict[str, Any]] = {}
        self._ids: list[Any] = []
        self._logprobs: list[Any] = []
        self._choice: dict[str, Any] = {"index": 0}

    def feed(self, event: Mapping[str, Any]) -> int:
        """Add one event; returns how many tokens it carried, at least 1 if it carried any part of the reply."""
        for name in ("id", "model", "usage", "prompt_token_ids"):
            if event.get(name) is not None:
                self._fields[name] = event[name]
        return sum(self._add_choice(choice) for choice in event.get("choices") or () if not choice.get("index"))

    def _add_choice(self, choice: Mapping[str, Any]) -> int:
        delta = choice.get("delta") or {}
        for name in _TEXTS:
            if delta.get(name):
                self._texts[name] = self._texts.get(name, "") + delta[name]
        for call in delta.get("tool_calls") or ():
            self._add_call(call)
        ids, logprobs = choice.get("token_ids") or [], (choice.get("logprobs") or {}).get("content") or []
        self._ids += ids
        self._logprobs += logprobs
        if choice.get("prompt_token_ids"):
            self._fields["prompt_token_ids"] = choice["prompt_token_ids"]
        if choice.get("finish_reason") is not None:
            self._choice |= {"finish_reason": choice["finish_reason"], "stop_reason": choice.get("stop_reason")}
            self.finished = True
        said = any(delta.get(name) for name in (*_TEXTS, "tool_calls"))
        return len(ids) or len(logprobs) or int(said)

    def _add_call(self, part: Mapping[str, Any]) -> None:
        # Servers that send calls whole may omit the index: each is then a separate call.
        index = part.get("index")
        call = self._calls.setdefault(len(self._calls) if index is None else int(index), {"type": "function"})
        if part.get("id"):
            call["id"] = part["id"]
        function = call.setdefault("function", {"name": "", "arguments": ""})
        given = part.get("function") or {}
        function["name"] = given.get("name") or function["name"]
        function["arguments"] += given.get("arguments") or ""

    def answer(self) -> dict[str, Any]:
        """The assembled completion."""
        message: dict[str, Any] = {"role": "assistant", "content": None, **self._texts}
        if self._calls:
            message["tool_calls"] = [self._calls[index] for index in sorted(self._calls)]
        choice = {
            **self._choice,
            "message": message,
            "logprobs": {"content": self._logprobs} if self._logprobs else None,
        }
        if self._ids:
            choice["token_ids"] = self._ids
        return {**self._fields, "choices": [choice]}
