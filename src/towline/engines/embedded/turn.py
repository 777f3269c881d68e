"""One turn inside the engine: what was asked, and how far it is.

Invariant: `tokens[:computed]` have their keys and values in the pool, in the slots of the turn's row; the ids emitted
so far are `tokens[prompt : prompt + emitted]`, with one logprob each. All of them come from one weight version, because
a swap ends every turn that has begun.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from towline.conversation import Finish
from towline.engines.base import Ids, Sample
from towline.engines.embedded.cache import Lease
from towline.engines.stops import StopStrings
from towline.errors import EngineError

TRUNCATED = "truncated_sampling"


@dataclass(slots=True, eq=False)
class Turn:
    """A request on its way through the engine. Only the step loop touches it once it is submitted."""

    id: str
    tokens: Ids
    """Prompt, then room for all that may be emitted; forced ids stand there from the beginning."""
    prompt: int
    """Length of the prompt."""
    limit: int
    """The most tokens to emit."""
    forced: bool
    """`limit` ids are given and only scored."""
    temperature: float
    top_p: float
    top_k: int
    stop_ids: frozenset[int]
    stops: StopStrings | None
    random: np.random.Generator | None
    """Draws of this turn alone, so that they do not depend on what else runs; `None` if nothing is drawn."""
    deliver: Callable[[Sample | EngineError], None]

    beat: Callable[[int], None] | None = None
    """Told of every step of the engine, with the tokens that it gave this turn."""
    version: int | None = None
    """Of the weights it runs under, once it has begun."""
    logprobs: list[float] = field(default_factory=list)
    finish: Finish | None = None
    stop_string: str | None = None
    cached: int | None = None
    """Prompt tokens found in the cache when the turn began."""

    order: int = 0
    """Rank by arrival: the youngest gives way when the pool is full."""
    row: int = -1
    """The row of the slot table, while it is running."""
    lease: Lease | None = None
    computed: int = 0
    allocated: int = 0
    """How many slots its row holds."""
    leader: Turn | None = None
    """While waiting: a turn that is computing a prefix of this one's prompt,"""
    shared: int = 0
    """and how long that prefix is."""

    @property
    def emitted(self) -> int:
        return len(self.logprobs)

    @property
    def goal(self) -> int:
        """How many tokens must be computed before the turn can go on (or, if forced, end)."""
        return self.prompt + (self.limit - 1 if self.forced else self.emitted)

    @property
    def first_output(self) -> int:
        """The first position whose logits are needed: nothing from there on can come from the cache."""
        return self.prompt + self.emitted - 1

    def emit(self, token: int, logprob: float) -> None:
        """Take one more token, and end the turn if it is the last."""
        self.tokens[self.prompt + self.emitted] = token
        self.logprobs.append(logprob)
        if token in self.stop_ids:
            self.finish = Finish.STOP
        elif self.stops is not None and (found := self.stops.feed(token)) is not None:
            self.finish, self.stop_string = Finish.STOP_STRING, found
        elif self.emitted >= self.limit:
            self.finish = Finish.LENGTH

    def result(self) -> Sample:
        """What the caller gets; a turn that has not ended was aborted."""
        return Sample(
            ids=self.tokens[self.prompt : self.prompt + self.emitted].copy(),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.full(self.emitted, self.version or 0, dtype=np.int32),
            finish=self.finish or Finish.ABORT,
            prompt_tokens=self.prompt,
            cached_tokens=self.cached or 0,
            stop_string=self.stop_string,
            flags=(TRUNCATED,) if self.top_p < 1.0 or self.top_k > 0 else (),
        )
