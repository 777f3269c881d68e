"""`towline audit` and `towline bench`: proofs and figures. `towline demo` and `towline tiny`: a first look."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from towline.cli import common

audit_app = typer.Typer(no_args_is_help=True, help="Prove what Towline promises.")
bench_app = typer.Typer(no_args_is_help=True, help="Measure what the README's figures come from.")


@audit_app.command("fidelity")
def audit_fidelity(
    out: Annotated[Path, typer.Option(help="Folder for rows (Arrow), models and the report.")] = Path("runs/audit"),
    conversations: Annotated[int, typer.Option(help="How many at least.", min=1)] = 300,
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer or model folder of your own.")] = None,
    template: Annotated[Path | None, typer.Option(help="A chat template of your own.")] = None,
    seed: int = 0,
    as_json: common.Json = False,
) -> None:
    """Run conversations with every harness behaviour and check each trained token with one forward pass."""
    from towline import audit

    console = common.console(as_json)
    options = audit.AuditOptions(
        out=out, conversations=conversations, tokenizer=tokenizer, template=template, seed=seed
    )
    with common.reporting(console, "audit") as report:
        result = common.run(audit.run(options, report))
    if as_json:
        print(json.dumps(result.as_json()))
    else:
        audit.render(result, console)
    raise typer.Exit(0 if result.ok else 1)


@bench_app.command("continue")
def bench_continue(
    repeats: Annotated[int, typer.Option(help="Measurements a point.", min=1)] = 20,
    as_json: common.Json = False,
) -> None:
    """CPU of the gateway for one continued turn, from a short history to a very long one."""
    from towline.benchmarks import continuing

    result = continuing.run(repeats=repeats)
    if as_json:
        print(json.dumps(result))
    else:
        continuing.render(result, Console())


@bench_app.command("load")
def bench_load(as_json: common.Json = False) -> None:
    """Turns a CPU second of the gateway under 64 conversations, beside full re-rendering in the same run."""
    from towline.benchmarks import load

    result = load.run()
    if as_json:
        print(json.dumps(result))
    else:
        load.render(result, Console())


def demo(
    folder: Annotated[Path, typer.Option(help="Where the trajectory is written.")] = Path("runs/demo"),
    questions: Annotated[int, typer.Option(help="Questions the example agent goes through.", min=1)] = 4,
    seed: int = 0,
    as_json: common.Json = False,
) -> None:
    """Serve the tiny model, run the example agent, show what was recorded and prove it."""
    from towline import demo as demonstration

    raise typer.Exit(
        common.run(
            demonstration.run(common.console(as_json), folder=folder, questions=questions, seed=seed, as_json=as_json)
        )
    )


def tiny(
    out: Annotated[Path | None, typer.Option(help="Folder to make. Default: the user's cache.")] = None,
    as_json: common.Json = False,
) -> None:
    """Make the tiny model: small vocabulary, random weights, a format warm-up of seconds."""
    folder = common.tiny(common.console(as_json), out)
    print(json.dumps({"folder": str(folder)}) if as_json else folder)
