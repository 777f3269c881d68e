"""Answers by their ids: what a client may ask for again, or go on from without sending the history.

An answer's id is in the record of its turns, so it is known after a restart too. What goes on from an answer is the
history of its turn, as it was, with the reply as it was sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from towline.conversation import Finish, Message, Request, Tool
from towline.errors import ApiError, BadRequest, ErrorKind
from towline.tokens.graph import Node

_PREFIX = "resp_"
ANSWER, STORED, INSTRUCTED = "answer", "stored", "instructed"
"""Fields of a turn's meta: the answer's id; whether a client may ask for it again; whether its history begins with
instructions, which a later request does not inherit."""


class Answers:
    """The answers of one session."""

    def __init__(self) -> None:
        self._nodes: dict[str, list[Node]] = {}

    def add(self, node: Node) -> None:
        id = node.meta.get(ANSWER)
        if id:
            self._nodes.setdefault(id, []).append(node)

    def find(self, id: str) -> list[Node]:
        """The turns of a stored answer, by the id that the client was given."""
        nodes = self._nodes.get(id.removeprefix(_PREFIX), [])
        if not nodes or not nodes[0].meta.get(STORED) or any(node.finish is Finish.ABORT for node in nodes):
            raise ApiError(ErrorKind.NOT_FOUND, f"Response with id '{id}' not found.")
        return nodes

    def forget(self, id: str) -> None:
        """The client wants it no more. Its turns stay what they are."""
        for node in self.find(id):
            node.meta[STORED] = False

    def go_on(self, request: Request) -> list[Message]:
        """The whole conversation of a request that names the answer it goes on from."""
        nodes = self._nodes.get(request.previous.removeprefix(_PREFIX))
        if not nodes or nodes[0].reply is None:
            raise BadRequest(
                f"Previous response with id '{_PREFIX}{request.previous}' not found.", param="previous_response_id"
            )
        before = _history(nodes[0])
        lead, rest = _split(request)
        return [*lead, *before, *rest]


def meta_of(request: Request, id: str) -> dict[str, object]:
    """What a turn's meta says of its answer."""
    meta: dict[str, object] = {ANSWER: id}
    if request.wire.get("store"):
        meta[STORED] = True
    if request.wire.get("instructions"):
        meta[INSTRUCTED] = True
    return meta


def as_request(nodes: Sequence[Node], tools: tuple[Tool, ...], query: Mapping[str, str] | None = None) -> Request:
    """A request to write a stored answer for. `query` says whether it is to be streamed, and from behind which event."""
    node, asked = nodes[0], query or {}
    wire: dict[str, Any] = {"store": True}
    after = asked.get("starting_after", "")
    if after:
        if not after.isascii() or not after.isdecimal():
            raise BadRequest("expected the number of an event", param="starting_after")
        wire["after"] = int(after)
    stream = asked.get("stream", "").lower() in ("true", "1")
    return Request(node.meta.get("dialect", ""), node.model, [], tools, stream=stream, wire=wire)


def _split(request: Request) -> tuple[list[Message], list[Message]]:
    """The request's own instructions, and what it adds."""
    messages = request.messages
    count = 1 if request.wire.get("instructions") and messages else 0
    return messages[:count], messages[count:]


def _history(node: Node) -> list[Message]:
    """All messages of a turn, its reply last; without the instructions that it began with."""
    messages: list[Message] = []
    for turn in node.path():
        messages += turn.new[:-1] if turn.prefill is not None else turn.new
        messages.append(turn.reply_message())
    instructed = node.path()[0].meta.get(INSTRUCTED) and messages and messages[0].role == "system"
    return messages[1:] if instructed else messages
