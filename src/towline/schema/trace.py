"""One training row, `Trace`, and rows as a flat table that trainers read from Arrow or Parquet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field, FiniteFloat, PrivateAttr, model_validator

from towline.schema import files as columns
from towline.schema import turn as turns
from towline.schema.base import Count, Float32Array, Id, Int32Array, Model, Scores, UInt8Array
from towline.schema.turn import Image, Temperature, TopP, TurnSampling
from towline.schema.vocabulary import BuilderName, ForkReason, TurnRole


class Trace(Model):
    """One training row: the tokens of one root-to-leaf path, one entry per token in every array."""

    trace_id: Id
    parent_trace: Id | None = None
    rollout_id: Id
    """The session."""
    group_id: Id
    """The task."""
    role: TurnRole = TurnRole.MAIN
    builder: BuilderName = BuilderName.EXACT
    token_ids: Int32Array
    loss_mask: UInt8Array
    """1 where the token is trained in this row."""
    logprobs: Float32Array
    """0 where nothing was sampled."""
    policy_versions: Int32Array
    """-1 where nothing was sampled."""
    turn_ids: Int32Array
    """`Turn.index` of the turn that sampled the token; -1 for context."""
    reward: FiniteFloat | None = None
    """`None` while there is no score: never to be read as 0."""
    turn_rewards: Scores = Field(default_factory=dict)
    """By turn id."""
    temperature: Temperature = 1.0
    """Temperature of the last turn, like `top_p` and `top_k`. A row may mix settings: see `temperatures` and `sampling`."""
    top_p: TopP = 1.0
    top_k: Count = 0
    temperatures: Float32Array = Field(default_factory=lambda: np.empty(0, np.float32))
    """The temperature of each token: 1 for context, 0 for a greedy turn, whose logprobs are those of temperature 1."""
    sampling: list[TurnSampling] = Field(default_factory=list)
    """The settings of each turn with a token in the row, in the order of the turns."""
    finish_reason: str = ""
    """Why the last turn ended."""
    fork_reason: ForkReason | None = None
    truncated: bool = False
    """Whether the row was cut off: its last turn or its session was."""
    images: list[Image] = Field(default_factory=list)
    """The images among the tokens, in order."""
    _sampling_assumed: bool = PrivateAttr(default=False)
    """Whether the settings per token and turn were missing and are taken from the row's own."""

    @model_validator(mode="after")
    def _arrays_agree(self) -> Self:
        arrays = (self.token_ids, self.loss_mask, self.logprobs, self.policy_versions, self.turn_ids)
        lengths = [len(array) for array in arrays]
        if len(set(lengths)) != 1:
            raise ValueError(f"arrays of one trace must have one length, found {lengths}")
        if lengths[0] == 0:
            raise ValueError("a trace needs at least one token")
        turns.check_logprobs(self.logprobs)
        if int(self.token_ids.min()) < 0:
            raise ValueError("token_ids must not be negative")
        if int(self.loss_mask.max()) > 1:
            raise ValueError("loss_mask holds 0 and 1 only")
        context = self.turn_ids == -1
        if int(self.turn_ids.min()) < -1 or int(self.policy_versions.min()) < -1:
            raise ValueError("turn_ids and policy_versions start at -1")
        if not np.array_equal(context, self.policy_versions == -1):
            raise ValueError("turn_ids and policy_versions must be -1 at the same tokens")
        if self.loss_mask[context].any():
            raise ValueError("loss_mask is 1 at a token that was not sampled")
        if self.logprobs[context].any():
            raise ValueError("logprobs must be 0 where nothing was sampled")
        for image in self.images:
            if not context[image.start : image.start + image.length].all() or image.start + image.length > lengths[0]:
                raise ValueError(f"the image at token {image.start} is not in the row's context")
        if not len(self.temperatures) and not self.sampling:
            # An older record without them, or a caller with one setting for all turns.
            one = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
            self._take_sampling({int(i): TurnSampling(turn=int(i), **one) for i in np.unique(self.turn_ids) if i >= 0})
            self._sampling_assumed = True
        if len(self.temperatures) != lengths[0]:
            raise ValueError(f"temperatures has {len(self.temperatures)} entries for {lengths[0]} tokens")
        if not np.isfinite(self.temperatures).all() or float(self.temperatures.min()) < 0:
            raise ValueError("temperatures must be finite and not negative")
        return self

    def _take_sampling(self, settings: Mapping[int, TurnSampling]) -> None:
        self.temperatures, self.sampling = turns.of_turns(self.turn_ids, settings)

    @property
    def trained_temperatures(self) -> list[float]:
        """The distinct temperatures of the trained tokens, ascending."""
        values: list[float] = np.unique(self.temperatures[self.loss_mask == 1]).tolist()
        return values

    @property
    def logit_divisors(self) -> npt.NDArray[np.float32]:
        """What to divide the logits of each token by to get its recorded logprob: its temperature, 1 for a greedy one."""
        return np.where(self.temperatures > 0, self.temperatures, np.float32(1))

    @property
    def trained_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    @property
    def lowest_version(self) -> int | None:
        """The oldest policy version among the trained tokens; the current version minus it is the row's staleness."""
        versions = self.policy_versions[self.loss_mask == 1]
        return int(versions.min()) if versions.size else None


def traces_from_table(table: pa.Table) -> list[Trace]:
    """The traces of a table. Their arrays are read-only views of the table's memory."""
    return [Trace.model_validate(row) for row in columns.from_table(Trace, table)]
