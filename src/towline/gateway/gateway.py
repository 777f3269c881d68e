"""The gateway: its engines with their codecs, one journal, and the sessions that harnesses talk through.

The policy is the engine that is trained: pauses and weight updates apply to it alone. Other engines are frozen
(`model_routes`).

Order of writing, so that nothing acknowledged is lost: a session is in the journal before its key is given out; a turn
before its reply; a session's trajectory is a file (written, synced, renamed) before the journal says `sealed`. The file is
written once: `end` builds the trajectory, the caller completes it (reward, metadata), `store` writes it. Until then the
journal has the session.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import Metric
from prometheus_client.samples import Sample
from pydantic import ValidationError

from towline.common.arrays import Ids
from towline.common.crashpoints import crash_point
from towline.common.files import QUARANTINE, Quarantine
from towline.common.mappings import deep_merge
from towline.common.untrusted.loop_stalls import LoopStalls
from towline.config import STALL_SECONDS, GatewaySettings, SessionSettings
from towline.conversation import Finish
from towline.engines.base import CaptureLevel, Engine
from towline.errors import ConfigError, TowlineError
from towline.gateway import records
from towline.gateway.budgets import SessionUsage
from towline.gateway.images import RemoteImages
from towline.gateway.journal import Journal, RecordError, SyncMode, encode
from towline.gateway.model_routes import ModelRoute, ModelRoutes
from towline.gateway.recovery import Recovery, quarantine_sessions, session_record
from towline.gateway.session import SESSION_ID, GatewaySession
from towline.gateway.without_keys import without_keys
from towline.schema import POLICY, BuilderName, EndReason, FailureReason, SessionState, Trajectory
from towline.tokens.codec import ModelCodec
from towline.tokens.graph.graph import GraphNode
from towline.tokens.server_rendered import ServerRenderedCodec
from towline.tokens.templates.chat_template import TemplateError
from towline.tokens.traces.trajectory import assemble_trajectory

log = logging.getLogger("towline.gateway")
_GROUP = re.compile(r"[^\x00-\x1f\x7f-\x9f]{1,512}")


class SessionError(TowlineError):
    """A session that cannot be created or found; `status` is the HTTP status of the control route."""

    def __init__(self, status: int, message: str, failure: str = ""):
        super().__init__(message)
        self.status = status
        self.failure = failure or ("config" if status == 422 else "internal")


@dataclass(slots=True)
class OpenedSession:
    """A new session with its key."""

    session: GatewaySession
    key: str
    """Returned only here; afterwards only its hash is kept."""


class Gateway:
    """Serves sessions from one journal and one or more engines."""

    def __init__(
        self,
        engine: Engine,
        codec: ModelCodec,
        settings: GatewaySettings,
        *,
        defaults: SessionSettings | None = None,
        model: str = "towline",
        others: Mapping[str, ModelRoute] | None = None,
        stall_seconds: float = STALL_SECONDS,
    ):
        """`others`: additional engines by name, for sessions whose `models` name them; `stall_seconds` is the policy's."""
        self.engine = engine
        self.codec = codec
        policy = ModelRoute(engine, codec, POLICY, model, trained=True, stall_seconds=stall_seconds)
        self.routes = ModelRoutes(policy, others or {})
        self.settings = settings
        self.defaults = defaults or SessionSettings()
        self.refusals: Counter[str] = Counter()
        """By budget, how many requests and connections were refused."""
        self.stalls = LoopStalls()
        self.images = RemoteImages(settings.image_hosts, settings.image_bytes, settings.image_seconds)
        self.model = model
        unknown = self.routes.unknown(self.defaults.models)
        if unknown is not None:
            raise ConfigError(f"session.models.{unknown}: unknown engine {self.defaults.models[unknown]!r}")
        self.created = int(time.time())
        self.sessions: dict[str, GatewaySession] = {}
        self._by_key: dict[str, GatewaySession] = {}
        self._ended: dict[str, Trajectory] = {}
        """Trajectories of sessions that have ended and are not stored yet."""
        self._work: dict[tuple[str, str], asyncio.Task[Trajectory]] = {}
        """Sessions that are being ended or sealed."""
        self._journal: Journal | None = None
        self.quarantine = Quarantine(settings.data / QUARANTINE)

    @property
    def journal(self) -> Journal:
        if self._journal is None:
            raise TowlineError("the gateway is not open")
        return self._journal

    @property
    def trajectories(self) -> Path:
        return self.settings.data / "trajectories"

    async def open(self) -> None:
        """Lock the data folder, restore the open sessions, and start the engines."""
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
            self.stalls.start()
        except BaseException:
            await self._journal.close()
            await self._close_engines()
            raise

    def _engines(self) -> list[Engine]:
        """Every engine once: two routes may share one."""
        return list({id(route.engine): route.engine for route in self.routes}.values())

    async def _close_engines(self) -> None:
        failed = await asyncio.gather(*(engine.close() for engine in self._engines()), return_exceptions=True)
        for error in failed:
            if error is not None:
                raise error

    async def stop(self) -> None:
        """End the turns in flight; waiting clients are told to retry."""
        await asyncio.gather(*(session.stop() for session in self.sessions.values()))

    async def close(self) -> None:
        self.stalls.close()
        await self.stop()
        await asyncio.gather(*self._work.values(), return_exceptions=True)
        try:
            if self._journal is not None:
                await self._journal.close()
        finally:
            await self._close_engines()

    def collect(self) -> Iterable[Metric]:
        """Prometheus metrics of the gateway: its refusals by budget, and how long its event loop was blocked."""
        refusals = Metric("towline_gateway_refusals", "Requests and connections over a session's budget", "counter")
        refusals.samples += [
            Sample("towline_gateway_refusals_total", {"budget": budget}, count)
            for budget, count in self.refusals.items()
        ]
        return [refusals, *self.stalls.collect("node")]

    # Sessions

    async def create(self, fields: dict[str, Any]) -> OpenedSession:
        """Create a session. `fields`: id, group, instruction, later_instructions, metadata, settings."""
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
        if not SESSION_ID.fullmatch(id):
            raise SessionError(
                422, "id must be 1 to 128 letters, digits, '.', '_' or '-', starting with a letter or digit"
            )
        if id in self.sessions or id in self._ended or self.trajectory_file(id).exists():
            raise SessionError(409, f"session {id!r} already exists")
        if len(self.sessions) >= self.settings.sessions:
            raise SessionError(429, f"the limit of {self.settings.sessions} open sessions is reached")
        merged = deep_merge(self.defaults.model_dump(mode="json"), settings)
        if isinstance(settings.get("models"), dict):
            # The first matching pattern wins: the session's own precede the defaults.
            merged["models"] = {**settings["models"], **self.defaults.models, **settings["models"]}
        try:
            chosen = SessionSettings.model_validate(merged)
        except ValidationError as error:
            first = error.errors()[0]
            raise SessionError(422, f"settings.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        unknown_name = self.routes.unknown(chosen.models)
        if unknown_name is not None:
            known = ", ".join(route.name for route in self.routes)
            reason = f"unknown engine {chosen.models[unknown_name]!r}; known engines: {known}"
            raise SessionError(422, f"settings.models.{unknown_name}: {reason}")
        if isinstance(self.codec, ServerRenderedCodec):
            # The engine renders prompts by itself: nothing can be exact, and rows are merged.
            stitched = BuilderName.MERGED if chosen.builder is BuilderName.EXACT else chosen.builder
            chosen = chosen.model_copy(update={"capture": "plain", "builder": stitched})
        key = "tl-" + secrets.token_urlsafe(32)
        session = GatewaySession(
            id,
            hash_key(key),
            chosen,
            self.routes,
            self.journal,
            fields.get("group", ""),
            fields.get("instruction", ""),
            metadata,
            tuple(later),
            usage=self.new_usage(),
        )
        self.add(session)
        try:
            await self.journal.append(session_record(session))
        except BaseException as error:
            self.forget(id)
            if isinstance(error, RecordError):
                raise SessionError(422, f"metadata or settings cannot be recorded: {error}") from error
            raise
        return OpenedSession(session, key)

    def new_usage(self) -> SessionUsage:
        """The budgets of one more session."""
        return SessionUsage(self.settings.budgets, self.refusals)

    def count_refusal(self, budget: str) -> None:
        """A connection of no session in particular was refused."""
        self.refusals[budget] += 1

    def add(self, session: GatewaySession) -> None:
        self.sessions[session.id] = session
        self._by_key[session.key_hash] = session

    def forget(self, id: str) -> None:
        """Forget a session: its key stops working."""
        session = self.sessions.pop(id, None)
        if session is not None:
            self._by_key.pop(session.key_hash, None)

    async def quarantine_session(self, id: str, reason: str) -> None:
        """End a session whose trajectory cannot be built, and keep its journal records in the quarantine."""
        session = self.sessions.get(id)
        if session is not None:
            await session.end()
        await quarantine_sessions(self.journal, self.quarantine, {id: reason})
        self.forget(id)

    def by_key(self, key: str) -> GatewaySession | None:
        return self._by_key.get(hash_key(key))

    def get(self, id: str) -> GatewaySession:
        session = self.sessions.get(id)
        if session is None:
            raise SessionError(404, f"unknown session {id!r}")
        return session

    async def seal(self, id: str, end_reason: EndReason = EndReason.EXITED) -> Trajectory:
        """End a session and store its trajectory. Sealing twice returns the same trajectory."""
        if id not in self.sessions and id not in self._ended:
            return self._stored(id)
        return await self._once("seal", id, lambda: self._seal(id, end_reason))

    async def _seal(self, id: str, end_reason: EndReason) -> Trajectory:
        trajectory = await self.end(id, end_reason)
        await self.store(trajectory)
        return trajectory

    async def end(self, id: str, end_reason: EndReason) -> Trajectory:
        """End a session: its key stops working. Its trajectory is built; the caller completes it, and stores it here
        (`store`) or elsewhere (then `release`). Until then the journal keeps the session."""
        if id in self._ended:
            return self._ended[id]
        return await self._once("end", id, lambda: self._end(self.get(id), end_reason))

    async def _once(self, what: str, id: str, work: Callable[[], Coroutine[Any, Any, Trajectory]]) -> Trajectory:
        """The result of the work, which concurrent callers share and a cancelled caller does not cancel."""
        key = (what, id)
        if key not in self._work:
            self._work[key] = asyncio.get_running_loop().create_task(work())
            self._work[key].add_done_callback(lambda task: self._done(key, task))
        return await asyncio.shield(self._work[key])

    def _done(self, key: tuple[str, str], task: asyncio.Task[Trajectory]) -> None:
        del self._work[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("cannot %s session %s: %s", *key, " ".join(str(error).split()))

    async def _end(self, session: GatewaySession, end_reason: EndReason) -> Trajectory:
        await session.end()
        # Nothing changes in the session any more, and building a long one takes a while: other sessions must not wait.
        trajectory = await asyncio.to_thread(self._build_final, session, end_reason)
        self._ended[session.id] = trajectory
        self.forget(session.id)
        return trajectory

    def _build_final(self, session: GatewaySession, end_reason: EndReason) -> Trajectory:
        state = SessionState.DONE if session.failure is None else SessionState.FAILED
        return without_keys(self.build(session, state, end_reason, self._plain_prompts(session)))

    async def store(self, trajectory: Trajectory) -> None:
        """Write a session's final trajectory to its file, durably, and release the session."""
        id = trajectory.session_id
        try:
            await asyncio.to_thread(trajectory.write, self.trajectory_file(id))
        except OSError as error:
            raise SessionError(500, f"the trajectory of {id!r} cannot be written: {error}", "storage") from error
        await self.release(id)

    async def release(self, id: str) -> None:
        """The final trajectory of an ended session is stored: mark the session as sealed in the journal."""
        if id in self._ended:
            crash_point("gateway.before_sealed")
            await self._append_sealed(id)
            crash_point("gateway.after_sealed")
            self._ended.pop(id, None)

    async def _append_sealed(self, id: str) -> None:
        await self.journal.append(encode(records.SEALED, {"session": id}, {}))

    def trajectory(self, id: str) -> Trajectory:
        """The trajectory of a session so far, or all of it once the session has ended."""
        session = self.sessions.get(id)
        return self._stored(id) if session is None else self.build(session, SessionState.RUNNING, None)

    def build(
        self,
        session: GatewaySession,
        state: SessionState,
        end_reason: EndReason | None,
        plain_prompts: dict[GraphNode, Ids] | None = None,
    ) -> Trajectory:
        """Without `plain_prompts`, the difference to a plain server is not measured, which is slow for long sessions."""
        settings, failed = session.settings, session.failure if state is SessionState.FAILED else None
        return assemble_trajectory(
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

    def _ends(self, session: GatewaySession) -> frozenset[int]:
        """The ids that end a message: the codec's, or if it knows none, those that turns ended on."""
        if self.codec.end_ids:
            return self.codec.end_ids
        stopped = (n for n in session.graph.nodes if n.finish is Finish.STOP and len(n.sampled))
        return frozenset(int(node.sampled[-1]) for node in stopped)

    def _plain_prompts(self, session: GatewaySession) -> dict[GraphNode, Ids]:
        """The prompts that a plain server would have rendered for the last request of each conversation."""
        prompts: dict[GraphNode, Ids] = {}
        if self.engine.info.capture is not CaptureLevel.TOKENS or isinstance(self.codec, ServerRenderedCodec):
            return prompts
        for conversation in session.reader.conversations:
            node = conversation.node
            if node is None or node.finish is None or node.prefill is not None or node.untrained is not None:
                continue
            try:
                # A plain server also shows the model its own call ids, where the model samples them.
                context = replace(session.contexts[node.key], images=conversation.images)
                plain = self.codec.prompt(session.graph.native(conversation.messages), context)
            except TemplateError:
                continue
            prompts[node] = np.asarray(plain.ids, np.int32)
        return prompts

    def trajectory_file(self, id: str) -> Path:
        return self.trajectories / f"{id}.arrow"

    def _stored(self, id: str) -> Trajectory:
        if id in self._ended:
            return self._ended[id]
        if not SESSION_ID.fullmatch(id) or not self.trajectory_file(id).is_file():
            raise SessionError(404, f"unknown session {id!r}")
        return Trajectory.read(self.trajectory_file(id))

    # After a crash

    async def _finish_sealing(self, sealed: set[str]) -> None:
        """A trajectory file is complete: the crash prevented only the `sealed` record."""
        for draft in self.trajectories.glob(".*.tmp"):
            if not draft.is_dir():
                draft.unlink()
        for session in [session for id, session in self.sessions.items() if self.trajectory_file(id).exists()]:
            try:
                await asyncio.to_thread(Trajectory.read, self.trajectory_file(session.id))
            except (TowlineError, OSError, ValueError) as error:
                # The journal still has the session: it is ended again.
                await asyncio.to_thread(self.quarantine.move, self.trajectory_file(session.id), str(error))
                continue
            await self._append_sealed(session.id)
            self.forget(session.id)
            sealed.add(session.id)


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
