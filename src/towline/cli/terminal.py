"""What the commands share at the terminal: consoles, progress bars, logging, and the exit status."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from towline.common.redaction import redact
from towline.common.text import inert
from towline.common.untrusted.inert_console import InertConsole
from towline.config import LogOutput
from towline.schema import FailureTally

_RECORD_FIELDS = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {"message", "asctime", "taskName"}
"""What every log record has; all other attributes were given with `extra`."""


def console(as_json: bool) -> Console:
    """The console for people; with `--json` it is standard error, so that standard output holds JSON alone."""
    return InertConsole(stderr=as_json)


def escape_markup(text: str) -> str:
    """The text as rich prints it literally."""
    return escape(text)


def print_error(message: str) -> None:
    InertConsole(stderr=True).print(f"[bold red]towline:[/] {escape_markup(message)}", highlight=False, soft_wrap=True)


def run_async(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end on uvloop."""
    import uvloop

    return uvloop.run(work)


def suspicion_line(counts: Mapping[str, int]) -> str:
    """The suspicion report of a run in one line: sessions by finding."""
    named = ", ".join(f"{escape_markup(name)} {count}" for name, count in counts.items())
    return f"[magenta]Suspicious (sessions by finding):[/] {named}"


def exit_on_failures(failures: FailureTally, most: float) -> None:
    """Exit with status 1 if infrastructure failed a larger share of the sessions than `most`."""
    if failures.exceeds(most):
        print_error(failures.message(most))
        raise typer.Exit(1)


@contextlib.contextmanager
def progress_reporter(console: Console, title: str) -> Iterator[Callable[..., None]]:
    """A progress bar as a function of (done, total, detail)."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(title, total=None)

        def report(done: int, total: int, detail: str = "") -> None:
            progress.update(bar, completed=done, total=total, description=f"{title} {escape_markup(detail)}".strip())

        yield report


class RedactingFormatter(logging.Formatter):
    """Another formatter's lines without keys, and without characters that a terminal acts on."""

    def __init__(self, inner: logging.Formatter):
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        return inert(redact(self._inner.format(record)))


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, and the fields that the record was given."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {name: value for name, value in record.__dict__.items() if name not in _RECORD_FIELDS}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def configure_logging(console: Console, style: LogOutput = "text") -> None:
    """Log warnings to where the console writes. Lines are never wrapped unless it is a terminal."""
    handler: logging.Handler
    if style == "text" and console.is_terminal:
        handler = RichHandler(console=console)
        handler.setFormatter(RedactingFormatter(logging.Formatter("%(message)s")))
    else:
        handler = logging.StreamHandler(console.file)
        text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
        handler.setFormatter(RedactingFormatter(JsonFormatter() if style == "json" else text))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
