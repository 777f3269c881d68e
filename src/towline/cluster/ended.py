"""Trajectories of ended sessions, from their end until the server has stored them."""

from __future__ import annotations

from collections.abc import Sequence

from towline.cluster.runner import Stored, StoreRequest
from towline.cluster.segments import Segments
from towline.schema import SchemaError, Trajectory


class EndedTrajectories:
    """Keeps the trajectory of every ended session until it is discarded. Storing one twice is harmless."""

    def __init__(self) -> None:
        self.segments: Segments | None = None
        self._trajectories: dict[str, Trajectory] = {}

    def add(self, trajectory: Trajectory) -> None:
        self._trajectories[trajectory.session_id] = trajectory

    def discard(self, session_id: str) -> None:
        self._trajectories.pop(session_id, None)

    async def store(self, requests: Sequence[StoreRequest]) -> list[Stored]:
        """Write the trajectories as one segment; a session without one, or with an invalid one, gets the error."""
        assert self.segments is not None, "use_store comes first"
        found: list[Trajectory | SchemaError] = []
        for one in requests:
            trajectory = self._trajectories.get(one.session_id)
            try:
                found.append(
                    SchemaError("its node has no trajectory of it")
                    if trajectory is None
                    else one.applied_to(trajectory)
                )
            except ValueError as error:
                found.append(SchemaError(str(error)))
        written = iter(await self.segments.write([one for one in found if isinstance(one, Trajectory)]))
        return [next(written) if isinstance(one, Trajectory) else one for one in found]
