"""A file of replies for the scripted engine: Python with `script(request) -> reply`, or a JSON list of replies.

The file is the operator's own code and can be named on the command line only: no task, setting or request can name one.
Errors in the file are `ConfigError` when it is loaded and `EngineError` when it is called, with file and line.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from towline.conversation import Message, Tool, ToolCall
from towline.engines.base import SampleRequest
from towline.engines.scripted import Say
from towline.errors import ConfigError, EngineError

FUNCTION = "script"
_REPLY_FIELDS = ("text", "reasoning", "tool_calls", "delay", "silent")
_CALL_FIELDS = ("name", "arguments", "id")


@dataclass(frozen=True, slots=True)
class ScriptRequest:
    """One model call, as a script sees it: plain data, and the script's own copy."""

    messages: list[dict[str, Any]]
    """`{"role", "text"}`, with `reasoning`, `tool_calls`, `tool_call_id` and `name` where a message has them."""
    tools: list[dict[str, Any]]
    """`{"name", "description", "parameters"}` of each tool that the harness offers."""
    model: str
    """The model name that the harness requested."""
    turn: int
    """Index of this model call in its session, from 0; calls outside the main conversation count too."""
    session: str
    """The session's id."""
    task: str
    """The id of the session's task; the session's own id if there is none."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The session's metadata: `attempt` and `sample` in a run."""
    dialect: str = ""
    seed: int | None = None
    """As requested by the harness; each reply of a request for several has its own."""
    temperature: float = 1.0
    max_tokens: int = 0

    @property
    def last(self) -> dict[str, Any]:
        """The last message; an empty one if there is none."""
        return self.messages[-1] if self.messages else {"role": "", "text": ""}


class ScriptFile:
    """Replies from a file. A Python script runs in a thread of its own, one call at a time."""

    def __init__(self, path: Path):
        self.path = path
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"--script {path}: {error.strerror or error}") from error
        self.digest = hashlib.sha256(data).hexdigest()
        if path.suffix not in (".py", ".json"):
            raise ConfigError(f"--script {path}: it must be a .py or a .json file")
        self._replies = _replies(path, data) if path.suffix == ".json" else None
        self._script = _function(path) if path.suffix == ".py" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="towline-script")

    async def reply(self, request: SampleRequest) -> Say:
        """The file's reply to a request."""
        if self._replies is not None:
            # The last reply of a list repeats: harnesses make further calls (titles, summaries) after the answer.
            return self._replies[min(request.turn, len(self._replies) - 1)]
        argument = script_request(request)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._call, argument)

    def _call(self, request: ScriptRequest) -> Say:
        assert self._script is not None
        try:
            value = self._script(request)
        except (Exception, SystemExit) as error:  # Anything a script raises fails the turn, with file and line.
            raise EngineError(f"{_location(self.path, error)}: {type(error).__name__}: {error}") from error
        try:
            return parse_reply(value)
        except ValueError as error:
            raise EngineError(f"{self.path}: the reply of {FUNCTION}() to turn {request.turn} {error}") from error

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def script_request(request: SampleRequest) -> ScriptRequest:
    """An engine's request as plain data."""
    neutral = request.request
    if neutral is None:
        raise EngineError("the scripted engine needs the neutral request")
    return ScriptRequest(
        messages=[_message(message) for message in neutral.messages],
        tools=[_tool(tool) for tool in neutral.tools],
        model=neutral.model,
        turn=request.turn,
        session=request.session,
        task=request.group,
        metadata=dict(request.metadata),
        dialect=neutral.dialect,
        seed=request.seed,
        temperature=request.temperature,
        max_tokens=request.max_tokens,
    )


def parse_reply(value: Any) -> Say:
    """A reply (a text, an object, or a `Say`) as a `Say`; `ValueError` says what is wrong with it."""
    if isinstance(value, Say):
        return value
    if isinstance(value, str):
        return Say(value)
    if not isinstance(value, Mapping):
        raise ValueError(f"is {type(value).__name__}; it must be text or an object with {', '.join(_REPLY_FIELDS)}")
    unknown = [str(name) for name in value if name not in _REPLY_FIELDS]
    if unknown:
        raise ValueError(f"has an unknown field {unknown[0]!r}; allowed: {', '.join(_REPLY_FIELDS)}")
    text, reasoning, calls = value.get("text") or "", value.get("reasoning"), value.get("tool_calls") or ()
    delay = value.get("delay") or 0.0
    if not isinstance(text, str):
        raise ValueError(f"has a `text` that is {type(text).__name__}; it must be text")
    if reasoning is not None and not isinstance(reasoning, str):
        raise ValueError(f"has a `reasoning` that is {type(reasoning).__name__}; it must be text")
    if not isinstance(calls, list | tuple):
        raise ValueError(f"has `tool_calls` that are {type(calls).__name__}; they must be a list")
    if isinstance(delay, bool) or not isinstance(delay, int | float) or not 0 <= delay < 86_400:
        raise ValueError(f"has a `delay` of {delay!r}; it must be a number of seconds")
    if not (text or reasoning or calls):
        raise ValueError("is empty; it needs a text, a reasoning or a tool call")
    silent = bool(value.get("silent"))
    return Say(text, reasoning, [_call(call) for call in calls], delay=float(delay), silent=silent)


def _call(value: Any) -> ToolCall:
    if isinstance(value, ToolCall):
        return value
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str) or not value["name"]:
        raise ValueError('has a tool call without a name; it is {"name": …, "arguments": {…}}')
    unknown = [str(name) for name in value if name not in _CALL_FIELDS]
    if unknown:
        raise ValueError(f"has a tool call with an unknown field {unknown[0]!r}; allowed: {', '.join(_CALL_FIELDS)}")
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict | str):
        raise ValueError(f"has a tool call with arguments that are {type(arguments).__name__}; they must be an object")
    return ToolCall(str(value.get("id", "")), value["name"], arguments)


def _message(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "text": message.text}
    if message.reasoning is not None:
        fields["reasoning"] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "name": call.name, "arguments": _copy(call.arguments)} for call in message.tool_calls
        ]
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    if message.name:
        fields["name"] = message.name
    if message.media:
        fields["media"] = [{"kind": media.kind, "digest": media.digest} for media in message.media]
    return fields


def _tool(tool: Tool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": _copy(tool.parameters)}


def _copy(value: Any) -> Any:
    """A copy of JSON values, so that a script cannot change the conversation."""
    if isinstance(value, Mapping):
        return {name: _copy(part) for name, part in value.items()}
    return [_copy(part) for part in value] if isinstance(value, list | tuple) else value


def _replies(path: Path, data: bytes) -> list[Say]:
    try:
        value = json.loads(data)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--script {path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--script {path}: not JSON: {error}") from error
    if not isinstance(value, list) or not value:
        raise ConfigError(f"--script {path}: it must be a list of at least one reply")
    found = []
    for index, one in enumerate(value):
        try:
            found.append(parse_reply(one))
        except ValueError as error:
            raise ConfigError(f"--script {path}: reply {index} {error}") from error
    return found


def _function(path: Path) -> Callable[[ScriptRequest], Any]:
    module = _module(path.expanduser().resolve())
    function = getattr(module, FUNCTION, None)
    if not callable(function):
        raise ConfigError(f"--script {path}: it has no function {FUNCTION}(request)")
    return function  # type: ignore[no-any-return]


def _module(path: Path) -> ModuleType:
    name = f"_towline_script_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_loader(name, None, origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    sys.modules[name] = module  # Dataclasses and pickles of the script look it up there.
    try:
        code = compile(path.read_bytes(), str(path), "exec")
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ConfigError(f"--script {path}{line}: not Python: {error}") from error
    try:
        exec(code, module.__dict__)  # The operator's own code.
    except (Exception, SystemExit) as error:  # Loading runs the file, which may raise anything.
        raise ConfigError(f"--script {_location(path, error)}: {type(error).__name__}: {error}") from error
    return module


def _location(path: Path, error: BaseException) -> str:
    """The file and the last of its lines that an error passed through."""
    own = str(path.expanduser().resolve())
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own]
    return f"{path}:{lines[-1]}" if lines else str(path)
