"""`towline bench`: measure the numbers that the README reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from towline.cli import options, terminal
from towline.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Measure the numbers that the README reports.")


@app.command("continue")
def bench_continue(
    repeats: Annotated[int, typer.Option(help="Measurements per point.", min=1)] = 20,
    as_json: options.Json = False,
) -> None:
    """Measure gateway CPU per continued turn, from short to very long histories."""
    from towline.benchmarks import continuation

    result = continuation.run(repeats=repeats)
    if as_json:
        print(json.dumps(result))
    else:
        continuation.render(result, terminal.console(False))


@app.command("load")
def bench_load(as_json: options.Json = False) -> None:
    """Measure gateway turns per CPU second, compared with full re-rendering."""
    from towline.benchmarks import load

    result = load.run()
    if as_json:
        print(json.dumps(result))
    else:
        load.render(result, terminal.console(False))


@app.command("planes")
def bench_planes(
    sessions: Annotated[int | None, typer.Option(help="Sessions per node host. Default: 24.", min=1)] = None,
    turns: Annotated[int | None, typer.Option(help="Turns per session. Default: 60.", min=1)] = None,
    as_json: options.Json = False,
) -> None:
    """Measure two node hosts against one, and the API beside a busy node."""
    from dataclasses import replace

    from towline.benchmarks import planes

    given = {"sessions": sessions, "turns": turns}
    plan = replace(planes.PlanesPlan(), **{name: value for name, value in given.items() if value is not None})
    console = terminal.console(as_json)
    result = planes.run(plan, lambda message: console.print(f"measuring: {message}", style="dim"))
    if as_json:
        print(json.dumps(result))
    else:
        planes.render(result, console)
    raise typer.Exit(0 if all(result["within"].values()) else 1)


@app.command("pacing")
def bench_pacing(
    updates: Annotated[int | None, typer.Option(help="Updates of the trainer. Default: 24.", min=4)] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    as_json: options.Json = False,
) -> None:
    """Measure the share of slow tasks trained on, paced and with stale groups dropped."""
    from dataclasses import replace

    from towline.benchmarks import pacing

    plan = pacing.PacingPlan(seed=seed)
    console = terminal.console(as_json)
    with terminal.progress_reporter(console, "pacing") as report:
        result = pacing.run(plan if updates is None else replace(plan, updates=updates), progress=report)
    if as_json:
        print(json.dumps(result))
    else:
        pacing.render(result, terminal.console(False))
    raise typer.Exit(0 if all(result["within"].values()) else 1)


@app.command("simulation")
def bench_simulation(
    nodes: Annotated[int, typer.Option(help="Simulated nodes. Default: 200.", min=1)] = 200,
    sessions: Annotated[int, typer.Option(help="Sessions that updates use. Default: 20000.", min=1)] = 20_000,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    max_staleness: Annotated[int, typer.Option(help="Staleness limit, in versions. Default: 4.", min=0)] = 4,
    plot: Annotated[Path | None, typer.Option(help="Write a plot to this PNG file. Default: none.")] = None,
    as_json: options.Json = False,
) -> None:
    """Simulate scheduling on many nodes: utilisation, queueing, cost per decision."""
    from towline.benchmarks.simulation import report
    from towline.benchmarks.simulation.collection import SimulationPlan
    from towline.benchmarks.simulation.run import run

    console = terminal.console(as_json)
    with terminal.progress_reporter(console, "simulation") as told:
        plan = SimulationPlan(nodes=nodes, sessions=sessions, seed=seed, max_staleness=max_staleness)
        result = run(plan, progress=told)
    if plot is not None:
        report.plot(result, plot)
    if as_json:
        print(json.dumps(result))
    else:
        report.render(result, terminal.console(False))


@app.command("builders")
def bench_builders(
    steps: Annotated[int | None, typer.Option(help="Updates per run. Default: 14.", min=1)] = None,
    questions: Annotated[
        int | None, typer.Option(help="Questions per session, two turns each. Default: 6.", min=1)
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="`exact`, `merged`, `per_turn` or `as sent`. Repeatable. Default: all.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Finish in seconds, to see that it runs. Default: off.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of the README. Default: off.")] = False,
    as_json: options.Json = False,
) -> None:
    """Train the same run with each builder; compare cost, fidelity and success."""
    from dataclasses import replace

    from towline.benchmarks import builders

    given = {"steps": steps, "questions": questions, "seed": seed}
    plan = replace(
        builders.QUICK_PLAN if quick else builders.AblationPlan(),
        **{name: value for name, value in given.items() if value is not None},
    )
    sides = [side for side in builders.RUNS if not only or side.name in only]
    if not sides:
        raise ConfigError(
            f"unknown --only; choose among {', '.join(dict.fromkeys(side.name for side in builders.RUNS))}"
        )
    console = terminal.console(as_json or markdown)
    with terminal.progress_reporter(console, "builders") as report:
        result = builders.run(plan, sides, report)
    if as_json:
        print(json.dumps(result))
    elif markdown:
        print(builders.markdown(result))
    else:
        builders.render(result, terminal.console(False))
