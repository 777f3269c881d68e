"""One turn inside the engine: its request, and how far it is.

Invariant: `tokens[:computed]` have their keys and values in the pool, in the slots of the turn's row; the ids emitted
so far are `tokens[prompt : prompt + emitted]`, with one logprob each. All of them come from one weight version, because
a weight update ends every turn in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from towline.conversation import Finish
from towline.engines.base import TRUNCATED, Ids, Sample
from towline.engines.embedded.cache import PrefixLease
from towline.engines.stop_strings import StopStrings
from towline.engines.version_stamp import stamp_versions
from towline.errors import EngineError


@dataclass(slots=True, eq=False)
class EngineTurn:
    """A request in the engine. Only the step loop touches it once it is submitted."""

    id: str
    tokens: Ids
    """The prompt, then room for all that may be emitted; forced ids are there from the beginning."""
    prompt: int
    """Length of the prompt."""
    limit: int
    """The most tokens to emit."""
    forced: bool
    """Whether the `limit` ids are given and only scored."""
    temperature: float
    top_p: float
    top_k: int
    stop_ids: frozenset[int]
    stops: StopStrings | None
    random: np.random.Generator | None
    """The turn's own generator, so that draws do not depend on what else runs; `None` if nothing is drawn."""
    deliver: Callable[[Sample | EngineError], None]
    """Called with the result, from the loop's thread."""

    on_tokens: Callable[[int], None] | None = None
    """Called after every step of the engine, with the number of tokens it emitted for this turn."""
    version: int | None = None
    """Policy version of the weights it runs under, once it has begun."""
    logprobs: list[float] = field(default_factory=list)
    finish: Finish | None = None
    stop_string: str | None = None
    cached: int | None = None
    """Prompt tokens found in the cache when the turn began."""

    order: int = 0
    """Order of arrival: the youngest is preempted when the pool is full."""
    row: int = -1
    """Its row of the slot table, while it is running."""
    lease: PrefixLease | None = None
    computed: int = 0
    allocated: int = 0
    """How many slots its row holds."""
    leader: EngineTurn | None = None
    """While waiting: a turn that is computing a prefix of this one's prompt."""
    shared: int = 0
    """Length of the prefix that `leader` is computing."""

    @property
    def emitted(self) -> int:
        return len(self.logprobs)

    @property
    def goal(self) -> int:
        """How many tokens must be computed before the turn can continue (or, if forced, end)."""
        return self.prompt + (self.limit - 1 if self.forced else self.emitted)

    @property
    def first_output(self) -> int:
        """The first position whose logits are needed: nothing from there on can come from the cache."""
        return self.prompt + self.emitted - 1

    def emit(self, token: int, logprob: float) -> None:
        """Add one token, and end the turn if it is the last: at a stop id, a stop string or the limit."""
        self.tokens[self.prompt + self.emitted] = token
        self.logprobs.append(logprob)
        if token in self.stop_ids:
            self.finish = Finish.STOP
        elif self.stops is not None and (found := self.stops.feed(token)) is not None:
            self.finish, self.stop_string = Finish.STOP_STRING, found
        elif self.emitted >= self.limit:
            self.finish = Finish.LENGTH

    def result(self) -> Sample:
        """What the caller gets, each token stamped with its policy version; a turn that has not ended was aborted."""
        return Sample(
            ids=self.tokens[self.prompt : self.prompt + self.emitted].copy(),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=stamp_versions(self.emitted, self.version or 0),
            finish=self.finish or Finish.ABORT,
            prompt_tokens=self.prompt,
            cached_tokens=self.cached or 0,
            stop_string=self.stop_string,
            flags=(TRUNCATED,) if self.top_p < 1.0 or self.top_k > 0 else (),
        )
