"""A session as tokens: `Turn`, `Trace`, and the `Trajectory` that holds both and proves that they agree.

A turn stores what is new in it (suffix and sampled tokens), a trace is a whole training row. Both are kept: the turns
are the evidence, the traces what a trainer reads, and a trajectory whose two sides disagree cannot be built or read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field, FiniteFloat, PrivateAttr, field_validator, model_validator

from towline.schema import checks, columns, files, sampling
from towline.schema.base import (
    SCHEMA_VERSION,
    Count,
    Float32Array,
    Id,
    Int32Array,
    Json,
    Model,
    Scores,
    UInt8Array,
    check_version,
)
from towline.schema.entities import Reward, check_end
from towline.schema.sampling import Temperature, TopP, TurnSampling
from towline.schema.vocabulary import (
    POLICY,
    TRAINED_ROLES,
    BuilderName,
    ContextPolicy,
    EndReason,
    FailureReason,
    ForkReason,
    SessionState,
    TurnRole,
    Untrained,
)


class Image(Model):
    """An image that the model saw, and which tokens stand for it."""

    digest: str
    """Hex SHA-256 of its bytes, or of its URL where the bytes are elsewhere."""
    url: str = ""
    """Where it is; empty if it was sent within the request."""
    start: Count
    """Its first token, counted from the beginning of the whole prompt or row."""
    length: Count
    """0 if the engine does not say which tokens stand for it."""
    key: str = ""
    """What the engine calls it, once it was made ready for the model."""


class Turn(Model):
    """One model call. `sampled`, `logprobs` and `versions` have one entry a token."""

    id: Id
    index: Count
    """Order of starting in the session; what `Trace.turn_ids` names."""
    parent: Id | None = None
    """The turn whose prompt and sampled tokens this prompt starts with."""
    origin: Id | None = None
    """The turn the conversation came from when it forked or compacted; may differ from `parent`."""
    origin_inferred: bool = False
    """The origin is a conclusion, not something the harness said."""
    reason: ForkReason | None = None
    """Why it forked; `None` for a plain continuation and for the first root."""
    role: TurnRole = TurnRole.MAIN
    role_reason: str = ""
    """The rule that gave the role."""
    difference: Json = Field(default_factory=dict)
    """The first message in which the request differs from the turn it forked from: `turn`, `message` (its place), `role`,
    and excerpts, `was` and `sent`. Empty for other turns than `history_edited` and `unmatched`."""
    unended: Count = 0
    """Sampled tokens at its end that no row trains, its end of turn above all: the harness wrote on behind the reply, and
    the row that trains the others goes on with that."""
    prompt_length: Count
    suffix: Int32Array
    """Prompt tokens after the parent's prompt and sampled tokens, a forced close too; the whole prompt of a root."""
    sampled: Int32Array
    logprobs: Float32Array
    versions: Int32Array
    """The policy version of each sampled token."""
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
    """What was sampled with; 0 is off."""
    requested: Json = Field(default_factory=dict)
    """The sampling that the harness asked for."""
    overridden: list[str] = Field(default_factory=list)
    ignored: list[str] = Field(default_factory=list)
    messages: list[Json] = Field(default_factory=list)
    """The new messages of this call in neutral JSON."""
    tools_key: str = ""
    """Names the tool declarations in `Trajectory.tools`; empty for a call without tools."""
    engine: str = POLICY
    """The name of the engine that sampled it. The ids of another engine than the policy are of its own vocabulary."""
    untrained: Untrained | None = None
    images: list[Image] = Field(default_factory=list)
    """The images in `suffix`."""
    reply: Json = Field(default_factory=dict)
    cached_tokens: Count = 0
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
        checks.check_logprobs(self.logprobs)
        for name in ("suffix", "sampled", "versions"):
            array = getattr(self, name)
            if array.size and int(array.min()) < 0:
                raise ValueError(f"{name} must not be negative")
        return self


class Trace(Model):
    """One training row: the tokens of one root-to-leaf path, one entry a token in every array."""

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
    """The last turn's, as `top_p` and `top_k` are: a row may mix settings, and `temperatures` and `sampling` say how."""
    top_p: TopP = 1.0
    top_k: Count = 0
    temperatures: Float32Array = Field(default_factory=lambda: np.empty(0, np.float32))
    """What each token was sampled at: 1 for context, 0 for a greedy turn, whose logprobs are those of temperature 1."""
    sampling: list[TurnSampling] = Field(default_factory=list)
    """The settings of each turn with a token in the row, in the order of the turns."""
    finish_reason: str = ""
    """Why the last turn ended."""
    fork_reason: ForkReason | None = None
    truncated: bool = False
    """The row stops before the model did: its last turn was cut short, or the session was."""
    images: list[Image] = Field(default_factory=list)
    """The images among the tokens, in order."""
    _sampling_assumed: bool = PrivateAttr(default=False)
    """Whether the settings per token and turn were not given, and are taken from the row's own."""

    @model_validator(mode="after")
    def _arrays_agree(self) -> Self:
        arrays = (self.token_ids, self.loss_mask, self.logprobs, self.policy_versions, self.turn_ids)
        lengths = [len(array) for array in arrays]
        if len(set(lengths)) != 1:
            raise ValueError(f"arrays of one trace must have one length, found {lengths}")
        if lengths[0] == 0:
            raise ValueError("a trace needs at least one token")
        checks.check_logprobs(self.logprobs)
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
                raise ValueError(f"the image at token {image.start} does not stand in the row's context")
        if not len(self.temperatures) and not self.sampling:
            # A record from before rows had them, or a caller with one setting for all turns.
            one = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
            self._take_sampling({int(i): TurnSampling(turn=int(i), **one) for i in np.unique(self.turn_ids) if i >= 0})
            self._sampling_assumed = True
        if len(self.temperatures) != lengths[0]:
            raise ValueError(f"temperatures has {len(self.temperatures)} entries for {lengths[0]} tokens")
        if not np.isfinite(self.temperatures).all() or float(self.temperatures.min()) < 0:
            raise ValueError("temperatures must be finite and not negative")
        return self

    def _take_sampling(self, settings: Mapping[int, TurnSampling]) -> None:
        self.temperatures, self.sampling = sampling.of_turns(self.turn_ids, settings)

    @property
    def trained_temperatures(self) -> list[float]:
        """The temperatures of the trained tokens, each once, ascending: more than one if the row mixes them."""
        values: list[float] = np.unique(self.temperatures[self.loss_mask == 1]).tolist()
        return values

    @property
    def logit_divisors(self) -> npt.NDArray[np.float32]:
        """What logits are divided by for the recorded logprob of each token: its temperature, 1 for a greedy one."""
        return np.where(self.temperatures > 0, self.temperatures, np.float32(1))

    @property
    def trained_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    @property
    def lowest_version(self) -> int | None:
        """The oldest policy version among the trained tokens; the current version minus it is the row's staleness."""
        versions = self.policy_versions[self.loss_mask == 1]
        return int(versions.min()) if versions.size else None


class FidelityReport(Model):
    """How exact a session was, in figures."""

    conversations: Count = 0
    turns: Count = 0
    chains: Count = 0
    forks: dict[str, Count] = Field(default_factory=dict)
    """How often each fork reason was recorded."""
    forced_closes: Count = 0
    row_tokens: Count = 0
    """Tokens of all rows together."""
    distinct_tokens: Count = 0
    """Tokens of the graph, each counted once."""
    trained_tokens: Count = 0
    discarded_tokens: Count = 0
    plain_difference: float | None = Field(default=None, ge=0, le=1)
    """Share of context tokens that differ from what a plain server would have rendered; `None` if it was not measured.

    What only the plain server would have shown counts as much as what only the model saw.
    """
    plain_different: Count = 0
    """Turns with such a difference."""
    plain_different_turns: list[str] = Field(default_factory=list)
    """Ids of the first of them."""
    special_text: Count = 0
    """Special-token texts inside messages."""
    malformed_calls: Count = 0
    calls_as_text: Count = 0
    """Turns with tools under a template whose format of calls is not known: their calls reached the harness as text."""
    frozen_turns: Count = 0
    """Turns that other engines than the policy sampled; they are in no row."""
    unknown_prompts: Count = 0
    """Turns in no row because the engine did not say what the model saw in place of an image."""
    images: Count = 0
    """Images in the rows."""
    untrained_tokens: dict[str, Count] = Field(default_factory=dict)
    """Sampled tokens of the policy that no row trains, by role or other reason."""
    main_tokens: Count = 0
    """Trained tokens of main and of the compactions that continue it."""
    unmatched: Count = 0
    """Roots whose origin nothing tells."""

    @property
    def row_over_distinct(self) -> float:
        """How often a token of the graph stands in rows; 1 is the least, and what an empty graph gives."""
        return self.row_tokens / self.distinct_tokens if self.distinct_tokens else 1.0


class Trajectory(Model):
    """A session's turns and traces with rewards and metadata: what is stored and what a trainer leases."""

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
    """Images that were sent within requests and that the model saw, as data URLs by `Image.digest`."""
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
        # A session that broke before its traces were built keeps its turns; one that is done has no such excuse.
        trained = checks.check_ownership(
            self.turns, self.traces, self.trained_roles, complete=bool(self.traces) or done
        )
        if done and not trained and not self.error:
            raise ValueError("a session that is done without a trained token needs an error that says why")
        by_id = {turn.id: turn for turn in self.turns}
        by_index = {turn.index: turn for turn in self.turns}
        settings = {turn.index: sampling.of_turn(turn) for turn in self.turns}
        for trace in self.traces:
            if trace._sampling_assumed:
                trace._take_sampling(settings)
                trace._sampling_assumed = False
            if self.builder is BuilderName.EXACT:
                checks.check_exact(trace, by_id, by_index)
            sampling.check_sampling(trace, settings)
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
        """The turns of a row on the way to its last, in order, each with the messages since the one before it.

        A turn whose reply the harness wrote on behind stands before the turn that goes on from it, though it is not its
        parent; the message that the harness made of the reply is left out.
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
        """A copy that carries the reward, on every trace too; the arrays are shared."""
        traces = []
        for trace in self.traces:
            # The sibling rows of a shared turn would count its reward again: only the row that trains it carries it.
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
        """Write to `path`, whole or not at all: JSON for `.json`, an Arrow file for `.arrow`. Durable on return."""
        path = Path(path)
        files.write_atomically(path, self.to_json() if files.is_json(path) else files.arrow_bytes(self.to_arrow()))

    @classmethod
    def read(cls, path: Path | str) -> Trajectory:
        """Read what `write` wrote; raises `SchemaError` with the reason for anything else."""
        path = Path(path)
        if files.is_json(path):
            return cls.from_json(path.read_bytes())
        return cls.from_arrow(files.read_arrow(path))
