"""When the remaining samples of a group are stopped: the rule that local runs and the server share."""

from __future__ import annotations


def stop_deadline(*, usable: int, required: int, grace: float, since: float | None, now: float) -> float | None:
    """The time at which samples that have not ended are stopped; `None` while too few sessions are usable.

    `since` is the deadline that was set before, if there is one: later sessions do not move it.
    """
    if usable < required:
        return None
    return now + grace if since is None else since
