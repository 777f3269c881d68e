"""Fingerprints: when two messages are the same message, however a harness reformatted it.

Part of a fingerprint: the role; the text with CRLF as LF and outer white space stripped; media by digest; tool calls as
(name, canonical JSON), where key order, spacing and `1` versus `1.0` do not count but `true` versus `1` and `"1"` versus
`1` do. Not part of it: tool-call ids, names of tool results, cache markers, and an assistant's reasoning, whether in its
own field or as a leading `<think>` block. Any other difference is an edit.

Noise is ignored here too: `normalized_text` removes what the `noise` patterns of the session match (a date or a header
that changes on every call), so that the request still matches; the model keeps seeing the text of the first time. The
patterns come from the harness's preset (`harnesses/<name>.py`) and the task's settings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import orjson

from towline.common.untrusted.patterns import TextPattern
from towline.conversation import Message, Tool

_THINK = re.compile(r"\s*<think>.*?</think>", re.DOTALL)
_SIZE = 16
EMPTY_HISTORY = bytes(_SIZE)
"""The rolling hash before the first message."""


def canonical(value: Any) -> bytes:
    """JSON with one spelling per value: sorted keys, no spaces, integral floats as integers."""
    try:
        return orjson.dumps(_normalize(value), option=orjson.OPT_SORT_KEYS)
    except TypeError:
        return json.dumps(_normalize(value), sort_keys=True, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _normalize(value: Any) -> Any:
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, dict):
        return {str(key): _normalize(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_normalize(item) for item in value]
    return value


def normalized_text(message: Message, noise: Sequence[TextPattern] = ()) -> str:
    """The text that counts for the fingerprint, without `noise`."""
    text = message.text
    if "\r" in text:
        text = text.replace("\r\n", "\n")
    if message.role == "assistant" and "<think>" in text:
        text = _THINK.sub("", text, count=1) if _THINK.match(text) else text
    for pattern in noise:
        text = pattern.sub("", text)
    return text.strip()


def of(message: Message, noise: Sequence[TextPattern] = ()) -> bytes:
    """The fingerprint of a message, cached on the message. `noise` is fixed per session."""
    if message.fingerprint is None:
        message.fingerprint = _compute(message, noise)
    return message.fingerprint


def _compute(message: Message, noise: Sequence[TextPattern]) -> bytes:
    digest = blake2b(message.role.encode(), digest_size=_SIZE)
    text = normalized_text(message, noise).encode("utf-8", "surrogatepass")
    digest.update(b"\x00%d\x00" % len(text))
    digest.update(text)
    for item in message.media:
        digest.update(b"\x01" + item.kind.encode() + b"\x00" + item.digest.encode())
    for call in message.tool_calls:
        arguments = call.arguments
        body = (
            arguments.strip().encode("utf-8", "surrogatepass") if isinstance(arguments, str) else canonical(arguments)
        )
        name = call.name.encode("utf-8", "surrogatepass")
        digest.update(b"\x02%d\x00%d\x00" % (len(name), len(body)))
        digest.update(name)
        digest.update(body)
    return digest.digest()


def roll(previous: bytes, fingerprint: bytes) -> bytes:
    """The hash of a history that is `previous` plus one message."""
    return blake2b(previous + fingerprint, digest_size=_SIZE).digest()


def root_key(tools: Sequence[Tool], arguments: Mapping[str, Any], model: str = "") -> str:
    """The key of a conversation's tools and template arguments (and of the engine's model, if there are several)."""
    declared = [[tool.name, tool.description, tool.parameters, tool.custom, tool.extra] for tool in tools]
    return blake2b(canonical([declared, dict(arguments), model]), digest_size=_SIZE).hexdigest()
