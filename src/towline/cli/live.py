"""The live display of a command that runs sessions: the stages they are in, their rewards, the token throughput."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from towline.cli import engines, terminal
from towline.cli.tasks import prepare_tasks
from towline.config import Settings
from towline.errors import TowlineError
from towline.schema import Session, SessionState, Task

if TYPE_CHECKING:
    from towline.gateway.gateway import Gateway
    from towline.node.finished import FinishedSession
    from towline.runs.ledger import Ledger

_STAGES = tuple(state for state in SessionState if not state.terminal)
_COLOURS = {"done": "green", "failed": "red", "cancelled": "yellow", "lost": "red"}
T = TypeVar("T")


class CommandInterrupted(TowlineError):
    """The command was interrupted; the sessions that had ended are kept."""


class SessionsDisplay:
    """Sessions per stage, rewards so far, and the rate at which tokens are sampled."""

    def __init__(self, total: int, gateway: Gateway):
        self.gateway = gateway
        self.states: dict[str, SessionState] = {}
        self.rewards: list[float] = []
        self.ended: Counter[str] = Counter()
        self.sampled = 0
        self.began = time.monotonic()
        self.bar = Progress(
            TextColumn("[bold]sessions"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), transient=True
        )
        self.task = self.bar.add_task("", total=total)

    def changed(self, session: Session) -> None:
        """Take note of a session's new state."""
        if session.state.terminal:
            self.states.pop(session.session_id, None)
        else:
            self.states[session.session_id] = session.state

    def finished(self, one: FinishedSession) -> None:
        """Take note of a sample's end."""
        self.bar.advance(self.task)
        self.ended[one.session.state.value] += 1
        self.sampled += sum(len(turn.sampled) for turn in one.trajectory.turns)
        if one.trajectory.reward is not None and one.trajectory.reward.score is not None:
            self.rewards.append(one.trajectory.reward.score)

    def render(self) -> RenderableType:
        counts = Counter(self.states.values())
        stages = Text("  ")
        for stage in _STAGES:
            stages.append(f"{stage.value} ", "dim").append(f"{counts[stage]}  ", "bold" if counts[stage] else "dim")
        for state, count in sorted(self.ended.items()):
            stages.append(f"{state} {count}  ", _COLOURS.get(state, ""))
        sampled = self.sampled + sum(session.sampled_tokens for session in self.gateway.sessions.values())
        rate = sampled / max(1e-6, time.monotonic() - self.began)
        totals = Text(f"  {sampled:,} tokens sampled, {rate:,.0f}/s")
        if self.rewards:
            totals.append(f"   mean reward {sum(self.rewards) / len(self.rewards):.3f} of {len(self.rewards)} scored")
        return Group(self.bar, stages, totals)


async def run_with_display(
    work: Coroutine[Any, Any, T], display: SessionsDisplay, out: Path, console: Console, *, live: bool, resumes: bool
) -> T:
    """Run the work under the live display; SIGINT and SIGTERM cancel it, and its sessions end in order."""
    running = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, running.cancel)
    with Live(get_renderable=display.render, console=console, refresh_per_second=4, transient=True) as shown:
        if not live:
            shown.stop()
        try:
            return await running
        except asyncio.CancelledError:
            hint = "; run the same command again to resume" if resumes else ""
            raise CommandInterrupted(f"interrupted; finished sessions are in {out}{hint}") from None


@contextlib.contextmanager
def completed_ledger(
    groups: Sequence[Sequence[Task]],
    settings: Settings,
    folder: Path,
    console: Console,
    script: Path | None,
    *,
    live: bool,
) -> Iterator[tuple[Ledger, dict[str, Any]]]:
    """The ledger of a folder with a line for every sample of the tasks, and its recipe; runs what is missing first."""
    from towline.runs import run as runs
    from towline.runs.ledger import Ledger

    prepare_tasks([task for tasks in groups for task in tasks], settings, console)
    terminal.configure_logging(console)
    gateway, codec = engines.make_gateway(settings, console, script)
    recipe = runs.recipe_of(settings, gateway.model, codec.name) | engines.script_recipe(gateway)
    with Ledger(folder, recipe) as ledger:
        display = SessionsDisplay(sum(len(ledger.missing(tasks)) for tasks in groups), gateway)

        async def work() -> None:
            running = runs.complete_ledger(
                gateway, settings, groups, ledger, changed=display.changed, on_progress=display.finished
            )
            await run_with_display(running, display, folder, console, live=live, resumes=True)

        terminal.run_async(work())
        yield ledger, recipe
