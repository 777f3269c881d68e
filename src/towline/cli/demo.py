"""`towline demo` and `towline tiny`: a first look on one machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from towline.cli import engines, options, terminal


def demo(
    folder: Annotated[Path, typer.Option(help="Output folder of the trajectory, metrics and curves.")] = Path(
        "runs/demo"
    ),
    questions: Annotated[int, typer.Option(help="Questions of the session that is shown.", min=1)] = 4,
    steps: Annotated[int, typer.Option(help="Policy updates; 0 shows one session and trains nothing.", min=0)] = 28,
    control: Annotated[
        bool, typer.Option("--control", help="Shuffle rewards within each group, as a control. Default: off.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    as_json: options.Json = False,
) -> None:
    """Close the loop on this machine: prove one session, then train a tiny model.

    Takes five to ten minutes on two cores. Success on held-out questions rises from chance to over 90%; with `--control`
    it stays at chance.
    """
    from towline.demo.run import run
    from towline.demo.training import Training

    training = Training(steps=steps, permute=control) if steps else None
    done = run(
        terminal.console(as_json), folder=folder, questions=questions, seed=seed, training=training, as_json=as_json
    )
    raise typer.Exit(terminal.run_async(done))


def tiny(
    out: Annotated[Path | None, typer.Option(help="Folder to create. Default: the user's cache.")] = None,
    as_json: options.Json = False,
) -> None:
    """Create the tiny model: random weights and seconds of warm-up on the format."""
    folder = engines.tiny_model(terminal.console(as_json), out)
    print(json.dumps({"folder": str(folder)}) if as_json else folder)
