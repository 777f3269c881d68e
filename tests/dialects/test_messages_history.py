"""The messages dialect reads history once, what is known changes nothing, and any body is read or refused."""

from __future__ import annotations

import copy
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.dialects.messages_wire import (
    DIALECT,
    FETCH,
    IMAGE,
    MARK,
    SEARCH,
    TOOL,
    USER,
    assistant,
    document,
    read,
    reference,
    result,
    system,
    text,
    use,
    user,
)
from support.dialects.mutation import json_values, mutants
from towline.conversation import Message, Request
from towline.dialects import messages as module
from towline.dialects.base import DialectCall, ReadCache
from towline.dialects.wire import seal
from towline.errors import BadRequest


def history(turns: int) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = [USER]
    for turn in range(turns):
        items.append(assistant(text(f"turn {turn}"), use("f", {"n": turn}), use("f", {"n": -turn}, "c2")))
        items.append(user(result("c2", content="x"), result("c1", content=f"result {turn}")))
    return items


def test_a_repeated_history_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    original = module.read_item
    monkeypatch.setattr(
        module, "read_item", lambda item, where, tools: reads.append(where) or original(item, where, tools)
    )
    tools = [TOOL, {"type": "web_search_20250305", "name": "web_search"}]
    first, known = read(messages=history(200), tools=tools, system=[text("billing 1"), text("s")])
    assert len(reads) == 401
    assert len(first.messages) == 602
    reads.clear()

    # The system prompt changes with every call, and marks move to the newest block.
    more = [assistant(text("done")), user(text("more", **MARK))]
    again = orjson.loads(orjson.dumps([*history(200), *more]))
    second, after = read(
        known, messages=again, tools=copy.deepcopy(tools), system=[text("billing 2"), text("s", **MARK)]
    )
    assert reads == ["messages[401]", "messages[402]"]
    assert second.messages[0] == Message("system", "billing 2\ns")
    assert all(mine is yours for mine, yours in zip(second.messages[1:], first.messages[1:], strict=False))
    assert second.messages[602:] == [Message("assistant", "done"), Message("user", "more")]
    assert second.tools is first.tools
    assert second.ignored == first.ignored
    # The strings of the first request are kept, not a second copy of each.
    assert all(mine is yours for mine, yours in zip(after.items, known.items, strict=False))
    # Reordering the messages of a request does not change the cache.
    second.messages.reverse()
    assert after.messages[-1] == Message("user", "more")

    reads.clear()
    same, _ = read(after, messages=copy.deepcopy(again), tools=tools, system="billing 2\ns")
    assert reads == []
    assert same.messages[0] is after.messages[0]

    edited = copy.deepcopy(again)
    edited[100]["content"][1]["content"] = "edited"
    third, _ = read(after, messages=edited, tools=[])
    assert reads[0] == "messages[100]"
    assert len(reads) == 303
    assert third.messages[0] is first.messages[1]
    assert third.messages[148] is first.messages[149]
    assert third.tools == ()


def test_values_equal_in_python_differ_on_the_wire() -> None:
    def flags(request: Request) -> tuple[Any, str]:
        return request.messages[1].tool_calls[0].arguments["flag"], request.messages[2].text  # type: ignore[index]

    def call(value: Any) -> list[dict[str, Any]]:
        state = {"type": "browser_state", "tabs": [value]}
        return [USER, assistant(use("f", {"flag": value})), user(result("c1", content=[state]))]

    _, known = read(messages=call(True))
    assert read(known, messages=call(True))[0].messages[1] is known.messages[1]
    request, known = read(known, messages=call(1))
    assert (str(flags(request)[0]), flags(request)[1]) == ("1", '{"tabs":[1]}')
    assert type(flags(read(known, messages=call(1.0))[0])[0]) is float
    default = [{"name": "f", "input_schema": {"default": value}} for value in (True, 1)]
    _, known = read(tools=default[:1])
    assert read(known, tools=default[1:])[0].tools[0].parameters["default"] is not True


marks = st.sampled_from([{}, {}, MARK])
words = st.sampled_from(["", "a", "b\n", "c d"])
values = st.sampled_from([0, 1, 1.0, True, False, None, "1", [True], {"k": 1}])
text_blocks = st.builds(lambda word, mark: text(word, **mark), words, marks)
names = st.sampled_from(["c1", "c2"])
uses = st.builds(lambda id, value: use("f", {"v": value}, id), names, values)
thinking = st.builds(lambda word: {"type": "thinking", "thinking": word, "signature": seal(word)}, words)
provider = st.builds(lambda value: SEARCH | {"content": [value]}, values)
references = st.builds(reference, st.sampled_from(["fetch", "f", "unknown"]))
results = st.builds(
    lambda id, content, mark: result(id, content=content, **mark),
    names,
    words | st.lists(text_blocks | references | st.just(IMAGE), max_size=2),
    marks,
)
additions = st.builds(lambda name: {"type": "tool_addition", "tool": {"type": "tool_reference", "name": name}}, names)
generated_items = st.one_of(
    st.builds(lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "assistant"]), words),
    st.builds(lambda blocks: assistant(*blocks), st.lists(text_blocks | uses | thinking | provider, max_size=3)),
    st.builds(lambda blocks: user(*blocks), st.lists(text_blocks | results | references | additions, max_size=3)),
    st.builds(lambda blocks: system(*blocks), st.lists(text_blocks | additions, max_size=2)),
    st.just({"role": "system", "output_config": {}}),
)
generated_tools = st.lists(
    st.builds(
        lambda name, description, defer: {"name": name, "description": description, "defer_loading": defer},
        st.sampled_from(["fetch", "f", "c1"]),
        st.sampled_from(["one", "two"]),
        st.booleans(),
    ),
    max_size=2,
)
systems = st.sampled_from([None, "s", "t", [text("s")], [text("s"), text("t")]])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_cache_changes_nothing(data: st.DataObject) -> None:
    """Histories that grow, shrink, and are edited anywhere, under prompts and tools that come and go."""
    known = ReadCache()
    items = data.draw(st.lists(generated_items, max_size=6))
    for _ in range(4):
        body = {
            "model": "m",
            "max_tokens": 1,
            "messages": [USER, *copy.deepcopy(items)],
            "system": data.draw(systems),
            "tools": data.draw(generated_tools),
        }
        fresh, alone = DIALECT.read(DialectCall("generate", body), ReadCache())
        request, known = DIALECT.read(DialectCall("generate", copy.deepcopy(body)), known)
        # As text, which tells `True` from `1`.
        assert repr(request) == repr(fresh)
        assert (known.starts, known.literal, known.items) == (alone.starts, alone.literal, alone.items)
        place = data.draw(st.integers(0, len(items)))
        items[place : place + data.draw(st.integers(0, 2))] = data.draw(st.lists(generated_items, max_size=2))
        if data.draw(st.booleans()):
            items += data.draw(st.lists(generated_items, max_size=3))


RICH: dict[str, Any] = {
    "model": "m",
    "max_tokens": 5,
    "system": [text("billing", **MARK), text("s")],
    "messages": [
        user(text("u", **MARK), IMAGE, document({"type": "content", "content": [text("x"), IMAGE]}, title="t")),
        {"role": "system", "content": "late", "output_config": {"effort": "low"}},
        assistant(
            {"type": "thinking", "thinking": "", "signature": seal("t")},
            {"type": "redacted_thinking", "data": "x"},
            text("a"),
            use("f", {"a": 1, "b": [True, 1.0]}),
            {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"q": "x"}},
            SEARCH,
            text("b"),
        ),
        assistant(use("f", {"c": None}, "c2")),
        user(
            result("c1", content=[text("r"), IMAGE, reference("fetch")], is_error=True),
            result("c2", content="x"),
            {"type": "search_result", "title": "T", "source": "s", "content": [text("a")]},
            text("go on"),
        ),
        system(
            {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": TOOL}},
            {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}},
        ),
        {"role": "assistant", "content": "The answer is ("},
    ],
    "tools": [
        {**TOOL, "description": "d", "strict": True},
        FETCH,
        {"type": "bash_20250124", "name": "bash"},
        {"type": "web_search_20250305", "name": "web_search"},
    ],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "stop_sequences": ["a"],
    "temperature": 0.5,
    "top_p": 1,
    "top_k": 5,
    "stream": True,
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
    "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {}}},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": "u"},
}

any_values = json_values(
    *("user", "assistant", "text", "image", "tool_use", "tool_result", "thinking", "tool_reference", "document"),
    *("compaction", "tool_addition"),
)


def outcome(body: dict[str, Any], known: ReadCache, operation: str = "generate") -> tuple[str, ReadCache]:
    """The outcome of reading a body, as text that tells `True` from `1`."""
    try:
        request, after = DIALECT.read(DialectCall(operation, body), known)
    except BadRequest as refusal:
        error = orjson.loads(DIALECT.error(refusal).body)["error"]
        return f"{refusal.param}: {error}", known
    assert request.messages
    assert len(after.items) == len(body["messages"])
    assert len(after.starts) == len(after.messages)
    return repr(request), after


@settings(max_examples=250, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], deadline=None)
@given(st.data())
def test_any_body_is_read_or_refused_and_the_cache_changes_nothing(data: st.DataObject) -> None:
    operation = data.draw(st.sampled_from(["generate", "count_tokens"]))
    first = data.draw(mutants(RICH, any_values))
    _, known = outcome(first, ReadCache(), operation)
    second = data.draw(mutants(first, any_values))
    found = outcome(second, known, operation)[0]
    assert found == outcome(second, ReadCache(), operation)[0]
    assert not found.startswith("None:"), "a refusal names its field"


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from([*RICH, "thread", "x"]), any_values))
def test_bodies_of_any_shape_are_refused_by_name(body: dict[str, Any]) -> None:
    outcome(body, ReadCache())
    for whole in ([], None, "text", 5):
        with pytest.raises(BadRequest):
            DIALECT.read(DialectCall("generate", whole), ReadCache())  # type: ignore[arg-type]
