"""What the chat dialect reads: every shape that harnesses send, every fault by its path, and history only once."""

from __future__ import annotations

import copy
import math
from base64 import b64encode
from hashlib import sha256
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.dialects.mutation import DEEP, json_values, mutants
from towline.conversation import Hints, Media, Message, Request, Sampling, Tool, ToolCall
from towline.dialects import chat
from towline.dialects.base import DialectCall, ReadCache
from towline.dialects.chat import ChatDialect
from towline.dialects.hints import read_hints
from towline.errors import BadRequest

DIALECT = ChatDialect()
PNG = b"\x89PNG\r\n"
PNG_URL = "data:image/png;base64," + b64encode(PNG).decode()
USER = {"role": "user", "content": "hi"}


def read(
    known: ReadCache | None = None, headers: dict[str, str] | None = None, **fields: Any
) -> tuple[Request, ReadCache]:
    body = {"model": "m", "messages": [USER], **fields}
    return DIALECT.read(DialectCall("generate", body, headers or {}), known or ReadCache())


def message(**item: Any) -> Message:
    return read(messages=[item])[0].messages[0]


def function(name: str, arguments: Any, call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def text_part(text: str, **extra: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **extra}


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"role": "system", "content": "s"}, Message("system", "s")),
        ({"role": "developer", "content": [text_part("a"), text_part("b")]}, Message("system", "ab")),
        ({"role": "user", "content": None}, Message("user")),
        (
            {"role": "user", "content": "x", "name": "ann", "cache_control": {"type": "ephemeral"}},
            Message("user", "x", name="ann"),
        ),
        (
            {"role": "user", "content": [text_part("look: ", cache_control={"type": "ephemeral"}), "this "]},
            Message("user", "look: this "),
        ),
        (
            {
                "role": "user",
                "content": [text_part("look"), {"type": "image_url", "image_url": {"url": PNG_URL, "detail": "low"}}],
            },
            Message("user", "look", media=(Media("image", sha256(PNG).hexdigest(), PNG_URL, 4),)),
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": "https://x/y.png"}, text_part("z")]},
            Message("user", "z", media=(Media("image", sha256(b"https://x/y.png").hexdigest(), "https://x/y.png", 0),)),
        ),
        (
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AAEC", "format": "mp3"}}]},
            Message("user", media=(Media("audio", sha256(b"\0\1\2").hexdigest(), "data:audio/mpeg;base64,AAEC", 0),)),
        ),
        (
            {
                "role": "user",
                "content": [{"type": "file", "file": {"filename": "f", "file_data": "data:text/plain,a%20b"}}],
            },
            Message("user", media=(Media("file", sha256(b"a b").hexdigest(), "data:text/plain,a%20b", 0),)),
        ),
        ({"role": "assistant"}, Message("assistant")),
        ({"role": "assistant", "content": None, "refusal": "no"}, Message("assistant", "no")),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "never"}]}, Message("assistant", "never")),
        ({"role": "assistant", "content": "<think>t</think>a"}, Message("assistant", "<think>t</think>a")),
        ({"role": "assistant", "content": "a", "reasoning_content": "t"}, Message("assistant", "a", "t")),
        (
            {"role": "assistant", "content": "a", "reasoning_content": "", "reasoning": "t"},
            Message("assistant", "a", "t"),
        ),
        ({"role": "assistant", "content": "a", "thinking": "t"}, Message("assistant", "a", "t")),
        (
            {"role": "assistant", "content": [{"type": "thinking", "thinking": [text_part("t")]}, text_part("a")]},
            Message("assistant", "a", "t"),
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [function("f", '{"a": 1, "b": [true, null]}')]},
            Message("assistant", tool_calls=(ToolCall("c1", "f", {"a": 1, "b": [True, None]}),)),
        ),
        (
            {"role": "assistant", "tool_calls": [function("f", {"a": 1}), function("g", None, "c2")]},
            Message("assistant", tool_calls=(ToolCall("c1", "f", {"a": 1}), ToolCall("c2", "g", {}))),
        ),
        (
            {
                "role": "assistant",
                "tool_calls": [function("f", text) for text in ("", "[1]", '{"a": NaN}', '"{}"', "{")],
            },
            Message(
                "assistant",
                tool_calls=tuple(ToolCall("c1", "f", text) for text in ("", "[1]", '{"a": NaN}', '"{}"', "{")),
            ),
        ),
        (
            {
                "role": "assistant",
                "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "patch", "input": "{}"}}],
            },
            Message("assistant", tool_calls=(ToolCall("c", "patch", "{}", custom=True),)),
        ),
        (
            {"role": "assistant", "content": "", "tool_calls": [], "function_call": {"name": "f", "arguments": "{}"}},
            Message("assistant", tool_calls=(ToolCall("", "f", {}),)),
        ),
        ({"role": "tool", "tool_call_id": "c", "content": [text_part("r")]}, Message("tool", "r", tool_call_id="c")),
        ({"role": "tool", "name": "f", "content": "r"}, Message("tool", "r", name="f")),
        ({"role": "function", "name": "f", "content": None}, Message("tool", name="f")),
    ],
)
def test_each_shape_of_a_message(item: dict[str, Any], expected: Message) -> None:
    assert message(**item) == expected


def test_arguments_nested_too_deep_to_be_written_again_stay_a_string() -> None:
    def arguments(text: str) -> Any:
        return message(role="assistant", tool_calls=[function("f", text)]).tool_calls[0].arguments

    for depth in (200, 253):
        written = arguments('{"a":' * depth + "1" + "}" * depth)
        assert isinstance(written, dict)
        assert orjson.dumps([written])
    for depth in (254, 1000, 5000):
        deep = '{"a":' * depth + "1" + "}" * depth
        assert arguments(deep) == deep
    wide = '{"a":[' + ",".join(["{}"] * 500) + "]}"
    assert arguments(wide) == orjson.loads(wide)


def test_all_parameters() -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /a+/"}}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    request, _ = read(
        headers={"x-session-id": "s"},
        tools=[
            {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema, "strict": True}},
            {"type": "function", "function": {"name": "g", "parameters": None}, "cache_control": {"type": "ephemeral"}},
            {"type": "custom", "custom": {"name": "patch", "format": grammar}},
            {"type": "web_search"},
        ],
        tool_choice={"type": "function", "function": {"name": "g"}},
        parallel_tool_calls=False,
        n=3,
        stop="END",
        temperature=1,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        seed=-5,
        max_tokens=9,
        max_completion_tokens=7,
        presence_penalty=0.5,
        frequency_penalty=0,
        logit_bias={"5": -100},
        response_format={"type": "json_object"},
        guided_regex="a+",
        logprobs=True,
        top_logprobs=5,
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
        store=False,
        metadata={"a": "b"},
        user="u",
        service_tier=None,
        chat_template_kwargs={"enable_thinking": False, "preserve": [1]},
        reasoning_effort="high",
        enable_thinking=True,
    )
    assert request == Request(
        dialect="chat",
        model="m",
        messages=[Message("user", "hi")],
        tools=(
            Tool("f", "d", schema, extra={"strict": True}),
            Tool("g"),
            Tool("patch", custom=True, extra={"format": grammar}),
        ),
        tool_choice={"name": "g"},
        sampling=Sampling(
            temperature=1.0,
            top_p=0.5,
            top_k=0,
            max_tokens=7,
            stop=("END",),
            seed=-5,
            n=3,
            other={
                "min_p": 0.1,
                "presence_penalty": 0.5,
                "guided_regex": "a+",
                "logit_bias": {"5": -100.0},
                "response_format": {"type": "json_object"},
                "parallel_tool_calls": False,
            },
        ),
        stream=True,
        template_args={"enable_thinking": False, "preserve": [1], "reasoning_effort": "high"},
        hints=Hints(session="s"),
        ignored=("metadata", "store", "top_logprobs", "user", "tools[3]:web_search"),
        wire={"include_usage": True, "logprobs": True},
    )


def test_legacy_functions_and_kinds_of_tool_choice() -> None:
    functions = [{"name": "f", "description": "d"}, {"name": "g"}]
    request, _ = read(functions=functions, function_call={"name": "g"})
    assert (request.tools, request.tool_choice, request.wire) == (
        (Tool("f", "d"), Tool("g")),
        {"name": "g"},
        {"functions": True},
    )
    tools = [{"type": "function", "function": declared} for declared in functions]
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}, {"type": "mcp"}]}
    for choice, expected in (
        ("auto", "auto"),
        ("required", "required"),
        (None, None),
        ({"type": "allowed_tools", "allowed_tools": allowed}, {"mode": "required", "names": ["f"]}),
    ):
        assert read(tools=tools, tool_choice=choice)[0].tool_choice == expected
    assert read(tools=[{"type": "web_search"}], tool_choice={"type": "web_search"})[0].tool_choice is None
    assert read(tool_choice="auto")[0].tools == ()


BAD_MESSAGES: list[tuple[Any, str]] = [
    (5, ""),
    ({"content": "x"}, ".role"),
    ({"role": "robot", "content": "x"}, ".role"),
    ({"role": ["user"], "content": "x"}, ".role"),
    ({"role": "user"}, ".content"),
    ({"role": "user", "content": 5}, ".content"),
    ({"role": "user", "content": [5]}, ".content[0]"),
    ({"role": "user", "content": [{"text": "x"}]}, ".content[0].type"),
    ({"role": "user", "content": [{"type": "text", "text": None}]}, ".content[0].text"),
    ({"role": "user", "content": [text_part("x"), {"type": "hologram"}]}, ".content[1].type"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, ".content[0].image_url.url"),
    (
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]},
        ".content[0].image_url.url",
    ),
    (
        {"role": "user", "content": [{"type": "image_url", "image_url": "data:image/png;base64,%%"}]},
        ".content[0].image_url",
    ),
    (
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "é", "format": "wav"}}]},
        ".content[0].input_audio.data",
    ),
    (
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AA==", "format": "au"}}]},
        ".content[0].input_audio.format",
    ),
    ({"role": "user", "content": [{"type": "file", "file": {"file_id": "f1"}}]}, ".content[0].file"),
    ({"role": "user", "content": "x", "name": 5}, ".name"),
    ({"role": "assistant", "content": "x", "reasoning_content": []}, ".reasoning_content"),
    ({"role": "assistant", "content": [{"type": "thinking", "thinking": [{}]}]}, ".content[0].thinking[0].text"),
    ({"role": "assistant", "tool_calls": {}}, ".tool_calls"),
    ({"role": "assistant", "tool_calls": [None]}, ".tool_calls[0]"),
    ({"role": "assistant", "tool_calls": [{"id": 5}]}, ".tool_calls[0].id"),
    ({"role": "assistant", "tool_calls": [{"id": "c", "type": "magic"}]}, ".tool_calls[0].type"),
    ({"role": "assistant", "tool_calls": [{"id": "c"}]}, ".tool_calls[0].function"),
    ({"role": "assistant", "tool_calls": [function("f", "{}"), function("f", 5)]}, ".tool_calls[1].function.arguments"),
    ({"role": "assistant", "tool_calls": [function("f", "{}") | {"type": "custom"}]}, ".tool_calls[0].custom"),
    ({"role": "assistant", "function_call": {"arguments": "{}"}}, ".function_call.name"),
    ({"role": "tool", "content": "x"}, ".tool_call_id"),
    ({"role": "function", "content": "x", "tool_call_id": "c"}, ".name"),
]


@pytest.mark.parametrize(("item", "suffix"), BAD_MESSAGES)
def test_invalid_fields_of_a_message_are_named(item: Any, suffix: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read(messages=[USER, item])
    assert caught.value.param == f"messages[1]{suffix}"
    assert f"'{caught.value.param}'" in caught.value.message


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": [{**USER, "extra": DEEP}]}, "messages[0]"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": math.inf}, "top_p"),
        ({"top_k": 1.0}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 1e3}, "max_completion_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x", ""]}, "stop[1]"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"min_p": []}, "min_p"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"guided_json": DEEP}, "guided_json"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": DEEP}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"reasoning_effort": 5}, "reasoning_effort"),
        ({"enable_thinking": "no"}, "enable_thinking"),
        ({"tools": {}}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [TOOL, {"type": "function"}]}, "tools[1].function"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]}, "tools[0]"),
        ({"tools": [{"type": "custom", "custom": {"name": "f", "format": "text"}}]}, "tools[0].custom.format"),
        ({"functions": [{}]}, "functions[0].name"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
        (
            {
                "tools": [TOOL],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [5]}},
            },
            "tool_choice.allowed_tools.tools[0]",
        ),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call.name"),
    ],
)
def test_invalid_parameters_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read(**fields)
    assert caught.value.param == param


def history(turns: int) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = [{"role": "system", "content": "s"}]
    for turn in range(turns):
        items.append({"role": "assistant", "content": None, "tool_calls": [function("f", f'{{"n":{turn}}}')]})
        items.append({"role": "tool", "tool_call_id": "c1", "content": f"result {turn}"})
    return items


def test_a_repeated_history_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    original = chat.read_message
    monkeypatch.setattr(chat, "read_message", lambda item, where: reads.append(where) or original(item, where))
    tools = [{"type": "function", "function": {"name": "f"}}, {"type": "mcp"}]
    first, known = read(messages=history(200), tools=tools)
    assert len(reads) == 401
    reads.clear()

    again = orjson.loads(orjson.dumps([*history(200), {"role": "user", "content": "more"}]))
    second, after = read(known, messages=again, tools=copy.deepcopy(tools))
    assert reads == ["messages[401]"]
    assert all(mine is yours for mine, yours in zip(second.messages, first.messages, strict=False))
    assert second.messages[401] == Message("user", "more")
    assert second.tools is first.tools
    assert second.ignored == first.ignored == ("tools[1]:mcp",)
    assert after.starts == list(range(402))
    # The strings of the first request are kept, not a second copy of each.
    assert all(mine is yours for mine, yours in zip(after.items, known.items, strict=False))
    # Reordering the messages of a request does not change the cache.
    second.messages.reverse()
    assert after.messages[401] == Message("user", "more")

    reads.clear()
    edited = copy.deepcopy(again)
    edited[100]["content"] = "edited"
    third, _ = read(after, messages=edited, tools=[])
    assert reads[0] == "messages[100]"
    assert len(reads) == 302
    assert third.messages[99] is first.messages[99]
    assert third.tools == ()


def test_values_equal_in_python_differ_on_the_wire() -> None:
    def call(value: Any) -> list[dict[str, Any]]:
        return [USER, {"role": "assistant", "tool_calls": [function("f", {"flag": value})]}, USER]

    _, known = read(messages=call(True))
    assert read(known, messages=call(True))[0].messages[1] is known.messages[1]
    request, known = read(known, messages=call(1))
    assert request.messages[1].tool_calls[0].arguments["flag"] is not True
    assert type(read(known, messages=call(1.0))[0].messages[1].tool_calls[0].arguments["flag"]) is float
    default = [{"type": "function", "function": {"name": "f", "parameters": {"default": value}}} for value in (True, 1)]
    _, known = read(tools=default[:1])
    assert read(known, tools=default[1:])[0].tools[0].parameters["default"] is not True


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, Hints()),
        ({"x-session-id": "b", "x-parent-session-id": "a", "x-session-affinity": "b"}, Hints("b", "a")),
        ({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a1"}, Hints("s", agent="a1")),
        (
            {"session-id": "s", "thread-id": "t", "x-codex-window-id": "t:1", "x-codex-parent-thread-id": "s"},
            Hints("t", "s", window="t:1"),
        ),
        ({"session_id": "s", "conversation_id": "c"}, Hints("s")),
        ({"conversation_id": "c", "x-stainless-retry-count": "0"}, Hints("c")),
        ({"x-stainless-retry-count": "2", "idempotency-key": "k"}, Hints(retry=True, idempotency_key="k")),
        (
            {"x-stainless-retry-count": "²", "x-idempotency-key": "k", "x-session-id": "s" * 5000},
            Hints(idempotency_key="k"),
        ),
        ({"x-stainless-retry-count": "9" * 200}, Hints(retry=True)),
    ],
)
def test_hints(headers: dict[str, str], expected: Hints) -> None:
    assert read_hints(headers) == expected


RICH: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": [text_part("s")]},
        {"role": "user", "content": [text_part("u"), {"type": "image_url", "image_url": {"url": PNG_URL}}]},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AAEC", "format": "mp3"}}]},
        {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [function("f", '{"a":1}')]},
        {"role": "assistant", "content": "x", "tool_calls": [function("f", {"a": 1, "b": True})]},
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "p", "input": "i"}}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": [text_part("t")]}], "refusal": None},
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "tool", "tool_call_id": "c1", "content": [text_part("r")]},
        {"role": "function", "name": "f", "content": "r"},
    ],
    "tools": [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"a": 1}, "strict": True}},
        {"type": "custom", "custom": {"name": "p", "format": {"type": "text"}}},
    ],
    "functions": [{"name": "g"}],
    "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}},
    "function_call": {"name": "g"},
    "n": 2,
    "stop": ["a"],
    "seed": 1,
    "temperature": 0.5,
    "top_p": 1,
    "top_k": 5,
    "max_tokens": 3,
    "min_p": 0.1,
    "max_completion_tokens": 3,
    "presence_penalty": 1,
    "logit_bias": {"1": 2},
    "parallel_tool_calls": False,
    "response_format": {"type": "json_schema", "json_schema": {"name": "s"}},
    "guided_choice": ["a"],
    "logprobs": True,
    "top_logprobs": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
    "chat_template_kwargs": {"a": 1},
    "reasoning_effort": "low",
    "enable_thinking": True,
    "user": "u",
}

values = json_values("function", "custom")


def outcome(body: dict[str, Any], known: ReadCache) -> tuple[str, ReadCache]:
    """The outcome of reading a body, as text that tells `True` from `1`."""
    try:
        request, after = DIALECT.read(DialectCall("generate", body), known)
    except BadRequest as refusal:
        error = orjson.loads(DIALECT.error(refusal).body)["error"]
        return f"{error.pop('param')!s}: {error}", known
    assert len(request.messages) == len(after.items) == len(body["messages"])
    return repr(request), after


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], deadline=None)
@given(st.data())
def test_any_body_is_read_or_refused_and_the_cache_changes_nothing(data: st.DataObject) -> None:
    first = data.draw(mutants(RICH, values))
    _, known = outcome(first, ReadCache())
    second = data.draw(mutants(first, values))
    found = outcome(second, known)[0]
    assert found == outcome(second, ReadCache())[0]
    assert not found.startswith("None:"), "a refusal names its field"


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from([*RICH, "x"]), values))
def test_bodies_of_any_shape_are_refused_by_name(body: dict[str, Any]) -> None:
    outcome(body, ReadCache())
    for whole in ([], None, "text", 5):
        with pytest.raises(BadRequest):
            DIALECT.read(DialectCall("generate", whole), ReadCache())  # type: ignore[arg-type]
