"""The messages between the rollout service and its clients, besides tasks, sessions and trajectories.

A result is one session, or one whole group, that has ended. A consumer leases results, uses them, and acknowledges them
by id. A result that is not acknowledged before its lease expires is delivered again; an acknowledged one never is.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from pydantic import Field

from towline.schema.base import Count, Id, Json, Model
from towline.schema.early_stop import EarlyStop
from towline.schema.entities import Session
from towline.schema.outcomes import SessionSummary
from towline.schema.vocabulary import DEFAULT_TENANT, FailureReason, SessionState


class Unit(StrEnum):
    """What one result contains."""

    SESSION = "session"
    """One ended session."""
    GROUP = "group"
    """The usable sessions of a task together, once the group is complete."""


class Start(StrEnum):
    """Where a new consumer starts."""

    BEGINNING = "beginning"
    """With the oldest stored result."""
    NOW = "now"
    """With results published from now on."""


class Stale(StrEnum):
    """What to do with results older than `max_staleness`; they are counted either way."""

    DROP = "drop"
    """Skip them for good."""
    FLAG = "flag"
    """Deliver them with `stale` set."""


class Role(StrEnum):
    """What an API key may do."""

    SUBMIT = "submit"
    """Submit and cancel tasks."""
    CONSUME = "consume"
    """Lease and acknowledge results, read trajectories and logs."""
    ADMIN = "admin"
    """Everything."""


class TaskState(StrEnum):
    """The state of a task."""

    QUEUED = "queued"
    """None of its sessions has started."""
    RUNNING = "running"
    """Some session has started."""
    DONE = "done"
    """The result of its group is published."""
    CANCELLED = "cancelled"
    """Cancelled before its group was complete."""


class Accepted(Model):
    """The answer to one submitted task. Submitting is idempotent; a different task under the same id is rejected."""

    task_id: Id
    created: bool
    """False if the task already existed."""
    sessions: Count


class TaskStatus(Model):
    """A task and its progress."""

    task_id: Id
    state: TaskState
    num_samples: Count
    finished: Count
    """Samples that have ended; retried attempts do not count."""
    usable: Count
    """Those of them that a trainer can learn from."""
    created: float
    updated: float
    grace_until: float | None = None
    """While its group is in the grace period: when the samples that have not ended are stopped."""
    cut: Count = 0
    """Samples that had not ended when the group was stopped early."""
    early_stop: EarlyStop | None = None
    """What stopping it early cut, saved and favoured; `None` if nothing was cut, and in lists of tasks."""
    sessions: list[Session] = Field(default_factory=list)
    """The latest attempt at every sample; empty in lists of tasks."""
    attempts: list[Session] = Field(default_factory=list)
    """Every attempt at every sample, in order; empty in lists of tasks."""
    tenant: str = DEFAULT_TENANT
    """Who owns it: task ids are unique per tenant."""


class SessionResult(SessionSummary):
    """A session that has ended, as a result: its tokens are fetched by `session_id`."""

    lowest_version: int | None = None
    """Oldest policy version among its trained tokens."""
    stale: bool = False
    """Whether it exceeds the staleness limit of the consumer or the task."""
    damaged: str | None = None
    """Why its trajectory cannot be read from the store, if so. The result is acknowledged like any other."""
    finished: float
    """Unix time."""
    notes: list[str] = Field(default_factory=list)
    """Notes of the node, such as the response of an engine that failed."""
    metadata: Json = Field(default_factory=dict)
    """The metadata of the task."""


class Result(Model):
    """One leased result."""

    result_id: Id
    """The id to acknowledge."""
    unit: Unit
    task_id: Id
    sessions: list[SessionResult]
    """One session, the usable ones of a complete group, or none for a group that was dropped."""
    reasons: dict[str, Count] = Field(default_factory=dict)
    """For a dropped group: why its samples are not usable, counted by `unusable_reason`."""
    cut: Count = 0
    """For a group: samples that had not ended when it was stopped early."""
    delivery: int = Field(ge=1)
    """How often it was delivered to this consumer."""
    lease_until: float
    """When the lease expires, in Unix time."""

    def with_damaged(self, reasons: Mapping[str, str]) -> Result:
        """The result with sessions flagged whose trajectories cannot be read, by session id."""
        sessions = [
            one.model_copy(
                update={
                    "damaged": reasons[one.session_id],
                    "usable": False,
                    "failure": one.failure or FailureReason.STORAGE,
                }
            )
            if one.session_id in reasons
            else one
            for one in self.sessions
        ]
        return self.model_copy(update={"sessions": sessions})


class Results(Model):
    """The answer to a call for results."""

    results: list[Result]
    dropped: Count = 0
    """Stale results that this call dropped."""
    version: int
    """The current policy version."""


class Ack(Model):
    """An acknowledgement of results."""

    consumer: Id
    result_ids: list[Id]
    unusable: list[Id] = Field(default_factory=list)
    """Those of `result_ids` that no update used: they do not count towards `groups_per_update`."""


class Acked(Model):
    """The answer to an acknowledgement."""

    acked: list[Id]
    unknown: list[Id] = Field(default_factory=list)
    """Never leased to this consumer."""


class DurationQuartile(Model):
    """A quarter of the groups that a consumer finished recently, by duration."""

    longest_seconds: float
    """Longest duration, from the start of a group's first session to the end of the group."""
    groups: Count
    trained: Count
    """Those that the consumer used; the others were dropped as stale or acknowledged as unusable."""
    share: float
    """Share of all groups."""
    trained_share: float
    """Share of all trained groups: less than `share` for slow tasks that are trained on too rarely."""


class ConsumerPace(Model):
    """A consumer that declared `groups_per_update`, or used or dropped groups since the server started."""

    consumer: Id
    tenant: str = DEFAULT_TENANT
    groups_per_update: int | None = None
    """`None` for a consumer without a pace, which only has quartiles."""
    max_staleness: int | None = None
    used: Count = 0
    """Groups used under the current policy version."""
    in_hand: Count = 0
    """Groups that are leased and not acknowledged."""
    running: Count = 0
    finished: Count = 0
    """Groups that wait to be delivered."""
    admissible: int | None = None
    """How many more groups may start; `None`: no limit."""
    withheld_seconds: float = 0.0
    """How long it waited while finished groups were withheld for older ones, since the server started."""
    quartiles: list[DurationQuartile] = Field(default_factory=list)
    """From the fastest to the slowest, since the server started."""


class Pacing(Model):
    """What pacing does and costs."""

    idle_slot_seconds: float
    """Slot seconds left empty by pacing while sessions waited, since the server started."""
    consumers: list[ConsumerPace]


class Compared(StrEnum):
    """Which finished sessions a running one is compared with."""

    SIBLINGS = "siblings"
    """Those of its own task."""
    ALL = "all"
    """Those that finished last since the server started, of any task."""


class SlowSession(Model):
    """A session that is being worked on, and how its time in the stage compares."""

    session_id: Id
    task_id: Id
    sample: Count
    attempt: int
    state: SessionState
    """Its stage."""
    seconds: float
    """Time in the stage so far."""
    turns: Count | None = None
    """Turns so far; `None` if its node does not say."""
    median_seconds: float | None = None
    """Median time of finished sessions in this stage; `None` if too few have finished."""
    compared_with: Compared | None = None
    straggler: bool = False
    """Whether `seconds` is more than 3 times the median."""
    tenant: str = DEFAULT_TENANT


class Policy(Model):
    """The policy that samples."""

    version: Count
    paused: bool


class BreakerStatus(Model):
    """The circuit breaker of one engine or sandbox runtime. While it is open, sessions that need the component wait."""

    component: str
    """`engine:NAME` or `sandbox:KIND`."""
    open: bool
    reason: str = ""
    """Why it opened last; kept after the breaker has closed."""
    since: float = 0.0
    """Unix time of the last opening or closing."""
    opened: Count = 0
    """How often it has opened."""


class Event(Model):
    """One event of `GET /v1/events`."""

    seq: Count
    at: float
    kind: str
    """`task`, `session`, `result`, `policy`, `breaker`; `missed` for those that are no longer kept."""
    body: Json
    tenant: str = ""
    """Whose task it is about; empty for an event of the whole service."""


class Problem(Model):
    """The body of every error response."""

    error: str
    field: str | None = None
    """Path of the field at fault, if there is one."""
