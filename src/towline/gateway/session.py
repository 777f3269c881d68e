"""A session at the gateway: its key, its limits, its graph, and its turns in flight.

A request becomes one turn (or `n`): it is planned against the graph without a pause in between, so that requests that
arrive together never see half a turn; then it is sampled in a task of its own, which outlives the connection that asked
for it. The turn is in the journal before anybody sees its reply.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from towline.config import SessionSettings
from towline.conversation import Answer, Finish, Request, Tool, Usage
from towline.crashpoints import crash_point
from towline.dialects.base import Call, Dialect, Referring
from towline.engines.base import ContextExceeded, Sample, SampleRequest
from towline.engines.pulse import Pulse
from towline.errors import ApiError, EngineError, ErrorKind, TowlineError
from towline.gateway import answers, records, sampling, turns
from towline.gateway.budget import Budget
from towline.gateway.calls import Calls, FailedCall, identity_of
from towline.gateway.journal import Journal
from towline.gateway.lanes import Lane, Lanes
from towline.gateway.reading import Reader, Thread
from towline.gateway.role_rules import ruled
from towline.gateway.settling import Settling
from towline.gateway.waiting import Waiting
from towline.images import Placeholder
from towline.schema import Untrained
from towline.tokens import fingerprint
from towline.tokens.codec import Frame
from towline.tokens.continuation import Planner
from towline.tokens.elsewhere import ElsewhereCodec
from towline.tokens.graph import Graph, Node
from towline.tokens.jinja import TemplateError
from towline.tokens.plan import Capture, Plan, Vanishing
from towline.tokens.settle import bare_id

log = logging.getLogger("towline.gateway")
_MID_SYSTEM = "mid_conv_system"
"""What Claude Code calls a system message in the middle of a conversation."""


@dataclass(slots=True)
class Turns:
    """The turns that answer one request."""

    request: Request
    nodes: list[Node]
    work: asyncio.Future[Any]
    """Done when all of them are in the journal, or one of them failed."""
    id: str
    """Names the answer."""
    shared: bool = False
    """They answer an earlier request too, of which this one is a retry."""


@dataclass
class Session:
    id: str
    key_hash: str
    settings: SessionSettings
    lanes: Lanes
    journal: Journal
    group: str = ""
    instruction: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    later_instructions: tuple[str, ...] = ()
    """Those of the task's further steps."""
    created: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self.noise = tuple(re.compile(pattern) for pattern in self.settings.noise)
        self.graph = Graph(self.noise)
        self.planners = {lane.name: self._planner(lane) for lane in self.lanes}
        self.tools: dict[str, tuple[Tool, ...]] = {}
        self.frames: dict[str, Frame] = {}
        self.native: dict[str, str] = {}
        """By call id of ours in its bare form, the id that the model itself sampled."""
        self.work: dict[str, asyncio.Task[None]] = {}
        """By turn, until it is in the journal."""
        self.waiting = Waiting()
        self.answers = answers.Answers()
        self.reader = Reader(self.planners[self.lanes.policy.name], self.answers, self.native)
        self.exhausted = asyncio.Event()
        """Set when a request is refused because a limit of the session is used up."""
        self.watchers: list[Callable[[Node], None]] = []
        """Told of every turn that has come to its end and is in the journal."""
        self.sealed = False
        self.stopping = False
        self.calls = Calls()
        self.pulses: dict[str, Pulse] = {}
        """By turn, while it is being sampled."""
        self.clock_holds = Budget()
        self._unwatch = self.hold(self.clock_holds)
        self.settling = Settling(self)
        self.started = 0
        self.failures = 0
        """Turns that the engine failed; they count against no limit."""
        self.sampled_tokens = 0
        self._root_key: tuple[tuple[Tool, ...], dict[str, Any], Lane, str] | None = None
        self._clock = datetime.fromtimestamp(self.created, UTC)
        self._recorded: set[str] = set()

    def _planner(self, lane: Lane) -> Planner:
        elsewhere = isinstance(lane.codec, ElsewhereCodec)
        return Planner(
            lane.codec,
            policy=self.settings.policy,
            vanishing=Vanishing(self.settings.vanishing),
            capture=Capture.PLAIN if elsewhere else Capture(self.settings.capture),
            noise=self.noise,
            engine=lane.name,
        )

    @property
    def instructions(self) -> tuple[str, ...]:
        """What the main conversation is given, step by step."""
        return (self.instruction, *self.later_instructions)

    @property
    def models(self) -> list[str]:
        """The model names that the harness may choose from."""
        return self.lanes.names(self.settings.models)

    def _lane(self, request: Request) -> Lane:
        return self.lanes.of(request.model, self.settings.models)

    def clock(self) -> datetime:
        """The date that a template may print: the session's, for as long as it lasts."""
        return self._clock

    def adopt(self, node: Node) -> None:
        """Take a turn from the journal after a crash. Until told otherwise its reply was never delivered."""
        self.started = max(self.started, node.index + 1)
        self.sampled_tokens += len(node.sampled)
        self.waiting.abandoned.add(node.id)
        self._recorded.add(node.key)
        self.native.update({bare_id(minted): own for minted, own in node.meta.get("native_ids", {}).items()})
        self.answers.add(node)

    # Reading

    def read(self, dialect: Dialect, call: Call) -> tuple[Request, Thread]:
        """The neutral request, converted and hashed only where it is new."""
        if isinstance(dialect, Referring):
            call.body = dialect.with_references(call.body, lambda id: self._output(dialect, id))
        return self.reader.read(dialect, call)

    def _output(self, dialect: Referring, id: str) -> Sequence[Any] | None:
        """The items of a stored answer, for a request that names them."""
        try:
            turns_ = self.stored(id)
        except ApiError:
            return None
        return dialect.output(turns_.request, self.answer(turns_)) if turns_.work.done() else None

    async def look(self, request: Request, thread: Thread) -> dict[str, Placeholder]:
        """What stands for the images of a request in its prompt, as the engine tells it."""
        lane = self._lane(request)
        try:
            return await lane.look(request.messages)
        except EngineError as error:
            identity = (thread.hashes[-1], self._key_of(request, lane))
            self.calls.fail(FailedCall(error.failure, str(error), lane.name, identity, None))
            lane.report(error)
            raise _unanswered(error) from error

    # Starting turns

    def start(self, request: Request, thread: Thread, images: Mapping[str, Placeholder] | None = None) -> Turns:
        """Plan the request and begin to sample it; or share the turns that it retries. Ends with `release`."""
        try:
            return self._start(request, thread, images or {})
        except ApiError as error:
            if error.kind is ErrorKind.QUOTA:
                self.exhausted.set()
            raise

    def _start(self, request: Request, thread: Thread, images: Mapping[str, Placeholder]) -> Turns:
        self._check_open()
        lane = self._lane(request)
        key = self._key_of(request, lane)
        asked = sampling.asked(request)
        retried = self.waiting.retried(request, asked, self.graph.by_request.get((thread.hashes[-1], key), ()))
        if retried:
            for node in retried:
                if "retry" not in node.flags:
                    node.flags.append("retry")
            self.waiting.join(retried)
            return Turns(request, retried, self._gathered(retried), retried[0].meta[answers.ANSWER], shared=True)
        self._check_limits(request)
        self._check_size(request, thread, key, lane)
        frame = self._frame(request, key)
        thread.images = images
        previous, first = thread.node, self.started
        id = secrets.token_hex(12)
        nodes = []
        for _ in range(request.sampling.n):
            plan = self._plan(request, key, _seeing(frame, images), thread, lane)
            room = self._room(request, plan, lane)
            nodes.append(self._open(request, plan, key, room, asked, first, id, lane))
        self.frames[key], self.tools[key] = frame, frame.tools
        thread.node = nodes[-1]
        self.reader.remember(thread, previous)
        self.waiting.join(nodes)
        return Turns(request, nodes, self._gathered(nodes), id)

    def count(self, request: Request, thread: Thread, images: Mapping[str, Placeholder] | None = None) -> int:
        """How many tokens the request's prompt would have."""
        lane = self._lane(request)
        key = self._key_of(request, lane)
        self._check_size(request, thread, key, lane)
        plan = self._plan(request, key, _seeing(self._frame(request, key), images or {}), thread, lane)
        return (plan.parent.end if plan.parent else 0) + len(plan.suffix)

    def _frame(self, request: Request, key: str) -> Frame:
        return self.frames.get(key) or Frame(request.tools, self._arguments(request), self.clock)

    def _plan(self, request: Request, key: str, frame: Frame, thread: Thread, lane: Lane) -> Plan:
        try:
            return self.planners[lane.name].plan(self.graph, request, key, frame, thread.hashes)
        except TemplateError as error:
            capability = _MID_SYSTEM if self._refuses_mid_system(request, frame, lane) else ""
            reason = f"the model's chat template refuses these messages: {error}"
            raise ApiError(ErrorKind.BAD_REQUEST, reason, capability=capability) from error

    def _refuses_mid_system(self, request: Request, frame: Frame, lane: Lane) -> bool:
        """Whether the messages that the template refuses are fine without the system messages in their middle."""
        first, *rest = request.messages
        others = [message for message in rest if message.role != "system"]
        if len(others) == len(rest):
            return False
        try:
            lane.codec.prompt([first, *others], frame)
        except TemplateError:
            return False
        return True

    def stored(self, id: str, query: Mapping[str, str] | None = None) -> Turns:
        """The turns of an answer that a client asks for again."""
        nodes = self.answers.find(id)
        request = answers.as_request(nodes, self.tools.get(nodes[0].key, ()), query)
        return Turns(request, nodes, self._gathered(nodes), nodes[0].meta[answers.ANSWER])

    def _gathered(self, nodes: Sequence[Node]) -> asyncio.Future[Any]:
        tasks = [self.work[node.id] for node in nodes if node.id in self.work]
        if len(tasks) == 1:
            return tasks[0]
        gathered: asyncio.Future[Any] = asyncio.gather(*tasks)
        gathered.add_done_callback(_retrieve)
        return gathered

    def _check_open(self) -> None:
        limits = self.settings.limits
        if self.sealed:
            raise ApiError(ErrorKind.UNAUTHORISED, "this session is sealed")
        if self.stopping:
            raise ApiError(ErrorKind.OVERLOADED, "the gateway is shutting down", retry_after=1)
        if limits.seconds is not None and self._seconds() > limits.seconds:
            raise ApiError(ErrorKind.QUOTA, f"the session's wall clock of {limits.seconds:g} s is used up")

    def _seconds(self) -> float:
        """Wall clock of the session, without the time that an engine of its was on hold."""
        return time.time() - self.created - self.clock_holds.held_seconds

    def _check_limits(self, request: Request) -> None:
        limits = self.settings.limits
        if limits.turns is not None and self.started - self.failures + request.sampling.n > limits.turns:
            raise ApiError(ErrorKind.QUOTA, f"the session's limit of {limits.turns} turns is used up")
        if limits.sampled_tokens is not None and self.sampled_tokens >= limits.sampled_tokens:
            raise ApiError(ErrorKind.QUOTA, f"the session's limit of {limits.sampled_tokens} sampled tokens is used up")

    def _context(self, lane: Lane) -> int:
        most = lane.engine.info.context
        return min(self.settings.limits.context or most, most)

    def _check_size(self, request: Request, thread: Thread, key: str, lane: Lane) -> None:
        """Refuse what is far too long without encoding all of it, which would hold up every other session."""
        context = self._context(lane)
        tools = () if key in self.frames else request.tools
        if turns.far_exceeds(lane.codec, thread.fresh, tools, context):
            raise _too_long(context, f"more than {context}")

    def _arguments(self, request: Request) -> dict[str, Any]:
        return {**self.settings.template_args, **request.template_args}

    def _key_of(self, request: Request, lane: Lane) -> str:
        arguments = self._arguments(request)
        cached = self._root_key
        if cached is None or cached[0] is not request.tools or cached[1] != arguments or cached[2] is not lane:
            model = "" if lane is self.lanes.policy else lane.name
            key = fingerprint.root_key(request.tools, arguments, model)
            cached = self._root_key = (request.tools, arguments, lane, key)
        return cached[3]

    def _room(self, request: Request, plan: Plan, lane: Lane) -> int:
        """How many tokens the turn may sample."""
        limits = self.settings.limits
        context = self._context(lane)
        prompt = (plan.parent.end if plan.parent else 0) + len(plan.suffix)
        if prompt >= context:
            raise _too_long(context, str(prompt))
        room = min(self.settings.sampling.max_tokens, context - prompt)
        if limits.sampled_tokens is not None:
            room = min(room, limits.sampled_tokens - self.sampled_tokens)
        return min(room, request.sampling.max_tokens or room)

    def _open(
        self,
        request: Request,
        plan: Plan,
        key: str,
        room: int,
        asked: dict[str, Any],
        first: int,
        id: str,
        lane: Lane,
    ) -> Node:
        """Put the turn into the graph and its sampling under way."""
        index = self.started
        self.started += 1
        lead = request.messages[0]
        temperature, top_p, top_k, overridden = sampling.distribution(
            self.settings.sampling, request, trained=lane.trained
        )
        node = Node(
            id=f"{self.id}-{index}",
            index=index,
            key=key,
            parent=plan.parent,
            suffix=plan.suffix,
            prompt_length=(plan.parent.end if plan.parent else 0) + len(plan.suffix),
            request_hash=plan.request_hash,
            reply_base=plan.hashes[-2] if plan.prefill is not None else plan.request_hash,
            shortened_hash=plan.shortened_hash,
            covered=len(request.messages) - (plan.prefill is not None),
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
            engine=lane.name,
            untrained=None if lane.trained else Untrained.FROZEN,
            images=plan.images,
            difference=plan.difference,
            ruled=ruled(self.settings.roles, request),
            shares=plan.shares,
            kept=plan.kept,
            meta={
                "dialect": request.dialect,
                "temperature": temperature,
                "top_p": top_p,
                "top_k": top_k,
                "requested": asked,
                "overridden": overridden,
                "ignored": list(request.ignored),
                "started": time.time(),
                **answers.meta_of(request, id),
            },
        )
        if request.sampling.n > 1:
            node.meta["first"] = first
        self.graph.add(node)
        self.answers.add(node)
        prompt = self.graph.open_prompt(node)
        seed = request.sampling.seed
        wanted = SampleRequest(
            prompt=prompt,
            max_tokens=room,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            stop_ids=lane.codec.stop_ids,
            stop_strings=request.sampling.stop,
            seed=None if seed is None else seed + index - first,
            id=node.id,
            conversation=f"{self.id}-{node.root.index}",
            group=self.group or self.id,
            session=self.id,
            turn=index,
            metadata=self.metadata,
            request=request,
            media=tuple(node.all_images()),
        )
        task = asyncio.get_running_loop().create_task(self._sample(node, wanted, request))
        self.work[node.id] = task
        task.add_done_callback(lambda task: self._done(node, task))
        return node

    def _done(self, node: Node, task: asyncio.Task[None]) -> None:
        self.work.pop(node.id, None)
        if node.finish is None:
            # Cancelled before its first step.
            node.finish = Finish.ABORT
        error = None if task.cancelled() else task.exception()
        if error is not None:
            # Whether a client is told depends on whether one is left; the operator is in any case.
            log.warning(
                "turn %s failed: %s", node.id, error, exc_info=None if isinstance(error, TowlineError) else error
            )

    # Sampling

    async def _sample(self, node: Node, wanted: SampleRequest, request: Request) -> None:
        """Sample the turn, read its reply, and write both to the journal. Cancelled only while it samples."""
        began = time.perf_counter()
        try:
            sampled = await self._ask(node, wanted)
            self._take(node, wanted, request, sampled)
            node.meta["seconds"] = time.perf_counter() - began
            await self._record(node)
        except BaseException as error:
            # What is not in the journal is no answer, and no retry may get it.
            node.finish = Finish.ABORT
            self.failures += isinstance(error, EngineError)
            self.settling.note(node, error)
            raise
        self.graph.finish(node)
        for watcher in self.watchers:
            watcher(node)

    async def _ask(self, node: Node, wanted: SampleRequest) -> Sample:
        lane = self.lanes[node.engine]
        pulse = self.pulses[node.id] = Pulse(lane.stall_seconds)
        asked = replace(wanted, pulse=pulse)
        try:
            size = lane.codec.tokenizer.size
            sampled = await pulse.guard(turns.sample(lane.engine, asked, size, lane.usable))
        except EngineError as error:
            lane.report(error)
            raise
        finally:
            del self.pulses[node.id]
        lane.report(None)
        return sampled

    def _take(self, node: Node, wanted: SampleRequest, request: Request, sampled: Sample) -> None:
        expanded = any(not image.reported for image in node.images)
        if sampled.prompt is not None:
            # Rendered by the engine: only now is it known what the model saw.
            node.suffix, node.prompt_length, node.buffer = sampled.prompt, len(sampled.prompt), None
            node.images = tuple(replace(image, start=0, length=0) for image in node.images)
        elif expanded and node.untrained is None:
            node.untrained = Untrained.PROMPT_UNKNOWN
        node.sampled = np.ascontiguousarray(sampled.ids, np.int32)
        node.logprobs = np.ascontiguousarray(sampled.logprobs, np.float32)
        node.versions = np.ascontiguousarray(sampled.versions, np.int32)
        node.flags += [flag for flag in sampled.flags if flag not in node.flags]
        node.meta["cached_tokens"] = sampled.cached_tokens
        tools = request.tools + request.shown
        before = node.parent if node.resumes else None
        codec = self.lanes[node.engine].codec
        node.reply, native = turns.read_reply(codec, wanted.prompt, sampled, tools, node.index, before)
        node.finish = sampled.finish
        self.sampled_tokens += len(node.sampled)
        if native:
            self.native.update({bare_id(minted): own for minted, own in native.items()})
            node.meta["native_ids"] = native

    async def _record(self, node: Node) -> None:
        if node.key not in self._recorded:
            self._recorded.add(node.key)
            await self.journal.append(records.tools_record(self.id, node.key, self.frames[node.key]), sync=False)
        crash_point("gateway.before_journal")
        await self.journal.append(records.turn_record(self.id, node))
        crash_point("gateway.after_journal")

    def answer(self, turns_: Turns) -> Answer:
        """What the dialect is to write; the turns are done."""
        nodes = turns_.nodes
        first = nodes[0]
        codec = self.lanes[first.engine].codec
        reasoning = sum(
            turns.reasoning_tokens(codec, node.sampled, node.reply) for node in nodes if node.reply is not None
        )
        return Answer(
            id=turns_.id,
            created=int(first.meta["started"]),
            model=turns_.request.model,
            replies=[node.reply for node in nodes if node.reply is not None],
            usage=Usage(
                prompt=first.prompt_length,
                sampled=sum(len(node.sampled) for node in nodes),
                cached=int(first.meta.get("cached_tokens", 0)),
                reasoning=reasoning,
            ),
            logprobs=lambda place: turns.token_logprobs(codec, nodes[place].sampled, nodes[place].logprobs.tolist()),
        )

    def undelivered(self, turns_: Turns, error: Exception) -> None:
        """The gateway failed to hand out turns that are done."""
        for node in turns_.nodes:
            self.settling.note(node, error)

    async def delivered(self, turns_: Turns) -> None:
        for node in turns_.nodes:
            if not node.delivered:
                node.delivered = True
                await self.journal.append(records.delivered_record(self.id, node.id), sync=False)

    def release(self, turns_: Turns, grace: float) -> None:
        """The client got its answer, or left. A retry may pick up what was not delivered; without one, turns that nobody
        waits for end after `grace` seconds."""
        self.waiting.leave(turns_.nodes, grace, self.settling.orphaned)

    async def settle(self, *, patient: bool = False) -> None:
        """The harness has ended: find out for every turn in flight whether its engine was at work on it, and end it. With
        `patient`, the harness was ended from outside, so that an engine on hold has nothing to do with it."""
        await self.settling.settle(patient=patient)

    @property
    def failure(self) -> FailedCall | None:
        """The model call that the infrastructure failed and that nothing made good; None if there is none."""
        return self.calls.unanswered(self.graph, self.instructions, self.settings.trained_roles)

    def hold(self, budget: Budget) -> Callable[[], None]:
        """Hold the budget whenever an engine of this session is on hold; returns how to stop that."""
        stops = [lane.holds.watch(budget.hold) for lane in self.lanes.reached(self.settings.models)]

        def stop() -> None:
            for each in stops:
                each()

        return stop

    def cancel(self, node: Node) -> None:
        """End a turn that still samples; from then on to its journal record it is not to be cut."""
        task = self.work.get(node.id)
        if task is not None and node.finish is None:
            task.cancel()

    async def stop(self) -> None:
        """No further turns in this process; those that still sample are cancelled, those finished stay."""
        self.stopping = True
        self.waiting.close()
        self.settling.close()
        tasks = list(self.work.values())
        for id in list(self.work):
            self.cancel(self.graph.by_id[id])
        await asyncio.gather(*tasks, return_exceptions=True)

    async def end(self) -> None:
        """No further turns, ever."""
        self.sealed = True
        self._unwatch()
        await self.stop()

    async def failed(self, turns_: Turns) -> ApiError | None:
        """Waits for the turns; the error for the client if they did not come to an end."""
        if not turns_.work.done():
            await asyncio.wait((turns_.work,))
        try:
            turns_.work.result()
        except ApiError as error:
            return error
        except ContextExceeded as error:
            # The engine's own limit, which it had not told.
            return ApiError(ErrorKind.CONTEXT_LENGTH, str(error), param="messages")
        except EngineError as error:
            return _unanswered(error)
        except asyncio.CancelledError:
            if self.sealed:
                return ApiError(ErrorKind.UNAUTHORISED, "the session was sealed during this turn")
            return ApiError(ErrorKind.OVERLOADED, "the turn was interrupted", retry_after=1)
        for node in turns_.nodes:
            self.calls.answered(identity_of(node))
        return None


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Look at the outcome, so that it is not reported as lost when the client has left."""
    if not future.cancelled():
        future.exception()


def _unanswered(error: EngineError) -> ApiError:
    return ApiError(ErrorKind.OVERLOADED, f"the engine could not answer: {error}", retry_after=1)


def _seeing(frame: Frame, images: Mapping[str, Placeholder]) -> Frame:
    return replace(frame, images=images) if images else frame


def _too_long(context: int, found: str) -> ApiError:
    return ApiError(
        ErrorKind.CONTEXT_LENGTH,
        f"This model's maximum context length is {context} tokens. However, your messages resulted in {found} tokens. "
        "Please reduce the length of the messages.",
        param="messages",
    )
