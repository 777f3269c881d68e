"""When two messages are the same message: what a harness may restyle, and that everything else is an edit."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from towline.conversation import Media, Message, Tool, ToolCall
from towline.tokens.graph import fingerprint
from towline.tokens.graph.fingerprint import canonical, normalized_text, of, roll, root_key

NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([0, 1, 10**20, 1e20, -0.0])
SCALARS = st.none() | st.booleans() | NUMBERS | st.text() | st.sampled_from(["1", "true", "null", "\ud800", "1.0"])
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8
)
ARGUMENTS = st.dictionaries(st.text(), JSON, max_size=3)
TEXT = st.text(alphabet='ab <>/\r\n\t{}"é\u3000', max_size=12)


def same(one: Any, two: Any) -> bool:
    """Equality as the specification has it, written out."""
    if isinstance(one, bool) or isinstance(two, bool) or one is None or two is None:
        return one is two
    if isinstance(one, int | float) and isinstance(two, int | float):
        return one == two
    if type(one) is not type(two):
        return False
    if isinstance(one, list):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(value, two[key]) for key, value in one.items())
    return bool(one == two)


def restyled(value: Any, data: st.DataObject) -> Any:
    """The same value as another program would hold or write it."""
    if isinstance(value, dict):
        keys = data.draw(st.permutations(list(value)))
        return {key: restyled(value[key], data) for key in keys}
    if isinstance(value, list):
        return [restyled(item, data) for item in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1e300 and int(float(value)) == value:
        return data.draw(st.sampled_from([value, float(value)]))
    return value


@given(JSON, st.data())
def test_reformatted_arguments_are_equal(value: Any, data: st.DataObject) -> None:
    other = restyled(value, data)
    indent, ascii = data.draw(st.sampled_from([None, 2])), data.draw(st.booleans())
    assert canonical(other) == canonical(value)
    assert canonical(json.loads(json.dumps(other, indent=indent, ensure_ascii=ascii))) == canonical(value)


@given(JSON, JSON)
def test_different_arguments_differ(one: Any, two: Any) -> None:
    assert (canonical(one) == canonical(two)) == same(one, two)


def test_values_that_json_tells_apart() -> None:
    kinds = [True, 1, "1", None, "", [], {}, 0, False, "true", [1], {"1": 1}, 1.5, "null"]
    assert len({canonical(kind) for kind in kinds}) == len(kinds)
    assert canonical(1) == canonical(1.0)
    assert canonical({"a": 1, "b": [2.0]}) == canonical({"b": [2], "a": 1.0})
    assert canonical(2**63) == canonical(float(2**63))


MESSAGES = st.builds(
    Message,
    st.sampled_from(["system", "user", "assistant", "tool"]),
    TEXT,
    st.none() | st.text(max_size=3),
    st.lists(st.builds(ToolCall, st.text(max_size=3), st.sampled_from(["a", "b"]), ARGUMENTS | TEXT), max_size=2).map(
        tuple
    ),
    st.text(max_size=3),
    st.text(max_size=3),
    st.lists(
        st.builds(Media, st.sampled_from(["image", "file"]), st.sampled_from(["0" * 64, "1" * 64]), TEXT), max_size=2
    ).map(tuple),
)


def meaning(message: Message) -> Any:
    """Everything about a message that counts, in another form than the digest's."""
    text = message.text.replace("\r\n", "\n")
    if message.role == "assistant":
        text = re.sub(r"\A\s*<think>.*?</think>", "", text, count=1, flags=re.DOTALL)
    calls = [
        (c.name, c.arguments.strip().encode() if isinstance(c.arguments, str) else canonical(c.arguments))
        for c in message.tool_calls
    ]
    return message.role, text.strip(), [(m.kind, m.digest) for m in message.media], calls


@given(MESSAGES, MESSAGES)
def test_the_fingerprint_depends_on_meaning_only(one: Message, two: Message) -> None:
    assert (of(one) == of(two)) == (meaning(one) == meaning(two))


@given(MESSAGES, st.data())
def test_changes_that_a_harness_may_make(message: Message, data: st.DataObject) -> None:
    space = data.draw(st.sampled_from(["", " ", "\n", "\r\n\t"]))
    lines = re.sub(r"(?<!\r)\n", data.draw(st.sampled_from(["\n", "\r\n"])), message.text)
    calls = tuple(
        replace(c, id=data.draw(st.text(max_size=5)), arguments=restyled(c.arguments, data)) for c in message.tool_calls
    )
    reasoning = data.draw(st.none() | st.text(max_size=5)) if message.role == "assistant" else message.reasoning
    other = Message(
        message.role, space + lines + space, reasoning, calls, data.draw(st.text(max_size=5)), "named", message.media
    )
    assert of(other) == of(message)


def test_reasoning_is_the_assistants_alone() -> None:
    plain = Message("assistant", "Hello.")
    for text in ("<think>a\nb</think>\n\nHello.", "\n<think></think>Hello.", "Hello.\n"):
        assert of(Message("assistant", text)) == of(plain)
    for text in ("Hello.<think>a</think>", "<think>a</think><think>b</think>Hello.", "<think>a Hello."):
        assert of(Message("assistant", text)) != of(plain)
    assert of(Message("user", "<think>a</think>Hello.")) != of(Message("user", "Hello."))


@given(st.lists(MESSAGES, max_size=4), st.lists(MESSAGES, max_size=4))
def test_read_histories(one: list[Message], two: list[Message]) -> None:
    def rolled(messages: list[Message]) -> bytes:
        current = fingerprint.EMPTY_HISTORY
        for message in messages:
            current = roll(current, of(message))
        return current

    assert (rolled(one) == rolled(two)) == (list(map(meaning, one)) == list(map(meaning, two)))


def test_noise_is_not_part_of_it() -> None:
    noise = (re.compile(r"\[\d+:\d+\]"), re.compile(r"<reminder>.*?</reminder>", re.DOTALL))
    one = Message("user", "[12:01] Go.<reminder>be\nquick</reminder>")
    assert of(one, noise) == of(Message("user", "[23:59] Go."), noise)
    assert of(Message("user", "[12:01] Go."), ()) != of(Message("user", "[23:59] Go."), ())
    assert normalized_text(one, noise) == "Go."
    assert one.text == "[12:01] Go.<reminder>be\nquick</reminder>"


def test_it_is_computed_once(monkeypatch: Any) -> None:
    message = Message("user", "x")
    first = of(message)
    monkeypatch.setattr(fingerprint, "_compute", lambda *_: b"other")
    assert of(message) is first


def test_root_key() -> None:
    a, b = Tool("a", "A.", {"type": "object"}), Tool("b")
    keys = [
        root_key([], {}),
        root_key([a], {}),
        root_key([a, b], {}),
        root_key([b, a], {}),
        root_key([replace(a, description="B.")], {}),
        root_key([replace(a, parameters={"type": "string"})], {}),
        root_key([replace(a, custom=True)], {}),
        root_key([replace(a, extra={"strict": True})], {}),
        root_key([a], {"enable_thinking": False}),
        root_key([a], {"enable_thinking": 0}),
        root_key([a], {}, "another model"),
    ]
    assert len(set(keys)) == len(keys)
    assert root_key([a], {"x": 1, "y": 2}) == root_key([replace(a)], {"y": 2.0, "x": 1})


def test_deep_arguments_are_no_error() -> None:
    """Deeper than the fast encoder goes, as far as a parser could have read."""
    deep: Any = 1.0
    for _ in range(300):
        deep = [deep]
    assert canonical(deep) == canonical(json.loads(json.dumps(deep)))
