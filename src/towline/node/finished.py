"""The end of a session on the node: its final trajectory, and what can be said about trying again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from towline.gateway.calls import failure_reason
from towline.node.active_session import ActiveSession
from towline.node.evaluation import EvaluationFailed
from towline.schema import (
    EndReason,
    FailureReason,
    Reward,
    RewardStatus,
    Session,
    SessionState,
    Trajectory,
    unusable_reason,
)


@dataclass(slots=True)
class FinishedSession:
    """A session at its end."""

    session: Session
    trajectory: Trajectory
    logs: Path
    hopeless: bool = False
    """It failed for a reason that a retry does not change."""
    blameless: bool = False
    """It failed in an outage of an engine or a sandbox runtime: a retry uses no attempt."""
    held: bool = False
    """It timed out waiting for an unavailable engine or sandbox runtime; this node does not retry it."""

    @property
    def cut(self) -> bool:
        """Whether it was stopped early, its group being complete without it."""
        return self.session.end_reason is EndReason.EARLY_STOP

    @property
    def usable(self) -> bool:
        """Whether a trainer can learn from it."""
        return unusable_reason(self.trajectory) is None


def final_trajectory(
    active: ActiveSession, state: SessionState, error: BaseException | None, reward: Reward | None
) -> Trajectory:
    """The trajectory of a session with everything that is known about it."""
    text = None if error is None else str(error) or repr(error)
    built = active.trajectory or _empty_trajectory(active, state, text)
    if active.prepared is not None and active.prepared.evaluator is not None and reward is None:
        broken = isinstance(error, EvaluationFailed)
        status = RewardStatus.FAILED if broken else RewardStatus.MISSING
        kind = active.prepared.evaluator.kind
        reward = Reward(value=0.0, evaluator=kind, status=status, error=text if broken else None)
    fields = {
        "state": state,
        "end_reason": active.end_reason,
        "error": text or built.error,
        "failure": FailureReason(failure_reason(error)) if state is SessionState.FAILED else None,
        "timings": active.timings,
        "metadata": {
            **built.metadata,
            **_metadata(active),
            "notes": [*built.metadata.get("notes", []), *active.notes],
        },
    }
    trajectory = Trajectory.model_validate(built.__dict__ | fields)
    return trajectory if reward is None else trajectory.with_reward(reward)


def failed_trajectory(active: ActiveSession, error: Exception) -> Trajectory:
    """What was sampled, for a session whose trajectory cannot be completed or stored because of `error`."""
    text = str(error) or repr(error)
    built = active.trajectory or _empty_trajectory(active, SessionState.FAILED, text)
    changes = {
        "state": SessionState.FAILED,
        "end_reason": active.end_reason,
        "error": text,
        "failure": FailureReason(failure_reason(error)),
    }
    return Trajectory.model_validate(built.__dict__ | changes)


def _empty_trajectory(active: ActiveSession, state: SessionState, error: str | None) -> Trajectory:
    """The trajectory of a session that never reached the gateway."""
    if state is SessionState.FAILED and not error:
        error = "unknown"
    return Trajectory(
        session_id=active.session.session_id,
        group_id=active.task.task_id,
        state=state,
        end_reason=active.end_reason,
        error=error,
        created=active.session.created,
    )


def _metadata(active: ActiveSession) -> dict[str, object]:
    known: dict[str, object] = {
        "task_id": active.task.task_id,
        "harness": active.task.harness,
        "sample": active.session.sample,
        "attempt": active.session.attempt,
        "exit_code": active.exit_code,
        # File names of the agent may be in the notes, which are stored as UTF-8.
        "notes": [note.encode("utf-8", "backslashreplace").decode() for note in active.notes],
        **({"task": active.task.metadata} if active.task.metadata else {}),
    }
    if active.prepared is not None:
        known["harness_version"] = active.prepared.harness.version
        if active.prepared.images:
            known["images"] = dict(active.prepared.images)
        known["sandbox"] = active.prepared.runtime.name
    return known
