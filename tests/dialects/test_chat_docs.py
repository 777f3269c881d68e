"""The tables of the chat dialect in the docs are true, and they leave nothing out that the official client knows."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from openai.types.chat import (
    ChatCompletionContentPartParam,
    ChatCompletionMessageParam,
    ChatCompletionToolUnionParam,
    completion_create_params,
)

from towline.config import SamplingSettings
from towline.conversation import Message, Request
from towline.dialects.base import DialectCall, ReadCache
from towline.dialects.chat import ChatDialect
from towline.dialects.chat import parameters as chat_parameters
from towline.dialects.chat.items import ROLES
from towline.errors import BadRequest
from towline.gateway import sampling

DOCS = Path(__file__).parents[2] / "docs" / "dialects" / "chat.md"
USER = {"role": "user", "content": "Hi."}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
DATA = b64encode(b"x").decode()
FIELDS: dict[str, Any] = {
    **dict.fromkeys(chat_parameters._PENALTIES, 0.5),
    "model": "other",
    "messages": [USER, USER],
    "tools": [TOOL],
    "functions": [{"name": "g"}],
    "tool_choice": "none",
    "function_call": "none",
    "parallel_tool_calls": False,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "max_tokens": 5,
    "max_completion_tokens": 5,
    "stop": "x",
    "seed": 5,
    "n": 2,
    "logit_bias": {"5": 1},
    "response_format": {"type": "json_object"},
    "logprobs": True,
    "top_logprobs": 5,
    "stream": True,
    "stream_options": {"include_usage": True},
    "reasoning_effort": "low",
    "chat_template_kwargs": {"a": 1},
    "enable_thinking": True,
}


def read(**fields: Any) -> Request:
    body = {"model": "m", "messages": [USER], **fields}
    return ChatDialect().read(DialectCall("generate", body), ReadCache())[0]


def documented(section: str) -> dict[str, str]:
    """What the tables of a section say of each name."""
    text = DOCS.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in text.splitlines() if line.startswith("| `")]
    found = {name.strip("`"): verdict for name, verdict in rows}
    assert len(found) == len(rows)
    return found


def kinds(union: Any) -> set[str]:
    """The values of `type` in a union of the client's models."""
    return {value for member in get_args(union) for value in _literals(get_type_hints(member)["type"])}


def _literals(hint: Any) -> Iterator[str]:
    for inner in get_args(hint):
        yield from [inner] if isinstance(inner, str) else _literals(inner)


def recorded(request: Request) -> set[str]:
    """What a trained turn's record says is not followed."""
    return set(sampling.sampling_parameters(SamplingSettings(mode="harness"), request)[3])


def test_the_docs_cover_every_field() -> None:
    verdicts = documented("Fields")
    theirs = completion_create_params.CompletionCreateParamsBase.__annotations__.keys() | {"stream"}
    assert verdicts.keys() == theirs | chat_parameters._UNDERSTOOD | {"top_logprobs"}
    for name, verdict in verdicts.items():
        given = {name: FIELDS.get(name, {"x": 1})}
        if name in ("tool_choice", "function_call"):
            given["tools"] = [TOOL]
        plain, request = read(**{key: value for key, value in given.items() if key != name}), read(**given)
        assert (name in request.ignored) == (verdict == "ignored"), name
        assert bool(recorded(request)) == (verdict == "carried"), name
        if verdict == "used":
            assert request != plain, name
    with pytest.raises(BadRequest) as caught:
        read(chat_template_kwargs={"tools": []})
    assert caught.value.param == "chat_template_kwargs.tools"
    assert read(whatever=1).ignored == ("whatever",)


def test_the_docs_cover_every_role_and_field_of_a_message() -> None:
    assert documented("Roles").keys() == ROLES.keys()
    for role in documented("Roles"):
        (message,) = read(messages=[{"role": role, "content": "x", "name": "f", "tool_call_id": "c"}]).messages
        assert message.role == ROLES[role]
        assert message.text == "x"
    with pytest.raises(BadRequest):
        read(messages=[{"role": "nobody", "content": "x"}])

    verdicts = documented("Fields of a message")
    theirs = {name for kind in get_args(ChatCompletionMessageParam) for name in kind.__annotations__}
    assert verdicts.keys() >= theirs
    examples: dict[str, Any] = {"tool_calls": [CALL], "function_call": CALL["function"], "content": "y", "role": "user"}
    for name, verdict in verdicts.items():
        role = "tool" if name == "tool_call_id" else "assistant"
        base: dict[str, Any] = {"role": role, "content": "" if name == "refusal" else "x", "name": "f"}
        messages = [read(messages=[item]).messages for item in (base, {**base, name: examples.get(name, "v")})]
        assert (messages[0] != messages[1]) == (verdict == "used"), name


def test_the_docs_cover_every_part() -> None:
    url = f"data:image/png;base64,{DATA}"
    examples: dict[str, Any] = {
        **{kind: {"url": url} for kind in ("image_url", "audio_url", "video_url")},
        "input_audio": {"data": DATA, "format": "wav"},
        "file": {"file_data": DATA},
    }
    verdicts = documented("Parts of content")
    assert verdicts.keys() >= kinds(ChatCompletionContentPartParam)
    for kind, verdict in verdicts.items():
        part = {"type": kind, kind: examples.get(kind, "v")}
        (message,) = read(messages=[{"role": "user", "content": [part]}]).messages
        assert verdict == "used"
        if kind == "thinking":
            part = {"type": kind, kind: "v"}
            (message,) = read(messages=[{"role": "assistant", "content": [part]}]).messages
            assert message == Message("assistant", "", "v")
        else:
            assert message.text or message.media
    for part in ({"type": "odd", "odd": 1}, {"type": "file", "file": {"file_id": "x"}}):
        with pytest.raises(BadRequest):
            read(messages=[{"role": "user", "content": [part]}])


def test_the_docs_cover_every_type_of_tool() -> None:
    examples = {"function": TOOL, "custom": {"type": "custom", "custom": {"name": "p"}}}
    verdicts = documented("Types of `tools`")
    assert verdicts.keys() == kinds(ChatCompletionToolUnionParam) == examples.keys()
    for kind in verdicts:
        request = read(tools=[examples[kind]])
        assert (len(request.tools), request.ignored) == (1, ())
    request = read(tools=[{"type": "web_search"}])
    assert (request.tools, request.ignored) == ((), ("tools[0]:web_search",))
