"""The contract: what a task, a session, a turn, a trace and a trajectory are, in memory and in files.

Records are pydantic models with numpy arrays inside; outside they are JSON or Arrow. Every record is checked when it is
built and when it is read, so that whoever holds one need not check it again: a `Trajectory` that exists is one whose
rows reproduce what its turns saw and sampled, and in which nothing is trained twice.
"""

from towline.schema.base import (
    SCHEMA_VERSION,
    Float32Array,
    Int32Array,
    Model,
    SchemaError,
    SchemaVersionError,
    UInt8Array,
)
from towline.schema.entities import Reward, Session, Step, Task, Timeouts, TransitionError
from towline.schema.environment import Environment, File, Network, Resources, SandboxKind
from towline.schema.failures import FailureTally
from towline.schema.sampling import TurnSampling
from towline.schema.service import (
    Accepted,
    Ack,
    Acked,
    BreakerStatus,
    Event,
    Policy,
    Problem,
    Result,
    Results,
    Role,
    SessionResult,
    Stale,
    Start,
    TaskState,
    TaskStatus,
    Unit,
)
from towline.schema.tables import traces_from_table, traces_table
from towline.schema.trajectory import FidelityReport, Image, Trace, Trajectory, Turn
from towline.schema.vocabulary import (
    POLICY,
    TRAINED_ROLES,
    VALID_TRANSITIONS,
    BuilderName,
    ContextPolicy,
    EndReason,
    FailureReason,
    ForkReason,
    LogFormat,
    RewardStatus,
    SessionState,
    TurnRole,
    Untrained,
)

__all__ = [
    "POLICY",
    "SCHEMA_VERSION",
    "TRAINED_ROLES",
    "VALID_TRANSITIONS",
    "Accepted",
    "Ack",
    "Acked",
    "BreakerStatus",
    "BuilderName",
    "ContextPolicy",
    "EndReason",
    "Environment",
    "Event",
    "FailureReason",
    "FailureTally",
    "FidelityReport",
    "File",
    "Float32Array",
    "ForkReason",
    "Image",
    "Int32Array",
    "LogFormat",
    "Model",
    "Network",
    "Policy",
    "Problem",
    "Resources",
    "Result",
    "Results",
    "Reward",
    "RewardStatus",
    "Role",
    "SandboxKind",
    "SchemaError",
    "SchemaVersionError",
    "Session",
    "SessionResult",
    "SessionState",
    "Stale",
    "Start",
    "Step",
    "Task",
    "TaskState",
    "TaskStatus",
    "Timeouts",
    "Trace",
    "Trajectory",
    "TransitionError",
    "Turn",
    "TurnRole",
    "TurnSampling",
    "UInt8Array",
    "Unit",
    "Untrained",
    "traces_from_table",
    "traces_table",
]
