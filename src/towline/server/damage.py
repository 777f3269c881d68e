"""Results whose trajectories cannot be read: each is flagged, none holds up the others."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from towline.schema import FailureReason, Result
from towline.server import reading
from towline.server.segments import Segments
from towline.server.store import Store

log = logging.getLogger("towline.server")


async def flag_damaged(store: Store, segments: Segments, results: Sequence[Result]) -> list[Result]:
    """The results; sessions whose trajectory is damaged say so, and are not usable.

    While the location of the trajectories is away nothing is known, and nothing is flagged.
    """
    stored = await reading.stored(store, [one.session_id for result in results for one in result.sessions])
    broken = dict(stored.broken)
    try:
        found = await segments.check(list(stored.pieces.values()))
    except OSError as error:
        log.warning("the trajectories of results that are handed out could not be checked: %s", error)
        found = {}
    broken |= {session_id: found[piece] for session_id, piece in stored.pieces.items() if piece in found}
    if not broken:
        return list(results)
    for session_id, reason in broken.items():
        log.error("the trajectory of session %s is damaged: %s", session_id, reason)
    return [_flagged(result, broken) for result in results]


def _flagged(result: Result, broken: dict[str, str]) -> Result:
    sessions = [
        one.model_copy(
            update={"damaged": broken[one.session_id], "usable": False, "failure": one.failure or FailureReason.STORAGE}
        )
        if one.session_id in broken
        else one
        for one in result.sessions
    ]
    return result.model_copy(update={"sessions": sessions})
