"""Histories on Google's wire: read once, the same however a harness formats them, and refused by field name only."""

from __future__ import annotations

import copy
import random
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.dialects.google_wire import DIALECT, INLINE, MODEL, USER, call, model, read, result, text, tool, user
from support.dialects.mutation import json_values, mutants
from towline.conversation import Answer, Message, Reply, Request, ToolCall, Usage
from towline.dialects.base import DialectCall, ReadCache
from towline.dialects.google.items import ContentsReader
from towline.dialects.wire import seal
from towline.errors import BadRequest
from towline.tokens.graph import fingerprint
from towline.tokens.graph.tool_results import order_tool_results


def history(turns: int) -> list[dict[str, Any]]:
    contents: list[dict[str, Any]] = [user(text("go"))]
    for turn in range(turns):
        # A streamed turn, kept as it came.
        contents += [model(text(f"step {turn} ")), model(call("f", f"c{turn}", {"n": turn}))]
        contents.append(user(result("f", f"c{turn}", f"result {turn}")))
    return contents


def test_a_repeated_history_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    original = ContentsReader.read

    def count(self: ContentsReader, item: Any, index: int, where: str) -> None:
        reads.append(where)
        original(self, item, index, where)

    monkeypatch.setattr(ContentsReader, "read", count)
    tools = [{"functionDeclarations": [{"name": "f"}], "googleSearch": {}}]
    first, known = read(contents=history(200), tools=tools, systemInstruction="s")
    assert len(reads) == 601
    assert [message.role for message in first.messages] == ["system", "user", *["assistant", "tool"] * 200]
    # Only what holds a number must be compared by its JSON: the calls here, and not what the tools gave.
    assert list(known.literal) == [3 + 3 * turn for turn in range(200)]
    reads.clear()

    again = orjson.loads(orjson.dumps([*history(200), model(text("so ")), model(text("so")), user(text("more"))]))
    second, after = read(known, contents=again, tools=copy.deepcopy(tools), systemInstruction="s")
    assert reads == ["contents[601]", "contents[602]", "contents[603]"]
    assert all(mine is yours for mine, yours in zip(second.messages, first.messages, strict=False))
    assert second.messages[-2:] == [Message("assistant", "so so"), Message("user", "more")]
    assert second.tools is first.tools
    assert second.ignored == first.ignored == ("tools[0]:googleSearch",)
    # The strings of the first request are kept, not a second copy of each.
    assert all(mine is yours for mine, yours in zip(after.items, known.items, strict=False))
    # Reordering the messages of a request does not change the cache.
    second.messages.reverse()
    assert after.messages[-1] == Message("user", "more")

    reads.clear()
    edited = copy.deepcopy(again)
    edited[300]["parts"][0]["functionResponse"]["response"]["output"] = "edited"
    third, _ = read(after, contents=edited, tools=[], systemInstruction="s")
    assert reads[0] == "contents[300]"
    assert third.messages[200] is first.messages[200]
    assert third.messages[201] == tool("edited", "c99")
    assert third.tools == ()

    reads.clear()
    fourth, _ = read(after, contents=again, systemInstruction="other")
    assert len(reads) == 604
    assert fourth.messages[0] == Message("system", "other")


def test_a_turn_that_continues_or_is_cut_is_read_again() -> None:
    pieces = [USER, model(text("a")), model(text("b")), model(text("c"))]
    whole, known = read(contents=pieces)
    assert whole.messages[1] == Message("assistant", "abc")
    for length, expected in ((2, "a"), (3, "ab"), (4, "abc")):
        assert read(known, contents=pieces[:length])[0].messages[1] == Message("assistant", expected)
    assert read(known, contents=pieces)[0].messages[1] is whole.messages[1]
    longer, _ = read(known, contents=[*pieces, model(text("d")), USER])
    assert longer.messages[1:] == [Message("assistant", "abcd"), Message("user", "hi")]
    assert whole.messages[1] == Message("assistant", "abc"), "what was read stays as it is"
    followed, _ = read(known, contents=[*pieces, user(result("f", None, "1"))])
    assert followed.messages[1:] == [Message("assistant", "abc"), tool("1", "")]


def test_values_equal_in_python_differ_on_the_wire() -> None:
    def said(value: Any) -> list[dict[str, Any]]:
        return [USER, model(call(args={"flag": value})), user(result(response={"flag": value})), USER]

    _, known = read(contents=said(True))
    assert read(known, contents=said(True))[0].messages[1] is known.messages[1]
    request, known = read(known, contents=said(1))
    assert request.messages[1].tool_calls[0].arguments == {"flag": 1}
    assert request.messages[1].tool_calls[0].arguments["flag"] is not True
    assert request.messages[2].text == '{"flag":1}'
    assert type(read(known, contents=said(1.0))[0].messages[1].tool_calls[0].arguments["flag"]) is float
    _, known = read(contents=[USER, model(text("t", thought=True), text("a")), USER])
    with pytest.raises(BadRequest):
        read(known, contents=[USER, model(text("t", thought=1), text("a")), USER])
    tools = [
        [{"functionDeclarations": [{"name": "f", "parametersJsonSchema": {"default": value}}]}] for value in (True, 1)
    ]
    _, known = read(tools=tools[0])
    assert read(known, tools=tools[1])[0].tools[0].parameters["default"] is not True


def test_no_content_is_mistaken_for_the_system_instruction() -> None:
    _, known = read(systemInstruction="s")
    for forged in ({"systemInstruction": "s"}, ["systemInstruction", "s"]):
        with pytest.raises(BadRequest):
            read(known, contents=[forged, USER])


# The same conversation in different forms.

identifiers = st.text("abcdefgh", min_size=1, max_size=3)
arguments = st.dictionaries(
    st.text(max_size=4),
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4) | st.lists(st.integers(0, 3)),
)
spoken = st.builds(
    Reply,
    st.text(max_size=300),
    st.none() | st.text(min_size=1, max_size=20),
    st.lists(st.tuples(st.sampled_from("fgh"), arguments), max_size=4).map(
        lambda made: tuple(ToolCall("", name, given) for name, given in made)
    ),
)
conversations = st.lists(st.tuples(spoken, st.text(max_size=9)), min_size=1, max_size=4)


def numbered(turn: int, reply: Reply) -> Reply:
    calls = tuple(
        ToolCall(f"c{turn}x{place}", call.name, call.arguments) for place, call in enumerate(reply.tool_calls)
    )
    return Reply(reply.text, reply.reasoning, calls)


def expected(turns: list[tuple[Reply, str]]) -> list[Message]:
    told = [Message("user", "go")]
    for turn, (reply, said) in enumerate(turns):
        made = numbered(turn, reply)
        told.append(made.as_message())
        told += [tool(f"{said} {place}", call.id, call.name) for place, call in enumerate(made.tool_calls)]
        if said or not made.tool_calls:
            told.append(Message("user", said))
    return told


SHAPES: list[Any] = [
    lambda name, said: {"output": said},
    lambda name, said: {"result": said},
    lambda name, said: {"error": said},
    lambda name, said: {"name": name, "content": said},
    lambda name, said: {"content": [{"type": "text", "text": said[:2]}, {"type": "text", "text": said[2:]}]},
]


def snake(value: Any) -> Any:
    """The names of a part in snake case, as Google's Python client spells them; arguments and responses stay."""
    if not isinstance(value, dict):
        return value
    spelled = {"".join(f"_{c.lower()}" if c.isupper() else c for c in name): item for name, item in value.items()}
    return {name: item if name in ("args", "response") else snake(item) for name, item in spelled.items()}


class Harness:
    """Tells a conversation on the wire, in a style of its own that stays the same from request to request."""

    def __init__(self, seed: int):
        chance = random.Random(seed)
        self.thoughts = chance.random() < 0.5
        self.signatures = chance.choice(["kept", "urls", "placeholder", "dropped"])
        self.split = chance.random() < 0.5
        self.snake = chance.random() < 0.3
        self.call_ids = chance.random() < 0.6
        self.response_ids = self.call_ids and chance.random() < 0.7
        self.shuffled = chance.random() < 0.5
        self.repeated = chance.random() < 0.3
        self.apart = chance.random() < 0.3
        self.shape = chance.choice(SHAPES)
        self.chance = chance

    def contents(self, turns: list[tuple[Reply, str]]) -> list[dict[str, Any]]:
        told = [user(text("go"))]
        for turn, (reply, said) in enumerate(turns):
            made = numbered(turn, reply)
            parts = [part for part in self._answer(made) if self.thoughts or not part.get("thought")]
            told += [model(self._part(part)) for part in parts] if self.split else [model(*map(self._part, parts))]
            responses = [self._response(call, f"{said} {place}") for place, call in enumerate(made.tool_calls)]
            if self.shuffled:
                responses = self._mixed(responses)
            if self.repeated:
                responses *= 2
            words = [text(said)] if said or not made.tool_calls else []
            groups = [[part] for part in [*responses, *words]] if self.apart else [responses + words]
            told += [user(*map(self._spelled, group)) for group in groups]
        return told

    def _answer(self, reply: Reply) -> list[dict[str, Any]]:
        """The parts that a client gathers from our stream."""
        asked = Request("google", "m", [], stream=True, wire={"sse": True, "thoughts": True})
        answer = Answer("a", 1, "m", [reply], Usage(1, 1))
        events = b"".join(DIALECT.stream(asked, "a", 1, "m").finish(answer)).split(b"\n\n")[:-1]
        chunks = [orjson.loads(event.removeprefix(b"data: ")) for event in events]
        return [part for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]

    def _part(self, part: dict[str, Any]) -> dict[str, Any]:
        part = copy.deepcopy(part)
        signature = part.pop("thoughtSignature", None)
        if signature and self.signatures != "dropped":
            placeholder = "skip_thought_signature_validator"
            url = signature.replace("+", "-").replace("/", "_")
            part["thoughtSignature"] = {"kept": signature, "urls": url}.get(self.signatures, placeholder)
        if not self.call_ids and "functionCall" in part:
            del part["functionCall"]["id"]
        return self._spelled(part)

    def _response(self, call: ToolCall, said: str) -> dict[str, Any]:
        return result(call.name, call.id if self.response_ids else None, self.shape(call.name, said))

    def _mixed(self, responses: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Any order with ids; without them, those of one name stay in the order of their calls."""
        mixed = self.chance.sample(responses, len(responses))
        if self.response_ids:
            return mixed
        waiting = {name: [r for r in responses if r["functionResponse"]["name"] == name] for name in "fgh"}
        return [waiting[response["functionResponse"]["name"]].pop(0) for response in mixed]

    def _spelled(self, part: dict[str, Any]) -> dict[str, Any]:
        return snake(part) if self.snake else part

    def reasoning(self, reply: Reply) -> str | None:
        return reply.reasoning if self.thoughts or self.signatures in ("kept", "urls") else None


@settings(max_examples=200, deadline=None)
@given(conversations, st.integers(0, 2**32))
def test_a_conversation_reads_the_same_in_any_form(turns: list[tuple[Reply, str]], seed: int) -> None:
    """In every style, and request by request as it grows: what is known changes nothing, and each reply comes back as one
    message with the fingerprint of the reply."""
    harness = Harness(seed)
    known = ReadCache()
    for length in range(1, len(turns) + 1):
        contents = Harness(seed).contents(turns[:length])
        request, known = read(known, contents=contents)
        assert request.messages == read(contents=contents)[0].messages
    order_tool_results(request.messages)
    wanted = expected(turns)
    assert [message.role for message in request.messages] == [message.role for message in wanted]
    for found, said in zip(request.messages, wanted, strict=True):
        assert fingerprint.of(found) == fingerprint.of(said)
        assert found.text == said.text
    spoken_back = [message for message in request.messages if message.role == "assistant"]
    assert [message.reasoning for message in spoken_back] == [harness.reasoning(reply) for reply, _ in turns]
    # Calls without ids have got some, and no two the same.
    ids = [call.id for message in spoken_back for call in message.tool_calls]
    assert len(set(ids)) == len(ids)


RICH: dict[str, Any] = {
    "systemInstruction": {"role": "user", "parts": [text("s")]},
    "contents": [
        user(text("u"), INLINE, {"fileData": {"fileUri": "https://x/y", "mimeType": "video/mp4"}}),
        model(text("t", thought=True)),
        model(text("a", thoughtSignature=seal("t"))),
        model(call("f", "a", {"x": [1, True]}), call("f", None), call("g", "b")),
        user(result("g", "b"), result("f", None, {"result": {"content": [text("x")]}}), text("more")),
        user(result("g", "b"), result("f", "a", "see", parts=[INLINE])),
        model({"executableCode": {"code": "2"}}, {"toolCall": {"id": "s"}}),
        {"role": "system", "parts": [text("s")]},
        {"role": "function", "parts": [{"function_response": {"name": "h", "response": {"error": "e"}}}]},
        model(text("prefill")),
    ],
    "tools": [
        {
            "functionDeclarations": [
                {
                    "name": "f",
                    "description": "d",
                    "parameters": {
                        "type": "OBJECT",
                        "nullable": True,
                        "properties": {"a": {"type": "ARRAY", "minItems": "1"}},
                        "propertyOrdering": ["a"],
                    },
                }
            ]
        },
        {
            "function_declarations": [
                {"name": "g", "parameters_json_schema": {"type": "object"}, "behavior": "BLOCKING"}
            ],
            "googleSearch": {},
        },
    ],
    "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}, "retrievalConfig": {}},
    "generationConfig": {
        "temperature": 0.5,
        "topP": 1,
        "topK": 5,
        "candidateCount": 2,
        "maxOutputTokens": 3,
        "stopSequences": ["a"],
        "seed": 1,
        "presencePenalty": 1,
        "responseMimeType": "application/json",
        "responseSchema": {"type": "OBJECT"},
        "responseLogprobs": True,
        "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 5, "thinkingLevel": "LOW"},
        "mediaResolution": "LOW",
    },
    "safetySettings": [],
    "cachedContent": "c",
}

values = json_values(
    *("user", "model", "f", "a", "systemInstruction", text("x"), call("f", "a"), call("f", None)),
    *(result("f", None), result("g", "b"), INLINE, USER, model()),
)


def outcome(body: Any, known: ReadCache) -> tuple[str, ReadCache]:
    """The outcome of reading a body, as text that tells `True` from `1`."""
    try:
        request, after = DIALECT.read(DialectCall("generate", body, {}, {}, {"model": MODEL}), known)
    except BadRequest as refusal:
        error = orjson.loads(DIALECT.error(refusal).body)["error"]
        assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT")
        return f"refused: {refusal.param}: {error['message']}", known
    assert request.messages
    assert len(request.messages) == len(after.messages) == len(after.starts)
    assert after.starts == sorted(after.starts)
    assert list(after.literal) == sorted(after.literal)
    return repr(request), after


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], deadline=None)
@given(st.data())
def test_any_body_is_read_or_refused_and_the_cache_changes_nothing(data: st.DataObject) -> None:
    first = data.draw(mutants(RICH, values))
    _, known = outcome(first, ReadCache())
    second = data.draw(mutants(first, values))
    found = outcome(second, known)[0]
    assert found == outcome(second, ReadCache())[0]
    assert not found.startswith("refused: None"), "a refusal names its field"


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(RICH["contents"]) | values, max_size=5), st.lists(values, max_size=2), st.integers(0, 5)
)
def test_any_history_may_be_cut_and_continue_differently(first: list[Any], rest: list[Any], cut: int) -> None:
    _, known = outcome({"contents": first}, ReadCache())
    body = {"contents": [*copy.deepcopy(first[:cut]), *rest]}
    assert outcome(body, known)[0] == outcome(body, ReadCache())[0]


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from([*RICH, "generateContentRequest", "x"]), values))
def test_bodies_of_any_shape_are_refused_by_name(body: dict[str, Any]) -> None:
    outcome(body, ReadCache())
    for whole in ([], None, "text", 5):
        with pytest.raises(BadRequest):
            DIALECT.read(DialectCall("generate", whole), ReadCache())  # type: ignore[arg-type]
