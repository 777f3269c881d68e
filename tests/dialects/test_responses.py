"""What the responses dialect reads: every shape that harnesses send, and every fault by its path."""

from __future__ import annotations

import math
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from support.dialects.mutation import DEEP, json_values, mutants
from support.dialects.responses_bodies import (
    COMPUTER,
    DIALECT,
    OPERATION,
    PICTURE,
    PNG,
    PNG_URL,
    RICH,
    TOOL,
    USER,
    Item,
    calls,
    messages,
    one_call,
    outcome,
    read,
    result,
    says,
    text_part,
    thought,
    written,
)
from towline.conversation import Answer, Hints, Media, Message, Reply, Request, Sampling, Tool, ToolCall, Usage
from towline.dialects.base import DialectCall, ReadCache
from towline.dialects.wire import seal, unseal
from towline.errors import BadRequest
from towline.gateway.sampling import mint_call_id


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"role": "system", "content": "s"}, Message("system", "s")),
        (
            {"type": "message", "id": "msg_1", "role": "developer", "content": [text_part("a"), text_part("b")]},
            Message("system", "ab"),
        ),
        ({"role": "user", "content": None}, Message("user")),
        ({"id": "msg_1", "role": "user", "content": "x"}, Message("user", "x")),
        (
            {"role": "user", "content": [text_part("x", prompt_cache_breakpoint={"mode": "explicit"})]},
            Message("user", "x"),
        ),
        (
            {"role": "user", "content": [text_part("look"), {"type": "input_image", "image_url": PNG_URL}]},
            Message("user", "look", media=(replace(PICTURE, offset=4),)),
        ),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": {"url": PNG_URL}}, text_part("z")]},
            Message("user", "z", media=(PICTURE,)),
        ),
        (
            {
                "role": "user",
                "content": [{"type": "input_file", "filename": "f", "file_data": "data:text/plain,a%20b"}],
            },
            Message("user", media=(Media("file", sha256(b"a b").hexdigest(), "data:text/plain,a%20b", 0),)),
        ),
        (
            {"role": "user", "content": [{"type": "input_file", "file_data": "AAEC"}]},
            Message(
                "user",
                media=(Media("file", sha256(b"\0\1\2").hexdigest(), "data:application/octet-stream;base64,AAEC", 0),),
            ),
        ),
        (
            {"role": "user", "content": [{"type": "input_file", "file_url": "https://x/y"}]},
            Message("user", media=(Media("file", sha256(b"https://x/y").hexdigest(), "https://x/y", 0),)),
        ),
        (
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AAEC", "format": "mp3"}}]},
            Message("user", media=(Media("audio", sha256(b"\0\1\2").hexdigest(), "data:audio/mpeg;base64,AAEC", 0),)),
        ),
        (says("a", id="msg_1", status="completed", phase="final_answer"), Message("assistant", "a")),
        ({"role": "assistant", "content": "few-shot"}, Message("assistant", "few-shot")),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, Message("assistant", "no")),
        (thought("t"), Message("assistant", reasoning="t")),
        (thought(None, encrypted_content=seal("t"), content=None), Message("assistant", reasoning="t")),
        (thought("short", encrypted_content=seal("long")), Message("assistant", reasoning="long")),
        (thought("t", encrypted_content="of another provider"), Message("assistant", reasoning="t")),
        (
            thought("s", content=[{"type": "reasoning_text", "text": "a"}, {"type": "reasoning_text", "text": "b"}]),
            Message("assistant", reasoning="a\nb"),
        ),
        (thought(None), Message("assistant")),
        (calls("f", '{"a": 1, "b": [true, null]}', status="completed"), one_call("f", {"a": 1, "b": [True, None]})),
        (calls("f", {"a": 1}), one_call("f", {"a": 1})),
        (calls("f", None), one_call("f", {})),
        (calls("f", "[1]"), one_call("f", "[1]")),
        (calls("f", "{}", namespace="ns"), one_call("ns.f", {})),
        (calls("f", "{}", namespace="functions"), one_call("f", {})),
        (
            {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "{}"},
            one_call("apply_patch", "{}", custom=True),
        ),
        (result("r", id="fco_1", status="completed"), Message("tool", "r", tool_call_id="c1")),
        (result(None), Message("tool", tool_call_id="c1")),
        (
            result([text_part("r"), {"type": "input_image", "image_url": PNG_URL, "detail": "auto"}]),
            Message("tool", "r", tool_call_id="c1", media=(replace(PICTURE, offset=1),)),
        ),
        (
            {"type": "function_call_output", "name": "f", "namespace": "ns", "output": "r"},
            Message("tool", "r", name="ns.f"),
        ),
        ({**result("r"), "type": "custom_tool_call_output"}, Message("tool", "r", tool_call_id="c1")),
        (
            {"type": "tool_search_call", "call_id": "c1", "execution": "client", "arguments": {"query": "q"}},
            one_call("tool_search", {"query": "q"}),
        ),
        (
            {
                "type": "tool_search_output",
                "call_id": "c1",
                "tools": [{"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "f"}]}],
            },
            Message(
                "tool",
                '[{"name":"ns.f","description":"","parameters":{}}]',
                tool_call_id="c1",
                name="tool_search",
            ),
        ),
        (
            {
                "type": "local_shell_call",
                "call_id": "c1",
                "action": {"type": "exec", "command": ["ls"], "env": {}, "user": None, "timeout_ms": 5},
            },
            one_call("local_shell", {"command": ["ls"], "timeout_ms": 5}),
        ),
        ({"type": "local_shell_call_output", "id": "c1", "output": "r"}, Message("tool", "r", tool_call_id="c1")),
        (
            {"type": "shell_call", "call_id": "c1", "action": {"commands": ["ls"], "max_output_length": None}},
            one_call("shell", {"commands": ["ls"]}),
        ),
        (
            {"type": "shell_call_output", "call_id": "c1", "output": [{"stdout": "a", "stderr": ""}]},
            Message("tool", '[{"stdout":"a","stderr":""}]', tool_call_id="c1"),
        ),
        ({"type": "apply_patch_call", "call_id": "c1", "operation": OPERATION}, one_call("apply_patch", OPERATION)),
        (
            {"type": "apply_patch_call_output", "call_id": "c1", "status": "failed", "output": "no"},
            Message("tool", '{"status":"failed","output":"no"}', tool_call_id="c1"),
        ),
        (
            {
                "type": "web_search_call",
                "id": "ws_1",
                "status": "completed",
                "action": {"type": "search", "query": "q"},
            },
            Message("assistant", '{"type":"web_search_call","action":{"type":"search","query":"q"}}'),
        ),
        (
            {"type": "image_generation_call", "id": "ig_1", "result": b64encode(PNG).decode()},
            Message("assistant", '{"type":"image_generation_call"}', media=(PICTURE,)),
        ),
        (
            {"type": "computer_call_output", "call_id": "c1", "output": COMPUTER},
            Message("tool", tool_call_id="c1", media=(PICTURE,)),
        ),
        (
            {"type": "program_output", "call_id": "c1", "id": "p", "result": "r"},
            Message("tool", '{"type":"program_output","call_id":"c1","result":"r"}', tool_call_id="c1"),
        ),
    ],
)
def test_each_shape_of_an_item(item: Item, expected: Message) -> None:
    assert messages(item) == [expected]


def test_all_parameters() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [
        {"type": "function", "name": "f", "description": "d", "parameters": schema, "strict": True},
        {"type": "function", "name": "g", "parameters": None, "strict": None, "cache_control": {"type": "ephemeral"}},
        {"type": "custom", "name": "patch", "format": grammar},
        {"type": "web_search", "external_web_access": True},
        {"type": "namespace", "name": "ns", "description": "about", "tools": [{"type": "function", "name": "f"}]},
        {"type": "function", "name": "late", "defer_loading": True},
        {"type": "function", "name": "f"},
    ]
    body: dict[str, Any] = {
        "model": "m",
        "input": "hi",
        "instructions": "be good",
        "tools": tools,
        "tool_choice": {"type": "function", "name": "g"},
        "parallel_tool_calls": False,
        "stop": "END",
        "temperature": 1,
        "top_p": 0.5,
        "top_k": -1,
        "seed": -5,
        "max_output_tokens": 7,
        "stream": True,
        "stream_options": {"include_obfuscation": True},
        "store": False,
        "include": ["reasoning.encrypted_content", "message.output_text.logprobs", "web_search_call.results"],
        "reasoning": {"effort": "high", "summary": "auto", "context": "all_turns"},
        "text": {"format": {"type": "json_object"}, "verbosity": "low"},
        "metadata": {"a": "b"},
        "max_tool_calls": 3,
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "safety_identifier": "s",
        "user": "u",
        "truncation": "auto",
        "background": False,
        "service_tier": "flex",
        "top_logprobs": 2,
        "client_metadata": {"x": "y"},
        "chat_template_kwargs": {"enable_thinking": False},
        "previous_response_id": "resp_0a1b",
    }
    request, _ = DIALECT.read(DialectCall("generate", body, {"thread-id": "t"}), ReadCache())
    assert request == Request(
        dialect="responses",
        model="m",
        messages=[Message("system", "be good"), Message("user", "hi")],
        tools=(
            Tool("f", "d", schema, extra={"strict": True}),
            Tool("g"),
            Tool("patch", custom=True, extra={"format": grammar}),
            Tool("ns.f", extra={"namespace": {"name": "ns", "description": "about"}}),
            Tool("late"),
        ),
        tool_choice={"name": "g"},
        sampling=Sampling(
            temperature=1.0,
            top_p=0.5,
            top_k=0,
            max_tokens=7,
            stop=("END",),
            seed=-5,
            other={"parallel_tool_calls": False, "text.format": {"type": "json_object"}},
        ),
        stream=True,
        template_args={"reasoning_effort": "high", "enable_thinking": False},
        hints=Hints(session="t"),
        previous="0a1b",
        ignored=(
            *("client_metadata", "include:web_search_call.results", "reasoning.context", "service_tier"),
            *("text.verbosity", "top_logprobs", "truncation"),
            *("tools[3]:web_search", "tools[5].defer_loading", "tools[6]:f"),
        ),
        wire={
            "store": False,
            "instructions": "be good",
            "previous": "resp_0a1b",
            "metadata": {"a": "b"},
            "parallel": False,
            "tool_choice": body["tool_choice"],
            "tools": tools,
            "text": body["text"],
            "reasoning": body["reasoning"],
            "max_tool_calls": 3,
            "prompt_cache_key": "k",
            "prompt_cache_retention": "24h",
            "safety_identifier": "s",
            "user": "u",
            "sealed": True,
            "logprobs": True,
        },
    )
    assert read(reasoning={"effort": "none"})[0].template_args == {"enable_thinking": False}
    assert read(reasoning=None, text=None, include=None, tools=None, stop=["a"])[0].sampling.stop == ("a",)


def test_a_continuation_may_be_results_alone() -> None:
    request, _ = read(previous_response_id="resp_0a", input=[result("r"), result("s", "c2")], instructions=None)
    assert (request.previous, request.wire["instructions"]) == ("0a", None)
    assert [one.role for one in request.messages] == ["tool", "tool"]
    for nothing in (None, [], [{"type": "additional_tools", "tools": []}]):
        assert read(previous_response_id="resp_0a", input=nothing)[0].messages == []


def test_counting_needs_no_model() -> None:
    request, _ = DIALECT.read(DialectCall("count_tokens", {"input": "hi"}), ReadCache())
    assert (request.model, request.messages) == ("", [Message("user", "hi")])


def test_requests_of_codex() -> None:
    """The shape of its traffic for a model whose tools sit in an input item, three requests long."""
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: SOURCE"}
    plain = [
        {"type": "custom", "name": "exec", "description": "Run JavaScript", "format": grammar},
        {"type": "function", "name": "wait", "strict": False, "parameters": {"type": "object"}},
    ]
    tools = [
        {"type": "namespace", "name": "functions", "description": "", "tools": plain},
        {
            "type": "namespace",
            "name": "clock",
            "description": "Time.",
            "tools": [{"type": "function", "name": "sleep"}],
        },
        {"type": "tool_search", "execution": "client", "description": "Search", "parameters": {"type": "object"}},
        {"type": "web_search", "external_web_access": True},
    ]
    items: list[Item] = [
        {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": tools},
        {"type": "message", "id": "msg_1", "role": "developer", "content": [text_part("You are Codex.")]},
        {"type": "message", "id": "msg_2", "role": "developer", "content": [text_part("<skills>")]},
        {"type": "message", "id": "msg_3", "role": "user", "content": [text_part("<environment_context>")]},
        {"type": "message", "id": "msg_4", "role": "user", "content": [text_part("Do the thing")]},
    ]
    body: dict[str, Any] = {
        "model": "gpt-6",
        "input": items,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "context": "all_turns"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "thread",
        "text": {"verbosity": "low"},
        "client_metadata": {"thread_id": "thread"},
    }
    headers = {"session-id": "s", "thread-id": "t", "x-codex-window-id": "t:0", "x-openai-subagent": "collab_spawn"}
    first, known = DIALECT.read(DialectCall("generate", body, headers), ReadCache())
    assert [one.role for one in first.messages] == ["system", "system", "user", "user"]
    assert [(tool.name, tool.custom) for tool in first.tools] == [
        ("exec", True),
        ("wait", False),
        ("clock.sleep", False),
        ("tool_search", False),
    ]
    assert first.tools[0].extra == {"format": grammar, "namespace": {"name": "functions", "description": ""}}
    assert first.ignored == ("client_metadata", "reasoning.context", "text.verbosity", "input[0].tools[3]:web_search")
    assert first.hints == Hints("t", window="t:0", agent="collab_spawn")

    reply = Reply(
        "Looking.",
        "Let me see.",
        (
            ToolCall(mint_call_id(0, 0, short=False), "exec", "text(1)", custom=True),
            ToolCall(mint_call_id(0, 1, short=False), "clock.sleep", {"duration_ms": 5}),
            ToolCall(mint_call_id(0, 2, short=False), "tool_search", {"query": "add"}),
        ),
    )
    answer = Answer("0a", 1, "gpt-6", [reply], Usage(1, 1))
    said = orjson.loads(DIALECT.write(first, answer).body)["output"]
    assert [(item["type"], item.get("name"), item.get("namespace")) for item in said[2:]] == [
        ("custom_tool_call", "exec", None),
        ("function_call", "sleep", "clock"),
        ("tool_search_call", None, None),
    ]
    assert said[4]["arguments"] == {"query": "add"}
    assert said[4]["execution"] == "client"

    found = {"type": "function", "name": "add", "description": "Adds", "defer_loading": True, "parameters": {"a": 1}}
    space = {"type": "namespace", "name": "mcp__calc", "description": "Tools of calc.", "tools": [found]}
    search = {"type": "tool_search_output", "call_id": reply.tool_calls[2].id, "execution": "client", "tools": [space]}
    outputs = [
        {
            **result([text_part("Script completed"), text_part("1")], reply.tool_calls[0].id),
            "type": "custom_tool_call_output",
        },
        result("Sleep completed.", reply.tool_calls[1].id, id="fco_1"),
        {**search, "id": "tso_1", "status": "completed"},
    ]
    body["input"] = orjson.loads(orjson.dumps([*items, *said, *outputs]))
    second, known = DIALECT.read(DialectCall("generate", body, headers), known)
    assert second.tools is first.tools
    assert second.messages[:4] == first.messages
    assert second.messages[4] == reply.as_message()
    assert [one.text for one in second.messages[5:]] == [
        "Script completed1",
        "Sleep completed.",
        '[{"name":"mcp__calc.add","description":"Adds","parameters":{"a":1}}]',
    ]

    # The tool that was found is called by the name that was shown, and goes out in its namespace.
    call = ToolCall(mint_call_id(1, 0, short=False), "mcp__calc.add", {"a": 1})
    answer = Answer("0b", 1, "gpt-6", [Reply("", None, (call,))], Usage(1, 1))
    said = orjson.loads(DIALECT.write(second, answer).body)["output"]
    assert (said[0]["name"], said[0]["namespace"]) == ("add", "mcp__calc")
    body["input"] = [*body["input"], *said]
    third, _ = DIALECT.read(DialectCall("generate", body, headers), known)
    assert third.messages[-1] == Message("assistant", tool_calls=(call,))


def test_tools_that_run_at_the_client_have_items_of_their_own() -> None:
    local = {"type": "local", "skills": []}
    tools = [{"type": "local_shell"}, {"type": "shell", "environment": local}, {"type": "apply_patch"}]
    # Nobody is here to search, or to run a container.
    elsewhere = [{"type": "tool_search"}, {"type": "shell", "environment": {"type": "container_auto"}}]
    request, _ = read(tools=[*tools, *elsewhere])
    assert [tool.name for tool in request.tools] == ["local_shell", "shell", "apply_patch"]
    assert request.tools[1].extra == {"type": "shell", "environment": local}
    assert request.ignored == ("tools[3]:tool_search", "tools[4]:shell")
    assert all(tool.description and tool.parameters["required"] for tool in request.tools)
    fitting: list[tuple[str, Any]] = [
        ("local_shell", {"command": ["ls"], "timeout_ms": 5}),
        ("shell", {"commands": ["ls", "pwd"]}),
        ("apply_patch", OPERATION),
        ("apply_patch", {"type": "delete_file", "path": "a"}),
    ]
    others: list[tuple[str, Any]] = [
        ("local_shell", {"command": "ls"}),
        ("shell", {"commands": []}),
        ("shell", "not json"),
        ("apply_patch", {"type": "update_file", "path": "a"}),
        ("apply_patch", {"type": "rename"}),
    ]
    made = tuple(ToolCall(f"c{i}", name, arguments) for i, (name, arguments) in enumerate(fitting + others))
    said = written(Reply("", None, made), "0a", request.tools)
    assert [item["type"] for item in said] == [
        *("local_shell_call", "shell_call", "apply_patch_call", "apply_patch_call"),
        *["function_call"] * 5,
    ]
    assert said[0]["action"] == {"type": "exec", "env": {}, "command": ["ls"], "timeout_ms": 5}
    assert messages(USER, *said)[1:] == [Message("assistant", tool_calls=made)]


def test_kinds_of_tool_choice() -> None:
    tools = [
        {"type": "function", "name": "f"},
        {"type": "custom", "name": "p"},
        {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "g"}]},
        {"type": "shell"},
        {"type": "web_search"},
    ]
    some = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "f"}, {"type": "web_search"}],
    }
    for choice, expected in (
        *((mode, mode) for mode in ("none", "auto", "required")),
        (None, None),
        ({"type": "function", "name": "f"}, {"name": "f"}),
        ({"type": "custom", "name": "p"}, {"name": "p"}),
        ({"type": "function", "name": "g", "namespace": "ns"}, {"name": "ns.g"}),
        ({"type": "shell"}, {"name": "shell"}),
        ({"type": "web_search"}, None),
        (some, {"mode": "required", "names": ["f"]}),
    ):
        assert read(tools=tools, tool_choice=choice)[0].tool_choice == expected
    assert read(tools=[{"type": "web_search"}], tool_choice="required")[0].tool_choice == "required"


def test_references_to_what_was_written_are_resolved() -> None:
    outputs = {"0a": written(Reply("a", "t", (ToolCall("c1", "f", {}),)), "0a")}
    by_id = [{"type": "item_reference", "id": item["id"]} for item in outputs["0a"]]
    del by_id[1]["type"]
    body = {"model": "m", "input": [USER, *by_id, result("r")]}
    resolved = DIALECT.with_references(body, outputs.get)
    assert resolved["input"] == [USER, *outputs["0a"], result("r")]
    assert body["input"][1] == by_id[0]
    plain = {"model": "m", "input": [USER, 5, {"id": 5}]}
    assert DIALECT.with_references(plain, outputs.get) is plain
    for id in ("msg_0ax9", "msg_0bx0", "msg_1", "msg_0ax99999999999999999999"):
        unknown = DIALECT.with_references({"model": "m", "input": [{"type": "item_reference", "id": id}]}, outputs.get)
        with pytest.raises(BadRequest, match="not stored"):
            DIALECT.read(DialectCall("generate", unknown), ReadCache())


BAD_ITEMS: list[tuple[Any, str]] = [
    (5, ""),
    ("hi", ""),
    ({"instructions": 5}, ".role"),
    ({"content": "x"}, ".role"),
    ({"role": "robot", "content": "x"}, ".role"),
    ({"role": "tool", "content": "x"}, ".role"),
    ({"role": "user"}, ".content"),
    ({"role": "user", "content": 5}, ".content"),
    ({"role": "user", "content": ["x"]}, ".content[0]"),
    ({"role": "user", "content": [{"text": "x"}]}, ".content[0].type"),
    ({"role": "user", "content": [{"type": "input_text", "text": None}]}, ".content[0].text"),
    ({"role": "user", "content": [text_part("x"), {"type": "hologram"}]}, ".content[1].type"),
    ({"role": "user", "content": [{"type": "input_image", "file_id": "f1"}]}, ".content[0]"),
    (
        {"role": "user", "content": [{"type": "input_image", "image_url": "file:///etc/passwd"}]},
        ".content[0].image_url",
    ),
    ({"role": "user", "content": [{"type": "input_image", "image_url": {"url": 5}}]}, ".content[0].image_url.url"),
    ({"role": "user", "content": [{"type": "input_file", "file_id": "f1"}]}, ".content[0]"),
    ({"role": "user", "content": [{"type": "input_file", "file_data": "é"}]}, ".content[0].file_data"),
    (
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AA==", "format": "au"}}]},
        ".content[0].input_audio.format",
    ),
    ({"type": 5}, ".type"),
    ({"type": "hologram"}, ".type"),
    ({"type": "item_reference", "id": "msg_1"}, ""),
    ({"id": "msg_1"}, ""),
    ({"type": "compaction", "encrypted_content": "x"}, ""),
    ({"type": "compaction_trigger"}, ""),
    (thought("t", encrypted_content=5), ".encrypted_content"),
    (thought("t", content="x"), ".content"),
    ({"type": "reasoning", "summary": [5]}, ".summary[0]"),
    ({"type": "reasoning", "summary": [{"type": "summary_text"}]}, ".summary[0].text"),
    (calls("f", 5), ".arguments"),
    (calls("", "{}"), ".name"),
    (calls("f", "{}", ""), ".call_id"),
    (calls("f", "{}", namespace=5), ".namespace"),
    ({"type": "custom_tool_call", "call_id": "c", "name": "p", "input": {}}, ".input"),
    ({"type": "function_call_output", "output": "x"}, ".call_id"),
    ({"type": "function_call_output", "call_id": "c"}, ".output"),
    (result(5), ".output"),
    (result([{"type": "input_text"}]), ".output[0].text"),
    ({"type": "local_shell_call", "call_id": "c"}, ".action"),
    ({"type": "local_shell_call_output", "id": "c", "output": []}, ".output"),
    ({"type": "apply_patch_call", "call_id": "c", "operation": "x"}, ".operation"),
    ({"type": "tool_search_call", "arguments": 5}, ".arguments"),
    ({"type": "tool_search_output", "tools": {}}, ".tools"),
    ({"type": "tool_search_output", "tools": [{"type": "function"}]}, ".tools[0].name"),
    ({"type": "computer_call_output", "call_id": "c", "output": "x"}, ".output"),
    ({"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}}, ".output"),
    ({"type": "image_generation_call", "result": "%"}, ".result"),
    ({"type": "additional_tools"}, ".tools"),
    ({"type": "additional_tools", "tools": [5]}, ".tools[0]"),
    ({**USER, "extra": DEEP}, ""),
]


@pytest.mark.parametrize(("item", "suffix"), BAD_ITEMS)
@pytest.mark.parametrize("instructions", [None, "be good"])
def test_invalid_fields_of_an_item_are_named(item: Any, suffix: str, instructions: str | None) -> None:
    with pytest.raises(BadRequest) as caught:
        read(input=[USER, item], instructions=instructions)
    assert caught.value.param == f"input[1]{suffix}"
    assert f"'{caught.value.param}'" in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": {}}, "input"),
        ({"input": [{"type": "additional_tools", "tools": []}]}, "input"),
        ({"instructions": ["x"]}, "instructions"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"generate": False}, "generate"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": 1.0}, "top_k"),
        ({"seed": 2**64}, "seed"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tool_calls": -1}, "max_tool_calls"),
        ({"stop": 5}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x", ""]}, "stop[1]"),
        ({"include": "x"}, "include"),
        ({"include": [{}]}, "include[0]"),
        ({"reasoning": "high"}, "reasoning"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"reasoning": DEEP}, "reasoning"),
        ({"text": []}, "text"),
        ({"text": {"format": "json"}}, "text.format"),
        ({"text": {"format": {}}}, "text.format.type"),
        ({"metadata": []}, "metadata"),
        ({"metadata": DEEP}, "metadata"),
        ({"background": 1}, "background"),
        ({"store": "no"}, "store"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"stream_options": {"include_obfuscation": 1}}, "stream_options.include_obfuscation"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"prompt_cache_key": 5}, "prompt_cache_key"),
        ({"user": []}, "user"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"tools": {}}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [TOOL, {"type": "function"}]}, "tools[1].name"),
        ({"tools": [{**TOOL, "parameters": []}]}, "tools[0].parameters"),
        ({"tools": [{**TOOL, "parameters": DEEP}]}, "tools[0]"),
        ({"tools": [{"type": "custom", "name": "p", "format": "text"}]}, "tools[0].format"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [{"type": "tool_search", "execution": "client", "parameters": 5}]}, "tools[0].parameters"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "any"}}, "tool_choice.mode"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [5]}},
            "tool_choice.tools[0]",
        ),
    ],
)
def test_invalid_parameters_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read(**fields)
    assert caught.value.param == param


values = json_values(
    *("function", "custom", "message", "reasoning", "function_call", "namespace", "shell_call", "user"),
    "tool_search_output",
)


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], deadline=None)
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


@settings(deadline=None)
@given(st.text(st.characters()), st.text())
def test_only_sealed_texts_are_unsealed(text: str, other: str) -> None:
    assume(not other.startswith("VFdMM"))
    assert unseal(seal(text)) == text
    assert unseal(other) is None
    assert unseal(seal(text)[:-8]) is None


def test_sealed_texts_are_opened_within_size_limits() -> None:
    assert unseal(seal("a" * 5_000_000)) is None
    assert unseal("A" * 5_000_000) is None
