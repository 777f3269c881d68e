"""A deterministic engine for tests: real template, real tokenizer, scripted replies.

A script is a function of the neutral request; what it says is written in the model's own format and encoded, so that
everything before and after the engine is the real thing. Logprobs are made up, but a function of id and position only.
A turn that is aborted returns half of what is left of it, and continues with the other half when it is requested again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from towline.common.arrays import Ids
from towline.conversation import Finish, Request, Tool, ToolCall
from towline.engines.base import CaptureLevel, ContextExceeded, EngineInfo, PauseMode, Sample, SampleRequest
from towline.engines.stalls import PauseGate, PauseState
from towline.engines.version_stamp import stamp_versions
from towline.errors import EngineError
from towline.tokens.codec import ModelCodec, RenderContext
from towline.tokens.parsing.base import UnwritableReply


@dataclass(slots=True)
class Say:
    """What the model says in one turn."""

    text: str = ""
    reasoning: str | None = None
    calls: Sequence[ToolCall] = ()
    ids: Ids | None = None
    """The exact ids to emit; the other fields are then ignored."""
    delay: float = 0.0
    """Seconds of simulated inference, during which tokens arrive one by one."""
    silent: bool = False
    """No token arrives during `delay`."""


_REMEMBERED = 256
_TOKEN_INTERVAL = 0.25
"""Seconds between two tokens of simulated inference."""
Script = Callable[[Request], Say]


class Replies(Protocol):
    """A source of replies that sees the whole engine request: a file (`towline.engines.script_file`)."""

    async def reply(self, request: SampleRequest) -> Say: ...

    def close(self) -> None: ...


class ScriptedEngine:
    """Emits what a script or a file says."""

    def __init__(
        self,
        codec: ModelCodec,
        script: Script | None = None,
        *,
        file: Replies | None = None,
        context: int = 131_072,
        version: int = 0,
    ):
        self.codec = codec
        self.script = script or tour
        self.file = file
        """Takes precedence over the script."""
        self._context = context
        self._version = version
        self._gate = PauseGate()
        self._active: dict[str, asyncio.Event] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._unfinished: dict[str, Say] = {}
        """The rest of turns that were aborted."""
        self.requests: deque[SampleRequest] = deque(maxlen=_REMEMBERED)
        """The last requests that reached the engine."""

    @property
    def info(self) -> EngineInfo:
        return EngineInfo("scripted", CaptureLevel.TOKENS, self._context, self.codec.tokenizer.size)

    @property
    def pauses(self) -> PauseState:
        return self._gate.pauses

    @property
    def version(self) -> int:
        return self._version

    async def start(self) -> None:
        return None

    async def probe(self) -> None:
        """No-op: a probe must not use up a reply of the script."""

    async def sample(self, request: SampleRequest) -> Sample:
        with request.suspended():
            await self._gate.wait()
        self.requests.append(request)
        prompt = len(request.prompt)
        if prompt == 0 or prompt > self._context:
            raise ContextExceeded(f"a prompt of {prompt} tokens does not fit a context of {self._context}")
        stop = self._active.setdefault(request.id, asyncio.Event())
        self._idle.clear()
        try:
            said = self._unfinished.pop(request.id, None) or await self._say(request)
            if said.delay:
                await self._infer(request, said, stop)
            return self._emit(request, said, aborted=stop.is_set())
        finally:
            self._active.pop(request.id, None)
            if not self._active:
                self._idle.set()

    async def _infer(self, request: SampleRequest, said: Say, stop: asyncio.Event) -> None:
        left, interval = said.delay, said.delay if said.silent else _TOKEN_INTERVAL
        while left > 0 and not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), min(left, interval))
            left -= interval
            if not said.silent:
                request.tokens_arrived()

    async def _say(self, request: SampleRequest) -> Say:
        if request.forced is not None:
            return Say(ids=request.forced)
        if self.file is not None:
            return await self.file.reply(request)
        if request.request is None:
            raise EngineError("the scripted engine needs the neutral request")
        return self.script(request.request)

    def _emit(self, request: SampleRequest, said: Say, *, aborted: bool) -> Sample:
        if said.ids is not None:
            ids = np.asarray(said.ids, np.int32)
        else:
            frame = (
                RenderContext(request.request.tools, request.request.template_args)
                if request.request
                else RenderContext()
            )
            try:
                written = self.codec.write(said.text, said.reasoning, said.calls, frame)
            except UnwritableReply as error:
                raise EngineError(f"a scripted reply cannot be written in the model's format: {error}") from error
            ids = np.asarray(written, np.int32)
        if aborted:
            self._unfinished[request.id] = Say(ids=ids[len(ids) // 2 :], delay=said.delay)
            ids = ids[: len(ids) // 2]
        finish = Finish.ABORT if aborted else Finish.STOP
        stop_string = None
        if not aborted and request.stop_strings:
            cut, stop_string = self._first_stop(ids, request.stop_strings)
            if stop_string is not None:
                ids, finish = ids[:cut], Finish.STOP_STRING
        if len(ids) > request.max_tokens:
            ids, finish, stop_string = ids[: request.max_tokens], Finish.LENGTH, None
        elif finish is Finish.STOP and (len(ids) == 0 or int(ids[-1]) not in request.stop_ids):
            finish = Finish.LENGTH
        positions = np.arange(len(request.prompt), len(request.prompt) + len(ids), dtype=np.int64)
        logprobs = -(((ids * np.int64(2654435761) + positions * 97) % 1000) / 250 + 0.001)
        return Sample(
            ids=ids,
            logprobs=logprobs.astype(np.float32),
            versions=stamp_versions(len(ids), self._version),
            finish=finish,
            prompt_tokens=len(request.prompt),
            stop_string=stop_string,
        )

    def _first_stop(self, ids: Ids, stops: Sequence[str]) -> tuple[int, str | None]:
        """How many ids it takes to complete a stop string, and which one."""
        for count in range(1, len(ids) + 1):
            text = self.codec.tokenizer.decode(ids[:count].tolist())
            for stop in stops:
                if stop in text:
                    return count, stop
        return len(ids), None

    async def abort(self, ids: Sequence[str]) -> None:
        for id in ids:
            if id in self._active:
                self._active[id].set()

    async def pause(self, mode: PauseMode = PauseMode.DRAIN, deadline: float | None = None) -> None:
        self._gate.clear()
        if mode is PauseMode.DRAIN:
            try:
                await asyncio.wait_for(self._idle.wait(), deadline)
                return
            except TimeoutError:
                pass
        await self.abort(list(self._active))
        await self._idle.wait()

    async def resume(self, version: int | None = None) -> None:
        if version is not None:
            self._version = version
        self._gate.set()

    async def announce(self, version: int | None) -> int:
        """Tokens from here on have this version; with `None`, the version stays."""
        if version is not None and version < self._version:
            raise EngineError(f"the script is at version {self._version}, later than the announced version {version}")
        self._version = self._version if version is None else version
        return self._version

    async def same_weights(self) -> bool:
        return True

    async def ready(self) -> None:
        await self._gate.wait()

    async def update_weights(self, folder: Path, version: int) -> None:
        await self.pause(PauseMode.ABORT)
        await self.resume(version)

    async def close(self) -> None:
        await self.abort(list(self._active))
        if self.file is not None:
            self.file.close()


def tour(request: Request) -> Say:
    """The default script: after a user message one tool call, then two at once, then an answer; each with reasoning."""
    step = 0
    for message in reversed(request.messages):
        if message.role == "user":
            break
        step += message.role == "assistant"
    tool = shell_like(request.tools)
    if tool is None or step >= 2:
        return Say(f"Done after {step} steps.", "Everything is there; I can answer.")
    count = step + 1
    calls = [ToolCall("", tool.name, example_arguments(tool, f"echo towline-{step}-{n}")) for n in range(count)]
    return Say("", f"Step {step}: I need {tool.name}.", calls)


def shell_like(tools: Sequence[Tool]) -> Tool | None:
    """The tool that most likely runs commands; else the first."""
    for name in ("bash", "shell", "run", "exec", "command", "terminal"):
        for tool in tools:
            if name in tool.name.lower() and not tool.custom:
                return tool
    return next((tool for tool in tools if not tool.custom), None)


def example_arguments(tool: Tool, command: str) -> dict[str, Any]:
    """Arguments that satisfy a tool's schema, with `command` where a command goes."""
    schema = tool.parameters
    properties: dict[str, Any] = schema.get("properties") or {}
    required = schema.get("required") or list(properties)[:1]
    return {name: _example(properties.get(name) or {}, command) for name in required}


def _example(schema: dict[str, Any], command: str) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type")
    kind = next((k for k in kind if k != "null"), "string") if isinstance(kind, list) else kind
    if kind in ("integer", "number"):
        return max(1, int(schema.get("minimum", 1)))
    if kind == "boolean":
        return False
    if kind == "array":
        return ["bash", "-lc", command] if (schema.get("items") or {}).get("type") == "string" else []
    if kind == "object":
        nested = schema.get("properties") or {}
        return {name: _example(nested.get(name) or {}, command) for name in schema.get("required") or []}
    return command
