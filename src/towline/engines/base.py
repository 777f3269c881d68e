"""The engine interface: token ids in; token ids, logprobs, versions and a finish reason out.

Contract of every engine:
- `sample` never re-encodes: the prompt is the ids it was given, and `prompt_tokens` echoes how many the model saw.
- `logprobs[i]` is the natural-log probability of `ids[i]` under the distribution that it was sampled from, in float32.
- `versions[i]` is the policy version whose weights produced `ids[i]`. Key-value caches never cross versions.
- A stop id that ended the turn is the last of `ids`, with its logprob. A stop string is found in the decoded text; the
  token that completed it is kept.
- While paused with `abort`, or when an update interrupts a turn, `sample` returns what it has with `Finish.ABORT`. The
  caller goes on with `prompt + ids` once `ready()` returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol, runtime_checkable

from towline.arrays import Floats, Ids
from towline.conversation import Finish, Reply, Request

__all__ = ["Capture", "Engine", "EngineInfo", "Floats", "Ids", "PauseMode", "Sample", "SampleRequest"]


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
    request: Request | None = None
    """The neutral request, for engines that speak messages or script their replies."""


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
