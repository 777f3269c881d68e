"""`towline harness`: list the known agent programs, install them, and check that their model calls are captured."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table

from towline.cli import engines, options, terminal
from towline.cli.tasks import parse_options
from towline.config import Settings
from towline.errors import ConfigError
from towline.schema import SandboxKind

if TYPE_CHECKING:
    from towline.harnesses.base import Harness
    from towline.node.harness_check import HarnessCheckResult
    from towline.tokens.codec import ModelCodec

app = typer.Typer(no_args_is_help=True, help="List, install and check harnesses (the agent programs).")
Names = Annotated[list[str], typer.Argument(help="Names of `towline harness list`, or `module:NAME`.")]


@app.command("list")
def list_harnesses(as_json: options.Json = False) -> None:
    """List every harness with its version, its dialects, and whether it is installed."""
    from towline.harnesses.install import Installs
    from towline.harnesses.registry import all_harnesses

    installs = Installs()
    if as_json:
        rows = [
            {
                "name": harness.name,
                "version": harness.version,
                "dialects": harness.dialects,
                "installed": installs.ready(harness) if harness.install else None,
                "options": dict(harness.options),
                "summary": harness.summary,
            }
            for harness in all_harnesses().values()
        ]
        print(json.dumps(rows, default=str))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("name", "version", "dialects", "installed", "description"):
        table.add_column(name)
    for harness in all_harnesses().values():
        installed = ("yes" if installs.ready(harness) else "no") if harness.install else ""
        table.add_row(harness.name, harness.version, " ".join(harness.dialects), installed, harness.summary)
    terminal.console(False).print(table)


@app.command()
def install(names: Names, option: options.HarnessOptions = None, as_json: options.Json = False) -> None:
    """Install pinned harnesses, each with its own interpreter ("all": every one)."""
    from towline.harnesses.install import Installs
    from towline.harnesses.registry import all_harnesses, find_harness

    console = terminal.console(as_json)
    installs = Installs()
    chosen = (
        [h for h in all_harnesses().values() if h.install]
        if names == ["all"]
        else [find_harness(name) for name in names]
    )
    done = {}
    for harness in (each.configured(parse_options(option or [], each.name)) for each in chosen):
        if harness.install is None:
            console.print(f"{harness.name} needs no install")
            continue
        with console.status(f"installing {harness.name} {harness.version}") as status:
            on_progress = partial(_update_status, status, harness.name)
            folder = terminal.run_async(installs.ensure(harness, on_progress))
        done[harness.name] = str(folder)
        if not as_json:
            console.print(f"[green]{harness.name}[/] {harness.version} in {folder}", highlight=False)
    if as_json:
        print(json.dumps(done))


@app.command()
def lock(
    names: Annotated[list[str] | None, typer.Argument(help="Names of `towline harness list`. Default: all.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Folder to write to. Default: that of the package.")] = None,
    as_json: options.Json = False,
) -> None:
    """Resolve the packages of presets anew and write their locks, with hashes.

    Installs nothing. Without names, the locks of the interpreters are renewed as well.
    """
    from towline.harnesses.locks import data_folder
    from towline.harnesses.locks.renew import TOOLS, renew, write_lock
    from towline.harnesses.registry import all_harnesses, find_harness

    console = terminal.console(as_json)
    target = folder or Path(str(data_folder()))
    done: dict[str, str] = {}
    if not names:
        for name, recipe in TOOLS.items():
            done[name] = str(write_lock(name, recipe, target))
    for harness in [find_harness(name) for name in names] if names else all_harnesses().values():
        with console.status(f"locking {harness.name}"):
            written = renew(harness, target)
        if written is not None:
            done[harness.name] = str(written)
    if as_json:
        print(json.dumps(done))
        return
    for name, file in done.items():
        console.print(f"[green]{name}[/] in {file}", highlight=False)


def _update_status(status: Status, name: str, line: str) -> None:
    status.update(f"{name}: {terminal.escape_markup(line)}")


@app.command()
def check(
    names: Names,
    option: options.HarnessOptions = None,
    sandbox: Annotated[SandboxKind, typer.Option(help="Sandbox to run it in.")] = SandboxKind.BUBBLEWRAP,
    root: Annotated[str, typer.Option(help="Root file system to run in. Default: an allow-list of the host's.")] = "",
    model: options.ModelFolder = None,
    seconds: Annotated[float, typer.Option(help="Timeout of each run, in seconds.")] = 300.0,
    as_json: options.Json = False,
) -> None:
    """Run harnesses against a scripted model; check that every model call is captured.

    Exits with status 1 if a call was not captured, or if a harness made none.
    """
    from towline.harnesses.registry import find_harness

    console = terminal.console(as_json)
    codec = engines.make_codec(Settings.load(None, model={"folder": model}).model, _tokenizer(model, console), console)
    results = []
    for name in names:
        given = parse_options(option or [], name)
        with console.status(f"checking {name}") as status:
            on_progress = partial(_update_status, status, name)
            work = _check(find_harness(name), codec, sandbox, given, root, seconds, on_progress)
            results.append(terminal.run_async(work))
        if not as_json:
            _show(results[-1], console)
    if as_json:
        print(json.dumps([{**asdict(result), "ok": result.ok} for result in results]))
    raise typer.Exit(0 if all(result.ok for result in results) else 1)


def _tokenizer(model: Path | None, console: Console) -> Path:
    """The given folder, or a real tokenizer if it was fetched, or that of the tiny model."""
    from towline import assets

    if model is not None:
        return model
    try:
        return assets.folder() / "tokenizers" / "qwen3"
    except ConfigError:
        return engines.tiny_model(console)


async def _check(
    harness: Harness,
    codec: ModelCodec,
    sandbox: SandboxKind,
    harness_options: dict[str, Any],
    root: str,
    seconds: float,
    on_progress: Callable[[str], None],
) -> HarnessCheckResult:
    from towline.harnesses.install import Installs
    from towline.node.harness_check import check_harness as check_harness
    from towline.sandboxes.registry import make_runtime

    with tempfile.TemporaryDirectory(prefix="towline-check-") as data:
        runtime = make_runtime(sandbox, Path(data) / "sandboxes")
        await runtime.open()
        try:
            return await check_harness(
                harness,
                installs=Installs(),
                runtime=runtime,
                codec=codec,
                data=Path(data) / "gateway",
                options=harness_options,
                root=root,
                seconds=seconds,
                progress=on_progress,
            )
        finally:
            await runtime.close()


def _show(result: HarnessCheckResult, console: Console) -> None:
    verdict = "[green]captured[/]" if result.ok else "[red]not captured[/]"
    forks = ", ".join(f"{reason} {count}" for reason, count in result.forks.items())
    console.print(
        f"{verdict} {result.harness} {result.version}: {result.turns} model calls over {result.dialect or 'no dialect'}, "
        f"{result.chains} chains{f' (forks: {forks})' if forks else ''}, exit code {result.exit_code}, "
        f"{result.seconds:.1f} s",
        highlight=False,
    )
    for problem in result.problems:
        console.print(f"  {terminal.escape_markup(problem)}", highlight=False)
