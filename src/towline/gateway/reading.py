"""Reading a session's requests: only the new part of a history is converted and hashed.

Harnesses send the whole history with every call. The last request of each conversation is cached as it was read; the next
one shares most of its items and reuses their messages, with tool results in call order and fingerprints.

Responses are also kept by id, so that a client can fetch one again or continue from it without sending the history. The
id is in the record of its turns and survives a restart. A continuation starts from the turn's own history and the reply
as it was sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from towline.common.images import ImagePlaceholder
from towline.conversation import Finish, Message, Request, Tool
from towline.dialects.base import Dialect, DialectCall, ReadCache
from towline.errors import ApiError, BadRequest, ErrorKind
from towline.tokens.continuation.planner import Planner
from towline.tokens.graph.graph import GraphNode
from towline.tokens.graph.tool_results import order_tool_results, ordered_prefix

_PREFIX = "resp_"
RESPONSE_ID, STORED, INSTRUCTED = "answer", "stored", "instructed"
"""Fields of a turn's meta: the response id; whether clients may fetch the response again; whether its history begins with
instructions, which a later request does not inherit."""


class StoredResponses:
    """The responses of one session by id."""

    def __init__(self) -> None:
        self._nodes: dict[str, list[GraphNode]] = {}

    def add(self, node: GraphNode) -> None:
        id = node.meta.get(RESPONSE_ID)
        if id:
            self._nodes.setdefault(id, []).append(node)

    def find(self, id: str) -> list[GraphNode]:
        """The turns of a stored response, by the id that the client got."""
        nodes = self._nodes.get(id.removeprefix(_PREFIX), [])
        if not nodes or not nodes[0].meta.get(STORED) or any(node.finish is Finish.ABORT for node in nodes):
            raise ApiError(ErrorKind.NOT_FOUND, f"Response with id '{id}' not found.")
        return nodes

    def delete(self, id: str) -> None:
        """Make the response unavailable to clients. Its turns stay in the graph."""
        for node in self.find(id):
            node.meta[STORED] = False

    def continued(self, request: Request) -> list[Message]:
        """The whole conversation of a request that names the response it continues."""
        nodes = self._nodes.get(request.previous.removeprefix(_PREFIX))
        if not nodes or nodes[0].reply is None:
            raise BadRequest(
                f"Previous response with id '{_PREFIX}{request.previous}' not found.", param="previous_response_id"
            )
        before = _history(nodes[0])
        lead, rest = _split(request)
        return [*lead, *before, *rest]


def response_meta(request: Request, id: str) -> dict[str, object]:
    """The fields of a turn's meta for its response."""
    meta: dict[str, object] = {RESPONSE_ID: id}
    if request.wire.get("store"):
        meta[STORED] = True
    if request.wire.get("instructions"):
        meta[INSTRUCTED] = True
    return meta


def stored_request(
    nodes: Sequence[GraphNode], tools: tuple[Tool, ...], query: Mapping[str, str] | None = None
) -> Request:
    """A request for writing a stored response. `query` says whether to stream it, and after which event."""
    node, asked = nodes[0], query or {}
    wire: dict[str, Any] = {"store": True}
    after = asked.get("starting_after", "")
    if after:
        if not after.isascii() or not after.isdecimal():
            raise BadRequest("must be the number of an event", param="starting_after")
        wire["after"] = int(after)
    stream = asked.get("stream", "").lower() in ("true", "1")
    return Request(node.meta.get("dialect", ""), node.model, [], tools, stream=stream, wire=wire)


def _split(request: Request) -> tuple[list[Message], list[Message]]:
    """The request's own instructions, and the rest of its messages."""
    messages = request.messages
    count = 1 if request.wire.get("instructions") and messages else 0
    return messages[:count], messages[count:]


def _history(node: GraphNode) -> list[Message]:
    """All messages of a turn, its reply last; without its leading instructions."""
    messages: list[Message] = []
    for turn in node.path():
        messages += turn.new[:-1] if turn.prefill is not None else turn.new
        messages.append(turn.reply_message())
    instructed = node.path()[0].meta.get(INSTRUCTED) and messages and messages[0].role == "system"
    return messages[1:] if instructed else messages


_MAX_CONVERSATIONS = 8
"""Number of conversations per session whose last request is cached."""


@dataclass(slots=True)
class CachedConversation:
    """The last request of one conversation, as read."""

    dialect: str
    known: ReadCache
    messages: list[Message]
    """With tool results in call order."""
    hashes: list[bytes]
    node: GraphNode | None = None
    fresh: list[Message] = field(default_factory=list)
    """The messages that were not in the previous request."""
    images: Mapping[str, ImagePlaceholder] = field(default_factory=dict)
    """By digest, the placeholders of the messages' images in a prompt."""


class RequestReader:
    """Reads the requests of one session."""

    def __init__(self, planner: Planner, responses: StoredResponses, native_ids: dict[str, str]):
        """`native_ids` is filled by the session: by minted call id, the id that the model sampled."""
        self.conversations: list[CachedConversation] = []
        self._planner = planner
        self._responses = responses
        self._native_ids = native_ids

    def read(self, dialect: Dialect, call: DialectCall) -> tuple[Request, CachedConversation]:
        """The neutral request; only its new part is converted and hashed."""
        cached = self._cached(dialect, call)
        known = cached.known if cached is not None else ReadCache()
        request, after = dialect.read(call, known)
        if request.previous:
            added = len(request.messages)
            request.messages = self._responses.continued(request)
            order_tool_results(request.messages, 0, self._native_ids)
            hashes, fresh = self._planner.hashes(request.messages), request.messages[len(request.messages) - added :]
            return request, CachedConversation(dialect.name, ReadCache(), request.messages, hashes, fresh=fresh)
        if cached is None:
            order_tool_results(request.messages, 0, self._native_ids)
            hashes = self._planner.hashes(request.messages)
            return request, CachedConversation(dialect.name, after, request.messages, hashes, fresh=request.messages)
        # A system prompt that changes with every call leaves everything after it unchanged.
        led = int(_another_lead(after.messages, known.messages))
        start = ordered_prefix(after.messages, led + _same(after.messages[led:], known.messages[led:]))
        request.messages[led:start] = cached.messages[led:start]
        order_tool_results(request.messages, start, self._native_ids)
        hashes = self._planner.hashes(request.messages, cached.hashes, 0 if led else start)
        if len(hashes) != len(request.messages) + 1:
            hashes = self._planner.hashes(request.messages)
        fresh = [*request.messages[:led], *request.messages[start:]]
        return request, CachedConversation(dialect.name, after, request.messages, hashes, cached.node, fresh)

    def _cached(self, dialect: Dialect, call: DialectCall) -> CachedConversation | None:
        items = dialect.items(call.body)
        best = None
        for cached in reversed(self.conversations):
            known = cached.known.items
            if cached.dialect != dialect.name or not known or not items or known[0] != items[0]:
                continue
            if len(known) <= len(items) and known[-1] == items[len(known) - 1]:
                return cached
            best = best or cached
        return best

    def remember(self, cached: CachedConversation, previous: GraphNode | None) -> None:
        """Cache this request for the next one of its conversation; `previous` is the turn that it continued."""
        self.conversations = [c for c in self.conversations if c.node is None or c.node is not previous][
            -_MAX_CONVERSATIONS + 1 :
        ]
        self.conversations.append(cached)


def _same(after: list[Message], before: list[Message]) -> int:
    """How many leading messages are the same objects."""
    count = 0
    for mine, theirs in zip(after, before, strict=False):
        if mine is not theirs:
            break
        count += 1
    return count


def _another_lead(after: list[Message], before: list[Message]) -> bool:
    """Whether both begin with a system message, but not the same one."""
    return bool(after and before) and after[0].role == before[0].role == "system" and after[0] is not before[0]
