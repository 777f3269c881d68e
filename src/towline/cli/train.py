"""`towline train`: asynchronous GRPO over a rollout service, with the reference trainer."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from towline.cli import common, engines
from towline.cli.loading import load_tasks
from towline.errors import ConfigError
from towline.schema import SandboxKind, Task

if TYPE_CHECKING:
    from towline.trainers import metrics


def train(
    tasks: Annotated[
        list[str] | None, typer.Argument(help="Tasks to train on, taken in turn; see `towline run`.", metavar="TASK…")
    ] = None,
    registry: Annotated[
        bool, typer.Option("--registry", help="Train on the tiny model's own questions, and measure on held-out ones.")
    ] = False,
    harness: Annotated[str, typer.Option(help="The agent program of tasks that name none.")] = "",
    option: Annotated[
        list[str] | None, typer.Option(help="An option of the harness, `name=value`. Repeatable.")
    ] = None,
    model: common.ModelFolder = None,
    engine: common.EngineName = None,
    upstream: common.Upstream = None,
    upstream_model: common.UpstreamModel = None,
    url: Annotated[
        str | None, typer.Option(help="A running service. Default: one of its own, on this machine.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of checkpoints and metrics. Default: runs/train-TIME.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Updates.", min=1)] = 24,
    groups: Annotated[int, typer.Option(help="Groups an update learns from.", min=1)] = 8,
    samples: Annotated[int, typer.Option(help="Sessions a group.", min=2)] = 16,
    rate: Annotated[float, typer.Option(help="Learning rate at the start; it falls in a line to a tenth.")] = 1e-3,
    entropy: Annotated[float, typer.Option(help="Weight of the entropy bonus.")] = 0.02,
    kl: Annotated[float, typer.Option(help="Weight of the divergence from the model at the start.")] = 0.0,
    updates: Annotated[int, typer.Option(help="Optimiser steps an update.", min=1)] = 4,
    ahead: Annotated[int, typer.Option(help="Updates' worth of groups under way besides the next.", min=0)] = 1,
    synchronous: Annotated[bool, typer.Option("--synchronous", help="Roll out only between updates.")] = False,
    max_staleness: Annotated[int, typer.Option(help="Oldest group that is used, in versions.", min=0)] = 4,
    pacing: Annotated[
        bool, typer.Option(help="Start sessions at the pace of the updates; without it old groups are dropped.")
    ] = True,
    max_failed: common.MaxFailed = 0.5,
    permute: Annotated[bool, typer.Option("--permute", help="A control: shuffle rewards within each group.")] = False,
    sandbox: Annotated[SandboxKind | None, typer.Option(help="Where tasks run that do not say.")] = None,
    concurrency: Annotated[int, typer.Option(help="Sessions that run at the same time.", min=1)] = 16,
    tensorboard: Annotated[bool, typer.Option(help="Write TensorBoard files beside the JSONL.")] = True,
    wandb: Annotated[str, typer.Option(help="A Weights & Biases project to log to.")] = "",
    held_out: Annotated[int, typer.Option(help="Held-out questions of `--registry` to measure on.", min=1)] = 64,
    measure: Annotated[
        list[str] | None,
        typer.Option(help="Tasks that are only played, to measure success. Repeatable.", metavar="TASK"),
    ] = None,
    measure_every: Annotated[
        int | None, typer.Option(help="Updates between measurements. Default: half of all.", min=1)
    ] = None,
    seed: int = 0,
    as_json: common.Json = False,
) -> None:
    """Train a model by GRPO on the sessions of real agents, while they go on.

    Killed at any moment and started again with the same `--out`, it goes on from its checkpoint; no session is lost and
    none is used twice.
    """
    from towline.client import Client
    from towline.trainers import metrics
    from towline.trainers.grpo import Grpo, GrpoSettings
    from towline.trainers.learner import Learner, LearnerSettings
    from towline.trainers.live import LiveView
    from towline.trainers.loss import LossSettings
    from towline.trainers.run import Run

    console = common.console(as_json)
    chosen = _engine(engine, upstream, upstream_model, url)
    source, measured = _tasks(tasks or [], registry, harness, option or [], samples, seed, held_out, console)
    if measure:
        measured = load_tasks(measure, harness, 1, option or [], console)
    out = out or Path("runs") / time.strftime("train-%Y%m%d-%H%M%S")
    out.mkdir(parents=True, exist_ok=True)
    folder = model or common.tiny(console)
    import torch

    torch.set_num_threads(1)
    settings = LearnerSettings(rate=rate, updates=updates, loss=LossSettings(entropy=entropy, kl=kl))
    learner = Learner(folder, settings, reference=kl > 0, seed=seed)
    sinks = _sinks(out, tensorboard, wandb, {"steps": steps, "groups": groups, "samples": samples}, console)
    written = metrics.Metrics(out, *sinks)
    with contextlib.ExitStack() as stack:
        stack.callback(written.close)
        address = url or stack.enter_context(_service(folder, out, sandbox, concurrency, chosen))
        client = stack.enter_context(Client(address))
        run = GrpoSettings(
            run=out.name,
            steps=steps,
            groups=groups,
            ahead=ahead,
            synchronous=synchronous,
            max_staleness=max_staleness,
            pacing=pacing,
            max_failed=max_failed,
            permute=permute,
            seed=seed,
        )
        at = frozenset(range(0, steps, measure_every or max(1, steps // 2)))
        whole = Run(Grpo(client, learner, source, out, run), written, rate, measured, at)
        shown = stack.enter_context(LiveView(console, steps))
        shown.attach(whole)
        whole.run()
    failures = whole.trainer.failures
    _conclude(out, {**whole.as_json(), "failures": failures.as_json()}, console, as_json)
    common.exit_on_failures(failures, max_failed)


def _tasks(
    paths: list[str],
    registry: bool,
    harness: str,
    option: list[str],
    samples: int,
    seed: int,
    held_out: int,
    console: Console,
) -> tuple[Callable[[int], Task], list[Task]]:
    """The n-th task to train on, and the tasks to measure on."""
    if registry:
        from towline.demo import AGENT
        from towline.tiny.tasks import held_out_tasks, training_task

        return lambda n: training_task(n, AGENT, samples=samples, seed=seed), held_out_tasks(AGENT, held_out)
    if not paths:
        raise ConfigError("name tasks to train on, or --registry")
    loaded = load_tasks(paths, harness, samples, option, console)
    return lambda n: loaded[n % len(loaded)], []


def _engine(engine: str | None, upstream: list[str] | None, upstream_model: str | None, url: str | None) -> list[str]:
    """The options of the run's own service that say which engine samples; it must be one that takes new weights."""
    engines.given(engine, upstream, upstream_model)
    if url is not None and (engine or upstream or upstream_model):
        raise ConfigError("--url names a service that has its engine; --engine and --upstream are for one of its own")
    if engine is not None and engine not in engines.TRAINABLE:
        raise ConfigError(
            f"--engine {engine} takes no new weights from here; train with {', '.join(engines.TRAINABLE)}"
        )
    words = ["--engine", engine] if engine else []
    words += [word for one in upstream or () for word in ("--upstream", one)]
    return words + (["--upstream-model", upstream_model] if upstream_model else [])


def _service(
    folder: Path, out: Path, sandbox: SandboxKind | None, concurrency: int, engine: list[str]
) -> contextlib.AbstractContextManager[str]:
    from towline.trainers.service import own_service

    chosen = ["--concurrency", str(concurrency), *(["--sandbox", sandbox.value] if sandbox else []), *engine]
    return own_service(folder, out, chosen)


def _sinks(out: Path, tensorboard: bool, wandb: str, config: dict[str, Any], console: Console) -> list[metrics.Sink]:
    """Where figures go besides the JSONL. TensorBoard's package may be missing; what was asked for by name may not."""
    from towline.trainers import metrics

    sinks: list[metrics.Sink] = []
    if tensorboard:
        try:
            sinks.append(metrics.TensorBoard(out / "tensorboard"))
        except ConfigError as error:
            console.print(f"[yellow]no TensorBoard files:[/] {common.plain(str(error))}", highlight=False)
    if wandb:
        sinks.append(metrics.WeightsAndBiases(wandb, out.name, config))
    return sinks


def _bias(pacing: dict[str, Any] | None) -> str:
    """What pacing cost, and whether slow tasks were trained on as much as they were submitted."""
    if pacing is None:
        return ""
    told = f"; waited {pacing['withheld_seconds']:.1f} s for older groups" if pacing["groups_per_update"] else ""
    shares = ", ".join(f"{one['trained_share']:.0%}" for one in pacing["quartiles"])
    return told + (f"; trained share by duration quartile, fastest first: {shares}" if shares else "")


def _conclude(out: Path, told: dict[str, Any], console: Console, as_json: bool) -> None:
    from towline.trainers import curves, metrics

    lines = metrics.read(out)
    picture: Path | None = out / "curves.png"
    try:
        curves.draw(lines, out / "curves.png", out.name)
    except ConfigError as error:
        picture = None
        console.print(f"[yellow]no picture:[/] {common.plain(str(error))}", highlight=False)
    if as_json:
        print(json.dumps({"out": str(out), "curves": str(picture) if picture else None, **told}))
        return
    worst = max((line["worst_logprob"] for line in lines if "worst_logprob" in line), default=0.0)
    for one in told["success"]:
        console.print(f"after {one['sessions_used']:>6,} sessions: {one['success']:.1%} on held-out tasks")
    console.print(f"max |learner - recorded| logprob over the run: {worst:.1e}", highlight=False)
    dropped = told["last"]["dropped_groups"] if told["last"] else 0
    console.print(f"groups dropped as too old: {dropped:,}{_bias(told['pacing'])}", highlight=False, soft_wrap=True)
    console.print(f"Written to {out}: metrics.jsonl, checkpoint{', curves.png' if picture else ''}", highlight=False)
