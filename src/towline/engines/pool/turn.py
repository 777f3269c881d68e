"""A turn in a pool: what replicas have sampled of it, and what is still missing.

Invariant: each token enters a turn once. What a lost replica had streamed is kept, what it had not sent is sampled again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from towline.conversation import Finish
from towline.engines.base import MOVED, Ids, Sample, SampleRequest

_NONE: Ids = np.empty(0, np.int32)


@dataclass(slots=True)
class PooledTurn:
    """A turn and the parts of it that replicas have sampled."""

    request: SampleRequest
    parts: list[Sample] = field(default_factory=list)
    moves: int = 0
    fruitless: int = 0
    """Consecutive replicas whose death this turn was the first to notice, since it last got a token."""

    def replica_lost(self, partial: Sample | None, *, first: bool) -> Sample | None:
        """Keep what a lost replica had sampled; `first`: this turn noticed the loss first. Returns the whole turn if
        nothing more was to come."""
        self.moves += 1
        self.fruitless += first
        if partial is None or not self._can_continue(partial):
            return None
        self.fruitless = 0
        self.parts.append(partial)
        if int(partial.ids[-1]) in self.request.stop_ids:
            return self._join(Finish.STOP)
        if self.remaining().max_tokens <= 0:
            return self._join(Finish.LENGTH)
        return None

    def remaining(self) -> SampleRequest:
        """The request for what is still missing."""
        if not self.parts:
            return self.request
        request, so_far = self.request, np.concatenate([part.ids for part in self.parts])
        return replace(
            request,
            prompt=np.concatenate([request.prompt, so_far]),
            max_tokens=request.max_tokens - len(so_far),
            forced=None if request.forced is None else request.forced[len(so_far) :],
        )

    def complete(self, last: Sample) -> Sample:
        """The whole turn, with its last part."""
        if not self.moves:
            return last
        self.parts.append(last)
        return self._join(last.finish)

    def aborted(self) -> Sample:
        """The turn as it is, ended before a replica took it."""
        nothing = Sample(_NONE, np.empty(0, np.float32), _NONE, Finish.ABORT, len(self.remaining().prompt))
        return self.complete(nothing)

    def _can_continue(self, partial: Sample) -> bool:
        """A stop string may span parts, and a server that renders by itself cannot continue half a reply: both restart."""
        return len(partial.ids) > 0 and partial.prompt is None and not self.request.stop_strings

    def _join(self, finish: Finish) -> Sample:
        first, last = self.parts[0], self.parts[-1]
        before = sum(len(part.ids) for part in self.parts[:-1])
        return Sample(
            ids=np.concatenate([part.ids for part in self.parts]),
            logprobs=np.concatenate([part.logprobs for part in self.parts]),
            versions=np.concatenate([part.versions for part in self.parts]),
            finish=finish,
            # The last replica saw the prompt and what had been sampled after it.
            prompt_tokens=last.prompt_tokens - before,
            cached_tokens=min(first.cached_tokens, len(self.request.prompt)),
            mixed_cache=sum(part.mixed_cache for part in self.parts),
            stop_string=last.stop_string,
            flags=tuple(dict.fromkeys([MOVED, *(flag for part in self.parts for flag in part.flags)])),
            prompt=last.prompt,
            reply=last.reply,
        )
