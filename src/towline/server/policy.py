"""The policy: its version, its weights, and whether sampling is paused.

The engine stamps each token with the version as it samples (`engines/version_stamp.py`); `PolicyController` tells the
engine which version that is.
The policy is stored: after a restart the server is paused if it was paused, stamps tokens with the same version, and loads
the weights it was given last. If they cannot be loaded, sampling is paused until it is given weights, or resumed. The
version only grows.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncConnection

from towline.cluster.runner import Runner
from towline.engines.base import PauseMode
from towline.errors import TowlineError
from towline.schema import Policy, SchemaError
from towline.schema.files import dump_json, load_json
from towline.server.errors import InvalidInput, ResourceConflict, Unavailable
from towline.server.events import Signal
from towline.server.store.database import Store
from towline.server.store.tables import SERVICE, add_events, get_meta, put_meta

log = logging.getLogger("towline.server")


@dataclass(slots=True)
class StoredPolicy:
    """The policy as it is stored."""

    version: int = 0
    paused: bool = False
    folder: str = ""
    """Folder of the weights of this version; empty for those the engine starts with, or receives in its own way."""


class PolicyController:
    """Pauses and resumes sampling, updates the weights, and stores what was set."""

    def __init__(self, store: Store, runner: Runner, *changed: Signal):
        self.store = store
        self.runner = runner
        self.changed = changed
        self._stored = StoredPolicy()
        self._without_weights = False
        """Whether sampling is paused because the stored weights could not be loaded."""
        self._changing = asyncio.Lock()

    @property
    def now(self) -> Policy:
        return Policy(version=self._stored.version, paused=self._stored.paused or self._without_weights)

    def _parse(self, text: str) -> StoredPolicy:
        """The stored policy. If it cannot be read, sampling is paused: the version of the weights is unknown."""
        try:
            stored = StoredPolicy(**load_json(text))
            if type(stored.version) is not int or type(stored.paused) is not bool or type(stored.folder) is not str:
                raise TypeError(f"{stored} is not a policy")
        except (SchemaError, TypeError) as error:
            log.error("damaged: policy: %s; sampling is paused: resume with the version of the weights", error)
            return StoredPolicy(version=self.runner.version, paused=True)
        return stored

    async def restore(self) -> None:
        """Bring the engine into the state it had before the server stopped."""
        async with self.store.read() as tx:
            text = await get_meta(tx, "policy")
        if text is None:
            self._stored = StoredPolicy(version=self.runner.version)
            return
        self._stored = stored = self._parse(text)
        if stored.folder:
            try:
                await self.runner.update_weights(Path(stored.folder), stored.version)
            except (TowlineError, OSError) as error:
                # Sampling from other weights under this version would be a wrong label that no consumer can notice.
                log.error("sampling is paused: the weights of version %d cannot be loaded: %s", stored.version, error)
                self._without_weights = True
        elif stored.version > self.runner.version:
            await self.runner.resume(stored.version)
        elif stored.version < self.runner.version:
            # A trainer has pushed weights while no server ran.
            self._stored.version = self.runner.version
        if self.now.paused:
            await self.runner.pause(PauseMode.ABORT, None)

    async def pause(self, mode: PauseMode, deadline: float | None) -> Policy:
        """Returns once nothing samples."""
        async with self._changing:
            # No session starts from here on, however long the engine takes to drain.
            before, self._stored.paused = self._stored.paused, True
            try:
                await self.runner.pause(mode, deadline)
            except TowlineError as error:
                self._stored.paused = before
                raise Unavailable(f"the engine cannot pause: {error}", retry_after=5) from error
            return await self._save()

    async def resume(self, version: int | None) -> Policy:
        async with self._changing:
            self._check(version)
            try:
                await self.runner.resume(version)
            except TowlineError as error:
                raise Unavailable(f"the engine cannot resume: {error}", retry_after=5) from error
            if version is not None and version != self._stored.version:
                self._stored.version, self._stored.folder = version, ""
            self._stored.paused = self._without_weights = False
            return await self._save()

    async def announce(self, version: int | None) -> Policy:
        """Note that the trainer has replaced the weights of the engines by its own means; sampling continues.

        With `None`, the version is the one that the engines report.
        """
        async with self._changing:
            self._check(version)
            try:
                reached = await self.runner.announce(version)
            except TowlineError as error:
                raise ResourceConflict(f"the engines cannot have this version: {error}", field="version") from error
            if reached > self._stored.version:
                self._stored.version, self._stored.folder = reached, ""
                self._without_weights = False
            return await self._save()

    async def update_weights(self, folder: Path, version: int) -> Policy:
        """Returns once no token of an older version is sampled."""
        async with self._changing:
            self._check(version)
            folder = await asyncio.to_thread(folder.resolve)
            if not await asyncio.to_thread(folder.is_dir):
                raise InvalidInput(f"{folder} is not a folder on the server's machine", field="folder")
            try:
                await self.runner.update_weights(folder, version)
                if self._without_weights and not self._stored.paused:
                    await self.runner.resume(version)
            except (TowlineError, OSError) as error:
                raise InvalidInput(f"the weights cannot be loaded: {error}", field="folder") from error
            self._stored.version, self._stored.folder = version, str(folder)
            self._without_weights = False
            return await self._save()

    def _check(self, version: int | None) -> None:
        if version is not None and version < self._stored.version:
            raise ResourceConflict(
                f"the policy is at version {self._stored.version}; versions only grow", field="version"
            )

    async def _save(self) -> Policy:
        stored = self._stored
        text = dump_json(asdict(stored)).decode()

        async def write(tx: AsyncConnection) -> None:
            await put_meta(tx, "policy", text)
            await add_events(
                tx,
                [(SERVICE, "policy", {"version": stored.version, "paused": self.now.paused})],
                self.store.clock.now(),
            )

        await self.store.write_with_retry(write, what="policy")
        for signal in self.changed:
            signal.notify()
        return self.now
