"""One simulated conversation: a harness that asks, gets an answer, runs its tools, and asks again with all that was said.

A `Thread` is one history, the way a harness keeps it: messages in the shape of `tongues`, sent whole on every call.
`echo` is how it remembers a reply, `shape` how it dresses its history for a request, `dress` what it does to the request
once that is told in its dialect; between them they are what a harness does to a conversation. Where a template has no
tools, the same agent works in plain text, as some harnesses do: commands stand in the answer, and their output comes
back as a user message.
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
from towline.audit.comparison import Witness
from towline.audit.engine import ScoringEngine, Weights
from towline.audit.script import Line
from towline.audit.targets import Target
from towline.audit.tongues import Told, Tongue, Wired
from towline.audit.wires import Wire
from towline.errors import TowlineError
from towline.gateway.session import Session

Echo = Callable[[Wired], Wired]
Shape = Callable[[list[Wired]], list[Wired]]
Dress = Callable[[Wired], Wired]
Speak = Callable[[str], tuple[Tongue, Wire]]
"""A dialect's tongue, and a wire with its credentials."""

FREE_TOKENS = (6, 14)
_ENOUGH = 1024
_SEED_BITS = 26
_MOST_SAMPLES = 16
"""More than one request asks for: their seeds count up."""


@dataclass(slots=True)
class Expected:
    """What the specification says of a conversation, to be compared with what the gateway made of it."""

    chains: int = 1
    """Leaves of the graph that were delivered, trained or not."""
    forks: Mapping[str, int] = field(default_factory=dict)
    untrained: int = 0
    """Turns that are in no row: side calls and what was never delivered."""
    unended: int = 0
    """Turns that `exact` trains but for their end-of-turn token, which stands in no later prompt."""
    forced_closes: int | None = None
    """`None`: as many as replies without an end were continued."""
    plain: Literal["any", "never", "always"] = "any"
    """Whether stitching afterwards trains tokens in a context that they were not sampled in."""
    flags: tuple[str, ...] = ()
    """Flags that some turn must carry."""
    roles: Mapping[str, int] = field(default_factory=dict)
    """Turns by role, for the roles named."""
    versions: int = 1
    """The least number of policy versions in the session."""
    torn: bool = False
    """Some turn holds tokens of more than one version."""
    origins: Mapping[int, int] = field(default_factory=dict)
    """The origin of turns: by the number of a request, the number of the one whose turn it came from."""
    temperatures: bool = False
    """Every turn is sampled at the temperature that its request asked for."""


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for what can only be looked at."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not condition():
        if loop.time() > deadline:
            raise TowlineError(f"what the audit waits for has not come in {seconds:g} s")
        await asyncio.sleep(0.001)


class Play:
    """Everything a behaviour needs to act one conversation."""

    def __init__(
        self,
        target: Target,
        engine: ScoringEngine,
        session: Session,
        speak: Speak,
        dialect: str,
        seed: str,
        *,
        free: float,
        split: float,
        witness: Witness,
        as_shown: bool,
    ):
        self.target = target
        self.engine = engine
        self.session = session
        """The gateway's side, to wait for what a harness cannot see."""
        self.speak = speak
        self.tongue, self.wire = speak(dialect)
        self.witness = witness
        self.as_shown = as_shown
        """Replies are spelled as the template shows them in history."""
        self.random = Random(seed)
        self.free = free
        """The share of replies that the model samples by itself."""
        self.split = split
        self.stream = self.random.random() < 0.4
        self.tools: list[Wired] = list(content.TOOLS) if target.abilities.tools else []
        self.task = content.sentence(self.random)
        """The instruction of the session."""
        self._last = Told("", {})
        self._numbers: list[int] = []
        """Of the last request's samples."""
        self.temperatures: dict[int, float] = {}
        """What each request asked for, by its number."""
        self.follows: dict[int, int] = {}
        """By the number of a request, the number of the last reply in its history."""
        self.unclosed = 0
        """Replies without an end that were continued."""
        self.problems: list[str] = []
        """What the harness itself found wrong."""

    @property
    def weights(self) -> Weights:
        return self.engine.weights

    def can(self, ability: str) -> bool:
        return ability in self.target.can

    def check(self, right: bool, problem: str) -> None:
        if not right:
            self.problems.append(problem)

    # What is said

    def line(self, text: str = "", reasoning: str | None = None) -> Line:
        return Line(
            text,
            reasoning,
            split=self.split,
            seed=self.random.getrandbits(32),
            as_shown=self.as_shown,
        )

    def step(self, *, reasoning: bool | None = None, calls: int = 1, text: bool | None = None) -> Line:
        """A reply that asks for work to be done; `None` leaves a choice to chance."""
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

    def answer(self, *, reasoning: bool | None = None) -> Line:
        """A reply that ends the work."""
        line = self.step(reasoning=reasoning)
        line.calls, line.text = (), content.sentence(self.random)
        return line

    # How it is sent

    async def post(
        self,
        messages: Sequence[Wired],
        lines: Sequence[Line],
        *,
        tools: Sequence[Wired],
        headers: Mapping[str, str],
        leave: asyncio.Event | None = None,
        dress: Dress | None = None,
        **fields: Any,
    ) -> list[Wired]:
        """The choices of one completion. Samplers are asked for something else every time, which must not matter."""
        seed = self.random.getrandbits(_SEED_BITS) * _MOST_SAMPLES
        for line in lines:
            line.calls_before = sum(len(message.get("tool_calls") or ()) for message in messages)
        self.engine.teach(self.session.id, seed, lines)
        body: Wired = {
            "model": "audited",
            "messages": list(messages),
            "seed": seed,
            "temperature": self.random.choice((0.2, 0.7, 1.0)),
            "max_tokens": self.random.randint(*FREE_TOKENS) if any(line.free for line in lines) else _ENOUGH,
            "stream": self.stream,
            **fields,
        }
        if tools:
            body["tools"] = list(tools)
        told = self._last = self.tongue.tell(body)
        if dress is not None:
            told.body = dress(told.body)
        numbers = self._numbers = [seed + place for place in range(len(lines))]
        self.temperatures |= {number: float(body["temperature"]) for number in numbers}
        self.witness.asked(self.tongue.name, orjson.dumps(told.body), numbers)
        choices = self.tongue.hear(await self.wire.post(told, dict(headers), leave), stream=self.stream)
        for number, line, choice in zip(numbers, lines, choices, strict=True):
            choice["number"] = number
            self._heard(number, line, choice, body)
        return choices

    def _heard(self, number: int, line: Line, choice: Wired, body: Wired) -> None:
        """A reply has come: it is what the script said, in whatever format that was written."""
        message = choice["message"]
        calls = self.engine.answered(self.session.id, number)
        self.witness.heard(number, line, message, calls, self.target.codec.stop_ids)
        if line.free or line.garble or line.other_end or choice["finish_reason"] == "length" or "stop" in body:
            return
        called = [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in _calls(message)]
        self.check(called == [*line.calls], f"the calls {line.calls!r} reached the harness as {called!r}")
        text = (message.get("content") or "").strip()
        self.check(text == line.text.strip(), f"the text {line.text!r} reached the harness as {text!r}")
        thought = message.get("reasoning_content")
        # Some dialects show no reasoning, only its seal.
        if thought is not None or self.tongue.name == "chat":
            self.check(
                thought == line.reasoning, f"the reasoning {line.reasoning!r} reached the harness as {thought!r}"
            )

    async def again(self, headers: Mapping[str, str]) -> list[Wired]:
        """The choices of the last request, sent once more. It has no line of its own: it must not be sampled."""
        last, numbers = self._last, self._numbers
        choices = self.tongue.hear(await self.wire.post(last, dict(headers)), stream=self.stream)
        for number, choice in zip(numbers, choices, strict=True):
            choice["number"] = number
        return choices

    def switch(self, dialect: str) -> None:
        """Speak another dialect from now on."""
        self.tongue, self.wire = self.speak(dialect)

    def thread(self, **options: Any) -> Thread:
        return Thread(self, **options)

    def aside(self) -> Play:
        """The same for a thread that runs at the same time, with draws of its own."""
        other = copy.copy(self)
        other.random = Random(self.random.getrandbits(64))
        return other


class Thread:
    """One history and how the harness keeps it."""

    def __init__(
        self,
        play: Play,
        *,
        system: str = content.SYSTEM,
        task: str | None = None,
        tools: Sequence[Wired] | None = None,
        headers: Mapping[str, str] | None = None,
        echo: Echo = copy.deepcopy,
        shape: Shape = list,
        dress: Dress | None = None,
    ):
        self.play = play
        self.tools = play.tools if tools is None else list(tools)
        self.headers = dict(headers or {})
        self.echo = echo
        self.shape = shape
        self.dress = dress
        self.history: list[Wired] = []
        if play.can("system"):
            self.history.append({"role": "system", "content": system})
        self.history.append({"role": "user", "content": play.task if task is None else task})
        self._open = False
        """The last reply has no end of its own."""
        self.last: int | None = None
        """The number of the last reply in the history."""

    def copy(self) -> Thread:
        """The same history, to go on from in another way."""
        other = copy.copy(self)
        other.history = list(self.history)
        return other

    async def ask(self, *lines: Line, messages: Sequence[Wired] | None = None, **fields: Any) -> list[Wired]:
        """The choices that answer the history, or `messages` in its place, without remembering any."""
        sent = self.shape(self.history) if messages is None else list(messages)
        options: dict[str, Any] = {"tools": self.tools, "headers": self.headers, "dress": self.dress, **fields}
        last = self.last
        choices = await self.play.post(sent, lines, **options)
        if last is not None:
            self.play.follows |= {choice["number"]: last for choice in choices}
        return choices

    async def reply(self, line: Line, **fields: Any) -> Wired:
        """Ask, and remember the answer."""
        (choice,) = await self.ask(line, **fields)
        return self.take(choice, cut=any(stop in line.text for stop in fields.get("stop", ())))

    def take(self, choice: Wired, *, cut: bool = False) -> Wired:
        """Remember a choice as the harness does; returns the message as it came."""
        self.play.unclosed += self._open
        self._open = cut or choice["finish_reason"] == "length"
        self.last = choice["number"]
        message: Wired = choice["message"]
        self.history.append(self.echo(message))
        return message

    def follow(self, message: Wired, *, backwards: bool = False) -> None:
        """What comes after a reply: the results of its calls, or the user."""
        play = self.play
        calls = message.get("tool_calls") or []
        told = self.history[-1].get("tool_calls") or calls
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": content.output(play.random)}
            for call, _ in zip(told, calls, strict=True)
        ]
        if results:
            self.history += reversed(results) if backwards else results
        elif self.tools:
            self.user("Please go on.")
        else:
            self.user(f"Output:\n{content.output(play.random)}")

    def user(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    async def work(self, steps: int, **options: Any) -> None:
        """Some steps of work, each with its results."""
        for _ in range(steps):
            self.follow(await self.reply(self.play.step(**options)))

    async def finish(self, **options: Any) -> None:
        """The last answer."""
        await self.reply(self.play.answer(**options))


def _calls(message: Wired) -> list[Wired]:
    return list(message.get("tool_calls") or ())
