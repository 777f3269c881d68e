"""The enums of the contract: every reason, role and state of a record.

The life of a session is a table, `VALID_TRANSITIONS`: no other transition can happen.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

POLICY = "policy"
"""The name of the engine whose turns are trained."""
DEFAULT_TENANT = "default"
"""The tenant of keys and tasks that name none."""


class ContextPolicy(StrEnum):
    """What the model sees of earlier replies that the harness or the template would change."""

    RETAIN = "retain"
    """The token buffer as it was sampled."""
    AS_SENT = "as_sent"
    """What the harness sends; dropped reasoning forks the conversation."""
    TEMPLATE = "template"
    """The token buffer, with forks only where the chat template itself rewrites history."""


class BuilderName(StrEnum):
    """How a graph becomes traces."""

    EXACT = "exact"
    """One row per root-to-leaf path, token for token what the model saw and sampled."""
    MERGED = "merged"
    """Turns stitched together afterwards, for engines that only speak chat."""
    PER_TURN = "per_turn"
    """One row per turn: the naive baseline."""


class ForkReason(StrEnum):
    """Why a turn does not simply continue an earlier conversation."""

    REASONING_DROPPED = "reasoning_dropped"
    """The harness sent a reply back without its reasoning."""
    TEMPLATE_REWRITE = "template_rewrite"
    """The chat template renders earlier messages differently than before."""
    HISTORY_EDITED = "history_edited"
    """The harness changed an earlier message."""
    COMPACTION = "compaction"
    """The harness replaced the history by a summary."""
    TOOLS_CHANGED = "tools_changed"
    """The declared tools differ."""
    SYSTEM_CHANGED = "system_changed"
    """The system prompt differs."""
    SUBAGENT = "subagent"
    """A sub-agent with the tools and the system prompt of the turn that called it."""
    SIDE = "side"
    """A side call, such as one for a title."""
    SIBLING = "sibling"
    """Another reply to the same prompt."""
    VANISHED_MESSAGE = "vanished_message"
    """A message of the history is missing in the request."""
    STOP_MISMATCH = "stop_mismatch"
    """The reply ended in a way that the template does not continue."""
    PREFILL = "prefill"
    """The request ends with the beginning of the reply."""
    MODEL_CHANGED = "model_changed"
    """The harness continued with a model name that another engine serves."""
    IMAGE_UNREPORTED = "image_unreported"
    """The engine does not report which tokens stand for an image: the prompt cannot be continued in place."""
    UNMATCHED = "unmatched"
    """Another root, for none of the other reasons."""


class TurnRole(StrEnum):
    """The role of a turn in its session."""

    MAIN = "main"
    """The main conversation."""
    SUBAGENT = "subagent"
    """A conversation that a turn started as a sub-agent."""
    COMPACTION = "compaction"
    """Summarizes a conversation that then continues from the summary."""
    SIDE = "side"
    """A helper call beside the conversation, such as one for a title."""
    DISCARDED = "discarded"
    """Sampled and never delivered to the harness."""


class Untrained(StrEnum):
    """Why a turn is not trained, whatever its role."""

    FROZEN = "frozen"
    """An engine other than the policy sampled it."""
    PROMPT_UNKNOWN = "prompt_unknown"
    """The engine did not report what the model saw in place of an image."""
    LOGPROBS = "logprobs"
    """The engine's logprobs are not shown to be those of the distribution that was sampled from."""


TRAINED_ROLES: tuple[TurnRole, ...] = (TurnRole.MAIN, TurnRole.SUBAGENT, TurnRole.COMPACTION)
"""The roles that are trained by default."""


class EndReason(StrEnum):
    """Why the harness stopped running."""

    EXITED = "exited"
    """It ended by itself."""
    TIMEOUT = "timeout"
    """Its time budget was used up."""
    LOOPING = "looping"
    """It repeated the same call with the same result."""
    LIMIT = "limit"
    """A limit on turns or tokens was reached."""
    CANCELLED = "cancelled"
    """The session was cancelled."""
    EARLY_STOP = "early_stop"
    """Its group was complete without it: CANCELLED, unscored, and no failure."""
    ERROR = "error"
    """The infrastructure failed."""
    MEMORY = "memory"
    """It exceeded the memory limit of its sandbox: caused by the agent, and scored."""


class FailureReason(StrEnum):
    """Which part of the infrastructure made a session FAILED or LOST. Such a session is never scored."""

    ENGINE = "engine"
    """The engine failed a turn, or its response violated the contract."""
    STALL = "stall"
    """The engine produced no token for `engine.stall_seconds`."""
    SANDBOX = "sandbox"
    """The sandbox could not be created, or was killed from outside."""
    SETUP = "setup"
    """A setup command of the task failed."""
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
    """The session repeatedly killed its node and is not retried."""
    CONFIG = "config"
    """A setting of the session is invalid."""
    INTERNAL = "internal"
    """An unexpected error in Towline."""


class RewardStatus(StrEnum):
    """Whether a reward means anything."""

    SCORED = "scored"
    """The value is a score."""
    FAILED = "failed"
    """The evaluator failed: an infrastructure failure, never reward 0."""
    MISSING = "missing"
    """No evaluator ran, or it gave no score."""


class LogFormat(StrEnum):
    """The test runner whose log lists the results of single tests."""

    PYTEST = "pytest"
    """pytest."""
    UNITTEST = "unittest"
    """Python's unittest."""
    SYMPY = "sympy"
    """SymPy's own runner."""
    GO = "go"
    """go test."""
    JEST = "jest"
    """Jest."""
    MOCHA = "mocha"
    """Mocha."""
    VITEST = "vitest"
    """Vitest."""
    NODE = "node"
    """Node's test runner."""
    CARGO = "cargo"
    """cargo test."""
    TAP = "tap"
    """The Test Anything Protocol."""
    CTEST = "ctest"
    """CTest."""
    GTEST = "gtest"
    """GoogleTest."""
    MAVEN = "maven"
    """Maven Surefire."""
    GRADLE = "gradle"
    """Gradle."""


class SessionState(StrEnum):
    """The state of a session."""

    QUEUED = "queued"
    """Waits for a node."""
    INIT = "init"
    """Its sandbox is being prepared."""
    READY = "ready"
    """Prepared; waits for a run slot."""
    RUNNING = "running"
    """The harness runs."""
    BUILDING = "building"
    """Its traces are being built."""
    EVALUATING = "evaluating"
    """It is being scored."""
    DONE = "done"
    """Ended with a trajectory; `end_reason` says how."""
    FAILED = "failed"
    """The infrastructure failed; `failure` says which part."""
    CANCELLED = "cancelled"
    """Cancelled before it ended."""
    LOST = "lost"
    """Its node or server died."""

    @property
    def terminal(self) -> bool:
        """Whether this is a final state."""
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
"""A session without an evaluator goes from BUILDING to DONE. A retry is a new session, another attempt at the sample."""
