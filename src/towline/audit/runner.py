"""Runs an audit: plays every conversation through a real gateway, three times, and measures what comes out.

`exact` gives the rows of the `exact` builder; `plain`, where every request is rendered anew as a plain server does, those
of `merged` and `per_turn`; both times the script is the same. `as_sent` runs under the context policy of that name with
replies as an encoder would choose them, and compares every prompt with the oracle; the model scores nothing there. Rows,
the engine's log and the models are written first; the figures are then computed from those files alone.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import aiohttp
import torch

from towline.audit import evidence, models, mutations
from towline.audit.behaviours import CAPTURES, Capture, behaviours
from towline.audit.casting import Part, cast, skipped
from towline.audit.comparison import Witness
from towline.audit.engine import Call, ScoringCapable, ScoringEngine, Weights
from towline.audit.evidence import Row
from towline.audit.judge import Found, Played, lineage, unmeasured
from towline.audit.measure import measure
from towline.audit.play import Play
from towline.audit.report import AuditReport, make_report
from towline.audit.targets import Target, find
from towline.audit.tongues import DIALECTS, Tongue, tongue
from towline.audit.wires import InProcess, Sockets, Wire
from towline.config import GatewaySettings
from towline.dialects.registry import all_dialects
from towline.engines.embedded import DecoderConfig, EmbeddedEngine
from towline.errors import ConfigError
from towline.gateway.app import ProviderApp
from towline.gateway.gateway import Gateway
from towline.gateway.server import serving
from towline.gateway.session import Session
from towline.schema import BuilderName, EndReason, Trajectory
from towline.tokens.assemble import assemble

Progress = Callable[[int, int, str], None]

FREE_SHARE = 0.15
SPLIT_SHARE = 0.25
_PATIENCE = 600.0
"""Seconds that one conversation may take; one that hangs is a finding, not the end of the audit."""
_CONTEXT = models.CONTEXT
_CACHE = 2 * _CONTEXT


@dataclass(slots=True)
class AuditOptions:
    """What to audit, and where to leave the evidence."""

    out: Path
    conversations: int = 400
    tokenizer: Path | None = None
    """A tokenizer folder of the user's own, audited beside the others."""
    template: Path | None = None
    """A chat template of the user's own, on that tokenizer or on the one that all templates share."""
    targets: Sequence[str] | None = None
    """Only these."""
    behaviours: Sequence[str] | None = None
    """Only these."""
    dialects: Sequence[str] | None = None
    """Only these."""
    seed: int = 0
    threads: int = 2
    """Of torch."""
    concurrency: int = 8
    """Conversations at a time."""
    shape: Callable[[int], DecoderConfig] = models.config
    """The model for a vocabulary of some size."""
    captures: Sequence[Capture] = CAPTURES
    """Only these plays of each conversation."""
    mutations: bool = False
    """Also check that the audit fails with each of the known faults in the code under test."""
    engine: Callable[[Path], Awaitable[ScoringCapable]] | None = None
    """What samples, started, with the weights of an audit's folder; by default the embedded engine."""


@dataclass(slots=True)
class _Stage:
    """One target with its gateway."""

    target: Target
    engine: ScoringEngine
    gateway: Gateway
    app: ProviderApp
    model: str
    base_url: str | None
    """Where the gateway listens, if it does."""
    client: aiohttp.ClientSession

    def wire(self, credentials: dict[str, str], *, sockets: bool) -> Wire:
        if sockets and self.base_url is not None:
            return Sockets(self.client, self.base_url, credentials)
        return InProcess(self.app, credentials)


@dataclass(slots=True)
class _Results:
    played: list[Played] = field(default_factory=list)
    rows: dict[BuilderName, list[Row]] = field(default_factory=lambda: {name: [] for name in BuilderName})
    calls: list[Call] = field(default_factory=list)


async def run(options: AuditOptions, progress: Progress | None = None) -> AuditReport:
    """Play, write, measure, report. What is wrong with a conversation is in the report, not an exception."""
    began = time.perf_counter()
    tell = progress or (lambda done, total, label: None)
    report = await _audit(options, tell)
    if options.mutations:
        report.mutations = await _mutated(options, tell)
    report.seconds = time.perf_counter() - began
    (options.out / "report.json").write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")
    return report


async def _mutated(options: AuditOptions, tell: Progress) -> dict[str, bool]:
    """Which faults an audit of a few conversations finds."""

    async def short(out: Path, targets: Sequence[str], names: Sequence[str]) -> set[str]:
        chosen = replace(
            options,
            out=out,
            conversations=len(names),
            tokenizer=None,
            template=None,
            targets=targets,
            behaviours=names,
            dialects=("chat",),
            captures=("exact", "as_sent"),
        )
        report = await _audit(chosen, lambda done, total, label: None)
        return {line for part in report.by_behaviour.values() for line in part.violations}

    done = iter(range(len(mutations.FAULTS)))
    return await mutations.check(short, lambda name: tell(next(done), len(mutations.FAULTS), f"with the fault {name}"))


async def _audit(options: AuditOptions, tell: Progress) -> AuditReport:
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = behaviours()
    if options.behaviours is not None:
        if unknown := set(options.behaviours) - chosen.keys():
            raise ConfigError(f"no behaviour {sorted(unknown)[0]!r}; there are: {', '.join(chosen)}")
        chosen = {name: chosen[name] for name in options.behaviours}
    dialects = DIALECTS if options.dialects is None else tuple(options.dialects)
    if unknown := set(dialects) - set(DIALECTS):
        raise ConfigError(f"no dialect {sorted(unknown)[0]!r}; there are: {', '.join(DIALECTS)}")
    tell(0, 1, "reading tokenizers and templates")
    targets = await asyncio.to_thread(find, options.targets, tokenizer=options.tokenizer, template=options.template)
    parts = cast(chosen, targets, options.conversations, dialects)
    results = _Results()
    total = sum(len(_captures(options, part)) for part in parts)
    with tempfile.TemporaryDirectory(prefix="towline-audit-") as scratch:
        ordered = sorted(parts, key=lambda part: part.target.vocabulary)
        for vocabulary, group in groupby(ordered, key=lambda part: part.target.vocabulary):
            done = partial(_tell_played, tell, results, total, f"playing on {vocabulary}")
            async with _staged(options, vocabulary, list(group), Path(scratch), results) as company:
                await company.play(done)
    _write(options.out, results)
    rows = {builder: len(found) for builder, found in results.rows.items()}
    report = await asyncio.to_thread(_report, options, results, targets, sum(rows.values()), tell)
    report.skipped = skipped(chosen, targets, dialects)
    return report


def _captures(options: AuditOptions, part: Part) -> list[Capture]:
    return [capture for capture in part.behaviour.captures if capture in options.captures]


def _tell_played(tell: Progress, results: _Results, total: int, label: str) -> None:
    tell(len(results.played), total, label)


def _write(out: Path, results: _Results) -> None:
    for builder, rows in results.rows.items():
        evidence.write_rows(out, builder, sorted(rows, key=lambda row: (row.model, row.conversation)))
    evidence.write_calls(out, results.calls)
    evidence.write_readme(out)
    played = [one.as_json() for one in sorted(results.played, key=lambda one: one.conversation)]
    (out / "conversations.json").write_text(json.dumps(played, indent=1) + "\n", encoding="utf-8")


def _report(
    options: AuditOptions, results: _Results, targets: Sequence[Target], rows: int, tell: Progress
) -> AuditReport:
    torch.set_num_threads(options.threads)
    done = 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        tell(done, rows, "computing the logprobs again")

    measured = measure(options.out, BuilderName, count)
    return make_report(results.played, measured, targets)


class _Company:
    """All targets of one vocabulary, around one engine."""

    def __init__(
        self, options: AuditOptions, parts: Sequence[Part], stages: dict[str, _Stage], results: _Results
    ) -> None:
        self.options = options
        self.parts = parts
        self.stages = stages
        self.results = results

    async def play(self, done: Callable[[], None]) -> None:
        """Every part under both captures. Parts that change the weights come last: they disturb each other only."""
        for updates in (False, True):
            limit = asyncio.Semaphore(self.options.concurrency)

            async def one(part: Part, capture: Capture, limit: asyncio.Semaphore = limit) -> None:
                async with limit:
                    await self._play(part, capture)
                    done()

            parts = [part for part in self.parts if part.behaviour.updates is updates]
            await asyncio.gather(*(one(part, capture) for part in parts for capture in _captures(self.options, part)))

    async def _play(self, part: Part, capture: Capture) -> None:
        stage, behaviour = self.stages[part.target.name], part.behaviour
        id = f"{part.id}.{capture}"
        settings: dict[str, Any] = {**behaviour.settings}
        if capture == "as_sent":
            settings["policy"] = "as_sent"
        else:
            builder = BuilderName.EXACT if capture == "exact" else BuilderName.MERGED
            settings |= {"capture": capture, "builder": builder.value}
        opened = await stage.gateway.create({"id": id, "settings": settings})
        session = opened.session
        witness = self._witness(part, session, settings)

        def speak(dialect: str) -> tuple[Tongue, Wire]:
            speech = tongue(dialect, open_reasoning=part.open_reasoning)
            return speech, stage.wire(speech.credentials(opened.key), sockets=part.sockets)

        as_sent = capture == "as_sent"
        share = SPLIT_SHARE if behaviour.split is None else behaviour.split
        play = Play(
            part.target,
            stage.engine,
            session,
            speak,
            part.dialect,
            f"{self.options.seed}:{part.id}",
            free=FREE_SHARE if behaviour.free and not as_sent else 0.0,
            split=share if not as_sent or behaviour.split is not None else 0.0,
            witness=witness,
            as_shown=as_sent,
        )
        session.instruction = play.task
        played = Played(part.id, behaviour.name, part.target.name, part.dialect, play.wire.name)
        self.results.played.append(played)
        try:
            async with asyncio.timeout(_PATIENCE):
                expected = await behaviour.act(play)
            played.problems += play.problems
            sealed = await stage.gateway.seal(id, EndReason.EXITED)
            calls = [call for call in stage.engine.calls if call.session == id]
            if as_sent:
                played.oracle, different = witness.compare(calls)
                played.problems += [*different, *unmeasured(sealed, calls)]
                return
            played.expected = expected
            played.unclosed = play.unclosed
            if capture == "exact":
                played.problems += lineage(expected, play.follows, play.temperatures, sealed, calls)
                played.problems += witness.tails(calls)
            self._keep(part, stage, played, sealed)
            if capture == "plain":
                self._keep(part, stage, played, _per_turn(session, part.target))
        except Exception as error:
            # A defect anywhere behind the gateway is a finding about this conversation, not the end of the audit.
            played.broken = True
            played.problems.append(f"{capture}: {type(error).__name__}: {error}")

    def _witness(self, part: Part, session: Session, settings: Mapping[str, Any]) -> Witness:
        target = part.target
        return Witness(
            target.oracle,
            target.format,
            settings,
            datetime.fromtimestamp(session.created, UTC),
            closes=target.abilities.closes,
            plain_text=target.abilities.plain_special_text,
        )

    def _keep(self, part: Part, stage: _Stage, played: Played, trajectory: Trajectory) -> None:
        played.found[trajectory.builder] = Found.of(trajectory)
        names = part.id, part.behaviour.name, part.target.name, part.dialect, stage.model
        self.results.rows[trajectory.builder] += [Row(*names, trace) for trace in trajectory.traces]


def _per_turn(session: Session, target: Target) -> Trajectory:
    """The same session once more, built a row a call."""
    return assemble(
        session.graph,
        session_id=session.id,
        builder=BuilderName.PER_TURN,
        policy=session.settings.policy,
        instruction=session.instruction,
        trained=session.settings.trained_roles,
        ends=target.codec.end_ids,
        end_reason=EndReason.EXITED,
        tools={key: [tool.as_function() for tool in tools] for key, tools in session.tools.items()},
    )


@asynccontextmanager
async def _staged(
    options: AuditOptions, vocabulary: str, parts: Sequence[Part], scratch: Path, results: _Results
) -> AsyncIterator[_Company]:
    """The engine of a vocabulary, with a gateway for each target."""
    targets = {part.target.name: part.target for part in parts}
    tokenizer = next(iter(targets.values())).codec.tokenizer
    size = max(target.codec.tokenizer.size for target in targets.values())
    folder = await asyncio.to_thread(models.make, options.out, vocabulary, options.shape(size), options.seed)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(aiohttp.ClientSession())
        if options.engine is not None:
            engine = await options.engine(folder)
        else:
            engine = await _embedded(options, models.weights(folder, 0), tokenizer.decode)
        stack.push_async_callback(engine.close)
        weights = Weights(engine, folder)
        stages = {}
        for name, target in targets.items():
            scoring = ScoringEngine(weights, target.oracle, target.format, target.codec.stop_ids)
            data = scratch / name
            settings = GatewaySettings(port=0, control_port=0, data=data, journal="os")
            gateway = Gateway(scoring, target.codec, settings)
            base_url = await stack.enter_async_context(_opened(gateway, listening=target.primary))
            app = ProviderApp(gateway, all_dialects())
            stages[name] = _Stage(target, scoring, gateway, app, folder.name, base_url, client)
        yield _Company(options, parts, stages, results)
        for stage in stages.values():
            results.calls += stage.engine.calls


async def _embedded(options: AuditOptions, weights: Path, decode: Callable[[Sequence[int]], str]) -> ScoringCapable:
    engine = EmbeddedEngine(
        weights,
        decode=decode,
        max_batch=options.concurrency * 2,
        max_cached_tokens=_CACHE,
        context=_CONTEXT,
        threads=options.threads,
        seed=options.seed,
    )
    await engine.start()
    return engine


@asynccontextmanager
async def _opened(gateway: Gateway, *, listening: bool) -> AsyncIterator[str | None]:
    """The gateway, open, and where it listens if it does."""
    if listening:
        async with serving(gateway, "audit") as running:
            yield running.base_url
        return
    await gateway.open()
    try:
        yield None
    finally:
        await gateway.close()
