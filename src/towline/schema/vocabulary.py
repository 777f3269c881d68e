"""The closed vocabularies of the contract: every reason, role and state that a record may name.

The life of a session is a table, `VALID_TRANSITIONS`: what is not in it cannot happen.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

POLICY = "policy"
"""The name of the engine whose turns are trained."""


class ContextPolicy(StrEnum):
    """What a conversation keeps of replies that the harness or the template would change."""

    RETAIN = "retain"
    """The token buffer stays as it was sampled."""
    AS_SENT = "as_sent"
    """The model sees what the harness sends; dropped reasoning forks."""
    TEMPLATE = "template"
    """Forks only where the chat template itself rewrites history."""


class BuilderName(StrEnum):
    """How a graph becomes traces."""

    EXACT = "exact"
    MERGED = "merged"
    PER_TURN = "per_turn"


class ForkReason(StrEnum):
    """Why a turn does not simply continue the conversation before it."""

    REASONING_DROPPED = "reasoning_dropped"
    TEMPLATE_REWRITE = "template_rewrite"
    HISTORY_EDITED = "history_edited"
    COMPACTION = "compaction"
    TOOLS_CHANGED = "tools_changed"
    SYSTEM_CHANGED = "system_changed"
    SUBAGENT = "subagent"
    """A sub-agent under the tools and the system prompt of the turn that called it."""
    SIDE = "side"
    SIBLING = "sibling"
    VANISHED_MESSAGE = "vanished_message"
    STOP_MISMATCH = "stop_mismatch"
    PREFILL = "prefill"
    MODEL_CHANGED = "model_changed"
    """The harness went on with a model that another engine answers to."""
    IMAGE_UNREPORTED = "image_unreported"
    """The engine shows an image and does not say what stands for it in the prompt: nothing can be continued in place."""
    UNMATCHED = "unmatched"
    """A further root whose reason is none of the others."""


class TurnRole(StrEnum):
    """What a turn is to its session."""

    MAIN = "main"
    SUBAGENT = "subagent"
    COMPACTION = "compaction"
    SIDE = "side"
    DISCARDED = "discarded"
    """Sampled and never delivered."""


class Untrained(StrEnum):
    """Why a turn is not trained, whatever its role."""

    FROZEN = "frozen"
    """Another engine than the policy sampled it."""
    PROMPT_UNKNOWN = "prompt_unknown"
    """The engine did not say what the model saw in place of an image."""


TRAINED_ROLES: tuple[TurnRole, ...] = (TurnRole.MAIN, TurnRole.SUBAGENT, TurnRole.COMPACTION)
"""The roles that are trained unless a run says otherwise."""


class EndReason(StrEnum):
    """Why the harness stopped running."""

    EXITED = "exited"
    TIMEOUT = "timeout"
    LOOPING = "looping"
    LIMIT = "limit"
    CANCELLED = "cancelled"
    ERROR = "error"
    MEMORY = "memory"
    """The sandbox's own memory limit killed it: the agent's doing, scored."""


class FailureReason(StrEnum):
    """Which part of the infrastructure made a session FAILED or LOST. Such a session is never scored."""

    ENGINE = "engine"
    """The engine failed a turn, or its answer broke the contract."""
    STALL = "stall"
    """The engine produced no token for `engine.stall_seconds`."""
    SANDBOX = "sandbox"
    """The sandbox could not be made, or was killed from outside."""
    SETUP = "setup"
    """A set-up command of the task failed."""
    HARNESS = "harness"
    """The harness could not be started, or made no model call."""
    EVALUATOR = "evaluator"
    """The evaluation failed, and so did the control run on an untouched environment."""
    STAGE_TIMEOUT = "stage_timeout"
    """A stage other than RUN exceeded its budget."""
    NODE = "node"
    """The node or the server that ran the session died."""
    STORAGE = "storage"
    """The journal, the trajectory or its segment could not be written or read."""
    QUARANTINED = "quarantined"
    """The session was running at three node deaths and is not tried again."""
    CONFIG = "config"
    """A setting that the session needs cannot be used."""
    INTERNAL = "internal"
    """An unexpected error in Towline."""


class RewardStatus(StrEnum):
    """Whether a reward means anything."""

    SCORED = "scored"
    FAILED = "failed"
    """The evaluator ran and broke: an infrastructure failure, never reward 0."""
    MISSING = "missing"
    """No evaluator ran, or it gave no score."""


class LogFormat(StrEnum):
    """The program that prints the results of single tests."""

    PYTEST = "pytest"
    UNITTEST = "unittest"
    SYMPY = "sympy"
    GO = "go"
    JEST = "jest"
    MOCHA = "mocha"
    VITEST = "vitest"
    NODE = "node"
    CARGO = "cargo"
    TAP = "tap"
    CTEST = "ctest"
    GTEST = "gtest"
    MAVEN = "maven"
    GRADLE = "gradle"


class SessionState(StrEnum):
    """Where a session is in its life."""

    QUEUED = "queued"
    INIT = "init"
    READY = "ready"
    RUNNING = "running"
    BUILDING = "building"
    EVALUATING = "evaluating"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"

    @property
    def terminal(self) -> bool:
        """Nothing happens to the session any more."""
        return not VALID_TRANSITIONS[self]

    def can_become(self, state: SessionState) -> bool:
        return state in VALID_TRANSITIONS[self]


_BROKEN = frozenset({SessionState.FAILED, SessionState.CANCELLED, SessionState.LOST})

VALID_TRANSITIONS: Mapping[SessionState, frozenset[SessionState]] = MappingProxyType(
    {
        SessionState.QUEUED: frozenset({SessionState.INIT}) | _BROKEN,
        SessionState.INIT: frozenset({SessionState.READY}) | _BROKEN,
        SessionState.READY: frozenset({SessionState.RUNNING}) | _BROKEN,
        SessionState.RUNNING: frozenset({SessionState.BUILDING}) | _BROKEN,
        SessionState.BUILDING: frozenset({SessionState.EVALUATING, SessionState.DONE}) | _BROKEN,
        SessionState.EVALUATING: frozenset({SessionState.DONE}) | _BROKEN,
        SessionState.DONE: frozenset(),
        SessionState.FAILED: frozenset(),
        SessionState.CANCELLED: frozenset(),
        SessionState.LOST: frozenset(),
    }
)
"""A session without an evaluator goes from BUILDING to DONE. Trying a lost session again is a new attempt."""
