"""CPU cost of one continued turn in the gateway, by length of history.

A conversation runs through a real gateway, in this process and without sockets, until its history has the wanted length.
Then one more turn, the same at every length, is measured: CPU time of the whole process including the journal's thread,
with garbage collection disabled. Parsing the request's JSON and serialising the ids for the engine grow with the history
whatever a gateway does; they are reported separately. The baseline of the same run renders and encodes the whole history.

Besides times, which depend on the machine, operations are counted: messages read and hashed, and characters rendered and
encoded in that turn. None of these may grow with the history. The first turns of a conversation render slightly more, since
their suffixes are verified against the whole history, which is short then.
"""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from towline import assets
from towline.benchmarks.profiling import OperationCounter, Stopwatch, Wrapper, patched
from towline.benchmarks.workload import (
    MIN_RESULT_TOKENS,
    AgentConversation,
    InstantEngine,
    SourceText,
    scripted_replies,
)
from towline.config import GatewaySettings
from towline.dialects import chat
from towline.dialects.base import DialectCall, ReadCache
from towline.dialects.chat import ChatDialect
from towline.errors import ConfigError, TowlineError
from towline.gateway import app, records, sampling
from towline.gateway.app import ProviderApp
from towline.gateway.gateway import Gateway, OpenedSession
from towline.gateway.journal import Journal
from towline.gateway.session import GatewaySession
from towline.tokens.codec import ModelCodec, RenderContext
from towline.tokens.continuation.planner import Planner
from towline.tokens.graph import fingerprint
from towline.tokens.graph.graph import Graph, GraphNode
from towline.tokens.loading import load_codec
from towline.tokens.templates.chat_template import ChatTemplate
from towline.tokens.tokenizer import Tokenizer

HISTORY_TOKENS = (1000, 8000, 32_000, 128_000)
EXCLUDED_PARTS = ("json_parse", "send_ids")
"""Parts excluded from `ms_per_turn`: they grow with the body and the prompt in any gateway."""
PARTS = ("json_parse", "read", "plan", "open", "sample", "send_ids", "parse_reply", "journal", "write", "serve")
OPERATIONS = ("messages_read", "messages_hashed", "characters_rendered", "characters_encoded")
MAX_RATIO = 2.0
"""Largest cost of the longest history relative to the shortest."""
MAX_GROWTH_SHARE = 0.02
"""Largest growth per thousand tokens, as a share of the full re-render's."""
_RESULT_TOKENS = 600
"""Size of the measured turn's tool result."""
_OVERHEAD_TOKENS = 12
"""Approximate number of tokens that a template writes around a tool result."""
_FULL_RENDERS = 3
_MS = 1e-6


@dataclass(slots=True)
class MeasuredTurn:
    """One continued turn."""

    history: int
    """Tokens of the prompt and reply that it continues."""
    parts: dict[str, float]
    """Milliseconds of CPU time per part."""
    total: float
    """Milliseconds of CPU time without `EXCLUDED_PARTS`."""


class GatewayRig:
    """A gateway without sockets: requests go through the provider listener's ASGI app, in this process."""

    def __init__(self, codec: ModelCodec, data: Path, turns: int):
        """`turns` is the most turns a conversation may have. The line cache is off, since the measured turn's text must
        not have been encoded before."""
        codec.tokenizer.limit_cache(0)
        self.codec = codec
        self.dialect = ChatDialect()
        self.engine = InstantEngine(scripted_replies(codec, turns), codec.tokenizer.size)
        self.gateway = Gateway(self.engine, codec, GatewaySettings(data=data, journal="os"))
        self.app = ProviderApp(self.gateway, [self.dialect])
        self.source = SourceText(codec.tokenizer)
        self._result = self.source.cut(_RESULT_TOKENS, random.Random(0))

    async def post(self, key: str, body: bytes) -> bytes:
        """Send a request and return the gateway's answer."""
        headers = [(b"authorization", b"Bearer " + key.encode()), (b"content-length", b"%d" % len(body))]
        path = self.dialect.routes[0].path
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        events = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[Any] = []

        async def receive() -> Any:
            if not events:
                await asyncio.get_running_loop().create_future()  # the client stays connected and sends nothing more
            return events.pop()

        async def send(event: Any) -> None:
            sent.append(event)

        await self.app(scope, receive, send)
        answer = b"".join(event.get("body", b"") for event in sent)
        if not sent or sent[0]["status"] != 200:
            raise TowlineError(f"the gateway rejected a turn of the benchmark: {answer[:500].decode(errors='replace')}")
        return answer

    async def grown(self, tokens: int, seed: int) -> tuple[OpenedSession, AgentConversation]:
        """A session with a history of about `tokens` tokens whose next request carries one more tool result."""
        opened = await self.gateway.create({})
        conversation = AgentConversation(self.source, seed)
        while True:
            response = await self.post(opened.key, conversation.body())
            last = opened.session.graph.nodes[-1]
            left = tokens - last.end - len(last.sampled) - _OVERHEAD_TOKENS
            if left < MIN_RESULT_TOKENS // 3:
                break
            size = conversation.result_tokens()
            conversation.run_call(response, left if left - size < MIN_RESULT_TOKENS else size)
        conversation.append(response, [self._result])
        return opened, conversation

    async def measure(self, tokens: int, seed: int) -> tuple[MeasuredTurn, bytes]:
        """Measure one turn after a history of about `tokens` tokens; returns its request too."""
        opened, conversation = await self.grown(tokens, seed)
        before, body = opened.session.graph.nodes[-1], conversation.body()
        watch, sent = Stopwatch(), self.engine.sent_ns
        with patched(_timed(watch)):
            gc.collect()
            gc.disable()
            try:
                process, thread = time.process_time_ns(), time.thread_time_ns()
                with watch.part("serve"):
                    await self.post(opened.key, body)
                thread, process = time.thread_time_ns() - thread, time.process_time_ns() - process
            finally:
                gc.enable()
        _check_continued(opened.session.graph, before)
        spent = watch.spent
        spent["send_ids"] = self.engine.sent_ns - sent
        spent["sample"] -= spent["send_ids"]
        spent["journal"] += process - thread  # the only other active thread is the journal's writer
        total = process - sum(spent[name] for name in EXCLUDED_PARTS)
        return MeasuredTurn(before.end, {name: spent[name] * _MS for name in PARTS}, total * _MS), body

    async def count(self, tokens: int, seed: int) -> dict[str, int]:
        """The operation counts of such a turn."""
        opened, conversation = await self.grown(tokens, seed)
        before, tally = opened.session.graph.nodes[-1], OperationCounter(OPERATIONS)
        with patched(_counted(tally)):
            await self.post(opened.key, conversation.body())
        _check_continued(opened.session.graph, before)
        return tally.counts

    def full_render(self, body: bytes) -> float:
        """Milliseconds of CPU time to render and encode a whole request."""
        request, _ = self.dialect.read(DialectCall("generate", orjson.loads(body)), ReadCache())
        frame = RenderContext(request.tools)
        began = time.thread_time_ns()
        self.codec.prompt(request.messages, frame)
        return (time.thread_time_ns() - began) * _MS


def _timed(watch: Stopwatch) -> list[tuple[Any, str, Wrapper]]:
    """The functions that make up each part."""
    return [
        (app, "_json", watch.timing("json_parse")),
        (GatewaySession, "read", watch.timing("read")),
        (GatewaySession, "start", watch.timing("open")),
        (Planner, "plan", watch.timing("plan")),
        (sampling, "sample_turn", watch.timing("sample")),
        (sampling, "read_reply", watch.timing("parse_reply")),
        (records, "turn_record", watch.timing("journal")),
        (records, "delivered_record", watch.timing("journal")),
        (Journal, "append", watch.timing("journal")),
        (GatewaySession, "answer", watch.timing("write")),
        (ChatDialect, "write", watch.timing("write")),
    ]


def _counted(tally: OperationCounter) -> list[tuple[Any, str, Wrapper]]:
    def characters(_: Any, tokenizer: Tokenizer, text: str, *__: Any) -> int:
        return len(text)

    encoders = [name for name in ("encode", "__call__") if name in vars(Tokenizer)]
    return [
        (chat, "read_message", tally.counting("messages_read", lambda *_: 1)),
        (fingerprint, "normalized_text", tally.counting("messages_hashed", lambda *_: 1)),
        (ChatTemplate, "render", tally.counting("characters_rendered", lambda text, *_: len(text))),
        *((Tokenizer, name, tally.counting("characters_encoded", characters)) for name in encoders),
    ]


def _check_continued(graph: Graph, before: GraphNode) -> None:
    node = graph.nodes[-1]
    if node.parent is not before or node.reason is not None:
        raise TowlineError(f"the measured turn did not continue its conversation (fork reason: {node.reason})")


def run(
    history_tokens: Sequence[int] = HISTORY_TOKENS,
    repeats: int = 11,
    target: str | Path = "qwen3",
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Run the benchmark. `target` is the name of a tokenizer among the assets, or a model folder."""
    if len(history_tokens) < 2 or list(history_tokens) != sorted(set(history_tokens)) or repeats < 1:
        raise ConfigError("the benchmark needs at least two increasing history lengths and one repeat")
    folder = target if isinstance(target, Path) else assets.tokenizer(target)
    with tempfile.TemporaryDirectory(prefix="towline-bench-") as scratch:
        return asyncio.run(_run(load_codec(folder), tuple(history_tokens), repeats, Path(scratch), progress))


async def _run(
    codec: ModelCodec, lengths: tuple[int, ...], repeats: int, scratch: Path, progress: Callable[[str], None]
) -> dict[str, Any]:
    most_turns = lengths[-1] // MIN_RESULT_TOKENS + 8
    rig = GatewayRig(codec, scratch, most_turns)
    await rig.gateway.open()
    measured: dict[int, list[MeasuredTurn]] = {length: [] for length in lengths}
    full: dict[int, list[float]] = {length: [] for length in lengths}
    try:
        progress("counting operations")
        work = [await rig.count(length, seed=0) for length in lengths]
        for repeat in range(1, repeats + 1):
            progress(f"measuring turns, {repeat} of {repeats}")
            for length in lengths:
                result, body = await rig.measure(length, repeat)
                measured[length].append(result)
                if repeat <= _FULL_RENDERS:
                    full[length].append(rig.full_render(body))
    finally:
        await rig.gateway.close()
    return _result(codec, lengths, repeats, measured, full, work)


def _result(
    codec: ModelCodec,
    lengths: tuple[int, ...],
    repeats: int,
    measured: Mapping[int, Sequence[MeasuredTurn]],
    full: Mapping[int, Sequence[float]],
    work: Sequence[Mapping[str, int]],
) -> dict[str, Any]:
    rows = [measured[length] for length in lengths]
    actual = [round(statistics.median(m.history for m in row)) for row in rows]
    ms = [statistics.median(m.total for m in row) for row in rows]
    full_ms = [statistics.median(full[length]) for length in lengths]
    thousands = (actual[-1] - actual[0]) / 1000
    growth, full_growth = (ms[-1] - ms[0]) / thousands, (full_ms[-1] - full_ms[0]) / thousands
    ratio, share = ms[-1] / ms[0], growth / full_growth
    return {
        "history_tokens": list(lengths),
        "ms_per_turn": [round(value, 4) for value in ms],
        "full_render_ms": [round(value, 3) for value in full_ms],
        "parts": {name: [round(statistics.median(m.parts[name] for m in row), 4) for row in rows] for name in PARTS},
        "apart": list(EXCLUDED_PARTS),
        "work": {name: [counts[name] for counts in work] for name in OPERATIONS},
        "measured_tokens": actual,
        "ratio": round(ratio, 3),
        "growth_share": round(share, 5),
        "within": {"ratio": ratio <= MAX_RATIO, "growth_share": share < MAX_GROWTH_SHARE},
        "codec": codec.name,
        "repeats": repeats,
    }


def render(result: Mapping[str, Any], console: Console) -> None:
    """Print a result as tables."""
    parts, work = result["parts"], result["work"]
    console.print(f"CPU time of one continued turn in ms ({result['codec']}, median of {result['repeats']})")
    table = Table()
    table.add_column("history (tokens)")
    for length in result["history_tokens"]:
        table.add_column(f"{length:,}", justify="right")
    for name in PARTS:
        if name not in result["apart"]:
            table.add_row(f"  {name}", *(f"{value:.3f}" for value in parts[name]))
    table.add_row("total", *(f"{value:.3f}" for value in result["ms_per_turn"]), style="bold", end_section=True)
    for name in result["apart"]:
        table.add_row(f"excluded: {name}", *(f"{value:.3f}" for value in parts[name]))
    table.add_row("full re-render", *(f"{value:.1f}" for value in result["full_render_ms"]), end_section=True)
    for name in OPERATIONS:
        table.add_row(name.replace("_", " "), *(f"{value:,}" for value in work[name]))
    console.print(table)
    within = result["within"]
    lengths = result["history_tokens"]
    _verdict(
        console,
        within["ratio"],
        f"{lengths[-1]:,} tokens cost {result['ratio']:.2f}x as much as {lengths[0]:,} (limit {MAX_RATIO:g}x)",
    )
    _verdict(
        console,
        within["growth_share"],
        f"growth per 1,000 tokens is {result['growth_share']:.2%} of the full re-render's (limit {MAX_GROWTH_SHARE:.0%})",
    )


def _verdict(console: Console, passed: bool, text: str) -> None:
    console.print(f"[green]pass[/green] {text}" if passed else f"[red]FAIL[/red] {text}")
