"""What the official OpenAI client makes of our responses: the same as what the model said, and back again.

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
from openai.types import responses
from pydantic import TypeAdapter

from towline.conversation import Answer, Finish, Message, Reply, Request, TokenLogprob, ToolCall, Usage
from towline.dialects.base import DialectCall, ReadCache, Response
from towline.dialects.responses import ResponsesDialect
from towline.dialects.wire import dump_arguments
from towline.errors import ApiError, ErrorKind
from towline.gateway.sampling import mint_call_id
from towline.tokens.graph import fingerprint

DIALECT = ResponsesDialect()
USAGE = Usage(prompt=11, sampled=7, cached=5, reasoning=3)
TOOLS: Any = [
    {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False},
    {"type": "custom", "name": "patch", "format": {"type": "text"}},
    {"type": "namespace", "name": "ns", "description": "d", "tools": [{"type": "function", "name": "g"}]},
    {"type": "shell"},
]
ASK: Any = {
    "model": "org/model",
    "input": "hi",
    "instructions": "be good",
    "tools": TOOLS,
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"effort": "low", "summary": "auto"},
    "store": False,
    "metadata": {"a": "b"},
    "prompt_cache_key": "k",
    "max_output_tokens": 50,
}
EVENTS: TypeAdapter[Any] = TypeAdapter(responses.ResponseStreamEvent)
Handler = Callable[[httpx2.Request], httpx2.Response]


def client(handler: Handler) -> openai.OpenAI:
    transport = httpx2.Client(transport=httpx2.MockTransport(handler))
    return openai.OpenAI(api_key="k", base_url="http://gateway/v1", http_client=transport, max_retries=1)


def http(response: Response) -> httpx2.Response:
    return httpx2.Response(response.status, content=response.body, headers=response.headers)


def events(content: bytes) -> httpx2.Response:
    return httpx2.Response(200, content=content, headers={"content-type": "text/event-stream"})


def read(request: httpx2.Request, operation: str = "generate") -> Request:
    headers = {name.lower(): value for name, value in request.headers.items()}
    return DIALECT.read(DialectCall(operation, orjson.loads(request.content), headers), ReadCache())[0]


def gateway(reply: Reply, tokens: list[TokenLogprob] | None = None) -> openai.OpenAI:
    """A client whose calls are answered by the reply, whole or streamed as it asks, with pings in between."""

    def handle(request: httpx2.Request) -> httpx2.Response:
        asked = read(request)
        logprobs = None if tokens is None else lambda _: tokens
        answer = Answer("abc1", 1700000000, asked.model, [reply], USAGE, logprobs)
        if not asked.stream:
            return http(DIALECT.write(asked, answer))
        stream = DIALECT.stream(asked, answer.id, answer.created, answer.model)
        return events(b"".join([stream.start(), stream.ping(), stream.ping(), *stream.finish(answer)]))

    return client(handle)


def says(output: Any) -> tuple[str, str | None, list[tuple[str, str, str]]]:
    """Text, reasoning and calls of the items of a response of the client's."""
    text, reasoning, calls = "", None, []
    for item in output:
        if item.type == "reasoning":
            assert item.encrypted_content
            reasoning = "".join(part.text for part in item.summary)
        elif item.type == "message":
            text += "".join(part.text for part in item.content)
        elif item.type == "shell_call":
            calls.append((item.call_id, "shell", item.action.to_dict()))
        else:
            name = f"{item.namespace}.{item.name}" if item.namespace else item.name
            calls.append((item.call_id, name, item.arguments if item.type == "function_call" else item.input))
    return text, reasoning, calls


def said(reply: Reply) -> tuple[str, str | None, list[tuple[str, Any, Any]]]:
    """The same of a reply."""
    calls = [
        (call.id, call.name, call.arguments if call.name == "shell" else dump_arguments(call.arguments))
        for call in reply.tool_calls
    ]
    return reply.text, reply.reasoning, calls


def status(reply: Reply) -> tuple[str, str | None]:
    if reply.finish is Finish.LENGTH:
        return "incomplete", "max_output_tokens"
    return ("incomplete", "content_filter") if reply.finish is Finish.ABORT else ("completed", None)


def check(response: Any, reply: Reply) -> None:
    """What the client holds is what was said, and what was asked comes back with it."""
    assert (response.id, response.created_at, response.model) == ("resp_abc1", 1700000000, "org/model")
    assert (response.object, response.instructions, response.metadata) == ("response", "be good", {"a": "b"})
    assert (response.store, response.prompt_cache_key, response.max_output_tokens) == (False, "k", 50)
    assert (response.reasoning.effort, response.reasoning.summary) == ("low", "auto")
    assert [tool.type for tool in response.tools] == ["function", "custom", "namespace", "shell"]
    assert (response.tool_choice, response.parallel_tool_calls, response.error) == ("auto", True, None)
    reason = response.incomplete_details and response.incomplete_details.reason
    assert (response.status, reason) == status(reply)
    assert says(response.output) == said(reply)
    assert {item.status for item in response.output if item.type == "message"} <= {response.status}
    assert response.output_text == reply.text
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (11, 7, 18)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (5, 3)


def echoed(items: list[Any]) -> list[Message]:
    """What the dialect reads when the items are sent back behind the question."""
    user = {"role": "user", "content": "hi"}
    body = orjson.loads(orjson.dumps({"model": "m", "input": [user, *items]}))
    return DIALECT.read(DialectCall("generate", body), ReadCache())[0].messages[1:]


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
shell_arguments = st.lists(st.text(max_size=9), min_size=1, max_size=2).map(lambda commands: {"commands": commands})
made = (
    st.tuples(st.sampled_from(["f", "ns.g", "unknown"]), objects | texts.filter(holds_no_object), st.just(False))
    | st.tuples(st.just("patch"), texts, st.just(True))
    | st.tuples(st.just("shell"), shell_arguments, st.just(False))
)
replies = st.builds(
    lambda text, reasoning, calls, finish: Reply(
        text,
        reasoning,
        tuple(ToolCall(mint_call_id(0, place, short=False), *call) for place, call in enumerate(calls)),
        finish,
    ),
    texts,
    st.none() | st.text(min_size=1, max_size=200),
    st.lists(made, max_size=3),
    st.sampled_from(Finish),
)


@settings(max_examples=80, deadline=None)
@given(replies)
def test_the_client_reads_complete_and_streamed_answers_and_sends_them_back(spoken: Reply) -> None:
    sdk = gateway(spoken)
    whole = sdk.responses.create(**ASK)
    check(whole, spoken)

    *_, last = sdk.responses.create(**ASK, stream=True)
    assert last.type == f"response.{status(spoken)[0]}"
    assert last.response.to_dict() == whole.to_dict()

    with sdk.responses.stream(**ASK) as stream:
        *_, last = stream
        check(last.response, spoken)
        final = stream.get_final_response() if last.type == "response.completed" else last.response
    assert says(final.output) == said(spoken)

    for output in (whole.output, final.output):
        for exclude_none in (False, True):
            items = [item.model_dump(exclude_none=exclude_none, by_alias=True) for item in output]
            assert echoed(items) == [spoken.as_message()]
            assert fingerprint.of(echoed(items)[0]) == fingerprint.of(spoken.as_message())


def assembled(stream: Any) -> tuple[list[dict[str, Any]], Any]:
    """The items put together from what was added and the deltas alone, and the last event."""
    items: list[dict[str, Any]] = []
    for number, event in enumerate(stream):
        assert event.sequence_number == number
        if hasattr(event, "output_index"):
            place = len(items) if event.type == "response.output_item.added" else len(items) - 1
            assert event.output_index == place
        if hasattr(event, "item_id"):
            assert event.item_id == items[-1]["id"]
        match event.type:
            case "response.output_item.added":
                items.append(event.item.to_dict())
                assert items[-1].get("status", "in_progress") == "in_progress"
                assert "encrypted_content" not in items[-1]
            case "response.content_part.added":
                items[-1]["content"].append(event.part.to_dict())
            case "response.reasoning_summary_part.added":
                items[-1]["summary"].append(event.part.to_dict())
            case "response.output_text.delta":
                items[-1]["content"][event.content_index]["text"] += event.delta
            case "response.reasoning_summary_text.delta":
                items[-1]["summary"][event.summary_index]["text"] += event.delta
            case "response.function_call_arguments.delta":
                items[-1]["arguments"] += event.delta
            case "response.custom_tool_call_input.delta":
                items[-1]["input"] += event.delta
            case "response.output_text.done":
                assert event.text == items[-1]["content"][event.content_index]["text"]
            case "response.reasoning_summary_text.done":
                assert event.text == items[-1]["summary"][event.summary_index]["text"]
            case "response.content_part.done":
                assert event.part.to_dict() == items[-1]["content"][event.content_index]
            case "response.reasoning_summary_part.done":
                assert event.part.to_dict() == items[-1]["summary"][event.summary_index]
            case "response.function_call_arguments.done":
                assert (event.arguments, event.name) == (items[-1]["arguments"], items[-1]["name"])
            case "response.custom_tool_call_input.done":
                assert event.input == items[-1]["input"]
            case "response.output_item.done":
                done = event.item.to_dict()
                # What is only known at the end.
                items[-1].update({key: done[key] for key in ("status", "encrypted_content") if key in done})
                assert done == items[-1]
    return items, event


@settings(max_examples=40, deadline=None)
@given(replies)
def test_the_assembled_stream_equals_the_complete_answer(spoken: Reply) -> None:
    items, last = assembled(gateway(spoken).responses.create(**ASK, stream=True))
    assert items == last.response.to_dict()["output"]


def test_events_in_order() -> None:
    calls = (ToolCall("c1", "f", {"a": "b" * 90}), ToolCall("c2", "patch", "p", custom=True))
    reply = Reply("word " * 60, "hm", (*calls, ToolCall("c3", "shell", {"commands": ["ls"]})))
    kinds = [event.type.removeprefix("response.") for event in gateway(reply).responses.create(**ASK, stream=True)]
    assert kinds == [
        *("created", "in_progress"),
        *("output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta"),
        *("reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", *["output_text.delta"] * 4),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", *["function_call_arguments.delta"] * 2),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"),
        *("output_item.added", "output_item.done"),
        "completed",
    ]


@settings(max_examples=20, deadline=None)
@given(replies)
def test_everything_sent_is_valid_by_the_client_s_own_models(spoken: Reply) -> None:
    """The client takes anything that looks like an answer; here its models are held to the letter."""
    asked = DIALECT.read(DialectCall("generate", {**ASK, "text": {"verbosity": "low"}}), ReadCache())[0]
    answer = Answer("abc1", 1700000000, "m", [spoken], USAGE)
    responses.Response.model_validate_json(DIALECT.write(asked, answer).body)
    stream = DIALECT.stream(asked, answer.id, answer.created, answer.model)
    sent = [*stream.start().split(b"\n\n")[:-1], *(event.removesuffix(b"\n\n") for event in stream.finish(answer))]
    failing = DIALECT.stream(asked, answer.id, answer.created, answer.model)
    sent += failing.error(ApiError(ErrorKind.OVERLOADED, "away")).split(b"\n\n")[:-1]
    for block in sent:
        name, data = block.split(b"\n")
        event = orjson.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        EVENTS.validate_python(event)


def test_a_tool_loop_with_previous_response_ids_or_the_whole_history() -> None:
    """What the client sends in its second call, both ways that OpenAI documents."""
    reply = Reply("", "t", (ToolCall("call00000000", "f", {"a": 1}), ToolCall("call00000001", "f", {"a": 2})))
    asked: list[Request] = []

    def handle(request: httpx2.Request) -> httpx2.Response:
        asked.append(read(request))
        return http(DIALECT.write(asked[-1], Answer("abc1", 1, "m", [reply], USAGE)))

    sdk = client(handle)
    first = sdk.responses.create(model="m", input="hi", tools=TOOLS)
    results: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": item.arguments}
        for item in reversed(first.output)
        if item.type == "function_call"
    ]
    sdk.responses.create(model="m", previous_response_id=first.id, input=results, tools=TOOLS)
    whole: Any = [{"role": "user", "content": "hi"}, *first.output, *results]
    sdk.responses.create(model="m", input=whole, tools=TOOLS)
    tool = [Message("tool", f'{{"a":{n}}}', tool_call_id=f"call0000000{n - 1}") for n in (2, 1)]
    assert (asked[1].previous, asked[1].messages) == ("abc1", tool)
    assert (asked[2].previous, asked[2].messages) == ("", [Message("user", "hi"), reply.as_message(), *tool])
    assert [request.wire["store"] for request in asked] == [True] * 3


def test_logprobs_only_when_asked() -> None:
    tokens = [
        TokenLogprob("h", -0.5, b"h"),
        TokenLogprob("�", float("-inf"), b"\xc3"),
        TokenLogprob("x", float("nan"), b"x"),
    ]
    sdk = gateway(Reply("hé"), tokens)
    expected = [("h", -0.5, [104]), ("�", -9999.0, [0xC3]), ("x", -9999.0, [120])]
    ask = {**ASK, "include": ["message.output_text.logprobs"]}
    whole: Any = sdk.responses.create(**ask)
    *_, last = sdk.responses.create(**ask, stream=True)
    for response in (whole, last.response):
        found = response.output[0].content[0].logprobs
        assert [(token.token, token.logprob, token.bytes) for token in found] == expected
    plain: Any = sdk.responses.create(**ASK)
    assert plain.output[0].content[0].logprobs == []


@pytest.mark.parametrize(
    ("error", "raised", "code", "param", "attempts"),
    [
        (ApiError(ErrorKind.BAD_REQUEST, "no", param="input[0]"), openai.BadRequestError, None, "input[0]", 1),
        (ApiError(ErrorKind.UNAUTHORISED, "no"), openai.AuthenticationError, "invalid_api_key", None, 1),
        (ApiError(ErrorKind.NOT_FOUND, "no"), openai.NotFoundError, None, None, 1),
        (ApiError(ErrorKind.TOO_LARGE, "no"), openai.APIStatusError, "request_too_large", None, 1),
        (ApiError(ErrorKind.CONTEXT_LENGTH, "no"), openai.BadRequestError, "context_length_exceeded", "input", 1),
        (
            ApiError(ErrorKind.CONTEXT_LENGTH, "no", param="messages"),
            openai.BadRequestError,
            "context_length_exceeded",
            "input",
            1,
        ),
        (ApiError(ErrorKind.QUOTA, "no"), openai.RateLimitError, "insufficient_quota", None, 1),
        (
            ApiError(ErrorKind.RATE_LIMIT, "no", retry_after=0.001),
            openai.RateLimitError,
            "rate_limit_exceeded",
            None,
            2,
        ),
        (ApiError(ErrorKind.OVERLOADED, "no", retry_after=0.001), openai.InternalServerError, "overloaded", None, 2),
        (ApiError(ErrorKind.INTERNAL, "no"), openai.InternalServerError, None, None, 2),
    ],
)
def test_errors_as_the_client_sees_them(
    error: ApiError, raised: type[openai.APIStatusError], code: str | None, param: str | None, attempts: int
) -> None:
    requests: list[Request] = []

    def handle(request: httpx2.Request) -> httpx2.Response:
        requests.append(read(request))
        return http(DIALECT.error(error))

    with pytest.raises(raised) as caught:
        client(handle).responses.create(**ASK)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["message"] == "no"
    assert [request.hints.retry for request in requests] == [False, True][:attempts]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ApiError(ErrorKind.OVERLOADED, "engine away", retry_after=1), "server_error", "engine away"),
        (ApiError(ErrorKind.CONTEXT_LENGTH, "too long", param="messages"), "context_length_exceeded", "too long"),
        (ApiError(ErrorKind.QUOTA, "used up"), "insufficient_quota", "used up"),
        (
            ApiError(ErrorKind.RATE_LIMIT, "slow.", retry_after=1.5),
            "rate_limit_exceeded",
            "slow. Please try again in 1.5s.",
        ),
        (ApiError(ErrorKind.INTERNAL, "failed"), "server_error", "failed"),
        (ApiError(ErrorKind.BAD_REQUEST, "bad"), "invalid_prompt", "bad"),
    ],
)
def test_an_error_in_mid_stream(error: ApiError, code: str, message: str) -> None:
    """The official clients raise the first event of it; Codex acts on the second."""
    sent: list[bytes] = []

    def handle(request: httpx2.Request) -> httpx2.Response:
        stream = DIALECT.stream(read(request), "a", 1, "m")
        sent.append(stream.start() + stream.ping() + stream.error(error))
        return events(sent[-1])

    with pytest.raises(openai.APIError) as caught:
        list(client(handle).responses.create(**ASK, stream=True))
    assert (caught.value.message, caught.value.code) == (message, code)
    assert caught.value.param == ("input" if code == "context_length_exceeded" else None)

    told, failed = (orjson.loads(block.split(b"data: ")[1]) for block in sent[0].split(b"\n\n")[-3:-1])
    assert (told["type"], told["code"], told["message"], told["sequence_number"]) == ("error", code, message, 2)
    assert (failed["type"], failed["sequence_number"]) == ("response.failed", 3)
    assert (failed["response"]["status"], failed["response"]["output"]) == ("failed", [])
    assert failed["response"]["error"] == {"code": code, "message": message}


def test_tokens_are_counted() -> None:
    asked: list[Request] = []

    def handle(request: httpx2.Request) -> httpx2.Response:
        assert request.url.path == "/v1/responses/input_tokens"
        asked.append(read(request, "count_tokens"))
        return http(DIALECT.count(42))

    counted = client(handle).responses.input_tokens.count(input="hi", tools=TOOLS)
    assert (counted.input_tokens, counted.object) == (42, "response.input_tokens")
    assert [tool.name for tool in asked[0].tools] == ["f", "patch", "ns.g", "shell"]


def test_an_answer_can_be_written_without_its_request() -> None:
    """An answer that is asked for again has only what the record holds: its tools and its reply."""
    declared = read(
        httpx2.Request("POST", "http://x", content=orjson.dumps({"model": "m", "input": "hi", "tools": TOOLS}))
    )
    bare = Request("responses", "m", [], declared.tools, wire={"store": True})
    reply = Reply("a", "t", (ToolCall("c1", "ns.g", {}), ToolCall("c2", "shell", {"commands": ["ls"]})))
    sdk = client(lambda request: http(DIALECT.write(bare, Answer("abc1", 1, "m", [reply], USAGE))))
    stored = sdk.responses.retrieve("resp_abc1")
    assert (stored.id, stored.status, stored.output_text) == ("resp_abc1", "completed", "a")
    assert echoed([item.to_dict() for item in stored.output]) == [reply.as_message()]
