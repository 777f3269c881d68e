"""`towline generate`: run tasks and write the accepted sessions as a dataset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from towline.cli import live, options, terminal
from towline.cli.tasks import load_tasks
from towline.runs.accept import Accept
from towline.runs.dataset import DatasetFormat, DuplicateRule, card_fields, write_card, write_dataset


def generate(
    tasks: options.Tasks,
    harness: options.RequiredHarness,
    out: Annotated[Path, typer.Option(help="Dataset folder. Resumes if it already exists.")],
    samples: options.Samples = 1,
    accept: Annotated[
        str, typer.Option(help="Sessions to keep, by reward, turns, end_reason, components.x and more.")
    ] = "reward >= 1",
    formats: Annotated[
        list[DatasetFormat] | None, typer.Option("--format", help="Format to write. Repeatable. Default: all.")
    ] = None,
    duplicates: Annotated[
        DuplicateRule,
        typer.Option(help="Drop duplicates by sampled tokens, by all tokens, or keep all."),
    ] = DuplicateRule.TRAINED,
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
    """Run tasks and write the accepted sessions as a dataset.

    Run the same command again to resume after an interruption or a crash: finished samples are not run again. With a
    finished folder, another `--accept`, `--format` or `--duplicates` rewrites the dataset without running anything.
    """
    from towline.runs.ledger import tally_failures

    console, out = terminal.console(as_json), out.absolute()
    rule = Accept.parse(accept)
    settings = options.local_settings(locals(), out, journal="none")
    loaded = load_tasks(tasks, harness, samples, option or [], console, trust=trust, settings=settings)
    chosen = formats or list(DatasetFormat)
    with live.completed_ledger([loaded], settings, out, console, script, live=not as_json) as (ledger, recipe):
        with terminal.progress_reporter(console, "writing") as report:
            stats = write_dataset(ledger, loaded, rule, formats=chosen, duplicates=duplicates, on_progress=report)
        used = {**recipe, "harness": harness, "accept": rule.text, "duplicates": duplicates.value, "tasks": tasks}
        failures = tally_failures(ledger.of(loaded))
        card = card_fields(stats, attempts=ledger.attempts(), hours=ledger.hours(), recipe=used)
    card["failures"] = failures.as_json()
    write_card(out, card, chosen)
    if as_json:
        print(json.dumps({"out": str(out), **card}))
    else:
        _show(card, out, console)
    terminal.exit_on_failures(failures, max_failed)


def _show(card: dict[str, Any], out: Path, console: Console) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column("")
    table.add_column("", justify="right")
    for name in ("samples", "accepted", "rejected", "duplicates", "unusable", "failed", "rows", "trained_tokens"):
        table.add_row(name.replace("_", " "), f"{card[name]:,}")
    table.add_row("hours", f"{card['hours']:.2f}")
    console.print(table)
    console.print(f"Written to {out}; the dataset card is {out}/README.md", highlight=False)
