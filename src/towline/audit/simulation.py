"""A simulated harness: it sends a request, gets a reply, runs its tools, and sends the extended history again.

A `ChatThread` is one history as a harness keeps it: messages in the common shape of `clients`, sent whole in every request.
`echo` is how it stores a reply, `shape` how it transforms the history for a request, `dress` how it modifies the encoded
request; together they are what harnesses do to a conversation. If a template has no tools, the agent works in plain text, as
some harnesses do: commands are part of the answer, and their output comes back as a user message.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

import orjson

from towline.audit import content
from towline.audit.clients import DialectClient, WireJson, WireRequest
from towline.audit.clients.transport import Transport
from towline.audit.comparison import PromptChecker
from towline.audit.engine import AlternatingWeights, ScoringEngine, ScriptedReply
from towline.audit.targets import AuditTarget
from towline.errors import TowlineError
from towline.gateway.session import GatewaySession

Echo = Callable[[WireJson], WireJson]
Shape = Callable[[list[WireJson]], list[WireJson]]
Dress = Callable[[WireJson], WireJson]
ClientFactory = Callable[[str], tuple[DialectClient, Transport]]
"""Returns a dialect's client, and a transport with its credentials."""

FREE_TOKENS = (6, 14)
_MAX_TOKENS = 1024
_SEED_BITS = 26
_MAX_SAMPLES = 16
"""Upper bound on samples per request: their seeds are consecutive."""


@dataclass(slots=True)
class Expected:
    """What the specification says about a conversation's graph and rows."""

    chains: int = 1
    """Delivered leaves of the graph, trained or not."""
    forks: Mapping[str, int] = field(default_factory=dict)
    """Forks by reason."""
    untrained: int = 0
    """Turns that are in no row: side calls and undelivered turns."""
    unended: int = 0
    """Turns that `exact` trains without their end-of-turn token, which is in no later prompt."""
    forced_closes: int | None = None
    """`None`: as many as unfinished replies were continued."""
    plain: Literal["any", "never", "always"] = "any"
    """Whether the `merged` builder trains tokens in a context that they were not sampled in."""
    flags: tuple[str, ...] = ()
    """Flags that some turn must carry."""
    roles: Mapping[str, int] = field(default_factory=dict)
    """Turns by role, for the listed roles."""
    versions: int = 1
    """Minimum number of policy versions in the session."""
    torn: bool = False
    """Whether some turn holds tokens of more than one version."""
    origins: Mapping[int, int] = field(default_factory=dict)
    """Origins of turns, as request numbers: the request whose turn started another."""
    temperatures: bool = False
    """Whether every turn must be sampled at the temperature of its request."""


async def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Poll a condition that has no event."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not condition():
        if loop.time() > deadline:
            raise TowlineError(f"the audit's condition did not become true within {seconds:g} s")
        await asyncio.sleep(0.001)


class SimulatedHarness:
    """Everything a behaviour needs to play one conversation."""

    def __init__(
        self,
        target: AuditTarget,
        engine: ScoringEngine,
        session: GatewaySession,
        connect: ClientFactory,
        dialect: str,
        seed: str,
        *,
        free: float,
        split: float,
        checker: PromptChecker,
        as_shown: bool,
    ):
        self.target = target
        self.engine = engine
        self.session = session
        """The gateway's session, for waiting on state that a harness cannot see."""
        self.connect = connect
        self.dialect_client, self.transport = connect(dialect)
        self.checker = checker
        self.as_shown = as_shown
        """Replies are spelled as the template shows them in history."""
        self.random = Random(seed)
        self.free = free
        """Share of replies that the model samples freely instead of following the script."""
        self.split = split
        self.stream = self.random.random() < 0.4
        self.tools: list[WireJson] = list(content.TOOLS) if target.abilities.tools else []
        self.task = content.sentence(self.random)
        """The instruction of the session."""
        self._last = WireRequest("", {})
        self._numbers: list[int] = []
        """Numbers of the last request's samples."""
        self.temperatures: dict[int, float] = {}
        """Requested temperature by request number."""
        self.follows: dict[int, int] = {}
        """By request number, the number of the last reply in its history."""
        self.unclosed = 0
        """Unfinished replies that were continued."""
        self.problems: list[str] = []
        """Problems that the harness itself noticed."""

    @property
    def weights(self) -> AlternatingWeights:
        return self.engine.weights

    def can(self, ability: str) -> bool:
        return ability in self.target.can

    def check(self, passed: bool, problem: str) -> None:
        if not passed:
            self.problems.append(problem)

    # Scripted replies

    def line(self, text: str = "", reasoning: str | None = None) -> ScriptedReply:
        return ScriptedReply(
            text,
            reasoning,
            split=self.split,
            seed=self.random.getrandbits(32),
            as_shown=self.as_shown,
        )

    def step(self, *, reasoning: bool | None = None, calls: int = 1, text: bool | None = None) -> ScriptedReply:
        """A reply that calls tools; `None` draws the choice at random."""
        random, abilities = self.random, self.target.abilities
        thinks = abilities.reasoning and (random.random() < 0.7 if reasoning is None else reasoning)
        line = self.line(reasoning=content.sentence(random) if thinks else None)
        if abilities.tools:
            line.calls = tuple(content.call(random) for _ in range(calls))
            if abilities.text_beside_call and (random.random() < 0.3 if text is None else text):
                line.text = content.sentence(random, 2, 4)
        else:
            command = str(content.call(random)[1].get("command", "ls"))
            line.text = f"{content.sentence(random, 2, 4)}\n\n```sh\n{command}\n```"
        line.free = random.random() < self.free
        return line

    def answer(self, *, reasoning: bool | None = None) -> ScriptedReply:
        """A final answer without calls."""
        line = self.step(reasoning=reasoning)
        line.calls, line.text = (), content.sentence(self.random)
        return line

    # Requests

    async def post(
        self,
        messages: Sequence[WireJson],
        lines: Sequence[ScriptedReply],
        *,
        tools: Sequence[WireJson],
        headers: Mapping[str, str],
        leave: asyncio.Event | None = None,
        dress: Dress | None = None,
        **fields: Any,
    ) -> list[WireJson]:
        """Send one request and return its choices. Sampling parameters vary from request to request, which must not
        matter."""
        seed = self.random.getrandbits(_SEED_BITS) * _MAX_SAMPLES
        for line in lines:
            line.calls_before = sum(len(message.get("tool_calls") or ()) for message in messages)
        self.engine.script(self.session.id, seed, lines)
        body: WireJson = {
            "model": "audited",
            "messages": list(messages),
            "seed": seed,
            "temperature": self.random.choice((0.2, 0.7, 1.0)),
            "max_tokens": self.random.randint(*FREE_TOKENS) if any(line.free for line in lines) else _MAX_TOKENS,
            "stream": self.stream,
            **fields,
        }
        if tools:
            body["tools"] = list(tools)
        request = self._last = self.dialect_client.encode(body)
        if dress is not None:
            request.body = dress(request.body)
        numbers = self._numbers = [seed + offset for offset in range(len(lines))]
        self.temperatures |= {number: float(body["temperature"]) for number in numbers}
        self.checker.record_request(self.dialect_client.name, orjson.dumps(request.body), numbers)
        choices = self.dialect_client.decode(
            await self.transport.post(request, dict(headers), leave), stream=self.stream
        )
        for number, line, choice in zip(numbers, lines, choices, strict=True):
            choice["number"] = number
            self._check_reply(number, line, choice, body)
        return choices

    def _check_reply(self, number: int, line: ScriptedReply, choice: WireJson, body: WireJson) -> None:
        """Check that a reply reached the harness as the script wrote it, whatever the model's format."""
        message = choice["message"]
        calls = self.engine.answered(self.session.id, number)
        self.checker.record_reply(number, line, message, calls, self.target.codec.stop_ids)
        if line.free or line.garble or line.other_end or choice["finish_reason"] == "length" or "stop" in body:
            return
        called = [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in _calls(message)]
        self.check(called == [*line.calls], f"the calls {line.calls!r} reached the harness as {called!r}")
        text = (message.get("content") or "").strip()
        self.check(text == line.text.strip(), f"the text {line.text!r} reached the harness as {text!r}")
        thought = message.get("reasoning_content")
        # Some dialects return reasoning only sealed.
        if thought is not None or self.dialect_client.name == "chat":
            self.check(
                thought == line.reasoning, f"the reasoning {line.reasoning!r} reached the harness as {thought!r}"
            )

    async def resend(self, headers: Mapping[str, str]) -> list[WireJson]:
        """Send the last request again and return its choices. It has no scripted reply: it must not be sampled."""
        last, numbers = self._last, self._numbers
        choices = self.dialect_client.decode(await self.transport.post(last, dict(headers)), stream=self.stream)
        for number, choice in zip(numbers, choices, strict=True):
            choice["number"] = number
        return choices

    def switch(self, dialect: str) -> None:
        """Use another dialect from now on."""
        self.dialect_client, self.transport = self.connect(dialect)

    def thread(self, **options: Any) -> ChatThread:
        return ChatThread(self, **options)

    def concurrent(self) -> SimulatedHarness:
        """A copy for a thread that runs concurrently, with its own random draws."""
        other = copy.copy(self)
        other.random = Random(self.random.getrandbits(64))
        return other


class ChatThread:
    """One history, and how the harness stores and sends it."""

    def __init__(
        self,
        harness: SimulatedHarness,
        *,
        system: str = content.SYSTEM,
        task: str | None = None,
        tools: Sequence[WireJson] | None = None,
        headers: Mapping[str, str] | None = None,
        echo: Echo = copy.deepcopy,
        shape: Shape = list,
        dress: Dress | None = None,
    ):
        self.harness = harness
        self.tools = harness.tools if tools is None else list(tools)
        self.headers = dict(headers or {})
        self.echo = echo
        self.shape = shape
        self.dress = dress
        self.history: list[WireJson] = []
        if harness.can("system"):
            self.history.append({"role": "system", "content": system})
        self.history.append({"role": "user", "content": harness.task if task is None else task})
        self._open = False
        """Whether the last reply is unfinished."""
        self.last: int | None = None
        """The number of the last reply in the history."""

    def copy(self) -> ChatThread:
        """A thread with the same history, to continue differently."""
        other = copy.copy(self)
        other.history = list(self.history)
        return other

    async def ask(
        self, *lines: ScriptedReply, messages: Sequence[WireJson] | None = None, **fields: Any
    ) -> list[WireJson]:
        """Send the history, or `messages` instead, and return the choices without storing any."""
        sent = self.shape(self.history) if messages is None else list(messages)
        options: dict[str, Any] = {"tools": self.tools, "headers": self.headers, "dress": self.dress, **fields}
        last = self.last
        choices = await self.harness.post(sent, lines, **options)
        if last is not None:
            self.harness.follows |= {choice["number"]: last for choice in choices}
        return choices

    async def reply(self, line: ScriptedReply, **fields: Any) -> WireJson:
        """Send the history and store the answer."""
        (choice,) = await self.ask(line, **fields)
        return self.take(choice, truncated=any(stop in line.text for stop in fields.get("stop", ())))

    def take(self, choice: WireJson, *, truncated: bool = False) -> WireJson:
        """Store a choice as the harness does; returns the message as received."""
        self.harness.unclosed += self._open
        self._open = truncated or choice["finish_reason"] == "length"
        self.last = choice["number"]
        message: WireJson = choice["message"]
        self.history.append(self.echo(message))
        return message

    def follow(self, message: WireJson, *, backwards: bool = False) -> None:
        """Append what follows a reply: the results of its calls, or a user message."""
        harness = self.harness
        calls = message.get("tool_calls") or []
        stored = self.history[-1].get("tool_calls") or calls
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": content.output(harness.random)}
            for call, _ in zip(stored, calls, strict=True)
        ]
        if results:
            self.history += reversed(results) if backwards else results
        elif self.tools:
            self.user("Please go on.")
        else:
            self.user(f"Output:\n{content.output(harness.random)}")

    def user(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    async def work(self, steps: int, **options: Any) -> None:
        """Play some tool-calling steps, each with its results."""
        for _ in range(steps):
            self.follow(await self.reply(self.harness.step(**options)))

    async def finish(self, **options: Any) -> None:
        """Play the final answer."""
        await self.reply(self.harness.answer(**options))


def _calls(message: WireJson) -> list[WireJson]:
    return list(message.get("tool_calls") or ())
