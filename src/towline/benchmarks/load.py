"""Turns per CPU second of the gateway, under many long concurrent conversations.

The gateway runs in its own process, as with `towline gateway`: both listeners on uvicorn with uvloop, the journal in its
default mode. The client is this process. Every conversation is a session that sends its whole history on each turn over
loopback HTTP; the engine answers at once. The figures are the CPU time that the kernel charged to the gateway's process and
the memory that it kept. There are three loads:

- `exact`: the tools print lines of the same five files, as the agents of one task do, so lines repeat;
- `fresh`: the same, but no line is ever printed twice, so every tool result is encoded in full;
- `plain`, the baseline: `capture = "plain"` renders and encodes every whole request, as a plain chat server does, with the
  line cache off.

The last two run fewer conversations, since each turn takes much longer and only the rates are compared.

The measured process is `python -m towline.benchmarks.load MODEL_FOLDER DATA TURNS [forgetful]`; `forgetful` turns the line
cache off. It serves until its standard input is closed, so that it never outlives its parent.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import uvloop
from rich.console import Console
from rich.table import Table

from towline import assets
from towline.benchmarks.workload import AgentConversation, InstantEngine, SourceText, scripted_replies
from towline.common.gc_tuning import gc_tuning
from towline.config import GatewaySettings
from towline.errors import ConfigError, TowlineError
from towline.gateway.gateway import Gateway
from towline.gateway.server import RunningGateway, serve_gateway
from towline.tokens.loading import load_codec
from towline.tokens.tokenizer import Tokenizer

_HEAD_TOKENS, _REPLY_TOKENS = 470, 119
"""Approximate tokens of the first prompt, and of a reply with the template's markup around a tool result."""
_WARM_UP_TURNS = 3


@dataclass(frozen=True, slots=True)
class LoadShape:
    """Size and kind of one load."""

    conversations: int
    turns: int
    tokens: int
    """Final length of each conversation."""
    plain: bool = False
    fresh: bool = False

    @property
    def result_tokens(self) -> int:
        """Size of each tool result for which the last turn ends at `tokens`."""
        return max(1, (self.tokens - _HEAD_TOKENS - self.turns * _REPLY_TOKENS) // max(1, self.turns - 1))


def run(
    conversations: int = 64,
    turns: int = 20,
    tokens: int = 32_000,
    *,
    fresh_conversations: int = 16,
    plain_conversations: int = 8,
    target: str | Path = "qwen3",
    seconds: float = 600,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure the three loads, each for at most `seconds`. `target` is a tokenizer among the assets, or a model folder."""
    if min(conversations, turns, fresh_conversations, plain_conversations) < 1 or tokens < 1000:
        raise ConfigError("a load needs at least one conversation, one turn and 1,000 tokens")
    folder = target if isinstance(target, Path) else assets.tokenizer(target)
    source = SourceText(Tokenizer.load(folder))
    counts = {"exact": conversations, "fresh": fresh_conversations, "plain": plain_conversations}
    result: dict[str, Any] = {"turns": turns, "history_tokens": tokens}
    for load, count in counts.items():
        progress(f"{count} conversations of {turns} turns, {load}")
        shape = LoadShape(count, turns, tokens, plain=load == "plain", fresh=load == "fresh")
        try:
            result[load] = asyncio.run(asyncio.wait_for(_measure(folder, source, shape), seconds))
        except TimeoutError as error:
            raise TowlineError(f"the load {load!r} did not finish within {seconds:g} s") from error
    exact, fresh, plain = (result[load]["turns_per_cpu_second"] for load in counts)
    result["ratio"], result["fresh_ratio"] = round(exact / plain, 2), round(fresh / plain, 2)
    return result


async def _measure(folder: Path, source: SourceText, shape: LoadShape) -> dict[str, Any]:
    connections = aiohttp.TCPConnector(limit=0)
    async with _gateway(folder, shape) as gateway, aiohttp.ClientSession(connector=connections) as client:
        warm_up = replace(shape, conversations=1, turns=min(_WARM_UP_TURNS, shape.turns))
        await _converse(client, gateway, source, warm_up, 0)
        cpu, memory, began = _cpu_seconds(gateway.pid), _resident_bytes(gateway.pid), time.perf_counter()
        lengths = await asyncio.gather(
            *(_converse(client, gateway, source, shape, 1 + n) for n in range(shape.conversations))
        )
        wall = time.perf_counter() - began
        cpu, memory = _cpu_seconds(gateway.pid) - cpu, _resident_bytes(gateway.pid) - memory
    turns = shape.conversations * shape.turns
    return {
        "conversations": shape.conversations,
        "turns": turns,
        "longest_tokens": max(lengths),
        "cpu_seconds": round(cpu, 2),
        "wall_seconds": round(wall, 2),
        "turns_per_cpu_second": round(turns / max(cpu, 1e-9), 1),
        "memory_kb_per_turn": round(memory / turns / 1000, 1),
    }


async def _converse(
    client: aiohttp.ClientSession, gateway: _Gateway, source: SourceText, shape: LoadShape, seed: int
) -> int:
    """Run one conversation to its end; returns the tokens of its last turn."""
    control = {"authorization": f"Bearer {gateway.control_key}"}
    body = {"settings": {"capture": "plain" if shape.plain else "exact"}}
    async with client.post(f"{gateway.control_url}/v1/sessions", json=body, headers=control) as created:
        session = orjson.loads(await _body(created))
    url = session["base_urls"]["openai"] + "/chat/completions"
    headers = {"authorization": f"Bearer {session['key']}", "content-type": "application/json"}
    conversation = AgentConversation(source, seed)
    for turn in range(shape.turns):
        async with client.post(url, data=conversation.body(), headers=headers) as answered:
            response = await _body(answered)
        if turn < shape.turns - 1:
            conversation.run_call(response, shape.result_tokens, fresh=shape.fresh)
    return int(orjson.loads(response)["usage"]["total_tokens"])


async def _body(response: aiohttp.ClientResponse) -> bytes:
    body = await response.read()
    if response.status >= 300:
        raise TowlineError(f"the gateway answered {response.status}: {body[:500].decode(errors='replace')}")
    return body


# The gateway's process


@dataclass(frozen=True, slots=True)
class _Gateway:
    pid: int
    control_url: str
    control_key: str


@asynccontextmanager
async def _gateway(folder: Path, shape: LoadShape) -> AsyncIterator[_Gateway]:
    """A gateway in its own process, which exits when its standard input is closed."""
    with tempfile.TemporaryDirectory(prefix="towline-bench-") as data:
        arguments = [str(folder), data, str(shape.turns), *(["forgetful"] if shape.plain else [])]
        command = (sys.executable, "-m", "towline.benchmarks.load", *arguments)
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = await process.stdout.readline()
            if not line:
                raise TowlineError(f"the measured gateway did not start (exit status {await process.wait()})")
            yield _Gateway(process.pid, **orjson.loads(line))
            process.stdin.close()
            await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process and all its threads, as the kernel counts them."""
    fields = _proc(pid, "stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_bytes(pid: int) -> int:
    return int(_proc(pid, "statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _proc(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError as error:
        raise TowlineError(f"the load benchmark needs /proc: {error}") from error


def render(result: Mapping[str, Any], console: Console) -> None:
    """Print a result as a table."""
    console.print(f"Conversations of {result['turns']} turns growing to {result['history_tokens']:,} tokens")
    table = Table()
    for column in ("load", "conversations", "turns", "CPU s", "turns per CPU s", "memory kept per turn"):
        table.add_column(column, justify="left" if column == "load" else "right")
    for load in ("exact", "fresh", "plain"):
        row = result[load]
        table.add_row(
            load,
            f"{row['conversations']}",
            f"{row['turns']:,}",
            f"{row['cpu_seconds']:.2f}",
            f"{row['turns_per_cpu_second']:,.0f}",
            f"{row['memory_kb_per_turn']:,.0f} kB",
        )
    console.print(table)
    console.print(
        f"exact serves {result['ratio']:.1f}x the turns per CPU second of a full re-render, "
        f"{result['fresh_ratio']:.1f}x if no line of a tool result repeats"
    )


async def _serve(folder: Path, data: Path, turns: int, *, forgetful: bool) -> None:
    codec = load_codec(folder)
    if forgetful:
        codec.tokenizer.limit_cache(0)
    engine = InstantEngine(scripted_replies(codec, turns), codec.tokenizer.size)
    gateway = Gateway(engine, codec, GatewaySettings(port=0, control_port=0, data=data), model="bench")
    async with serve_gateway(gateway, secrets.token_urlsafe(16)) as running:
        with gc_tuning():
            await _until_closed(running)


async def _until_closed(running: RunningGateway) -> None:
    """Print the gateway's address and wait for the end of standard input."""
    _trim_memory()
    where = {"control_url": running.control_url, "control_key": running.control_key}
    print(orjson.dumps(where).decode(), flush=True)
    closed = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(closed), sys.stdin)
    await closed.read()


def _trim_memory() -> None:
    """Return freed pages to the kernel, so that memory kept by turns shows as growth of the process."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def main() -> None:
    folder, data, turns, *rest = sys.argv[1:]
    uvloop.run(_serve(Path(folder), Path(data), int(turns), forgetful="forgetful" in rest))


if __name__ == "__main__":
    main()
