"""The command line. Each command is a few lines of wiring; the work is in the module it calls.

Every command has `--json` for programs, and says what is wrong in one line, without a traceback, when the cause is the
user's to mend.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from towline.config import Settings
from towline.errors import ConfigError, TowlineError
from towline.schema import ContextPolicy, Trajectory

if TYPE_CHECKING:
    from towline.engines.base import Engine
    from towline.gateway.gateway import Gateway
    from towline.tokens.codec import Codec
    from towline.tokens.template import SentinelCodec

app = typer.Typer(
    name="towline",
    help="Any agent harness, unchanged, as a reinforcement-learning environment with token-exact trajectories.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
audit_app = typer.Typer(no_args_is_help=True, help="Prove what Towline promises.")
bench_app = typer.Typer(no_args_is_help=True, help="Measure what the README's figures come from.")
app.add_typer(audit_app, name="audit")
app.add_typer(bench_app, name="bench")

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
ModelFolder = Annotated[
    Path | None,
    typer.Option("--model", help="Model folder in the Hugging Face layout. Default: a tiny model of its own."),
]


def main() -> None:
    """The `towline` command."""
    try:
        app()
    except TowlineError as error:
        Console(stderr=True).print(f"[bold red]towline:[/] {_plain(str(error))}", highlight=False)
        sys.exit(1)


def _plain(text: str) -> str:
    return text.replace("[", "\\[")


def _console(as_json: bool) -> Console:
    """Where a person reads; with `--json` that is standard error, so that standard output is JSON alone."""
    return Console(stderr=as_json)


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    import uvloop

    return uvloop.run(work)


def _progress(console: Console) -> Progress:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, transient=True)


@contextlib.contextmanager
def _reporting(console: Console, title: str) -> Any:
    """A progress bar as a function of (done, total, what)."""
    with _progress(console) as progress:
        bar = progress.add_task(title, total=None)

        def report(done: int, total: int, what: str = "") -> None:
            progress.update(bar, completed=done, total=total, description=f"{title} {_plain(what)}".strip())

        yield report


@app.command()
def gateway(
    model: ModelFolder = None,
    engine: Annotated[
        str | None,
        typer.Option(help="`embedded` (torch, in process), `openai` (any chat server) or `scripted` (for tests)."),
    ] = None,
    upstream: Annotated[str | None, typer.Option(help="Base URL of the chat server, for `--engine openai`.")] = None,
    upstream_model: Annotated[str | None, typer.Option(help="The model's name at that server.")] = None,
    host: Annotated[str | None, typer.Option(help="Address of the provider routes, for harnesses.")] = None,
    port: Annotated[int | None, typer.Option(help="Their port; 0 takes a free one. Default 8500.")] = None,
    control_host: Annotated[str | None, typer.Option(help="Address of the control routes.")] = None,
    control_port: Annotated[int | None, typer.Option(help="Their port; 0 takes a free one. Default 8501.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of journal and trajectories. Default ./towline-data.")
    ] = None,
    journal: Annotated[
        str | None, typer.Option(help="`group` survives a machine crash, `os` a killed process, `none` neither.")
    ] = None,
    policy: Annotated[ContextPolicy | None, typer.Option(help="Context policy of new sessions.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Temperature of every turn, whatever a harness asks.")
    ] = None,
    template: Annotated[Path | None, typer.Option(help="Chat template to use instead of the folder's own.")] = None,
    renderer: Annotated[str | None, typer.Option(help="`auto`, `sentinel`, or a family of `renderers`.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings file. Default ./towline.toml if it is there.")] = None,
    as_json: Json = False,
) -> None:
    """Serve a model to agents and record every token.

    Point an agent's base URL at the gateway with a session's key, and read its training rows from the control routes.
    The control key is taken from `TOWLINE_CONTROL_KEY`, else made anew and written to `control.key` in the data folder.
    """
    console = _console(as_json)
    session = {"policy": policy, "sampling": {"temperature": temperature} if temperature is not None else None}
    settings = Settings.load(
        config,
        gateway={
            "host": host,
            "port": port,
            "control_host": control_host,
            "control_port": control_port,
            "data": data,
            "journal": journal,
        },
        model={"folder": model, "template": template, "renderer": renderer},
        engine={"kind": engine, "url": upstream, "model": upstream_model},
        session=session,
    )
    _log(console)
    made, codec = _make_gateway(settings, console)
    _run(_serve(made, codec, settings, console, as_json))


def _log(console: Console) -> None:
    import logging

    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[RichHandler(console=console)])


def _model_folder(settings: Settings, console: Console) -> Path:
    """The model to serve; without one, the tiny model, made on first use."""
    if settings.model.folder is not None:
        if not settings.model.folder.is_dir():
            raise ConfigError(f"model folder {settings.model.folder} does not exist")
        return settings.model.folder
    return _tiny(console)


def _tiny(console: Console, folder: Path | None = None) -> Path:
    from towline import tiny

    with _reporting(console, "tiny model") as report:
        return tiny.create(folder or tiny.default_folder(), progress=report)


def _make_gateway(settings: Settings, console: Console) -> tuple[Gateway, Codec]:
    from towline.gateway.gateway import Gateway

    if settings.engine.kind == "openai":
        engine, codec = _chat_server(settings)
        name = settings.model.name or settings.engine.model
        folder = settings.model.folder
    else:
        folder = _model_folder(settings, console)
        codec = _codec(settings, folder, console)
        engine = _engine(settings, folder, codec)
        name = settings.model.name or folder.name
    made = Gateway(engine, codec, settings.gateway, defaults=settings.session, model=name)
    settings.gateway.data.mkdir(parents=True, exist_ok=True)
    if folder is not None:
        note = {"folder": str(folder.resolve()), "name": name}
        (settings.gateway.data / "model.json").write_text(json.dumps(note))
    return made, codec


def _codec(settings: Settings, folder: Path, console: Console) -> SentinelCodec:
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
        console.print(f"[yellow]template:[/] {_plain(problem)}", highlight=False)
    return codec


def _chat_server(settings: Settings) -> tuple[Engine, Codec]:
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


def _engine(settings: Settings, folder: Path, codec: SentinelCodec) -> Engine:
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


def _control_key(data: Path) -> tuple[str, str]:
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


async def _serve(made: Gateway, codec: Codec, settings: Settings, console: Console, as_json: bool) -> None:
    from towline.gateway.server import serving

    key, source = _control_key(settings.gateway.data)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop.set)
    async with serving(made, key) as running:
        if as_json:
            print(json.dumps({"base_url": running.base_url, "control_url": running.control_url, "control_key": source}))
            sys.stdout.flush()
        else:
            restored = len(made.sessions)
            info = made.engine.info
            console.print(
                f"[bold]Towline gateway[/] · {made.model} · {info.name} ({info.capture}) · template {codec.name}"
            )
            console.print(f"  harnesses  {running.base_url}")
            console.print(f"  control    {running.control_url}   (key in {source})")
            if restored:
                console.print(f"  restored   {restored} open sessions")
        await stop.wait()


@app.command()
def trace(
    what: Annotated[str, typer.Argument(help="A trajectory file (.arrow or .json), or a session's id.")],
    data: Annotated[Path, typer.Option(help="Data folder of the gateway, for ids.")] = Path("towline-data"),
    model: Annotated[Path | None, typer.Option(help="Model folder whose tokenizer shows tokens as text.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Show every token.")] = False,
    as_json: Json = False,
) -> None:
    """Show a trajectory: the tree of turns, and each row's tokens by what they are."""
    trajectory, near = _find_trajectory(what, data)
    if as_json:
        sys.stdout.buffer.write(trajectory.to_json() + b"\n")
        return
    from towline import view

    console = Console()
    decode = _decoder(model, near)
    if decode is None:
        console.print("[dim]tokens are shown as ids; --model FOLDER shows them as text[/]")
    view.render(trajectory, decode, full=full, console=console)


def _find_trajectory(what: str, data: Path) -> tuple[Trajectory, Path]:
    """The trajectory, and the folder that may say which model it is of."""
    path = Path(what)
    if path.is_file():
        return Trajectory.read(path), path.resolve().parent
    stored = data / "trajectories" / f"{what}.arrow"
    if "/" not in what and stored.is_file():
        return Trajectory.read(stored), data
    raise ConfigError(f"{what} is neither a file nor a sealed session in {data}")


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


@audit_app.command("fidelity")
def audit_fidelity(
    out: Annotated[Path, typer.Option(help="Folder for rows (Arrow), models and the report.")] = Path("runs/audit"),
    conversations: Annotated[int, typer.Option(help="How many at least.", min=1)] = 300,
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer or model folder of your own.")] = None,
    template: Annotated[Path | None, typer.Option(help="A chat template of your own.")] = None,
    seed: int = 0,
    as_json: Json = False,
) -> None:
    """Run conversations with every harness behaviour and check each trained token with one forward pass."""
    from towline import audit

    console = _console(as_json)
    options = audit.AuditOptions(
        out=out, conversations=conversations, tokenizer=tokenizer, template=template, seed=seed
    )
    with _reporting(console, "audit") as report:
        result = _run(audit.run(options, report))
    if as_json:
        print(json.dumps(result.as_json()))
    else:
        audit.render(result, console)
    raise typer.Exit(0 if result.ok else 1)


@bench_app.command("continue")
def bench_continue(
    repeats: Annotated[int, typer.Option(help="Measurements a point.", min=1)] = 20,
    as_json: Json = False,
) -> None:
    """CPU of the gateway for one continued turn, from a short history to a very long one."""
    from towline.benchmarks import continuing

    result = continuing.run(repeats=repeats)
    if as_json:
        print(json.dumps(result))
    else:
        continuing.render(result, Console())


@bench_app.command("load")
def bench_load(as_json: Json = False) -> None:
    """Turns a CPU second of the gateway under 64 conversations, beside full re-rendering in the same run."""
    from towline.benchmarks import load

    result = load.run()
    if as_json:
        print(json.dumps(result))
    else:
        load.render(result, Console())


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="Where the trajectory is written.")] = Path("runs/demo"),
    questions: Annotated[int, typer.Option(help="Questions the example agent goes through.", min=1)] = 4,
    seed: int = 0,
    as_json: Json = False,
) -> None:
    """Serve the tiny model, run the example agent, show what was recorded and prove it."""
    from towline import demo as demonstration

    raise typer.Exit(
        _run(demonstration.run(_console(as_json), folder=folder, questions=questions, seed=seed, as_json=as_json))
    )


@app.command()
def tiny(
    out: Annotated[Path | None, typer.Option(help="Folder to make. Default: the user's cache.")] = None,
    as_json: Json = False,
) -> None:
    """Make the tiny model: small vocabulary, random weights, a format warm-up of seconds."""
    folder = _tiny(_console(as_json), out)
    print(json.dumps({"folder": str(folder)}) if as_json else folder)


if __name__ == "__main__":
    main()
