"""A session at the gateway: its key, its limits, its conversations, and the turns that answer its requests.

Requests are read and planned one at a time, a long one in a thread, and no turn ends meanwhile (`planning`); then each
becomes one turn (or `n`), executed by `towline.gateway.turn` whatever becomes of its connection.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from towline.common.budget import Budget
from towline.common.images import ImagePlaceholder
from towline.common.mappings import BoundedDict
from towline.config import SessionSettings
from towline.config.budgets import SessionBudgets
from towline.conversation import Answer, Media, Request, Tool
from towline.dialects.base import Dialect, DialectCall, SupportsReferences
from towline.engines.base import ContextExceeded
from towline.errors import ApiError, EngineError, ErrorKind
from towline.gateway import reading, records, sampling
from towline.gateway.budgets import SessionUsage
from towline.gateway.calls import FailedCall, call_identity
from towline.gateway.images import RemoteImages, inline_remote_media
from towline.gateway.journal import Journal
from towline.gateway.model_routes import ModelRoute, ModelRoutes
from towline.gateway.off_loop import off_loop
from towline.gateway.prompt_size import prompt_length, too_long, with_images
from towline.gateway.reading import CachedConversation, RequestReader
from towline.gateway.turn import PlannedTurn, TurnExecutor
from towline.tokens.codec import RenderContext
from towline.tokens.continuation.plan import PromptMode, PromptPlan, VanishingPolicy
from towline.tokens.continuation.planner import Planner
from towline.tokens.graph import fingerprint
from towline.tokens.graph.graph import GraphNode
from towline.tokens.server_rendered import ServerRenderedCodec
from towline.tokens.templates.chat_template import TemplateError

SESSION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""What a session's id looks like. Ids are parts of file names, so those in a journal are checked against it too."""

_MID_SYSTEM = "mid_conv_system"
"""Claude Code's name for the capability of system messages in the middle of a conversation."""


@dataclass(slots=True)
class RequestTurns:
    """The turns that answer one request."""

    request: Request
    nodes: list[GraphNode]
    work: asyncio.Future[Any]
    """Done when all of them are in the journal, or one of them failed."""
    id: str
    """The id of the response."""
    shared: bool = False
    """They also answer an earlier request, of which this one is a retry."""


@dataclass
class GatewaySession:
    """One session: the state that its requests share."""

    id: str
    key_hash: str
    settings: SessionSettings
    routes: ModelRoutes
    journal: Journal
    group: str = ""
    instruction: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    later_instructions: tuple[str, ...] = ()
    """The instructions of the task's further steps."""
    created: float = field(default_factory=time.time)
    usage: SessionUsage = field(default_factory=lambda: SessionUsage(SessionBudgets()))

    def __post_init__(self) -> None:
        self.turns = TurnExecutor(
            self.id, self.group, self.metadata, self.settings, self.routes, self.journal, self.usage
        )
        self.graph, self.calls, self.contexts = self.turns.graph, self.turns.calls, self.turns.contexts
        self.planners = {route.name: self._planner(route) for route in self.routes}
        self.tools: dict[str, tuple[Tool, ...]] = {}
        self.responses = reading.StoredResponses()
        self.reader = RequestReader(self.planners[self.routes.policy.name], self.responses, self.turns.native_ids)
        self.exhausted = asyncio.Event()
        """Set when a request is refused because a limit of the session is exhausted."""
        self.usage.on_exhausted = self.exhausted.set
        self._fetched: BoundedDict[str, Media] = BoundedDict(256)
        self.sealed = False
        self.stopping = False
        self._paused = Budget()
        """Measures how long an engine of the session was on hold."""
        self._unwatch = self.hold(self._paused)
        self._root_key: tuple[tuple[Tool, ...], dict[str, Any], ModelRoute, str] | None = None
        self._clock = datetime.fromtimestamp(self.created, UTC)
        self.began = time.monotonic() - max(0.0, time.time() - self.created)
        """When the session was created, also by an earlier process, on the monotonic clock."""

    def _planner(self, route: ModelRoute) -> Planner:
        server_rendered = isinstance(route.codec, ServerRenderedCodec)
        return Planner(
            route.codec,
            policy=self.settings.policy,
            vanishing=VanishingPolicy(self.settings.vanishing),
            capture=PromptMode.PLAIN if server_rendered else PromptMode(self.settings.capture),
            noise=self.turns.noise,
            engine=route.name,
        )

    @property
    def instructions(self) -> tuple[str, ...]:
        """The instructions of the main conversation, one per step."""
        return (self.instruction, *self.later_instructions)

    @property
    def models(self) -> list[str]:
        """The model names that the harness can choose from."""
        return self.routes.names(self.settings.models)

    @property
    def in_flight(self) -> int:
        """How many turns are not yet in the journal."""
        return len(self.turns.tasks)

    @property
    def sampled_tokens(self) -> int:
        return self.turns.sampled_tokens

    def _route(self, request: Request) -> ModelRoute:
        return self.routes.of(request.model, self.settings.models)

    def clock(self) -> datetime:
        """The date that templates print: that of the session's creation, so that prompts never change."""
        return self._clock

    def restore(self, node: GraphNode) -> None:
        """Take over a turn from the journal after a restart."""
        self.turns.restore(node)
        self.responses.add(node)

    # Reading

    def read(self, dialect: Dialect, call: DialectCall) -> tuple[Request, CachedConversation]:
        """The neutral request; only its new part is converted and hashed."""
        if isinstance(dialect, SupportsReferences):
            call.body = dialect.with_references(call.body, lambda id: self._output(dialect, id))
        return self.reader.read(dialect, call)

    async def read_request(
        self, dialect: Dialect, call: DialectCall, *, large: bool
    ) -> tuple[Request, CachedConversation]:
        """`read`, in a thread if the request is large."""
        async with self.turns.planning:
            return await off_loop(self.read, dialect, call) if large else self.read(dialect, call)

    def _output(self, dialect: SupportsReferences, id: str) -> Sequence[Any] | None:
        """The items of a stored response, for a request that refers to them."""
        try:
            turns = self.stored(id)
        except ApiError:
            return None
        return dialect.output(turns.request, self.answer(turns)) if turns.work.done() else None

    async def fetch_images(self, request: Request, conversation: CachedConversation, images: RemoteImages) -> None:
        """Replace every remote image of a request by its content, or refuse the request: no engine sees a URL."""
        if await inline_remote_media(request.messages, self._fetched, images):
            conversation.hashes = self.planners[self.routes.policy.name].hashes(request.messages)

    async def resolve_images(self, request: Request, conversation: CachedConversation) -> dict[str, ImagePlaceholder]:
        """The placeholders of a request's images in its prompt, from the engine."""
        route = self._route(request)
        began = time.monotonic()
        try:
            return await route.resolve_images(request.messages)
        except EngineError as error:
            identity = (conversation.hashes[-1], self._key_of(request, route))
            route.report(error, began)
            self.calls.fail(FailedCall(error.failure, str(error), route.name, identity, None))
            raise _unanswered(error) from error

    # Starting turns

    async def start_request(
        self,
        request: Request,
        conversation: CachedConversation,
        images: Mapping[str, ImagePlaceholder] | None = None,
        *,
        large: bool = False,
    ) -> RequestTurns:
        """Plan the request and start sampling it, or join the turns that it retries. Must be followed by `release`."""
        try:
            async with self.turns.planning:
                return await self._start(request, conversation, images or {}, large)
        except ApiError as error:
            if error.kind is ErrorKind.QUOTA:
                self.exhausted.set()
            raise

    async def _start(
        self, request: Request, conversation: CachedConversation, images: Mapping[str, ImagePlaceholder], large: bool
    ) -> RequestTurns:
        self._check_open()
        route = self._route(request)
        key = self._key_of(request, route)
        requested = sampling.requested_sampling(request)
        same = self.graph.by_request.get((conversation.hashes[-1], key), ())
        retried = self.turns.inflight.retried(request, requested, same)
        if retried:
            for node in retried:
                if "retry" not in node.flags:
                    node.flags.append("retry")
            self.turns.inflight.join(retried)
            id = retried[0].meta[reading.RESPONSE_ID]
            return RequestTurns(request, retried, self._gathered(retried), id, shared=True)
        self._check_limits(request)
        self.usage.check_turns(self.in_flight, request.sampling.n)
        context = self._context(request, key)
        shown = with_images(context, images)
        plan: PromptPlan | None
        if large:
            plan = await off_loop(self._sized_plan, request, key, shown, conversation, route)
            self._check_open()
        else:
            plan = self._sized_plan(request, key, shown, conversation, route)
        self.usage.check_journal(plan.new, len(plan.suffix), request.sampling.n)
        conversation.images = images
        previous, first = conversation.node, self.turns.started
        id = secrets.token_hex(12)
        meta = reading.response_meta(request, id)
        nodes = []
        for _ in range(request.sampling.n):
            # Further choices are planned after the first is in the graph: they are its siblings.
            plan = plan or self._plan(request, key, shown, conversation, route)
            most = self._max_tokens(request, plan, route)
            node = self.turns.start(PlannedTurn(request, plan, route, key, most, requested, first, meta))
            self.responses.add(node)
            nodes.append(node)
            plan = None
        self.contexts[key], self.tools[key] = context, context.tools
        conversation.node = nodes[-1]
        self.reader.remember(conversation, previous)
        self.turns.inflight.join(nodes)
        return RequestTurns(request, nodes, self._gathered(nodes), id)

    async def count_request(
        self,
        request: Request,
        conversation: CachedConversation,
        images: Mapping[str, ImagePlaceholder] | None = None,
        *,
        large: bool = False,
    ) -> int:
        """The number of tokens in the request's prompt."""
        async with self.turns.planning:
            route = self._route(request)
            key = self._key_of(request, route)
            planned = (request, key, with_images(self._context(request, key), images or {}), conversation, route)
            plan = await off_loop(self._sized_plan, *planned) if large else self._sized_plan(*planned)
            return prompt_length(plan)

    def _sized_plan(
        self, request: Request, key: str, context: RenderContext, conversation: CachedConversation, route: ModelRoute
    ) -> PromptPlan:
        """The plan of a request that is not far too long. May run in a thread."""
        self._check_size(request, conversation, key, route)
        return self._plan(request, key, context, conversation, route)

    def _context(self, request: Request, key: str) -> RenderContext:
        return self.contexts.get(key) or RenderContext(request.tools, self._arguments(request), self.clock)

    def _plan(
        self, request: Request, key: str, context: RenderContext, conversation: CachedConversation, route: ModelRoute
    ) -> PromptPlan:
        try:
            return self.planners[route.name].plan(self.graph, request, key, context, conversation.hashes)
        except TemplateError as error:
            capability = _MID_SYSTEM if self._refuses_mid_system(request, context, route) else ""
            reason = f"the model's chat template refuses these messages: {error}"
            raise ApiError(ErrorKind.BAD_REQUEST, reason, capability=capability) from error

    def _refuses_mid_system(self, request: Request, context: RenderContext, route: ModelRoute) -> bool:
        """Whether the template accepts the messages without the system messages in their middle."""
        first, *rest = request.messages
        others = [message for message in rest if message.role != "system"]
        if len(others) == len(rest):
            return False
        try:
            route.codec.prompt([first, *others], context)
        except TemplateError:
            return False
        return True

    def stored(self, id: str, query: Mapping[str, str] | None = None) -> RequestTurns:
        """The turns of a stored response."""
        nodes = self.responses.find(id)
        request = reading.stored_request(nodes, self.tools.get(nodes[0].key, ()), query)
        return RequestTurns(request, nodes, self._gathered(nodes), nodes[0].meta[reading.RESPONSE_ID])

    def _gathered(self, nodes: Sequence[GraphNode]) -> asyncio.Future[Any]:
        tasks = [self.turns.tasks[node.id] for node in nodes if node.id in self.turns.tasks]
        if len(tasks) == 1:
            return tasks[0]
        gathered: asyncio.Future[Any] = asyncio.gather(*tasks)
        gathered.add_done_callback(_retrieve)
        return gathered

    def _key_of(self, request: Request, route: ModelRoute) -> str:
        arguments = self._arguments(request)
        cached = self._root_key
        if cached is None or cached[0] is not request.tools or cached[1] != arguments or cached[2] is not route:
            model = "" if route is self.routes.policy else route.name
            key = fingerprint.root_key(request.tools, arguments, model)
            cached = self._root_key = (request.tools, arguments, route, key)
        return cached[3]

    def _arguments(self, request: Request) -> dict[str, Any]:
        return {**self.settings.template_args, **request.template_args}

    # Limits

    def _check_open(self) -> None:
        limits = self.settings.limits
        if self.sealed:
            raise ApiError(ErrorKind.UNAUTHORISED, "this session is sealed")
        if self.stopping:
            raise ApiError(ErrorKind.OVERLOADED, "the gateway is shutting down", retry_after=1)
        # Time during which an engine of the session was on hold does not count.
        seconds = time.monotonic() - self.began - self._paused.held_seconds
        if limits.seconds is not None and seconds > limits.seconds:
            raise ApiError(ErrorKind.QUOTA, f"the session's time limit of {limits.seconds:g} s is exhausted")

    def _check_limits(self, request: Request) -> None:
        limits, turns = self.settings.limits, self.turns
        if limits.turns is not None and turns.started - turns.failures + request.sampling.n > limits.turns:
            raise ApiError(ErrorKind.QUOTA, f"the session's limit of {limits.turns} turns is exhausted")
        if limits.sampled_tokens is not None and turns.sampled_tokens >= limits.sampled_tokens:
            raise ApiError(
                ErrorKind.QUOTA, f"the session's limit of {limits.sampled_tokens} sampled tokens is exhausted"
            )

    def _context_length(self, route: ModelRoute) -> int:
        most = route.engine.info.context
        return min(self.settings.limits.context or most, most)

    def _check_size(self, request: Request, conversation: CachedConversation, key: str, route: ModelRoute) -> None:
        """Refuse a prompt that is far too long without encoding all of it, which would block every other session."""
        length = self._context_length(route)
        tools = () if key in self.contexts else request.tools
        if sampling.exceeds_context(route.codec, conversation.fresh, tools, length):
            raise too_long(length, f"more than {length}")

    def _max_tokens(self, request: Request, plan: PromptPlan, route: ModelRoute) -> int:
        """How many tokens the turn may sample."""
        limits = self.settings.limits
        length, prompt = self._context_length(route), prompt_length(plan)
        if prompt >= length:
            raise too_long(length, str(prompt))
        most = min(self.settings.sampling.max_tokens, length - prompt)
        if limits.sampled_tokens is not None:
            most = min(most, limits.sampled_tokens - self.turns.sampled_tokens)
        return min(most, request.sampling.max_tokens or most)

    # Replies

    async def failed(self, turns: RequestTurns) -> ApiError | None:
        """Wait for the turns; the error for the client if they failed."""
        if not turns.work.done():
            await asyncio.wait((turns.work,))
        try:
            turns.work.result()
        except ApiError as error:
            return error
        except ContextExceeded as error:
            # A limit of the engine that it does not advertise.
            return ApiError(ErrorKind.CONTEXT_LENGTH, str(error), param="messages")
        except EngineError as error:
            return _unanswered(error)
        except asyncio.CancelledError:
            if self.sealed:
                return ApiError(ErrorKind.UNAUTHORISED, "the session was sealed during this turn")
            return ApiError(ErrorKind.OVERLOADED, "the turn was interrupted", retry_after=1)
        for node in turns.nodes:
            self.calls.answered(call_identity(node))
        return None

    def answer(self, turns: RequestTurns) -> Answer:
        """The answer for the dialect to write; the turns are done."""
        codec = self.routes[turns.nodes[0].engine].codec
        return sampling.answer(codec, turns.id, turns.request.model, turns.nodes)

    def undelivered(self, turns: RequestTurns, error: Exception) -> None:
        """The gateway failed to deliver finished turns."""
        for node in turns.nodes:
            self.turns.log_failure(node, error)

    async def delivered(self, turns: RequestTurns) -> None:
        for node in turns.nodes:
            if not node.delivered:
                node.delivered = True
                await self.journal.append(records.delivered_record(self.id, node.id), sync=False)

    def release(self, turns: RequestTurns, grace: float) -> None:
        """The client got its reply, or disconnected. A retry may pick up undelivered turns; without one, turns without a
        waiting client end after `grace` seconds."""
        self.turns.inflight.leave(turns.nodes, grace, self.turns.end_orphan)

    # The end

    @property
    def failure(self) -> FailedCall | None:
        """The model call that the infrastructure failed and that no later call made up for; None if there is none."""
        return self.calls.unanswered(self.graph, self.instructions, self.settings.trained_roles)

    def hold(self, budget: Budget) -> Callable[[], None]:
        """Hold the budget whenever an engine of this session is on hold; returns a function that stops this."""
        stops = [route.holds.subscribe(budget.hold) for route in self.routes.reached(self.settings.models)]

        def stop() -> None:
            for each in stops:
                each()

        return stop

    async def stop(self) -> None:
        """Start no further turns in this process. Turns that still sample are cancelled; finished ones are kept."""
        self.stopping = True
        await self.turns.stop()

    async def end(self) -> None:
        """Start no further turns, ever."""
        self.sealed = True
        self._unwatch()
        await self.stop()


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Retrieve the exception, so that asyncio does not report it when the client has disconnected."""
    if not future.cancelled():
        future.exception()


def _unanswered(error: EngineError) -> ApiError:
    return ApiError(ErrorKind.OVERLOADED, f"the engine could not answer: {error}", retry_after=1)
