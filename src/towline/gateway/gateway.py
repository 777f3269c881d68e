"""The gateway itself: its engines with their codecs, one journal, and the sessions that harnesses talk through.

The policy is the engine that is trained: pauses and weight updates are for it alone. Further engines are frozen (`lanes`).

Order of writing, so that nothing acknowledged is lost: a session is in the journal before its key is given out; a turn
before its reply; a sealed session's trajectory is a file (written, synced, renamed) before the journal says `sealed`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from towline.arrays import Ids
from towline.config import STALL_SECONDS, GatewaySettings, SessionSettings
from towline.conversation import Finish
from towline.crashpoints import crash_point
from towline.engines.base import Capture, Engine
from towline.errors import ConfigError, TowlineError
from towline.gateway import records
from towline.gateway.journal import Journal, RecordError, SyncMode, encode
from towline.gateway.lanes import Lane, Lanes
from towline.gateway.recovery import Recovery, set_aside
from towline.gateway.session import Session
from towline.quarantine import FOLDER, Quarantine
from towline.schema import POLICY, BuilderName, EndReason, FailureReason, SessionState, Trajectory
from towline.tokens.assemble import assemble
from towline.tokens.codec import Codec
from towline.tokens.elsewhere import ElsewhereCodec
from towline.tokens.graph import Node
from towline.tokens.jinja import TemplateError

log = logging.getLogger("towline.gateway")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_GROUP = re.compile(r"[^\x00-\x1f\x7f-\x9f]{1,512}")


class SessionError(TowlineError):
    """A session that cannot be made or found; `status` is the HTTP status of the control route."""

    def __init__(self, status: int, message: str, failure: str = ""):
        super().__init__(message)
        self.status = status
        self.failure = failure or ("config" if status == 422 else "internal")


@dataclass(slots=True)
class Opened:
    session: Session
    key: str
    """Shown once, here; afterwards only its hash is kept."""


class Gateway:
    def __init__(
        self,
        engine: Engine,
        codec: Codec,
        settings: GatewaySettings,
        *,
        defaults: SessionSettings | None = None,
        model: str = "towline",
        others: Mapping[str, Lane] | None = None,
        stall_seconds: float = STALL_SECONDS,
    ):
        """`others` are further engines by name, for sessions whose `models` name them; `stall_seconds` is the policy's."""
        self.engine = engine
        self.codec = codec
        policy = Lane(engine, codec, POLICY, model, trained=True, stall_seconds=stall_seconds)
        self.lanes = Lanes(policy, others or {})
        self.settings = settings
        self.defaults = defaults or SessionSettings()
        self.model = model
        unknown = self.lanes.unknown(self.defaults.models)
        if unknown is not None:
            raise ConfigError(f"session.models.{unknown}: there is no engine {self.defaults.models[unknown]!r}")
        self.created = int(time.time())
        self.sessions: dict[str, Session] = {}
        self._by_key: dict[str, Session] = {}
        self._sealing: dict[str, asyncio.Task[Trajectory]] = {}
        self._journal: Journal | None = None
        self.quarantine = Quarantine(settings.data / FOLDER)

    @property
    def journal(self) -> Journal:
        if self._journal is None:
            raise TowlineError("the gateway is not open")
        return self._journal

    @property
    def trajectories(self) -> Path:
        return self.settings.data / "trajectories"

    async def open(self) -> None:
        """Take the data folder, restore the sessions that were open, and start the engine."""
        self.quarantine.make_folder(self.trajectories)
        self._journal = Journal.open(
            self.settings.data / "journal", mode=SyncMode(self.settings.journal), quarantine=self.quarantine
        )
        try:
            recovery = Recovery(self, self.quarantine)
            await recovery.run()
            await self._finish_sealing(recovery.sealed)
            if recovery.compacts:
                await self._journal.compact(recovery.needed)
            await asyncio.gather(*(engine.start() for engine in self._engines()))
        except BaseException:
            await self._journal.close()
            await self._close_engines()
            raise

    def _engines(self) -> list[Engine]:
        """Every engine once: two lanes may share one."""
        return list({id(lane.engine): lane.engine for lane in self.lanes}.values())

    async def _close_engines(self) -> None:
        failed = await asyncio.gather(*(engine.close() for engine in self._engines()), return_exceptions=True)
        for error in failed:
            if error is not None:
                raise error

    async def stop(self) -> None:
        """End the turns in flight; whoever waits for one is told to try again."""
        await asyncio.gather(*(session.stop() for session in self.sessions.values()))

    async def close(self) -> None:
        await self.stop()
        await asyncio.gather(*self._sealing.values(), return_exceptions=True)
        try:
            if self._journal is not None:
                await self._journal.close()
        finally:
            await self._close_engines()

    # Sessions

    async def create(self, fields: dict[str, Any]) -> Opened:
        """A new session. `fields`: id, group, instruction, later_instructions, metadata, and settings of its own."""
        unknown = set(fields) - {"id", "group", "instruction", "later_instructions", "metadata", "settings"}
        if unknown:
            raise SessionError(422, f"unknown field {sorted(unknown)[0]!r}")
        for name in ("id", "group", "instruction"):
            if not isinstance(fields.get(name, ""), str):
                raise SessionError(422, f"{name} must be a string")
        if fields.get("group") and not _GROUP.fullmatch(fields["group"]):
            raise SessionError(422, "group must be up to 512 characters without control characters")
        later = fields.get("later_instructions", [])
        if not isinstance(later, list) or not all(isinstance(text, str) for text in later):
            raise SessionError(422, "later_instructions must be a list of strings")
        metadata, settings = fields.get("metadata", {}), fields.get("settings", {})
        if not isinstance(metadata, dict) or not isinstance(settings, dict):
            raise SessionError(422, "metadata and settings must be objects")
        id = fields.get("id") or secrets.token_hex(8)
        if not _ID.fullmatch(id):
            raise SessionError(422, "id must be 1 to 128 letters, digits, '.', '_' or '-'")
        if id in self.sessions or self._file(id).exists():
            raise SessionError(409, f"session {id!r} exists")
        if len(self.sessions) >= self.settings.sessions:
            raise SessionError(429, f"{len(self.sessions)} sessions are open, which is the most allowed")
        merged = _over(self.defaults.model_dump(mode="json"), settings)
        if isinstance(settings.get("models"), dict):
            # The first pattern that matches wins: the session's own stand before the defaults.
            merged["models"] = {**settings["models"], **self.defaults.models, **settings["models"]}
        try:
            chosen = SessionSettings.model_validate(merged)
        except ValidationError as error:
            first = error.errors()[0]
            raise SessionError(422, f"settings.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        unknown_name = self.lanes.unknown(chosen.models)
        if unknown_name is not None:
            there = ", ".join(lane.name for lane in self.lanes)
            reason = f"there is no engine {chosen.models[unknown_name]!r}; there are: {there}"
            raise SessionError(422, f"settings.models.{unknown_name}: {reason}")
        if isinstance(self.codec, ElsewhereCodec):
            # The engine renders by itself: nothing can be exact, and rows are stitched.
            stitched = BuilderName.MERGED if chosen.builder is BuilderName.EXACT else chosen.builder
            chosen = chosen.model_copy(update={"capture": "plain", "builder": stitched})
        key = "tl-" + secrets.token_urlsafe(32)
        session = self.add(
            id, hash_key(key), chosen, fields.get("group", ""), fields.get("instruction", ""), metadata, tuple(later)
        )
        try:
            await self.journal.append(records.session_record(session))
        except BaseException as error:
            self.forget(id)
            if isinstance(error, RecordError):
                raise SessionError(422, f"metadata or settings cannot be recorded: {error}") from error
            raise
        return Opened(session, key)

    def add(
        self,
        id: str,
        key_hash: str,
        settings: SessionSettings,
        group: str,
        instruction: str,
        metadata: dict[str, Any],
        later_instructions: tuple[str, ...] = (),
        created: float | None = None,
    ) -> Session:
        session = Session(
            id,
            key_hash,
            settings,
            self.lanes,
            self.journal,
            group,
            instruction,
            metadata,
            later_instructions,
            time.time() if created is None else created,
        )
        self.sessions[id] = session
        self._by_key[key_hash] = session
        return session

    def forget(self, id: str) -> None:
        """The session is over: its key stops working."""
        session = self.sessions.pop(id, None)
        if session is not None:
            self._by_key.pop(session.key_hash, None)

    async def set_aside(self, id: str, reason: str) -> None:
        """End a session that cannot be built: what the journal has of it is kept in the quarantine."""
        session = self.sessions.get(id)
        if session is not None:
            await session.end()
        await set_aside(self.journal, self.quarantine, {id: reason})
        self.forget(id)

    def by_key(self, key: str) -> Session | None:
        return self._by_key.get(hash_key(key))

    def get(self, id: str) -> Session:
        session = self.sessions.get(id)
        if session is None:
            raise SessionError(404, f"no session {id!r}")
        return session

    async def seal(self, id: str, end_reason: EndReason = EndReason.EXITED) -> Trajectory:
        """End a session: its key stops working, its trajectory is written. Sealing twice gives the same trajectory."""
        if id in self._sealing:
            return await asyncio.shield(self._sealing[id])
        if id not in self.sessions:
            return self._stored(id)
        task = asyncio.get_running_loop().create_task(self._seal(self.sessions[id], end_reason))
        self._sealing[id] = task
        task.add_done_callback(lambda task: self._sealed(id, task))
        return await asyncio.shield(task)

    def _sealed(self, id: str, task: asyncio.Task[Trajectory]) -> None:
        self._sealing.pop(id, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("session %s could not be sealed: %s", id, " ".join(str(error).split()))

    async def _seal(self, session: Session, end_reason: EndReason) -> Trajectory:
        await session.end()
        # Nothing changes in the session any more, and a long one takes a while: the others are not to wait for it.
        trajectory = await asyncio.to_thread(self._write, session, end_reason)
        crash_point("gateway.before_sealed")
        await self.journal.append(encode(records.SEALED, {"session": session.id}, {}))
        crash_point("gateway.after_sealed")
        self.forget(session.id)
        return trajectory

    def _write(self, session: Session, end_reason: EndReason) -> Trajectory:
        failed = session.failure
        state = SessionState.DONE if failed is None else SessionState.FAILED
        trajectory = self.build(session, state, end_reason, self._plain_prompts(session))
        try:
            trajectory.write(self._file(session.id))
        except OSError as error:
            raise SessionError(
                500, f"the trajectory of {session.id!r} cannot be written: {error}", "storage"
            ) from error
        return trajectory

    def trajectory(self, id: str) -> Trajectory:
        """What there is of a session so far, or all of it once it is sealed."""
        session = self.sessions.get(id)
        return self._stored(id) if session is None else self.build(session, SessionState.RUNNING, None)

    def build(
        self,
        session: Session,
        state: SessionState,
        end_reason: EndReason | None,
        plain_prompts: dict[Node, Ids] | None = None,
    ) -> Trajectory:
        """Without `plain_prompts`, how a plain server would differ is not measured: that takes long for long sessions."""
        settings, failed = session.settings, session.failure if state is SessionState.FAILED else None
        return assemble(
            session.graph,
            session_id=session.id,
            group_id=session.group,
            builder=settings.builder,
            policy=settings.policy,
            instruction=session.instructions,
            trained=settings.trained_roles,
            ends=self._ends(session),
            state=state,
            end_reason=end_reason,
            error=None if failed is None else failed.text,
            failure=None if failed is None else FailureReason(failed.failure),
            plain_prompts=plain_prompts,
            tools={key: [tool.as_function() for tool in tools] for key, tools in session.tools.items()},
            template=self.codec.name,
            engine=self.engine.info.name,
            created=session.created,
            metadata=session.metadata,
        )

    def _ends(self, session: Session) -> frozenset[int]:
        """The ids that end a message: the codec's, or where that knows none, those that turns were seen to end on."""
        if self.codec.end_ids:
            return self.codec.end_ids
        stopped = (n for n in session.graph.nodes if n.finish is Finish.STOP and len(n.sampled))
        return frozenset(int(node.sampled[-1]) for node in stopped)

    def _plain_prompts(self, session: Session) -> dict[Node, Ids]:
        """What a plain server would have rendered for the last request of each conversation."""
        prompts: dict[Node, Ids] = {}
        if self.engine.info.capture is not Capture.TOKENS or isinstance(self.codec, ElsewhereCodec):
            return prompts
        for thread in session.reader.threads:
            node = thread.node
            if node is None or node.finish is None or node.prefill is not None or node.untrained is not None:
                continue
            try:
                # A plain server shows the model its own call ids too, where it samples them.
                frame = replace(session.frames[node.key], images=thread.images)
                plain = self.codec.prompt(session.graph.native(thread.messages), frame)
            except TemplateError:
                continue
            prompts[node] = np.asarray(plain.ids, np.int32)
        return prompts

    def _file(self, id: str) -> Path:
        return self.trajectories / f"{id}.arrow"

    def _stored(self, id: str) -> Trajectory:
        if not _ID.fullmatch(id) or not self._file(id).is_file():
            raise SessionError(404, f"no session {id!r}")
        return Trajectory.read(self._file(id))

    # After a crash

    async def _finish_sealing(self, sealed: set[str]) -> None:
        """A trajectory that is written is whole: a crash cut off only the record that says so."""
        for draft in self.trajectories.glob(".*.tmp"):
            if not draft.is_dir():
                draft.unlink()
        for session in [session for id, session in self.sessions.items() if self._file(id).exists()]:
            try:
                await asyncio.to_thread(Trajectory.read, self._file(session.id))
            except (TowlineError, OSError, ValueError) as error:
                # The journal still has it: it is sealed anew.
                await asyncio.to_thread(self.quarantine.move, self._file(session.id), str(error))
                continue
            await self.journal.append(encode(records.SEALED, {"session": session.id}, {}))
            self.forget(session.id)
            sealed.add(session.id)


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def _over(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in over.items():
        old = merged.get(name)
        merged[name] = _over(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
