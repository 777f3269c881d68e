"""What the official Anthropic client makes of our answers: the model's reply, and back again.

The client runs as it is; only its transport is replaced by a function that reads the request and writes the answer with
the dialect. So requests are what the client really sends, and answers are read by its own models, checked strictly.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import anthropic
import httpx2
import orjson
import pytest
from anthropic.types import Message as SdkMessage
from anthropic.types import ModelInfo, RawMessageStreamEvent
from anthropic.types.beta import BetaMessage, BetaRawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from towline.conversation import Answer, Finish, Message, Reply, Request, ToolCall, Usage
from towline.dialects.base import DialectCall, ReadCache, Response
from towline.dialects.messages import MessagesDialect
from towline.errors import ApiError, ErrorKind
from towline.tokens.graph import fingerprint

DIALECT = MessagesDialect()
USAGE = Usage(prompt=11, sampled=7, cached=5, reasoning=3)
ASK: Any = {
    "model": "org/model",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
}
EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
BETA_EVENTS: TypeAdapter[Any] = TypeAdapter(BetaRawMessageStreamEvent)
Handler = Callable[[httpx2.Request], httpx2.Response]


def client(handler: Handler) -> anthropic.Anthropic:
    transport = httpx2.Client(transport=httpx2.MockTransport(handler))
    return anthropic.Anthropic(api_key="k", base_url="http://gateway", http_client=transport, max_retries=1)


def http(response: Response) -> httpx2.Response:
    return httpx2.Response(response.status, content=response.body, headers=response.headers)


def read(request: httpx2.Request) -> Request:
    headers = {name.lower(): value for name, value in request.headers.items()}
    assert DIALECT.claims(headers)
    operation = {"/v1/messages": "generate", "/v1/messages/count_tokens": "count_tokens"}[request.url.path]
    return DIALECT.read(DialectCall(operation, orjson.loads(request.content), headers), ReadCache())[0]


def streamed(asked: Request, answer: Answer, pings: int = 2) -> bytes:
    stream = DIALECT.stream(asked, answer.id, answer.created, answer.model)
    return b"".join([stream.start(), *(stream.ping() for _ in range(pings)), *stream.finish(answer)])


def gateway(reply: Reply, usage: Usage = USAGE) -> anthropic.Anthropic:
    """A client whose calls are answered by the reply, whole or streamed as it asks, with pings before it."""

    def handle(request: httpx2.Request) -> httpx2.Response:
        asked = read(request)
        answer = Answer("abc1", 1700000000, asked.model, [reply], usage)
        if not asked.stream:
            return http(DIALECT.write(asked, answer))
        content = streamed(asked, answer)
        return httpx2.Response(200, content=content, headers={"content-type": "text/event-stream"})

    return client(handle)


def says(message: Any) -> list[tuple[str, ...]]:
    """The blocks of a message of the client's."""
    blocks: list[tuple[str, ...]] = []
    for block in message.content:
        if block.type == "thinking":
            assert block.signature
            blocks.append(("thinking", block.thinking))
        elif block.type == "text":
            blocks.append(("text", block.text))
        else:
            blocks.append(("tool_use", block.id, block.name, orjson.dumps(block.input).decode()))
    return blocks


def said(reply: Reply) -> list[tuple[str, ...]]:
    """The same of a reply."""
    blocks: list[tuple[str, ...]] = [("thinking", reply.reasoning)] if reply.reasoning else []
    blocks += [("text", reply.text)] if reply.text else []
    for call in reply.tool_calls:
        given = {"unparsed_arguments": call.arguments} if isinstance(call.arguments, str) else call.arguments
        blocks.append(("tool_use", call.id, call.name, orjson.dumps(given).decode()))
    return blocks


def stop_reason(reply: Reply) -> str:
    if reply.finish in (Finish.LENGTH, Finish.ABORT):
        return {Finish.LENGTH: "max_tokens", Finish.ABORT: "refusal"}[reply.finish]
    if reply.tool_calls:
        return "tool_use"
    return "stop_sequence" if reply.finish is Finish.STOP_STRING else "end_turn"


def check(message: Any, reply: Reply) -> None:
    assert (message.id, message.type, message.role, message.model) == ("msg_abc1", "message", "assistant", "org/model")
    assert says(message) == said(reply)
    assert (message.stop_reason, message.stop_sequence) == (stop_reason(reply), reply.stop_string)
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (6, 5, 0)
    assert (usage.output_tokens, usage.output_tokens_details.thinking_tokens) == (7, 3)


def echoed(content: Any) -> Message:
    """What the dialect reads of content that the client sends back."""
    found: list[Message] = []

    def handle(request: httpx2.Request) -> httpx2.Response:
        found.extend(read(request).messages)
        return http(DIALECT.error(ApiError(ErrorKind.BAD_REQUEST, "seen")))

    history = [*ASK["messages"], {"role": "assistant", "content": content}]
    with pytest.raises(anthropic.BadRequestError):
        client(handle).messages.create(**{**ASK, "messages": history})
    assert len(found) == 2
    return found[1]


LONG = "a line of text \u2028 with \x85 odd\r\nbreaks " * 20
texts = st.text(max_size=200) | st.just(LONG)
scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
)
objects = st.dictionaries(
    st.text(max_size=8),
    st.recursive(
        scalars | texts, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner)
    ),
    max_size=4,
)
unparsed = st.sampled_from(["", "[1]", "{", '{"a": NaN}', '"text"', "free text"])
identifiers = st.text("abcdefgh0123456789", min_size=1, max_size=12)
calls = st.builds(ToolCall, identifiers, identifiers, objects | unparsed)
thoughts = st.none() | st.text(min_size=1, max_size=200) | st.just(LONG)
replies = st.builds(
    lambda text, thought, calls, finish: Reply(
        text, thought, tuple(calls), finish, "END" if finish is Finish.STOP_STRING else None
    ),
    texts,
    thoughts,
    st.lists(calls, max_size=3),
    st.sampled_from(Finish),
)


@settings(max_examples=60, deadline=None)
@given(replies)
def test_the_client_reads_complete_and_streamed_answers_and_sends_them_back(reply: Reply) -> None:
    sdk = gateway(reply)
    message = sdk.messages.create(**ASK)
    with sdk.messages.stream(**ASK) as stream:
        assembled = stream.get_final_message()
    beta = sdk.beta.messages.create(**ASK, betas=["context-management-2025-06-27"])
    with sdk.beta.messages.stream(**ASK, betas=["context-management-2025-06-27"]) as beta_stream:
        beta_assembled = beta_stream.get_final_message()
    for answer in (message, assembled, beta, beta_assembled):
        check(answer, reply)
    assert [block.to_dict() for block in assembled.content] == [block.to_dict() for block in message.content]

    for content in (message.content, [block.model_dump() for block in assembled.content], beta.to_param()["content"]):
        assert echoed(content) == reply.as_message()
    kept = [block for block in message.content if block.type != "thinking"]
    if kept:
        without = echoed(kept)
        assert without.reasoning is None
        assert fingerprint.of(without) == fingerprint.of(reply.as_message())


@settings(max_examples=30, deadline=None)
@given(replies)
def test_events_have_the_order_and_the_shape_of_the_provider(reply: Reply) -> None:
    body: list[bytes] = []

    def handle(request: httpx2.Request) -> httpx2.Response:
        asked = read(request)
        answer = Answer("abc1", 1, asked.model, [reply], USAGE)
        body.append(streamed(asked, answer))
        for model in (SdkMessage, BetaMessage):
            model.model_validate_json(DIALECT.write(asked, answer).body)
        return httpx2.Response(200, content=body[0], headers={"content-type": "text/event-stream"})

    seen = [event.type for event in client(handle).messages.create(**ASK, stream=True)]
    names, values = [], []
    for block in body[0].decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        names.append(name.removeprefix("event: "))
        values.append(orjson.loads(data.removeprefix("data: ")))
    assert [value["type"] for value in values] == names
    assert names[:2] == ["ping", "ping"]
    assert seen == names[2:]
    assert names[2] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    for value in values[2:]:
        EVENTS.validate_python(value)
        BETA_EVENTS.validate_python(value)

    start, index, open_block = values[2]["message"], -1, ""
    assert (start["content"], start["stop_reason"], start["stop_sequence"]) == ([], None, None)
    assert start["usage"]["input_tokens"] + start["usage"]["cache_read_input_tokens"] == USAGE.prompt
    deltas = {
        "thinking": ["thinking_delta", "signature_delta"],
        "text": ["text_delta"],
        "tool_use": ["input_json_delta"],
    }
    for value in values[3:-2]:
        if value["type"] == "content_block_start":
            assert not open_block
            index, open_block = index + 1, value["content_block"]["type"]
            assert value["content_block"].get("text", value["content_block"].get("thinking", "")) == ""
            assert value["content_block"].get("input", {}) == {}
        elif value["type"] == "content_block_delta":
            assert value["delta"]["type"] in deltas[open_block]
        else:
            assert value["type"] == "content_block_stop"
            open_block = ""
        assert value["index"] == index
    assert not open_block
    assert index + 1 == len(said(reply))


def test_a_stream_in_events() -> None:
    reply = Reply("word " * 60, "hm", (ToolCall("c1", "f", {"a": "b" * 90}), ToolCall("c2", "f", {})))
    events = list(gateway(reply).messages.create(**ASK, stream=True))
    kinds = [event.delta.type if event.type == "content_block_delta" else event.type for event in events]
    edges = ("content_block_start", "content_block_stop")
    assert kinds == [
        "message_start",
        *(edges[0], "thinking_delta", "signature_delta", edges[1]),
        *(edges[0], *["text_delta"] * 4, edges[1]),
        *(edges[0], *["input_json_delta"] * 2, edges[1]),
        *(edges[0], "input_json_delta", edges[1]),
        *("message_delta", "message_stop"),
    ]
    with gateway(reply).messages.stream(**ASK) as stream:
        assert "".join(stream.text_stream) == reply.text


def test_omitted_thinking_travels_in_its_signature() -> None:
    reply = Reply("a", "a long thought " * 30, (ToolCall("c1", "f", {"a": 1}),))
    ask = {**ASK, "thinking": {"type": "adaptive", "display": "omitted"}}
    message = gateway(reply).messages.create(**ask)
    with gateway(reply).messages.stream(**ask) as stream:
        assembled = stream.get_final_message()
    for answer in (message, assembled):
        assert says(answer)[0] == ("thinking", "")
        assert says(answer)[1:] == said(reply)[1:]
        assert echoed(answer.content) == reply.as_message()
    shown = {**ASK, "thinking": {"type": "adaptive", "display": "summarized"}}
    assert says(gateway(reply).messages.create(**shown)) == said(reply)


@pytest.mark.parametrize(
    ("error", "raised", "status", "kind", "attempts"),
    [
        (ApiError(ErrorKind.BAD_REQUEST, "no"), anthropic.BadRequestError, 400, "invalid_request_error", 1),
        (ApiError(ErrorKind.UNAUTHORISED, "no"), anthropic.AuthenticationError, 401, "authentication_error", 1),
        (ApiError(ErrorKind.NOT_FOUND, "no"), anthropic.NotFoundError, 404, "not_found_error", 1),
        (ApiError(ErrorKind.METHOD, "no"), anthropic.APIStatusError, 405, "invalid_request_error", 1),
        (ApiError(ErrorKind.TOO_LARGE, "no"), anthropic.ContentTooLargeError, 413, "request_too_large", 1),
        (ApiError(ErrorKind.QUOTA, "no", retry_after=9), anthropic.RateLimitError, 429, "rate_limit_error", 1),
        (ApiError(ErrorKind.RATE_LIMIT, "no", retry_after=0.001), anthropic.RateLimitError, 429, "rate_limit_error", 2),
        (
            ApiError(ErrorKind.OVERLOADED, "no", retry_after=0.001),
            anthropic.OverloadedError,
            529,
            "overloaded_error",
            2,
        ),
        (ApiError(ErrorKind.INTERNAL, "no"), anthropic.InternalServerError, 500, "api_error", 2),
    ],
)
def test_errors_as_the_client_sees_them(
    error: ApiError, raised: type[anthropic.APIStatusError], status: int, kind: str, attempts: int
) -> None:
    requests: list[Request] = []

    def handle(request: httpx2.Request) -> httpx2.Response:
        requests.append(read(request))
        return http(DIALECT.error(error))

    with pytest.raises(raised) as caught:
        client(handle).messages.create(**ASK)
    assert caught.value.status_code == status
    assert caught.value.body == {"type": "error", "error": {"type": kind, "message": "no"}}
    assert (caught.value.type, caught.value.api_message) == (kind, "no")
    assert [request.hints.retry for request in requests] == [False, True][:attempts]


def test_headers_say_whether_and_when_to_retry() -> None:
    def headers(kind: ErrorKind, retry_after: float | None = None) -> dict[str, str]:
        found = DIALECT.error(ApiError(kind, "no", retry_after=retry_after)).headers
        return {name: value for name, value in found.items() if name != "content-type"}

    assert headers(ErrorKind.OVERLOADED, 2.5) == {"retry-after": "3", "retry-after-ms": "2500"}
    assert headers(ErrorKind.RATE_LIMIT) == {"retry-after": "1", "retry-after-ms": "1000"}
    assert headers(ErrorKind.QUOTA, 5) == {"x-should-retry": "false"}
    assert headers(ErrorKind.UNAUTHORISED) == {"x-should-retry": "false"}
    assert headers(ErrorKind.BAD_REQUEST) == {}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            ApiError(
                ErrorKind.CONTEXT_LENGTH,
                "This model's maximum context length is 1000 tokens. However, your messages resulted in 1500 tokens.",
                param="messages",
            ),
            "prompt is too long: 1500 tokens > 1000 maximum",
        ),
        (
            ApiError(ErrorKind.CONTEXT_LENGTH, "The maximum is 1000 tokens, and there are more than 1000 tokens."),
            "prompt is too long: 1001 tokens > 1000 maximum",
        ),
        (ApiError(ErrorKind.CONTEXT_LENGTH, "the image alone is"), "prompt is too long: the image alone is"),
        (
            ApiError(
                ErrorKind.BAD_REQUEST, "Missing: 'messages[3].content[0].text'.", param="messages[3].content[0].text"
            ),
            "messages.3.content.0.text: Missing: 'messages.3.content.0.text'.",
        ),
        (ApiError(ErrorKind.NOT_FOUND, "not there", param="model"), "model: not there"),
    ],
)
def test_wordings_that_clients_act_on(error: ApiError, expected: str) -> None:
    def handle(request: httpx2.Request) -> httpx2.Response:
        return http(DIALECT.error(error))

    with pytest.raises(anthropic.APIStatusError) as caught:
        client(handle).messages.create(**ASK)
    assert caught.value.api_message == expected


@pytest.mark.parametrize("pings", [0, 3])
def test_an_error_in_a_stream(pings: int) -> None:
    def handle(request: httpx2.Request) -> httpx2.Response:
        stream = DIALECT.stream(read(request), "a", 1, "m")
        error = stream.error(ApiError(ErrorKind.OVERLOADED, "engine away"))
        content = stream.start() + stream.ping() * pings + error
        return httpx2.Response(200, content=content, headers={"content-type": "text/event-stream"})

    with pytest.raises(anthropic.APIStatusError, match="engine away") as caught:
        list(client(handle).messages.create(**ASK, stream=True))
    assert caught.value.type == "overloaded_error"
    with pytest.raises(anthropic.APIStatusError, match="engine away"), client(handle).messages.stream(**ASK) as stream:
        stream.get_final_message()


def test_counts_and_models() -> None:
    def handle(request: httpx2.Request) -> httpx2.Response:
        if request.method == "POST":
            asked = read(request)
            assert (asked.sampling.max_tokens, len(asked.messages), len(asked.tools)) == (None, 2, 1)
            return http(DIALECT.count(42))
        if request.url.path == "/v1/models":
            return http(DIALECT.models(["org/a", "b"], 1700000000))
        return http(DIALECT.model(request.url.path.removeprefix("/v1/models/"), 1700000000))

    sdk = client(handle)
    ask = {name: value for name, value in ASK.items() if name != "max_tokens"}
    assert sdk.messages.count_tokens(**ask, system="s").input_tokens == 42
    assert sdk.beta.messages.count_tokens(**ask, system=[{"type": "text", "text": "s"}]).input_tokens == 42
    listed = list(sdk.models.list())
    since = datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
    assert [(model.id, model.type, model.created_at) for model in listed] == [
        ("org/a", "model", since),
        ("b", "model", since),
    ]
    assert sdk.models.retrieve("b") == listed[1]
    ModelInfo.model_validate(listed[0].model_dump())
    assert orjson.loads(DIALECT.models([], 0).body) == {
        "data": [],
        "has_more": False,
        "first_id": None,
        "last_id": None,
    }
