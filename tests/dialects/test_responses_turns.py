"""Turns in the responses dialect: the items of one come back as the message that was sent, and history is read once."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.dialects.responses_bodies import (
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
    thought,
    written,
)
from towline.conversation import Finish, Message, Reply, Tool, ToolCall
from towline.dialects import responses
from towline.dialects.base import ReadCache
from towline.dialects.wire import seal
from towline.gateway.sampling import mint_call_id
from towline.tokens.graph import fingerprint


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        # One turn, as written without ids.
        (
            [thought("t"), says("a"), calls("f", "{}"), calls("g", "{}", "c2")],
            [Message("assistant", "a", "t", (ToolCall("c1", "f", {}), ToolCall("c2", "g", {})))],
        ),
        # An item that cannot come next in a turn begins a new one.
        ([says("a"), says("b")], [Message("assistant", "a"), Message("assistant", "b")]),
        ([says("a"), thought("t"), says("b")], [Message("assistant", "a"), Message("assistant", "b", "t")]),
        ([calls("f", "{}"), says("b")], [one_call("f", {}), Message("assistant", "b")]),
        (
            [thought("t"), says(""), thought("u"), says("b")],
            [Message("assistant", "", "t"), Message("assistant", "b", "u")],
        ),
        # Several thoughts of one turn.
        ([thought("t"), thought("u"), says("a")], [Message("assistant", "a", "t\nu")]),
        # Our item ids separate turns where the order does not, and keep one together.
        ([says("a", id="msg_0ax0"), calls("f", "{}", id="fc_0bx0")], [Message("assistant", "a"), one_call("f", {})]),
        (
            [calls("f", "{}", "x", id="fc_0ax0"), result("r", "x"), calls("g", "{}", "y", id="fc_0ax1")],
            [
                Message("assistant", tool_calls=(ToolCall("x", "f", {}), ToolCall("y", "g", {}))),
                Message("tool", "r", tool_call_id="x"),
            ],
        ),
        # Not in the order in which they were written, or twice: not the turn as it was.
        (
            [says("a", id="msg_0ax1"), thought("t", id="rs_0ax0")],
            [Message("assistant", "a"), Message("assistant", "", "t")],
        ),
        (
            [calls("f", "{}", id="fc_0ax0"), calls("f", "{}", id="fc_0ax0")],
            [one_call("f", {}), one_call("f", {})],
        ),
        (
            [calls("f", "{}", "call00007001"), result("r", "call00007001"), calls("g", "{}", "call00007000")],
            [
                one_call("f", {}, "call00007001"),
                Message("tool", "r", tool_call_id="call00007001"),
                one_call("g", {}, "call00007000"),
            ],
        ),
        # Ids of others mean nothing.
        ([thought("t", id="rs_0a"), says("a", id="msg_0b")], [Message("assistant", "a", "t")]),
        # Calls of one turn with their results in between, by call ids of ours, altered or not; and of other turns.
        (
            [
                calls("f", "{}", mint_call_id(7, 0, short=False)),
                result("r", mint_call_id(7, 0, short=False)),
                calls("g", "{}", "call_" + mint_call_id(7, 1, short=False)[4:]),
                result("s", "call_" + mint_call_id(7, 1, short=False)[4:]),
                calls("h", "{}", mint_call_id(8, 0, short=False)),
            ],
            [
                Message(
                    "assistant", tool_calls=(ToolCall("call00007000", "f", {}), ToolCall("call_00007001", "g", {}))
                ),
                Message("tool", "r", tool_call_id="call00007000"),
                Message("tool", "s", tool_call_id="call_00007001"),
                one_call("h", {}, "call00008000"),
            ],
        ),
        (
            [
                calls("f", "{}", mint_call_id(7, 0, short=True)),
                result("r", "c00007000"),
                calls("g", "{}", mint_call_id(7, 1, short=True)),
            ],
            [
                Message("assistant", tool_calls=(ToolCall("c00007000", "f", {}), ToolCall("c00007001", "g", {}))),
                Message("tool", "r", tool_call_id="c00007000"),
            ],
        ),
        (
            [calls("f", "{}", "call_abc"), result("r", "call_abc"), calls("g", "{}", "call_abd")],
            [
                one_call("f", {}, "call_abc"),
                Message("tool", "r", tool_call_id="call_abc"),
                one_call("g", {}, "call_abd"),
            ],
        ),
        # A user message ends a turn; an item without content does not.
        (
            [
                thought("t"),
                {"type": "additional_tools", "role": "developer", "tools": []},
                says("a"),
                USER,
                calls("f", "{}"),
            ],
            [Message("assistant", "a", "t"), Message("user", "hi"), one_call("f", {})],
        ),
    ],
)
def test_the_items_of_a_turn_are_one_message(items: list[Item], expected: list[Message]) -> None:
    assert messages(USER, *items) == [Message("user", "hi"), *expected]


def interleaved(items: list[Item], results: list[Item]) -> list[Item]:
    """Every result directly after its call."""
    by_call = {item["call_id"]: item for item in results}
    return [one for item in items for one in (item, by_call.get(item.get("call_id", ""))) if one is not None]


def restyled(item: Item) -> Item:
    """A call with its arguments serialized again by a harness."""
    if item["type"] != "function_call" or not isinstance(arguments := orjson.loads(item["arguments"]), dict):
        return item
    return {**item, "arguments": orjson.dumps(dict(reversed(arguments.items())), option=orjson.OPT_INDENT_2).decode()}


HABITS: dict[str, Any] = {
    "verbatim": lambda items: items,
    "ids stripped": lambda items: [{key: item[key] for key in item if key != "id"} for item in items],
    "reasoning dropped": lambda items: [item for item in items if item["type"] != "reasoning"],
    "sealed only": lambda items: [{**item, "summary": []} if item["type"] == "reasoning" else item for item in items],
    "summary only": lambda items: [{key: item[key] for key in item if key != "encrypted_content"} for item in items],
    "bare": lambda items: [
        {key: item[key] for key in item if key not in ("id", "status", "encrypted_content")} for item in items
    ],
    "with nulls": lambda items: [
        {**item, "content": item.get("content"), "phase": None, "async": None} for item in items
    ],
    "restyled": lambda items: [restyled(item) for item in items],
}
"""What harnesses do to the items that they send back. Codex, Pi and the SDKs keep them; OpenCode strips what it can."""

lines = st.text(st.characters(codec="utf-8"), max_size=20)
scalars = (
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | lines
)
objects = st.dictionaries(
    lines, st.recursive(scalars, lambda inner: st.lists(inner, max_size=3), max_leaves=5), max_size=4
)
names = st.sampled_from(["f", "g", "ns.f", "patch", "tool_search", "local_shell"])
DECLARED = (
    *(Tool(name) for name in ("f", "g")),
    Tool("ns.f", extra={"namespace": {"name": "ns", "description": ""}}),
    Tool("patch", custom=True),
    *(Tool(name, extra={"type": name}) for name in ("tool_search", "local_shell")),
)


@st.composite
def sampled_replies(draw: st.DrawFn, turn: int) -> Reply:
    """Possible replies of a model, with ids as the gateway mints them."""
    made = []
    for place in range(draw(st.integers(0, 3))):
        name = draw(names)
        arguments: Any = draw(objects)
        if name == "patch":
            arguments = draw(lines)
        elif name == "local_shell" and draw(st.booleans()):
            arguments = {"command": draw(st.lists(lines, min_size=1, max_size=2))}
        made.append(ToolCall(mint_call_id(turn, place, short=False), name, arguments, name == "patch"))
    return Reply(draw(lines), draw(st.none() | lines.filter(bool)), tuple(made))


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(sorted(HABITS)), st.booleans())
def test_an_echoed_answer_reads_to_the_message_that_was_sent(data: st.DataObject, habit: str, mixed: bool) -> None:
    items: list[Item] = [USER]
    expected = [Message("user", "hi")]
    known = ReadCache()
    for turn in range(data.draw(st.integers(1, 4))):
        reply = data.draw(sampled_replies(turn))
        said = HABITS[habit](written(reply, f"0a{turn}", DECLARED))
        # A custom tool's result has a type of its own; some harnesses send the other.
        results = [result(f"r{call.id}", call.id) for call in reply.tool_calls]
        items += interleaved(said, results) if mixed else [*said, *results]
        expected.append(reply.as_message())
        expected += [Message("tool", item["output"], tool_call_id=item["call_id"]) for item in results]
        if not results:
            items.append(USER)
            expected.append(Message("user", "hi"))
        request, known = read(known, input=orjson.loads(orjson.dumps(items)))
        assert [fingerprint.of(one) for one in request.messages] == [fingerprint.of(one) for one in expected]
        keeps = habit != "reasoning dropped"
        assert request.messages == [one if keeps else replace(one, reasoning=None) for one in expected]


def test_consecutive_turns_stay_separate() -> None:
    """A harness that goes on after a cut answer sends no word in between."""
    first = Reply("", "thinking and cut", finish=Finish.LENGTH)
    second = Reply("", None, (ToolCall("c1", "f", {}),))
    third = Reply("words", None, (ToolCall("c2", "f", {}),))
    items = [item for index, reply in enumerate((first, second, third)) for item in written(reply, f"{index}a")]
    assert messages(USER, *items)[1:] == [reply.as_message() for reply in (first, second, third)]
    bare = HABITS["bare"](written(first, "1a") + written(replace(third, reasoning="t"), "2a"))
    assert messages(USER, *bare)[1:] == [first.as_message(), replace(third, reasoning="t").as_message()]


def test_a_turn_of_very_many_calls_is_read_in_linear_time() -> None:
    items = [calls("f", "{}", f"c{index}") for index in range(20_000)]
    found = messages(USER, *items)
    assert [len(one.tool_calls) for one in found] == [0, 20_000]


def history(turns: int) -> list[Item]:
    items: list[Item] = [{"role": "system", "content": "s"}]
    for turn in range(turns):
        ids = [mint_call_id(turn, place, short=False) for place in range(2)]
        items += [thought(f"t{turn}", encrypted_content=seal(f"t{turn}")), says(f"a{turn}")]
        items += [calls("f", f'{{"n":{turn}}}', id) for id in ids]
        items += [result(f"result {turn}", id) for id in ids]
    return items


@pytest.mark.parametrize("instructions", [None, "be good"])
def test_a_repeated_history_is_read_once(monkeypatch: pytest.MonkeyPatch, instructions: str | None) -> None:
    reads: list[str] = []
    original = responses.read_item
    monkeypatch.setattr(responses, "read_item", lambda item, where: reads.append(where) or original(item, where))
    tools = [{"type": "function", "name": "f"}, {"type": "mcp", "server_label": "x"}]
    common: dict[str, Any] = {"tools": tools, "instructions": instructions}
    first, known = read(input=history(200), **common)
    assert len(reads) == 1201
    reads.clear()

    again = orjson.loads(orjson.dumps([*history(200), *history(201)[-6:]]))
    second, after = read(known, input=again, **copy.deepcopy(common))
    assert reads == [f"input[{index}]" for index in range(1201, 1207)]
    assert all(mine is yours for mine, yours in zip(second.messages, first.messages, strict=False))
    assert [one.role for one in second.messages[-3:]] == ["assistant", "tool", "tool"]
    assert second.tools is first.tools
    assert second.ignored == first.ignored == ("tools[1]:mcp",)
    # The strings of the first request are kept, not a second copy of each.
    assert all(mine is yours for mine, yours in zip(after.items[1:], known.items[1:], strict=False))
    # What is known does not change with a request that somebody rearranges.
    before = after.messages[:]
    second.messages.reverse()
    assert after.messages == before

    reads.clear()
    edited = copy.deepcopy(again)
    edited[606]["output"] = "edited"
    third, _ = read(after, input=edited, **common)
    # Back to the beginning of the turn that the edited result is of, and no further.
    assert reads[0] == "input[601]"
    assert len(reads) == 606
    lead = 1 if instructions else 0
    assert third.messages[lead + 300] is first.messages[lead + 300]

    # A later call joins the turn, and leaves what is known as it was.
    reads.clear()
    before_it = [fingerprint.of(one) for one in after.messages]
    late = [*again, calls("f", "{}", mint_call_id(200, 2, short=False))]
    fourth, _ = read(after, input=late, **common)
    assert reads == ["input[1207]"]
    assert len(fourth.messages[-3].tool_calls) == 3
    assert len(after.messages[-3].tool_calls) == 2
    assert fingerprint.of(fourth.messages[-3]) != before_it[-3]


def test_a_removed_call_leaves_its_turn() -> None:
    both = [calls("f", "{}", mint_call_id(0, place, short=False)) for place in range(2)]
    results = [result(text, mint_call_id(0, 0, short=False)) for text in ("r", "again", "s")]
    _, known = read(input=[USER, both[0], *results, both[1]])
    assert len(known.messages[1].tool_calls) == 2
    request, _ = read(known, input=[USER, both[0], *results, USER])
    assert len(request.messages[1].tool_calls) == 1


def test_values_equal_in_python_differ_on_the_wire() -> None:
    def telling(value: Any) -> list[list[Item]]:
        return [
            [USER, calls("f", {"flag": value}), USER],
            [USER, {"type": "tool_search_call", "arguments": {"flag": value}}, USER],
            [USER, {"type": "shell_call", "action": {"flag": value}}, USER],
            [USER, {"type": "mcp_call", "output": value}, USER],
            [USER, {"type": "shell_call_output", "output": value}, USER],
            [USER, {"type": "tool_search_output", "tools": [{**TOOL, "parameters": {"flag": value}}]}, USER],
        ]

    for true, whole, broken in zip(telling(True), telling(1), telling(1.0), strict=True):
        _, known = read(input=true)
        assert read(known, input=copy.deepcopy(true))[0].messages[1] is known.messages[1]
        seen = {repr(read(known, input=items)[0].messages[1]) for items in (true, whole, broken)}
        assert len(seen) == 3
    offered = [[{**TOOL, "parameters": {"default": value}}] for value in (True, 1)]
    _, known = read(tools=offered[0])
    assert read(known, tools=offered[1])[0].tools[0].parameters["default"] is not True
    added = [[{"type": "additional_tools", "tools": tools}, USER] for tools in offered]
    _, known = read(input=added[0])
    assert read(known, input=added[1])[0].tools[0].parameters["default"] is not True


ids = st.sampled_from([mint_call_id(turn, place, short=False) for turn in range(2) for place in range(2)] + ["x", "y"])
item_ids = st.sampled_from([{}, {}, *({"id": f"fc_0{a}x{place}"} for a in "ab" for place in range(2))])
flags = st.sampled_from([True, 1, 1.0, False, 0])
items_of_any_kind = st.one_of(
    st.just(USER),
    st.builds(says, st.sampled_from(["", "a"])).flatmap(lambda item: item_ids.map(lambda id: {**item, **id})),
    st.builds(thought, st.sampled_from([None, "t"])).flatmap(lambda item: item_ids.map(lambda id: {**item, **id})),
    st.builds(calls, st.just("f"), flags.map(lambda flag: {"a": flag}) | st.just("{}"), ids).flatmap(
        lambda item: item_ids.map(lambda id: {**item, **id})
    ),
    st.builds(result, st.sampled_from(["r", "s"]), ids),
    flags.map(lambda flag: {"type": "shell_call", "call_id": "x", "action": {"commands": ["ls"], "a": flag}}),
    flags.map(lambda flag: {"type": "mcp_call", "id": "m", "output": flag}),
    flags.map(lambda flag: {"type": "tool_search_output", "tools": [{**TOOL, "parameters": {"a": flag}}]}),
    flags.map(lambda flag: {"type": "additional_tools", "tools": [{**TOOL, "parameters": {"a": flag}}]}),
    st.just({"type": "configuration_update", "reasoning": {"effort": "low"}}),
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_incremental_reading_equals_reading_everything(data: st.DataObject) -> None:
    items = data.draw(st.lists(items_of_any_kind, min_size=1, max_size=8))
    instructions = data.draw(st.sampled_from([None, None, "be good"]))
    known = ReadCache()
    for _ in range(data.draw(st.integers(1, 5))):
        body = {"model": "m", "instructions": instructions, "input": orjson.loads(orjson.dumps(items))}
        found, known = outcome(body, known)
        fresh, anew = outcome(body, ReadCache())
        assert found == fresh
        if not found.startswith("Request"):
            known = ReadCache()
        else:
            assert (known.messages, known.starts, known.literal) == (anew.messages, anew.starts, anew.literal)
        action = data.draw(st.sampled_from(["append", "append", "cut", "edit", "insert"]))
        place = data.draw(st.integers(0, len(items) - 1)) if items else 0
        if action == "cut":
            items = items[: place + 1]
        elif action == "edit":
            items = [*items[:place], data.draw(items_of_any_kind), *items[place + 1 :]]
        elif action == "insert":
            items = [*items[:place], data.draw(items_of_any_kind), *items[place:]]
        else:
            items = [*items, *data.draw(st.lists(items_of_any_kind, min_size=1, max_size=3))]
