"""What the commands share: consoles, progress bars, and a gateway made from settings."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from towline.config import Settings
from towline.errors import ConfigError

if TYPE_CHECKING:
    from towline.engines.base import Engine
    from towline.gateway.gateway import Gateway
    from towline.tokens.codec import Codec
    from towline.tokens.template import SentinelCodec

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
ModelFolder = Annotated[
    Path | None,
    typer.Option("--model", help="Model folder in the Hugging Face layout. Default: a tiny model of its own."),
]
EngineName = Annotated[
    str | None,
    typer.Option(
        "--engine", help="`embedded` (torch, in process), `openai` (any chat server) or `scripted` (for tests)."
    ),
]
Upstream = Annotated[str | None, typer.Option(help="Base URL of the chat server, for `--engine openai`.")]
UpstreamModel = Annotated[str | None, typer.Option(help="The model's name at that server.")]
Config = Annotated[Path | None, typer.Option(help="Settings file. Default ./towline.toml if it is there.")]
Temperature = Annotated[float | None, typer.Option(help="Temperature of every turn, whatever a harness asks.")]


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


def log(console: Console) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[RichHandler(console=console)])


def model_folder(settings: Settings, console: Console) -> Path:
    """The model to serve; without one, the tiny model, made on first use."""
    if settings.model.folder is not None:
        if not settings.model.folder.is_dir():
            raise ConfigError(f"model folder {settings.model.folder} does not exist")
        return settings.model.folder
    return tiny(console)


def tiny(console: Console, folder: Path | None = None) -> Path:
    from towline import tiny

    with reporting(console, "tiny model") as report:
        return tiny.create(folder or tiny.default_folder(), progress=report)


def make_gateway(settings: Settings, console: Console) -> tuple[Gateway, Codec]:
    from towline.gateway.gateway import Gateway

    if settings.engine.kind == "openai":
        engine, codec = chat_server(settings)
        name = settings.model.name or settings.engine.model
        folder = settings.model.folder
    else:
        folder = model_folder(settings, console)
        sentinel = make_codec(settings, folder, console)
        engine, codec = make_engine(settings, folder, sentinel), sentinel
        name = settings.model.name or folder.name
    made = Gateway(engine, codec, settings.gateway, defaults=settings.session, model=name)
    settings.gateway.data.mkdir(parents=True, exist_ok=True)
    if folder is not None:
        note = {"folder": str(folder.resolve()), "name": name}
        (settings.gateway.data / "model.json").write_text(json.dumps(note))
    return made, codec


def make_codec(settings: Settings, folder: Path, console: Console) -> SentinelCodec:
    from towline.tokens.codec import SpecialText
    from towline.tokens.loading import load_codec

    chosen = settings.model
    with console.status("loading the tokenizer and checking the template"):
        codec = load_codec(
            folder,
            template=chosen.template,
            renderer=chosen.renderer,
            format=chosen.format,
            special_text=SpecialText(chosen.special_text),
        )
    for problem in codec.check.problems:
        console.print(f"[yellow]template:[/] {plain(problem)}", highlight=False)
    return codec


def chat_server(settings: Settings) -> tuple[Engine, Codec]:
    from towline.engines.openai import ChatServerEngine
    from towline.tokens.elsewhere import ElsewhereCodec
    from towline.tokens.tokenizer import Tokenizer

    chosen = settings.engine
    if not chosen.url or not chosen.model:
        raise ConfigError("--engine openai needs --upstream URL and --upstream-model NAME")
    folder = settings.model.folder
    tokenizer = Tokenizer.load(folder) if folder is not None else None
    key = os.environ.get(chosen.key_variable, "")
    engine = ChatServerEngine(chosen.url, chosen.model, api_key=key, tokenizer=tokenizer)
    return engine, ElsewhereCodec(tokenizer or Tokenizer.unknown())


def make_engine(settings: Settings, folder: Path, codec: SentinelCodec) -> Engine:
    chosen = settings.engine
    if chosen.kind == "scripted":
        from towline.engines.scripted import ScriptedEngine

        return ScriptedEngine(codec)
    try:
        from towline.engines.embedded import EmbeddedEngine
    except ImportError as error:
        raise ConfigError("the embedded engine needs torch: pip install 'towline[torch]'") from error
    return EmbeddedEngine(
        folder,
        decode=codec.tokenizer.decode,
        max_batch=chosen.max_batch,
        threads=chosen.threads,
        seed=chosen.seed,
    )


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
