"""Anthropic's messages.

The items of a request are its `system` field, if there is one, and its messages. One item may give several neutral
messages (results of tools and text of the user), so a request that repeats a known history takes the messages of its
shared items as they are and reads only the rest. `messages_items`, `messages_parameters` and `messages_replies` hold the
shapes; this module puts them together.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, ClassVar

import orjson

from towline.conversation import Answer, Message, Request
from towline.dialects import messages_parameters as parameters
from towline.dialects.base import Call, Known, Response, Route
from towline.dialects.hints import read_hints
from towline.dialects.messages_items import holds_objects, read_item, read_system
from towline.dialects.messages_replies import (
    JSON_HEADERS,
    MessagesStream,
    error_response,
    model_response,
    models_response,
    whole,
)
from towline.dialects.reading import as_list, as_object, missing, optional_flag, required_text, wrong_value
from towline.errors import ApiError

_SYSTEM = "system"


class MessagesDialect:
    """`POST /v1/messages`, its count of tokens, and the list of models."""

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

    def items(self, body: dict[str, Any]) -> list[Any]:
        messages = as_object(body, "body").get("messages")
        if messages is None:
            missing("messages")
        items = as_list(messages, "messages")
        system = body.get("system")
        return items if not system else [{_SYSTEM: system}, *items]

    def read(self, call: Call, known: Known) -> tuple[Request, Known]:
        body = call.body
        items = self.items(body)
        if not body["messages"]:
            wrong_value("messages", "at least one message is required")
        counted = call.operation == "count_tokens"
        declared = parameters.read_tools(body, known.declared)
        request = Request(
            dialect=self.name,
            model=required_text(body, "model"),
            messages=[],
            tools=declared.tools,
            tool_choice=parameters.read_tool_choice(body, declared),
            sampling=parameters.read_sampling(body, counted=counted),
            stream=bool(optional_flag(body, "stream")),
            template_args=parameters.read_template_args(body),
            hints=read_hints(call.headers),
            ignored=parameters.read_ignored(body) + declared.ignored,
        )
        after = _continue(items, known)
        after.declared = declared
        request.messages = after.messages[:]
        return request, after

    def write(self, request: Request, answer: Answer) -> Response:
        return whole(request, answer)

    def stream(self, request: Request, id: str, created: int, model: str) -> MessagesStream:
        return MessagesStream(request, id, created, model)

    def error(self, error: ApiError) -> Response:
        return error_response(error)

    def models(self, names: list[str], created: int) -> Response:
        return models_response(names, created)

    def model(self, name: str, created: int) -> Response:
        return model_response(name)

    def count(self, tokens: int) -> Response:
        return Response(200, orjson.dumps({"input_tokens": tokens}), dict(JSON_HEADERS))

    def claims(self, headers: Mapping[str, str]) -> bool:
        return "anthropic-version" in headers or "x-api-key" in headers


def _continue(items: list[Any], known: Known) -> Known:
    """What is known after `items`: the messages of the shared ones as they are, the rest read."""
    shared = known.shared(items)
    kept = bisect_left(known.starts, shared)
    messages, starts = known.messages[:kept], known.starts[:kept]
    literal = {index: source for index, source in known.literal.items() if index < shared}
    led = bool(items) and isinstance(items[0], dict) and _SYSTEM in items[0] and "role" not in items[0]
    for index in range(shared, len(items)):
        item = items[index]
        if led and index == 0:
            read = [Message("system", read_system(item[_SYSTEM], _SYSTEM))]
        else:
            read = read_item(item, f"messages[{index - led}]")
        messages += read
        starts += [index] * len(read)
        if not (led and index == 0) and holds_objects(item):
            literal[index] = orjson.dumps(item)
    return Known(known.items[:shared] + items[shared:], messages, starts, literal)
