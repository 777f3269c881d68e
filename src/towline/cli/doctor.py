"""`towline doctor`: what works here, what does not, and what to do about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from towline.cli import common, engines
from towline.config import Settings
from towline.doctor import model as models
from towline.doctor import place
from towline.doctor.findings import Finding, Level, worst
from towline.errors import TowlineError
from towline.schema import SandboxKind
from towline.view import visible

_MARKS = {
    Level.OK: ("ok", "green"),
    Level.NOTE: ("note", "dim"),
    Level.WARNING: ("warning", "yellow"),
    Level.BROKEN: ("broken", "bold red"),
}


def doctor(
    model: common.ModelFolder = None,
    engine: common.EngineName = None,
    upstream: common.Upstream = None,
    upstream_model: common.UpstreamModel = None,
    script: common.Script = None,
    harness: Annotated[list[str] | None, typer.Option(help="A harness that must be installed. Repeatable.")] = None,
    sandbox: Annotated[SandboxKind | None, typer.Option(help="The sandbox that must work.")] = None,
    data: Annotated[Path | None, typer.Option(help="Data folder of the service.")] = None,
    config: common.Config = None,
    as_json: common.Json = False,
) -> None:
    """Try everything that a run needs: engine, template, sandboxes and their limits, installs, database.

    A short conversation with the model measures what re-tokenising would have changed and what the engine's cache saves.
    Exit status 1 if something that these settings need does not work.
    """
    console = common.console(as_json)
    settings = Settings.load(
        config,
        gateway={"port": 0, "control_port": 0, "journal": "none"},
        model={"folder": model},
        engine=engines.given(engine, upstream, upstream_model),
        node={"sandbox": sandbox},
        server={"data": data},
    )
    common.log(console)
    found = _examine(settings, harness or [], console, script)
    if as_json:
        told = [finding.as_json() for finding in found]
        print(json.dumps({"ok": worst(found) is not Level.BROKEN, "findings": told}))
    else:
        _show(found, console)
    raise typer.Exit(1 if worst(found) is Level.BROKEN else 0)


def _examine(settings: Settings, harness: list[str], console: Console, script: Path | None) -> list[Finding]:
    import tempfile

    from towline.harnesses.install import Installs

    cache = settings.node.cache
    installs = Installs(cache / "harnesses" if cache is not None else None)
    found: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="towline-doctor-") as scratch:
        gateway_settings = settings.gateway.model_copy(update={"data": Path(scratch)})
        here = settings.model_copy(update={"gateway": gateway_settings})
        try:
            gateway, codec = engines.make_gateway(here, Console(quiet=True), script)
        except TowlineError as error:
            found.append(Finding("engine", settings.engine.kind, Level.BROKEN, str(error)))
        else:
            found += models.template(codec)
            with console.status("talking to the model"):
                found += common.run(models.engine(gateway, codec, settings.engine.kind))
    with console.status("trying the sandboxes"):
        found += common.run(place.sandboxes(settings))
    found += place.harnesses(harness, installs)
    found.append(common.run(place.database(settings)))
    found += common.run(place.machine(settings, installs))
    return found


def _show(found: list[Finding], console: Console) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("", "area", "what", "how it stands"):
        table.add_column(name, overflow="fold")
    for one in found:
        word, style = _MARKS[one.level]
        said = Text(visible(one.said))
        if one.fix and one.level is not Level.OK:
            said.append(f"\n{one.fix}", "cyan")
        table.add_row(Text(word, style), one.area, Text(one.name), said)
    console.print(table)
    broken = [one for one in found if one.level is Level.BROKEN]
    warnings = sum(one.level is Level.WARNING for one in found)
    if broken:
        console.print(f"[bold red]{len(broken)} things that are needed do not work[/]")
    else:
        console.print(f"[green]everything that is needed works[/], {warnings} warnings")
