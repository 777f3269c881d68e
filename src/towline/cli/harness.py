"""`towline harness`: the agent programs that Towline knows, their installs, and whether they are captured."""

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

from towline.cli import common, engines
from towline.cli.loading import options
from towline.config import Settings
from towline.errors import ConfigError
from towline.schema import SandboxKind

if TYPE_CHECKING:
    from towline.harnesses.base import Harness
    from towline.node.harness_check import CheckResult
    from towline.tokens.codec import Codec

app = typer.Typer(
    no_args_is_help=True, help="The agent programs: list them, install them, check that they are captured."
)
Options = Annotated[
    list[str] | None,
    typer.Option("--option", help="An option of the harness, `name=value`; the value may be JSON. Repeatable."),
]
Names = Annotated[list[str], typer.Argument(help="Which; a name of `towline harness list`, or `module:NAME`.")]


@app.command("list")
def list_harnesses(as_json: common.Json = False) -> None:
    """Every harness with its version, its dialects, and whether it is installed."""
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
    for name in ("name", "version", "dialects", "installed", "what it is"):
        table.add_column(name)
    for harness in all_harnesses().values():
        installed = ("yes" if installs.ready(harness) else "no") if harness.install else ""
        table.add_row(harness.name, harness.version, " ".join(harness.dialects), installed, harness.summary)
    common.console(False).print(table)


@app.command()
def install(names: Names, option: Options = None, as_json: common.Json = False) -> None:
    """Install harnesses, pinned and with their own interpreter, once for all sessions. `all` installs every one."""
    from towline.harnesses.install import Installs
    from towline.harnesses.registry import all_harnesses, find_harness

    console = common.console(as_json)
    installs = Installs()
    chosen = (
        [h for h in all_harnesses().values() if h.install]
        if names == ["all"]
        else [find_harness(name) for name in names]
    )
    done = {}
    for harness in (each.configured(options(option or [], each.name)) for each in chosen):
        if harness.install is None:
            console.print(f"{harness.name} needs no install")
            continue
        with console.status(f"installing {harness.name} {harness.version}") as status:
            say = partial(_say, status, harness.name)
            folder = common.run(installs.ensure(harness, say))
        done[harness.name] = str(folder)
        if not as_json:
            console.print(f"[green]{harness.name}[/] {harness.version} in {folder}", highlight=False)
    if as_json:
        print(json.dumps(done))


def _say(status: Status, name: str, line: str) -> None:
    status.update(f"{name}: {common.plain(line)}")


@app.command()
def check(
    names: Names,
    option: Annotated[
        list[str] | None,
        typer.Option(help="An option of the harness, `name=value`; the value may be JSON. Repeatable."),
    ] = None,
    sandbox: Annotated[SandboxKind, typer.Option(help="Where it runs.")] = SandboxKind.BUBBLEWRAP,
    root: Annotated[
        str, typer.Option(help="A root file system to run in. Default: an allow-list of the host's own.")
    ] = "",
    model: common.ModelFolder = None,
    seconds: Annotated[float, typer.Option(help="Longest run.")] = 300.0,
    as_json: common.Json = False,
) -> None:
    """Run harnesses once against a scripted model and say whether every model call was captured.

    Exit status 1 if one was not, or if a harness made none.
    """
    from towline.harnesses.registry import find_harness

    console = common.console(as_json)
    codec = engines.make_codec(Settings.load(None, model={"folder": model}).model, _tokenizer(model, console), console)
    results = []
    for name in names:
        given = options(option or [], name)
        with console.status(f"checking {name}") as status:
            say = partial(_say, status, name)
            work = _check(find_harness(name), codec, sandbox, given, root, seconds, say)
            results.append(common.run(work))
        if not as_json:
            _show(results[-1], console)
    if as_json:
        print(json.dumps([{**asdict(result), "ok": result.ok} for result in results]))
    raise typer.Exit(0 if all(result.ok for result in results) else 1)


def _tokenizer(model: Path | None, console: Console) -> Path:
    """The folder given; else a real tokenizer, if it was fetched; else the tiny model's."""
    from towline import assets

    if model is not None:
        return model
    try:
        return assets.folder() / "tokenizers" / "qwen3"
    except ConfigError:
        return common.tiny(console)


async def _check(
    harness: Harness,
    codec: Codec,
    sandbox: SandboxKind,
    options: dict[str, Any],
    root: str,
    seconds: float,
    say: Callable[[str], None],
) -> CheckResult:
    from towline.harnesses.install import Installs
    from towline.node.harness_check import check as check_harness
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
                options=options,
                root=root,
                seconds=seconds,
                progress=say,
            )
        finally:
            await runtime.close()


def _show(result: CheckResult, console: Console) -> None:
    verdict = "[green]captured[/]" if result.ok else "[red]not captured[/]"
    forks = ", ".join(f"{reason} {count}" for reason, count in result.forks.items())
    console.print(
        f"{verdict} {result.harness} {result.version}: {result.turns} model calls over {result.dialect or 'no dialect'}, "
        f"{result.chains} chains{f' (forks: {forks})' if forks else ''}, exit code {result.exit_code}, "
        f"{result.seconds:.1f} s",
        highlight=False,
    )
    for problem in result.problems:
        console.print(f"  {common.plain(problem)}", highlight=False)
