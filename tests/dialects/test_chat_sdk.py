"""What the official OpenAI client makes of our answers: the model's reply, and back again.

The client runs as it is; only its transport is replaced by a function that reads the request and writes the answer with
the dialect. So requests are what the client really sends, and answers are read by its own models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import openai
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from towline.conversation import Answer, Finish, Reply, Request, TokenLogprob, ToolCall, Usage
from towline.dialects.base import DialectCall, ReadCache, Response
from towline.dialects.chat import ChatDialect
from towline.dialects.wire import dump, dump_arguments, event, pieces
from towline.errors import ApiError, ErrorKind
from towline.tokens.graph import fingerprint

DIALECT = ChatDialect()
USAGE = Usage(prompt=11, sampled=7, cached=5, reasoning=3)
TOOLS: Any = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
    {"type": "custom", "custom": {"name": "patch"}},
]
ASK: Any = {"model": "org/model", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
Handler = Callable[[httpx2.Request], httpx2.Response]


def client(handler: Handler) -> openai.OpenAI:
    transport = httpx2.Client(transport=httpx2.MockTransport(handler))
    return openai.OpenAI(api_key="k", base_url="http://gateway/v1", http_client=transport, max_retries=1)


def http(response: Response) -> httpx2.Response:
    return httpx2.Response(response.status, content=response.body, headers=response.headers)


def read(request: httpx2.Request) -> Request:
    headers = {name.lower(): value for name, value in request.headers.items()}
    return DIALECT.read(DialectCall("generate", orjson.loads(request.content), headers), ReadCache())[0]


def gateway(*replies: Reply, tokens: list[TokenLogprob] | None = None) -> openai.OpenAI:
    """A client whose calls are answered by the replies, whole or streamed as it asks, with pings in between."""

    def handle(request: httpx2.Request) -> httpx2.Response:
        asked = read(request)
        logprobs = None if tokens is None else lambda _: tokens
        answer = Answer("abc1", 1700000000, asked.model, replies, USAGE, logprobs)
        if not asked.stream:
            return http(DIALECT.write(asked, answer))
        stream = DIALECT.stream(asked, answer.id, answer.created, answer.model)
        events = [stream.start(), stream.ping(), stream.ping(), *stream.finish(answer)]
        return httpx2.Response(200, content=b"".join(events), headers={"content-type": "text/event-stream"})

    return client(handle)


def says(message: Any) -> tuple[str | None, str | None, list[tuple[str, str, str]]]:
    """Content, reasoning and calls of a message of the client's."""
    calls = []
    for call in message.tool_calls or []:
        data = call.to_dict()
        body = data[data["type"]]
        calls.append((data["id"], body["name"], body["arguments"] if data["type"] == "function" else body["input"]))
    return message.content, getattr(message, "reasoning_content", None), calls


def said(reply: Reply) -> tuple[str | None, str | None, list[tuple[str, str, str]]]:
    """The same of a reply."""
    calls = [(call.id, call.name, dump_arguments(call.arguments)) for call in reply.tool_calls]
    return reply.text or (None if calls else ""), reply.reasoning, calls


def finish_reason(reply: Reply) -> str:
    if reply.finish is Finish.LENGTH:
        return "length"
    if reply.finish is Finish.ABORT:
        return "content_filter"
    return "tool_calls" if reply.tool_calls else "stop"


def check_usage(usage: Any) -> None:
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (11, 7, 18)
    assert usage.prompt_tokens_details.cached_tokens == 5
    assert usage.completion_tokens_details.reasoning_tokens == 3


def holds_no_object(text: str) -> bool:
    try:
        return not isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return True


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
identifiers = st.text("abcdefgh0123456789", min_size=1, max_size=12)
calls = st.builds(ToolCall, identifiers, identifiers, objects | texts.filter(holds_no_object)) | st.builds(
    ToolCall, identifiers, identifiers, texts, custom=st.just(True)
)
replies = st.builds(
    Reply,
    texts,
    st.none() | st.text(min_size=1, max_size=200),
    st.lists(calls, max_size=3).map(tuple),
    st.sampled_from(Finish),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(replies, min_size=1, max_size=3))
def test_the_client_reads_complete_and_streamed_answers_and_sends_them_back(spoken: list[Reply]) -> None:
    sdk = gateway(*spoken)
    completion = sdk.chat.completions.create(**ASK, n=len(spoken))
    assert (completion.id, completion.created, completion.model) == ("chatcmpl-abc1", 1700000000, "org/model")
    assert completion.object == "chat.completion"
    check_usage(completion.usage)

    with sdk.chat.completions.stream(**ASK, n=len(spoken), stream_options={"include_usage": True}) as stream:
        for _ in stream:
            pass
        streamed = stream.current_completion_snapshot
    assert (streamed.id, streamed.created, streamed.model) == (completion.id, completion.created, completion.model)
    check_usage(streamed.usage)

    for answer in (completion, streamed):
        assert [says(choice.message) for choice in answer.choices] == [said(reply) for reply in spoken]
        assert [choice.finish_reason for choice in answer.choices] == [finish_reason(reply) for reply in spoken]
        for choice, reply in zip(answer.choices, spoken, strict=True):
            for history in (choice.message.model_dump(), choice.message.model_dump(exclude_none=True)):
                body = orjson.loads(orjson.dumps({**ASK, "messages": [*ASK["messages"], history]}))
                echoed = DIALECT.read(DialectCall("generate", body), ReadCache())[0].messages[-1]
                assert echoed == reply.as_message()
                assert fingerprint.of(echoed) == fingerprint.of(reply.as_message())


def test_chunks_in_order() -> None:
    reply = Reply("word " * 60, "hm", (ToolCall("c1", "f", {"a": "b" * 90}),))
    chunks = list(gateway(reply).chat.completions.create(**ASK, stream=True))
    fields = [sorted(chunk.choices[0].delta.to_dict()) for chunk in chunks]
    assert fields == [["content", "role"], ["reasoning_content"], *[["content"]] * 4, *[["tool_calls"]] * 3, []]
    assert chunks[0].choices[0].delta.role == "assistant"
    starts = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or [] if call.id]
    assert [(call.index, call.type, call.function and call.function.name) for call in starts] == [(0, "function", "f")]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 9 + ["tool_calls"]
    assert all(chunk.usage is None and "usage" not in chunk.to_dict() for chunk in chunks)
    with_usage = list(
        gateway(reply).chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
    )
    assert all(chunk.to_dict()["usage"] is None for chunk in with_usage[:-1])
    assert with_usage[-1].choices == []


def test_legacy_function_calls() -> None:
    sdk = gateway(Reply("", None, (ToolCall("c1", "f", {"a": 1}),)))
    ask: Any = {"model": "m", "messages": ASK["messages"], "functions": [{"name": "f"}]}
    choice = sdk.chat.completions.create(**ask).choices[0]
    assert choice.finish_reason == "function_call"
    assert choice.message.tool_calls is None
    assert choice.message.function_call is not None
    assert (choice.message.function_call.name, choice.message.function_call.arguments) == ("f", '{"a":1}')
    deltas = [chunk.choices[0].delta.function_call for chunk in sdk.chat.completions.create(**ask, stream=True)]
    assert "".join(delta.arguments or "" for delta in deltas if delta) == '{"a":1}'
    assert [delta.name for delta in deltas if delta and delta.name] == ["f"]


def test_logprobs_only_when_asked() -> None:
    tokens = [
        TokenLogprob("h", -0.5, b"h"),
        TokenLogprob("�", float("-inf"), b"\xc3"),
        TokenLogprob("x", float("nan"), b"x"),
    ]
    sdk = gateway(Reply("hé"), tokens=tokens)
    expected = [("h", -0.5, [104]), ("�", -9999.0, [0xC3]), ("x", -9999.0, [120])]
    logprobs = sdk.chat.completions.create(**ASK, logprobs=True).choices[0].logprobs
    assert logprobs is not None
    assert [(token.token, token.logprob, token.bytes) for token in logprobs.content or []] == expected
    chunks = list(sdk.chat.completions.create(**ASK, logprobs=True, stream=True))
    found = [token for chunk in chunks if (sent := chunk.choices[0].logprobs) for token in sent.content or []]
    assert [(token.token, token.logprob, token.bytes) for token in found] == expected
    assert sdk.chat.completions.create(**ASK).choices[0].logprobs is None


@pytest.mark.parametrize(
    ("error", "raised", "status", "code", "attempts"),
    [
        (ApiError(ErrorKind.BAD_REQUEST, "no", param="n"), openai.BadRequestError, 400, None, 1),
        (ApiError(ErrorKind.UNAUTHORISED, "no"), openai.AuthenticationError, 401, "invalid_api_key", 1),
        (ApiError(ErrorKind.NOT_FOUND, "no"), openai.NotFoundError, 404, None, 1),
        (ApiError(ErrorKind.NOT_FOUND, "no", param="model"), openai.NotFoundError, 404, "model_not_found", 1),
        (ApiError(ErrorKind.METHOD, "no"), openai.APIStatusError, 405, "method_not_supported", 1),
        (ApiError(ErrorKind.TOO_LARGE, "no"), openai.APIStatusError, 413, "request_too_large", 1),
        (ApiError(ErrorKind.CONTEXT_LENGTH, "no"), openai.BadRequestError, 400, "context_length_exceeded", 1),
        (ApiError(ErrorKind.QUOTA, "no"), openai.RateLimitError, 429, "insufficient_quota", 1),
        (ApiError(ErrorKind.RATE_LIMIT, "no", retry_after=0.001), openai.RateLimitError, 429, "rate_limit_exceeded", 2),
        (ApiError(ErrorKind.OVERLOADED, "no", retry_after=0.001), openai.InternalServerError, 503, "overloaded", 2),
        (ApiError(ErrorKind.INTERNAL, "no"), openai.InternalServerError, 500, None, 2),
    ],
)
def test_errors_as_the_client_sees_them(
    error: ApiError, raised: type[openai.APIStatusError], status: int, code: str | None, attempts: int
) -> None:
    requests: list[Request] = []

    def handle(request: httpx2.Request) -> httpx2.Response:
        requests.append(read(request))
        return http(DIALECT.error(error))

    with pytest.raises(raised) as caught:
        client(handle).chat.completions.create(**ASK)
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert caught.value.param == (error.param or ("messages" if code == "context_length_exceeded" else None))
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["message"] == "no"
    assert [request.hints.retry for request in requests] == [False, True][:attempts]


def test_retry_after_is_in_whole_seconds_and_milliseconds() -> None:
    def waits(error: ApiError) -> tuple[str | None, str | None]:
        headers = DIALECT.error(error).headers
        return headers.get("retry-after"), headers.get("retry-after-ms")

    assert waits(ApiError(ErrorKind.OVERLOADED, "no", retry_after=2.5)) == ("3", "2500")
    assert waits(ApiError(ErrorKind.RATE_LIMIT, "no")) == ("1", "1000")
    assert waits(ApiError(ErrorKind.QUOTA, "no", retry_after=5)) == (None, None)


def test_an_error_in_mid_stream() -> None:
    def handle(request: httpx2.Request) -> httpx2.Response:
        stream = DIALECT.stream(read(request), "a", 1, "m")
        content = stream.start() + stream.ping() + stream.error(ApiError(ErrorKind.OVERLOADED, "engine away"))
        return httpx2.Response(200, content=content, headers={"content-type": "text/event-stream"})

    with pytest.raises(openai.APIError, match="engine away") as caught:
        list(client(handle).chat.completions.create(**ASK, stream=True))
    assert (caught.value.code, caught.value.type) == ("overloaded", "server_error")


def test_models() -> None:
    def handle(request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/v1/models":
            return http(DIALECT.models(["org/a", "b"], 5))
        return http(DIALECT.model(request.url.path.removeprefix("/v1/models/"), 5))

    sdk = client(handle)
    assert [(model.id, model.object, model.created) for model in sdk.models.list()] == [
        ("org/a", "model", 5),
        ("b", "model", 5),
    ]
    assert sdk.models.retrieve("b").id == "b"


@settings(deadline=None)
@given(st.text() | st.text("ab \r\n\x0b\x85\u2028\u2029"))
def test_events_are_one_line_and_pieces_join_to_the_text(text: str) -> None:
    lines = event({"text": text}, "delta").decode().splitlines()
    assert lines[0] == "event: delta"
    assert orjson.loads(lines[1].removeprefix("data: ")) == {"text": text}
    assert lines[2:] == [""]
    assert "".join(pieces(text, most=3, least=5)) == text
    assert all(pieces(text, most=3, least=5))


def test_values_that_orjson_cannot_serialize_are_written() -> None:
    value = {"a": 10**30, "b": "\ud800"}
    assert dump(value) == b'{"a":1000000000000000000000000000000,"b":"\\ud800"}'
