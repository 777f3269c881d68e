"""Anthropic's messages.

One message of the wire may give several neutral ones (tool results and user text), and consecutive assistant messages give
one; a request that repeats a cached history takes the messages of the shared part as they are and reads only the rest. The
`system` field is kept apart: some harnesses change it on every call, and that invalidates nothing else. `items` reads
messages, `parameters` reads tools and the other fields, `replies` writes answers and errors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, ClassVar

import orjson

from towline.common import exact_json
from towline.conversation import Answer, Message, Request
from towline.dialects.base import CachedTools, DialectCall, ReadCache, Response, Route
from towline.dialects.hints import read_hints
from towline.dialects.messages import parameters
from towline.dialects.messages.items import (
    holds_values,
    is_assistant,
    joined,
    read_item,
    read_system,
    refers_to_tools,
)
from towline.dialects.messages.parameters import Definitions, deferred, definitions, read_tools
from towline.dialects.messages.replies import (
    MessagesStream,
    error_response,
    full_response,
    model_response,
    models_response,
)
from towline.dialects.reading import as_list, as_object, missing, optional_flag, required_text, wrong_value
from towline.dialects.wire import JSON_HEADERS
from towline.errors import ApiError, ErrorKind

_SYSTEM = -1
"""Item index of the message of the `system` field: before the first item."""


class MessagesDialect:
    """`POST /v1/messages`, token counting, and the list of models."""

    name: ClassVar[str] = "messages"
    routes: ClassVar[tuple[Route, ...]] = (
        Route("POST", "/v1/messages", "generate"),
        Route("POST", "/messages", "generate"),
        Route("POST", "/v1/messages/count_tokens", "count_tokens"),
        Route("POST", "/messages/count_tokens", "count_tokens"),
        Route("GET", "/v1/models", "models"),
        Route("GET", "/v1/models/{model:path}", "model"),
        Route("HEAD", "/", "probe"),
        Route("HEAD", "/api/hello", "probe"),
        Route("GET", "/api/hello", "probe"),
    )
    errors_in_stream: ClassVar[frozenset[ErrorKind]] = frozenset()

    def items(self, body: dict[str, Any]) -> list[Any]:
        messages = as_object(body, "body").get("messages")
        if messages is None:
            missing("messages")
        return as_list(messages, "messages")

    def read(self, call: DialectCall, cache: ReadCache) -> tuple[Request, ReadCache]:
        body = call.body
        items = self.items(body)
        parameters.refuse(body)
        declared = read_tools(body, cache.declared)
        request = Request(
            dialect=self.name,
            model=required_text(body, "model"),
            messages=[],
            tools=declared.tools,
            shown=deferred(body),
            tool_choice=parameters.read_tool_choice(body, declared),
            sampling=parameters.read_sampling(body, counted=call.operation == "count_tokens"),
            stream=bool(optional_flag(body, "stream")),
            template_args=parameters.read_template_args(body),
            hints=read_hints(call.headers),
            ignored=parameters.read_ignored(body) + declared.ignored,
            wire=parameters.read_wire(body),
        )
        after = _updated_cache(items, body.get("system"), cache, declared, definitions(body))
        if not items or not after.messages:
            wrong_value("messages", "at least one message is required")
        # A copy: the messages of a request are reordered later, those of the cache must not be.
        request.messages = after.messages[:]
        return request, after

    def write(self, request: Request, answer: Answer) -> Response:
        return full_response(request, answer)

    def stream(self, request: Request, id: str, created: int, model: str) -> MessagesStream:
        return MessagesStream(request, id, model)

    def error(self, error: ApiError) -> Response:
        return error_response(error)

    def models(self, names: list[str], created: int) -> Response:
        return models_response(names, created)

    def model(self, name: str, created: int) -> Response:
        return model_response(name, created)

    def count(self, tokens: int) -> Response:
        return Response(200, orjson.dumps({"input_tokens": tokens}), dict(JSON_HEADERS))

    def claims(self, headers: Mapping[str, str]) -> bool:
        return "anthropic-version" in headers or "x-api-key" in headers


def _updated_cache(
    items: list[Any], system: Any, cache: ReadCache, declared: CachedTools, tools: Definitions
) -> ReadCache:
    """The cache after `system` and `items`: the messages of the shared part as they are, the rest read."""
    shared = _intact(items, cache, declared)
    led = cache.starts[:1] == [_SYSTEM]
    kept = bisect_left(cache.starts, shared)
    messages, starts = cache.messages[led:kept], cache.starts[led:kept]
    literal = {index: source for index, source in cache.literal.items() if index < shared}
    if text := "" if system is None else read_system(system, "system", tools):
        same = led and cache.messages[0].text == text
        messages.insert(0, cache.messages[0] if same else Message("system", text))
        starts.insert(0, _SYSTEM)
    for index in range(shared, len(items)):
        item = items[index]
        read = read_item(item, f"messages[{index}]", tools)
        if is_assistant(item) and index and is_assistant(items[index - 1]) and messages[-1].role == "assistant":
            messages[-1] = joined(messages[-1], read.pop(0))
        messages += read
        starts += [index] * len(read)
        if holds_values(item):
            literal[index] = exact_json.dumps(item)
    # The cached items rather than equal ones: the messages share their strings.
    return ReadCache(cache.items[:shared] + items[shared:], messages, starts, literal, declared)


def _intact(items: list[Any], cache: ReadCache, declared: CachedTools) -> int:
    """How many leading items give the same messages as before."""
    shared = cache.shared(items)
    if declared is not cache.declared:
        shared = next((index for index in range(shared) if refers_to_tools(items[index])), shared)
    if any(map(is_assistant, (*items[shared : shared + 1], *cache.items[shared : shared + 1]))):
        # Consecutive assistant messages are one, and it continues differently now or did before.
        while shared and is_assistant(items[shared - 1]):
            shared -= 1
    return shared
