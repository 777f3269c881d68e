"""`towline trace`: show a trajectory."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from towline.cli import options, terminal
from towline.errors import ConfigError
from towline.schema import Trajectory


def trace(
    what: Annotated[str, typer.Argument(help="Trajectory file (.arrow or .json), or session id.")],
    data: Annotated[Path, typer.Option(help="Data folder of the gateway, for session ids.")] = Path("towline-data"),
    model: Annotated[
        Path | None, typer.Option(help="Model folder to decode tokens with. Default: the recorded one.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Show every turn and token. Default: shortened.")] = False,
    as_json: options.Json = False,
) -> None:
    """Show a trajectory: the tree of turns, and the tokens of each training row."""
    trajectory, near = _find_trajectory(what, data)
    if as_json:
        sys.stdout.buffer.write(trajectory.to_json() + b"\n")
        return
    from towline.runs import view

    console = terminal.console(False)
    decode = _decoder(model, near)
    if decode is None:
        console.print("[dim]tokens are shown as ids; give --model FOLDER to decode them[/]")
    view.render(trajectory, decode, full=full, console=console)


def _find_trajectory(what: str, data: Path) -> tuple[Trajectory, Path]:
    """The trajectory, and the folder that may name its model."""
    path = Path(what)
    if path.is_file():
        return Trajectory.read(path), path.resolve().parent
    stored = data / "trajectories" / f"{what}.arrow"
    if "/" not in what and stored.is_file():
        return Trajectory.read(stored), data
    raise ConfigError(f"{what} is neither a file nor a sealed session in {data}; check --data")


def _decoder(model: Path | None, near: Path) -> Callable[[Any], str] | None:
    from towline.tokens.tokenizer import Tokenizer

    if model is None:
        for folder in (near, near.parent):
            note = folder / "model.json"
            if note.is_file():
                model = Path(json.loads(note.read_text())["folder"])
                break
    if model is None or not (model / "tokenizer.json").is_file():
        return None
    return Tokenizer.load(model).decode
