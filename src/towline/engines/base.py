"""The engine interface: token ids in; token ids, logprobs, policy versions and a finish reason out.

Contract of every engine:
- `sample` never re-encodes: the prompt is the ids it was given, and `prompt_tokens` echoes how many the model saw.
- `logprobs[i]` is the natural-log probability of `ids[i]` under the distribution it was sampled from, in float32.
- `versions[i]` is the policy version whose weights produced `ids[i]` (stamped with `version_stamp.py`). Key-value caches
  never cross versions.
- A stop id that ended the turn is the last of `ids`, with its logprob. A stop string is matched in the decoded text
  (`stop_strings.py`); the token that completed it is kept.
- While paused with `abort`, or when a weight update interrupts a turn, `sample` returns what it has with `Finish.ABORT`.
  The caller resumes from `prompt + ids` once `ready()` returns.
- Tokens are reported as they arrive (`SampleRequest.tokens_arrived`); time before the model is called is marked with
  `suspended`. An engine that sees no token before the end of the turn says so (`not_streamed`) and sets its own timeout.
- An engine that is lost raises `EngineUnreachable` with the tokens that had arrived. Any other failure belongs to the
  turn and would be the same on another replica.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from towline.common.arrays import Floats, Ids
from towline.common.images import ImagePlaceholder, PlacedImage
from towline.conversation import Finish, Media, Reply, Request
from towline.engines.stalls import PauseState, StallDetector
from towline.errors import EngineError

__all__ = [
    "MOVED",
    "TRUNCATED",
    "UNPROVEN_LOGPROBS",
    "AcceptsImages",
    "AnnouncesVersions",
    "CaptureLevel",
    "ContextExceeded",
    "Engine",
    "EngineInfo",
    "EngineLoad",
    "EngineUnreachable",
    "Floats",
    "HasProbe",
    "Ids",
    "PauseMode",
    "PoisonTurn",
    "ReportsHealth",
    "ReportsLoad",
    "ReportsOutages",
    "Sample",
    "SampleRequest",
    "labelled",
]

MOVED = "moved"
"""Flag of a turn that one engine left unfinished and another one continued."""
TRUNCATED = "truncated_sampling"
"""Flag of a turn that was sampled from a truncated distribution (top-p or top-k)."""
UNPROVEN_LOGPROBS = "unproven_logprobs"
"""Flag of a turn whose logprobs are not shown to be those of the distribution that was sampled from: it is not trained."""


class CaptureLevel(StrEnum):
    """How much of a turn an engine can report, the most first."""

    TOKENS = "tokens"
    """Ids in, ids and logprobs out: `exact` holds."""
    LOGPROBS = "logprobs"
    """Logprobs by token text; ids only with the model's own tokenizer at hand."""
    TEXT = "text"
    """Messages only: nothing of the turn can be trained on."""


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
    """Identifies the request for `abort`."""
    conversation: str = ""
    """Identifies the conversation: a pool keeps it on one replica."""
    group: str = ""
    """Identifies the group of sessions that share a prompt."""
    session: str = ""
    """The session's id."""
    turn: int = 0
    """Index of the turn in its session."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The session's metadata."""
    request: Request | None = None
    """The neutral request, for engines that take messages or script their replies."""
    media: tuple[PlacedImage, ...] = ()
    """The images of the prompt in order, for engines that accept them (`AcceptsImages`)."""
    stall_detector: StallDetector | None = None
    """Notified of every token that arrives, so that a stall is noticed."""

    def check(self, context: int) -> None:
        """Refuse what no engine with this context could sample."""
        if len(self.prompt) == 0:
            raise EngineError("the prompt is empty: at least one token is needed")
        if len(self.prompt) > context:
            raise ContextExceeded(f"the prompt has {len(self.prompt)} tokens, the context {context}")
        if self.max_tokens < 0:
            raise EngineError(f"max_tokens must not be negative, it is {self.max_tokens}")

    def tokens_arrived(self, count: int = 1) -> None:
        """Report tokens of the turn that have arrived."""
        if self.stall_detector is not None and count:
            self.stall_detector.tokens_arrived(count)

    def not_streamed(self) -> None:
        """Report that the turn arrives as a whole: no token is seen before its end."""
        if self.stall_detector is not None:
            self.stall_detector.streamed = False

    def suspended(self) -> AbstractContextManager[None]:
        """Around whatever the turn waits for before the model is called: the end of a pause, a free replica."""
        return nullcontext() if self.stall_detector is None else self.stall_detector.suspended()

    def suspended_while(self, pauses: PauseState) -> AbstractContextManager[None]:
        """Around a turn that waits inside the engine while that is paused."""
        return nullcontext() if self.stall_detector is None else self.stall_detector.suspended_while(pauses)


@dataclass(slots=True)
class Sample:
    """What was sampled. `ids`, `logprobs` and `versions` have one entry per token."""

    ids: Ids
    logprobs: Floats
    versions: Ids
    """The policy version that produced each token: stamped by the engine, never by the caller."""
    finish: Finish
    prompt_tokens: int
    """How many prompt tokens the model was conditioned on; the gateway compares it with what it sent."""
    cached_tokens: int = 0
    """How many of them came from a key-value cache."""
    mixed_cache: int = 0
    """How many sampled tokens have a context that may have been computed under older weights (`weight_labels.py`)."""
    stop_string: str | None = None
    flags: tuple[str, ...] = ()
    """What a trainer must know (`truncated_sampling`, …)."""
    prompt: Ids | None = None
    """The prompt ids as the engine reports them, for engines that take messages and not ids."""
    reply: Reply | None = None
    """The reply, for engines that parse it themselves."""


class EngineUnreachable(EngineError):
    """The engine is lost: connections refused or cut, or responses of a server that is shutting down."""

    def __init__(self, message: str, partial: Sample | None = None):
        super().__init__(message)
        self.partial = partial
        """What had arrived of the turn, for engines that stream; another replica continues from it."""


class PoisonTurn(EngineError):
    """Replica after replica died under this turn: it is taken to be the cause, and no outage excuses it."""


class ContextExceeded(EngineError):
    """The prompt does not fit the engine's context: caused by the policy, not an infrastructure failure."""


class PauseMode(StrEnum):
    """What happens to turns in flight when an engine is paused."""

    DRAIN = "drain"
    """Turns in flight finish; new ones wait."""
    ABORT = "abort"
    """Turns in flight return what they have with `Finish.ABORT`."""


@dataclass(slots=True)
class EngineInfo:
    """What an engine is, as found by asking it."""

    name: str
    capture: CaptureLevel
    context: int
    """The longest prompt plus sample, in tokens."""
    vocabulary: int
    """Number of token ids; 0 if the engine does not report it."""
    details: dict[str, str] = field(default_factory=dict)


def labelled(info: EngineInfo) -> bool:
    """Whether the server labels its weights, so that a restart cannot go unnoticed."""
    return info.details.get("weight_label", "not reported") != "not reported"


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
        """Get ready to sample; raises `EngineError` with what to do if that is not possible."""
        ...

    async def sample(self, request: SampleRequest) -> Sample:
        """Sample one turn. Waits while the engine is paused. Cancelling the call aborts the turn."""
        ...

    async def abort(self, ids: Sequence[str]) -> None:
        """End the turns with these request ids; their `sample` calls return what they have with `Finish.ABORT`."""
        ...

    async def pause(self, mode: PauseMode = PauseMode.DRAIN, deadline: float | None = None) -> None:
        """Stop sampling. With `drain`, turns still in flight after `deadline` seconds are aborted."""
        ...

    async def resume(self, version: int | None = None) -> None:
        """Continue sampling, under `version` if given."""
        ...

    async def ready(self) -> None:
        """Return once the engine is not paused."""
        ...

    async def update_weights(self, folder: Path, version: int) -> None:
        """Replace the weights. No token of an older version is sampled after this returns."""
        ...

    async def close(self) -> None:
        """Release everything; turns in flight are aborted."""
        ...


@runtime_checkable
class AnnouncesVersions(Protocol):
    """An engine whose weights a trainer may replace by its own means, while it samples."""

    async def announce(self, version: int | None) -> int:
        """Note that the weights are now those of `version`; with `None`, of the version that the server itself reports.

        Nothing is paused: turns in flight continue. Returns the version; raises `EngineError` if the server reports later
        weights, or none with `None`.
        """
        ...

    async def same_weights(self) -> bool:
        """Whether the server still samples as when it was last probed: False also if that is not known."""
        ...


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine says it is."""

    running: int
    """Turns being sampled."""
    waiting: int
    """Turns in the engine's own queue."""
    kv_usage: float | None = None
    """The share of its key-value cache in use, from 0 to 1; None if it does not report it."""


@runtime_checkable
class ReportsLoad(Protocol):
    """An engine that reports how busy it is."""

    async def load(self) -> EngineLoad: ...


@runtime_checkable
class ReportsHealth(Protocol):
    """An engine with a health check."""

    async def healthy(self) -> bool:
        """Whether it answers; cheap, and never raises."""
        ...


@runtime_checkable
class ReportsOutages(Protocol):
    """An engine that notices by itself that it is unreachable, without failing a turn."""

    @property
    def outage(self) -> str:
        """Why it is unreachable; empty while it is reachable."""
        ...

    def on_outage(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with the reason when the engine becomes unreachable, and with an empty text when it is back."""
        ...


@runtime_checkable
class HasProbe(Protocol):
    """An engine with a probe of its own; any other is probed by sampling one token."""

    async def probe(self) -> None:
        """Raise `EngineError` with what is wrong if the engine cannot be used."""
        ...


@runtime_checkable
class AcceptsImages(Protocol):
    """An engine whose model sees images. In a prompt that it is given, its own placeholder ids stand for each of them;
    `SampleRequest.media` says where."""

    async def render_media(self, media: Sequence[Media]) -> Sequence[ImagePlaceholder | None]:
        """What stands for each of these in a prompt; `None` for what the model cannot be shown.

        Raises `BadRequest` for what cannot be read or fetched. The same bytes give the same placeholder for as long as
        the engine runs, on every replica. What `sample` needs beside the ids (pixels) the engine keeps, or recreates
        from `PlacedImage.media`; it refuses to continue if that gives another key or length.
        """
        ...
