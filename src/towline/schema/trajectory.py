"""A session as tokens: the `Trajectory` holds turns and traces and proves that they agree.

A turn stores what is new in it (suffix and sampled tokens), a trace is a complete training row. Both are kept: the turns
are the evidence, the traces what a trainer reads, and a trajectory whose two sides disagree cannot be built or read.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field, FiniteFloat, field_validator, model_validator

from towline.common.files import write_atomically
from towline.schema import checks, files
from towline.schema import files as columns
from towline.schema.base import (
    SCHEMA_VERSION,
    Count,
    Id,
    Json,
    Model,
    check_version,
)
from towline.schema.entities import Reward, check_end
from towline.schema.trace import Trace
from towline.schema.turn import Turn, of_turn
from towline.schema.vocabulary import (
    TRAINED_ROLES,
    BuilderName,
    ContextPolicy,
    EndReason,
    FailureReason,
    SessionState,
    TurnRole,
)


class FidelityReport(Model):
    """Measures of how exact a session was."""

    conversations: Count = 0
    turns: Count = 0
    chains: Count = 0
    forks: dict[str, Count] = Field(default_factory=dict)
    """Number of forks by reason."""
    forced_closes: Count = 0
    row_tokens: Count = 0
    """Total tokens of all rows."""
    distinct_tokens: Count = 0
    """Tokens of the graph, each counted once."""
    trained_tokens: Count = 0
    discarded_tokens: Count = 0
    plain_difference: float | None = Field(default=None, ge=0, le=1)
    """Share of context tokens that differ from what a plain server would have rendered; `None` if not measured.

    Tokens that only the plain server would have shown count like those that only the model saw.
    """
    plain_different: Count = 0
    """Turns with such differences."""
    plain_different_turns: list[str] = Field(default_factory=list)
    """Ids of the first such turns."""
    special_text: Count = 0
    """Special-token texts inside messages."""
    malformed_calls: Count = 0
    calls_as_text: Count = 0
    """Turns with tools whose template has no known tool-call format: their calls reached the harness as text."""
    frozen_turns: Count = 0
    """Turns sampled by engines other than the policy; they are in no row."""
    unknown_prompts: Count = 0
    """Turns in no row because the engine did not report what the model saw in place of an image."""
    images: Count = 0
    """Images in the rows."""
    mixed_cache: Count = 0
    """Sampled tokens whose context may have been computed under older weights, by a trainer that pushes without a pause."""
    untrained_tokens: dict[str, Count] = Field(default_factory=dict)
    """Tokens sampled by the policy that no row trains, by role or other reason."""
    main_tokens: Count = 0
    """Trained tokens of the main conversation and of compactions that continue it."""
    unmatched: Count = 0
    """Roots of unknown origin."""

    @property
    def row_over_distinct(self) -> float:
        """How often a token of the graph is in rows on average; at least 1, and 1 for an empty graph."""
        return self.row_tokens / self.distinct_tokens if self.distinct_tokens else 1.0


class Trajectory(Model):
    """A session's turns and traces with rewards and metadata: what is stored, and what a trainer gets."""

    schema_version: int = SCHEMA_VERSION
    session_id: Id
    group_id: Id
    context_policy: ContextPolicy = ContextPolicy.RETAIN
    builder: BuilderName = BuilderName.EXACT
    trained_roles: list[TurnRole] = Field(default_factory=lambda: list(TRAINED_ROLES))
    turns: list[Turn] = Field(default_factory=list)
    traces: list[Trace] = Field(default_factory=list)
    reward: Reward | None = None
    state: SessionState
    end_reason: EndReason | None = None
    failure: FailureReason | None = None
    """Why the session is FAILED or LOST."""
    error: str | None = None
    report: FidelityReport = Field(default_factory=FidelityReport)
    tools: dict[str, list[Json]] = Field(default_factory=dict)
    """Tool declarations by `Turn.tools_key`."""
    images: dict[str, str] = Field(default_factory=dict)
    """Images that were sent inside requests, as data URLs by `Image.digest`."""
    template: str = ""
    """Name or hash of the chat template."""
    engine: str = ""
    created: float = 0.0
    """Unix time."""
    timings: dict[str, FiniteFloat] = Field(default_factory=dict)
    """Seconds by stage."""
    metadata: Json = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _version_is_readable(cls, data: Any) -> Any:
        if isinstance(data, dict):
            check_version(data.get("schema_version", SCHEMA_VERSION))
        return data

    @field_validator("trained_roles")
    @classmethod
    def _roles_are_trainable(cls, roles: list[TurnRole]) -> list[TurnRole]:
        if len(set(roles)) != len(roles):
            raise ValueError("a role is named twice")
        if TurnRole.DISCARDED in roles:
            raise ValueError("discarded turns are never trained")
        return roles

    @model_validator(mode="after")
    def _sides_agree(self) -> Self:
        check_end(self.state, self.end_reason, self.error)
        checks.check_graph(self.turns)
        for turn in self.turns:
            if turn.tools_key and turn.tools_key not in self.tools:
                raise ValueError(f"turn {turn.id}: its tools {turn.tools_key} are not recorded")
        checks.check_traces(self.traces, self.session_id, self.group_id, self.builder)
        done = self.state is SessionState.DONE
        # A session that failed before its traces were built keeps its turns; one that is done must have all traces.
        trained = checks.check_ownership(
            self.turns, self.traces, self.trained_roles, complete=bool(self.traces) or done
        )
        if done and not trained and not self.error:
            raise ValueError("a session that is done without a trained token needs an error that says why")
        by_id = {turn.id: turn for turn in self.turns}
        by_index = {turn.index: turn for turn in self.turns}
        settings = {turn.index: of_turn(turn) for turn in self.turns}
        for trace in self.traces:
            if trace._sampling_assumed:
                trace._take_sampling(settings)
                trace._sampling_assumed = False
            if self.builder is BuilderName.EXACT:
                checks.check_exact(trace, by_id, by_index)
            checks.check_sampling(trace, settings)
        for name in {*(self.reward.per_turn if self.reward else ()), *(n for t in self.traces for n in t.turn_rewards)}:
            if name not in by_id:
                raise ValueError(f"a reward names a turn {name} that does not exist")
        return self

    def path(self, turn_id: str) -> list[Turn]:
        """The turns from the root to the named one."""
        by_id = {turn.id: turn for turn in self.turns}
        return checks.path_to(by_id[turn_id], by_id)

    def prompt(self, turn_id: str) -> npt.NDArray[np.int32]:
        """The whole prompt of a turn, as the model saw it."""
        by_id = {turn.id: turn for turn in self.turns}
        return checks.prompt_of(by_id[turn_id], by_id)

    def row_turns(self, trace: Trace) -> list[tuple[Turn, list[Json]]]:
        """The turns of a row up to its last, in order, each with the messages since the previous one.

        A turn whose reply the harness extended comes before the turn that continues it, though it is not its parent; the
        message that the harness made of the reply is left out.
        """
        by_id = {turn.id: turn for turn in self.turns}
        by_index = {turn.index: turn for turn in self.turns}
        sampled = [by_index[index] for index, _, _ in checks.runs(trace.turn_ids) if index >= 0]
        exact = trace.builder is BuilderName.EXACT
        found: list[tuple[Turn, list[Json]]] = []
        turn: Turn | None = sampled[-1] if sampled else None
        while turn is not None:
            last = turn
            shared = [t for t in sampled if exact and t.parent == last.parent and t.index < last.index]
            before = shared[-1] if shared else None
            found.append((last, last.messages[len(before.messages) + 1 :] if before else last.messages))
            turn = before or by_id.get(last.parent or "")
        return found[::-1]

    def with_reward(self, reward: Reward) -> Trajectory:
        """A copy with the reward, also on every trace; the arrays are shared."""
        traces = []
        for trace in self.traces:
            # Only the row that trains a turn has its reward: sibling rows would count it again.
            trained = {int(i) for i in np.unique(trace.turn_ids[trace.loss_mask == 1])}
            own = {t.id: reward.per_turn[t.id] for t in self.turns if t.index in trained and t.id in reward.per_turn}
            traces.append(trace.model_copy(update={"reward": reward.score, "turn_rewards": own}))
        return Trajectory.model_validate(self.__dict__ | {"reward": reward, "traces": traces})

    def to_arrow(self) -> pa.Table:
        """One row, nested lists."""
        return columns.to_table(Trajectory, [self])

    @classmethod
    def from_arrow(cls, table: pa.Table) -> Trajectory:
        """The trajectory of a one-row table."""
        return cls.model_validate(columns.one_row(cls, table))

    def to_json(self) -> bytes:
        return files.dump_json(self)

    @classmethod
    def from_json(cls, data: bytes | str) -> Trajectory:
        return cls.model_validate(files.load_json(data))

    def write(self, path: Path | str) -> None:
        """Write `path` atomically: JSON for `.json`, an Arrow file for `.arrow`. Durable on return."""
        path = Path(path)
        write_atomically(path, self.to_json() if files.is_json(path) else files.arrow_bytes(self.to_arrow()))

    @classmethod
    def read(cls, path: Path | str) -> Trajectory:
        """Read a file that `write` wrote; raises `SchemaError` for any other."""
        path = Path(path)
        if files.is_json(path):
            return cls.from_json(path.read_bytes())
        return cls.from_arrow(files.read_arrow(path))


def traces_table(records: Iterable[Trajectory | Trace]) -> pa.Table:
    """The traces, or the traces of the trajectories, in order. The table's metadata holds the schema version."""
    traces: list[Trace] = []
    for record in records:
        traces.extend(record.traces if isinstance(record, Trajectory) else [record])
    return columns.to_table(Trace, traces)
