"""`towline run`: tasks and a harness in, scored and token-exact trajectories out."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from towline.cli import engines, live, options, terminal
from towline.cli.tasks import load_tasks, prepare_tasks
from towline.errors import ConfigError
from towline.runs import run as runs
from towline.runs.run import RunResults, run_summary, session_line
from towline.schema import EarlyStop, SessionState, Task
from towline.schema.trust import parse_grants


def run(
    tasks: options.Tasks,
    harness: options.Harness = "",
    samples: options.OptionalSamples = None,
    min_samples: Annotated[
        int | None, typer.Option(help="Usable sessions per task; the rest is stopped. Default: all.", min=1)
    ] = None,
    grace: Annotated[
        float | None,
        typer.Option(help="Seconds that the rest may continue after --min-samples. Default: the task's.", min=0),
    ] = None,
    option: options.HarnessOptions = None,
    trust: options.Trust = None,
    oracle: Annotated[
        bool, typer.Option("--oracle", help="Run each task's own solution; all must score 1. Default: off.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Output folder. Default: runs/TIME.")] = None,
    sandbox: options.Sandbox = None,
    concurrency: options.Concurrency = None,
    seconds: options.Seconds = None,
    model: options.ModelFolder = None,
    engine: options.EngineName = None,
    upstream: options.Upstream = None,
    upstream_model: options.UpstreamModel = None,
    script: options.Script = None,
    policy: options.Policy = None,
    temperature: options.Temperature = None,
    max_tokens: options.MaxTokens = None,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Run tasks with a harness in sandboxes; write scored, token-exact trajectories.

    Every session runs in its own sandbox, whose only network is the gateway. Exits with status 1 if a session failed, or
    with `--oracle` if one did not score 1.
    """
    from towline.tasks.oracle import oracle_task as oracle_of

    console = terminal.console(as_json)
    out = out or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    settings = options.local_settings(locals(), out, engine="scripted" if oracle else None)
    loaded = load_tasks(tasks, harness, samples, option or [], console, trust=trust, settings=settings)
    if oracle:
        loaded = [oracle_of(task, parse_grants(trust or ())) for task in loaded]
    changes = {"min_samples": min_samples, "grace_seconds": grace}
    changes = {name: value for name, value in changes.items() if value is not None}
    if changes:
        loaded = [Task.model_validate(task.__dict__ | changes) for task in loaded]
    if (out / "results.jsonl").exists():
        raise ConfigError(f"{out} already holds a run; choose another --out")
    prepare_tasks(loaded, settings, console)
    terminal.configure_logging(console)
    out.mkdir(parents=True, exist_ok=True)
    gateway, _ = engines.make_gateway(settings, console, script)
    display = live.SessionsDisplay(sum(task.num_samples for task in loaded), gateway)

    async def work() -> RunResults:
        async with runs.local_node(gateway, settings, out, changed=display.changed) as node:
            running = runs.run_tasks(node, loaded, out, display.finished)
            return await live.run_with_display(running, display, out, console, live=not as_json, resumes=False)

    results: RunResults = terminal.run_async(work())
    if as_json:
        lines = [*map(session_line, results.finished)]
        print(json.dumps({"out": str(out), **run_summary(results), "results": lines}))
    else:
        _show(results, out, console)
    good = all(one.session.state is SessionState.DONE or one.cut for one in results.finished)
    if oracle:
        good = all(one.trajectory.reward is not None and one.trajectory.reward.score == 1 for one in results.finished)
    raise typer.Exit(0 if good and results.finished else 1)


def _show(results: RunResults, out: Path, console: Console) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("task", overflow="fold", min_width=20)
    for name in ("runs", "usable", "reward", "turns", "tokens", "run s", "eval s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("ended")
    for name, group in sorted(results.by_task().items()):
        lines = [session_line(one) for one in group]
        scores = [line["reward"] for line in lines if line["reward"] is not None]
        ended = Counter(line["end_reason"] or line["state"] for line in lines)
        table.add_row(
            name,
            str(len(lines)),
            str(sum(line["usable"] for line in lines)),
            f"{sum(scores) / len(scores):.2f}" if scores else "-",
            str(sum(line["turns"] for line in lines)),
            f"{sum(line['trained_tokens'] for line in lines):,}",
            f"{_mean(lines, 'run'):.1f}",
            f"{_mean(lines, 'evaluate'):.1f}",
            ", ".join(ended if len(ended) == 1 else (f"{reason} {count}" for reason, count in ended.items())),
        )
    console.print(table)
    for one in results.finished:
        line = session_line(one)
        if line["error"] and (line["state"] != "done" or line["reward_status"] == "failed"):
            console.print(
                f"[red]{line['session_id']}:[/] {terminal.escape_markup(str(line['error']))}", highlight=False
            )
        for note in line["notes"]:
            console.print(f"[yellow]{line['session_id']}:[/] {terminal.escape_markup(str(note))}", highlight=False)
        for found in line["suspicion"]:
            said = terminal.escape_markup(f"{found['name']}: {found['detail']}")
            console.print(f"[magenta]{line['session_id']}: suspicious:[/] {said}", highlight=False)
    suspicion = run_summary(results)["suspicion"]
    if suspicion:
        console.print(terminal.suspicion_line(suspicion), highlight=False)
    for text in early_stop_lines(results.early_stop()):
        console.print(text, highlight=False)
    console.print(f"Written to {out}. To show one: towline trace {out}/trajectories/<session>.arrow", highlight=False)


def early_stop_lines(report: EarlyStop | None) -> list[str]:
    """What stopping groups early cut, saved and favours, in a few lines; none if nothing was cut."""
    if report is None:
        return []
    outlasted = "outlasted every finished session of their task: what that saved is unknown"
    if report.saved_seconds is None:
        saved = f"All {outlasted}."
    else:
        saved = f"Run time saved, estimated from longer siblings: {report.saved_seconds:.1f} s."
        saved += f" {report.unestimated} {outlasted}." if report.unestimated else ""
    lines = [
        f"Early stop: {report.cut} sessions cut ({report.not_started} before their run) after {report.cut_seconds:.1f} s "
        f"of run time. {saved}"
    ]
    finished, so_far = report.finished, report.so_far
    if finished.sessions and so_far.sessions:
        pairs = (
            f"{name} {left:.1f} and {right:.1f}"
            for name, left, right in (
                ("turns", finished.turns or 0, so_far.turns or 0),
                ("trained tokens", finished.trained_tokens or 0, so_far.trained_tokens or 0),
                ("run s", finished.seconds or 0, so_far.seconds or 0),
            )
        )
        lines.append(f"  Mean length of finished sessions and of cut ones, as far as they got: {', '.join(pairs)}.")
    if report.favours_short:
        lines.append("  [yellow]Cut sessions were longer already: early stop favours short ones. Raise --grace.[/]")
    return lines


def _mean(lines: list[dict[str, Any]], stage: str) -> float:
    found = [line["timings"][stage] for line in lines if stage in line["timings"]]
    return sum(found) / len(found) if found else 0.0
