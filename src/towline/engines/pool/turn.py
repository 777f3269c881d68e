"""One turn on its way over the replicas: what it has so far, what is still to be asked for, and the whole of it.

Tokens enter a turn once. What a lost replica had streamed is kept and gone on from; what it had not told is sampled anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from towline.conversation import Finish
from towline.engines.base import MOVED, Ids, Sample, SampleRequest

_NONE: Ids = np.empty(0, np.int32)


@dataclass(slots=True)
class MovingTurn:
    request: SampleRequest
    parts: list[Sample] = field(default_factory=list)
    moves: int = 0
    fruitless: int = 0
    """Replicas in a row whose death this turn was the first to notice, since it last got a token."""

    def move(self, partial: Sample | None, *, first: bool) -> Sample | None:
        """A replica was lost, which this turn was the `first` to notice or not. Returns the whole turn if what had arrived
        was all there was to come."""
        self.moves += 1
        self.fruitless += first
        if partial is None or not self._goes_on_from(partial):
            return None
        self.fruitless = 0
        self.parts.append(partial)
        if int(partial.ids[-1]) in self.request.stop_ids:
            return self._joined(Finish.STOP)
        if self.rest().max_tokens <= 0:
            return self._joined(Finish.LENGTH)
        return None

    def rest(self) -> SampleRequest:
        """What is still to be asked for."""
        if not self.parts:
            return self.request
        asked, so_far = self.request, np.concatenate([part.ids for part in self.parts])
        return replace(
            asked,
            prompt=np.concatenate([asked.prompt, so_far]),
            max_tokens=asked.max_tokens - len(so_far),
            forced=None if asked.forced is None else asked.forced[len(so_far) :],
        )

    def whole(self, last: Sample) -> Sample:
        if not self.moves:
            return last
        self.parts.append(last)
        return self._joined(last.finish)

    def aborted(self) -> Sample:
        """The turn as it is, ended before a replica took it."""
        nothing = Sample(_NONE, np.empty(0, np.float32), _NONE, Finish.ABORT, len(self.rest().prompt))
        return self.whole(nothing)

    def _goes_on_from(self, partial: Sample) -> bool:
        """A stop string may span parts, and a server that renders by itself cannot take half a reply: both begin anew."""
        return len(partial.ids) > 0 and partial.prompt is None and not self.request.stop_strings

    def _joined(self, finish: Finish) -> Sample:
        first, last = self.parts[0], self.parts[-1]
        before = sum(len(part.ids) for part in self.parts[:-1])
        return Sample(
            ids=np.concatenate([part.ids for part in self.parts]),
            logprobs=np.concatenate([part.logprobs for part in self.parts]),
            versions=np.concatenate([part.versions for part in self.parts]),
            finish=finish,
            # The last replica saw the prompt and what had been sampled behind it.
            prompt_tokens=last.prompt_tokens - before,
            cached_tokens=min(first.cached_tokens, len(self.request.prompt)),
            stop_string=last.stop_string,
            flags=tuple(dict.fromkeys([MOVED, *(flag for part in self.parts for flag in part.flags)])),
            prompt=last.prompt,
            reply=last.reply,
        )
