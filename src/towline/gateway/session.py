"""A session at the gateway: its key, its limits, its graph, and its turns in flight.

A request becomes one turn (or `n`): it is planned against the graph without a pause in between, so that requests that
arrive together never see half a turn; then it is sampled in a task of its own, which outlives the connection that asked
for it. The turn is in the journal before anybody sees its reply.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np

from towline.config import SessionSettings
from towline.conversation import Answer, Finish, Message, Request, Tool, Usage
from towline.crashpoints import crash_point
from towline.dialects.base import Call, Dialect, Known
from towline.engines.base import Engine, SampleRequest
from towline.errors import ApiError, BadRequest, EngineError, ErrorKind
from towline.gateway import records, turns
from towline.gateway.journal import Journal
from towline.tokens import fingerprint
from towline.tokens.codec import Codec, Frame
from towline.tokens.continuation import Capture, Plan, Planner, Vanishing
from towline.tokens.graph import Graph, Node
from towline.tokens.jinja import TemplateError
from towline.tokens.settle import bare_id, settle, settled_prefix

_THREADS = 8
"""Conversations of a session whose last request is kept, so that the next is read incrementally."""


@dataclass(slots=True)
class Thread:
    """The last request of one conversation, as read."""

    dialect: str
    known: Known
    messages: list[Message]
    """Settled: results in call order."""
    hashes: list[bytes]
    node: Node | None = None


@dataclass(slots=True)
class Turns:
    """The turns that answer one request."""

    request: Request
    nodes: list[Node]
    work: asyncio.Future[Any]
    """Done when all of them are in the journal."""
    shared: bool = False
    """They answer an earlier request too, of which this one is a retry."""


@dataclass
class Session:
    id: str
    key_hash: str
    settings: SessionSettings
    codec: Codec
    engine: Engine
    journal: Journal
    group: str = ""
    instruction: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    created: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        noise = tuple(re.compile(pattern) for pattern in self.settings.noise)
        self.graph = Graph(noise)
        self.planner = Planner(
            self.codec,
            policy=self.settings.policy,
            vanishing=Vanishing(self.settings.vanishing),
            capture=Capture(self.settings.capture),
            noise=noise,
        )
        self.threads: list[Thread] = []
        self.tools: dict[str, tuple[Tool, ...]] = {}
        self.frames: dict[str, Frame] = {}
        self.native: dict[str, str] = {}
        self.work: dict[str, asyncio.Task[None]] = {}
        self.abandoned: set[str] = set()
        """Turns whose client left before they were delivered."""
        self.sealed = False
        self.started = 0
        self._root_key: tuple[tuple[Tool, ...], dict[str, Any], str] | None = None
        self._clock = datetime.fromtimestamp(self.created, UTC)
        self._recorded: set[str] = set()

    def clock(self) -> datetime:
        """The date that a template may print: the session's, for as long as it lasts."""
        return self._clock

    def adopt(self, node: Node) -> None:
        """Take a turn from the journal after a crash. Until told otherwise its reply was never delivered."""
        self.started = max(self.started, node.index + 1)
        self.abandoned.add(node.id)
        self._recorded.add(node.key)
        self.native.update({bare_id(minted): own for minted, own in node.meta.get("native_ids", {}).items()})

    # Reading

    def read(self, dialect: Dialect, call: Call) -> tuple[Request, Thread]:
        """The neutral request, converted and hashed only where it is new."""
        thread = self._thread_of(dialect, call)
        known = thread.known if thread is not None else Known()
        request, after = dialect.read(call, known)
        shared = _same(after.messages, known.messages)
        start = settled_prefix(after.messages, shared)
        if thread is not None and start:
            request.messages[:start] = thread.messages[:start]
        settle(request.messages, start, self.native)
        hashes = self.planner.hashes(request.messages, thread.hashes if thread is not None else (), start)
        if len(hashes) != len(request.messages) + 1:
            hashes = self.planner.hashes(request.messages)
        return request, Thread(dialect.name, after, request.messages, hashes, thread.node if thread else None)

    def _thread_of(self, dialect: Dialect, call: Call) -> Thread | None:
        items = dialect.items(call.body)
        best = None
        for thread in reversed(self.threads):
            known = thread.known.items
            if thread.dialect != dialect.name or not known or not items or known[0] != items[0]:
                continue
            if len(known) <= len(items) and known[-1] == items[len(known) - 1]:
                return thread
            best = best or thread
        return best

    def _remember(self, thread: Thread, previous: Node | None) -> None:
        self.threads = [t for t in self.threads if t.node is None or t.node is not previous][-_THREADS + 1 :]
        self.threads.append(thread)

    # Starting turns

    def start(self, request: Request, thread: Thread) -> Turns:
        """Plan the request and begin to sample it; or share the turn that it retries."""
        self._check_limits(request)
        key = self._key_of(request)
        frame = self._frame_of(request, key)
        retried = self._retried(request, key, thread.hashes[-1])
        if retried is not None:
            return Turns(request, [retried], self._work_of(retried), shared=True)
        previous = thread.node
        nodes = []
        for _ in range(request.sampling.n):
            try:
                plan = self.planner.plan(self.graph, request, key, frame, thread.hashes)
            except TemplateError as error:
                raise BadRequest(f"the model's chat template refuses these messages: {error}") from error
            room = self._room(request, plan)
            nodes.append(self._open(request, plan, key, room))
        thread.node = nodes[-1]
        self._remember(thread, previous)
        return Turns(request, nodes, self._gathered(nodes))

    def _gathered(self, nodes: Sequence[Node]) -> asyncio.Future[Any]:
        tasks = [self.work[node.id] for node in nodes]
        return tasks[0] if len(tasks) == 1 else asyncio.gather(*tasks)

    def _work_of(self, node: Node) -> asyncio.Future[Any]:
        if node.id in self.work:
            return self.work[node.id]
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    def _retried(self, request: Request, key: str, request_hash: bytes) -> Node | None:
        """The turn that this request asks for again, if there is evidence that it is a retry and not another sample."""
        hints = request.hints
        for node in reversed(self.graph.by_request.get((request_hash, key), ())):
            if node.finish is Finish.ABORT or (node.finish is None and node.id not in self.work):
                continue
            repeated = bool(hints.idempotency_key) and hints.idempotency_key == node.hints.idempotency_key
            if hints.retry or repeated or (node.id in self.abandoned and not node.delivered):
                self.abandoned.discard(node.id)
                if "retry" not in node.flags:
                    node.flags.append("retry")
                return node
        return None

    def _check_limits(self, request: Request) -> None:
        limits = self.settings.limits
        if self.sealed:
            raise ApiError(ErrorKind.UNAUTHORISED, "this session is sealed")
        if limits.seconds is not None and time.time() - self.created > limits.seconds:
            raise ApiError(ErrorKind.QUOTA, f"the session's wall clock of {limits.seconds:g} s is used up")
        if limits.turns is not None and self.started + request.sampling.n > limits.turns:
            raise ApiError(ErrorKind.QUOTA, f"the session's limit of {limits.turns} turns is used up")
        if limits.sampled_tokens is not None and self.sampled_tokens >= limits.sampled_tokens:
            raise ApiError(ErrorKind.QUOTA, f"the session's limit of {limits.sampled_tokens} sampled tokens is used up")

    @property
    def sampled_tokens(self) -> int:
        return sum(len(node.sampled) for node in self.graph.nodes)

    def _key_of(self, request: Request) -> str:
        arguments = {**self.settings.template_args, **request.template_args}
        cached = self._root_key
        if cached is None or cached[0] is not request.tools or cached[1] != arguments:
            cached = self._root_key = (request.tools, arguments, fingerprint.root_key(request.tools, arguments))
        return cached[2]

    def _frame_of(self, request: Request, key: str) -> Frame:
        frame = self.frames.get(key)
        if frame is None:
            arguments = {**self.settings.template_args, **request.template_args}
            frame = self.frames[key] = Frame(request.tools, arguments, self.clock)
            self.tools[key] = request.tools
        return frame

    def _room(self, request: Request, plan: Plan) -> int:
        """How many tokens the turn may sample."""
        limits, sampling = self.settings.limits, self.settings.sampling
        context = min(limits.context or self.engine.info.context, self.engine.info.context)
        prompt = (plan.parent.end if plan.parent else 0) + len(plan.suffix)
        if prompt >= context:
            raise ApiError(
                ErrorKind.CONTEXT_LENGTH,
                f"This model's maximum context length is {context} tokens. However, your messages resulted in {prompt} "
                "tokens. Please reduce the length of the messages.",
                param="messages",
            )
        room = min(sampling.max_tokens, context - prompt)
        if limits.sampled_tokens is not None:
            room = min(room, limits.sampled_tokens - self.sampled_tokens)
        return min(room, request.sampling.max_tokens or room)

    def _open(self, request: Request, plan: Plan, key: str, room: int) -> Node:
        """Put the turn into the graph and its sampling under way."""
        index = self.started
        self.started += 1
        first = request.messages[0]
        temperature, top_p, top_k, overridden = self._distribution(request)
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
            system=fingerprint.of(first, self.planner.noise) if first.role == "system" else b"",
            has_tools=bool(request.tools),
            model=request.model,
            forced=plan.forced,
            flags=plan.flags,
            special_text=plan.special_text,
            meta={
                "dialect": request.dialect,
                "temperature": temperature,
                "top_p": top_p,
                "top_k": top_k,
                "requested": _asked(request),
                "overridden": overridden,
                "ignored": list(request.ignored),
                "started": time.time(),
            },
        )
        self.graph.add(node)
        prompt = self.graph.open_prompt(node)
        wanted = SampleRequest(
            prompt=prompt,
            max_tokens=room,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            stop_ids=self.codec.stop_ids,
            stop_strings=request.sampling.stop,
            seed=request.sampling.seed,
            id=node.id,
            conversation=f"{self.id}-{node.root.index}",
            group=self.group or self.id,
            request=request,
        )
        task = asyncio.get_running_loop().create_task(self._sample(node, wanted, request))
        self.work[node.id] = task
        task.add_done_callback(lambda _: self.work.pop(node.id, None))
        return node

    def _distribution(self, request: Request) -> tuple[float, float, int, list[str]]:
        """Temperature, top-p and top-k of the turn, and what of the harness's wishes is not followed."""
        fixed, asked = self.settings.sampling, request.sampling
        overridden = list(asked.other)
        if request.tool_choice not in (None, "auto", "none"):
            overridden.append("tool_choice")
        if fixed.mode == "harness":
            temperature = fixed.temperature if asked.temperature is None else asked.temperature
            top_p = fixed.top_p if asked.top_p is None else asked.top_p
            return temperature, top_p, fixed.top_k if asked.top_k is None else asked.top_k, overridden
        for name in ("temperature", "top_p", "top_k"):
            value = getattr(asked, name)
            if value is not None and value != getattr(fixed, name):
                overridden.append(name)
        return fixed.temperature, fixed.top_p, fixed.top_k, overridden

    # Sampling

    async def _sample(self, node: Node, wanted: SampleRequest, request: Request) -> None:
        """Sample the turn, read its reply, and write both to the journal."""
        began = time.perf_counter()
        try:
            sampled = await turns.sample(self.engine, wanted)
        except BaseException:
            node.finish = Finish.ABORT
            raise
        node.sampled = np.ascontiguousarray(sampled.ids, np.int32)
        node.logprobs = np.ascontiguousarray(sampled.logprobs, np.float32)
        node.versions = np.ascontiguousarray(sampled.versions, np.int32)
        node.flags += [flag for flag in sampled.flags if flag not in node.flags]
        node.meta["cached_tokens"] = sampled.cached_tokens
        node.meta["seconds"] = time.perf_counter() - began
        node.reply, native = turns.read_reply(self.codec, wanted.prompt, sampled, request.tools, node.index)
        node.finish = sampled.finish
        if native:
            self.native.update({bare_id(minted): own for minted, own in native.items()})
            node.meta["native_ids"] = native
        if node.key not in self._recorded:
            self._recorded.add(node.key)
            await self.journal.append(records.tools_record(self.id, node.key, self.frames[node.key]), sync=False)
        crash_point("gateway.before_journal")
        await self.journal.append(records.turn_record(self.id, node))
        crash_point("gateway.after_journal")
        self.graph.finish(node)

    def answer(self, turns_: Turns, id: str) -> Answer:
        """What the dialect is to write; the turns are done."""
        nodes = turns_.nodes
        first = nodes[0]
        reasoning = sum(
            turns.reasoning_tokens(self.codec, node.sampled, node.reply) for node in nodes if node.reply is not None
        )
        return Answer(
            id=id,
            created=int(first.meta["started"]),
            model=turns_.request.model,
            replies=[node.reply for node in nodes if node.reply is not None],
            usage=Usage(
                prompt=first.prompt_length,
                sampled=sum(len(node.sampled) for node in nodes),
                cached=int(first.meta.get("cached_tokens", 0)),
                reasoning=reasoning,
            ),
            logprobs=lambda place: turns.token_logprobs(
                self.codec, nodes[place].sampled, nodes[place].logprobs.tolist()
            ),
        )

    async def delivered(self, turns_: Turns) -> None:
        for node in turns_.nodes:
            if not node.delivered:
                node.delivered = True
                await self.journal.append(records.delivered_record(self.id, node.id), sync=False)

    def abandon(self, turns_: Turns, grace: float) -> None:
        """The client left. A retry may pick the turns up; without one they end after `grace` seconds."""
        for node in turns_.nodes:
            if node.delivered:
                continue
            self.abandoned.add(node.id)
            task = self.work.get(node.id)
            if task is not None:
                asyncio.get_running_loop().call_later(grace, self._end_orphan, node.id, task)

    def _end_orphan(self, turn: str, task: asyncio.Task[None]) -> None:
        if turn in self.abandoned and not task.done():
            task.cancel()

    async def end(self) -> None:
        """No further turns; those in flight are cancelled, those finished stay."""
        self.sealed = True
        tasks = list(self.work.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def failed(self, turns_: Turns) -> ApiError | None:
        """The error of turns that did not come to an end, for the client."""
        try:
            await turns_.work
        except ApiError as error:
            return error
        except EngineError as error:
            return ApiError(ErrorKind.OVERLOADED, f"the engine could not answer: {error}", retry_after=1)
        except asyncio.CancelledError:
            if self.sealed or turns_.work.cancelled():
                return ApiError(ErrorKind.UNAUTHORISED, "the session ended during this turn")
            raise
        return None


def _same(after: list[Message], before: list[Message]) -> int:
    """How many leading messages are the very same objects."""
    count = 0
    for mine, theirs in zip(after, before, strict=False):
        if mine is not theirs:
            break
        count += 1
    return count


def _asked(request: Request) -> dict[str, Any]:
    asked = {name: value for name, value in asdict(request.sampling).items() if value not in (None, (), {}, [])}
    if request.tool_choice is not None:
        asked["tool_choice"] = request.tool_choice
    return asked
