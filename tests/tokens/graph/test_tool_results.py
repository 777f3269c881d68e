"""Tool results in call order and with their names, whatever order and spelling of ids a harness uses."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from towline.conversation import Message, ToolCall
from towline.tokens.graph.tool_results import bare_id, order_tool_results, ordered_prefix


def calling(*ids: str) -> Message:
    return Message("assistant", "", None, tuple(ToolCall(id, f"tool{n}", {}) for n, id in enumerate(ids)))


def answer(id: str, text: str = "", name: str = "") -> Message:
    return Message("tool", text or f"result of {id}", tool_call_id=id, name=name)


def settled(*messages: Message, start: int = 0, native: dict[str, str] | None = None) -> list[Message]:
    made = list(messages)
    order_tool_results(made, start, native)
    return made


@given(st.data())
def test_any_order_and_any_spelling_is_one_conversation(data: st.DataObject) -> None:
    messages: list[Message] = [Message("user", "Go.")]
    expected: list[Message] = list(messages)
    for turn in range(data.draw(st.integers(1, 3))):
        ids = [f"call{turn}{place}" for place in range(data.draw(st.integers(1, 4)))]
        joint = data.draw(st.sampled_from(["", "_", "-"]))
        asked, answered = calling(*map(joint.join, ids)), [answer(id) for id in ids]
        messages += [asked, *data.draw(st.permutations(answered))]
        expected += [asked, *(replace(a, name=f"tool{n}") for n, a in enumerate(answered))]
        if data.draw(st.booleans()):
            messages.append(Message("user", "More."))
            expected.append(Message("user", "More."))
    before = deepcopy(messages)
    made = settled(*messages)
    assert made == expected
    assert messages == before, "what was read is not changed"
    assert settled(*made) == made
    start = ordered_prefix(made, data.draw(st.integers(0, len(made))))
    assert settled(*made[:start], *messages[start:], start=start) == expected


def test_ids_that_lost_their_punctuation() -> None:
    assert bare_id("call_1-2") == bare_id("call12") == "call12"
    made = settled(calling("call_1", "call_2"), answer("call2"), answer("call1"))
    assert [(m.tool_call_id, m.name) for m in made[1:]] == [("call1", "tool0"), ("call2", "tool1")]


def test_results_without_a_call() -> None:
    lone = [Message("user", "Go."), answer("x"), answer("a")]
    assert settled(*lone) == lone
    made = settled(calling("a"), answer("unknown"), answer("a"))
    assert [m.tool_call_id for m in made[1:]] == ["a", "unknown"]
    assert [m.name for m in made[1:]] == ["tool0", ""]


def test_results_with_one_id() -> None:
    """A result sent twice stays two results; calls that share an id are answered in order."""
    made = settled(calling("a", "b"), answer("b", "B"), answer("a", "A"), answer("b", "B again"))
    assert [m.text for m in made[1:]] == ["A", "B", "B again"]
    assert [m.name for m in made[1:]] == ["tool0", "tool1", "tool1"]
    unnamed = settled(calling("", ""), answer("", "first"), answer("", "second"))
    assert [(m.text, m.name) for m in unnamed[1:]] == [("first", "tool0"), ("second", "tool1")]
    assert settled(calling("a"), answer("a", name="given"))[1].name == "given"


def test_native_ids() -> None:
    native = {"call1": "functions.a:0", "call2": "functions.b:1"}
    wire = [calling("call_1", "call_2"), answer("call2"), answer("call1"), answer("foreign")]
    for _ in range(2):
        made = settled(*wire, native=native)
        assert [m.tool_call_id for m in made[1:]] == ["functions.a:0", "functions.b:1", "foreign"]
    assert [m.tool_call_id for m in wire[1:]] == ["call2", "call1", "foreign"]


def test_ordered_prefix() -> None:
    messages = [Message("user"), calling("a", "b"), answer("b"), answer("a"), Message("user")]
    assert [ordered_prefix(messages, n) for n in range(6)] == [0, 1, 2, 2, 2, 5]
