"""OpenAI's responses.

The items of a request are its instructions, if there are any, and its input items; the items of one turn are one assistant
message. A request that repeats a cached history keeps the messages and reads only what is new. `previous_response_id` puts
the history of that answer before the input; the gateway does that. `items` reads items and groups them to messages, `tools`
reads declarations, `parameters` reads the other fields, `replies` writes answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import orjson

from towline.common import exact_json
from towline.conversation import Answer, Message, Request, Tool
from towline.dialects import wire
from towline.dialects.base import DialectCall, ReadCache, Response, Route
from towline.dialects.chat.replies import error_response, model_response, models_response
from towline.dialects.hints import read_hints
from towline.dialects.reading import (
    as_object,
    optional_flag,
    optional_text,
    required_text,
    wrong_type,
    wrong_value,
)
from towline.dialects.responses import parameters
from towline.dialects.responses.items import (
    ADDITIONAL_TOOLS,
    CONFIGURATION,
    REFERENCE,
    TOOL_SEARCH_OUTPUT,
    TurnGrouping,
    is_literal,
    parse_item_id,
    read_item,
    type_of,
)
from towline.dialects.responses.replies import PREFIX, ResponsesStream, failure, full_response, output
from towline.dialects.responses.tools import found_tools, read_tool_choice, read_tools
from towline.errors import ApiError, ErrorKind

_INSTRUCTIONS = "instructions"


class ResponsesDialect:
    """`POST /v1/responses` and the answers stored under their ids."""

    name: ClassVar[str] = "responses"
    routes: ClassVar[tuple[Route, ...]] = (
        Route("POST", "/v1/responses", "generate"),
        Route("POST", "/responses", "generate"),
        Route("GET", "/v1/responses", "upgrade"),
        Route("GET", "/responses", "upgrade"),
        Route("POST", "/v1/responses/input_tokens", "count_tokens"),
        Route("POST", "/responses/input_tokens", "count_tokens"),
        Route("GET", "/v1/responses/{answer}", "stored"),
        Route("GET", "/responses/{answer}", "stored"),
        Route("DELETE", "/v1/responses/{answer}", "delete_stored"),
        Route("DELETE", "/responses/{answer}", "delete_stored"),
    )
    errors_in_stream: ClassVar[frozenset[ErrorKind]] = frozenset((ErrorKind.CONTEXT_LENGTH,))

    def items(self, body: dict[str, Any]) -> list[Any]:
        """The input items, after the instructions as a tuple, which no JSON value equals."""
        given = as_object(body, "body").get("input")
        if given is None:
            given = []
        if isinstance(given, str):
            # The item that a client sends for it once there are several.
            given = [{"role": "user", "content": given}]
        if not isinstance(given, list):
            wrong_type("input", "a string or an array of items", given)
        instructions = optional_text(body, _INSTRUCTIONS)
        return [(_INSTRUCTIONS, instructions), *given] if instructions else given

    def read(self, call: DialectCall, cache: ReadCache) -> tuple[Request, ReadCache]:
        body = call.body
        items = self.items(body)
        previous = optional_text(body, "previous_response_id") or ""
        counting = call.operation == "count_tokens"
        model = optional_text(body, "model") or "" if counting else required_text(body, "model")
        after = _updated_cache(items, cache)
        if not after.messages and not previous:
            wrong_value("input", "at least one item with content for the model is required")
        after.declared = declared = read_tools(body, list(_special(after, ADDITIONAL_TOOLS)), cache.declared)
        wire = parameters.read_wire(body)
        updates = tuple(f"{where}:{CONFIGURATION}" for where, _ in _special(after, CONFIGURATION))
        request = Request(
            dialect=self.name,
            model=model,
            messages=after.messages[:],
            tools=declared.tools,
            shown=_found(after),
            tool_choice=read_tool_choice(body, declared),
            sampling=parameters.read_sampling(body),
            stream=bool(optional_flag(body, "stream")),
            template_args=parameters.read_template_args(body),
            hints=read_hints(call.headers),
            previous=previous.removeprefix(PREFIX),
            ignored=parameters.read_ignored(body) + declared.ignored + updates,
            wire=wire,
        )
        return request, after

    def with_references(self, body: dict[str, Any], output: Callable[[str], Sequence[Any] | None]) -> dict[str, Any]:
        """The body with referenced items in place of the references.

        `output` gives the items of an answer by id, as they were written. A reference to anything else stays as it is and
        is refused when it is read.
        """
        given = body.get("input")
        if not isinstance(given, list) or not any(_is_reference(item) for item in given):
            return body
        return {**body, "input": [_referred(item, output) if _is_reference(item) else item for item in given]}

    def output(self, request: Request, answer: Answer) -> list[Any]:
        return output(request, answer)

    def write(self, request: Request, answer: Answer) -> Response:
        return full_response(request, answer)

    def stream(self, request: Request, id: str, created: int, model: str) -> ResponsesStream:
        return ResponsesStream(request, id, created, model)

    def error(self, error: ApiError) -> Response:
        response = error_response(error)
        response.body = wire.dump({"error": failure(error)})
        return response

    def models(self, names: list[str], created: int) -> Response:
        return models_response(names, created)

    def model(self, name: str, created: int) -> Response:
        return model_response(name, created)

    def count(self, tokens: int) -> Response:
        body = {"object": "response.input_tokens", "input_tokens": tokens}
        return Response(200, orjson.dumps(body), dict(wire.JSON_HEADERS))

    def claims(self, headers: Mapping[str, str]) -> bool:
        return False


def _updated_cache(items: list[Any], cache: ReadCache) -> ReadCache:
    """The cache after `items`: the messages of the shared part, and what the rest adds to them."""
    shared = cache.shared(items)
    kept, start = _untouched(cache, shared)
    grouping = TurnGrouping(cache.messages[:kept], cache.starts[:kept])
    literal = {index: source for index, source in cache.literal.items() if index < start}
    for index in range(start, len(items)):
        item = items[index]
        if isinstance(item, tuple):
            grouping.add(Message("system", item[1]), items, index)
            continue
        message = read_item(item, _where(items, index))
        if message is not None:
            grouping.add(message, items, index)
        if is_literal(item):
            literal[index] = exact_json.dumps(item)
    return ReadCache(cache.items[:shared] + items[shared:], grouping.messages(), grouping.starts, literal)


def _untouched(cache: ReadCache, shared: int) -> tuple[int, int]:
    """How many cached messages stay, and the first item to read, if the first `shared` items are the same."""
    if shared == len(cache.items):
        return len(cache.messages), shared
    kept = cache.reusable(shared)
    # A call that was removed may have been grouped into the turn before the last results.
    while kept and cache.messages[kept - 1].role == "tool":
        kept -= 1
    if kept and cache.messages[kept - 1].role == "assistant":
        kept -= 1
    return kept, cache.starts[kept] if kept else 0


def _special(cache: ReadCache, kind: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The items of a type that is compared by its JSON, with their paths."""
    for index in cache.literal:
        if cache.items[index].get("type") == kind:
            yield _where(cache.items, index), cache.items[index]


def _found(cache: ReadCache) -> tuple[Tool, ...]:
    """The tools found by searches."""
    return tuple(tool for where, item in _special(cache, TOOL_SEARCH_OUTPUT) for tool in found_tools(item, where))


def _where(items: Sequence[Any], index: int) -> str:
    return f"input[{index - isinstance(items[0], tuple)}]"


def _is_reference(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("id"), str) and type_of(item) == REFERENCE


def _referred(item: Mapping[str, Any], output: Callable[[str], Sequence[Any] | None]) -> Any:
    answer, place = parse_item_id(item["id"]) or ("", 0)
    items = output(answer) if answer else None
    return items[place] if items is not None and place < len(items) else item
