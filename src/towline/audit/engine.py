"""The engine of an audited gateway: a script chooses the ids, and a tiny random model scores them.

Script: a tiny random model never makes a tool call by itself, so replies are scripted, written in the family's documented
format. A real model samples any ids that spell its text, not only those that the tokenizer would choose; so does the
script. Invariant: splitting changes ids only; the text that they decode to stays the same.

Models: one per vocabulary, with two sets of weights that alternate: version 0 is the first set, and every weight update
switches to the other. They are kept with the rows, with `versions.json`, so that anyone can recompute the logprobs.
Invariant: the same seed and vocabulary give the same weights.

Log: a request finds its scripted reply by its seed, or by top-k if the dialect has no seed. The engine logs the prompt and
the sampled ids of every call as they are. Rows are compared with this log, which knows nothing about graphs, continuations
or builders.
"""

from __future__ import annotations

import asyncio
import json
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Protocol

import numpy as np

from towline.audit.families import FormatCall, ReplyFormat
from towline.audit.oracle import Oracle
from towline.conversation import Finish
from towline.engines.base import Engine, EngineInfo, Floats, Ids, PauseMode, Sample, SampleRequest
from towline.engines.embedded import DecoderConfig, create_decoder, save_decoder
from towline.engines.version_stamp import stamp_versions
from towline.errors import EngineError

_REASONING_OPENED = re.compile(r"<think>\s*$")
_REASONING_CLOSED = re.compile(r"<think>\s*</think>\s*$")
_MISTRAL_ID_LENGTH = 9


@dataclass(slots=True, eq=False)
class ScriptedReply:
    """One reply: its content and how it is sampled."""

    text: str = ""
    reasoning: str | None = None
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    split: float = 0.0
    """Share of tokens that are split in two."""
    free: bool = False
    """Sampled by the model itself; the content above is ignored."""
    garble: bool = False
    """The end of the reply is cut off, so that its last call cannot be parsed."""
    other_end: bool = False
    """Ends with another end-of-turn id than the template's own."""
    as_shown: bool = False
    """Spelled as the template shows it in history, where the family has several spellings."""
    seed: int = 0
    calls_before: int = 0
    """Number of calls in the history: some families number them."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the engine gets the request."""
    hold: asyncio.Event | None = None
    """The reply does not start before this is set."""

    def written_calls(self, format: ReplyFormat) -> list[FormatCall]:
        """The calls with the ids that a model of this family writes itself."""
        random = Random(self.seed)
        written = []
        for index, (name, arguments) in enumerate(self.calls):
            id = ""
            if format.ids == "kimi":
                id = f"functions.{name}:{self.calls_before + index}"
            elif format.ids == "mistral":
                id = "".join(random.choices(string.ascii_letters + string.digits, k=_MISTRAL_ID_LENGTH))
            written.append(FormatCall(name, arguments, id))
        # Mistral documents calls both with and without an id.
        if format.ids == "mistral" and not self.as_shown and self.seed % 2:
            return [FormatCall(call.name, call.arguments) for call in written]
        return written


def write_reply(
    oracle: Oracle, format: ReplyFormat, stop_ids: frozenset[int], line: ScriptedReply, tail: Sequence[int]
) -> list[int]:
    """The ids of a scripted reply to a prompt that ends with `tail`."""
    prompt = oracle.decode(tail)
    if _REASONING_CLOSED.search(prompt):
        # The prompt has closed the reasoning already.
        line.reasoning = None
    calls = line.written_calls(format)
    opened = _REASONING_OPENED.search(prompt) is not None
    text = format.text(line.reasoning, line.text, calls, opened=opened, as_shown=line.as_shown)
    end = oracle.id_of(format.ending(calls))
    if end is None or line.other_end:
        end = next(id for id in sorted(stop_ids) if id != end)
    ids = oracle.encode(text)
    if line.garble:
        ids = ids[: len(ids) * 2 // 3]
    return [*split(oracle, ids, line.split, Random(line.seed)), end]


def split(oracle: Oracle, ids: Sequence[int], share: float, random: Random) -> list[int]:
    """The ids with about `share` of the tokens replaced by two shorter ones of the same text."""
    if share <= 0:
        return list(ids)
    halves: list[int] = []
    for id in ids:
        halves += _halves(oracle, id, random) if random.random() < share else [id]
    return halves if oracle.decode(halves) == oracle.decode(ids) else list(ids)


def _halves(oracle: Oracle, id: int, random: Random) -> list[int]:
    """A token as two that spell it, if the vocabulary has them."""
    token = oracle.backend.id_to_token(id)
    if token is None or token in oracle.added or len(token) < 2:
        return [id]
    for cut in random.sample(range(1, len(token)), len(token) - 1):
        halves = [oracle.id_of(part) for part in (token[:cut], token[cut:])]
        if all(half is not None for half in halves) and not {token[:cut], token[cut:]} & oracle.added.keys():
            return [half for half in halves if half is not None]
    return [id]


VERSIONS_FILE = "versions.json"
_SETS = ("a", "b")
CONTEXT_TOKENS = 49_152
"""Longest prompt including its reply."""


def model_config(vocabulary: int) -> DecoderConfig:
    """A model small enough for a vocabulary of 150,000 on two cores.

    The initial weights have a large variance, so that a token's logprob depends on every token before it.
    """
    return DecoderConfig(
        model_type="qwen3",
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )


def create_models(out: Path, name: str, shape: DecoderConfig, seed: int) -> Path:
    """Create and save the weights of one vocabulary; returns their folder."""
    folder = out / f"model-{name}"
    for index, label in enumerate(_SETS):
        save_decoder(create_decoder(shape, seed * len(_SETS) + index), folder / label)
    write_versions(folder, 0)
    return folder


def weights_folder(folder: Path, version: int) -> Path:
    """The folder of a version's weights."""
    return folder / _SETS[version % len(_SETS)]


def write_versions(folder: Path, last: int) -> None:
    """Record which weights each version up to `last` uses."""
    named = {str(version): weights_folder(folder, version).name for version in range(last + 1)}
    (folder / VERSIONS_FILE).write_text(json.dumps(named, indent=2) + "\n", encoding="utf-8")


def read_versions(folder: Path) -> dict[int, Path]:
    """The folder of each version's weights."""
    named = json.loads((folder / VERSIONS_FILE).read_text(encoding="utf-8"))
    return {int(version): folder / name for version, name in named.items()}


UNSCORED = ".as_sent"
"""Suffix of sessions of which only the prompts are checked: the model does not score their replies."""
_TAIL_IDS = 64
"""Number of last prompt ids that show whether the prompt has opened the reasoning."""


@dataclass(slots=True)
class EngineCall:
    """The input and output of one engine call."""

    session: str
    turn: int
    prompt: Ids
    sampled: Ids
    logprobs: Floats
    versions: Ids
    number: int = 0
    """Identifies the request within its session; chosen by the harness."""


class DecodedCounter(Protocol):
    @property
    def decoded_tokens(self) -> int: ...


class ScoringCapable(Engine, Protocol):
    """An engine that scores forced ids and counts the tokens it samples."""

    @property
    def stats(self) -> DecodedCounter: ...


class AlternatingWeights:
    """An engine's weights, which alternate between two sets with every update."""

    def __init__(self, engine: ScoringCapable, folder: Path):
        self.engine = engine
        self.folder = folder
        self._alone = asyncio.Lock()

    async def update(self, *, pause: bool = False) -> None:
        """Switch to the next version; with `pause`, turns in flight are aborted first and resumed afterwards."""
        async with self._alone:
            version = self.engine.version + 1
            write_versions(self.folder, version)
            if pause:
                await self.engine.pause(PauseMode.ABORT)
            await self.engine.update_weights(weights_folder(self.folder, version), version)
            if pause:
                await self.engine.resume()


class ScoringEngine:
    """One target's view of the engine that the targets of a vocabulary share."""

    def __init__(self, weights: AlternatingWeights, oracle: Oracle, format: ReplyFormat, stop_ids: frozenset[int]):
        self.weights = weights
        self.calls: list[EngineCall] = []
        self._oracle = oracle
        self._format = format
        self._stop_ids = stop_ids
        self._inner = weights.engine
        self._lines: dict[tuple[str, int], ScriptedReply] = {}
        self._begun: dict[str, tuple[int, Ids | None]] = {}
        """By turn: the length of its prompt and the scripted ids, `None` if the model samples freely."""
        self._by_number: dict[tuple[str, int], list[EngineCall]] = {}

    def script(self, session: str, seed: int, lines: Sequence[ScriptedReply]) -> None:
        """Set the replies of the session's request that carries `seed`. The seeds of its samples are consecutive."""
        self._lines.update({(session, seed + offset): line for offset, line in enumerate(lines)})

    @property
    def info(self) -> EngineInfo:
        return self._inner.info

    @property
    def version(self) -> int:
        return self._inner.version

    async def start(self) -> None:
        await self._inner.start()

    async def sample(self, request: SampleRequest) -> Sample:
        if request.id in self._begun:
            length, chosen = self._begun[request.id]
        else:
            chosen = await self._choose(request)
            length = len(request.prompt)
            self._begun[request.id] = length, chosen
        forced = None if chosen is None else chosen[len(request.prompt) - length :]
        prompt = np.array(request.prompt, np.int32)
        session, _, turn = request.id.rpartition("-")
        if forced is not None and session.endswith(UNSCORED) and _fits(forced, request):
            sample = _unscored(forced, len(prompt), self._inner.version)
        else:
            sample = await self._inner.sample(replace(request, forced=forced))
        number = _number(request)
        call = EngineCall(session, int(turn), prompt, sample.ids, sample.logprobs, sample.versions, number)
        self.calls.append(call)
        self._by_number.setdefault((session, number), []).append(call)
        return sample

    def answered(self, session: str, number: int) -> Sequence[EngineCall]:
        """The calls of a request: one, or several if the turn was interrupted and resumed."""
        return self._by_number.get((session, number), ())

    async def _choose(self, request: SampleRequest) -> Ids | None:
        session = request.id.rpartition("-")[0]
        line = self._lines.pop((session, _number(request)), None)
        if line is None:
            raise EngineError("the script has no reply for this request: it should not have been sampled")
        line.begun.set()
        if line.hold is not None:
            await line.hold.wait()
        if line.free:
            return None
        tail = request.prompt[-_TAIL_IDS:].tolist()
        return np.asarray(write_reply(self._oracle, self._format, self._stop_ids, line, tail), np.int32)

    async def abort(self, ids: Sequence[str]) -> None:
        await self._inner.abort(ids)

    async def pause(self, mode: PauseMode = PauseMode.DRAIN, deadline: float | None = None) -> None:
        await self._inner.pause(mode, deadline)

    async def resume(self, version: int | None = None) -> None:
        await self._inner.resume(version)

    async def ready(self) -> None:
        await self._inner.ready()

    async def update_weights(self, folder: Path, version: int) -> None:
        await self._inner.update_weights(folder, version)

    async def close(self) -> None:
        """No-op: the engine is shared and closed by its creator."""


def _fits(forced: Ids, request: SampleRequest) -> bool:
    """Whether the model would return all the ids: no limit or stop string truncates them."""
    return len(forced) <= request.max_tokens and not request.stop_strings


def _unscored(forced: Ids, prompt_tokens: int, version: int) -> Sample:
    logprobs = np.full(len(forced), -1.0, np.float32)
    return Sample(forced, logprobs, stamp_versions(len(forced), version), Finish.STOP, prompt_tokens)


def _number(request: SampleRequest) -> int:
    """The number that identifies a request within its session."""
    if request.seed is None and request.request is not None:
        return request.request.sampling.top_k or 0
    return request.seed or 0
