"""Reading a session's requests: a history that is sent whole on every call is converted and hashed where it is new.

The last request of every conversation is kept, as read. The next one shares most of its items: their messages are taken as
they are, results in call order and fingerprints included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from towline.conversation import Message, Request
from towline.dialects.base import Call, Dialect, Known
from towline.gateway.answers import Answers
from towline.images import Placeholder
from towline.tokens.continuation import Planner
from towline.tokens.graph import Node
from towline.tokens.settle import settle, settled_prefix

_THREADS = 8
"""Conversations of a session whose last request is kept, so that the next is read incrementally."""


@dataclass(slots=True)
class Thread:
    """The last request of one conversation, as read."""

    dialect: str
    known: Known
    messages: list[Message]
    """Settled: results in call order."""
    hashes: list[bytes]
    node: Node | None = None
    fresh: list[Message] = field(default_factory=list)
    """The messages that were not in the request before."""
    images: Mapping[str, Placeholder] = field(default_factory=dict)
    """What the engine puts into a prompt for the images of the messages, by digest."""


class Reader:
    """Reads the requests of one session."""

    def __init__(self, planner: Planner, answers: Answers, native: dict[str, str]):
        """`native` is filled by the session: by minted call id, the one that the model sampled."""
        self.threads: list[Thread] = []
        self._planner = planner
        self._answers = answers
        self._native = native

    def read(self, dialect: Dialect, call: Call) -> tuple[Request, Thread]:
        """The neutral request, converted and hashed only where it is new."""
        thread = self._thread_of(dialect, call)
        known = thread.known if thread is not None else Known()
        request, after = dialect.read(call, known)
        if request.previous:
            added = len(request.messages)
            request.messages = self._answers.go_on(request)
            settle(request.messages, 0, self._native)
            hashes, fresh = self._planner.hashes(request.messages), request.messages[len(request.messages) - added :]
            return request, Thread(dialect.name, Known(), request.messages, hashes, fresh=fresh)
        if thread is None:
            settle(request.messages, 0, self._native)
            hashes = self._planner.hashes(request.messages)
            return request, Thread(dialect.name, after, request.messages, hashes, fresh=request.messages)
        # A system prompt that is another on every call leaves all that follows it as it was.
        led = int(_another_lead(after.messages, known.messages))
        start = settled_prefix(after.messages, led + _same(after.messages[led:], known.messages[led:]))
        request.messages[led:start] = thread.messages[led:start]
        settle(request.messages, start, self._native)
        hashes = self._planner.hashes(request.messages, thread.hashes, 0 if led else start)
        if len(hashes) != len(request.messages) + 1:
            hashes = self._planner.hashes(request.messages)
        fresh = [*request.messages[:led], *request.messages[start:]]
        return request, Thread(dialect.name, after, request.messages, hashes, thread.node, fresh)

    def _thread_of(self, dialect: Dialect, call: Call) -> Thread | None:
        items = dialect.items(call.body)
        best = None
        for thread in reversed(self.threads):
            known = thread.known.items
            if thread.dialect != dialect.name or not known or not items or known[0] != items[0]:
                continue
            if len(known) <= len(items) and known[-1] == items[len(known) - 1]:
                return thread
            best = best or thread
        return best

    def remember(self, thread: Thread, previous: Node | None) -> None:
        """Read the next request of this conversation against this one; `previous` is the turn that it went on from."""
        self.threads = [t for t in self.threads if t.node is None or t.node is not previous][-_THREADS + 1 :]
        self.threads.append(thread)


def _same(after: list[Message], before: list[Message]) -> int:
    """How many leading messages are the very same objects."""
    count = 0
    for mine, theirs in zip(after, before, strict=False):
        if mine is not theirs:
            break
        count += 1
    return count


def _another_lead(after: list[Message], before: list[Message]) -> bool:
    """Whether both begin with a system message, and not with the same."""
    return bool(after and before) and after[0].role == before[0].role == "system" and after[0] is not before[0]
