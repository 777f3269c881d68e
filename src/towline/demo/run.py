"""Runs the demo: creates the tiny model if needed, shows one session with its proof, then trains."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from towline.demo import registry, session, tiny_model
from towline.demo.training import Training, train


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
    """Run the demo, write its results to `folder`, and return the exit code. Without `training`, only show the session.

    `model` is the tiny model's folder, created if needed; the user's cache by default.
    """
    registry.check_agent()
    with _progress(console) as report:
        served = await asyncio.to_thread(tiny_model.create, model or tiny_model.default_folder(), progress=report)
    result = await session.run_session(console, model=served, folder=folder, questions=questions, seed=seed)
    problems: list[str] = result.pop("problems")
    if training is not None:
        console.rule("training" if not training.permute else "control: rewards shuffled within each group")
        run_folder = folder / (f"control-{seed}" if training.permute else f"seed-{seed}")
        trained = await asyncio.to_thread(train, console, served, run_folder, training, seed)
        problems += trained.pop("problems")
        result["training"] = trained
    if as_json:
        print(json.dumps({"ok": not problems, "problems": problems, **result}))
    return 1 if problems else 0


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[tiny_model.ProgressCallback]:
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
            bar.update(task, completed=done, total=total, description=f"creating the tiny model (once): {what}")

        yield report
