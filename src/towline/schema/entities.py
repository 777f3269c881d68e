"""What is asked for and what it earned: `Task`, `Session`, `Reward`.

A task is submitted once and makes a group of sessions; a session moves only along `VALID_TRANSITIONS`.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, FiniteFloat, model_validator

from towline.errors import TowlineError
from towline.schema.base import Count, Id, Json, Model, Scores
from towline.schema.environment import Environment, File
from towline.schema.vocabulary import EndReason, FailureReason, RewardStatus, SessionState

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class TransitionError(TowlineError):
    """A step that the life of a session does not have."""


class Reward(Model):
    """What an evaluator says of a session. Only a `scored` reward may reach a trainer; read it through `score`."""

    value: FiniteFloat
    """The outcome. Without meaning unless the status is `scored`."""
    components: Scores = Field(default_factory=dict)
    """The parts that the value was made from, by name."""
    per_turn: Scores = Field(default_factory=dict)
    """Rewards of single turns, by turn id."""
    evaluator: str = ""
    status: RewardStatus = RewardStatus.SCORED
    error: str | None = None
    """Why there is no score."""
    cause: str | None = None
    """Set when the agent made its own evaluation fail: what failed. The value is then the evaluator's lowest score."""

    @property
    def score(self) -> float | None:
        """The value if it was scored; `None` keeps a failure from being read as 0."""
        return self.value if self.status is RewardStatus.SCORED else None

    @model_validator(mode="after")
    def _failure_has_a_reason(self) -> Self:
        if self.status is RewardStatus.FAILED and not self.error:
            raise ValueError("a failed reward needs an error that says why")
        if self.status is RewardStatus.SCORED and self.error:
            raise ValueError("a scored reward has no error")
        if self.status is not RewardStatus.SCORED and self.cause:
            raise ValueError("only a scored reward has a cause")
        return self


class Timeouts(Model):
    """Budgets of the stages of a session in seconds; `None` leaves it to the node."""

    init: Seconds | None = None
    run: Seconds | None = None
    """Starts with the harness, not in the queue."""
    build: Seconds | None = None
    evaluate: Seconds | None = None


class Step(Model):
    """One of several instructions of a task: given when the harness has ended on the one before, in the same sandbox."""

    name: Id
    instruction: str = Field(min_length=1)
    files: list[File] = Field(default_factory=list)
    """What comes with this step, and is not there before."""
    setup: list[str] = Field(default_factory=list)
    """Shell commands that are run before the harness starts on it."""
    seconds: Seconds | None = None
    """Budget of its run; `None` is that of the task."""


class Task(Model):
    """What is to be done, and how often."""

    task_id: Id
    """Also the `group_id` of its sessions."""
    instruction: str = Field(min_length=1)
    steps: list[Step] = Field(default_factory=list)
    """If there are any, the harness is given their instructions one after the other; `instruction` is all of them as one
    text, for whoever reads the task."""
    harness: Id
    harness_options: Json = Field(default_factory=dict)
    settings: Json = Field(default_factory=dict)
    """Of the sessions at the gateway: context policy, builder, sampling, limits."""
    environment: Environment = Field(default_factory=Environment)
    evaluator: Json = Field(default_factory=dict)
    """`kind` and that kind's options. Empty: the sessions are not scored."""
    num_samples: int = Field(default=1, ge=1)
    """How many sessions make the group."""
    min_samples: int = Field(default=0, ge=0)
    """How many finished sessions make the group good enough; 0 asks for all of them."""
    priority: int = 0
    """Higher runs earlier."""
    max_attempts: int = Field(default=3, ge=1)
    """How often a session is tried when its infrastructure fails."""
    timeouts: Timeouts = Field(default_factory=Timeouts)
    max_staleness: Count | None = None
    """Policy versions that a result may be behind when it is handed out, unless its consumer is stricter."""
    callback: str | None = None
    """A URL that is told when the group is complete: a hint, never the only delivery."""
    metadata: Json = Field(default_factory=dict)

    @property
    def required_samples(self) -> int:
        return self.min_samples or self.num_samples

    @model_validator(mode="after")
    def _group_can_be_complete(self) -> Self:
        if self.min_samples > self.num_samples:
            raise ValueError(f"min_samples {self.min_samples} exceeds num_samples {self.num_samples}")
        return self


class Session(Model):
    """One rollout of a task: one harness in one sandbox."""

    session_id: Id
    task_id: Id
    sample: Count = 0
    """Which of the task's samples this is."""
    attempt: int = Field(default=1, ge=1)
    state: SessionState = SessionState.QUEUED
    end_reason: EndReason | None = None
    failure: FailureReason | None = None
    """Why it is FAILED or LOST."""
    stage: SessionState | None = None
    """The last stage that it reached before it ended, where the service knows it."""
    error: str | None = None
    node: str = ""
    created: float = 0.0
    updated: float = 0.0
    """Unix times."""
    metadata: Json = Field(default_factory=dict)

    def advance(
        self,
        state: SessionState,
        *,
        at: float,
        end_reason: EndReason | None = None,
        error: str | None = None,
        failure: FailureReason | None = None,
    ) -> Session:
        """The session after one step; raises `TransitionError` for a step that does not exist."""
        if not self.state.can_become(state):
            raise TransitionError(f"session {self.session_id} cannot go from {self.state} to {state}")
        changes = {"state": state, "updated": at}
        changes |= {"end_reason": end_reason or self.end_reason, "error": error or self.error}
        changes |= {"failure": failure or self.failure}
        return Session.model_validate(self.__dict__ | changes)

    @model_validator(mode="after")
    def _end_is_explained(self) -> Self:
        check_end(self.state, self.end_reason, self.error)
        return self


def check_end(state: SessionState, end_reason: EndReason | None, error: str | None) -> None:
    """DONE says why the harness ended; FAILED says what broke."""
    if state is SessionState.DONE and end_reason is None:
        raise ValueError("a session that is done needs an end_reason")
    if state is SessionState.FAILED and not error:
        raise ValueError("a failed session needs an error that says why")
