"""Trajectories of ended sessions, from their end until the server has stored them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from towline.cluster.runner import Stored, StoreRequest
from towline.cluster.segments import Segments
from towline.schema import SchemaError, Trajectory

_BATCH = 64
"""Maximum number of trajectories in one segment."""


class EndedTrajectories:
    """Keeps the trajectory of every ended session until it is discarded. Storing one twice is harmless."""

    def __init__(self) -> None:
        self.segments: Segments | None = None
        self._trajectories: dict[str, Trajectory] = {}
        self._waiting: list[tuple[StoreRequest, asyncio.Future[Stored]]] = []
        self._writing = asyncio.Lock()

    def add(self, trajectory: Trajectory) -> None:
        self._trajectories[trajectory.session_id] = trajectory

    def discard(self, session_id: str) -> None:
        self._trajectories.pop(session_id, None)

    async def store(self, requests: Sequence[StoreRequest]) -> list[Stored]:
        """Write the trajectories; those that are requested during a write share the next segment."""
        loop = asyncio.get_running_loop()
        mine = [(one, loop.create_future()) for one in requests]
        self._waiting += mine
        async with self._writing:
            while any(not stored.done() for _, stored in mine):
                batch, self._waiting = self._waiting[:_BATCH], self._waiting[_BATCH:]
                await self._write(batch)
        return [await stored for _, stored in mine]

    async def _write(self, batch: list[tuple[StoreRequest, asyncio.Future[Stored]]]) -> None:
        assert self.segments is not None, "use_store comes first"
        found = [self._final(one) for one, _ in batch]
        try:
            written = iter(await self.segments.write([one for one in found if isinstance(one, Trajectory)]))
        except BaseException as error:
            for _, stored in batch:
                if not stored.done():
                    stored.set_exception(OSError(str(error)) if isinstance(error, OSError) else error)
                    stored.exception()  # its caller may be gone
            raise
        for (_, stored), one in zip(batch, found, strict=True):
            result = next(written) if isinstance(one, Trajectory) else one
            if not stored.done():
                stored.set_result(result)

    def _final(self, request: StoreRequest) -> Trajectory | SchemaError:
        trajectory = self._trajectories.get(request.session_id)
        if trajectory is None:
            return SchemaError("its node has no trajectory of it")
        try:
            return request.applied_to(trajectory)
        except ValueError as error:
            return SchemaError(str(error))
