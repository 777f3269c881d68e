"""`towline train`: asynchronous GRPO on a rollout service, with the reference trainer."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from towline.cli import engines, options, terminal
from towline.cli.tasks import load_tasks, parse_band
from towline.errors import ConfigError
from towline.schema import SandboxKind, Task

if TYPE_CHECKING:
    from towline.trainers.curriculum.curriculum import Curriculum
    from towline.trainers.grpo import metrics


def train(
    tasks: Annotated[
        list[str] | None, typer.Argument(help="Tasks to train on, in rotation; see `towline run`.", metavar="TASK…")
    ] = None,
    registry: Annotated[
        bool, typer.Option("--registry", help="Train on the built-in demo questions instead of TASK. Default: off.")
    ] = False,
    harness: options.Harness = "",
    option: options.HarnessOptions = None,
    trust: options.Trust = None,
    model: Annotated[
        Path | None, typer.Option(help="Model folder (Hugging Face layout) to train. Default: a tiny model.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="embedded, vllm or sglang. Default: embedded.")] = None,
    upstream: options.Upstream = None,
    upstream_model: options.UpstreamModel = None,
    url: Annotated[
        str | None, typer.Option(help="URL of a running service. Default: start one on this machine.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Output folder. Resumes if it already exists. Default: runs/train-TIME.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Policy updates (weight versions) to train for.", min=1)] = 24,
    groups: Annotated[int, typer.Option(help="Task groups per policy update.", min=1)] = 8,
    samples: Annotated[int, typer.Option(help="Sessions per group.", min=2)] = 16,
    rate: Annotated[float, typer.Option(help="Initial learning rate; decays linearly to a tenth.")] = 1e-3,
    entropy: Annotated[float, typer.Option(help="Weight of the entropy bonus.")] = 0.02,
    kl: Annotated[float, typer.Option(help="Weight of the KL divergence from the initial model.")] = 0.0,
    updates: Annotated[int, typer.Option(help="Optimizer steps per policy update.", min=1)] = 4,
    ahead: Annotated[int, typer.Option(help="Updates whose groups are rolled out in advance.", min=0)] = 1,
    synchronous: Annotated[
        bool, typer.Option("--synchronous", help="Roll out only between updates. Default: all the time.")
    ] = False,
    max_staleness: Annotated[int, typer.Option(help="Maximum age of a group, in policy versions.", min=0)] = 4,
    pacing: Annotated[
        bool, typer.Option(help="Start sessions at the pace of updates instead of dropping stale groups.")
    ] = True,
    max_failed: options.MaxFailed = 0.5,
    permute: Annotated[
        bool, typer.Option("--permute", help="Shuffle rewards within each group, as a control. Default: off.")
    ] = False,
    sandbox: options.Sandbox = None,
    concurrency: Annotated[int, typer.Option(help="Sessions that run at the same time.", min=1)] = 16,
    tensorboard: Annotated[bool, typer.Option(help="Write TensorBoard files as well as JSONL.")] = True,
    wandb: Annotated[str, typer.Option(help="Weights & Biases project to log to. Default: none.")] = "",
    held_out: Annotated[int, typer.Option(help="Held-out questions of `--registry` to evaluate on.", min=1)] = 64,
    measure: Annotated[
        list[str] | None,
        typer.Option(help="Tasks to evaluate on, never trained on. Repeatable. Default: none.", metavar="TASK"),
    ] = None,
    measure_every: Annotated[
        int | None, typer.Option(help="Policy updates between evaluations. Default: half of --steps.", min=1)
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    sampler: Annotated[
        str, typer.Option(help="Which task next: uniform, band, pass_rate or variance. Default: in rotation.")
    ] = "",
    band: Annotated[str, typer.Option(help="Pass rates of `--sampler band`, as LOW:HIGH.")] = "0.2:0.8",
    budget: Annotated[
        list[str] | None,
        typer.Option(help="KIND=AMOUNT: tokens, sessions, seconds or money. Repeatable. Default: no limit."),
    ] = None,
    price: Annotated[str, typer.Option(help="PROMPT:SAMPLED per million tokens, for money. Default: none.")] = "",
    as_json: options.Json = False,
) -> None:
    """Train a model by asynchronous GRPO on the sessions of real agents.

    Run again with the same `--out` to resume from the checkpoint after an interruption or a crash; no session is lost
    and none is trained on twice.
    """
    from towline.client import Client
    from towline.trainers.grpo import metrics
    from towline.trainers.grpo.learner import Learner, LearnerSettings
    from towline.trainers.grpo.loop import Grpo, GrpoSettings
    from towline.trainers.grpo.loss import LossSettings
    from towline.trainers.grpo.run import LiveView, TrainingRun

    console = terminal.console(as_json)
    chosen = _engine(engine, upstream, upstream_model, url)
    source, measured = _tasks(tasks or [], registry, harness, option or [], trust, samples, seed, held_out, console)
    curriculum = None
    if sampler or budget:
        if registry:
            raise ConfigError("--sampler and --budget choose among TASKs; drop --registry")
        loaded = load_tasks(tasks or [], harness, samples, option or [], console, trust=trust)
        store_folder = out = out or Path("runs") / time.strftime("train-%Y%m%d-%H%M%S")
        curriculum = _curriculum(loaded, store_folder, sampler or "uniform", band, budget or [], price, samples, seed)
        source = curriculum.task
    if measure:
        measured = load_tasks(measure, harness, 1, option or [], console, trust=trust)
    out = out or Path("runs") / time.strftime("train-%Y%m%d-%H%M%S")
    out.mkdir(parents=True, exist_ok=True)
    folder = model or engines.tiny_model(console)
    import torch

    torch.set_num_threads(1)
    settings = LearnerSettings(rate=rate, updates=updates, loss=LossSettings(entropy=entropy, kl=kl))
    learner = Learner(folder, settings, reference=kl > 0, seed=seed)
    sinks = _sinks(out, tensorboard, wandb, {"steps": steps, "groups": groups, "samples": samples}, console)
    written = metrics.MetricsLog(out, *sinks)
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
        whole = TrainingRun(Grpo(client, learner, source, out, run, curriculum=curriculum), written, rate, measured, at)
        shown = stack.enter_context(LiveView(console, steps))
        shown.attach(whole)
        whole.run()
    failures = whole.trainer.failures
    about: dict[str, Any] = {**whole.as_json(), "failures": failures.as_json()}
    if curriculum is not None:
        spent = curriculum.spending()
        about["budget"] = curriculum.budget.as_json(spent)
        if left := curriculum.budget.line(spent):
            console.print(f"Left of the budget: {left}", highlight=False)
    _conclude(out, about, console, as_json)
    terminal.exit_on_failures(failures, max_failed)


def _tasks(
    paths: list[str],
    registry: bool,
    harness: str,
    option: list[str],
    trust: list[str] | None,
    samples: int,
    seed: int,
    held_out: int,
    console: Console,
) -> tuple[Callable[[int], Task], list[Task]]:
    """The n-th task to train on, and the tasks to evaluate on."""
    if registry:
        from towline.demo.registry import EXAMPLE_AGENT, held_out_tasks, training_task

        return lambda n: training_task(n, EXAMPLE_AGENT, samples=samples, seed=seed), held_out_tasks(
            EXAMPLE_AGENT, held_out
        )
    if not paths:
        raise ConfigError("no tasks to train on; give some, or --registry")
    loaded = load_tasks(paths, harness, samples, option, console, trust=trust)
    return lambda n: loaded[n % len(loaded)], []


def _curriculum(
    tasks: list[Task], out: Path, sampler: str, band: str, budget: list[str], price: str, samples: int, seed: int
) -> Curriculum:
    """Which task next, from a store in the run's folder; a resumed run continues with it."""
    from towline.trainers.curriculum.budget import RunBudget
    from towline.trainers.curriculum.curriculum import Curriculum
    from towline.trainers.curriculum.samplers import SamplerName, SamplerOptions
    from towline.trainers.curriculum.store import CurriculumStore

    if sampler not in list(SamplerName):
        raise ConfigError(f"--sampler {sampler!r} is not known; samplers: {', '.join(SamplerName)}")
    low, high = parse_band(band)
    limits = RunBudget.parse(budget, price)
    out.mkdir(parents=True, exist_ok=True)
    options = SamplerOptions(group=samples, low=low, high=high)
    return Curriculum(tasks, CurriculumStore(out), SamplerName(sampler), options, limits, seed)


def _engine(engine: str | None, upstream: list[str] | None, upstream_model: str | None, url: str | None) -> list[str]:
    """Engine options for the service that the run starts; only engines that accept new weights are allowed."""
    engines.engine_overrides(engine, upstream, upstream_model)
    if url is not None and (engine or upstream or upstream_model):
        raise ConfigError("the service at --url has its own engine; drop --engine and --upstream, or drop --url")
    if engine is not None and engine not in engines.TRAINABLE:
        raise ConfigError(f"--engine {engine} cannot load new weights; train with {', '.join(engines.TRAINABLE)}")
    words = ["--engine", engine] if engine else []
    words += [word for one in upstream or () for word in ("--upstream", one)]
    return words + (["--upstream-model", upstream_model] if upstream_model else [])


def _service(
    folder: Path, out: Path, sandbox: SandboxKind | None, concurrency: int, engine: list[str]
) -> contextlib.AbstractContextManager[str]:
    from towline.trainers.service import own_service

    chosen = ["--concurrency", str(concurrency), *(["--sandbox", sandbox.value] if sandbox else []), *engine]
    return own_service(folder, out, chosen)


def _sinks(
    out: Path, tensorboard: bool, wandb: str, config: dict[str, Any], console: Console
) -> list[metrics.MetricsSink]:
    """Metrics sinks besides the JSONL. A missing TensorBoard package is reported; a missing W&B package is an error."""
    from towline.trainers.grpo import metrics

    sinks: list[metrics.MetricsSink] = []
    if tensorboard:
        try:
            sinks.append(metrics.TensorBoard(out / "tensorboard"))
        except ConfigError as error:
            console.print(f"[yellow]no TensorBoard files:[/] {terminal.escape_markup(str(error))}", highlight=False)
    if wandb:
        sinks.append(metrics.WeightsAndBiases(wandb, out.name, config))
    return sinks


def _bias(pacing: dict[str, Any] | None) -> str:
    """How long pacing waited, and the share of submitted sessions trained on, by duration."""
    if pacing is None:
        return ""
    text = f"; waited {pacing['withheld_seconds']:.1f} s for older groups" if pacing["groups_per_update"] else ""
    shares = ", ".join(f"{one['trained_share']:.0%}" for one in pacing["quartiles"])
    return text + (f"; trained share by duration quartile, fastest first: {shares}" if shares else "")


def _conclude(out: Path, fields: dict[str, Any], console: Console, as_json: bool) -> None:
    from towline.trainers.grpo import metrics

    lines = metrics.read_metrics(out)
    image: Path | None = out / "curves.png"
    try:
        metrics.draw_curves(lines, out / "curves.png", out.name)
    except ConfigError as error:
        image = None
        console.print(f"[yellow]no curves:[/] {terminal.escape_markup(str(error))}", highlight=False)
    if as_json:
        print(json.dumps({"out": str(out), "curves": str(image) if image else None, **fields}))
        return
    worst = max((line["worst_logprob"] for line in lines if "worst_logprob" in line), default=0.0)
    for one in fields["success"]:
        console.print(f"after {one['sessions_used']:>6,} sessions: {one['success']:.1%} on held-out tasks")
    console.print(f"max |learner - recorded| logprob over the run: {worst:.1e}", highlight=False)
    dropped = fields["last"]["dropped_groups"] if fields["last"] else 0
    console.print(f"stale groups dropped: {dropped:,}{_bias(fields['pacing'])}", highlight=False, soft_wrap=True)
    console.print(f"Written to {out}: metrics.jsonl, checkpoint{', curves.png' if image else ''}", highlight=False)
