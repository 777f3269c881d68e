"""`towline generate`: sessions that are good enough, as a dataset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from towline.cli import common, engines, work
from towline.cli.loading import load_tasks, make_ready
from towline.datasets import card
from towline.datasets.accept import Accept
from towline.datasets.duplicates import Duplicates
from towline.datasets.writing import Format, write


def generate(
    tasks: work.Tasks,
    harness: Annotated[
        str,
        typer.Option(help="The agent program of tasks that name none; see `towline harness list`."),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the dataset; one that was begun is gone on with.")],
    samples: work.Samples = 1,
    accept: Annotated[
        str, typer.Option(help="Which sessions are kept, over reward, turns, end_reason, components.x and more.")
    ] = "reward >= 1",
    formats: Annotated[
        list[Format] | None, typer.Option("--format", help="What is written. Repeatable; default all.")
    ] = None,
    duplicates: Annotated[
        Duplicates,
        typer.Option(help="A session is a duplicate if the same tokens were sampled, if all is the same, or never."),
    ] = Duplicates.TRAINED,
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
    """Run tasks, keep the sessions that are good enough, and write them as a dataset.

    Interrupted, or killed, the same command goes on where it was: samples that finished are not run again. Another
    `--accept`, `--format` or `--duplicates` over a finished folder writes the dataset anew without running anything.
    """
    from towline import resuming
    from towline.ledger import Ledger, failures_of

    console, out = common.console(as_json), out.absolute()
    rule = Accept.parse(accept)
    loaded = load_tasks(tasks, harness, samples, option or [], console)
    settings = work.settings_of(
        config,
        out,
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
    make_ready(loaded, settings, console)
    common.log(console)
    gateway, codec = engines.make_gateway(settings, console, script)
    recipe = resuming.recipe_of(settings, gateway.model, codec.name) | engines.script_recipe(gateway)
    with Ledger(out, recipe) as ledger:
        common.run(work.fill(gateway, settings, [loaded], ledger, console, live=not as_json))
        chosen = formats or list(Format)
        with common.reporting(console, "writing") as report:
            written = write(ledger, loaded, rule, formats=chosen, duplicates=duplicates, told=report)
        used = {**recipe, "harness": harness, "accept": rule.text, "duplicates": duplicates.value, "tasks": tasks}
        failures = failures_of(ledger.of(loaded))
        told = card.figures(written, attempts=ledger.attempts(), hours=ledger.hours(), recipe=used)
    told["failures"] = failures.as_json()
    card.write(out, told, chosen)
    if as_json:
        print(json.dumps({"out": str(out), **told}))
    else:
        _show(told, out, console)
    common.exit_on_failures(failures, max_failed)


def _show(told: dict[str, Any], out: Path, console: Console) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column("")
    table.add_column("", justify="right")
    for name in ("samples", "accepted", "rejected", "duplicates", "unusable", "failed", "rows", "trained_tokens"):
        table.add_row(name.replace("_", " "), f"{told[name]:,}")
    table.add_row("hours", f"{told['hours']:.2f}")
    console.print(table)
    console.print(f"Written to {out}; its card is {out}/README.md", highlight=False)
