"""`towline run`: tasks and a harness in, scored and token-exact trajectories out."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from towline import rollout
from towline.cli import common, engines
from towline.cli.loading import load_tasks, make_ready
from towline.config import Settings
from towline.errors import ConfigError
from towline.schema import ContextPolicy, SandboxKind, Session, SessionState, Task

if TYPE_CHECKING:
    from towline.gateway.gateway import Gateway
    from towline.node.pipeline import Finished, Node

_STAGES = tuple(state for state in SessionState if not state.terminal)
_COLOURS = {"done": "green", "failed": "red", "cancelled": "yellow", "lost": "red"}


def run(
    tasks: Annotated[
        list[str],
        typer.Argument(help="Harbor task folders (or folders of them), or JSONL files of tasks.", metavar="TASK…"),
    ],
    harness: Annotated[
        str,
        typer.Option(
            help="The agent program of tasks that name none: a name of `towline harness list`, or `module:NAME`."
        ),
    ] = "",
    samples: Annotated[int | None, typer.Option(help="Sessions a task. Default: what the task says.", min=1)] = None,
    min_samples: Annotated[
        int | None, typer.Option(help="Usable sessions that are enough; the rest are cancelled.", min=1)
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="An option of the harness, `name=value`; the value may be JSON. Repeatable."),
    ] = None,
    oracle: Annotated[
        bool, typer.Option("--oracle", help="Run each task's own solution instead of an agent; it must score 1.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the results. Default: runs/TIME.")] = None,
    sandbox: Annotated[SandboxKind | None, typer.Option(help="Where tasks run that do not say.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Sessions that run at the same time.", min=1)] = None,
    seconds: Annotated[float | None, typer.Option(help="Longest run of a task that does not say.")] = None,
    model: common.ModelFolder = None,
    engine: common.EngineName = None,
    upstream: common.Upstream = None,
    upstream_model: common.UpstreamModel = None,
    script: common.Script = None,
    policy: Annotated[ContextPolicy | None, typer.Option(help="Context policy of the sessions.")] = None,
    temperature: common.Temperature = None,
    max_tokens: common.MaxTokens = None,
    config: common.Config = None,
    as_json: common.Json = False,
) -> None:
    """Run tasks with a harness in sandboxes; give scored, token-exact trajectories.

    Every session runs in a sandbox of its own, whose only network is the gateway. Exit status 1 if a session failed, or
    with `--oracle` if one did not score 1.
    """
    from towline.tasks.oracle import oracle as oracle_of

    console = common.console(as_json)
    out = out or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    settings = Settings.load(
        config,
        gateway={"port": 0, "control_port": 0, "data": out},
        model={"folder": model},
        engine=engines.given(engine or ("scripted" if oracle else None), upstream, upstream_model),
        session=common.session(policy, temperature, max_tokens),
        node={
            "sandbox": sandbox,
            "run_workers": concurrency,
            "seconds": {"run": seconds} if seconds is not None else None,
        },
    )
    loaded = load_tasks(tasks, harness, samples, option or [], console)
    if oracle:
        loaded = [oracle_of(task) for task in loaded]
    if min_samples is not None:
        loaded = [Task.model_validate(task.__dict__ | {"min_samples": min_samples}) for task in loaded]
    if (out / "results.jsonl").exists():
        raise ConfigError(f"{out} holds a run already; choose another --out")
    make_ready(loaded, settings, console)
    common.log(console)
    out.mkdir(parents=True, exist_ok=True)
    gateway, _ = engines.make_gateway(settings, console, script)
    results = common.run(_run(gateway, settings, loaded, out, console, live=not as_json))
    if as_json:
        print(
            json.dumps(
                {"out": str(out), **rollout.summary(results), "results": [*map(rollout.line_of, results.finished)]}
            )
        )
    else:
        _show(results, out, console)
    good = all(one.session.state is SessionState.DONE for one in results.finished)
    if oracle:
        good = all(one.trajectory.reward is not None and one.trajectory.reward.score == 1 for one in results.finished)
    raise typer.Exit(0 if good and results.finished else 1)


async def _run(
    gateway: Gateway, settings: Settings, tasks: list[Task], out: Path, console: Console, *, live: bool
) -> rollout.Results:
    view = Progressing(sum(task.num_samples for task in tasks), gateway)
    async with rollout.node_on(gateway, settings, out, changed=view.changed) as node:
        view.node = node
        work = asyncio.ensure_future(rollout.run_tasks(node, tasks, out, view.finished))
        loop = asyncio.get_running_loop()
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(name, work.cancel)
        with Live(get_renderable=view.render, console=console, refresh_per_second=4, transient=True) as display:
            if not live:
                display.stop()
            try:
                return await work
            except asyncio.CancelledError:
                raise ConfigError(f"interrupted; what had finished is in {out}") from None


class Progressing:
    """The live display: where the sessions are, what they earned, how fast tokens come."""

    def __init__(self, total: int, gateway: Gateway):
        self.gateway = gateway
        self.node: Node | None = None
        self.states: dict[str, SessionState] = {}
        self.rewards: list[float] = []
        self.ended: Counter[str] = Counter()
        self.sampled = 0
        self.began = time.monotonic()
        self.bar = Progress(
            TextColumn("[bold]sessions"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), transient=True
        )
        self.task = self.bar.add_task("", total=total)

    def changed(self, session: Session) -> None:
        if session.state.terminal:
            self.states.pop(session.session_id, None)
        else:
            self.states[session.session_id] = session.state

    def finished(self, one: Finished) -> None:
        self.bar.advance(self.task)
        self.ended[one.session.state.value] += 1
        self.sampled += sum(len(turn.sampled) for turn in one.trajectory.turns)
        if one.trajectory.reward is not None and one.trajectory.reward.score is not None:
            self.rewards.append(one.trajectory.reward.score)

    def render(self) -> RenderableType:
        at = Counter(self.states.values())
        stages = Text("  ")
        for stage in _STAGES:
            stages.append(f"{stage.value} ", "dim").append(f"{at[stage]}  ", "bold" if at[stage] else "dim")
        for state, count in sorted(self.ended.items()):
            stages.append(f"{state} {count}  ", _COLOURS.get(state, ""))
        sampled = self.sampled + sum(session.sampled_tokens for session in self.gateway.sessions.values())
        rate = sampled / max(1e-6, time.monotonic() - self.began)
        figures = Text(f"  {sampled:,} tokens sampled, {rate:,.0f}/s")
        if self.rewards:
            figures.append(f"   mean reward {sum(self.rewards) / len(self.rewards):.3f} of {len(self.rewards)} scored")
        return Group(self.bar, stages, figures)


def _show(results: rollout.Results, out: Path, console: Console) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("task", overflow="fold", min_width=20)
    for name in ("runs", "usable", "reward", "turns", "tokens", "run s", "eval s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("ended")
    for name, group in sorted(results.by_task().items()):
        lines = [rollout.line_of(one) for one in group]
        scores = [line["reward"] for line in lines if line["reward"] is not None]
        ended = Counter(line["end_reason"] or line["state"] for line in lines)
        table.add_row(
            name,
            str(len(lines)),
            str(sum(one.usable for one in group)),
            f"{sum(scores) / len(scores):.2f}" if scores else "-",
            str(sum(line["turns"] for line in lines)),
            f"{sum(line['trained_tokens'] for line in lines):,}",
            f"{_mean(lines, 'run'):.1f}",
            f"{_mean(lines, 'evaluate'):.1f}",
            ", ".join(ended if len(ended) == 1 else (f"{reason} {count}" for reason, count in ended.items())),
        )
    console.print(table)
    for one in results.finished:
        line = rollout.line_of(one)
        if line["error"] and (line["state"] != "done" or line["reward_status"] == "failed"):
            console.print(f"[red]{line['session_id']}:[/] {common.plain(str(line['error']))}", highlight=False)
        for note in line["notes"]:
            console.print(f"[yellow]{line['session_id']}:[/] {common.plain(str(note))}", highlight=False)
    console.print(f"Written to {out}. Look at one: towline trace {out}/trajectories/<session>.arrow", highlight=False)


def _mean(lines: list[dict[str, Any]], stage: str) -> float:
    found = [line["timings"][stage] for line in lines if stage in line["timings"]]
    return sum(found) / len(found) if found else 0.0
