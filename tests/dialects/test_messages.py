"""What the messages dialect reads: every shape that harnesses send, and every fault by its path."""

from __future__ import annotations

import copy
import math
from hashlib import sha256
from typing import Any

import orjson
import pytest

from support.dialects.messages_wire import (
    DIALECT,
    FETCH,
    IMAGE,
    MARK,
    SCHEMA,
    SEARCH,
    TOOL,
    USER,
    assistant,
    document,
    image,
    messages,
    read,
    reference,
    result,
    system,
    text,
    use,
    user,
)
from support.dialects.mutation import DEEP
from towline.conversation import Answer, Hints, Media, Message, Reply, Request, Sampling, Tool, ToolCall, Usage
from towline.dialects.wire import seal
from towline.errors import BadRequest
from towline.tokens.graph import fingerprint
from towline.tokens.graph.tool_results import order_tool_results


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"role": "system", "content": "s"}, [Message("system", "s")]),
        (system(text("a", **MARK), text("b")), [Message("system", "a\nb")]),
        ({"role": "developer", "content": "s"}, [Message("system", "s")]),
        ({"role": "user", "content": "x"}, [Message("user", "x")]),
        ({"role": "user", "content": ""}, [Message("user", "")]),
        (user(), [Message("user", "")]),
        (user(text("a ", **MARK), text("b", citations=[])), [Message("user", "a b")]),
        (user(text("look"), IMAGE), [Message("user", "look", media=(image(4),))]),
        (
            user({"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}, text("z")),
            [
                Message(
                    "user",
                    "z",
                    media=(Media("image", sha256(b"https://x/y.png").hexdigest(), "https://x/y.png", 0),),
                )
            ],
        ),
        (
            user(document({"type": "text", "media_type": "text/plain", "data": "d"}, title="T", context="C")),
            [Message("user", "T\nC\nd")],
        ),
        (
            user(document({"type": "content", "content": [text("ab"), IMAGE, text("c")]}), text("d")),
            [Message("user", "abcd", media=(image(2),))],
        ),
        (user(document({"type": "content", "content": "whole"})), [Message("user", "whole")]),
        (
            user(
                document({"type": "base64", "media_type": "application/pdf", "data": "AAEC"}, title="T"),
                text("read it"),
            ),
            [
                Message(
                    "user",
                    "T\nread it",
                    media=(Media("file", sha256(b"\0\1\2").hexdigest(), "data:application/pdf;base64,AAEC", 2),),
                )
            ],
        ),
        (
            user({"type": "search_result", "title": "T", "source": "https://s", "content": [text("a"), text("b")]}),
            [Message("user", "T\nhttps://s\na\nb")],
        ),
        (
            user({"type": "tool_reference", "tool_name": "x"}),
            [Message("user", '<functions>\n<function>{"name":"x"}</function>\n</functions>')],
        ),
        (
            user({"type": "tool_removal", "tool": {"type": "tool_reference", "name": "x"}}),
            [Message("user", "The tool x is no longer available.")],
        ),
        (user({"type": "compaction", "content": "so far"}, text("!")), [Message("user", "so far!")]),
        (user(result("c1", content="r", is_error=True, **MARK)), [Message("tool", "r", tool_call_id="c1")]),
        (user(result("c1")), [Message("tool", tool_call_id="c1")]),
        (user(result("c1", content=[]), text("")), [Message("tool", tool_call_id="c1")]),
        (
            user(result("c2", content=[text("a"), IMAGE, text("b")]), text("note"), result("c1", content="r")),
            [
                Message("tool", "ab", tool_call_id="c2", media=(image(1),)),
                Message("tool", "r", tool_call_id="c1"),
                Message("user", "note"),
            ],
        ),
        (
            user(result("c1", content=[{"type": "browser_state", "tabs": [{"id": 1, "active": True}]}])),
            [Message("tool", '{"tabs":[{"id":1,"active":true}]}', tool_call_id="c1")],
        ),
        ({"role": "assistant", "content": "a"}, [Message("assistant", "a")]),
        (assistant(), [Message("assistant", "")]),
        (assistant(text("a"), text("b", citations=None)), [Message("assistant", "ab")]),
        (
            assistant({"type": "thinking", "thinking": "t", "signature": "foreign"}, text("a")),
            [Message("assistant", "a", "t")],
        ),
        (
            assistant({"type": "thinking", "thinking": "", "signature": seal("hidden")}, text("a")),
            [Message("assistant", "a", "hidden")],
        ),
        (assistant({"type": "thinking", "signature": "foreign"}, text("a")), [Message("assistant", "a")]),
        (assistant({"type": "redacted_thinking", "data": "foreign"}, text("a")), [Message("assistant", "a")]),
        (assistant({"type": "redacted_thinking", "data": seal("t")}), [Message("assistant", "", "t")]),
        (
            assistant(text("a"), use("f", {"n": 1}, caller={"type": "direct"}), use("g", {}, "c2")),
            [Message("assistant", "a", tool_calls=(ToolCall("c1", "f", {"n": 1}), ToolCall("c2", "g", {})))],
        ),
        (
            assistant(use("f", {"unparsed_arguments": "[1"}), use("f", {"unparsed_arguments": "x", "n": 1}, "c2")),
            [
                Message(
                    "assistant",
                    tool_calls=(ToolCall("c1", "f", "[1"), ToolCall("c2", "f", {"unparsed_arguments": "x", "n": 1})),
                )
            ],
        ),
        (
            assistant(
                text("a"), {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}}, SEARCH, text("b")
            ),
            [
                Message("assistant", "a", tool_calls=(ToolCall("s1", "web_search", {}),)),
                Message("tool", '[{"type":"web_search_result","url":"u"}]', tool_call_id="s1"),
                Message("assistant", "b"),
            ],
        ),
        (
            assistant(use("f", {}, "s1"), use("g", {}, "s2"), SEARCH, SEARCH | {"tool_use_id": "s2", "content": "r"}),
            [
                Message("assistant", tool_calls=(ToolCall("s1", "f", {}), ToolCall("s2", "g", {}))),
                Message("tool", '[{"type":"web_search_result","url":"u"}]', tool_call_id="s1"),
                Message("tool", "r", tool_call_id="s2"),
            ],
        ),
        (
            assistant(
                {"type": "mcp_tool_use", "id": "s1", "name": "f", "server_name": "x", "input": {"a": True}},
                {"type": "mcp_tool_result", "tool_use_id": "s1", "is_error": False, "content": [text("r"), text("s")]},
            ),
            [
                Message("assistant", tool_calls=(ToolCall("s1", "f", {"a": True}),)),
                Message("tool", "rs", tool_call_id="s1"),
            ],
        ),
        (
            assistant({"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}}, text("a")),
            [Message("assistant", "a")],
        ),
        (assistant({"type": "compaction", "content": "so far"}), [Message("assistant", "so far")]),
        (assistant({"type": "compaction", "content": None}), [Message("assistant")]),
    ],
)
def test_each_shape_of_a_message(item: dict[str, Any], expected: list[Message]) -> None:
    assert messages(USER, item, USER)[1:-1] == expected


def test_consecutive_assistant_messages_are_one_turn() -> None:
    parts = [
        assistant({"type": "thinking", "thinking": "t", "signature": "s"}),
        {"role": "assistant", "content": "a"},
        assistant(use("f", {}), {"type": "thinking", "thinking": "u", "signature": "s"}),
    ]
    expected = Message("assistant", "a", "t\nu", (ToolCall("c1", "f", {}),))
    assert messages(USER, *parts, user(result("c1"))) == [
        Message("user", "hi"),
        expected,
        Message("tool", tool_call_id="c1"),
    ]
    apart = messages(
        USER, assistant(text("a")), {"role": "system", "output_config": {"effort": "low"}}, assistant(text("b"))
    )
    assert apart[1:] == [Message("assistant", "a"), Message("assistant", "b")]
    # A prefilled last turn is an assistant message like any other.
    assert messages(USER, assistant(text("The answer is (")))[-1] == Message("assistant", "The answer is (")


CALLS = (ToolCall("call00001000", "f", {"a": 1, "on": True}), ToolCall("call00001001", "g", {}))
REPLY = Reply("I look.", "Let me\nthink.", CALLS)


def written(reply: Reply) -> list[dict[str, Any]]:
    """The blocks of an answer."""
    answer = Answer("a", 1, "m", [reply], Usage(3, 2))
    blocks: list[dict[str, Any]] = orjson.loads(DIALECT.write(read()[0], answer).body)["content"]
    return blocks


def without(*kinds: str) -> Any:
    return lambda blocks: [block for block in blocks if block["type"] not in kinds]


@pytest.mark.parametrize("reply", [REPLY, Reply("", "t", CALLS[:1]), Reply(" a\r\n", None), Reply("", "t"), Reply()])
@pytest.mark.parametrize(
    "restyle",
    [
        lambda blocks: blocks,
        without("thinking"),
        lambda blocks: [{"type": "redacted_thinking", "data": "x"}, *without("thinking")(blocks)],
        lambda blocks: [block | {"thinking": ""} if block["type"] == "thinking" else block for block in blocks],
        lambda blocks: [block | MARK for block in blocks],
        lambda blocks: [block | {"citations": None, "caller": {"type": "direct"}} for block in blocks],
        lambda blocks: [block | {"id": "other"} for block in blocks],
        lambda blocks: [text(""), *blocks, text("\n")],
        lambda blocks: [
            part
            for block in blocks
            for part in ([text(block["text"][:3]), text(block["text"][3:])] if block["type"] == "text" else [block])
        ],
        lambda blocks: [
            block | {"text": block["text"].replace("\r\n", "\n")} if "text" in block else block for block in blocks
        ],
        lambda blocks: "".join(block["text"] for block in blocks) if without("text")(blocks) == [] else blocks,
        lambda blocks: [
            block | {"input": dict(reversed(block["input"].items()))} if "input" in block else block for block in blocks
        ],
    ],
)
def test_a_reply_comes_back_as_the_message_it_was(reply: Reply, restyle: Any) -> None:
    echoed = messages(USER, {"role": "assistant", "content": restyle(written(reply))}, USER)
    assert len(echoed) == 3
    assert fingerprint.of(echoed[1]) == fingerprint.of(reply.as_message())
    assert messages(USER, {"role": "assistant", "content": written(reply)})[1] == reply.as_message()


def test_results_in_any_order_and_shape_are_the_same_results() -> None:
    said = assistant(*written(REPLY))
    first, second = result(CALLS[0].id, content="r", is_error=False), result(CALLS[1].id, content=[])
    orders: list[list[dict[str, Any]]] = [
        [user(first, second, text("go on"))],
        [user(second | MARK, {**first, "content": [text("r")]}, text("go on", **MARK))],
        [user({"type": "tool_result", "tool_use_id": CALLS[1].id}), user(first), {"role": "user", "content": "go on"}],
        [user(text("go on"), second, first)],
    ]
    settled = []
    for items in orders:
        found = messages(USER, said, *items)
        order_tool_results(found)
        settled.append([fingerprint.of(message) for message in found])
        assert [message.name for message in found] == ["", "", "f", "g", ""]
    assert settled == [settled[0]] * 4


@pytest.mark.parametrize(
    ("given_system", "expected"),
    [
        (None, None),
        ("", None),
        ([], None),
        ([text("")], None),
        ("be brief", "be brief"),
        ([text("billing 1"), text("be brief", **MARK)], "billing 1\nbe brief"),
    ],
)
def test_system_text_leads(given_system: Any, expected: str | None) -> None:
    lead = [] if expected is None else [Message("system", expected)]
    found = messages(system(text("early")), USER, {"role": "system", "content": "late"}, system=given_system)
    rest = [Message("system", "early"), Message("user", "hi"), Message("system", "late")]
    assert found == lead + rest


def test_all_parameters() -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    request, _ = read(
        headers={"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"},
        system="s",
        tools=[
            {"name": "f", "description": "d", "input_schema": SCHEMA, "strict": True, **MARK},
            {"type": "custom", "name": "g", "input_schema": {}, "eager_input_streaming": True},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
            {"type": "mcp_toolset", "mcp_server_name": "x"},
        ],
        tool_choice={"type": "tool", "name": "g", "disable_parallel_tool_use": True},
        max_tokens=7,
        temperature=1,
        top_p=0.5,
        top_k=40,
        stop_sequences=["END", "\n\nHuman:"],
        stream=True,
        thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
        output_config={"effort": "high", "format": form, "task_budget": {"type": "tokens", "total": 5}},
        context_management={"edits": []},
        metadata={"user_id": "u"},
        mcp_servers=[],
        service_tier="auto",
        speed=None,
    )
    assert request == Request(
        dialect="messages",
        model="m",
        messages=[Message("system", "s"), Message("user", "hi")],
        tools=(Tool("f", "d", SCHEMA, extra={"strict": True}), Tool("g")),
        tool_choice={"name": "g"},
        sampling=Sampling(
            temperature=1.0,
            top_p=0.5,
            top_k=40,
            max_tokens=7,
            stop=("END", "\n\nHuman:"),
            other={"output_format": form, "disable_parallel_tool_use": True},
        ),
        stream=True,
        template_args={"enable_thinking": True, "reasoning_effort": "high"},
        hints=Hints(session="s", agent="a"),
        ignored=(
            "context_management",
            "mcp_servers",
            "metadata",
            "output_config.task_budget",
            "service_tier",
            "thinking.budget_tokens",
            "tools[2]:web_search_20250305",
            "tools[3]:mcp_toolset",
        ),
        wire={"omit_thinking": True},
    )


def test_kinds_of_thinking_and_of_tool_choice() -> None:
    def arguments(kind: str, **more: Any) -> dict[str, Any]:
        return read(thinking={"type": kind, **more})[0].template_args

    assert [arguments("disabled"), arguments("enabled", budget_tokens=2000)] == [
        {"enable_thinking": False},
        {"enable_thinking": True},
    ]
    assert arguments("adaptive", display="summarized") == arguments("between_tools") == {}
    tools = [{"name": "f", "input_schema": SCHEMA}, {"type": "web_search_20250305", "name": "web_search"}]
    choices = [{"type": kind} for kind in ("auto", "any", "none")] + [{"type": "tool", "name": "web_search"}, None]
    found = [read(tools=tools, tool_choice=choice)[0].tool_choice for choice in choices]
    assert found == ["auto", "required", "none", None, None]
    assert read(tool_choice={"type": "auto"})[0].tools == ()
    # Only counting tokens needs no budget for them.
    assert read(operation="count_tokens", max_tokens=None)[0].sampling.max_tokens is None


def test_tools_that_anthropic_defines_and_clients_run() -> None:
    tools = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 10},
        {"type": "text_editor_20250124", "name": "str_replace_editor"},
        {"type": "memory_20250818", "name": "memory"},
        {"type": "computer_20250124", "name": "computer", "display_width_px": 1, "display_height_px": 1},
    ]
    request, _ = read(tools=tools)
    assert [tool.name for tool in request.tools] == [tool["name"] for tool in tools[:4]]
    assert request.tools[1].extra == {"max_characters": 10, "type": "text_editor_20250728"}
    assert request.ignored == ("tools[4]:computer_20250124",)
    commands = [tool.parameters["properties"]["command"].get("enum", ()) for tool in request.tools]
    assert ["undo_edit" in allowed for allowed in commands] == [False, False, True, False]
    assert {"delete", "rename"} <= set(commands[3])
    assert all(tool.description for tool in request.tools)


OFFERED = {"name": "search_tools", "input_schema": {"type": "object"}}
FETCH_LINE = (
    '<function>{"description":"Fetches.","name":"fetch","parameters":'
    '{"type":"object","properties":{"a":{"type":"integer"}}}}</function>\n'
)


def test_deferred_tools_are_shown_where_messages_refer_to_them() -> None:
    first, known = read(messages=[USER], tools=[OFFERED, {**FETCH, "name": "other"}])
    assert (first.tools, first.ignored) == (
        (Tool("search_tools", parameters={"type": "object"}),),
        ("tools[1]:deferred",),
    )

    found = user(result("c1", content=[text("Found:"), reference("fetch"), reference("unknown"), text("!")]))
    history = [USER, assistant(use("search_tools", {})), found]
    second, known = read(known, messages=history, tools=[OFFERED, FETCH])
    assert second.tools == first.tools
    expected = f'Found:<functions>\n{FETCH_LINE}<function>{{"name":"unknown"}}</function>\n</functions>!'
    assert second.messages[2] == Message("tool", expected, tool_call_id="c1")
    assert second.shown == (Tool("fetch", "Fetches.", SCHEMA),)
    assert fingerprint.root_key(second.tools, {}) == fingerprint.root_key(first.tools, {})

    # The text stands for as long as the definitions do, and no longer.
    again, known = read(known, messages=copy.deepcopy(history), tools=[OFFERED, dict(FETCH)])
    assert again.messages[2] is second.messages[2]
    changed = [OFFERED, {**FETCH, "description": "Gets."}]
    third, _ = read(known, messages=history, tools=changed)
    assert "Gets." in third.messages[2].text
    assert third.messages[1] is second.messages[1]

    # Where the provider was to search, nobody does, so every tool is offered.
    searched, _ = read(tools=[{"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}, FETCH])
    assert searched.tools == (Tool("fetch", "Fetches.", SCHEMA),)
    assert searched.ignored == ("tools[0]:tool_search_tool_bm25_20251119",)
    assert searched.wire == {}


def test_tools_added_and_removed_in_system_messages() -> None:
    named = {"type": "tool_reference", "name": "fetch"}
    inline = {"type": "tool_definition", "definition": {**FETCH, "name": "late", "description": "L"}}
    remote = {"type": "mcp_tool_reference", "server_name": "x", "name": "y"}
    changes = [
        text("News."),
        {"type": "tool_addition", "tool": named, **MARK},
        {"type": "tool_addition", "tool": inline},
        {"type": "tool_addition", "tool": remote},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "old"}},
    ]
    found = messages(USER, system(*changes), tools=[OFFERED, FETCH])[1].text
    late = FETCH_LINE.replace("Fetches.", "L").replace("fetch", "late")
    lists = [f"<functions>\n{line}</functions>" for line in (FETCH_LINE, late)]
    assert found == "\n".join(["News.", *lists, "", "The tool old is no longer available."])


BAD_MESSAGES: list[tuple[Any, str]] = [
    (5, ""),
    ({"content": "x"}, ".role"),
    ({"role": "robot", "content": "x"}, ".role"),
    ({"role": "tool", "content": "x"}, ".role"),
    ({"role": ["user"], "content": "x"}, ".role"),
    ({"role": "user"}, ".content"),
    ({"role": "system"}, ".content"),
    ({"role": "assistant", "content": None}, ".content"),
    ({"role": "user", "content": 5}, ".content"),
    ({"role": "user", "content": {}}, ".content"),
    (user(5), ".content[0]"),
    (user("text"), ".content[0]"),
    (user({"text": "x"}), ".content[0].type"),
    (user({"type": "text"}), ".content[0].text"),
    (user({"type": "text", "text": None}), ".content[0].text"),
    (user(text("x"), {"type": "hologram"}), ".content[1].type"),
    (user({"type": "thinking", "thinking": "t"}), ".content[0].type"),
    (user({"type": "container_upload", "file_id": "f"}), ".content[0].type"),
    (user({"type": "image"}), ".content[0].source"),
    (user({"type": "image", "source": {}}), ".content[0].source.type"),
    (user({"type": "image", "source": {"type": "file", "file_id": "f"}}), ".content[0].source.type"),
    (user({"type": "image", "source": {"type": "text", "data": "x"}}), ".content[0].source.type"),
    (user({"type": "image", "source": {"type": "base64", "data": "AA=="}}), ".content[0].source.media_type"),
    (
        user({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "%"}}),
        ".content[0].source.data",
    ),
    (user({"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}}), ".content[0].source.url"),
    (user(document({"type": "text", "data": 5})), ".content[0].source.data"),
    (user(document({"type": "content", "content": [result("c")]})), ".content[0].source.content[0].type"),
    (user(document({"type": "content"})), ".content[0].source.content"),
    (user(document({"type": "text", "data": "d"}, title=5)), ".content[0].title"),
    (user({"type": "search_result", "title": "t"}), ".content[0].content"),
    (user({"type": "tool_result", "content": "x"}), ".content[0].tool_use_id"),
    (user(result("c", content=5)), ".content[0].content"),
    (user(result("c", content=[{"type": "hologram"}])), ".content[0].content[0].type"),
    (user(result("c", content=[result("d")])), ".content[0].content[0].type"),
    (user(result("c", content=[{"type": "tool_reference"}])), ".content[0].content[0].tool_name"),
    (assistant(IMAGE), ".content[0].type"),
    (assistant(result("c")), ".content[0].type"),
    (assistant({"type": "thinking", "thinking": 5}), ".content[0].thinking"),
    (assistant({"type": "thinking", "thinking": "", "signature": 5}), ".content[0].signature"),
    (assistant({"type": "redacted_thinking"}), ".content[0].data"),
    (assistant({"type": "tool_use", "id": "c", "input": {}}), ".content[0].name"),
    (assistant(use("f", 5)), ".content[0].input"),
    (assistant(use("f", {}, 5)), ".content[0].id"),  # type: ignore[arg-type]
    (assistant({"type": "web_search_tool_result", "content": []}), ".content[0].tool_use_id"),
    (system(IMAGE), ".content[0].type"),
    (system({"type": "tool_addition"}), ".content[0].tool"),
    (system({"type": "tool_addition", "tool": {"type": "tool_reference"}}), ".content[0].tool.name"),
    (
        system({"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {"input_schema": {}}}}),
        ".content[0].tool.definition.name",
    ),
]


@pytest.mark.parametrize(("item", "suffix"), BAD_MESSAGES)
def test_invalid_fields_of_a_message_are_named(item: Any, suffix: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read(messages=[USER, item])
    assert caught.value.param == f"messages[1]{suffix}"
    error = orjson.loads(DIALECT.error(caught.value).body)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"messages.1{suffix.replace('[', '.').replace(']', '')}: ")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [], "system": "s"}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": [{"role": "system", "output_config": {}}]}, "messages"),
        ({"messages": [{**USER, "extra": DEEP}]}, "messages[0]"),
        ({"system": 5}, "system"),
        ({"system": False}, "system"),
        ({"system": {"type": "text"}}, "system"),
        ({"system": ["s"]}, "system[0]"),
        ({"system": [text("s"), IMAGE]}, "system[1].type"),
        ({"system": [{"type": "text"}]}, "system[0].text"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1e3}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": "1"}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.0}, "top_k"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
        ({"stop_sequences": ["x", " \n"]}, "stop_sequences[1]"),
        ({"stop_sequences": [5]}, "stop_sequences[0]"),
        ({"stream": "yes"}, "stream"),
        ({"thinking": True}, "thinking"),
        ({"thinking": {}}, "thinking.type"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": "1"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": 5}}, "thinking.display"),
        ({"output_config": []}, "output_config"),
        ({"output_config": {"effort": 5}}, "output_config.effort"),
        ({"output_config": {"format": "json"}}, "output_config.format"),
        ({"output_config": {"format": DEEP}}, "output_config.format"),
        ({"output_format": []}, "output_format"),
        ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
        ({"safeguards": {}}, "safeguards"),
        ({"tools": {}}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [TOOL, {"name": ""}]}, "tools[1].name"),
        ({"tools": [{"name": "f", "input_schema": []}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": DEEP}]}, "tools[0]"),
        ({"tools": [{"name": "f", "description": 5}]}, "tools[0].description"),
        ({"tools": [{"name": "f", "type": 5}]}, "tools[0].type"),
        ({"tools": [{"type": "bash_20250124"}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "defer_loading": 1}]}, "tools[0].defer_loading"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {}}, "tool_choice.type"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "tool_choice.disable_parallel_tool_use"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
    ],
)
def test_invalid_parameters_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read(**fields)
    assert caught.value.param == param
