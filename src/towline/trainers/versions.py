"""The versions of a trainer that puts weights into its own engine, and those of the service.

Every adapter announces the trainer's step at its framework's own hook. A step is the policy version, as long as the
service is
not ahead of it; a trainer that starts over, or resumes from an older checkpoint, continues above the service's
version, since
versions only grow. `offset` is the difference, and `step_of` turns the versions of rows back into the trainer's steps.

Invariant: a step is announced after its weights are in the engine, and before the first session that is sampled from them.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from towline.client import AsyncClient, Client
from towline.client.errors import Conflict, NotAllowed

log = logging.getLogger("towline.trainers")
_NOT_ALLOWED = (
    "the policy's version is not announced, which needs an admin key: rows keep the version that the engine reports"
)


async def announce_reported(client: AsyncClient) -> None:
    """Take over the version that the engines report, for trainers that label the weights they push."""
    try:
        await client.announce()
    except NotAllowed:
        log.warning(_NOT_ALLOWED)
    except Conflict as error:
        # Before the trainer's first push, or with an engine without labels.
        log.warning("the policy's version is unknown: %s", error)


@dataclass(slots=True)
class TrainerVersions:
    """What one process of a trainer has announced."""

    offset: int = 0
    """The service's version minus the trainer's step."""
    step: int | None = None
    """The step announced last."""
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def announce(self, client: Client, step: int) -> int:
        """Announce a step of the trainer, unless it was announced last; returns its policy version."""
        if step != self.step:
            if self._unknown(step):
                self._begin(step, client.policy().version)
            try:
                client.announce(step + self.offset)
            except NotAllowed:
                log.warning(_NOT_ALLOWED)
            self.step = step
        return step + self.offset

    async def announce_async(self, client: AsyncClient, step: int) -> int:
        async with self._changing:
            if step != self.step:
                if self._unknown(step):
                    self._begin(step, (await client.policy()).version)
                try:
                    await client.announce(step + self.offset)
                except NotAllowed:
                    log.warning(_NOT_ALLOWED)
                self.step = step
        return step + self.offset

    def step_of(self, version: int) -> int:
        """The trainer's step of a policy version."""
        return version - self.offset

    def _unknown(self, step: int) -> bool:
        return self.step is None or step < self.step

    def _begin(self, step: int, current: int) -> None:
        """The first step of this process, or one before the last: its weights are newer than all that the service knows."""
        if step + self.offset < current:
            self.offset = current + 1 - step
