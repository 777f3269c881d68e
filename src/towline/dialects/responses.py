"""OpenAI's responses.

The items of a request are its instructions, if there are any, and its input items; several items make one assistant
message. A request that repeats a known history keeps the messages that later items cannot extend any more and reads
from there on. `previous_response_id` puts the history of that answer before the input; the gateway does that.
`responses_items`, `responses_parameters` and `responses_replies` hold the shapes; this module puts them together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import orjson

from towline.conversation import Answer, Message, Request
from towline.dialects import responses_parameters as parameters
from towline.dialects.base import Call, Known, Response, Route
from towline.dialects.hints import read_hints
from towline.dialects.openai_errors import JSON_HEADERS, error_response, model_response, models_response
from towline.dialects.reading import (
    as_object,
    missing,
    optional_flag,
    optional_text,
    required_text,
    wrong_type,
    wrong_value,
)
from towline.dialects.responses_items import SILENT, add_item, holds_objects
from towline.dialects.responses_replies import PREFIX, ResponsesStream, whole
from towline.errors import ApiError

_INSTRUCTIONS = "instructions"


class ResponsesDialect:
    """`POST /v1/responses` and the answers kept under their ids."""

    name: ClassVar[str] = "responses"
    routes: ClassVar[tuple[Route, ...]] = (
        Route("POST", "/v1/responses", "generate"),
        Route("POST", "/responses", "generate"),
        Route("GET", "/v1/responses", "upgrade"),
        Route("GET", "/responses", "upgrade"),
        Route("POST", "/v1/responses/input_tokens", "count_tokens"),
        Route("GET", "/v1/responses/{answer}", "stored"),
        Route("DELETE", "/v1/responses/{answer}", "delete_stored"),
        Route("GET", "/v1/responses/{answer}/input_items", "stored_items"),
    )

    def items(self, body: dict[str, Any]) -> list[Any]:
        given = as_object(body, "body").get("input")
        if given is None:
            missing("input")
        if isinstance(given, str):
            given = [given]
        if not isinstance(given, list):
            wrong_type("input", "a string or an array of items", given)
        instructions = optional_text(body, _INSTRUCTIONS)
        return [{_INSTRUCTIONS: instructions}, *given] if instructions else given

    def read(self, call: Call, known: Known) -> tuple[Request, Known]:
        body = call.body
        items = self.items(body)
        previous = optional_text(body, "previous_response_id") or ""
        if not body["input"] and not previous:
            wrong_value("input", "at least one item is needed")
        declared = parameters.read_tools(body, items, known.declared)
        request = Request(
            dialect=self.name,
            model=required_text(body, "model"),
            messages=[],
            tools=declared.tools,
            tool_choice=parameters.read_tool_choice(body),
            sampling=parameters.read_sampling(body),
            stream=bool(optional_flag(body, "stream")),
            template_args=parameters.read_template_args(body),
            hints=read_hints(call.headers),
            previous=previous.removeprefix(PREFIX),
            ignored=parameters.read_ignored(body) + declared.ignored,
            wire=parameters.read_wire(body),
        )
        after = _continue(items, known)
        if not after.messages and not previous:
            wrong_value("input", "no item says anything to the model")
        after.declared = declared
        request.messages = after.messages[:]
        return request, after

    def write(self, request: Request, answer: Answer) -> Response:
        return whole(request, answer)

    def stream(self, request: Request, id: str, created: int, model: str) -> ResponsesStream:
        return ResponsesStream(request, id, created, model)

    def error(self, error: ApiError) -> Response:
        return error_response(error)

    def models(self, names: list[str], created: int) -> Response:
        return models_response(names, created)

    def model(self, name: str, created: int) -> Response:
        return model_response(name, created)

    def count(self, tokens: int) -> Response:
        body = {"object": "response.input_tokens", "input_tokens": tokens}
        return Response(200, orjson.dumps(body), dict(JSON_HEADERS))

    def claims(self, headers: Mapping[str, str]) -> bool:
        return False


def _continue(items: list[Any], known: Known) -> Known:
    """What is known after `items`: messages that nothing can extend as they are, the rest read."""
    shared = known.shared(items)
    kept = known.reusable(shared)
    # A later call of the same turn may still join the assistant message before the last results.
    while kept and known.messages[kept - 1].role == "tool":
        kept -= 1
    if kept and known.messages[kept - 1].role == "assistant":
        kept -= 1
    start = known.starts[kept] if kept < len(known.starts) else shared
    start = min(start, shared)
    messages, starts = known.messages[:kept], known.starts[:kept]
    literal = {index: source for index, source in known.literal.items() if index < start}
    for index in range(start, len(items)):
        item = items[index]
        if isinstance(item, dict) and _INSTRUCTIONS in item and "type" not in item and "role" not in item:
            messages.append(Message("system", item[_INSTRUCTIONS]))
            starts.append(index)
            continue
        offset = 1 if isinstance(items[0], dict) and _INSTRUCTIONS in items[0] else 0
        if isinstance(item, dict) and item.get("type") in SILENT:
            continue
        if add_item(messages, item, f"input[{index - offset}]"):
            starts.append(index)
        if holds_objects(item):
            literal[index] = orjson.dumps(item)
    return Known(known.items[:shared] + items[shared:], messages, starts, literal)
