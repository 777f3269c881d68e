"""The sampling settings of a row: one temperature per token, and every setting per turn.

A row holds several turns, and each was sampled with its own settings. Invariant, checked whenever a trajectory is built or
read: a row's settings are those of its turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field

from towline.schema.base import Count, Model

if TYPE_CHECKING:
    from towline.schema.trajectory import Trace, Turn

Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False)]
TopP = Annotated[float, Field(gt=0, le=1)]

_LARGEST = float(np.finfo(np.float32).max)
CONTEXT_TEMPERATURE = 1.0
"""The temperature of a token that nothing sampled: a number that logits can be divided by."""


class TurnSampling(Model):
    """What one turn of a row was sampled with."""

    turn: Count
    """`Turn.index`, as in `Trace.turn_ids`."""
    temperature: Temperature = 1.0
    """0 is greedy, with the logprobs of temperature 1."""
    top_p: TopP = 1.0
    top_k: Count = 0
    """0 is off."""

    @property
    def truncated(self) -> bool:
        """Whether tokens were cut from the distribution, so that logprobs over the whole vocabulary differ."""
        return self.top_p < 1 or self.top_k > 0


def of_turns(
    turn_ids: npt.NDArray[np.int32], settings: Mapping[int, TurnSampling]
) -> tuple[npt.NDArray[np.float32], list[TurnSampling]]:
    """A row's temperature per token and settings per turn, in the order of the turns."""
    present = np.unique(turn_ids[turn_ids >= 0])
    own = [settings[int(index)] for index in present]
    temperatures = np.full(len(turn_ids), CONTEXT_TEMPERATURE, np.float32)
    if own:
        # A harness may ask for more than 32 bits hold.
        by_turn = np.array([min(one.temperature, _LARGEST) for one in own], np.float32)
        sampled = turn_ids >= 0
        temperatures[sampled] = by_turn[np.searchsorted(present, turn_ids[sampled])]
    return temperatures, own


def of_turn(turn: Turn) -> TurnSampling:
    return TurnSampling(turn=turn.index, temperature=turn.temperature, top_p=turn.top_p, top_k=turn.top_k)


def check_sampling(trace: Trace, by_index: Mapping[int, TurnSampling]) -> None:
    """Raise `ValueError` unless the row's settings are those of its turns, all of which exist."""
    temperatures, own = of_turns(trace.turn_ids, by_index)
    if not np.array_equal(trace.temperatures, temperatures):
        place = int(np.flatnonzero(trace.temperatures != temperatures)[0])
        raise ValueError(
            f"trace {trace.trace_id}: token {place} has temperature {trace.temperatures[place]:g}, and its turn was "
            f"sampled at {temperatures[place]:g}"
        )
    if trace.sampling != own:
        raise ValueError(f"trace {trace.trace_id}: its sampling settings are not those of its turns")
