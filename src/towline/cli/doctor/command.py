"""`towline doctor`: run every check and show the findings."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from towline.cli import engines, options, terminal
from towline.cli.doctor import Finding, Level, worst
from towline.cli.doctor import engine as engine_checks
from towline.cli.doctor import machine as machine_checks
from towline.common.text import visible
from towline.config import Settings
from towline.errors import TowlineError
from towline.schema import SandboxKind

_MARKS = {
    Level.OK: ("ok", "green"),
    Level.NOTE: ("note", "dim"),
    Level.WARNING: ("warning", "yellow"),
    Level.BROKEN: ("broken", "bold red"),
}


def doctor(
    model: options.ModelFolder = None,
    engine: options.EngineName = None,
    upstream: options.Upstream = None,
    upstream_model: options.UpstreamModel = None,
    script: options.Script = None,
    harness: Annotated[
        list[str] | None, typer.Option(help="Harness that must be installed. Repeatable. Default: none.")
    ] = None,
    sandbox: Annotated[SandboxKind | None, typer.Option(help="Sandbox that must work. Default: bubblewrap.")] = None,
    data: Annotated[Path | None, typer.Option(help="Data folder of the service. Default: ./towline-data.")] = None,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Check engine, template, sandboxes, harness installs, database and machine.

    A short conversation with the model measures what re-tokenizing would change and what the engine's prefix cache
    saves. Exits with status 1 if something that these settings need does not work.
    """
    console = terminal.console(as_json)
    settings = Settings.load(
        config,
        gateway={"port": 0, "control_port": 0, "journal": "none"},
        model={"folder": model},
        engine=engines.engine_overrides(engine, upstream, upstream_model),
        node={"sandbox": sandbox},
        server={"data": data},
    )
    terminal.configure_logging(console)
    found = _run_checks(settings, harness or [], console, script)
    if as_json:
        findings = [finding.as_json() for finding in found]
        print(json.dumps({"ok": worst(found) is not Level.BROKEN, "findings": findings}))
    else:
        _show(found, console)
    raise typer.Exit(1 if worst(found) is Level.BROKEN else 0)


def _run_checks(settings: Settings, harness: list[str], console: Console, script: Path | None) -> list[Finding]:
    from towline.runs.run import harness_installs

    installs = harness_installs(settings)
    found: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="towline-doctor-") as scratch:
        gateway_settings = settings.gateway.model_copy(update={"data": Path(scratch)})
        here = settings.model_copy(update={"gateway": gateway_settings})
        try:
            gateway, codec = engines.make_gateway(here, Console(quiet=True), script)
        except TowlineError as error:
            found.append(Finding("engine", settings.engine.kind, Level.BROKEN, str(error)))
        else:
            found += engine_checks.check_template(codec)
            with console.status("checking the engine"):
                found += terminal.run_async(engine_checks.check_engine(gateway, codec, settings.engine.kind))
    with console.status("checking the sandboxes"):
        found += terminal.run_async(machine_checks.check_sandboxes(settings))
        found.append(terminal.run_async(machine_checks.check_images(settings)))
    found += machine_checks.check_harnesses(harness, installs)
    found.append(terminal.run_async(machine_checks.check_database(settings)))
    found += terminal.run_async(machine_checks.check_machine(settings, installs))
    return found


def _show(found: list[Finding], console: Console) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("", "area", "check", "result"):
        table.add_column(name, overflow="fold")
    for one in found:
        word, style = _MARKS[one.level]
        message = Text(visible(one.message))
        if one.fix and one.level is not Level.OK:
            message.append(f"\n{one.fix}", "cyan")
        table.add_row(Text(word, style), one.area, Text(one.name), message)
    console.print(table)
    broken = [one for one in found if one.level is Level.BROKEN]
    warnings = sum(one.level is Level.WARNING for one in found)
    if broken:
        console.print(f"[bold red]{len(broken)} required check{'s' if len(broken) > 1 else ''} failed[/]")
    else:
        console.print(f"[green]all required checks passed[/], {warnings} warnings")
