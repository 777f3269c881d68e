"""The demo: one session of a real agent program, shown and proven; then the loop is closed, and the model learns.

It makes the tiny model if it is not there. The model comes with a format warm-up: it knows how calls and answers look, and
nothing about which are right.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from towline import tiny
from towline.demo import agent, session
from towline.demo.agent import AGENT
from towline.demo.training import Training, train

__all__ = ["AGENT", "Training", "run"]


async def run(
    console: Console,
    *,
    folder: Path,
    questions: int = 4,
    seed: int = 0,
    training: Training | None = None,
    as_json: bool = False,
    model: Path | None = None,
) -> int:
    """Run it all and write what comes of it to `folder`; 0 if nothing is off. Without `training`, the first part alone.

    `model` is where the tiny model is or is to be made, by default the user's cache.
    """
    agent.check()
    with _progress(console) as report:
        served = await asyncio.to_thread(tiny.create, model or tiny.default_folder(), progress=report)
    found = await session.show(console, model=served, folder=folder, questions=questions, seed=seed)
    problems: list[str] = found.pop("problems")
    if training is not None:
        console.rule("learning" if not training.permute else "the control: rewards dealt out at random")
        place = folder / (f"control-{seed}" if training.permute else f"seed-{seed}")
        learned = await asyncio.to_thread(train, console, served, place, training, seed)
        problems += learned.pop("problems")
        found["training"] = learned
    if as_json:
        print(json.dumps({"ok": not problems, "problems": problems, **found}))
    return 1 if problems else 0


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[tiny.Progress]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("the tiny model", total=None)

        def report(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=f"making the tiny model, once: {what}")

        yield report
