"""`towline eval`: pass@k of a model with a harness, with intervals, beside an earlier run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from towline.cli import common, engines, work
from towline.cli.loading import load_tasks, make_ready
from towline.datasets.accept import Accept
from towline.errors import ConfigError
from towline.evaluation import report
from towline.view import visible


def evaluate(
    tasks: work.Tasks,
    harness: Annotated[
        list[str],
        typer.Option(help="The agent program of tasks that name none; see `towline harness list`. Repeatable."),
    ],
    samples: work.Samples = 1,
    compare: Annotated[
        Path | None, typer.Option(help="The folder of an earlier run: the difference is paired by task.")
    ] = None,
    passing: Annotated[
        str, typer.Option("--pass", help="What a sample passes by, as in `towline generate --accept`.")
    ] = "reward >= 1",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the run; one that was begun is gone on with. Default: runs/eval-TIME."),
    ] = None,
    max_failed: common.MaxFailed = 0.0,
    option: work.Option = None,
    sandbox: work.Sandbox = None,
    concurrency: work.Concurrency = None,
    seconds: work.Seconds = None,
    model: common.ModelFolder = None,
    engine: common.EngineName = None,
    upstream: common.Upstream = None,
    upstream_model: common.UpstreamModel = None,
    script: common.Script = None,
    policy: work.Policy = None,
    temperature: common.Temperature = None,
    max_tokens: common.MaxTokens = None,
    config: common.Config = None,
    as_json: common.Json = False,
) -> None:
    """Measure pass@1 and pass@k over tasks, with confidence intervals, by task and harness.

    Sessions run as they do in training: the same gateway, context policy and sampling settings. Infrastructure failures
    leave the tally and are counted by reason. Exit status 1 if they exceed `--max-failed`.
    """
    from towline import resuming
    from towline.datasets.writing import values_of
    from towline.ledger import Ledger, failures_of

    console = common.console(as_json)
    rule = Accept.parse(passing)
    earlier = report.Evaluation.read(compare) if compare is not None else None
    folder = (out or Path("runs") / time.strftime("eval-%Y%m%d-%H%M%S")).absolute()
    if len(set(harness)) != len(harness):
        raise ConfigError("a --harness is named twice")
    loaded = {name: load_tasks(tasks, name, samples, option or [], console) for name in harness}
    for name, own in loaded.items():
        others = {task.harness for task in own} - {name}
        if len(harness) > 1 and others:
            raise ConfigError(f"tasks that name a harness of their own ({min(others)}) take one --harness only")
    settings = work.settings_of(
        config,
        folder,
        model=model,
        engine=engine,
        upstream=upstream,
        upstream_model=upstream_model,
        policy=policy,
        temperature=temperature,
        max_tokens=max_tokens,
        sandbox=sandbox,
        concurrency=concurrency,
        seconds=seconds,
    )
    make_ready([task for own in loaded.values() for task in own], settings, console)
    common.log(console)
    gateway, codec = engines.make_gateway(settings, console, script)
    recipe = resuming.recipe_of(settings, gateway.model, codec.name) | engines.script_recipe(gateway)
    with Ledger(folder, recipe) as ledger:
        common.run(work.fill(gateway, settings, [*loaded.values()], ledger, console, live=not as_json))
        found = [sample for own in loaded.values() for sample in ledger.of(own)]
    made = report.Evaluation(
        recipe=recipe,
        samples=samples,
        passing=rule.text,
        harnesses=report.tally(found, lambda sample: rule(values_of(sample))),
    )
    made.write(folder)
    compared = report.compare(earlier, made) if earlier is not None else None
    failures = failures_of(found)
    told: dict[str, Any] = {"out": str(folder), **report.figures(made), "failures": failures.as_json()}
    if compared is not None:
        told["compared"] = compared.as_json()
    if as_json:
        print(json.dumps(told))
    else:
        _show(made, compared, folder, console)
    common.exit_on_failures(failures, max_failed)


def _show(made: report.Evaluation, compared: report.Comparison | None, folder: Path, console: Console) -> None:
    told = report.figures(made)
    # Those between are in the file.
    names = list(dict.fromkeys(("pass@1", f"pass@{made.samples}")))
    for harness, tasks in made.harnesses.items():
        figures = told["harnesses"][harness]
        table = Table(box=None, header_style="bold", pad_edge=False)
        table.add_column(Text(visible(harness)), overflow="fold")
        for name in ("samples", "passed", *names):
            table.add_column(name, justify="right", no_wrap=True)
        for task, one in sorted(tasks.items()):
            own = figures["tasks"][task]
            values = [_interval(own["pass@1"]), *(_share(own[name]) for name in names[1:])]
            table.add_row(Text(visible(task)), str(one.n), str(one.passed), *values)
        passed = sum(one.passed for one in tasks.values())
        values = [_interval(figures[name]) for name in names]
        table.add_row("[bold]all[/]", str(figures["samples"]), str(passed), *values)
        console.print(table)
    whole = told["all"]
    if whole["failed"] or whole["unscored"]:
        console.print(
            f"[yellow]not counted:[/] {whole['failed']} failed (infrastructure), {whole['unscored']} without a score"
        )
    if compared is not None:
        _show_comparison(compared, console)
    console.print(f"Intervals: {told['interval']}. Written to {folder}/{report.FILE}", highlight=False)


def _show_comparison(compared: report.Comparison, console: Console) -> None:
    console.print("\n[bold]against the earlier run[/] (paired by task, bootstrap over tasks, 95 %)")
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
        console.print(f"  [yellow]not the same in both:[/] {common.plain(line)}", highlight=False)
    if compared.only_earlier or compared.only_later:
        console.print(f"  tasks left out: {compared.only_earlier} only earlier, {compared.only_later} only now")


def _interval(found: dict[str, float] | None) -> str:
    return "-" if found is None else f"{found['value']:.2f} ({found['low']:.2f}-{found['high']:.2f})"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
