"""What a server means by a status that is not 200."""

from __future__ import annotations

import re

from towline.engines.base import ContextExceeded, EngineGone
from towline.errors import EngineError

_LOST = frozenset({502, 503, 504})
"""Statuses of a server that is going down, or of a proxy that has lost it."""
_TOO_LONG = re.compile(
    r"context_length_exceeded|exceed_context_size|maximum context length|max_model_len|string_above_max_length|"
    r"longer than the (?:model|maximum|context)|exceeds? the (?:available |maximum |model'?s? )*context|"
    r"(?:prompt|input) is too long|too many (?:prompt|input) tokens|reduce the length of the (?:messages|prompt|input)",
    re.IGNORECASE,
)
"""How vLLM, SGLang, llama.cpp, TGI and OpenAI-compatible providers refuse a prompt that does not fit."""
_SHOWN = 400


_CONTEXT = re.compile(r"maximum context length (?:is|of) (\d+)|n_ctx\W+(\d+)|context size \((\d+)", re.IGNORECASE)
_PROMPT = re.compile(
    r"\((\d+) in the (?:messages|prompt)|has (?:at least )?(\d+) input tokens|resulted in (\d+) tokens|"
    r"n_prompt_tokens\W+(\d+)|request \((\d+) tokens",
    re.IGNORECASE,
)
"""Where such a refusal tells the length of the context, and that of the prompt."""


class Refused(EngineError):
    """The server answered, and not with what was asked for."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


def refusal(url: str, status: int, data: bytes) -> EngineError:
    """The error for an answer with such a status, which it quotes."""
    shown = " ".join(data[:_SHOWN].decode("utf-8", "replace").split())
    message = f"{url} answered {status}: {shown}"
    if status in _LOST:
        return EngineGone(message)
    if 400 <= status < 500 and status != 429 and _TOO_LONG.search(shown):
        return ContextExceeded(message)
    return Refused(message, status)


def room_beside(refused: ContextExceeded) -> int | None:
    """How many tokens fit behind the prompt, by what the refusal tells; None if it does not tell."""
    context, prompt = (found.search(str(refused)) for found in (_CONTEXT, _PROMPT))
    if context is None or prompt is None:
        return None
    return int(next(filter(None, context.groups()))) - int(next(filter(None, prompt.groups())))
