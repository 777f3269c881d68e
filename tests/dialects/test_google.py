"""What the Google dialect reads: every shape that harnesses send, and every fault by its path."""

from __future__ import annotations

import math
from base64 import urlsafe_b64encode
from hashlib import sha256
from typing import Any

import orjson
import pytest

from support.dialects.google_wire import (
    DIALECT,
    INLINE,
    MODEL,
    PICTURE,
    PNG,
    PNG_URL,
    USER,
    call,
    messages,
    model,
    read,
    result,
    text,
    tool,
    user,
)
from support.dialects.mutation import DEEP
from towline.conversation import Hints, Media, Message, Request, Sampling, Tool, ToolCall
from towline.dialects.base import DialectCall, ReadCache
from towline.dialects.wire import seal
from towline.errors import BadRequest


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("hi", Message("user", "hi")),
        ({"parts": [text("no role")]}, Message("user", "no role")),
        ({"parts": text("one part")}, Message("user", "one part")),
        (user(), Message("user")),
        (user(text("a"), text("b", partMetadata={"x": 1}), {"thoughtSignature": "AA=="}), Message("user", "ab")),
        ({"role": "user", "parts": ["a", text("b")]}, Message("user", "ab")),
        ({"role": "system", "parts": [text("a"), text("b")]}, Message("system", "a\nb")),
        (user(INLINE, text("look")), Message("user", "look", media=(PICTURE,))),
        (
            user(text("look"), {"inline_data": {"mime_type": "image/png", "data": urlsafe_b64encode(PNG).decode()}}),
            Message("user", "look", media=(Media("image", PICTURE.digest, PNG_URL, 4),)),
        ),
        (
            user({"inlineData": {"mimeType": "audio/mp3", "data": " AAEC\n"}}),
            Message("user", media=(Media("audio", sha256(b"\0\1\2").hexdigest(), "data:audio/mp3;base64,AAEC", 0),)),
        ),
        (
            user({"fileData": {"fileUri": "https://x/y.pdf", "mimeType": "application/pdf"}}),
            Message("user", media=(Media("file", sha256(b"https://x/y.pdf").hexdigest(), "https://x/y.pdf", 0),)),
        ),
        (
            user({"file_data": {"file_uri": "https://x/y", "mime_type": "video/mp4"}, "videoMetadata": {"fps": 1}}),
            Message("user", media=(Media("video", sha256(b"https://x/y").hexdigest(), "https://x/y", 0),)),
        ),
        (
            user({"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "4"}}),
            Message("user", '{"codeExecutionResult":{"outcome":"OUTCOME_OK","output":"4"}}'),
        ),
        (model(), Message("assistant")),
        ({"role": "assistant", "parts": [text("a"), text("b")]}, Message("assistant", "ab")),
        (model(text("t", thought=True), text("a")), Message("assistant", "a", "t")),
        (model(text("a", thoughtSignature=seal("t"))), Message("assistant", "a", "t")),
        (model({"thought_signature": seal("t")}, text("a")), Message("assistant", "a", "t")),
        (
            model(text("mine", thought=True), call(thoughtSignature=seal("t"))),
            Message("assistant", "", "t", (ToolCall("c1", "f", {}),)),
        ),
        (
            model(text("t", thought=True), text("a", thoughtSignature="skip_thought_signature_validator")),
            Message("assistant", "a", "t"),
        ),
        (model(text("a", thoughtSignature="skip_thought_signature_validator")), Message("assistant", "a")),
        (
            model(
                text("a"), call(args={"x": [True, None, 1]}), text("b"), {"function_call": {"name": "g", "id": "c2"}}
            ),
            Message("assistant", "ab", None, (ToolCall("c1", "f", {"x": [True, None, 1]}), ToolCall("c2", "g", {}))),
        ),
        (
            model(text("", functionCall={"name": "f", "id": "c"})),
            Message("assistant", "", None, (ToolCall("c", "f", {}),)),
        ),
        (model(call(args="{not json")), Message("assistant", "", None, (ToolCall("c1", "f", "{not json"),))),
        (model(call(args={"__text__": "raw"})), Message("assistant", "", None, (ToolCall("c1", "f", "raw"),))),
        (
            model(text("see "), INLINE),
            Message("assistant", "see ", media=(Media("image", PICTURE.digest, PNG_URL, 4),)),
        ),
        (
            model({"executable_code": {"code": "2+2"}}, {"toolCall": {"id": "s"}}),
            Message("assistant", '{"executableCode":{"code":"2+2"}}{"toolCall":{"id":"s"}}'),
        ),
    ],
)
def test_each_shape_of_a_content(content: Any, expected: Message) -> None:
    assert messages(content) == [expected]


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("s", "s"),
        ({"role": "user", "parts": [text("a"), text("b")]}, "a\nb"),
        ({"parts": text("a")}, "a"),
        ([text("a"), "b"], "a\nb"),
        (text("a"), "a"),
        ("", None),
        ([], None),
        ({"parts": [text("")]}, None),
        (None, None),
    ],
)
def test_each_shape_of_the_system_instruction(system: Any, expected: str | None) -> None:
    lead = [] if expected is None else [Message("system", expected)]
    for name in ("systemInstruction", "system_instruction"):
        assert read(**{name: system})[0].messages == [*lead, Message("user", "hi")]


TWO = model(call("f", "a"), call("g", "b"))
TWINS = model(call("f", None), call("f", None), call("g", None))
FIRST, SECOND, THIRD = "google00000000", "google00000001", "google00000002"


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        # A content for every piece of a streamed turn is one message; so it is for a turn that begins with its calls.
        (
            [
                model(text("t", thought=True)),
                model(text("a", thoughtSignature=seal("u"))),
                model(text("b")),
                model(call()),
            ],
            [Message("assistant", "ab", "u", (ToolCall("c1", "f", {}),))],
        ),
        (
            [model(text("a")), user(text("b")), model(text("c")), model()],
            [Message("assistant", "a"), Message("user", "b"), Message("assistant", "c")],
        ),
        # Contents of a user stay as many as there are.
        ([user(text("a")), user(text("b"))], [Message("user", "a"), Message("user", "b")]),
        # Responses before what the user says; by id, in any order, in one content or in several.
        (
            [TWO, user(text("x"), result("g", "b", "2"), result("f", "a", "1"))],
            [tool("2", "b", "g"), tool("1", "a"), Message("user", "x")],
        ),
        ([TWO, user(result("g", "b", "2")), user(result("f", "a", "1"))], [tool("2", "b", "g"), tool("1", "a")]),
        (
            [
                TWO,
                {"role": "function", "parts": [result("g", "b", "2")]},
                user(text("x")),
                {"role": "tool", "parts": [result("f", "a", "1")]},
            ],
            [tool("2", "b", "g"), Message("user", "x"), tool("1", "a")],
        ),
        # Without ids: the first open call of the name, also across contents.
        (
            [TWINS, user(result("g", None, "3"), result("f", None, "1"), result("f", None, "2"))],
            [tool("3", THIRD, "g"), tool("1", FIRST), tool("2", SECOND)],
        ),
        ([TWINS, user(result("f", None, "1")), user(result("f", None, "1"))], [tool("1", FIRST), tool("1", SECOND)]),
        # Ids on the calls only, on the responses only, or on some; an id that no call has does not take another's place.
        ([TWO, user(result("g", None, "2"), result("f", None, "1"))], [tool("2", "b", "g"), tool("1", "a")]),
        ([TWINS, user(result("f", "x", "1"), result("f", "y", "2"))], [tool("1", FIRST), tool("2", SECOND)]),
        (
            [model(call("f", "a"), call("f", "b")), user(result("f", None, "2"), result("f", "a", "1"))],
            [tool("2", "b"), tool("1", "a")],
        ),
        (
            [model(call("f", "a"), call("f", "b")), user(result("f", "?", "2"), result("f", "a", "1"))],
            [tool("2", "b"), tool("1", "a")],
        ),
        ([TWO, user(result("", "b", "2"))], [tool("2", "b", "g")]),
        # The same response twice, as Gemini CLI resumes: in one content, in the next, with its picture, without ids.
        (
            [TWO, user(result("f", "a", "1"), result("g", "b", "2"), result("f", "a", "1"), result("g", "b", "2"))],
            [tool("1", "a"), tool("2", "b", "g")],
        ),
        (
            [TWO, user(result("f", "a", "1")), user(result("f", "a", "1"), text("x"))],
            [tool("1", "a"), Message("user", "x")],
        ),
        (
            [TWO, user(result("f", "a", "1"), INLINE, result("f", "a", "1"), INLINE)],
            [tool("1", "a"), Message("user", media=(PICTURE,))],
        ),
        ([model(call("f", None)), user(result("f", None, "1"), result("f", None, "1"))], [tool("1", FIRST)]),
        # Pictures that a user shows twice are two; another response to an answered call is one more.
        (
            [TWO, user(result("f", "a", "1"), INLINE, INLINE)],
            [tool("1", "a"), Message("user", media=(PICTURE, PICTURE))],
        ),
        ([TWO, user(result("f", "a", "1"), result("f", "a", "2"))], [tool("1", "a"), tool("2", "a")]),
        # Responses to nothing that is there.
        ([user(result("f", "z", "1")), user(result("h", None, "1"))], [tool("1", "z"), tool("1", "", "h")]),
        (
            [TWO, user(result("f", "a", "1")), model(text("x")), user(result("f", "a", "1"))],
            [tool("1", "a"), Message("assistant", "x"), tool("1", "a")],
        ),
        # Media of a response stands behind its text.
        (
            [TWO, user(result("f", "a", "see", parts=[INLINE]))],
            [tool("see", "a", "f", Media("image", PICTURE.digest, PNG_URL, 3))],
        ),
    ],
)
def test_turns_of_several_contents_and_their_function_responses(contents: list[Any], expected: list[Message]) -> None:
    found = messages(*contents)
    assert found[-len(expected) :] == expected
    assert len(found) - len(expected) <= 1, "beside them at most the turn that is answered"


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ({"output": "out"}, "out"),
        ({"result": "out"}, "out"),
        ({"error": "failed"}, "failed"),
        ({"content": "out"}, "out"),
        ({"name": "f", "content": "out"}, "out"),
        ({"output": ""}, ""),
        ({}, ""),
        (None, ""),
        ({"output": None}, ""),
        ({"result": {"a": [1, True]}}, '{"a":[1,true]}'),
        ({"result": 5}, "5"),
        ({"error": {"code": 5}}, '{"error":{"code":5}}'),
        ({"content": [{"type": "text", "text": "a"}, {"text": "b"}]}, "ab"),
        ({"content": [{"type": "text", "text": "a"}], "isError": False, "_meta": None}, "a"),
        (
            {"content": [{"type": "text", "text": "a"}], "isError": True},
            '{"content":[{"type":"text","text":"a"}],"isError":true}',
        ),
        ({"result": {"content": [{"type": "text", "text": "a"}], "structuredContent": None}}, "a"),
        ({"content": [{"type": "image", "data": "AA=="}]}, '[{"type":"image","data":"AA=="}]'),
        ({"content": []}, "[]"),
        ({"name": "g", "content": "out"}, '{"name":"g","content":"out"}'),
        ({"name": "f"}, '{"name":"f"}'),
        ({"x": None}, '{"x":null}'),
        ({"temperature": 21.5, "unit": None}, '{"temperature":21.5,"unit":null}'),
        ("plain", "plain"),
        ([1], "[1]"),
    ],
)
def test_each_shape_of_a_response(response: Any, expected: str) -> None:
    (found,) = messages(user({"functionResponse": {"name": "f", "id": "x", "response": response}}))
    assert found == tool(expected, "x")


def test_all_parameters() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    request, _ = read(
        headers={"x-session-id": "s"},
        tools=[
            {
                "functionDeclarations": [
                    {"name": "f", "description": "d", "parametersJsonSchema": schema, "behavior": "BLOCKING"}
                ]
            },
            {"functionDeclarations": None, "googleSearch": {}, "code_execution": {}},
            {"function_declarations": [{"name": "g", "parameters": None, "response_json_schema": {"type": "string"}}]},
        ],
        toolConfig={
            "functionCallingConfig": {
                "mode": "ANY",
                "allowedFunctionNames": ["g"],
                "streamFunctionCallArguments": True,
            },
            "retrievalConfig": {"languageCode": "en"},
        },
        generationConfig={
            "temperature": 1,
            "topP": 0.5,
            "topK": 40.0,
            "candidateCount": 3,
            "maxOutputTokens": 7,
            "stopSequences": ["END"],
            "seed": -5,
            "presencePenalty": 0.5,
            "frequency_penalty": 0,
            "responseMimeType": "application/json",
            "responseSchema": {"type": "OBJECT"},
            "responseLogprobs": True,
            "logprobs": 3,
            "responseModalities": ["TEXT"],
            "speechConfig": None,
            "thinkingConfig": {"include_thoughts": True, "thinkingBudget": 8192, "thinking_level": "HIGH", "extra": 1},
        },
        safetySettings=[{"category": "HARM_CATEGORY_HATE_SPEECH", "threshold": "BLOCK_NONE"}],
        cachedContent="cachedContents/1",
        labels={"a": "b"},
        serviceTier=None,
        store=True,
    )
    assert request == Request(
        dialect="google",
        model="m",
        messages=[Message("user", "hi")],
        tools=(
            Tool("f", "d", schema, extra={"behavior": "BLOCKING"}),
            Tool("g", extra={"responseJsonSchema": {"type": "string"}}),
        ),
        tool_choice={"name": "g"},
        sampling=Sampling(
            temperature=1.0,
            top_p=0.5,
            top_k=40,
            max_tokens=7,
            stop=("END",),
            seed=-5,
            n=3,
            other={
                "presencePenalty": 0.5,
                "responseMimeType": "application/json",
                "responseSchema": {"type": "OBJECT"},
            },
        ),
        template_args={"reasoning_effort": "high"},
        hints=Hints(session="s"),
        ignored=(
            "cachedContent",
            "generationConfig.logprobs",
            "generationConfig.responseModalities",
            "generationConfig.thinkingConfig.extra",
            "generationConfig.thinkingConfig.thinkingBudget",
            "labels",
            "safetySettings",
            "store",
            "toolConfig.functionCallingConfig.streamFunctionCallArguments",
            "toolConfig.retrievalConfig",
            "tools[1]:googleSearch",
            "tools[1]:codeExecution",
        ),
        wire={"thoughts": True, "logprobs": True},
    )


@pytest.mark.parametrize(
    ("thinking", "arguments", "recorded"),
    [
        ({"thinkingBudget": 0}, {"enable_thinking": False}, False),
        ({"thinkingBudget": -1}, {}, False),
        ({"thinkingBudget": 5}, {}, True),
        ({"thinkingLevel": "LOW"}, {"reasoning_effort": "low"}, False),
        ({"thinkingLevel": "THINKING_LEVEL_UNSPECIFIED"}, {}, False),
        ({}, {}, False),
    ],
)
def test_thinking(thinking: dict[str, Any], arguments: dict[str, Any], recorded: bool) -> None:
    request, _ = read(generation_config={"thinking_config": thinking})
    assert (request.template_args, request.wire) == (arguments, {})
    assert bool(request.ignored) is recorded


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (
            {
                "type": "OBJECT",
                "properties": {"type": {"type": "STRING"}, "b": {"type": "INTEGER"}},
                "required": ["type"],
                "property_ordering": ["b"],
            },
            {
                "type": "object",
                "properties": {"b": {"type": "integer"}, "type": {"type": "string"}},
                "required": ["type"],
            },
        ),
        ({"type": "STRING", "nullable": True, "enum": ["STRING"]}, {"type": ["string", "null"], "enum": ["STRING"]}),
        ({"any_of": [{"type": "NUMBER"}], "nullable": True}, {"anyOf": [{"type": "number"}, {"type": "null"}]}),
        ({"anyOf": [{"type": "NULL"}], "nullable": True}, {"anyOf": [{"type": "null"}]}),
        (
            {"type": "ARRAY", "items": {"type": "BOOLEAN"}, "minItems": "1", "max_items": 2},
            {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
        ),
        ({"type": "TYPE_UNSPECIFIED", "nullable": True}, {"nullable": True}),
        (
            {"defs": {"T": {"type": "STRING"}}, "ref": "#/defs/T"},
            {"$defs": {"T": {"type": "string"}}, "$ref": "#/defs/T"},
        ),
        (
            {"type": "object", "additional_properties": {"type": "STRING"}, "x_vendor": 1},
            {"type": "object", "additionalProperties": {"type": "string"}, "x_vendor": 1},
        ),
        (
            {"default": {"type": "STRING"}, "minItems": "many", "properties": [], "propertyOrdering": 5},
            {"default": {"type": "STRING"}, "minItems": "many", "properties": [], "propertyOrdering": 5},
        ),
    ],
)
def test_schemas_are_converted_to_json_schema(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    (found,) = read(tools=[{"functionDeclarations": [{"name": "f", "parameters": schema}]}])[0].tools
    assert found.parameters == expected
    assert list(found.parameters.get("properties", ())) == list(expected.get("properties", ()))
    # What is JSON Schema already stays as it is.
    (given,) = read(tools={"functionDeclarations": {"name": "f", "parametersJsonSchema": schema}})[0].tools
    assert given.parameters == schema


def test_kinds_of_tool_choice() -> None:
    tools = [{"functionDeclarations": [{"name": "f"}, {"name": "g"}]}]

    def choice(**calling: Any) -> Any:
        return read(tools=tools, toolConfig={"functionCallingConfig": calling})[0].tool_choice

    assert choice() is None
    assert choice(mode="MODE_UNSPECIFIED", allowedFunctionNames=["f"]) is None
    assert choice(mode="AUTO") == "auto"
    assert choice(mode="any") == "required"
    assert choice(mode="NONE", allowedFunctionNames=["f"]) == "none"
    assert choice(mode="ANY", allowed_function_names=["f", "g"]) == {"mode": "required", "names": ["f", "g"]}
    assert choice(mode="VALIDATED", allowedFunctionNames=["f"]) == {"mode": "auto", "names": ["f"]}
    validated, _ = read(tools=tools, tool_config={"function_calling_config": {"mode": "VALIDATED"}})
    assert (validated.tool_choice, validated.ignored) == ("auto", ("toolConfig.functionCallingConfig.mode:VALIDATED",))
    own = [{"computerUse": {}}]
    assert read(tools=own, toolConfig={"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["click"]}})[
        0
    ].tool_choice == {"name": "click"}


def test_a_count_of_tokens_reads_the_request_inside() -> None:
    inner = {
        "model": "models/m",
        "contents": [USER],
        "systemInstruction": "s",
        "tools": [{"functionDeclarations": [{"name": "f"}]}],
    }
    for body in (inner, {"generateContentRequest": inner}, {"generate_content_request": inner}):
        call = DialectCall("count_tokens", body, {}, {}, {"model": MODEL})
        request, known = DIALECT.read(call, ReadCache())
        assert request.messages == [Message("system", "s"), Message("user", "hi")]
        assert (request.tools, request.ignored) == ((Tool("f"),), ())
        assert DIALECT.items(body) == known.items
    assert orjson.loads(DIALECT.count(5).body) == {"totalTokens": 5}


BAD_CONTENTS: list[tuple[Any, str]] = [
    (5, ""),
    ({"role": "nobody", "parts": []}, ".role"),
    ({"role": ["user"], "parts": []}, ".role"),
    ({"role": "user"}, ".parts"),
    ({"text": "no parts"}, ".parts"),
    ({"parts": 5}, ".parts"),
    (user(5), ".parts[0]"),
    (user(text(5)), ".parts[0].text"),
    (user(text("x"), {"hologram": {}}), ".parts[1]"),
    (user(call()), ".parts[0]"),
    (user({"inlineData": 5}), ".parts[0].inlineData"),
    (user({"inlineData": {"data": "AA=="}}), ".parts[0].inlineData.mimeType"),
    (user({"inlineData": {"mimeType": "image/png"}}), ".parts[0].inlineData.data"),
    (user({"inlineData": {"mimeType": "image/png", "data": "%%"}}), ".parts[0].inlineData.data"),
    (user({"fileData": {"mimeType": "image/png"}}), ".parts[0].fileData.fileUri"),
    (user({"fileData": {"fileUri": "gs://bucket/x"}}), ".parts[0].fileData.fileUri"),
    (user({"fileData": {"fileUri": "file:///etc/passwd", "mimeType": 5}}), ".parts[0].fileData.mimeType"),
    (user({"functionResponse": 5}), ".parts[0].functionResponse"),
    (user({"functionResponse": {"response": {}}}), ".parts[0].functionResponse.name"),
    (user({"functionResponse": {"name": 5}}), ".parts[0].functionResponse.name"),
    (user(result(id=5)), ".parts[0].functionResponse.id"),  # type: ignore[arg-type]
    (user(result(parts=5)), ".parts[0].functionResponse.parts"),
    (user(result(parts=[5])), ".parts[0].functionResponse.parts[0]"),
    (user(result(parts=[{"hologram": 1}])), ".parts[0].functionResponse.parts[0]"),
    (model(text("x", thought="yes")), ".parts[0].thought"),
    (model(text(5, thought=True)), ".parts[0].text"),
    (model(result()), ".parts[0]"),
    (model({"functionCall": 5}), ".parts[0].functionCall"),
    (model({"functionCall": {"args": {}}}), ".parts[0].functionCall.name"),
    (model(call(id=5)), ".parts[0].functionCall.id"),  # type: ignore[arg-type]
    (model(call(args=5)), ".parts[0].functionCall.args"),
    (
        model({"functionCall": {"name": "f", "partial_args": [{"jsonPath": "$.a"}]}}),
        ".parts[0].functionCall.partialArgs",
    ),
]


@pytest.mark.parametrize(("item", "suffix"), BAD_CONTENTS)
def test_invalid_fields_of_a_content_are_named(item: Any, suffix: str) -> None:
    for system in ({}, {"systemInstruction": "s"}):
        with pytest.raises(BadRequest) as caught:
            read(contents=[USER, item], **system)
        assert caught.value.param == f"contents[1]{suffix}"
        assert f"'{caught.value.param}'" in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"contents": None}, "contents"),
        ({"contents": []}, "contents"),
        ({"contents": 5}, "contents"),
        ({"contents": [{**USER, "extra": DEEP}]}, "contents[0]"),
        ({"generateContentRequest": 5}, "generateContentRequest"),
        ({"generateContentRequest": {}}, "contents"),
        ({"systemInstruction": 5}, "systemInstruction"),
        ({"systemInstruction": False}, "systemInstruction"),
        ({"systemInstruction": {"role": "user"}}, "systemInstruction.parts"),
        ({"systemInstruction": {"parts": [INLINE]}}, "systemInstruction.parts[0].text"),
        ({"systemInstruction": {"parts": [{"text": "x", "extra": DEEP}]}}, "systemInstruction"),
        ({"generationConfig": []}, "generationConfig"),
        ({"generationConfig": {"temperature": True}}, "generationConfig.temperature"),
        ({"generationConfig": {"temperature": 2.5}}, "generationConfig.temperature"),
        ({"generationConfig": {"temperature": math.nan}}, "generationConfig.temperature"),
        ({"generationConfig": {"topP": "1"}}, "generationConfig.topP"),
        ({"generationConfig": {"top_k": 1.5}}, "generationConfig.topK"),
        ({"generationConfig": {"candidateCount": 0}}, "generationConfig.candidateCount"),
        ({"generationConfig": {"candidateCount": 9}}, "generationConfig.candidateCount"),
        ({"generationConfig": {"maxOutputTokens": 0}}, "generationConfig.maxOutputTokens"),
        ({"generationConfig": {"seed": 2**64}}, "generationConfig.seed"),
        ({"generationConfig": {"stopSequences": "x"}}, "generationConfig.stopSequences"),
        ({"generationConfig": {"stopSequences": ["x"] * 17}}, "generationConfig.stopSequences"),
        ({"generationConfig": {"stopSequences": ["x", ""]}}, "generationConfig.stopSequences[1]"),
        ({"generationConfig": {"presencePenalty": 3}}, "generationConfig.presencePenalty"),
        ({"generationConfig": {"responseMimeType": 5}}, "generationConfig.responseMimeType"),
        ({"generationConfig": {"responseJsonSchema": DEEP}}, "generationConfig.responseJsonSchema"),
        ({"generationConfig": {"responseLogprobs": 1}}, "generationConfig.responseLogprobs"),
        ({"generationConfig": {"thinkingConfig": 5}}, "generationConfig.thinkingConfig"),
        (
            {"generationConfig": {"thinkingConfig": {"includeThoughts": 1}}},
            "generationConfig.thinkingConfig.includeThoughts",
        ),
        (
            {"generationConfig": {"thinkingConfig": {"thinkingBudget": "5"}}},
            "generationConfig.thinkingConfig.thinkingBudget",
        ),
        (
            {"generationConfig": {"thinkingConfig": {"thinkingLevel": 5}}},
            "generationConfig.thinkingConfig.thinkingLevel",
        ),
        ({"tools": 5}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"functionDeclarations": 5}]}, "tools[0].functionDeclarations"),
        ({"tools": [{"functionDeclarations": [5]}]}, "tools[0].functionDeclarations[0]"),
        ({"tools": [{"functionDeclarations": [{"description": "d"}]}]}, "tools[0].functionDeclarations[0].name"),
        (
            {"tools": [{"functionDeclarations": [{"name": "f", "parameters": []}]}]},
            "tools[0].functionDeclarations[0].parameters",
        ),
        (
            {"tools": [{"functionDeclarations": [{"name": "f", "parametersJsonSchema": 5}]}]},
            "tools[0].functionDeclarations[0].parametersJsonSchema",
        ),
        ({"tools": [{"functionDeclarations": [{"name": "f", "parameters": DEEP}]}]}, "tools[0]"),
        ({"toolConfig": []}, "toolConfig"),
        ({"toolConfig": {"functionCallingConfig": 5}}, "toolConfig.functionCallingConfig"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "MAYBE"}}}, "toolConfig.functionCallingConfig.mode"),
        ({"toolConfig": {"functionCallingConfig": {"mode": 5}}}, "toolConfig.functionCallingConfig.mode"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "toolConfig.functionCallingConfig.mode"),
        (
            {"toolConfig": {"functionCallingConfig": {"mode": "AUTO", "allowedFunctionNames": ["f"]}}},
            "toolConfig.functionCallingConfig.allowedFunctionNames[0]",
        ),
        (
            {"toolConfig": {"functionCallingConfig": {"mode": "NONE", "allowedFunctionNames": [5]}}},
            "toolConfig.functionCallingConfig.allowedFunctionNames[0]",
        ),
    ],
)
def test_invalid_parameters_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read(**fields)
    assert caught.value.param == param
