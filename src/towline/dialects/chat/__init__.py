"""OpenAI's chat completions.

Every message of the wire is one neutral message, so a request that repeats a cached history reuses the same `Message`
objects and reads only what is new; old items are compared, never read or checked again. `items` reads messages,
`parameters` reads the other fields, `replies` writes answers and errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import orjson

from towline.common import exact_json
from towline.conversation import Answer, Request
from towline.dialects.base import DialectCall, ReadCache, Response, Route
from towline.dialects.chat import parameters
from towline.dialects.chat.items import has_literal_arguments, read_message
from towline.dialects.chat.replies import ChatStream, error_response, full_response, model_response, models_response
from towline.dialects.hints import read_hints
from towline.dialects.reading import as_list, as_object, missing, optional_flag, required_text, wrong_value
from towline.errors import ApiError, ErrorKind


class ChatDialect:
    """`POST /v1/chat/completions` and the list of models."""

    name: ClassVar[str] = "chat"
    routes: ClassVar[tuple[Route, ...]] = (
        Route("POST", "/v1/chat/completions", "generate"),
        Route("POST", "/chat/completions", "generate"),
        Route("GET", "/v1/models", "models"),
        Route("GET", "/models", "models"),
        Route("GET", "/v1/models/{model:path}", "model"),
        Route("GET", "/models/{model:path}", "model"),
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
        if not items:
            wrong_value("messages", "at least one message is required")
        model = required_text(body, "model")
        declared = parameters.read_tools(body, cache.declared)
        request = Request(
            dialect=self.name,
            model=model,
            messages=[],
            tools=declared.tools,
            tool_choice=parameters.read_tool_choice(body, declared),
            sampling=parameters.read_sampling(body),
            stream=bool(optional_flag(body, "stream")),
            template_args=parameters.read_template_args(body),
            hints=read_hints(call.headers),
            ignored=parameters.read_ignored(body) + declared.ignored,
            wire=parameters.read_wire(body),
        )
        after = _updated_cache(items, cache)
        after.declared = declared
        # A copy: the messages of a request are reordered later, those of the cache must not be.
        request.messages = after.messages[:]
        return request, after

    def write(self, request: Request, answer: Answer) -> Response:
        return full_response(request, answer)

    def stream(self, request: Request, id: str, created: int, model: str) -> ChatStream:
        return ChatStream(request, id, created, model)

    def error(self, error: ApiError) -> Response:
        return error_response(error)

    def models(self, names: list[str], created: int) -> Response:
        return models_response(names, created)

    def model(self, name: str, created: int) -> Response:
        """One model of the list."""
        return model_response(name, created)

    def count(self, tokens: int) -> Response:
        """Not part of this dialect's API; a client that asks for it nevertheless gets the number."""
        return Response(200, orjson.dumps({"total_tokens": tokens}))

    def claims(self, headers: Mapping[str, str]) -> bool:
        return "authorization" in headers


def _updated_cache(items: list[Any], cache: ReadCache) -> ReadCache:
    """The cache after `items`: the shared part as it is, the rest read."""
    shared = cache.shared(items)
    messages = cache.messages[:shared]
    literal = {index: source for index, source in cache.literal.items() if index < shared}
    for index in range(shared, len(items)):
        item = items[index]
        message = read_message(item, f"messages[{index}]")
        messages.append(message)
        if has_literal_arguments(message, item):
            literal[index] = exact_json.dumps(item)
    # The cached items rather than equal ones: the messages share their strings.
    return ReadCache(cache.items[:shared] + items[shared:], messages, list(range(len(items))), literal)
