"""The dialect interface: a provider's JSON to one neutral request, one neutral answer to the provider's JSON.

Dialects are pure: no sockets, no clocks, no tokens. A dialect is an object with the methods below; the gateway finds it
by the paths it names. `Known` makes reading incremental: a request repeats the whole history, and only the part that is
new since the last request is converted; the unchanged messages are the very objects of last time, fingerprints and all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

from towline import exact_json
from towline.conversation import Answer, Message, Request, Tool
from towline.errors import ApiError, ErrorKind


@dataclass(frozen=True, slots=True)
class Declared:
    """The tools of an earlier request. The same declarations give the very same tuple, so that a hash can be cached."""

    source: bytes = b""
    """The declarations as sent, as JSON."""
    tools: tuple[Tool, ...] = ()
    ignored: tuple[str, ...] = ()
    """Declarations that were left out, for `Request.ignored`."""


@dataclass(slots=True)
class Known:
    """The items and messages of an earlier request of the same session.

    `starts[i]` is the index of the first item that message `i` was read from.
    """

    items: list[Any] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    literal: dict[int, bytes] = field(default_factory=dict)
    """By ascending index, the JSON of items whose values count as such (arguments that are an object, not a string).

    Python's `==` does not tell `True`, `1` and `1.0` apart; these items are compared by their JSON as well.
    """
    declared: Declared = field(default_factory=Declared)

    def shared(self, items: list[Any]) -> int:
        """How many leading items of `items` equal ours."""
        count = self._equal(items)
        for index, source in self.literal.items():
            if index >= count:
                break
            if exact_json.dumps(items[index]) != source:
                return index
        return count

    def _equal(self, items: list[Any]) -> int:
        """The same by `==` alone: one C-level comparison when all of ours are repeated."""
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
        """How many leading messages lie wholly inside the first `shared` items, so that no later item extends them."""
        return max(0, bisect_left(self.starts, shared) - 1)


@dataclass(slots=True)
class Call:
    """An HTTP call for a dialect, already decoded."""

    operation: str
    """Which of the dialect's operations the path named (see `Route`)."""
    body: dict[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)
    """Header names in lower case."""
    query: Mapping[str, str] = field(default_factory=dict)
    path: Mapping[str, str] = field(default_factory=dict)
    """Values of the path's placeholders (`model` in Google's paths)."""


@dataclass(slots=True)
class Response:
    """A complete HTTP response."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


class Stream(Protocol):
    """Writes one streamed response. Each piece is bytes that go out as they are.

    Order: `start` once, `ping` any number of times, then `finish` or `error` once.
    """

    @property
    def content_type(self) -> str:
        """The header of the response: server-sent events, or what else the client asked for."""
        ...

    def start(self) -> bytes: ...

    def ping(self) -> bytes: ...

    def finish(self, answer: Answer) -> Iterable[bytes]: ...

    def error(self, error: ApiError) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Route:
    """A path of a dialect (`{name}` is one segment, `{name:path}` any rest) and the operation it names.

    Operations: `generate`, and `generate_stream` where it is the path that asks for a stream; `count_tokens`; `models` and
    `model`; `probe` (an empty 200); `upgrade` (426, since there is no WebSocket); `stored` and `delete_stored` for answers
    that are kept under the `{answer}` in the path.
    """

    method: str
    path: str
    operation: str


class Dialect(Protocol):
    """One provider's wire API."""

    name: ClassVar[str]
    routes: ClassVar[tuple[Route, ...]]
    told_in_stream: ClassVar[frozenset[ErrorKind]]
    """Errors that the provider's clients recognise only inside a stream, if they asked for one."""

    def items(self, body: dict[str, Any]) -> list[Any]:
        """The body's list of history items, for finding what is known; raises `BadRequest` if it is not a list."""
        ...

    def read(self, call: Call, known: Known) -> tuple[Request, Known]:
        """The neutral request and what is known after it. Raises `BadRequest` that names the field at fault."""
        ...

    def write(self, request: Request, answer: Answer) -> Response:
        """The whole answer at once."""
        ...

    def stream(self, request: Request, id: str, created: int, model: str) -> Stream:
        """A writer for the answer as server-sent events."""
        ...

    def error(self, error: ApiError) -> Response:
        """An error in the provider's own shape, status and headers."""
        ...

    def models(self, names: list[str], created: int) -> Response:
        """The list of models in the provider's shape."""
        ...

    def model(self, name: str, created: int) -> Response:
        """One model of that list."""
        ...

    def count(self, tokens: int) -> Response:
        """The answer to `count_tokens`."""
        ...

    def claims(self, headers: Mapping[str, str]) -> bool:
        """Whether the headers are this provider's: settles paths that several dialects name, such as `/v1/models`."""
        ...


@runtime_checkable
class Referring(Protocol):
    """A dialect whose requests may name items of earlier answers instead of sending them."""

    def output(self, request: Request, answer: Answer) -> list[Any]:
        """The items of an answer, as they were written."""
        ...

    def with_references(self, body: dict[str, Any], output: Callable[[str], Sequence[Any] | None]) -> dict[str, Any]:
        """The body with the items that it refers to; `output` gives those of an answer by its id."""
        ...
