"""The dialect interface: a provider's JSON to one neutral request, and one neutral answer to the provider's JSON.

Dialects are pure: no sockets, no clocks, no tokens. A dialect is an object with the methods below; the gateway finds it by
its routes. `ReadCache` makes reading incremental: a request repeats the whole history, and only items that are new since
the last request are converted; unchanged messages are the same objects as last time, cached fingerprints included.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

from towline.common import exact_json
from towline.conversation import Answer, Message, Request, Tool
from towline.errors import ApiError, ErrorKind


@dataclass(frozen=True, slots=True)
class CachedTools:
    """The tools of an earlier request. Equal declarations give the same tuple object, so that its hash can be cached."""

    source: bytes = b""
    """The declarations as sent, as JSON."""
    tools: tuple[Tool, ...] = ()
    ignored: tuple[str, ...] = ()
    """Declarations that were left out, for `Request.ignored`."""

    def unchanged(self, source: bytes) -> bool:
        """Whether the declarations of a request, as JSON, are the same as these."""
        return bool(source) and source == self.source

    def without_tools(self) -> CachedTools:
        """For a request that declares no tools: itself if it has none either."""
        return self if not self.source else CachedTools()


@dataclass(slots=True)
class ReadCache:
    """The items and messages of an earlier request of the same session.

    `starts[i]` is the index of the first item that message `i` was read from.
    """

    items: list[Any] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    literal: dict[int, bytes] = field(default_factory=dict)
    """By ascending index, the JSON of items that are compared by it (with arguments that are an object, not a string).

    Python's `==` does not tell `True`, `1` and `1.0` apart.
    """
    declared: CachedTools = field(default_factory=CachedTools)

    def shared(self, items: list[Any]) -> int:
        """How many leading items of `items` equal the cached ones."""
        count = self._equal(items)
        for index, source in self.literal.items():
            if index >= count:
                break
            if exact_json.dumps(items[index]) != source:
                return index
        return count

    def _equal(self, items: list[Any]) -> int:
        """The same by `==` alone: one C-level comparison if all cached items are repeated."""
        ours = self.items
        if len(items) >= len(ours) and items[: len(ours)] == ours:
            return len(ours)
        count = 0
        for mine, theirs in zip(ours, items, strict=False):
            if mine != theirs:
                break
            count += 1
        return count

    def reusable(self, shared: int) -> int:
        """How many leading messages come from the first `shared` items alone, so that no later item extends them."""
        return max(0, bisect_left(self.starts, shared) - 1)


@dataclass(slots=True)
class DialectCall:
    """A decoded HTTP call to a dialect."""

    operation: str
    """The operation that the path names (see `Route`)."""
    body: dict[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)
    """Header names in lower case."""
    query: Mapping[str, str] = field(default_factory=dict)
    path: Mapping[str, str] = field(default_factory=dict)
    """Values of path parameters (`model` in Google's paths)."""


@dataclass(slots=True)
class Response:
    """A complete HTTP response."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


class ReplyStream(Protocol):
    """Writes one streamed response, as bytes to send.

    Order: `start` once, `ping` any number of times, then `finish` or `error` once.
    """

    @property
    def content_type(self) -> str:
        """The content type of the response: server-sent events, or what the client asked for."""
        ...

    def start(self) -> bytes: ...

    def ping(self) -> bytes: ...

    def finish(self, answer: Answer) -> Iterable[bytes]: ...

    def error(self, error: ApiError) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Route:
    """A path of a dialect (`{name}` is one segment, `{name:path}` the rest) and the operation it names.

    Operations: `generate`, and `generate_stream` where the path asks for a stream; `count_tokens`; `models` and `model`;
    `probe` (an empty 200); `upgrade` (426, since there is no WebSocket); `stored` and `delete_stored` for answers that are
    stored under the `{answer}` in the path.
    """

    method: str
    path: str
    operation: str


class Dialect(Protocol):
    """One provider's wire API."""

    name: ClassVar[str]
    routes: ClassVar[tuple[Route, ...]]
    errors_in_stream: ClassVar[frozenset[ErrorKind]]
    """Errors that the provider's clients recognise only inside the stream, if they asked for one."""

    def items(self, body: dict[str, Any]) -> list[Any]:
        """The body's list of history items, to compare with the cache; raises `BadRequest` if it is not a list."""
        ...

    def read(self, call: DialectCall, cache: ReadCache) -> tuple[Request, ReadCache]:
        """The neutral request and the updated cache. Raises `BadRequest` that names the invalid field."""
        ...

    def write(self, request: Request, answer: Answer) -> Response:
        """The complete response."""
        ...

    def stream(self, request: Request, id: str, created: int, model: str) -> ReplyStream:
        """A writer for the streamed response."""
        ...

    def error(self, error: ApiError) -> Response:
        """An error with the provider's own body, status and headers."""
        ...

    def models(self, names: list[str], created: int) -> Response:
        """The list of models in the provider's format."""
        ...

    def model(self, name: str, created: int) -> Response:
        """One model of that list."""
        ...

    def count(self, tokens: int) -> Response:
        """The response to `count_tokens`."""
        ...

    def claims(self, headers: Mapping[str, str]) -> bool:
        """Whether the headers are this provider's: decides paths that several dialects share, such as `/v1/models`."""
        ...


@runtime_checkable
class SupportsReferences(Protocol):
    """A dialect whose requests may reference items of earlier answers instead of sending them."""

    def output(self, request: Request, answer: Answer) -> list[Any]:
        """The items of an answer as they were written."""
        ...

    def with_references(self, body: dict[str, Any], output: Callable[[str], Sequence[Any] | None]) -> dict[str, Any]:
        """The body with its references resolved; `output` gives the items of an answer by id."""
        ...
