"""Google's generateContent.

The path names the model, and whether the answer is streamed. The items of a request are its system instruction, if there is
one, and its contents; a content may give several neutral messages, and consecutive model contents give one. `items` reads
contents, `parameters` reads the other fields, `replies` writes answers and errors.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, ClassVar

import orjson

from towline.common import exact_json
from towline.conversation import Answer, Request
from towline.dialects.base import DialectCall, ReadCache, Response, Route
from towline.dialects.google import parameters
from towline.dialects.google.items import ContentsReader, holds_numbers, is_model
from towline.dialects.google.parameters import field
from towline.dialects.google.replies import (
    JSON_HEADERS,
    GoogleStream,
    error_response,
    full_response,
    model_response,
    models_response,
)
from towline.dialects.hints import read_hints
from towline.dialects.reading import as_list, as_object, missing, wrong_value
from towline.errors import ApiError, ErrorKind

_SYSTEM = "systemInstruction"
_COUNTED = "generateContentRequest"
_OPERATIONS = {"generateContent": "generate", "streamGenerateContent": "generate_stream", "countTokens": "count_tokens"}
_RESOURCE = re.compile(r"(?:v\d\w*/)?(?:projects/[^/]+/locations/[^/]+/)?(?:publishers/[^/]+/)?(?:models/)?(.+)")
"""What clients put before a model's name: a version, a Vertex project, a publisher, the word `models`."""


class GoogleDialect:
    """`POST /v1beta/models/{model}:generateContent` and related paths, under every version and prefix that clients use."""

    name: ClassVar[str] = "google"
    routes: ClassVar[tuple[Route, ...]] = (
        *(Route("POST", f"/{{model:path}}:{method}", operation) for method, operation in _OPERATIONS.items()),
        Route("GET", "/v1beta/models", "models"),
        Route("GET", "/v1alpha/models", "models"),
        Route("GET", "/v1/models", "models"),
        Route("GET", "/v1beta1/publishers/google/models", "models"),
        Route("GET", "/v1beta/models/{model:path}", "model"),
        Route("GET", "/v1alpha/models/{model:path}", "model"),
        Route("GET", "/v1/models/{model:path}", "model"),
        Route("GET", "/v1beta1/publishers/google/models/{model:path}", "model"),
    )
    errors_in_stream: ClassVar[frozenset[ErrorKind]] = frozenset()

    def items(self, body: dict[str, Any]) -> list[Any]:
        source = _source(as_object(body, "body"))
        contents = source.get("contents")
        if contents is None:
            missing("contents")
        items = [contents] if isinstance(contents, (dict, str)) else as_list(contents, "contents")
        system = field(source, _SYSTEM)
        if system is None or system in ("", [], {}):
            return items
        # JSON has no tuples, so no content compares equal to it.
        return [(_SYSTEM, system), *items]

    def read(self, call: DialectCall, cache: ReadCache) -> tuple[Request, ReadCache]:
        items = self.items(call.body)
        body = _source(call.body)
        if not body["contents"]:
            wrong_value("contents", "at least one content is required")
        declared = parameters.read_tools(body, cache.declared)
        request = Request(
            dialect=self.name,
            model=_model_name(call.path.get("model", "")),
            messages=[],
            tools=declared.tools,
            tool_choice=parameters.read_tool_choice(body, declared),
            sampling=parameters.read_sampling(body),
            stream=call.operation == "generate_stream",
            template_args=parameters.read_template_args(body),
            hints=read_hints(call.headers),
            ignored=parameters.read_ignored(body) + declared.ignored,
            wire=parameters.read_wire(body, call.query),
        )
        after = _updated_cache(items, cache)
        after.declared = declared
        # A copy: the messages of a request are reordered later, those of the cache must not be.
        request.messages = after.messages[:]
        return request, after

    def write(self, request: Request, answer: Answer) -> Response:
        return full_response(request, answer)

    def stream(self, request: Request, id: str, created: int, model: str) -> GoogleStream:
        return GoogleStream(request, id, created, model)

    def error(self, error: ApiError) -> Response:
        return error_response(error)

    def models(self, names: list[str], created: int) -> Response:
        return models_response(names)

    def model(self, name: str, created: int) -> Response:
        return model_response(name)

    def count(self, tokens: int) -> Response:
        return Response(200, orjson.dumps({"totalTokens": tokens}), dict(JSON_HEADERS))

    def claims(self, headers: Mapping[str, str]) -> bool:
        return "x-goog-api-key" in headers or "x-goog-api-client" in headers


def _source(body: dict[str, Any]) -> dict[str, Any]:
    """The body itself, or the request inside a `countTokens` body."""
    inner = field(body, _COUNTED)
    return body if inner is None else as_object(inner, _COUNTED)


def _model_name(resource: str) -> str:
    found = _RESOURCE.fullmatch(resource)
    return found.group(1) if found is not None else resource


def _next(items: list[Any], cache: ReadCache, shared: int) -> list[Any]:
    """The first items that are not shared, of the request and of the cache."""
    return items[shared : shared + 1] + cache.items[shared : shared + 1]


def _updated_cache(items: list[Any], cache: ReadCache) -> ReadCache:
    """The cache after `items`: messages that no item can extend any more as they are, the rest read."""
    shared = cache.shared(items)
    kept = bisect_left(cache.starts, shared)
    start = shared
    if kept and cache.messages[kept - 1].role == "assistant" and any(map(is_model, _next(items, cache, shared))):
        # The next item continues the model's turn, or the next cached item did.
        kept -= 1
        start = cache.starts[kept]
    literal = {index: source for index, source in cache.literal.items() if index < start}
    reader = ContentsReader(cache.messages[:kept], cache.starts[:kept])
    led = isinstance(items[0], tuple)
    for index in range(start, len(items)):
        item = items[index]
        if led and index == 0:
            reader.system(item[1], index, _SYSTEM)
            continue
        reader.read(item, index, f"contents[{index - led}]")
        if holds_numbers(item):
            literal[index] = exact_json.dumps(item)
    reader.finish()
    # The cached items rather than equal ones: the messages share their strings.
    return ReadCache(cache.items[:shared] + items[shared:], reader.messages, reader.starts, literal)
