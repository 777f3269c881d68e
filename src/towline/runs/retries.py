"""When a sample is retried: the rules that local runs and the server share, as functions of counts.

A sample is retried while its infrastructure fails and attempts are left. An outage that a circuit breaker saw and the
death of a node are not the task's doing and use up no attempt, up to a limit: after that the task is their likely cause.
"""

from __future__ import annotations

from towline.schema import SessionState

FREE_ATTEMPTS = 10
"""Attempts that outages may cost a sample of a local run for free."""
_BROKEN = (SessionState.FAILED, SessionState.LOST)


def strikes_after(
    state: SessionState, strikes: int, *, attempt: int, blameless: bool, deaths: int = 0, free: int = FREE_ATTEMPTS
) -> int:
    """The attempts of a sample that count against `max_attempts`, once attempt number `attempt` has ended in `state`.

    `deaths` counts the earlier attempts that ended with their node, `free` how many outages use up no attempt.
    """
    pardoned = attempt - 1 - strikes - deaths
    return strikes if state is SessionState.LOST or (blameless and pardoned < free) else strikes + 1


def is_retried(state: SessionState, *, hopeless: bool, strikes: int, max_attempts: int) -> bool:
    """Whether a sample gets another attempt; `strikes` counts the attempts that are used up, this one included."""
    return state in _BROKEN and not hopeless and strikes < max_attempts
