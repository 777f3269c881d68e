"""What the commands share: options, consoles and progress bars."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from towline.cli.logs import log as log
from towline.config import LogFormat
from towline.schema import ContextPolicy, FailureTally

LogFormatName = Annotated[
    LogFormat | None,
    typer.Option("--log-format", help="`text`, or `json` for one object per line. Default `text`."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
ModelFolder = Annotated[
    Path | None,
    typer.Option(
        "--model",
        help="Model folder in the Hugging Face layout, or a GGUF file for `--engine llamacpp`. "
        "Default: a tiny model of its own.",
    ),
]
EngineName = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="`embedded` (torch, in process), `smollm2` (real words on a laptop), `llamacpp` (a GGUF file), `vllm`, "
        "`sglang`, `openai` (any chat server) or `scripted` (for tests). Default: `embedded`.",
    ),
]
Upstream = Annotated[
    list[str] | None,
    typer.Option(help="URL of the server, for `vllm`, `sglang` and `openai`. Repeatable: replicas of one model."),
]
UpstreamModel = Annotated[str | None, typer.Option(help="The model's name at that server.")]
Script = Annotated[
    Path | None,
    typer.Option(
        "--script",
        help="Replies for `--engine scripted`: Python with `script(request)`, or a JSON list. Default: a fixed tour.",
    ),
]
Config = Annotated[Path | None, typer.Option(help="Settings file. Default ./towline.toml if it is there.")]
Temperature = Annotated[float | None, typer.Option(help="Temperature of every turn, whatever a harness asks.")]
MaxTokens = Annotated[int | None, typer.Option(help="Longest turn, in tokens.", min=1)]

MaxFailed = Annotated[
    float,
    typer.Option(help="Exit with status 1 if infrastructure failed a larger share of sessions.", min=0, max=1),
]


def session(policy: ContextPolicy | None, temperature: float | None, max_tokens: int | None) -> dict[str, Any]:
    """The `session` section that the options of a command make."""
    return {"policy": policy, "sampling": {"temperature": temperature, "max_tokens": max_tokens}}


def exit_on_failures(failures: FailureTally, most: float) -> None:
    """End the command with status 1 and the reason if infrastructure failed a larger share of its sessions than `most`."""
    if failures.exceeds(most):
        Console(stderr=True).print(
            f"[bold red]towline:[/] {plain(failures.message(most))}", highlight=False, soft_wrap=True
        )
        raise typer.Exit(1)


def plain(text: str) -> str:
    return text.replace("[", "\\[")


def console(as_json: bool) -> Console:
    """Where a person reads; with `--json` that is standard error, so that standard output is JSON alone."""
    return Console(stderr=as_json)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    import uvloop

    return uvloop.run(work)


def progress_bar(console: Console) -> Progress:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, transient=True)


@contextlib.contextmanager
def reporting(console: Console, title: str) -> Any:
    """A progress bar as a function of (done, total, what)."""
    with progress_bar(console) as progress:
        bar = progress.add_task(title, total=None)

        def report(done: int, total: int, what: str = "") -> None:
            progress.update(bar, completed=done, total=total, description=f"{title} {plain(what)}".strip())

        yield report


def tiny(console: Console, folder: Path | None = None) -> Path:
    from towline import tiny

    with reporting(console, "tiny model") as report:
        return tiny.create(folder or tiny.default_folder(), progress=report)


def control_key(data: Path) -> tuple[str, str]:
    """The control key and where it came from; a new one is readable by the owner alone."""
    given = os.environ.get("TOWLINE_CONTROL_KEY", "")
    if given:
        return given, "TOWLINE_CONTROL_KEY"
    path = data / "control.key"
    key = "tlc-" + secrets.token_urlsafe(32)
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key + "\n")
    return key, str(path)
