"""OpenAI's responses.

The items of a request are its instructions, if there are any, and its input items; the items of one turn are one
assistant message. A request that repeats a known history goes on from the messages that are there and reads only what is
new. `previous_response_id` puts the history of that answer before the input; the gateway does that. `responses_items`,
`responses_grouping`, `responses_tools`, `responses_parameters` and `responses_replies` hold the shapes; this module puts
them together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import orjson

from towline import exact_json
from towline.conversation import Answer, Message, Request, Tool
from towline.dialects import responses_parameters as parameters
from towline.dialects.base import Call, Known, Response, Route
from towline.dialects.hints import read_hints
from towline.dialects.openai_errors import JSON_HEADERS, error_response, model_response, models_response
from towline.dialects.reading import (
    as_object,
    optional_flag,
    optional_text,
    required_text,
    wrong_type,
    wrong_value,
)
from towline.dialects.responses_grouping import Grouping, written
from towline.dialects.responses_items import (
    ADDITIONAL_TOOLS,
    CONFIGURATION,
    REFERENCE,
    TOOL_SEARCH_OUTPUT,
    is_literal,
    read_item,
    type_of,
)
from towline.dialects.responses_replies import PREFIX, ResponsesStream, failure, output, whole
from towline.dialects.responses_tools import found_tools, read_tool_choice, read_tools
from towline.dialects.sse import dump
from towline.errors import ApiError, ErrorKind

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
        Route("POST", "/responses/input_tokens", "count_tokens"),
        Route("GET", "/v1/responses/{answer}", "stored"),
        Route("GET", "/responses/{answer}", "stored"),
        Route("DELETE", "/v1/responses/{answer}", "delete_stored"),
        Route("DELETE", "/responses/{answer}", "delete_stored"),
    )
    told_in_stream: ClassVar[frozenset[ErrorKind]] = frozenset((ErrorKind.CONTEXT_LENGTH,))

    def items(self, body: dict[str, Any]) -> list[Any]:
        """The input items, behind the instructions as a pair, which no JSON is equal to."""
        given = as_object(body, "body").get("input")
        if given is None:
            given = []
        if isinstance(given, str):
            # The item that a client sends for it once there is more than one.
            given = [{"role": "user", "content": given}]
        if not isinstance(given, list):
            wrong_type("input", "a string or an array of items", given)
        instructions = optional_text(body, _INSTRUCTIONS)
        return [(_INSTRUCTIONS, instructions), *given] if instructions else given

    def read(self, call: Call, known: Known) -> tuple[Request, Known]:
        body = call.body
        items = self.items(body)
        previous = optional_text(body, "previous_response_id") or ""
        counting = call.operation == "count_tokens"
        model = optional_text(body, "model") or "" if counting else required_text(body, "model")
        after = _continue(items, known)
        if not after.messages and not previous:
            wrong_value("input", "at least one item that says something to the model is needed")
        after.declared = declared = read_tools(body, list(_special(after, ADDITIONAL_TOOLS)), known.declared)
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
        """The body with the items that it refers to in place of the references.

        `output` gives the items of an answer by the answer's id, as they were written. A reference to anything else stays
        as it is, and is refused when it is read.
        """
        given = body.get("input")
        if not isinstance(given, list) or not any(_is_reference(item) for item in given):
            return body
        return {**body, "input": [_referred(item, output) if _is_reference(item) else item for item in given]}

    def output(self, request: Request, answer: Answer) -> list[Any]:
        return output(request, answer)

    def write(self, request: Request, answer: Answer) -> Response:
        return whole(request, answer)

    def stream(self, request: Request, id: str, created: int, model: str) -> ResponsesStream:
        return ResponsesStream(request, id, created, model)

    def error(self, error: ApiError) -> Response:
        response = error_response(error)
        response.body = dump({"error": failure(error)})
        return response

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
    """What is known after `items`: the messages that are there, and what the rest adds to them."""
    shared = known.shared(items)
    kept, start = _untouched(known, shared)
    grouping = Grouping(known.messages[:kept], known.starts[:kept])
    literal = {index: source for index, source in known.literal.items() if index < start}
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
    return Known(known.items[:shared] + items[shared:], grouping.messages(), grouping.starts, literal)


def _untouched(known: Known, shared: int) -> tuple[int, int]:
    """How many known messages are to stay, and the item to read on from, if the first `shared` items are the same."""
    if shared == len(known.items):
        return len(known.messages), shared
    kept = known.reusable(shared)
    # A call that is not there any more may have joined the turn before the last results.
    while kept and known.messages[kept - 1].role == "tool":
        kept -= 1
    if kept and known.messages[kept - 1].role == "assistant":
        kept -= 1
    return kept, known.starts[kept] if kept else 0


def _special(known: Known, kind: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The items of a type whose values count as JSON, with their paths."""
    for index in known.literal:
        if known.items[index].get("type") == kind:
            yield _where(known.items, index), known.items[index]


def _found(known: Known) -> tuple[Tool, ...]:
    """The tools that searches found."""
    return tuple(tool for where, item in _special(known, TOOL_SEARCH_OUTPUT) for tool in found_tools(item, where))


def _where(items: Sequence[Any], index: int) -> str:
    return f"input[{index - isinstance(items[0], tuple)}]"


def _is_reference(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("id"), str) and type_of(item) == REFERENCE


def _referred(item: Mapping[str, Any], output: Callable[[str], Sequence[Any] | None]) -> Any:
    answer, place = written(item["id"]) or ("", 0)
    items = output(answer) if answer else None
    return items[place] if items is not None and place < len(items) else item
