"""What one continued turn costs the gateway, by the length of its history.

A conversation is run through a real gateway, in this process and without sockets, until its history has the wanted
length; then one more turn, the same at every length, is measured: CPU time of the whole process, the journal's thread
included, with the garbage collector held. Parsing the request's JSON and writing the ids for the engine grow with the
history whatever a gateway does; they are measured and reported apart. The baseline of the same run renders and encodes
the whole history.

Beside the times, which depend on the machine, the work itself is counted: how many messages were read and hashed and how
many characters were rendered and encoded in that turn. None of these may grow with the history. The first turns of a
conversation render a little more: their suffixes are compared with the whole history, which is short then.
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
from towline.benchmarks.agent import LEAST_RESULT, Conversation, Printout, replies
from towline.benchmarks.instant import InstantEngine
from towline.benchmarks.spans import Stopwatch, Tally, Wrap, wrapped
from towline.config import GatewaySettings
from towline.dialects import chat
from towline.dialects.base import Call, Known
from towline.dialects.chat import ChatDialect
from towline.errors import ConfigError, TowlineError
from towline.gateway import app, records, turns
from towline.gateway.app import ProviderApp
from towline.gateway.gateway import Gateway, Opened
from towline.gateway.journal import Journal
from towline.gateway.session import Session
from towline.tokens import fingerprint
from towline.tokens.codec import Codec, Frame
from towline.tokens.continuation import Planner
from towline.tokens.graph import Graph, Node
from towline.tokens.jinja import ChatTemplate
from towline.tokens.loading import load_codec
from towline.tokens.tokenizer import Tokenizer

HISTORY_TOKENS = (1000, 8000, 32_000, 128_000)
APART = ("json_parse", "send_ids")
"""Parts that are not in `ms_per_turn`: they grow with the body and the prompt, whoever handles them."""
PARTS = ("json_parse", "read", "plan", "open", "sample", "send_ids", "parse_reply", "journal", "write", "serve")
WORK = ("messages_read", "messages_hashed", "characters_rendered", "characters_encoded")
MOST_RATIO = 2.0
"""How much dearer the longest history may be than the shortest."""
MOST_GROWTH = 0.02
"""Growth a thousand tokens as a share of the full re-render's."""
_RESULT = 600
"""Tokens of the tool result that the measured turn brings."""
_OVERHEAD = 12
"""Tokens that a template writes around a tool result, about."""
_FULL_RENDERS = 3
_MS = 1e-6


@dataclass(slots=True)
class Measured:
    """One continued turn."""

    history: int
    """Tokens of the prompt and reply that it continues."""
    parts: dict[str, float]
    """Milliseconds of CPU by part."""
    total: float
    """Milliseconds of CPU without the parts of `APART`."""


class Rig:
    """A gateway without its sockets: requests go through the provider listener's application, in this process."""

    def __init__(self, codec: Codec, data: Path, turns: int):
        """`turns` is how many turns the longest conversation may have. No encoded line is remembered: the measured turn
        brings text that was never seen."""
        codec.tokenizer.remember(0)
        self.codec = codec
        self.dialect = ChatDialect()
        self.engine = InstantEngine(replies(codec, turns), codec.tokenizer.size)
        self.gateway = Gateway(self.engine, codec, GatewaySettings(data=data, journal="os"))
        self.app = ProviderApp(self.gateway, [self.dialect])
        self.printout = Printout(codec.tokenizer)
        self._result = self.printout.cut(_RESULT, random.Random(0))

    async def post(self, key: str, body: bytes) -> bytes:
        """The gateway's answer to a request."""
        headers = [(b"authorization", b"Bearer " + key.encode()), (b"content-length", b"%d" % len(body))]
        path = self.dialect.routes[0].path
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        events = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[Any] = []

        async def receive() -> Any:
            if not events:
                await asyncio.get_running_loop().create_future()  # the client stays, and says no more
            return events.pop()

        async def send(event: Any) -> None:
            sent.append(event)

        await self.app(scope, receive, send)
        answer = b"".join(event.get("body", b"") for event in sent)
        if not sent or sent[0]["status"] != 200:
            raise TowlineError(f"the gateway refused a turn of the benchmark: {answer[:500].decode(errors='replace')}")
        return answer

    async def grown(self, tokens: int, seed: int) -> tuple[Opened, Conversation]:
        """A session whose conversation has a history of about `tokens` tokens and is to bring one tool result more."""
        opened = await self.gateway.create({})
        conversation = Conversation(self.printout, seed)
        while True:
            response = await self.post(opened.key, conversation.body())
            last = opened.session.graph.nodes[-1]
            left = tokens - last.end - len(last.sampled) - _OVERHEAD
            if left < LEAST_RESULT // 3:
                break
            size = conversation.size()
            conversation.hear(response, left if left - size < LEAST_RESULT else size)
        conversation.take(response, [self._result])
        return opened, conversation

    async def measure(self, tokens: int, seed: int) -> tuple[Measured, bytes]:
        """The CPU of one turn behind a history of about `tokens` tokens; and that turn's request."""
        opened, conversation = await self.grown(tokens, seed)
        before, body = opened.session.graph.nodes[-1], conversation.body()
        watch, sent = Stopwatch(), self.engine.sent_ns
        with wrapped(_timed(watch)):
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
        spent["journal"] += process - thread  # what other threads did is the journal's writing
        total = process - sum(spent[name] for name in APART)
        return Measured(before.end, {name: spent[name] * _MS for name in PARTS}, total * _MS), body

    async def count(self, tokens: int, seed: int) -> dict[str, int]:
        """The operations of such a turn."""
        opened, conversation = await self.grown(tokens, seed)
        before, tally = opened.session.graph.nodes[-1], Tally(WORK)
        with wrapped(_counted(tally)):
            await self.post(opened.key, conversation.body())
        _check_continued(opened.session.graph, before)
        return tally.counts

    def full_render(self, body: bytes) -> float:
        """Milliseconds of CPU to render and encode a request from its beginning."""
        request, _ = self.dialect.read(Call("generate", orjson.loads(body)), Known())
        frame = Frame(request.tools)
        began = time.thread_time_ns()
        self.codec.prompt(request.messages, frame)
        return (time.thread_time_ns() - began) * _MS


def _timed(watch: Stopwatch) -> list[tuple[Any, str, Wrap]]:
    """Which functions make up the parts."""
    return [
        (app, "_json", watch.timing("json_parse")),
        (Session, "read", watch.timing("read")),
        (Session, "start", watch.timing("open")),
        (Planner, "plan", watch.timing("plan")),
        (turns, "sample", watch.timing("sample")),
        (turns, "read_reply", watch.timing("parse_reply")),
        (records, "turn_record", watch.timing("journal")),
        (records, "delivered_record", watch.timing("journal")),
        (Journal, "append", watch.timing("journal")),
        (Session, "answer", watch.timing("write")),
        (ChatDialect, "write", watch.timing("write")),
    ]


def _counted(tally: Tally) -> list[tuple[Any, str, Wrap]]:
    def characters(_: Any, tokenizer: Tokenizer, text: str, *__: Any) -> int:
        return len(text)

    encoders = [name for name in ("encode", "__call__") if name in vars(Tokenizer)]
    return [
        (chat, "read_message", tally.counting("messages_read", lambda *_: 1)),
        (fingerprint, "normal_text", tally.counting("messages_hashed", lambda *_: 1)),
        (ChatTemplate, "render", tally.counting("characters_rendered", lambda text, *_: len(text))),
        *((Tokenizer, name, tally.counting("characters_encoded", characters)) for name in encoders),
    ]


def _check_continued(graph: Graph, before: Node) -> None:
    node = graph.nodes[-1]
    if node.parent is not before or node.reason is not None:
        raise TowlineError(f"the measured turn did not continue its conversation (fork reason: {node.reason})")


def run(
    history_tokens: Sequence[int] = HISTORY_TOKENS,
    repeats: int = 11,
    target: str | Path = "qwen3",
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure. `target` is the name of a tokenizer among the assets, or a model folder."""
    if len(history_tokens) < 2 or list(history_tokens) != sorted(set(history_tokens)) or repeats < 1:
        raise ConfigError("the benchmark needs at least two rising history lengths and one repeat")
    folder = target if isinstance(target, Path) else assets.tokenizer(target)
    with tempfile.TemporaryDirectory(prefix="towline-bench-") as scratch:
        return asyncio.run(_run(load_codec(folder), tuple(history_tokens), repeats, Path(scratch), progress))


async def _run(
    codec: Codec, lengths: tuple[int, ...], repeats: int, scratch: Path, progress: Callable[[str], None]
) -> dict[str, Any]:
    most_turns = lengths[-1] // LEAST_RESULT + 8
    rig = Rig(codec, scratch, most_turns)
    await rig.gateway.open()
    measured: dict[int, list[Measured]] = {length: [] for length in lengths}
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
    codec: Codec,
    lengths: tuple[int, ...],
    repeats: int,
    measured: Mapping[int, Sequence[Measured]],
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
        "apart": list(APART),
        "work": {name: [counts[name] for counts in work] for name in WORK},
        "measured_tokens": actual,
        "ratio": round(ratio, 3),
        "growth_share": round(share, 5),
        "within": {"ratio": ratio <= MOST_RATIO, "growth_share": share < MOST_GROWTH},
        "codec": codec.name,
        "repeats": repeats,
    }


def render(result: Mapping[str, Any], console: Console) -> None:
    """Show a result to a person."""
    parts, work = result["parts"], result["work"]
    console.print(f"CPU of one continued turn in ms ({result['codec']}, median of {result['repeats']})")
    table = Table()
    table.add_column("history, tokens")
    for length in result["history_tokens"]:
        table.add_column(f"{length:,}", justify="right")
    for name in PARTS:
        if name not in result["apart"]:
            table.add_row(f"  {name}", *(f"{value:.3f}" for value in parts[name]))
    table.add_row("the turn", *(f"{value:.3f}" for value in result["ms_per_turn"]), style="bold", end_section=True)
    for name in result["apart"]:
        table.add_row(f"apart: {name}", *(f"{value:.3f}" for value in parts[name]))
    table.add_row("full re-render", *(f"{value:.1f}" for value in result["full_render_ms"]), end_section=True)
    for name in WORK:
        table.add_row(name.replace("_", " "), *(f"{value:,}" for value in work[name]))
    console.print(table)
    within = result["within"]
    lengths = result["history_tokens"]
    _verdict(
        console,
        within["ratio"],
        f"{lengths[-1]:,} tokens cost {result['ratio']:.2f} times {lengths[0]:,} (at most {MOST_RATIO:g})",
    )
    _verdict(
        console,
        within["growth_share"],
        f"growth a thousand tokens is {result['growth_share']:.2%} of the full re-render's (under {MOST_GROWTH:.0%})",
    )


def _verdict(console: Console, good: bool, text: str) -> None:
    console.print(f"[green]within[/green]  {text}" if good else f"[red]outside[/red] {text}")
