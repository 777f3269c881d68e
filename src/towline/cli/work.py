"""What `generate` and `eval` share: their options, and a ledger that is filled before one's eyes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live

from towline.cli import common, engines
from towline.cli.run import Progressing
from towline.config import Settings
from towline.errors import TowlineError
from towline.schema import ContextPolicy, SandboxKind, Task

if TYPE_CHECKING:
    from towline.gateway.gateway import Gateway
    from towline.ledger import Ledger

Tasks = Annotated[
    list[str],
    typer.Argument(help="Harbor task folders (or folders of them), or JSONL files of tasks.", metavar="TASK…"),
]
Samples = Annotated[int, typer.Option(help="Sessions a task.", min=1)]
Option = Annotated[
    list[str] | None, typer.Option(help="An option of the harness, `name=value`; the value may be JSON. Repeatable.")
]
Sandbox = Annotated[SandboxKind | None, typer.Option(help="Where tasks run that do not say.")]
Concurrency = Annotated[int | None, typer.Option(help="Sessions that run at the same time.", min=1)]
Seconds = Annotated[float | None, typer.Option(help="Longest run of a task that does not say.")]
Policy = Annotated[ContextPolicy | None, typer.Option(help="Context policy of the sessions.")]


class Interrupted(TowlineError):
    """Somebody asked for the command to end; what had finished is kept."""


def settings_of(
    config: Path | None,
    out: Path,
    *,
    model: Path | None,
    engine: str | None,
    upstream: Sequence[str] | None,
    upstream_model: str | None,
    policy: ContextPolicy | None,
    temperature: float | None,
    max_tokens: int | None,
    sandbox: SandboxKind | None,
    concurrency: int | None,
    seconds: float | None,
) -> Settings:
    """Settings of a gateway and a node in this process, whose folder is `out`."""
    return Settings.load(
        config,
        # A session that a crash cut short is run again from its beginning, so there is nothing to keep a journal for.
        gateway={"port": 0, "control_port": 0, "data": out, "journal": "none"},
        model={"folder": model},
        engine=engines.given(engine, upstream, upstream_model),
        session=common.session(policy, temperature, max_tokens),
        node={
            "sandbox": sandbox,
            "run_workers": concurrency,
            "seconds": {"run": seconds} if seconds is not None else None,
        },
    )


async def fill(
    gateway: Gateway,
    settings: Settings,
    groups: Sequence[Sequence[Task]],
    ledger: Ledger,
    console: Console,
    *,
    live: bool,
) -> None:
    """Run what the ledger lacks, with a live display; SIGINT and SIGTERM end it in order."""
    from towline import resuming

    view = Progressing(sum(len(ledger.missing(tasks)) for tasks in groups), gateway)
    work = asyncio.ensure_future(
        resuming.fill(gateway, settings, groups, ledger, changed=view.changed, told=view.finished)
    )
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, work.cancel)
    with Live(get_renderable=view.render, console=console, refresh_per_second=4, transient=True) as display:
        if not live:
            display.stop()
        try:
            await work
        except asyncio.CancelledError:
            told = f"interrupted; what had finished is in {ledger.folder}, and the same command goes on from there"
            raise Interrupted(told) from None
