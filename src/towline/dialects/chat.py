"""OpenAI's chat completions.

Messages are one to one with the items of the wire, so a request that repeats a known history reuses the very `Message`
objects of last time and reads only what is new; old items are compared, never read or checked again. `chat_messages`,
`chat_parameters` and `chat_replies` hold the shapes; this module puts them together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import orjson

from towline import exact_json
from towline.conversation import Answer, Request
from towline.dialects import chat_parameters as parameters
from towline.dialects.base import Call, Known, Response, Route
from towline.dialects.chat_messages import has_literal_arguments, read_message
from towline.dialects.chat_replies import ChatStream, whole
from towline.dialects.hints import read_hints
from towline.dialects.openai_errors import error_response, model_response, models_response
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
    told_in_stream: ClassVar[frozenset[ErrorKind]] = frozenset()

    def items(self, body: dict[str, Any]) -> list[Any]:
        messages = as_object(body, "body").get("messages")
        if messages is None:
            missing("messages")
        return as_list(messages, "messages")

    def read(self, call: Call, known: Known) -> tuple[Request, Known]:
        body = call.body
        items = self.items(body)
        if not items:
            wrong_value("messages", "at least one message is needed")
        model = required_text(body, "model")
        declared = parameters.read_tools(body, known.declared)
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
        after = _continue(items, known)
        after.declared = declared
        # A list of its own: whoever reorders the messages of a request must not reorder what is known.
        request.messages = after.messages[:]
        return request, after

    def write(self, request: Request, answer: Answer) -> Response:
        return whole(request, answer)

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
        """No path of this dialect counts tokens; a client that asks for it all the same gets the number."""
        return Response(200, orjson.dumps({"total_tokens": tokens}))

    def claims(self, headers: Mapping[str, str]) -> bool:
        return "authorization" in headers


def _continue(items: list[Any], known: Known) -> Known:
    """What is known after `items`: the shared part as it is, the rest read."""
    shared = known.shared(items)
    messages = known.messages[:shared]
    literal = {index: source for index, source in known.literal.items() if index < shared}
    for index in range(shared, len(items)):
        item = items[index]
        message = read_message(item, f"messages[{index}]")
        messages.append(message)
        if has_literal_arguments(message, item):
            literal[index] = exact_json.dumps(item)
    # The known items rather than their equals: their strings are those that the messages hold.
    return Known(known.items[:shared] + items[shared:], messages, list(range(len(items))), literal)
