"""One model call: `Turn`, the images in its prompt, and the sampling settings that a row takes from its turns.

A turn stores what is new in it: the suffix of its prompt and the sampled tokens. A row holds several turns, each sampled
with its own settings: `of_turns` derives one temperature per token and one `TurnSampling` per turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from towline.common.arrays import LOGPROB_SLACK
from towline.schema.base import Count, Float32Array, Id, Int32Array, Json, Model
from towline.schema.vocabulary import POLICY, ForkReason, TurnRole, Untrained

Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False)]
TopP = Annotated[float, Field(gt=0, le=1)]

_LARGEST = float(np.finfo(np.float32).max)
CONTEXT_TEMPERATURE = 1.0
"""The temperature of a context token: a number that logits can be divided by."""


class TurnSampling(Model):
    """The sampling settings of one turn."""

    turn: Count
    """`Turn.index`, as in `Trace.turn_ids`."""
    temperature: Temperature = 1.0
    """0: greedy, with the logprobs of temperature 1."""
    top_p: TopP = 1.0
    top_k: Count = 0
    """0: off."""

    @property
    def truncated(self) -> bool:
        """Whether the distribution was truncated, so that logprobs over the full vocabulary differ."""
        return self.top_p < 1 or self.top_k > 0


class Image(Model):
    """An image that the model saw, and the tokens that represent it."""

    digest: str
    """Hex SHA-256 of its bytes, or of its URL if it is remote."""
    url: str = ""
    """URL of a remote image; empty if it was sent inside the request."""
    start: Count
    """Index of its first token in the prompt or row."""
    length: Count
    """Number of its tokens; 0 if the engine does not report them."""
    key: str = ""
    """The engine's id of the preprocessed image."""


class Turn(Model):
    """One model call. `sampled`, `logprobs` and `versions` have one entry per token."""

    id: Id
    index: Count
    """Position by start time in the session; `Trace.turn_ids` refers to it."""
    parent: Id | None = None
    """The turn whose prompt and sampled tokens are the start of this prompt."""
    origin: Id | None = None
    """The turn that the conversation forked or was compacted from; may differ from `parent`."""
    origin_inferred: bool = False
    """Whether the origin was inferred rather than stated by the harness."""
    reason: ForkReason | None = None
    """Why it forked; `None` for a plain continuation and for the first root."""
    role: TurnRole = TurnRole.MAIN
    role_reason: str = ""
    """The rule that gave the role."""
    difference: Json = Field(default_factory=dict)
    """The first message in which the request differs from the turn it forked from: `turn`, `message` (its index), `role`,
    and the excerpts `was` and `sent`. Only for `history_edited` and `unmatched`."""
    unended: Count = 0
    """Sampled tokens at its end that no row trains, above all its end of turn: the harness extended the reply, and the row
    that trains the other tokens continues with the extension."""
    prompt_length: Count
    suffix: Int32Array
    """Prompt tokens after the parent's prompt and sampled tokens, including a forced close; for a root, the whole prompt."""
    sampled: Int32Array
    logprobs: Float32Array
    versions: Int32Array
    """The policy version of each sampled token, stamped by the engine."""
    finish: str
    forced_close: bool = False
    """The suffix starts with an end-of-turn id that the parent did not sample."""
    delivered: bool = True
    flags: list[str] = Field(default_factory=list)
    dialect: str = ""
    model: str = ""
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: Count = 0
    """Effective sampling settings; `top_k` 0: off."""
    requested: Json = Field(default_factory=dict)
    """The sampling settings that the harness requested."""
    overridden: list[str] = Field(default_factory=list)
    ignored: list[str] = Field(default_factory=list)
    messages: list[Json] = Field(default_factory=list)
    """The new messages of this call in neutral JSON."""
    tools_key: str = ""
    """Key of the tool declarations in `Trajectory.tools`; empty for a call without tools."""
    engine: str = POLICY
    """Name of the engine that sampled it. Token ids of engines other than the policy are in their own vocabulary."""
    untrained: Untrained | None = None
    images: list[Image] = Field(default_factory=list)
    """The images in `suffix`."""
    reply: Json = Field(default_factory=dict)
    cached_tokens: Count = 0
    mixed_cache: Count = 0
    """Sampled tokens whose context may have been computed under older weights than the tokens: their logprobs are what was
    sampled from, but a forward pass under one version gives others."""
    started: float = 0.0
    """Unix time."""
    seconds: float = 0.0

    @model_validator(mode="after")
    def _arrays_agree(self) -> Self:
        if not len(self.sampled) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"sampled, logprobs and versions have {len(self.sampled)}, {len(self.logprobs)} "
                f"and {len(self.versions)} entries"
            )
        if self.unended and self.unended >= len(self.sampled):
            raise ValueError(f"{self.unended} of {len(self.sampled)} sampled tokens cannot be its end")
        if self.prompt_length < len(self.suffix):
            raise ValueError(f"prompt_length {self.prompt_length} is less than the {len(self.suffix)} suffix tokens")
        check_logprobs(self.logprobs)
        for name in ("suffix", "sampled", "versions"):
            array = getattr(self, name)
            if array.size and int(array.min()) < 0:
                raise ValueError(f"{name} must not be negative")
        return self


def check_logprobs(logprobs: npt.NDArray[np.float32]) -> None:
    if not logprobs.size:
        return
    if not np.isfinite(logprobs).all():
        raise ValueError("logprobs must be finite")
    if float(logprobs.max()) > LOGPROB_SLACK:
        raise ValueError(f"logprobs must not exceed 0, found {float(logprobs.max()):g}")


def of_turns(
    turn_ids: npt.NDArray[np.int32], settings: Mapping[int, TurnSampling]
) -> tuple[npt.NDArray[np.float32], list[TurnSampling]]:
    """The temperature per token and the settings per turn of a row, in the order of the turns."""
    present = np.unique(turn_ids[turn_ids >= 0])
    own = [settings[int(index)] for index in present]
    temperatures = np.full(len(turn_ids), CONTEXT_TEMPERATURE, np.float32)
    if own:
        # A harness may request more than 32 bits can hold.
        by_turn = np.array([min(one.temperature, _LARGEST) for one in own], np.float32)
        sampled = turn_ids >= 0
        temperatures[sampled] = by_turn[np.searchsorted(present, turn_ids[sampled])]
    return temperatures, own


def of_turn(turn: Turn) -> TurnSampling:
    return TurnSampling(turn=turn.index, temperature=turn.temperature, top_p=turn.top_p, top_k=turn.top_k)
