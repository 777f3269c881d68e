"""From what a runner gives back to how a session ended."""

from __future__ import annotations

from towline.errors import TowlineError
from towline.schema import EndReason, FailureReason, SessionState, Trajectory
from towline.server.rows import Ending, clean
from towline.server.runner import Outcome

_NOTES, _NOTE = 20, 1000
"""Most notes of a session in its result, and characters of each."""


def fill(ending: Ending, outcome: Outcome, *, lost: str = "", why: FailureReason = FailureReason.NODE) -> Trajectory:
    """Fill in the ending; the trajectory to keep. With `lost` the session is LOST for that reason, whatever it came to."""
    trajectory, session = outcome.trajectory, outcome.session
    if lost:
        ending.state, ending.error, ending.failure = SessionState.LOST, lost, why
        trajectory = ended_as(trajectory, ending)
    else:
        ending.state, ending.error = session.state, trajectory.error or session.error
        if session.state is SessionState.FAILED:
            ending.failure = session.failure or trajectory.failure or FailureReason.INTERNAL
            ending.hopeless, ending.blameless = outcome.hopeless, outcome.blameless
    reward = trajectory.reward
    versions = [trace.lowest_version for trace in trajectory.traces]
    ending.end_reason = trajectory.end_reason
    ending.usable = outcome.usable and ending.state is SessionState.DONE
    ending.reward = reward.score if reward is not None else None
    ending.reward_status = reward.status if reward is not None else None
    if reward is not None and reward.error and not ending.error:
        ending.error = reward.error
    ending.turns = trajectory.report.turns
    ending.trained_tokens = trajectory.report.trained_tokens
    ending.lowest_version = min((version for version in versions if version is not None), default=None)
    ending.notes = notes_of(trajectory)
    return trajectory


def notes_of(trajectory: Trajectory) -> list[str]:
    notes = trajectory.metadata.get("notes")
    if not isinstance(notes, list):
        return []
    return [(clean(str(note)) or "")[:_NOTE] for note in notes[:_NOTES]]


def ended_as(trajectory: Trajectory, ending: Ending) -> Trajectory:
    """The trajectory of a session that did not end by itself."""
    changes = {"state": ending.state, "failure": ending.failure, "error": trajectory.error or ending.error}
    changes |= {"end_reason": trajectory.end_reason or EndReason.ERROR}
    return Trajectory.model_validate(trajectory.__dict__ | changes)


def failure_of(error: BaseException) -> FailureReason:
    """Which part of the infrastructure an error of a runner stands for."""
    return FailureReason(error.failure) if isinstance(error, TowlineError) else FailureReason.INTERNAL
