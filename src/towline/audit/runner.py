"""Runs an audit: plays every conversation through a real gateway, once per capture, and measures the rows.

`exact` gives the rows of the `exact` builder; `plain`, which renders every request in full as a plain server does, those of
`merged` and `per_turn`; both use the same script. `as_sent` runs under the context policy of that name with canonically
encoded replies and compares every prompt with the oracle; the model scores nothing there. Rows, the engine's log and the
models are written first; the figures are then computed from those files alone.
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

from towline.audit import evidence, mutations
from towline.audit.assignment import AssignedConversation, assign, count_skipped
from towline.audit.behaviours import CAPTURES, Capture, behaviours
from towline.audit.checks import ObservedTrajectory, PlayedConversation, drift_violations, lineage_violations
from towline.audit.clients import DIALECTS, DialectClient, make_client
from towline.audit.clients.transport import InProcessTransport, SocketTransport, Transport
from towline.audit.comparison import PromptChecker
from towline.audit.engine import (
    CONTEXT_TOKENS,
    AlternatingWeights,
    EngineCall,
    ScoringCapable,
    ScoringEngine,
    create_models,
    model_config,
    weights_folder,
)
from towline.audit.evidence import EvidenceRow, measure
from towline.audit.report import AuditReport, make_report
from towline.audit.simulation import SimulatedHarness
from towline.audit.targets import AuditTarget, find_targets
from towline.common.progress import OnCount
from towline.config import GatewaySettings
from towline.dialects.registry import all_dialects
from towline.engines.embedded import DecoderConfig, EmbeddedEngine
from towline.errors import ConfigError
from towline.gateway.app import ProviderApp
from towline.gateway.gateway import Gateway
from towline.gateway.server import serve_gateway
from towline.gateway.session import GatewaySession
from towline.schema import BuilderName, EndReason, Trajectory
from towline.tokens.traces.trajectory import assemble_trajectory

FREE_SHARE = 0.15
SPLIT_SHARE = 0.25
_CONVERSATION_SECONDS = 600.0
"""Timeout of one conversation; one that hangs is a violation and does not stop the audit."""
_CACHE = 2 * CONTEXT_TOKENS


@dataclass(slots=True)
class AuditOptions:
    """What to audit, and where to write the evidence."""

    out: Path
    conversations: int = 400
    tokenizer: Path | None = None
    """A tokenizer folder of the user's, audited with the others."""
    template: Path | None = None
    """A chat template of the user's, on that tokenizer or on the one that all templates share."""
    targets: Sequence[str] | None = None
    """Targets to audit; default all."""
    behaviours: Sequence[str] | None = None
    """Behaviours to play; default all."""
    dialects: Sequence[str] | None = None
    """Dialects to use; default all."""
    seed: int = 0
    threads: int = 2
    """Torch threads."""
    concurrency: int = 8
    """Concurrent conversations."""
    shape: Callable[[int], DecoderConfig] = model_config
    """Returns the model configuration for a vocabulary size."""
    captures: Sequence[Capture] = CAPTURES
    """Captures to run."""
    mutations: bool = False
    """Whether to check that the audit catches each of the known faults."""
    engine: Callable[[Path], Awaitable[ScoringCapable]] | None = None
    """Starts the engine for an audit's model folder; the embedded engine by default."""


@dataclass(slots=True)
class _TargetGateway:
    """One target with its gateway."""

    target: AuditTarget
    engine: ScoringEngine
    gateway: Gateway
    app: ProviderApp
    model: str
    base_url: str | None
    """The gateway's URL, if it listens on a socket."""
    client: aiohttp.ClientSession

    def transport(self, credentials: dict[str, str], *, sockets: bool) -> Transport:
        if sockets and self.base_url is not None:
            return SocketTransport(self.client, self.base_url, credentials)
        return InProcessTransport(self.app, credentials)


@dataclass(slots=True)
class _Results:
    played: list[PlayedConversation] = field(default_factory=list)
    rows: dict[BuilderName, list[EvidenceRow]] = field(default_factory=lambda: {name: [] for name in BuilderName})
    calls: list[EngineCall] = field(default_factory=list)


async def run(options: AuditOptions, progress: OnCount | None = None) -> AuditReport:
    """Play, write, measure, report. A failing conversation is a violation in the report, not an exception."""
    began = time.perf_counter()
    progress = progress or (lambda done, total, label: None)
    report = await _audit(options, progress)
    if options.mutations:
        report.mutations = await _check_mutations(options, progress)
    report.seconds = time.perf_counter() - began
    (options.out / "report.json").write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")
    return report


async def _check_mutations(options: AuditOptions, progress: OnCount) -> dict[str, bool]:
    """Which faults an audit of a few conversations catches."""

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
    return await mutations.check_faults(
        short, lambda name: progress(next(done), len(mutations.FAULTS), f"with the fault {name}")
    )


async def _audit(options: AuditOptions, progress: OnCount) -> AuditReport:
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = behaviours()
    if options.behaviours is not None:
        if unknown := set(options.behaviours) - chosen.keys():
            raise ConfigError(f"unknown behaviour {sorted(unknown)[0]!r}; available: {', '.join(chosen)}")
        chosen = {name: chosen[name] for name in options.behaviours}
    dialects = DIALECTS if options.dialects is None else tuple(options.dialects)
    if unknown := set(dialects) - set(DIALECTS):
        raise ConfigError(f"unknown dialect {sorted(unknown)[0]!r}; available: {', '.join(DIALECTS)}")
    progress(0, 1, "reading tokenizers and templates")
    targets = await asyncio.to_thread(
        find_targets, options.targets, tokenizer=options.tokenizer, template=options.template
    )
    parts = assign(chosen, targets, options.conversations, dialects)
    results = _Results()
    total = sum(len(_captures(options, part)) for part in parts)
    with tempfile.TemporaryDirectory(prefix="towline-audit-") as scratch:
        ordered = sorted(parts, key=lambda part: part.target.vocabulary)
        for vocabulary, group in groupby(ordered, key=lambda part: part.target.vocabulary):
            done = partial(_report_played, progress, results, total, f"playing on {vocabulary}")
            async with _open_vocabulary(options, vocabulary, list(group), Path(scratch), results) as vocabulary_run:
                await vocabulary_run.play(done)
    _write(options.out, results)
    rows = sum(map(len, results.rows.values()))
    report = await asyncio.to_thread(_report, options, results, targets, rows, progress)
    report.skipped = count_skipped(chosen, targets, dialects)
    if options.behaviours is not None:
        report.min_compared = 0.0
    return report


def _captures(options: AuditOptions, part: AssignedConversation) -> list[Capture]:
    return [capture for capture in part.behaviour.captures if capture in options.captures]


def _report_played(progress: OnCount, results: _Results, total: int, label: str) -> None:
    progress(len(results.played), total, label)


def _write(out: Path, results: _Results) -> None:
    for builder, rows in results.rows.items():
        evidence.write_rows(out, builder, sorted(rows, key=lambda row: (row.model, row.conversation)))
    evidence.write_calls(out, results.calls)
    evidence.write_readme(out)
    played = [one.as_json() for one in sorted(results.played, key=lambda one: one.conversation)]
    (out / "conversations.json").write_text(json.dumps(played, indent=1) + "\n", encoding="utf-8")


def _report(
    options: AuditOptions, results: _Results, targets: Sequence[AuditTarget], rows: int, progress: OnCount
) -> AuditReport:
    torch.set_num_threads(options.threads)
    done = 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        progress(done, rows, "recomputing logprobs")

    measured = measure(options.out, BuilderName, count)
    return make_report(results.played, measured, targets)


@dataclass(slots=True)
class _VocabularyRun:
    """All targets of one vocabulary, around one engine."""

    options: AuditOptions
    parts: Sequence[AssignedConversation]
    stages: dict[str, _TargetGateway]
    results: _Results

    async def play(self, done: Callable[[], None]) -> None:
        """Play every conversation under its captures. Those that update the weights run last, so that they affect only
        each other."""
        for updates in (False, True):
            limit = asyncio.Semaphore(self.options.concurrency)

            async def one(part: AssignedConversation, capture: Capture, limit: asyncio.Semaphore = limit) -> None:
                async with limit:
                    await self._play(part, capture)
                    done()

            parts = [part for part in self.parts if part.behaviour.updates is updates]
            await asyncio.gather(*(one(part, capture) for part in parts for capture in _captures(self.options, part)))

    async def _play(self, part: AssignedConversation, capture: Capture) -> None:
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
        checker = self._checker(part, session, settings)

        def connect(dialect: str) -> tuple[DialectClient, Transport]:
            client = make_client(dialect, open_reasoning=part.open_reasoning)
            return client, stage.transport(client.credentials(opened.key), sockets=part.sockets)

        as_sent = capture == "as_sent"
        share = SPLIT_SHARE if behaviour.split is None else behaviour.split
        harness = SimulatedHarness(
            part.target,
            stage.engine,
            session,
            connect,
            part.dialect,
            f"{self.options.seed}:{part.id}",
            free=FREE_SHARE if behaviour.free and not as_sent else 0.0,
            split=share if not as_sent or behaviour.split is not None else 0.0,
            checker=checker,
            as_shown=as_sent,
        )
        session.instruction = harness.task
        played = PlayedConversation(part.id, behaviour.name, part.target.name, part.dialect, harness.transport.name)
        self.results.played.append(played)
        try:
            async with asyncio.timeout(_CONVERSATION_SECONDS):
                expected = await behaviour.act(harness)
            played.problems += harness.problems
            sealed = await stage.gateway.seal(id, EndReason.EXITED)
            calls = [call for call in stage.engine.calls if call.session == id]
            if as_sent:
                played.oracle, different = checker.compare(calls)
                played.problems += [*different, *drift_violations(sealed, calls)]
                return
            played.expected = expected
            played.unclosed = harness.unclosed
            if capture == "exact":
                played.problems += lineage_violations(expected, harness.follows, harness.temperatures, sealed, calls)
                played.problems += checker.tails(calls)
            self._keep(part, stage, played, sealed)
            if capture == "plain":
                self._keep(part, stage, played, _per_turn(session, part.target))
        except Exception as error:
            # A defect anywhere behind the gateway is a violation of this conversation and does not stop the audit.
            played.broken = True
            played.problems.append(f"{capture}: {type(error).__name__}: {error}")

    def _checker(
        self, part: AssignedConversation, session: GatewaySession, settings: Mapping[str, Any]
    ) -> PromptChecker:
        target = part.target
        placeholders = target.codec.image_placeholders
        return PromptChecker(
            target.oracle,
            target.format,
            settings,
            datetime.fromtimestamp(session.created, UTC),
            closes=target.abilities.closes,
            plain_text=target.abilities.plain_special_text,
            image_text=placeholders.spelled if placeholders is not None else None,
        )

    def _keep(
        self, part: AssignedConversation, stage: _TargetGateway, played: PlayedConversation, trajectory: Trajectory
    ) -> None:
        played.found[trajectory.builder] = ObservedTrajectory.of(trajectory)
        names = part.id, part.behaviour.name, part.target.name, part.dialect, stage.model
        self.results.rows[trajectory.builder] += [EvidenceRow(*names, trace) for trace in trajectory.traces]


def _per_turn(session: GatewaySession, target: AuditTarget) -> Trajectory:
    """The same session built with one row per turn."""
    return assemble_trajectory(
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
async def _open_vocabulary(
    options: AuditOptions, vocabulary: str, parts: Sequence[AssignedConversation], scratch: Path, results: _Results
) -> AsyncIterator[_VocabularyRun]:
    """The engine of a vocabulary, with one gateway per target."""
    targets = {part.target.name: part.target for part in parts}
    tokenizer = next(iter(targets.values())).codec.tokenizer
    size = max(target.codec.tokenizer.size for target in targets.values())
    folder = await asyncio.to_thread(create_models, options.out, vocabulary, options.shape(size), options.seed)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(aiohttp.ClientSession())
        if options.engine is not None:
            engine = await options.engine(folder)
        else:
            engine = await _embedded(options, weights_folder(folder, 0), tokenizer.decode)
        stack.push_async_callback(engine.close)
        weights = AlternatingWeights(engine, folder)
        stages = {}
        for name, target in targets.items():
            scoring = ScoringEngine(weights, target.oracle, target.format, target.codec.stop_ids)
            data = scratch / name
            settings = GatewaySettings(port=0, control_port=0, data=data, journal="os")
            gateway = Gateway(scoring, target.codec, settings)
            base_url = await stack.enter_async_context(_open_gateway(gateway, listening=target.primary))
            app = ProviderApp(gateway, all_dialects())
            stages[name] = _TargetGateway(target, scoring, gateway, app, folder.name, base_url, client)
        yield _VocabularyRun(options, parts, stages, results)
        for stage in stages.values():
            results.calls += stage.engine.calls


async def _embedded(options: AuditOptions, weights: Path, decode: Callable[[Sequence[int]], str]) -> ScoringCapable:
    engine = EmbeddedEngine(
        weights,
        decode=decode,
        max_batch=options.concurrency * 2,
        max_cached_tokens=_CACHE,
        context=CONTEXT_TOKENS,
        threads=options.threads,
        seed=options.seed,
    )
    await engine.start()
    return engine


@asynccontextmanager
async def _open_gateway(gateway: Gateway, *, listening: bool) -> AsyncIterator[str | None]:
    """Open the gateway; yields its URL if it listens on a socket."""
    if listening:
        async with serve_gateway(gateway, "audit") as running:
            yield running.base_url
        return
    await gateway.open()
    try:
        yield None
    finally:
        await gateway.close()
