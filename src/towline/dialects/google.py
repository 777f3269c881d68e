"""Google's generateContent.

The model is in the path, and so is whether the answer is streamed. The items of a request are its system instruction, if
there is one, and its contents; one content may give several neutral messages. `google_items`, `google_parameters` and
`google_replies` hold the shapes; this module puts them together.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, ClassVar

import orjson

from towline.conversation import Answer, Message, Request
from towline.dialects import google_parameters as parameters
from towline.dialects.base import Call, Known, Response, Route
from towline.dialects.google_items import field, holds_objects, read_item, read_system
from towline.dialects.google_replies import (
    JSON_HEADERS,
    GoogleStream,
    error_response,
    model_response,
    models_response,
    whole,
)
from towline.dialects.hints import read_hints
from towline.dialects.reading import as_list, as_object, missing, wrong_value
from towline.errors import ApiError

_SYSTEM = "systemInstruction"
_BASES = ("/v1beta/models", "/v1/models", "/v1alpha/models", "/v1beta1/publishers/google/models")
_OPERATIONS = {"generateContent": "generate", "streamGenerateContent": "generate_stream", "countTokens": "count_tokens"}


class GoogleDialect:
    """`POST /v1beta/models/{model}:generateContent` and its kin."""

    name: ClassVar[str] = "google"
    routes: ClassVar[tuple[Route, ...]] = (
        *(
            Route("POST", f"{base}/{{model}}:{method}", operation)
            for base in _BASES
            for method, operation in _OPERATIONS.items()
        ),
        Route("GET", "/v1beta/models", "models"),
        Route("GET", "/v1alpha/models", "models"),
        Route("GET", "/v1beta/models/{model}", "model"),
        Route("GET", "/v1/models", "models"),
        Route("GET", "/v1/models/{model:path}", "model"),
    )

    def items(self, body: dict[str, Any]) -> list[Any]:
        source = self._source(as_object(body, "body"))
        contents = source.get("contents")
        if contents is None:
            missing("contents")
        if isinstance(contents, (dict, str)):
            contents = [contents]
        items = as_list(contents, "contents")
        system = field(source, _SYSTEM)
        return items if not system else [{_SYSTEM: system}, *items]

    def _source(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body itself, or the request inside a count of tokens."""
        inner = field(body, "generateContentRequest")
        return body if inner is None else as_object(inner, "generateContentRequest")

    def read(self, call: Call, known: Known) -> tuple[Request, Known]:
        items = self.items(call.body)
        body = self._source(call.body)
        if not body.get("contents"):
            wrong_value("contents", "at least one content is needed")
        declared = parameters.read_tools(body, known.declared)
        wire: dict[str, Any] = {}
        if call.query.get("alt") == "sse":
            wire["sse"] = True
        if parameters.includes_thoughts(body):
            wire["thoughts"] = True
        request = Request(
            dialect=self.name,
            model=call.path.get("model", ""),
            messages=[],
            tools=declared.tools,
            tool_choice=parameters.read_tool_choice(body),
            sampling=parameters.read_sampling(body),
            stream=call.operation == "generate_stream",
            template_args=parameters.read_template_args(body),
            hints=read_hints(call.headers),
            ignored=parameters.read_ignored(body) + declared.ignored,
            wire=wire,
        )
        after = _continue(items, known)
        after.declared = declared
        request.messages = after.messages[:]
        return request, after

    def write(self, request: Request, answer: Answer) -> Response:
        return whole(request, answer)

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


def _continue(items: list[Any], known: Known) -> Known:
    """What is known after `items`: the messages of the shared ones as they are, the rest read."""
    shared = known.shared(items)
    kept = bisect_left(known.starts, shared)
    messages, starts = known.messages[:kept], known.starts[:kept]
    literal = {index: source for index, source in known.literal.items() if index < shared}
    led = bool(items) and isinstance(items[0], dict) and _SYSTEM in items[0]
    for index in range(shared, len(items)):
        item = items[index]
        if led and index == 0:
            read = [Message("system", read_system(item[_SYSTEM], _SYSTEM))]
        else:
            read = read_item(item, f"contents[{index - led}]", messages[-1] if messages else None)
            if holds_objects(item):
                literal[index] = orjson.dumps(item)
        messages += read
        starts += [index] * len(read)
    return Known(known.items[:shared] + items[shared:], messages, starts, literal)
