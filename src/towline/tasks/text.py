"""A prompt as one text: plain, or the messages that it was made of."""

from __future__ import annotations

from typing import Any

from towline.tasks.errors import Place

_TEXT_PARTS = ("text", "input_text")


def instruction_text(value: Any, place: Place, field: str) -> str:
    """The instruction that a prompt comes to. A harness starts from one text, so a list of messages may hold system,
    developer and user messages only, which are joined; anything else is refused rather than dropped."""
    if isinstance(value, str):
        text = value
    elif isinstance(value, list) and value:
        text = "\n\n".join(_message(item, place, f"{field}.{index}") for index, item in enumerate(value))
    else:
        raise place.error(field, "must be text or a list of messages")
    if not text.strip():
        raise place.error(field, "is empty")
    return text


def _message(message: Any, place: Place, field: str) -> str:
    if not isinstance(message, dict):
        raise place.error(field, "a message is an object with `role` and `content`")
    role = message.get("role", "user")
    if role not in ("system", "developer", "user") or message.get("type", "message") != "message":
        raise place.error(
            f"{field}.role", f"a harness starts from one instruction, and cannot be given a message of role {role!r}"
        )
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise place.error(f"{field}.content", "must be text or a list of parts")
    parts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise place.error(f"{field}.content.{index}", f"only text can be part of an instruction, not {kind!r}")
        parts.append(part["text"])
    return "".join(parts)
