"""The policy: which version of the weights samples now, and whether anything samples at all.

What was said is kept: a server that starts again is paused if it was paused, stamps tokens with the version it had, and
loads the weights it was given last. The version only grows.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from towline.engines.base import PauseMode
from towline.errors import TowlineError
from towline.schema import Policy, SchemaError
from towline.schema.files import dump_json, load_json
from towline.server import tables
from towline.server.errors import Conflict, Invalid, Unavailable
from towline.server.runner import Runner
from towline.server.signals import Signal
from towline.server.store import Store, add_events

log = logging.getLogger("towline.server")


@dataclass(slots=True)
class Kept:
    """The policy as it is stored."""

    version: int = 0
    paused: bool = False
    folder: str = ""
    """Of the weights of this version; empty for those that the engine starts with, or gets in its own way."""


class PolicyDesk:
    def __init__(self, store: Store, runner: Runner, *changed: Signal):
        self.store = store
        self.runner = runner
        self.changed = changed
        self._kept = Kept()
        self._changing = asyncio.Lock()

    @property
    def now(self) -> Policy:
        return Policy(version=self._kept.version, paused=self._kept.paused)

    def _read(self, text: str) -> Kept:
        """The policy as it was kept. If that cannot be read, sampling is paused: its version is not known."""
        try:
            kept = Kept(**load_json(text))
            if type(kept.version) is not int or type(kept.paused) is not bool or type(kept.folder) is not str:
                raise TypeError(f"{kept} is no policy")
        except (SchemaError, TypeError) as error:
            log.error("damaged: the policy of the store: %s; paused: resume with the version of the weights", error)
            return Kept(version=self.runner.version, paused=True)
        return kept

    async def restore(self) -> None:
        """Make the engine what it was before the server stopped."""
        table = tables.meta
        async with self.store.read() as tx:
            text = await tx.scalar(select(table.c.value).where(table.c.name == "policy"))
        if text is None:
            self._kept = Kept(version=self.runner.version)
            return
        self._kept = kept = self._read(text)
        if kept.folder:
            try:
                await self.runner.update_weights(Path(kept.folder), kept.version)
            except (TowlineError, OSError) as error:
                # Sampling from other weights under this version's name would be a lie that nobody notices.
                log.error("paused: the weights of version %d cannot be used again: %s", kept.version, error)
                kept.paused = True
        elif kept.version != self.runner.version:
            await self.runner.resume(kept.version)
        if kept.paused:
            await self.runner.pause(PauseMode.ABORT, None)

    async def pause(self, mode: PauseMode, deadline: float | None) -> Policy:
        """Returns once nothing samples any more."""
        async with self._changing:
            # No session is started from here on, whatever the engine takes to drain.
            before, self._kept.paused = self._kept.paused, True
            try:
                await self.runner.pause(mode, deadline)
            except TowlineError as error:
                self._kept.paused = before
                raise Unavailable(f"the engine cannot pause: {error}", retry_after=5) from error
            return await self._keep()

    async def resume(self, version: int | None) -> Policy:
        async with self._changing:
            self._check(version)
            try:
                await self.runner.resume(version)
            except TowlineError as error:
                raise Unavailable(f"the engine cannot resume: {error}", retry_after=5) from error
            if version is not None and version != self._kept.version:
                self._kept.version, self._kept.folder = version, ""
            self._kept.paused = False
            return await self._keep()

    async def update_weights(self, folder: Path, version: int) -> Policy:
        """Returns once no token of an older version is sampled any more."""
        async with self._changing:
            self._check(version)
            folder = await asyncio.to_thread(folder.resolve)
            if not await asyncio.to_thread(folder.is_dir):
                raise Invalid(f"{folder} is no folder on the server's machine", field="folder")
            try:
                await self.runner.update_weights(folder, version)
            except (TowlineError, OSError) as error:
                raise Invalid(f"these weights cannot be used: {error}", field="folder") from error
            self._kept.version, self._kept.folder = version, str(folder)
            return await self._keep()

    def _check(self, version: int | None) -> None:
        if version is not None and version < self._kept.version:
            raise Conflict(f"the policy is at version {self._kept.version} and only goes forward", field="version")

    async def _keep(self) -> Policy:
        kept, table = self._kept, tables.meta
        text = dump_json({"version": kept.version, "paused": kept.paused, "folder": kept.folder}).decode()

        async def write(tx: AsyncConnection) -> None:
            await tx.execute(self.store.insert_new(table).values(name="policy", value=text))
            await tx.execute(update(table).where(table.c.name == "policy").values(value=text))
            await add_events(tx, [("policy", {"version": kept.version, "paused": kept.paused})], time.time())

        await self.store.insist(write, what="policy")
        for signal in self.changed:
            signal.give()
        return self.now
