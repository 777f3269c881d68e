"""Anthropic's messages.

One message of the wire may give several neutral ones (results of tools and text of the user), and assistant messages in
a row give one, so a request that repeats a known history takes the messages of the shared part as they are and reads
only the rest. The `system` field stands apart: some harnesses change it with every call, and that costs nothing but
itself. `messages_items`, `messages_tools`, `messages_parameters` and `messages_replies` hold the shapes; this module
puts them together.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, ClassVar

import orjson

from towline import exact_json
from towline.conversation import Answer, Message, Request
from towline.dialects import messages_parameters as parameters
from towline.dialects.base import Call, Declared, Known, Response, Route
from towline.dialects.hints import read_hints
from towline.dialects.messages_items import (
    holds_values,
    is_assistant,
    joined,
    read_item,
    read_system,
    refers_to_tools,
)
from towline.dialects.messages_replies import (
    JSON_HEADERS,
    MessagesStream,
    error_response,
    model_response,
    models_response,
    whole,
)
from towline.dialects.messages_tools import Definitions, deferred, definitions, read_tools
from towline.dialects.reading import as_list, as_object, missing, optional_flag, required_text, wrong_value
from towline.errors import ApiError, ErrorKind

_LEAD = -1
"""Where the message of the `system` field starts: before the first item."""


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
    told_in_stream: ClassVar[frozenset[ErrorKind]] = frozenset()

    def items(self, body: dict[str, Any]) -> list[Any]:
        messages = as_object(body, "body").get("messages")
        if messages is None:
            missing("messages")
        return as_list(messages, "messages")

    def read(self, call: Call, known: Known) -> tuple[Request, Known]:
        body = call.body
        items = self.items(body)
        parameters.refuse(body)
        declared = read_tools(body, known.declared)
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
        after = _continue(items, body.get("system"), known, declared, definitions(body))
        if not items or not after.messages:
            wrong_value("messages", "at least one message is required")
        # A list of its own: whoever reorders the messages of a request must not reorder what is known.
        request.messages = after.messages[:]
        return request, after

    def write(self, request: Request, answer: Answer) -> Response:
        return whole(request, answer)

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


def _continue(items: list[Any], system: Any, known: Known, declared: Declared, tools: Definitions) -> Known:
    """What is known after `system` and `items`: the messages of the shared part as they are, the rest read."""
    shared = _intact(items, known, declared)
    led = known.starts[:1] == [_LEAD]
    kept = bisect_left(known.starts, shared)
    messages, starts = known.messages[led:kept], known.starts[led:kept]
    literal = {index: source for index, source in known.literal.items() if index < shared}
    if text := "" if system is None else read_system(system, "system", tools):
        same = led and known.messages[0].text == text
        messages.insert(0, known.messages[0] if same else Message("system", text))
        starts.insert(0, _LEAD)
    for index in range(shared, len(items)):
        item = items[index]
        read = read_item(item, f"messages[{index}]", tools)
        if is_assistant(item) and index and is_assistant(items[index - 1]) and messages[-1].role == "assistant":
            messages[-1] = joined(messages[-1], read.pop(0))
        messages += read
        starts += [index] * len(read)
        if holds_values(item):
            literal[index] = exact_json.dumps(item)
    # The known items rather than their equals: their strings are those that the messages hold.
    return Known(known.items[:shared] + items[shared:], messages, starts, literal, declared)


def _intact(items: list[Any], known: Known, declared: Declared) -> int:
    """How many leading items give the messages that they gave before."""
    shared = known.shared(items)
    if declared is not known.declared:
        shared = next((index for index in range(shared) if refers_to_tools(items[index])), shared)
    if any(map(is_assistant, (*items[shared : shared + 1], *known.items[shared : shared + 1]))):
        # A run of assistant messages is one, and it goes on or went on differently.
        while shared and is_assistant(items[shared - 1]):
            shared -= 1
    return shared
