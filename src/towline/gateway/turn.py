"""The execution of a turn: into the graph, sampled in a task of its own, recorded in the journal.

A turn outlives the connection that asked for it, and is in the journal before any client sees its reply. It can be cancelled
only while it samples: once sampled, it is recorded. The tokens, their logprobs and the policy version of each token are
stored as the engine returned them.

A turn that no client waits for is ended, as soon as it is known whether its engine is working on it (`end_inflight`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from towline.common.background import BackgroundTasks
from towline.common.crashpoints import crash_point
from towline.common.untrusted.patterns import compile_pattern
from towline.config import SessionSettings
from towline.conversation import Finish, Request
from towline.engines.base import UNPROVEN_LOGPROBS, ContextExceeded, PoisonTurn, Sample, SampleRequest
from towline.engines.stalls import EngineStalled, PauseState, StallDetector
from towline.errors import ApiError, EngineError, TowlineError
from towline.gateway import records, sampling
from towline.gateway.budgets import SessionUsage, journal_size
from towline.gateway.calls import CallLog, FailedCall, InflightTurns, call_identity, failure_reason
from towline.gateway.journal import Journal
from towline.gateway.model_routes import ModelRoute, ModelRoutes
from towline.schema import Untrained
from towline.tokens.codec import RenderContext
from towline.tokens.continuation.plan import PromptPlan
from towline.tokens.graph import fingerprint
from towline.tokens.graph.graph import Graph, GraphNode
from towline.tokens.graph.tool_results import bare_id

log = logging.getLogger("towline.gateway")
_MIN_WAIT = 0.05


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """A request that is ready to be sampled."""

    request: Request
    plan: PromptPlan
    route: ModelRoute
    key: str
    """The root key of its conversation: tools, template arguments, engine."""
    max_tokens: int
    requested: dict[str, Any]
    """The sampling that the harness requested."""
    first: int
    """The index of the first of the request's `n` turns."""
    meta: Mapping[str, object]


class TurnExecutor:
    """Executes the turns of one session."""

    def __init__(
        self,
        session_id: str,
        group: str,
        metadata: dict[str, Any],
        settings: SessionSettings,
        routes: ModelRoutes,
        journal: Journal,
        usage: SessionUsage,
    ):
        self.planning = asyncio.Lock()
        """Held while a request is read or planned, and while a turn changes the graph."""
        self.noise = tuple(map(compile_pattern, settings.noise))
        self.graph = Graph(self.noise)
        self.calls = CallLog()
        self.inflight = InflightTurns()
        self.contexts: dict[str, RenderContext] = {}
        """By root key, what all its prompts are rendered with."""
        self.native_ids: dict[str, str] = {}
        """By minted call id in its bare form, the id that the model itself sampled."""
        self.tasks: dict[str, asyncio.Task[None]] = {}
        """By turn, until it is in the journal."""
        self.stall_detectors: dict[str, StallDetector] = {}
        """By turn, while it is sampled."""
        self.watchers: list[Callable[[GraphNode], None]] = []
        """Called with every turn that is finished and in the journal."""
        self.started = 0
        self.failures = 0
        """Turns that the engine failed; they count against no limit."""
        self.sampled_tokens = 0
        self._session_id = session_id
        self._group = group
        self._metadata = metadata
        self._settings = settings
        self._routes = routes
        self._journal = journal
        self._usage = usage
        self._recorded: set[str] = set()
        """Root keys whose tools are in the journal."""
        self._ending = BackgroundTasks()

    def restore(self, node: GraphNode) -> None:
        """Take over a turn from the journal after a restart. Until a record says so, its reply was not delivered."""
        self.started = max(self.started, node.index + 1)
        self.sampled_tokens += len(node.sampled)
        self.inflight.abandoned.add(node.id)
        self._recorded.add(node.key)
        self._usage.journaled += journal_size(node.new, len(node.suffix))
        self._add_native_ids(node.meta.get("native_ids", {}))

    def start(self, turn: PlannedTurn) -> GraphNode:
        """Put the turn into the graph and start sampling it."""
        request, plan, route = turn.request, turn.plan, turn.route
        index = self.started
        self.started += 1
        lead = request.messages[0]
        temperature, top_p, top_k, overridden = sampling.sampling_parameters(
            self._settings.sampling, request, trained=route.trained
        )
        node = GraphNode(
            id=f"{self._session_id}-{index}",
            index=index,
            key=turn.key,
            parent=plan.parent,
            suffix=plan.suffix,
            prompt_length=(plan.parent.end if plan.parent else 0) + len(plan.suffix),
            request_hash=plan.request_hash,
            reply_base=plan.hashes[-2] if plan.prefill is not None else plan.request_hash,
            shortened_hash=plan.shortened_hash,
            message_count=len(request.messages) - (plan.prefill is not None),
            origin=plan.origin,
            origin_inferred=plan.inferred,
            reason=plan.reason,
            new=plan.new,
            prefill=plan.prefill,
            hints=request.hints,
            system=fingerprint.of(lead, self.noise) if lead.role == "system" else b"",
            has_tools=bool(request.tools),
            model=request.model,
            forced=plan.forced,
            flags=plan.flags,
            special_text=plan.special_text,
            engine=route.name,
            untrained=None if route.trained else Untrained.FROZEN,
            images=plan.images,
            difference=plan.difference,
            role_override=sampling.role_from_rules(self._settings.roles, request),
            appended_turn=plan.appended_turn,
            kept_ids=plan.kept_ids,
            meta={
                "dialect": request.dialect,
                "temperature": temperature,
                "top_p": top_p,
                "top_k": top_k,
                "requested": turn.requested,
                "overridden": overridden,
                "ignored": list(request.ignored),
                "started": time.time(),
                **turn.meta,
            },
        )
        if request.sampling.n > 1:
            node.meta["first"] = turn.first
        self.graph.add(node)
        self._usage.journaled += journal_size(node.new, len(node.suffix))
        seed = request.sampling.seed
        sample_request = SampleRequest(
            prompt=self.graph.open_prompt(node),
            max_tokens=turn.max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            stop_ids=route.codec.stop_ids,
            stop_strings=request.sampling.stop,
            seed=None if seed is None else seed + index - turn.first,
            id=node.id,
            conversation=f"{self._session_id}-{node.root.index}",
            group=self._group or self._session_id,
            session=self._session_id,
            turn=index,
            metadata=self._metadata,
            request=request,
            media=tuple(node.all_images()),
        )
        task = asyncio.get_running_loop().create_task(self._execute(node, sample_request, request))
        self.tasks[node.id] = task
        task.add_done_callback(lambda task: self._done(node, task))
        return node

    def _done(self, node: GraphNode, task: asyncio.Task[None]) -> None:
        self.tasks.pop(node.id, None)
        if node.finish is None:
            # Cancelled before its first step.
            node.finish = Finish.ABORT
        error = None if task.cancelled() else task.exception()
        if error is not None:
            # The client may already be gone; the operator sees the failure in any case.
            log.warning(
                "turn %s failed: %s", node.id, error, exc_info=None if isinstance(error, TowlineError) else error
            )

    async def _execute(self, node: GraphNode, sample_request: SampleRequest, request: Request) -> None:
        """Sample the turn, read its reply, and write both to the journal. Cancelled only while it samples."""
        began = time.perf_counter()
        try:
            sampled = await self._sample(node, sample_request)
            async with self.planning:
                self._store(node, sample_request, request, sampled)
            node.meta["seconds"] = time.perf_counter() - began
            await self._record(node)
        except BaseException as error:
            # A turn that is not in the journal is not a reply, and no retry may get it.
            node.finish = Finish.ABORT
            self.failures += isinstance(error, EngineError)
            self.log_failure(node, error)
            raise
        async with self.planning:
            self.graph.finish(node)
        for watcher in self.watchers:
            watcher(node)

    async def _sample(self, node: GraphNode, sample_request: SampleRequest) -> Sample:
        route = self._routes[node.engine]
        detector = self.stall_detectors[node.id] = StallDetector(route.stall_seconds)
        watched = replace(sample_request, stall_detector=detector)
        began = time.monotonic()
        try:
            size = route.codec.tokenizer.size
            sampled = await detector.guard(sampling.sample_turn(route.engine, watched, size, route.usable))
        except EngineError as error:
            route.report(error, began)
            raise
        finally:
            del self.stall_detectors[node.id]
        route.report(None, began)
        return sampled

    def _store(self, node: GraphNode, sample_request: SampleRequest, request: Request, sampled: Sample) -> None:
        """Store in the graph what was sampled: ids, logprobs, the policy version of each token, the parsed reply."""
        expanded = any(not image.reported for image in node.images)
        if sampled.prompt is not None:
            # Rendered by the engine: only now is it known what the model saw.
            node.suffix, node.prompt_length, node.buffer = sampled.prompt, len(sampled.prompt), None
            node.images = tuple(replace(image, start=0, length=0) for image in node.images)
        elif expanded and node.untrained is None:
            node.untrained = Untrained.PROMPT_UNKNOWN
        if UNPROVEN_LOGPROBS in sampled.flags and node.untrained is None:
            node.untrained = Untrained.LOGPROBS
        node.sampled = np.ascontiguousarray(sampled.ids, np.int32)
        node.logprobs = np.ascontiguousarray(sampled.logprobs, np.float32)
        node.versions = np.ascontiguousarray(sampled.versions, np.int32)
        node.flags += [flag for flag in sampled.flags if flag not in node.flags]
        node.meta["cached_tokens"] = sampled.cached_tokens
        if sampled.mixed_cache:
            node.meta["mixed_cache"] = sampled.mixed_cache
        tools = request.tools + request.shown
        before = node.parent if node.resumes else None
        codec = self._routes[node.engine].codec
        node.reply, native = sampling.read_reply(codec, sample_request.prompt, sampled, tools, node.index, before)
        node.finish = sampled.finish
        self.sampled_tokens += len(node.sampled)
        if native:
            self._add_native_ids(native)
            node.meta["native_ids"] = native

    def _add_native_ids(self, native: Mapping[str, str]) -> None:
        self.native_ids.update({bare_id(minted): own for minted, own in native.items()})

    async def _record(self, node: GraphNode) -> None:
        if node.key not in self._recorded:
            self._recorded.add(node.key)
            tools = records.tools_record(self._session_id, node.key, self.contexts[node.key])
            self._usage.journaled += len(tools)
            await self._journal.append(tools, sync=False)
        crash_point("gateway.before_journal")
        record = records.turn_record(self._session_id, node)
        self._usage.journaled += max(0, len(record) - journal_size(node.new, len(node.suffix)))
        await self._journal.append(record)
        crash_point("gateway.after_journal")

    # Turns without a reply

    def log_failure(self, node: GraphNode, error: BaseException) -> None:
        """Log a failed model call, unless the policy or the harness caused the failure."""
        if isinstance(error, (asyncio.CancelledError, ApiError, ContextExceeded)):
            return
        text, at_fault = str(error) or repr(error), isinstance(error, PoisonTurn)
        self.calls.fail(FailedCall(failure_reason(error), text, node.engine, call_identity(node), node, at_fault))

    def cancel(self, node: GraphNode) -> None:
        """End a turn that still samples; from its last token to its journal record it cannot be cancelled."""
        task = self.tasks.get(node.id)
        if task is not None and node.finish is None:
            task.cancel()

    def end_orphan(self, node: GraphNode) -> None:
        """End a turn that no client waits for, as soon as it is known whether its engine is working on it."""
        self._ending.start(self._end_inflight(node))

    async def end_inflight(self, *, stopped: bool) -> None:
        """The harness has ended: determine for every turn in flight whether its engine is working on it, and end it.

        `stopped`: the harness was stopped from outside, so an engine on hold is not what made it give up.
        """
        nodes = [self.graph.by_id[id] for id in self.tasks]
        await asyncio.gather(*(self._end_inflight(node, ended=True, stopped=stopped) for node in nodes))

    async def _end_inflight(self, node: GraphNode, *, ended: bool = False, stopped: bool = False) -> None:
        task, detector = self.tasks.get(node.id), self.stall_detectors.get(node.id)
        if task is None or detector is None:
            return
        problem = await _engine_problem(task, detector, self._routes[node.engine].holds, stopped=stopped)
        if not ended and self.inflight.has_client(node):
            return  # A retry has arrived for it.
        if problem is not None:
            self.log_failure(node, problem)
        self.cancel(node)
        await asyncio.wait((task,))

    async def stop(self) -> None:
        """Start no further turns. Turns that still sample are cancelled; finished ones are kept."""
        self.inflight.close()
        await self._ending.close()
        tasks = list(self.tasks.values())
        for id in list(self.tasks):
            self.cancel(self.graph.by_id[id])
        await asyncio.gather(*tasks, return_exceptions=True)


async def _engine_problem(
    task: asyncio.Task[None], detector: StallDetector, holds: PauseState, *, stopped: bool
) -> EngineError | None:
    """Wait until the turn shows whether the engine is working on it; the problem if it is not.

    A turn that fails by itself meanwhile is not a problem found here. With `stopped`, neither is a turn that has not reached
    the engine because the engine is on hold. A turn that waits for a free replica is given the stall limit to reach one.
    """
    beat = asyncio.ensure_future(detector.next_token())
    free_by = time.monotonic() + detector.limit
    try:
        while not task.done() and not beat.done():
            if detector.is_suspended and holds.paused:
                unavailable = EngineError("the harness gave up while the engine was paused or unavailable")
                return None if stopped else unavailable
            if detector.is_suspended and time.monotonic() >= free_by:
                return EngineStalled(f"no replica was free for the turn for {detector.limit:g} s")
            if detector.seconds_left <= 0 and not detector.streamed:
                return detector.error()
            left = _MIN_WAIT if detector.is_suspended else max(detector.seconds_left, _MIN_WAIT)
            await asyncio.wait((task, beat), timeout=left, return_when=asyncio.FIRST_COMPLETED)
    finally:
        beat.cancel()
    return None
