"""What the rollout service and its clients say to each other, besides tasks, sessions and trajectories.

A result is one session, or one whole group, that has ended. A consumer leases results, uses them, and acknowledges them
by id; what is not acknowledged before its lease runs out is handed out again, and what is acknowledged never is.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from towline.schema.base import Count, Id, Json, Model
from towline.schema.entities import Session
from towline.schema.vocabulary import EndReason, FailureReason, RewardStatus, SessionState


class Unit(StrEnum):
    """What one result is."""

    SESSION = "session"
    GROUP = "group"
    """All sessions of a task that count, together, once the group is complete."""


class Start(StrEnum):
    """Where a consumer that was never seen before begins."""

    BEGINNING = "beginning"
    NOW = "now"


class Stale(StrEnum):
    """What becomes of results that are older than a consumer wants; they are counted either way."""

    DROP = "drop"
    FLAG = "flag"


class Role(StrEnum):
    """What a key may do."""

    SUBMIT = "submit"
    CONSUME = "consume"
    ADMIN = "admin"
    """Everything."""


class TaskState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    """Every session that counts has ended."""
    CANCELLED = "cancelled"


class Accepted(Model):
    """The answer to one submitted task. Submitting the same task again is the same task; another under its id is refused."""

    task_id: Id
    created: bool
    """False if it was there already."""
    sessions: Count


class TaskStatus(Model):
    task_id: Id
    state: TaskState
    num_samples: Count
    finished: Count
    """Sessions that came to their end, attempts that were tried again not counted."""
    usable: Count
    """Those that a trainer can learn from."""
    created: float
    updated: float
    sessions: list[Session] = Field(default_factory=list)
    """The latest attempt of every sample; empty in lists of tasks."""
    attempts: list[Session] = Field(default_factory=list)
    """Every attempt at every sample, in order, the latest included; empty in lists of tasks."""


class SessionResult(Model):
    """A session that has ended, without its tokens: those come by `session_id`."""

    session_id: Id
    task_id: Id
    sample: Count
    attempt: int
    state: SessionState
    end_reason: EndReason | None = None
    failure: FailureReason | None = None
    """Why it is FAILED or LOST."""
    error: str | None = None
    reward: float | None = None
    """`None` while there is no score: never to be read as 0."""
    reward_status: RewardStatus | None = None
    usable: bool
    turns: Count
    trained_tokens: Count
    lowest_version: int | None = None
    """Oldest policy version among its trained tokens."""
    stale: bool = False
    """Older than the consumer or the task wants."""
    damaged: str | None = None
    """Why its trajectory cannot be read from the store, if it cannot. The result is acknowledged as any other."""
    finished: float
    notes: list[str] = Field(default_factory=list)
    """What the node noted about the session, such as what the engine answered when it failed."""
    metadata: Json = Field(default_factory=dict)
    """The task's own."""


class Result(Model):
    """One leased result."""

    result_id: Id
    """What is acknowledged."""
    unit: Unit
    task_id: Id
    sessions: list[SessionResult]
    """One, or the usable ones of a complete group; none of a group that cannot be complete and is dropped whole."""
    reasons: dict[str, Count] = Field(default_factory=dict)
    """Of a group without sessions: why its samples are not usable, counted. A `FailureReason`, `cancelled`, `unscored` (no
    reward) or `untrained` (no trained tokens)."""
    delivery: int = Field(ge=1)
    """How often this consumer was handed it."""
    lease_until: float
    """Unix time."""


class Results(Model):
    results: list[Result]
    dropped: Count = 0
    """Stale results that were passed over in this call, for good."""
    version: int
    """The policy version now."""


class Ack(Model):
    consumer: Id
    result_ids: list[Id]
    unusable: list[Id] = Field(default_factory=list)
    """Those of `result_ids` that no update learned from: they do not count towards `groups_per_update`."""


class Acked(Model):
    acked: list[Id]
    unknown: list[Id] = Field(default_factory=list)
    """Never leased to this consumer."""


class DurationQuartile(Model):
    """A quarter of the groups that a consumer was done with lately, by how long they took."""

    longest_seconds: float
    """From the start of a group's first session to the group's end."""
    groups: Count
    trained: Count
    """Those of them that the consumer used; the others were dropped as stale or acknowledged as unusable."""
    share: float
    """Of all groups."""
    trained_share: float
    """Of all trained groups: less than `share` where slow tasks are trained on less than they were submitted."""


class ConsumerPace(Model):
    """A consumer that declared `groups_per_update`, or has used or dropped groups since the server's start."""

    consumer: Id
    groups_per_update: int | None = None
    """`None` for one that declared no pace: only its quartiles are told."""
    max_staleness: int | None = None
    used: Count = 0
    """Groups that it used under the policy version now."""
    in_hand: Count = 0
    """Groups that it has leased and not acknowledged."""
    running: Count = 0
    finished: Count = 0
    """Groups that wait to be handed out."""
    admissible: int | None = None
    """How many more groups may start; `None` without a bound."""
    withheld_seconds: float = 0.0
    """How long it waited while finished groups were withheld for older ones, since the server's start."""
    quartiles: list[DurationQuartile] = Field(default_factory=list)
    """From the fastest to the slowest, since the server's start."""


class Pacing(Model):
    idle_slot_seconds: float
    """Session slots that were empty while sessions waited for their pace, times seconds, since the server's start."""
    consumers: list[ConsumerPace]


class Policy(Model):
    version: Count
    paused: bool


class BreakerStatus(Model):
    """The circuit breaker of one engine or sandbox runtime. While it is open, sessions that need the component wait."""

    component: str
    """`engine:NAME` or `sandbox:KIND`."""
    open: bool
    reason: str = ""
    """What the component last answered; kept after the breaker has closed."""
    since: float = 0.0
    """Unix time of the last opening or closing."""
    opened: Count = 0
    """How often it has opened."""


class Event(Model):
    """One line of `GET /v1/events`."""

    seq: Count
    at: float
    kind: str
    """`task`, `session`, `result`, `policy`, `breaker`; `missed` for those that are no longer kept."""
    body: Json


class Problem(Model):
    """Every error's body."""

    error: str
    field: str | None = None
    """Path of the field at fault, if one is."""
