"""`towline eval`: pass@k of a model with a harness, with confidence intervals, compared with an earlier run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from towline.cli import live, options, terminal
from towline.cli.tasks import load_tasks
from towline.common.text import visible
from towline.errors import ConfigError
from towline.runs import eval_report as report
from towline.runs.accept import Accept
from towline.schema import tally_suspicions


def evaluate(
    tasks: options.Tasks,
    harness: Annotated[
        list[str],
        typer.Option(help="Harness for tasks that name none; see `towline harness list`. Repeatable."),
    ],
    samples: options.Samples = 1,
    compare: Annotated[
        Path | None, typer.Option(help="Folder of an earlier run to compare with, task by task. Default: none.")
    ] = None,
    passing: Annotated[
        str, typer.Option("--pass", help="When a sample passes; the syntax of `towline generate --accept`.")
    ] = "reward >= 1",
    out: Annotated[
        Path | None,
        typer.Option(help="Output folder. Resumes if it already exists. Default: runs/eval-TIME."),
    ] = None,
    max_failed: options.MaxFailed = 0.0,
    option: options.HarnessOptions = None,
    trust: options.Trust = None,
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
    """Measure pass@1 and pass@k by task and harness, with confidence intervals.

    Sessions run as they do in training: same gateway, context policy and sampling settings. Infrastructure failures are
    not scored and are counted by reason; exits with status 1 if they exceed `--max-failed`.
    """
    from towline.runs.dataset import accept_values
    from towline.runs.ledger import tally_failures

    console = terminal.console(as_json)
    rule = Accept.parse(passing)
    earlier = report.EvalReport.read(compare) if compare is not None else None
    folder = (out or Path("runs") / time.strftime("eval-%Y%m%d-%H%M%S")).absolute()
    if len(set(harness)) != len(harness):
        raise ConfigError("a --harness is given twice; give each one once")
    settings = options.local_settings(locals(), folder, journal="none")
    loaded = {
        name: load_tasks(tasks, name, samples, option or [], console, trust=trust, settings=settings)
        for name in harness
    }
    for name, own in loaded.items():
        others = {task.harness for task in own} - {name}
        if len(harness) > 1 and others:
            raise ConfigError(f"some tasks name their own harness ({min(others)}); give only one --harness with them")
    groups = [*loaded.values()]
    with live.completed_ledger(groups, settings, folder, console, script, live=not as_json) as (ledger, recipe):
        records = [record for own in groups for record in ledger.of(own)]
    made = report.EvalReport(
        recipe=recipe,
        samples=samples,
        passing=rule.text,
        harnesses=report.tally_samples(records, lambda record: rule(accept_values(record))),
    )
    made.write(folder)
    compared = report.compare(earlier, made) if earlier is not None else None
    failures = tally_failures(records)
    shown: dict[str, Any] = {"out": str(folder), **report.pass_metrics(made), "failures": failures.as_json()}
    shown["suspicion"] = tally_suspicions(records)
    if compared is not None:
        shown["compared"] = compared.as_json()
    if as_json:
        print(json.dumps(shown))
    else:
        _show(made, compared, folder, console)
        if shown["suspicion"]:
            console.print(terminal.suspicion_line(shown["suspicion"]), highlight=False)
    terminal.exit_on_failures(failures, max_failed)


def _show(made: report.EvalReport, compared: report.EvalComparison | None, folder: Path, console: Console) -> None:
    metrics = report.pass_metrics(made)
    # The values of k in between are in the file.
    names = list(dict.fromkeys(("pass@1", f"pass@{made.samples}")))
    for harness, tasks in made.harnesses.items():
        own = metrics["harnesses"][harness]
        table = Table(box=None, header_style="bold", pad_edge=False)
        table.add_column(Text(visible(harness)), overflow="fold")
        for name in ("samples", "passed", *names):
            table.add_column(name, justify="right", no_wrap=True)
        for task, one in sorted(tasks.items()):
            task_metrics = own["tasks"][task]
            values = [_interval(task_metrics["pass@1"]), *(_share(task_metrics[name]) for name in names[1:])]
            table.add_row(Text(visible(task)), str(one.n), str(one.passed), *values)
        passed = sum(one.passed for one in tasks.values())
        values = [_interval(own[name]) for name in names]
        table.add_row("[bold]all[/]", str(own["samples"]), str(passed), *values)
        console.print(table)
    totals = metrics["all"]
    if totals["failed"] or totals["unscored"]:
        console.print(
            f"[yellow]not counted:[/] {totals['failed']} infrastructure failures, {totals['unscored']} unscored"
        )
    if compared is not None:
        _show_comparison(compared, console)
    console.print(f"Intervals: {metrics['interval']}. Written to {folder}/{report.FILE}", highlight=False)


def _show_comparison(compared: report.EvalComparison, console: Console) -> None:
    console.print("\n[bold]compared with the earlier run[/] (paired by task, bootstrap over tasks, 95 %)")
    for harness, by_k in compared.differences.items():
        if harness == "all" and len(compared.differences) == 2:
            continue
        for name, one in by_k.items():
            if one is not None:
                sign = "green" if one.low > 0 else "red" if one.high < 0 else "dim"
                console.print(
                    f"  {harness:16} {name:8} [{sign}]{one.value:+.3f}[/]  {one.low:+.3f} to {one.high:+.3f}   "
                    f"{one.better} better, {one.worse} worse of {one.tasks}",
                    highlight=False,
                )
    for line in compared.settings:
        console.print(f"  [yellow]settings differ:[/] {terminal.escape_markup(line)}", highlight=False)
    if compared.only_earlier or compared.only_later:
        console.print(
            f"  tasks not compared: {compared.only_earlier} only in the earlier run, {compared.only_later} only in this one"
        )


def _interval(found: dict[str, float] | None) -> str:
    return "-" if found is None else f"{found['value']:.2f} ({found['low']:.2f}-{found['high']:.2f})"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
