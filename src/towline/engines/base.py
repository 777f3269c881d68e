"""The engine interface: token ids in; token ids, logprobs, versions and a finish reason out.

Contract of every engine:
- `sample` never re-encodes: the prompt is the ids it was given, and `prompt_tokens` echoes how many the model saw.
- `logprobs[i]` is the natural-log probability of `ids[i]` under the distribution that it was sampled from, in float32.
- `versions[i]` is the policy version whose weights produced `ids[i]`. Key-value caches never cross versions.
- A stop id that ended the turn is the last of `ids`, with its logprob. A stop string is found in the decoded text; the
  token that completed it is kept.
- While paused with `abort`, or when an update interrupts a turn, `sample` returns what it has with `Finish.ABORT`. The
  caller goes on with `prompt + ids` once `ready()` returns.
- Tokens are told as they arrive, by `SampleRequest.beat`; time before the model is asked is marked by `waiting`. An engine
  that cannot see tokens before the turn's end says so (`blind`), and limits the whole turn by a timeout of its own.
- An engine that cannot be reached any more raises `EngineGone`, with the tokens that had arrived. Any other failure is
  the turn's own, and would be the same on another engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from towline.arrays import Floats, Ids
from towline.conversation import Finish, Media, Reply, Request
from towline.engines.holds import Holds
from towline.engines.pulse import Pulse
from towline.errors import EngineError
from towline.images import Placed, Placeholder

__all__ = [
    "MOVED",
    "Capture",
    "ContextExceeded",
    "Engine",
    "EngineGone",
    "EngineInfo",
    "Floats",
    "Ids",
    "Load",
    "Loaded",
    "PauseMode",
    "Probed",
    "Reachable",
    "Sample",
    "SampleRequest",
    "Seeing",
    "TurnAtFault",
    "Watched",
]

MOVED = "moved"
"""The flag of a turn that an engine left unfinished and another one went on with."""


class Capture(StrEnum):
    """How much of a turn an engine can report."""

    TOKENS = "tokens"
    """Ids in, ids and logprobs out: `exact` holds."""
    LOGPROBS = "logprobs"
    TEXT = "text"


@dataclass(slots=True)
class SampleRequest:
    """One turn to sample."""

    prompt: Ids
    max_tokens: int
    temperature: float = 1.0
    """0 is greedy; its logprobs are those of the distribution at temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None
    forced: Ids | None = None
    """Ids to emit instead of sampling, scored by the model as if sampled. An engine that cannot score refuses them."""
    id: str = ""
    """Names the request for `abort`."""
    conversation: str = ""
    """Names the conversation: a pool keeps it on one replica."""
    group: str = ""
    """Names the group of sessions that share a prompt."""
    session: str = ""
    """The session's id."""
    turn: int = 0
    """Number of the turn in its session."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The session's."""
    request: Request | None = None
    """The neutral request, for engines that speak messages or script their replies."""
    media: tuple[Placed, ...] = ()
    """The images of the prompt in order, for engines that see (`Seeing`)."""
    pulse: Pulse | None = None
    """Beaten with every token that arrives, so that a stall is noticed."""

    def beat(self, tokens: int = 1) -> None:
        """Tokens of the turn have arrived."""
        if self.pulse is not None and tokens:
            self.pulse.beat(tokens)

    def blind(self) -> None:
        """The turn comes as a whole: no token of it is seen before its end."""
        if self.pulse is not None:
            self.pulse.blind = True

    def held_by(self, holds: Holds) -> AbstractContextManager[None]:
        """Around a turn that waits inside the engine while that is on hold."""
        return nullcontext() if self.pulse is None else self.pulse.follow(holds)

    def waiting(self) -> AbstractContextManager[None]:
        """Around whatever the turn waits for before the model is asked: the end of a pause, a free replica."""
        return nullcontext() if self.pulse is None else self.pulse.wait()


@dataclass(slots=True)
class Sample:
    """What was sampled. `ids`, `logprobs` and `versions` have one entry a token."""

    ids: Ids
    logprobs: Floats
    versions: Ids
    finish: Finish
    prompt_tokens: int
    """How many prompt tokens the model was conditioned on; the gateway checks it against what it sent."""
    cached_tokens: int = 0
    """How many of them came from a key-value cache."""
    stop_string: str | None = None
    flags: tuple[str, ...] = ()
    """What a trainer must know (`truncated_sampling`, …)."""
    prompt: Ids | None = None
    """The prompt ids that the engine says the model saw, for engines that take messages and not ids."""
    reply: Reply | None = None
    """The reply, for engines that parse it themselves."""


class EngineGone(EngineError):
    """The engine cannot be reached any more: connections refused or cut, or answers of a server that is going down."""

    def __init__(self, message: str, partial: Sample | None = None):
        super().__init__(message)
        self.partial = partial
        """What had arrived of the turn, for engines that stream; whoever goes on continues from it."""


class TurnAtFault(EngineError):
    """Replicas went away under this turn again and again: it is held to be what kills them, and no outage excuses it."""


class ContextExceeded(EngineError):
    """The prompt does not fit the engine's context: the policy's doing, and no failure."""


class PauseMode(StrEnum):
    DRAIN = "drain"
    """Turns in flight finish; new ones wait."""
    ABORT = "abort"
    """Turns in flight return what they have with `Finish.ABORT`."""


@dataclass(slots=True)
class EngineInfo:
    """What an engine is, as found by asking it."""

    name: str
    capture: Capture
    context: int
    """The longest prompt plus sample, in tokens."""
    vocabulary: int
    details: dict[str, str] = field(default_factory=dict)


@runtime_checkable
class Engine(Protocol):
    """One inference back end."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def version(self) -> int:
        """The policy version of the weights in use."""
        ...

    async def start(self) -> None:
        """Get ready to sample; raises `EngineError` with what to do if that cannot be."""
        ...

    async def sample(self, request: SampleRequest) -> Sample:
        """Sample one turn. Waits while the engine is paused. Cancelling the call aborts the turn."""
        ...

    async def abort(self, ids: Sequence[str]) -> None:
        """End the named turns; their `sample` calls return what they have with `Finish.ABORT`."""
        ...

    async def pause(self, mode: PauseMode = PauseMode.DRAIN, deadline: float | None = None) -> None:
        """Stop sampling. With `drain`, turns still in flight after `deadline` seconds are aborted."""
        ...

    async def resume(self, version: int | None = None) -> None:
        """Go on sampling, under `version` if given."""
        ...

    async def ready(self) -> None:
        """Return once the engine is not paused."""
        ...

    async def update_weights(self, folder: Path, version: int) -> None:
        """Replace the weights. No token of an older version is sampled after it returns."""
        ...

    async def close(self) -> None:
        """Release everything; turns in flight are aborted."""
        ...


@dataclass(frozen=True, slots=True)
class Load:
    """How busy an engine says it is."""

    running: int
    """Turns that are being sampled."""
    waiting: int
    """Turns in its own queue."""
    kv_usage: float | None = None
    """The share of its key-value cache that is in use, from 0 to 1; None if it cannot tell."""


@runtime_checkable
class Loaded(Protocol):
    """An engine that can tell how busy it is."""

    async def load(self) -> Load: ...


@runtime_checkable
class Watched(Protocol):
    """An engine that can be probed from outside."""

    async def healthy(self) -> bool:
        """Whether it answers; cheap, and never raises."""
        ...


@runtime_checkable
class Reachable(Protocol):
    """An engine that notices by itself when it cannot be reached, without failing a turn."""

    @property
    def trouble(self) -> str:
        """Why it cannot be reached; empty while it can."""
        ...

    def watch_reach(self, tell: Callable[[str], None]) -> None:
        """`tell` gets the trouble when the engine cannot be reached, and an empty text when it can again."""
        ...


@runtime_checkable
class Probed(Protocol):
    """An engine with a probe of its own; any other is probed by sampling one token."""

    async def probe(self) -> None:
        """Raise `EngineError` with what is wrong if the engine cannot be used."""
        ...


@runtime_checkable
class Seeing(Protocol):
    """An engine whose model sees images. In a prompt that it is given, its own placeholder ids stand for each of them;
    `SampleRequest.media` says where."""

    async def render_media(self, media: Sequence[Media]) -> Sequence[Placeholder | None]:
        """What stands for each of these in a prompt; `None` for what the model cannot be shown.

        Raises `BadRequest` for what cannot be read or fetched. The same bytes give the same placeholder for as long as
        the engine runs, on every replica. What `sample` needs beside the ids (pixels) the engine keeps, or makes again
        from `Placed.media`; it refuses to go on if that gives another key or length.
        """
        ...
