"""The logprobs of ids that were not sampled.

Each id is scored where a sampled one would be: behind prompt and the ids before it, in the distribution at the turn's
temperature, by asking for one token and for the logprob of this id beside it. The prefix cache makes that cheap, and the
requests of one batch run together on the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise

import numpy as np

from towline.conversation import Finish
from towline.engines.base import Ids
from towline.engines.remote import Flight
from towline.engines.validation import count
from towline.engines.vllm.wire import cached
from towline.errors import EngineError

Ask = Callable[[Ids, int], Awaitable[tuple[float, dict[str, object]]]]
"""The logprob of an id behind a prompt, and the usage that the server told."""
_BATCH = 16


async def score(flight: Flight, limit: int, ask: Ask) -> None:
    """Fill a flight with its forced ids, up to the first stop id."""
    request = flight.request
    if request.forced is None or request.stop_strings:
        raise EngineError("forced ids are scored without stop strings")
    forced = np.asarray(request.forced, np.int32)[:limit]
    stops = np.flatnonzero(np.isin(forced, list(request.stop_ids)))
    forced = forced[: stops[0] + 1] if len(stops) else forced
    row = np.concatenate([np.asarray(request.prompt, np.int32), forced])
    length = len(request.prompt)
    # The first one alone: it leaves the prompt in the cache for the others.
    bounds = [0, *range(1, len(forced), _BATCH), len(forced)]
    for start, end in pairwise(bounds):
        answers = await asyncio.gather(*(ask(row[: length + place], int(forced[place])) for place in range(start, end)))
        if start == 0 and answers:
            usage = answers[0][1]
            flight.prompt_tokens, flight.cached_tokens = (
                count(usage["prompt_tokens"], "prompt_tokens"),
                cached(usage) or 0,
            )
        flight.ids += [int(id) for id in forced[start:end]]
        flight.logprobs += [logprob for logprob, _ in answers]
    flight.finish = Finish.STOP if len(stops) else Finish.LENGTH
