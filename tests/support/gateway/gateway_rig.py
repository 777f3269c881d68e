"""A running gateway for tests: both listeners on free loopback ports, the scripted engine, a real tokenizer.

`running_gateway` also listens to what is logged: an error in a log, or a task whose failure nobody looked at, fails the
test that caused it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import openai

from towline.config import GatewaySettings, SessionSettings
from towline.engines.scripted import Script, ScriptedEngine
from towline.gateway.gateway import Gateway
from towline.gateway.model_routes import ModelRoute
from towline.gateway.server import RunningGateway, serve_gateway
from towline.schema import Trajectory, TurnRole
from towline.tokens.codec import ModelCodec

PATIENCE = 30
"""Seconds after which a test takes it that something hangs."""
CONTROL_KEY = "control-key-of-the-tests"
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
EDIT = {
    "type": "function",
    "function": {
        "name": "edit",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "change": {"type": "object"}}},
    },
}
TOOLS: Any = [BASH, EDIT]
Body = dict[str, Any]


@dataclass
class Opened:
    """A session as the control route gave it."""

    id: str
    key: str
    base_url: str
    root: str

    @property
    def chat(self) -> str:
        return self.base_url + "/chat/completions"

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}


@dataclass
class Rig:
    """A gateway that runs, and a client of its control routes."""

    gateway: Gateway
    engine: ScriptedEngine
    running: RunningGateway
    control: aiohttp.ClientSession
    web: aiohttp.ClientSession
    """Without a key."""
    errors: list[str] = field(default_factory=list)
    """What was logged as an error; a test that wants some empties it."""

    async def open(self, **fields: Any) -> Opened:
        status, made = await self.call("POST", "/v1/sessions", fields)
        assert status == 201, made
        return Opened(made["id"], made["key"], made["base_urls"]["openai"], made["base_urls"]["root"])

    async def call(self, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        """A control call: status and JSON."""
        async with self.control.request(method, self.running.control_url + path, json=body, **options) as response:
            return response.status, await response.json()

    async def trajectory(self, session: Opened) -> Trajectory:
        """What there is of a session, sealed or not; reading it checks every invariant of the contract."""
        url = f"{self.running.control_url}/v1/sessions/{session.id}/trajectory"
        async with self.control.get(url) as response:
            data = await response.read()
            assert response.status == 200, data
        return Trajectory.from_json(data)

    async def seal(self, session: Opened) -> Trajectory:
        status, made = await self.call("DELETE", f"/v1/sessions/{session.id}")
        assert status == 200, made
        return await self.trajectory(session)

    def client(self, session: Opened, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key, **{"timeout": PATIENCE, **options})

    async def post(self, session: Opened, body: Body, **options: Any) -> tuple[int, Any]:
        """A chat completion without the SDK: status and JSON."""
        headers = {**session.headers, **options.pop("headers", {})}
        async with self.web.post(session.chat, json=body, headers=headers, **options) as response:
            return response.status, json.loads(await response.read())


Start = Callable[..., contextlib.AbstractAsyncContextManager[Rig]]
"""Starts a gateway: the fixture `start`."""


@dataclass
class Wire:
    """A connection of one's own, to be read slowly or cut off."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def send(cls, session: Opened, body: Body, buffer: int | None = None, **headers: str) -> Wire:
        """Send a chat completion; `buffer` is how much the kernel may take for us, in bytes."""
        url = urlsplit(session.chat)
        raw = socket.create_connection((url.hostname, url.port))
        if buffer is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        raw.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=raw, limit=buffer or 2**16)
        data = json.dumps(body).encode()
        head = {"host": "gateway", "content-length": str(len(data)), **session.headers}
        head |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = [f"POST {url.path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items())]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        await writer.drain()
        return cls(reader, writer)

    def cut(self) -> None:
        """Leave without a word."""
        self.writer.transport.abort()

    async def answer(self) -> Body:
        """The whole answer, which is not a stream."""
        head = (await self.until(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        async with asyncio.timeout(PATIENCE):
            return {"status": int(head.split()[1]), **json.loads(await self.reader.readexactly(length))}

    async def until(self, end: bytes) -> bytes:
        async with asyncio.timeout(PATIENCE):
            return await self.reader.readuntil(end)


@contextlib.asynccontextmanager
async def running_gateway(
    codec: ModelCodec,
    data: Path,
    script: Script | None = None,
    *,
    engine: ScriptedEngine | None = None,
    session: SessionSettings | None = None,
    context: int = 131_072,
    others: Mapping[str, ModelRoute] | None = None,
    **settings: Any,
) -> AsyncIterator[Rig]:
    engine = engine or ScriptedEngine(codec, script, context=context)
    chosen = GatewaySettings(port=0, control_port=0, data=data, **settings)
    gateway = Gateway(engine, codec, chosen, defaults=session, others=others)
    patience = aiohttp.ClientTimeout(total=PATIENCE)
    with logged_errors() as errors:
        async with (
            serve_gateway(gateway, CONTROL_KEY) as running,
            aiohttp.ClientSession(headers={"authorization": f"Bearer {CONTROL_KEY}"}, timeout=patience) as control,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=patience) as web,
        ):
            yield Rig(gateway, engine, running, control, web, errors)
        gc.collect()
        await asyncio.sleep(0)
    assert not errors, "\n".join(errors)


class _Collect(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


@contextlib.contextmanager
def logged_errors() -> Iterator[list[str]]:
    """Errors that anything logs, tasks whose failure was never retrieved among them."""
    handler = _Collect()
    logging.getLogger().addHandler(handler)
    try:
        yield handler.found
    finally:
        logging.getLogger().removeHandler(handler)


async def eventually(condition: Callable[[], Any], what: str = "") -> None:
    """Wait until the condition holds; a test that would wait for ever fails instead."""
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, f"never happened: {what or condition}"
        await asyncio.sleep(0.005)


def user(text: str) -> Body:
    return {"role": "user", "content": text}


def system(text: str) -> Body:
    return {"role": "system", "content": text}


def chat(*messages: Body, **fields: Any) -> Body:
    return {"model": "m", "messages": list(messages), "tools": TOOLS, **fields}


def message_of(completion: Body) -> Body:
    """The assistant message of a completion, as a harness sends it back."""
    message = completion["choices"][0]["message"]
    return {name: value for name, value in message.items() if value is not None}


def results(message: Body, *, backwards: bool = False) -> list[Body]:
    """What the tools gave for the calls of a message."""
    made = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"ran {call['function']['arguments']}"}
        for call in message.get("tool_calls", [])
    ]
    return made[::-1] if backwards else made


def assemble(chunks: Sequence[Any]) -> Body:
    """The assistant message that a client puts together from streamed chunks (the SDK's, or their JSON)."""
    message: Body = {"role": "assistant", "content": ""}
    calls: dict[int, Body] = {}
    for chunk in chunks:
        data = chunk if isinstance(chunk, dict) else chunk.to_dict()
        for choice in data["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            if delta.get("reasoning_content"):
                message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
            for part in delta.get("tool_calls") or []:
                empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                call = calls.setdefault(part["index"], empty)
                call["id"] += part.get("id") or ""
                function = part.get("function") or {}
                call["function"]["name"] += function.get("name") or ""
                call["function"]["arguments"] += function.get("arguments") or ""
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message


def says(message: Body) -> tuple[str, str | None, list[tuple[str, Any]]]:
    """Text, reasoning and calls of a message of the wire, so that they compare."""
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or []
    ]
    return message.get("content") or "", message.get("reasoning_content"), calls


def sampled(codec: ModelCodec, trajectory: Trajectory, index: int) -> tuple[str, str | None, list[tuple[str, Any]]]:
    """The same, read anew from the ids that the trajectory recorded for a turn."""
    turn = next(turn for turn in trajectory.turns if turn.index == index)
    ids = turn.sampled.tolist()
    ids = ids[:-1] if ids and ids[-1] in codec.stop_ids else ids
    tail = codec.tokenizer.decode(trajectory.prompt(turn.id)[-64:].tolist())
    parsed = codec.parse(codec.tokenizer.decode(ids), tail, ())
    return parsed.text, parsed.reasoning, [(call.name, call.arguments) for call in parsed.calls]


def assert_one_chain(trajectory: Trajectory, turns: int) -> None:
    """All turns are in one row, each after the other, each trained, and the prompts are what is between them."""
    assert [turn.role for turn in trajectory.turns] == [TurnRole.MAIN] * turns, trajectory.turns
    assert len(trajectory.traces) == 1
    assert trajectory.report.forks == {}
    for before, turn in zip(trajectory.turns, trajectory.turns[1:], strict=False):
        assert turn.parent == before.id
        expected = np.concatenate([trajectory.prompt(before.id), before.sampled])
        assert np.array_equal(trajectory.prompt(turn.id)[: len(expected)], expected)
    (trace,) = trajectory.traces
    assert trace.trained_tokens == sum(len(turn.sampled) for turn in trajectory.turns)
