"""What Google's official client makes of our answers: the model's reply, and back again.

The client runs as it is; only its transport is replaced by a function that finds the route, reads the request and writes
the answer with the dialect. So paths and bodies are what the client really sends, and answers are read by its own models.
Its asynchronous half, which does not use that transport, speaks to a server on the loopback interface.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import httpx
import orjson
import pytest
from aiohttp import web
from google import genai
from google.genai import errors, types
from hypothesis import given, settings
from hypothesis import strategies as st

from towline.conversation import Answer, Finish, Message, Reply, Request, TokenLogprob, Tool, ToolCall, Usage
from towline.dialects.base import DialectCall, ReadCache, Response, Route
from towline.dialects.google import GoogleDialect
from towline.errors import ApiError, ErrorKind
from towline.tokens.graph import fingerprint

DIALECT = GoogleDialect()
USAGE = Usage(prompt=11, sampled=7, cached=5, reasoning=3)
THINK = types.ThinkingConfig(include_thoughts=True)
NO_AFC = types.AutomaticFunctionCallingConfig(disable=True)
CONFIG = types.GenerateContentConfig(thinking_config=THINK, automatic_function_calling=NO_AFC)
Handler = Callable[[httpx.Request], httpx.Response]


@cache
def made_client(**options: Any) -> tuple[genai.Client, list[Handler]]:
    """A client and who answers it. Making one takes longer than all that is done with it."""
    handlers: list[Handler] = []
    transport = httpx.Client(transport=httpx.MockTransport(lambda request: handlers[-1](request)))
    version = {"api_version": options.pop("version")} if "version" in options else {}
    wire = types.HttpOptions(base_url="http://gateway", httpx_client=transport, **version)
    return genai.Client(api_key="k", http_options=wire, **options), handlers


def client(handler: Handler, **options: Any) -> genai.Client:
    """A client whose calls go to the handler from now on."""
    sdk, handlers = made_client(**options)
    handlers[:] = [handler]
    return sdk


def routed(method: str, path: str) -> tuple[Route, dict[str, str]]:
    """The dialect's route of a path, found as the gateway finds it."""
    for route in DIALECT.routes:
        pieces = re.split(r"\{(\w+)(:path)?\}", route.path)
        pattern = re.escape(pieces[0])
        for name, rest, text in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
            pattern += f"(?P<{name}>{'.+' if rest else '[^/]+'})" + re.escape(text)
        found = re.fullmatch(pattern, path)
        if found is not None and route.method == method:
            return route, found.groupdict()
    raise AssertionError(f"no route for {method} {path}")


def read(method: str, path: str, query: dict[str, str], headers: dict[str, str], content: bytes) -> tuple[str, Request]:
    route, values = routed(method, path)
    call = DialectCall(route.operation, orjson.loads(content), headers, query, values)
    return route.operation, DIALECT.read(call, ReadCache())[0]


def asked(request: httpx.Request) -> tuple[str, Request]:
    headers = {name.lower(): value for name, value in request.headers.items()}
    return read(request.method, request.url.path, dict(request.url.params), headers, request.content)


def http(response: Response) -> httpx.Response:
    return httpx.Response(response.status, content=response.body, headers=response.headers)


def answered(request: Request, *replies: Reply, tokens: list[TokenLogprob] | None = None) -> Response:
    """The replies, whole or streamed as the request asks, with pings in between."""
    answer = Answer("abc1", 1700000000, request.model, replies, USAGE, None if tokens is None else lambda _: tokens)
    if not request.stream:
        return DIALECT.write(request, answer)
    stream = DIALECT.stream(request, answer.id, answer.created, answer.model)
    pieces = [stream.start(), stream.ping(), stream.ping(), *stream.finish(answer)]
    return Response(200, b"".join(pieces), {"content-type": stream.content_type})


class Gateway:
    """Answers a client's calls with the replies, one a call, the last for ever; remembers what it was asked."""

    def __init__(self, *calls: list[Reply], tokens: list[TokenLogprob] | None = None):
        self.requests: list[Request] = []
        self._calls = calls
        self._tokens = tokens

    def __call__(self, request: httpx.Request) -> httpx.Response:
        return http(self.answer(asked(request)[1]))

    def answer(self, request: Request) -> Response:
        replies = self._calls[min(len(self.requests), len(self._calls) - 1)]
        self.requests.append(request)
        return answered(request, *replies, tokens=self._tokens)


def says(parts: list[types.Part]) -> tuple[str, str, list[tuple[str, str, Any]]]:
    """Text, thoughts and calls of the client's parts."""
    calls = [
        (part.function_call.id, part.function_call.name, part.function_call.args)
        for part in parts
        if part.function_call
    ]
    text, thoughts = (
        "".join(part.text or "" for part in parts if bool(part.thought) is told) for told in (False, True)
    )
    return text, thoughts, calls


def said(reply: Reply) -> tuple[str, str, list[tuple[str, str, Any]]]:
    """The same of a reply."""
    calls = []
    for call in reply.tool_calls:
        arguments = {"__text__": call.arguments} if isinstance(call.arguments, str) else call.arguments
        calls.append((call.id, call.name, arguments))
    return reply.text, reply.reasoning or "", calls


def parts_of(responses: list[types.GenerateContentResponse], index: int) -> list[types.Part]:
    return [
        part
        for response in responses
        for candidate in response.candidates or []
        if candidate.index == index and candidate.content
        for part in candidate.content.parts or []
    ]


def check(responses: list[types.GenerateContentResponse], spoken: list[Reply]) -> None:
    """The responses, one or all of a stream, say what was said."""
    finishes = {Finish.LENGTH: "MAX_TOKENS", Finish.ABORT: "OTHER"}
    for index, reply in enumerate(spoken):
        assert says(parts_of(responses, index)) == said(reply)
        ends = [
            candidate.finish_reason
            for response in responses
            for candidate in response.candidates or []
            if candidate.index == index and candidate.finish_reason
        ]
        assert ends == [finishes.get(reply.finish, "STOP")]
    for response in responses:
        usage = response.usage_metadata
        assert usage is not None
        assert (usage.prompt_token_count, usage.candidates_token_count, usage.total_token_count) == (11, 4, 18)
        assert (usage.thoughts_token_count, usage.cached_content_token_count) == (3, 5)
        assert (response.response_id, response.model_version) == ("abc1", "org/model")


def same(echoed: Message, reply: Reply, reasoning: bool = True) -> None:
    expected = reply.as_message()
    assert fingerprint.of(echoed) == fingerprint.of(expected)
    assert (echoed.text, echoed.tool_calls) == (expected.text, expected.tool_calls)
    assert echoed.reasoning == (expected.reasoning if reasoning else None)


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
calls = st.builds(ToolCall, identifiers, identifiers, objects | texts)
replies = st.builds(
    Reply,
    texts,
    st.none() | st.text(min_size=1, max_size=200),
    st.lists(calls, max_size=3).map(tuple),
    st.sampled_from(Finish),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(replies, min_size=1, max_size=3))
def test_the_client_reads_complete_and_streamed_answers(spoken: list[Reply]) -> None:
    gateway = Gateway(spoken)
    models = client(gateway).models
    ask: Any = {"model": "org/model", "contents": "hi", "config": CONFIG.model_copy(update={"candidate_count": 3})}
    check([models.generate_content(**ask)], spoken)
    check(list(models.generate_content_stream(**ask)), spoken)
    assert [(request.stream, request.model, request.sampling.n) for request in gateway.requests] == [
        (False, "org/model", 3),
        (True, "org/model", 3),
    ]


@settings(max_examples=60, deadline=None)
@given(st.lists(replies, min_size=2, max_size=3), st.booleans())
def test_chats_send_back_one_message_per_turn(spoken: list[Reply], stream: bool) -> None:
    """A streamed turn stays in the client's history as one content for every piece; a signature is bytes to it, and comes
    back in another alphabet."""
    gateway = Gateway(*[[reply] for reply in spoken])
    chat = client(gateway).chats.create(model="org/model", config=CONFIG)
    for turn in range(len(spoken)):
        if stream:
            list(chat.send_message_stream(f"question {turn}"))
        else:
            chat.send_message(f"question {turn}")
    last = gateway.requests[-1].messages
    assert [message.role for message in last] == ["user", "assistant"] * (len(spoken) - 1) + ["user"]
    for message, reply in zip(last[1::2], spoken, strict=False):
        same(message, reply)


@settings(max_examples=60, deadline=None)
@given(replies, st.booleans())
def test_a_signature_alone_restores_the_thoughts(reply: Reply, stream: bool) -> None:
    """Whether or not thoughts were shown: clients keep signatures and drop thoughts, or replace signatures as well."""
    gateway = Gateway([reply])
    models = client(gateway).models
    ask: Any = {"model": "m", "contents": "hi"}
    given = list(models.generate_content_stream(**ask)) if stream else [models.generate_content(**ask)]
    hidden = parts_of(given, 0)
    assert says(hidden) == (said(reply)[0], "", said(reply)[2])
    ask["config"] = CONFIG
    shown = parts_of(list(models.generate_content_stream(**ask)), 0)
    dropped = [part for part in shown if not part.thought]
    replaced = [
        part.model_copy(update={"thought_signature": b"skip_thought_signature_validator"})
        if part.thought_signature or part.function_call
        else part
        for part in dropped
    ]
    for kept, reasoning in ((hidden, True), (shown, True), (dropped, True), (replaced, False)):
        ask["contents"] = ["hi", types.Content(role="model", parts=kept), "go on"]
        models.generate_content(**ask)
        echoed = gateway.requests[-1].messages
        assert [message.role for message in echoed] == ["user", "assistant", "user"]
        same(echoed[1], reply, reasoning)


def weather(city: str, days: int = 1) -> str:
    """The weather."""
    if days > 9:
        raise ValueError("too far ahead!")
    return f"{city}: rain for {days}"


def test_automatic_function_calling_runs_a_loop_without_ids_on_its_responses() -> None:
    first = Reply(
        "", "hm", (ToolCall("c1", "weather", {"city": "A"}), ToolCall("c2", "weather", {"city": "B", "days": 99}))
    )
    gateway = Gateway([first], [Reply("", None, (ToolCall("c3", "weather", {"city": "C"}),))], [Reply("Rain.")])
    config = types.GenerateContentConfig(tools=[weather], system_instruction=["Be brief.", "Be kind."])
    response = client(gateway).models.generate_content(model="m", contents="weather?", config=config)
    assert says(parts_of([response], 0))[0] == "Rain."
    request = gateway.requests[-1]
    assert request.messages[0] == Message("system", "Be brief.\nBe kind.")
    same(request.messages[2], first)
    results = [message for message in request.messages if message.role == "tool"]
    assert [(message.tool_call_id, message.name, message.text.split()[-1]) for message in results] == [
        ("c1", "weather", "1"),
        ("c2", "weather", "ahead!"),
        ("c3", "weather", "1"),
    ]
    assert results[0].text == "A: rain for 1"
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1}},
        "required": ["city"],
    }
    assert request.tools == (Tool("weather", "The weather.", schema, extra={"responseJsonSchema": {"type": "string"}}),)
    assert request.tool_choice is None


def test_parts_in_order() -> None:
    """A signature stands on the first piece of its text: Gemini CLI joins the pieces into that one."""
    reply = Reply("word " * 60, "hm", (ToolCall("c1", "f", {"a": 1}), ToolCall("c2", "f", {})))
    chunks = list(client(Gateway([reply])).models.generate_content_stream(model="m", contents="hi", config=CONFIG))
    shape = []
    for chunk in chunks:
        (part,) = parts_of([chunk], 0)
        kind = "thought" if part.thought else "call" if part.function_call else "text"
        shape.append((kind, part.thought_signature is not None))
    assert shape == [("thought", False), ("text", True), *[("text", False)] * 3, ("call", False), ("call", False)]
    bare = list(client(Gateway([Reply("", "hm")])).models.generate_content_stream(model="m", contents="hi"))
    assert [(part.text, part.thought_signature is not None) for part in parts_of(bare, 0)] == [("", True)]


def test_logprobs_only_when_asked() -> None:
    tokens = [
        TokenLogprob("h", -0.5, b"h"),
        TokenLogprob("\ufffd", float("-inf"), b"\xc3"),
        TokenLogprob("x", float("nan"), b"x"),
    ]
    models = client(Gateway([Reply("h\ufffdx")], tokens=tokens)).models
    config = types.GenerateContentConfig(response_logprobs=True, logprobs=2)
    ask: Any = {"model": "m", "contents": "hi", "config": config}
    for last in (models.generate_content(**ask), list(models.generate_content_stream(**ask))[-1]):
        (candidate,) = last.candidates or []
        assert candidate.logprobs_result is not None
        found = [(token.token, token.log_probability) for token in candidate.logprobs_result.chosen_candidates or []]
        assert found == [("h", -0.5), ("\ufffd", -9999.0), ("x", -9999.0)]
        assert candidate.avg_logprobs == pytest.approx(-19998.5 / 3)
    (candidate,) = models.generate_content(model="m", contents="hi").candidates or []
    assert candidate.logprobs_result is None


@pytest.mark.parametrize(
    ("error", "raised", "status", "code", "detail"),
    [
        (ApiError(ErrorKind.BAD_REQUEST, "no"), errors.ClientError, 400, "INVALID_ARGUMENT", None),
        (
            ApiError(ErrorKind.BAD_REQUEST, "no", param="contents[0].role"),
            errors.ClientError,
            400,
            "INVALID_ARGUMENT",
            {"fieldViolations": [{"field": "contents[0].role", "description": "no"}]},
        ),
        (
            ApiError(ErrorKind.UNAUTHORISED, "no"),
            errors.ClientError,
            401,
            "UNAUTHENTICATED",
            {"reason": "API_KEY_INVALID", "domain": "googleapis.com"},
        ),
        (ApiError(ErrorKind.NOT_FOUND, "no"), errors.ClientError, 404, "NOT_FOUND", None),
        (ApiError(ErrorKind.METHOD, "no"), errors.ClientError, 405, "INVALID_ARGUMENT", None),
        (ApiError(ErrorKind.TOO_LARGE, "no"), errors.ClientError, 413, "INVALID_ARGUMENT", None),
        (ApiError(ErrorKind.CONTEXT_LENGTH, "no", param="messages"), errors.ClientError, 400, "INVALID_ARGUMENT", None),
        (
            ApiError(ErrorKind.QUOTA, "no", retry_after=5),
            errors.ClientError,
            429,
            "RESOURCE_EXHAUSTED",
            {"violations": [{"subject": "session", "quotaId": "SessionLimitPerDay", "description": "no"}]},
        ),
        (ApiError(ErrorKind.RATE_LIMIT, "no"), errors.ClientError, 429, "RESOURCE_EXHAUSTED", {"retryDelay": "1s"}),
        (
            ApiError(ErrorKind.OVERLOADED, "no", retry_after=2.5),
            errors.ServerError,
            503,
            "UNAVAILABLE",
            {"retryDelay": "2.5s"},
        ),
        (ApiError(ErrorKind.INTERNAL, "no"), errors.ServerError, 500, "INTERNAL", None),
    ],
)
def test_errors_as_the_client_sees_them(
    error: ApiError, raised: type[errors.APIError], status: int, code: str, detail: dict[str, Any] | None
) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        return http(DIALECT.error(error))

    def break_off(request: httpx.Request) -> httpx.Response:
        _, request_read = asked(request)
        stream = DIALECT.stream(request_read, "a", 1, "m")
        content = stream.start() + stream.ping() + stream.error(error)
        return httpx.Response(200, content=content, headers={"content-type": stream.content_type})

    ask: Any = {"model": "m", "contents": "hi"}
    for run in (
        lambda: client(refuse).models.generate_content(**ask),
        lambda: list(client(refuse).models.generate_content_stream(**ask)),
        lambda: list(client(break_off).models.generate_content_stream(**ask)),
    ):
        with pytest.raises(raised) as caught:
            run()
        assert (caught.value.code, caught.value.status) == (status, code)
        assert "no" in (caught.value.message or "")
        if error.kind is ErrorKind.CONTEXT_LENGTH:
            assert re.search(r"input token count.*exceeds the maximum", caught.value.message or "")
        (found,) = caught.value.details["error"].get("details", [{}])
        found.pop("@type", None)
        assert found == (detail or {})


def test_retry_after_is_in_whole_seconds() -> None:
    def wait(error: ApiError) -> str | None:
        return DIALECT.error(error).headers.get("retry-after")

    assert wait(ApiError(ErrorKind.OVERLOADED, "no", retry_after=2.5)) == "3"
    assert wait(ApiError(ErrorKind.RATE_LIMIT, "no")) == "1"
    assert wait(ApiError(ErrorKind.QUOTA, "no", retry_after=5)) is None


PREFIXES = [
    ({}, "org/model"),
    ({"version": "v1beta"}, "org/model"),
    ({"version": "v1alpha"}, "org/model"),
    ({"version": ""}, "org/model"),
    ({"vertexai": True}, "model"),
    ({"vertexai": True, "project": "p", "location": "l"}, "model"),
]


@pytest.mark.parametrize(("options", "name"), PREFIXES)
def test_every_path_that_the_client_builds(options: dict[str, Any], name: str) -> None:
    seen: list[tuple[str, str]] = []

    def handle(request: httpx.Request) -> httpx.Response:
        operation, request_read = asked(request)
        seen.append((operation, request_read.model))
        return http(DIALECT.count(42) if operation == "count_tokens" else answered(request_read, Reply("x")))

    models = client(handle, **options).models
    for model in ("m", "models/m:7b", "org/model"):
        models.generate_content(model=model, contents="hi")
        list(models.generate_content_stream(model=model, contents="hi"))
        assert models.count_tokens(model=model, contents="hi").total_tokens == 42
    names = ["m", "m:7b", name]
    assert seen == [(op, n) for n in names for op in ("generate", "generate_stream", "count_tokens")]


@pytest.mark.parametrize(
    "options",
    [{}, {"version": "v1beta"}, {"version": "v1alpha"}, {"vertexai": True}],
    ids=["v1", "v1beta", "v1alpha", "vertex"],
)
def test_models(options: dict[str, Any]) -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        assert DIALECT.claims({name.lower(): value for name, value in request.headers.items()})
        route, values = routed(request.method, request.url.path)
        if route.operation == "models":
            return http(DIALECT.models(["org/a", "b"], 5))
        return http(DIALECT.model(values["model"], 5))

    models = client(handle, **options).models
    assert [(model.name, model.display_name) for model in models.list()] == [
        ("models/org/a", "org/a"),
        ("models/b", "b"),
    ]
    assert models.get(model="b").name == "models/b"
    if not options.get("vertexai"):
        assert models.get(model="org/a").supported_actions == [
            "generateContent",
            "streamGenerateContent",
            "countTokens",
        ]


def test_a_stream_without_events_is_one_array() -> None:
    """What `curl` gets that does not ask for server-sent events."""
    body = {"contents": [{"parts": [{"text": "hi"}]}]}
    call = DialectCall("generate_stream", body, {}, {}, {"model": "v1beta/models/m"})
    request = DIALECT.read(call, ReadCache())[0]
    reply = Reply(LONG, "hm", (ToolCall("c", "f", {"a": 1}),))
    response = answered(request, reply, reply)
    assert response.headers["content-type"].startswith("application/json")
    chunks = orjson.loads(response.body)
    parts = [part for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]
    assert "".join(part.get("text", "") for part in parts) == LONG * 2
    stream = DIALECT.stream(request, "a", 1, "m")
    broken = stream.start() + stream.ping() + stream.error(ApiError(ErrorKind.OVERLOADED, "engine away"))
    assert orjson.loads(broken)[0]["error"]["status"] == "UNAVAILABLE"


async def _serve(gateway: Gateway) -> tuple[web.AppRunner, str]:
    """The same on a socket; a stream comes in many small writes that cut lines and characters."""

    async def handle(request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        if "broken" in request.path:
            error = DIALECT.error(ApiError(ErrorKind.OVERLOADED, "engine away"))
            return web.Response(status=error.status, body=error.body, headers=error.headers)
        read_request = read(request.method, request.path, dict(request.query), headers, await request.read())[1]
        made = gateway.answer(read_request)
        if not read_request.stream:
            return web.Response(status=made.status, body=made.body, headers=made.headers)
        response = web.StreamResponse(headers=made.headers)
        await response.prepare(request)
        for piece in _cut(made.body):
            await response.write(piece)
            await asyncio.sleep(0)
        return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, site.name


def _cut(data: bytes) -> Iterator[bytes]:
    size = 7
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def test_the_asynchronous_client_over_a_socket() -> None:
    spoken = [
        Reply("naïve 日本語 " * 30 + LONG, "hm\u2028", (ToolCall("c1", "f", {"a": [1, 1.0, True, None, "\x85"]}),)),
        Reply("bye", "enough"),
    ]
    gateway = Gateway([spoken[0]], [spoken[1]])
    runner, address = await _serve(gateway)
    sdk = genai.Client(api_key="k", http_options=types.HttpOptions(base_url=address, timeout=60_000))
    try:
        for stream in (True, False):
            gateway.requests.clear()
            chat = sdk.aio.chats.create(model="org/model", config=CONFIG)
            for question, reply in zip(("one", "two"), spoken, strict=True):
                if stream:
                    responses = [chunk async for chunk in await chat.send_message_stream(question)]
                else:
                    responses = [await chat.send_message(question)]
                check(responses, [reply])
            same(gateway.requests[-1].messages[1], spoken[0])
            with pytest.raises(errors.ServerError) as caught:
                await sdk.aio.models.generate_content(model="broken", contents="hi")
            assert (caught.value.code, caught.value.status) == (503, "UNAVAILABLE")
    finally:
        await sdk.aio.aclose()
        await runner.cleanup()
