"""What one continued turn costs the gateway, by the length of its history.

A conversation is run through a real session until its history has the wanted length; then one more turn, the same at
every length, is measured: CPU time of the whole process, the journal's thread included, with the garbage collector held.
Parsing the request's JSON and writing the ids for the engine grow with the history whatever a gateway does; they are
measured and reported apart. The baseline of the same run renders and encodes the whole history.

Beside the times, which depend on the machine, the work itself is counted: how many messages were read and hashed and how
many characters were rendered and encoded in that turn. None of these may grow with the history.
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
from towline.config import SessionSettings
from towline.dialects import chat
from towline.dialects.base import Call
from towline.errors import ConfigError, TowlineError
from towline.gateway import records, turns
from towline.gateway.journal import Journal, SyncMode
from towline.gateway.session import Session
from towline.tokens import fingerprint
from towline.tokens.codec import Codec
from towline.tokens.continuation import Planner
from towline.tokens.graph import Node
from towline.tokens.jinja import ChatTemplate
from towline.tokens.loading import load_codec
from towline.tokens.tokenizer import Tokenizer

HISTORY_TOKENS = (1000, 8000, 32_000, 128_000)
APART = ("json_parse", "send_ids")
"""Parts that are not in `ms_per_turn`: they grow with the body and the prompt, whoever handles them."""
PARTS = ("json_parse", "read", "plan", "open", "sample", "send_ids", "parse_reply", "journal", "write")
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
    """A gateway without its listeners: requests go through sessions as the provider listener sends them."""

    def __init__(self, codec: Codec, journal: Journal, turns: int):
        """`turns` is how many turns the longest conversation may have."""
        self.codec = codec
        self.journal = journal
        self.dialect = chat.ChatDialect()
        self.engine = InstantEngine(replies(codec, turns), codec.tokenizer.size)
        self.printout = Printout(codec.tokenizer)
        self._result = self.printout.cut(_RESULT, random.Random(0))

    async def turn(self, session: Session, body: bytes, watch: Stopwatch) -> bytes:
        """Answer one request, in the order of the provider listener; the response's body."""
        with watch.part("json_parse"):
            call = Call("generate", orjson.loads(body))
        with watch.part("read"):
            request, thread = session.read(self.dialect, call)
        with watch.part("open"):
            started = session.start(request, thread)
        with watch.part("sample"):
            error = await session.failed(started)
        if error is not None:
            raise error
        with watch.part("write"):
            response = self.dialect.write(request, session.answer(started, "bench")).body
            await session.delivered(started)
        with watch.part("json_parse"):
            del call  # the parsed history goes with it: the other half of what parsing costs
        return response

    async def grown(self, tokens: int, seed: int) -> tuple[Session, Conversation]:
        """A session whose conversation has a history of about `tokens` tokens and is to bring one tool result more."""
        session = Session(f"bench{seed}x{tokens}", "", SessionSettings(), self.codec, self.engine, self.journal)
        conversation = Conversation(self.printout, seed)
        unwatched = Stopwatch()
        while True:
            response = await self.turn(session, conversation.body(), unwatched)
            last = session.graph.nodes[-1]
            left = tokens - last.end - len(last.sampled) - _OVERHEAD
            if left < LEAST_RESULT // 3:
                break
            size = conversation.size()
            conversation.hear(response, left if left - size < LEAST_RESULT else size)
        conversation.take(response, [self._result])
        return session, conversation

    async def measure(self, tokens: int, seed: int) -> tuple[Measured, Session]:
        """The CPU of one turn behind a history of about `tokens` tokens."""
        session, conversation = await self.grown(tokens, seed)
        before, body = session.graph.nodes[-1], conversation.body()
        watch, sent = Stopwatch(), self.engine.sent_ns
        with wrapped(_timed(watch)):
            gc.collect()
            gc.disable()
            try:
                process, thread = time.process_time_ns(), time.thread_time_ns()
                await self.turn(session, body, watch)
                thread, process = time.thread_time_ns() - thread, time.process_time_ns() - process
            finally:
                gc.enable()
        _check_continued(session, before)
        spent = watch.spent
        spent["send_ids"] = self.engine.sent_ns - sent
        spent["sample"] -= spent["send_ids"]
        spent["journal"] += process - thread  # what other threads did is the journal's writing
        total = process - sum(spent[name] for name in APART)
        return Measured(before.end, {name: spent[name] * _MS for name in PARTS}, total * _MS), session

    async def count(self, tokens: int, seed: int) -> dict[str, int]:
        """The operations of such a turn."""
        session, conversation = await self.grown(tokens, seed)
        before, tally = session.graph.nodes[-1], Tally(WORK)
        with wrapped(_counted(tally)):
            await self.turn(session, conversation.body(), Stopwatch())
        _check_continued(session, before)
        return tally.counts

    def full_render(self, session: Session) -> float:
        """Milliseconds of CPU to render and encode the last request from its beginning."""
        thread = session.threads[-1]
        frame = session.frames[session.graph.nodes[-1].key]
        began = time.thread_time_ns()
        self.codec.prompt(thread.messages, frame)
        return (time.thread_time_ns() - began) * _MS


def _timed(watch: Stopwatch) -> list[tuple[Any, str, Wrap]]:
    """Which functions make up the parts that lie inside others."""
    return [
        (Planner, "plan", watch.timing("plan")),
        (turns, "read_reply", watch.timing("parse_reply")),
        (records, "turn_record", watch.timing("journal")),
        (records, "delivered_record", watch.timing("journal")),
        (Journal, "append", watch.timing("journal")),
    ]


def _counted(tally: Tally) -> list[tuple[Any, str, Wrap]]:
    return [
        (chat, "read_message", tally.counting("messages_read", lambda *_: 1)),
        (fingerprint, "normal_text", tally.counting("messages_hashed", lambda *_: 1)),
        (ChatTemplate, "render", tally.counting("characters_rendered", lambda text, *_: len(text))),
        (Tokenizer, "encode", tally.counting("characters_encoded", lambda _, tokenizer, text, *__: len(text))),
        (Tokenizer, "__call__", tally.counting("characters_encoded", lambda _, tokenizer, text, *__: len(text))),
    ]


def _check_continued(session: Session, before: Node) -> None:
    node = session.graph.nodes[-1]
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
    rig = Rig(codec, Journal.open(scratch / "journal", mode=SyncMode.OS), most_turns)
    measured: dict[int, list[Measured]] = {length: [] for length in lengths}
    full: dict[int, list[float]] = {length: [] for length in lengths}
    try:
        progress("counting operations")
        work = [await rig.count(length, seed=0) for length in lengths]
        for repeat in range(1, repeats + 1):
            progress(f"measuring turns, {repeat} of {repeats}")
            for length in lengths:
                result, session = await rig.measure(length, repeat)
                measured[length].append(result)
                if repeat <= _FULL_RENDERS:
                    full[length].append(rig.full_render(session))
    finally:
        await rig.journal.close()
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
    title = f"CPU of one continued turn in ms ({result['codec']}, median of {result['repeats']})"
    table = Table(title=title, title_justify="left")
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
