"""`towline audit` and `towline bench`: proofs and figures. `towline demo` and `towline tiny`: a first look."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from towline.cli import common
from towline.errors import ConfigError

audit_app = typer.Typer(no_args_is_help=True, help="Prove what Towline promises.")
bench_app = typer.Typer(no_args_is_help=True, help="Measure what the README's figures come from.")


@audit_app.command("fidelity")
def audit_fidelity(
    out: Annotated[Path, typer.Option(help="Folder for rows (Arrow), models and the report.")] = Path("runs/audit"),
    conversations: Annotated[int, typer.Option(help="How many to play. Default 400.", min=1)] = 400,
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer or model folder of your own.")] = None,
    template: Annotated[Path | None, typer.Option(help="A chat template of your own.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of scripts and models. Default 0.")] = 0,
    mutations: Annotated[bool, typer.Option(help="Check that known faults are caught. Default on.")] = True,
    as_json: common.Json = False,
) -> None:
    """Play every harness behaviour; check prompts against an oracle and logprobs by a forward pass."""
    from towline import audit

    console = common.console(as_json)
    options = audit.AuditOptions(
        out=out,
        conversations=conversations,
        tokenizer=tokenizer,
        template=template,
        seed=seed,
        mutations=mutations,
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


@bench_app.command("pacing")
def bench_pacing(
    updates: Annotated[int | None, typer.Option(help="Updates of the trainer. Default 24.", min=4)] = None,
    seed: int = 0,
    as_json: common.Json = False,
) -> None:
    """Share of slow tasks among those trained on, paced and with old groups dropped, in one run."""
    from dataclasses import replace

    from towline.benchmarks import pacing

    plan = pacing.Plan(seed=seed)
    console = common.console(as_json)
    with common.reporting(console, "pacing") as report:
        result = pacing.run(plan if updates is None else replace(plan, updates=updates), report=report)
    if as_json:
        print(json.dumps(result))
    else:
        pacing.render(result, Console())
    raise typer.Exit(0 if all(result["within"].values()) else 1)


@bench_app.command("builders")
def bench_builders(
    steps: Annotated[int | None, typer.Option(help="Updates a run. Default 14.", min=1)] = None,
    questions: Annotated[
        int | None, typer.Option(help="Questions a session; two turns each. Default 6.", min=1)
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="`exact`, `merged`, `per_turn` or `as sent`. Repeatable; default all.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Seconds: to see that it runs.")] = False,
    seed: int = 0,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as the README has it.")] = False,
    as_json: common.Json = False,
) -> None:
    """Train the same run with each builder, and with an agent that drops reasoning: cost, fidelity and success."""
    from dataclasses import replace

    from towline.benchmarks import builders

    given = {"steps": steps, "questions": questions, "seed": seed}
    plan = replace(
        builders.QUICK if quick else builders.Plan(),
        **{name: value for name, value in given.items() if value is not None},
    )
    sides = [side for side in builders.SIDES if not only or side.name in only]
    if not sides:
        raise ConfigError(f"--only: there are {', '.join(dict.fromkeys(side.name for side in builders.SIDES))}")
    console = common.console(as_json or markdown)
    with common.reporting(console, "builders") as report:
        result = builders.run(plan, sides, report)
    if as_json:
        print(json.dumps(result))
    elif markdown:
        print(builders.markdown(result))
    else:
        builders.render(result, Console())


def demo(
    folder: Annotated[Path, typer.Option(help="Where trajectory, metrics and curves are written.")] = Path("runs/demo"),
    questions: Annotated[int, typer.Option(help="Questions of the session that is shown.", min=1)] = 4,
    steps: Annotated[int, typer.Option(help="Updates; 0 shows the one session and trains nothing.", min=0)] = 28,
    control: Annotated[
        bool, typer.Option("--control", help="Shuffle rewards within each group: there is nothing to learn.")
    ] = False,
    seed: int = 0,
    as_json: common.Json = False,
) -> None:
    """Close the loop on this machine: show one session and prove its record, then train a tiny model by GRPO.

    Takes five to ten minutes on two cores. Success on held-out questions rises from chance to over 90%; with `--control`
    it stays where it is.
    """
    from towline import demo as demonstration

    training = demonstration.Training(steps=steps, permute=control) if steps else None
    done = demonstration.run(
        common.console(as_json), folder=folder, questions=questions, seed=seed, training=training, as_json=as_json
    )
    raise typer.Exit(common.run(done))


def tiny(
    out: Annotated[Path | None, typer.Option(help="Folder to make. Default: the user's cache.")] = None,
    as_json: common.Json = False,
) -> None:
    """Make the tiny model: small vocabulary, random weights, a format warm-up of seconds."""
    folder = common.tiny(common.console(as_json), out)
    print(json.dumps({"folder": str(folder)}) if as_json else folder)
